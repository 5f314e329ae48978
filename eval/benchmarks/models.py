"""Networks whose step is timed, as differences from diffusers' defaults.

Sources are `config.json` on the Hub, or the defaults of diffusers' class where these match the
model. Without CUDA, a tiny network of the same kind replaces one with random weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from diffusers import (
    FluxTransformer2DModel,
    MiniMaxH3Transformer3DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from torch import Tensor, nn

Normal = Callable[..., Tensor]
Inputs = tuple[dict[str, Tensor], dict[str, Any]]

TIMESTEP = 150  # late, where trained attention matters most
TEXT_TOKENS = 77
POOLED_TEXT = 1280  # width of SDXL's second text encoder
SD3_TEXT = 77 + 256  # CLIP's tokens and T5's
FLUX_TEXT = WAN_TEXT = MINIMAX_TEXT = 512
WAN_LATENTS = {480: (21, 60, 104), 720: (21, 90, 160)}  # of 81 frames, by lines
# At 768 lines, by frames: patches of the video, and rows of its sound, at 24 frames and 2 x 40 rows
# per second.
MINIMAX_PATCHES = {124: (37, 24, 42), 345: (102, 24, 42)}
MINIMAX_SOUND = {124: 414, 345: 1150}
# Columns of a tile at the default threshold: mini-sd's levels at 256² and 512² (104 and 90, 413 and
# 444), and mini-sd3 with 4096 tokens (1064), on the six steps of a prompt.
UNET_COLUMNS = {0: 100, 1: 430}
TRANSFORMER_COLUMNS = {0: 1060}


def unet_inputs(config: Mapping[str, Any], side: int, batch: int, normal: Normal) -> Inputs:
    """A UNet's inputs: those that change from call to call, and those that stay.

    Args:
        config: the network's configuration.
        side: side of the image in pixels.
        batch: batch size.
        normal: makes normal numbers of a shape, like `torch.randn`.
    """
    sample = normal(batch, config["in_channels"], side // 8, side // 8)
    tensors = {
        "sample": sample,
        "encoder_hidden_states": normal(batch, TEXT_TOKENS, config["cross_attention_dim"]),
    }
    timestep = torch.full((), TIMESTEP, device=sample.device)
    return tensors, {"timestep": timestep, **added_conditions(config, batch, normal)}


def added_conditions(config: Mapping[str, Any], batch: int, normal: Normal) -> dict[str, Any]:
    """Random `added_cond_kwargs` for SDXL's UNets; nothing for others."""
    if config["addition_embed_type"] != "text_time":
        return {}
    width = config["projection_class_embeddings_input_dim"] - POOLED_TEXT
    conditions = {
        "text_embeds": normal(batch, POOLED_TEXT),
        "time_ids": normal(batch, width // config["addition_time_embed_dim"]),
    }
    return {"added_cond_kwargs": conditions}


def sd3_inputs(config: Mapping[str, Any], side: int, batch: int, normal: Normal) -> Inputs:
    """The same for SD3's transformer."""
    tensors = {
        "hidden_states": normal(batch, config["in_channels"], side // 8, side // 8),
        "encoder_hidden_states": normal(batch, SD3_TEXT, config["joint_attention_dim"]),
        "pooled_projections": normal(batch, config["pooled_projection_dim"]),
    }
    return tensors, {"timestep": TIMESTEP * torch.ones_like(tensors["pooled_projections"][:, 0])}


def flux_inputs(config: Mapping[str, Any], side: int, batch: int, normal: Normal) -> Inputs:
    """The same for Flux."""
    lines = side // 16
    tensors = {
        "hidden_states": normal(batch, lines**2, config["in_channels"]),
        "encoder_hidden_states": normal(batch, FLUX_TEXT, config["joint_attention_dim"]),
        "pooled_projections": normal(batch, config["pooled_projection_dim"]),
    }
    ones = torch.ones_like(tensors["pooled_projections"][:, 0])
    rows, columns = torch.meshgrid(*[torch.arange(lines, device=ones.device)] * 2, indexing="ij")
    image = torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1)
    fixed = {
        "timestep": 0.125 * ones,
        "guidance": 4 * ones,
        "img_ids": image.to(ones.dtype),
        "txt_ids": ones.new_zeros(FLUX_TEXT, 3),
    }
    return tensors, fixed


def wan_inputs(
    config: Mapping[str, Any],
    side: int,
    batch: int,
    normal: Normal,
    latents: Mapping[int, tuple[int, int, int]] = WAN_LATENTS,
) -> Inputs:
    """The same for Wan; `side` are the lines of the video, whose latents have this size."""
    tensors = {
        "hidden_states": normal(batch, config["in_channels"], *latents[side]),
        "encoder_hidden_states": normal(batch, WAN_TEXT, config["text_dim"]),
    }
    return tensors, {
        "timestep": TIMESTEP * torch.ones_like(tensors["encoder_hidden_states"][:, 0, 0])
    }


def minimax_inputs(
    config: Mapping[str, Any],
    frames: int,
    batch: int,
    normal: Normal,
    patches: Mapping[int, tuple[int, int, int]] = MINIMAX_PATCHES,
) -> Inputs:
    """The same for MiniMax-H3, whose sequence is a text, a sound and the video."""
    num_sound, sizes = MINIMAX_SOUND[frames], patches[frames]
    patch_channels = config["in_channels"] * prod(config["patch_size"])
    tensors = {
        "hidden_states": normal(batch, prod(sizes), patch_channels),
        "audio_hidden_states": normal(batch, num_sound, config["audio_in_channels"]),
        "encoder_hidden_states": normal(batch, MINIMAX_TEXT, config["text_dim"]),
    }
    device = tensors["hidden_states"].device
    video = torch.cartesian_prod(*(torch.arange(size, device=device) for size in sizes))
    video[:, 0] += MINIMAX_TEXT  # time goes on where the text ends
    beside = video.new_zeros(MINIMAX_TEXT + num_sound, 3)
    beside[:, 0] = torch.arange(len(beside), device=device)
    rows = torch.arange(len(beside) + len(video), device=device)
    text_rows, sound_rows, video_rows = rows.tensor_split([MINIMAX_TEXT, len(beside)])
    fixed = {
        "timestep": torch.full((1,), TIMESTEP / 1000, device=device),
        "timestep_indices": torch.zeros_like(rows),
        "token_tags": torch.where(rows < MINIMAX_TEXT, 1, torch.where(rows < len(beside), 2, 0)),
        "position_ids": torch.cat([beside, video]),
        "text_indices": text_rows,
        "audio_indices": sound_rows,
        "video_indices": video_rows,
    }
    return tensors, fixed


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model whose network is timed, with random weights.

    Attributes:
        title: title in results.
        kind: diffusers' class.
        config: its arguments.
        inputs: see `unet_inputs`.
        sizes: default sides of the images in pixels, or lines or frames of the videos.
        columns: codewords and keys that a query tile attends to, by level with AVQ.
        batch: 2 for guidance with an empty prompt.
        multiple: a side must be a multiple of it; None if only the default sides are possible.
        part: other arguments, for the few blocks that stand for all.
        times: ratio of all blocks to those of the part.
        tiny: fields of the model that replaces this one without CUDA, with more `config`.
    """

    title: str
    kind: type[nn.Module]
    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[..., Inputs]
    sizes: tuple[int, ...]
    columns: Mapping[int, float]
    batch: int = 2
    multiple: int | None = 64
    part: Mapping[str, Any] = field(default_factory=dict)
    times: float = 1
    tiny: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_unet(self) -> bool:
        return self.kind is UNet2DConditionModel

    def for_device(self, device: torch.device) -> "Model":
        """This model on CUDA, its tiny stand-in elsewhere."""
        if device.type == "cuda" or not self.tiny:
            return self
        config = {**self.config, **self.tiny["config"]}
        return replace(self, title=f"tiny, for {self.title}", **{**self.tiny, "config": config})

    def check_size(self, size: int) -> None:
        """Refuse an impossible size.

        Raises:
            ValueError: `size` is not one of `sizes`, or no multiple of `multiple`.
        """
        if self.multiple is None and size not in self.sizes:
            possible = " or ".join(map(str, self.sizes))
            raise ValueError(f"sizes must be {possible} for {self.title}, but got {size}.")
        if self.multiple is not None and (size < 64 or size % self.multiple):
            raise ValueError(
                f"sizes must be multiples of {self.multiple} from 64 on, but got {size}."
            )

    def build(self, device: torch.device) -> nn.Module:
        """The network in float32, or the part that stands for it."""
        torch.manual_seed(0)
        with device:
            return self.kind(**{**self.config, **self.part})


SD15 = {"sample_size": 64, "cross_attention_dim": 768}
SDXL_TEXT = {
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
}
SDXL = {
    **SDXL_TEXT,
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "projection_class_embeddings_input_dim": 2816,
}
TINY_UNET = {
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
    "attention_head_dim": 2,  # diffusers' name for the number of heads
}
TINY_SDXL = {
    "sample_size": 32,
    "block_out_channels": (16, 32, 64),
    "transformer_layers_per_block": (1, 1, 2),
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": POOLED_TEXT + 6 * 8,
}
MODELS = {
    "sd15": Model(
        title="SD1.5",
        kind=UNet2DConditionModel,
        config=SD15,
        inputs=unet_inputs,
        sizes=(512, 1024, 2048),
        columns=UNET_COLUMNS,
        tiny={"config": {**TINY_UNET, "block_out_channels": (16, 32, 64, 64)}},
    ),
    "sdxl": Model(
        title="SDXL",
        kind=UNet2DConditionModel,
        config=SDXL,
        inputs=unet_inputs,
        sizes=(1024, 2048),
        columns=UNET_COLUMNS,
        tiny={"config": {**TINY_UNET, **TINY_SDXL}},
    ),
}

TINY_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
TINY_LATENT = {"in_channels": 4, "out_channels": 4}
TINY_TEXT = {"joint_attention_dim": 32, "pooled_projection_dim": 16}
TINY_SD3 = {**TINY_HEADS, **TINY_LATENT, **TINY_TEXT, "caption_projection_dim": 32, "num_layers": 4}
TINY_FLUX = {**TINY_HEADS, **TINY_TEXT, "in_channels": 4, "axes_dims_rope": (4, 6, 6)}
TINY_WAN = {**TINY_HEADS, **TINY_LATENT, "text_dim": 16, "freq_dim": 32, "ffn_dim": 64}
TINY_MINIMAX = {
    **{**TINY_HEADS, "in_channels": 4, "audio_in_channels": 4, "text_dim": 16, "hidden_size": 32},
    **{"ffn_dim": 64, "freq_dim": 32, "time_embed_hidden_dim": 32, "time_embed_dim": 32},
    "rope_freq_dim": 2,
}


def _transformer(**fields: Any) -> Model:
    return Model(
        **{"columns": TRANSFORMER_COLUMNS, "multiple": 16, "sizes": (1024, 2048), **fields}
    )


MODELS |= {
    "sd35-medium": _transformer(
        title="SD3.5-medium",
        kind=SD3Transformer2DModel,
        config={  # stabilityai/stable-diffusion-3.5-medium
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "dual_attention_layers": tuple(range(13)),
            "pos_embed_max_size": 384,
            "qk_norm": "rms_norm",
        },
        inputs=sd3_inputs,
        part={"num_layers": 11, "dual_attention_layers": tuple(range(6))},
        times=24 / 11,
        tiny={
            "config": {**TINY_SD3, "dual_attention_layers": (0, 1)},
            "part": {"num_layers": 2, "dual_attention_layers": (0,)},
            "times": 2,
        },
    ),
    "flux": _transformer(
        title="Flux",
        kind=FluxTransformer2DModel,
        config={"guidance_embeds": True},  # black-forest-labs/FLUX.1-dev
        inputs=flux_inputs,
        batch=1,
        part={"num_layers": 1, "num_single_layers": 2},
        times=19,
        tiny={"config": {**TINY_FLUX, "num_layers": 2, "num_single_layers": 4}, "times": 2},
    ),
    "wan": _transformer(
        title="one block of Wan 14B",
        kind=WanTransformer3DModel,
        config={"num_layers": 1},  # Wan-AI/Wan2.1-T2V-14B-Diffusers: the defaults, one block of 40
        inputs=wan_inputs,
        batch=1,
        sizes=tuple(WAN_LATENTS),
        multiple=None,
        tiny={
            "config": TINY_WAN,
            "inputs": partial(wan_inputs, latents={480: (3, 8, 12), 720: (3, 12, 20)}),
        },
    ),
    "minimax-h3": _transformer(
        title="one block of MiniMax-H3",
        kind=MiniMaxH3Transformer3DModel,
        config={"num_layers": 1, "num_refiner_layers": 0},  # the defaults have 50 blocks
        inputs=minimax_inputs,
        batch=1,
        sizes=tuple(MINIMAX_PATCHES),
        multiple=None,
        tiny={
            "config": TINY_MINIMAX,
            "inputs": partial(minimax_inputs, patches={124: (3, 4, 6), 345: (5, 4, 6)}),
        },
    ),
}
