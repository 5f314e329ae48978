"""`Encoder`: latents and text states of images and captions."""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

# Configuration entries that do not affect the output.
NEUTRAL = ("architectures", "dtype", "transformers_version")


class Encoder:
    """A frozen VAE and text encoder. On CUDA, float32 parts run under float16 autocast.

    Args:
        vae: the VAE, on the device of the encoded batches.
        text_encoder: text encoder on the same device.
        tokenizer: tokenizer of the text encoder.
    """

    def __init__(
        self, vae: AutoencoderKL, text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer
    ) -> None:
        self.vae = vae
        self.text_encoder = text_encoder
        self.tokenizer = tokenizer

    @property
    def device(self) -> torch.device:
        """The device of encoded batches."""
        return self.vae.device

    @torch.no_grad()
    def encode(self, images: Tensor, captions: list[str]) -> dict[str, Tensor]:
        """Encode images, and captions padded or truncated to the tokenizer's maximum length.

        Args:
            images: (B, 3, S, S) uint8.
            captions: B texts.

        Returns:
            Two float32 tensors on `device`: `moments` (B, 2C, h, w), mean and log variance of the
            latents before scaling by `vae.config.scaling_factor`, and `text_states` (B, tokens,
            channels), the last hidden states of the text encoder.
        """
        pixels = images.to(self.device, non_blocking=True).to(self.vae.dtype) / 127.5 - 1
        ids = self.tokenizer(
            captions,
            padding="max_length",
            max_length=self.tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        ).input_ids.to(self.device)
        with self._half(self.vae):
            moments = self.vae.encode(pixels).latent_dist.parameters
        with self._half(self.text_encoder):
            text_states = self.text_encoder(ids)[0]
        encoded = {"moments": moments, "text_states": text_states}
        return {name: value.float().contiguous() for name, value in encoded.items()}

    def fingerprint(self) -> dict[str, str]:
        """Return digests of weights and configurations; encoders with equal digests are equal."""
        tokens = json.loads(self.tokenizer.backend_tokenizer.to_str())
        for state in ("truncation", "padding"):  # set by the last call
            del tokens[state]
        tokens["model_max_length"] = self.tokenizer.model_max_length
        return {
            "vae": module_digest(self.vae, self.vae.config),
            "text_encoder": module_digest(self.text_encoder, self.text_encoder.config.to_dict()),
            "tokenizer": hashlib.sha256(json.dumps(tokens, sort_keys=True).encode()).hexdigest(),
        }

    def _half(self, part: nn.Module) -> contextlib.AbstractContextManager:
        enabled = self.device.type == "cuda" and part.dtype == torch.float32
        return torch.autocast(self.device.type, torch.float16, enabled=enabled)


def module_digest(module: nn.Module, config: Mapping[str, Any]) -> str:
    """Return a digest of the weights in memory and of the configuration."""
    relevant = {
        key: value
        for key, value in config.items()
        if not key.startswith("_") and key not in NEUTRAL
    }
    digest = hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode())
    for name, value in sorted(module.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
