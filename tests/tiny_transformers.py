"""Real diffusers transformers at tiny size with random weights, and fixed inputs for them."""

import inspect
from functools import partial
from pathlib import Path

import diffusers
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    LTXVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from tiny import quiet, sdxl_text_encoder, tiny_tokenizer
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from avq_diffusers import AVQConfig
from avq_diffusers.mini.loading import shared_parts
from distill.pretrain.export import make_sd3_pipeline, save_sd3

CONFIG = AVQConfig.parse("M4P2C2", query_tile=16)
EXACT = AVQConfig.parse("M4C2T0", query_tile=16)
NUM_TEXT = 24
HEADS = {"num_attention_heads": 2, "attention_head_dim": 64}


FLUX3 = getattr(diffusers, "Flux3Transformer2DModel", None)  # None before diffusers 0.42

# What each class needs beside `HEADS`. SD3.5-medium has query and key norms, and a second attention
# in its first blocks.
TEXT, POOLED = {"joint_attention_dim": 32}, {"pooled_projection_dim": 64}
LATENTS = {"in_channels": 4, "out_channels": 4}
TOKENS = TEXT | {"in_channels": 4, "num_layers": 1, "num_single_layers": 1}
SIZES = {
    SD3Transformer2DModel: {
        **{"sample_size": 32, "patch_size": 2, "num_layers": 3, "caption_projection_dim": 128},
        **{"dual_attention_layers": (0, 1), "qk_norm": "rms_norm", **LATENTS, **TEXT, **POOLED},
    },
    FluxTransformer2DModel: {
        **{**TOKENS, "num_single_layers": 2, "axes_dims_rope": [16, 24, 24], **POOLED},
    },
    Flux2Transformer2DModel: {**TOKENS, "axes_dims_rope": [16] * 4},
    FLUX3: {**TOKENS, "cond_in_channels": 4, "axes_dims_rope": (16,) * 4},
    QwenImageTransformer2DModel: {
        **{"num_layers": 2, "axes_dims_rope": (16, 24, 24), **LATENTS, **TEXT},
    },
    WanTransformer3DModel: {
        **{"text_dim": 32, "freq_dim": 32, "ffn_dim": 64, "num_layers": 2, "rope_max_seq_len": 64},
        **LATENTS,
    },
    LTXVideoTransformer3DModel: {
        **{"cross_attention_dim": 128, "num_layers": 2, "caption_channels": 32, **LATENTS},
    },
}


def tiny_transformer(cls, **overrides):
    torch.manual_seed(0)
    return choosy(cls(**HEADS | SIZES[cls] | overrides))


sd3_transformer = partial(tiny_transformer, SD3Transformer2DModel)
flux_transformer = partial(tiny_transformer, FluxTransformer2DModel)
flux2_transformer = partial(tiny_transformer, Flux2Transformer2DModel)
flux3_transformer = partial(tiny_transformer, FLUX3)
qwen_transformer = partial(tiny_transformer, QwenImageTransformer2DModel)
wan_transformer = partial(tiny_transformer, WanTransformer3DModel)
ltx_transformer = partial(tiny_transformer, LTXVideoTransformer3DModel)


def z_transformer() -> ZImageTransformer2DModel:
    torch.manual_seed(0)
    sizes = {"dim": 128, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
    axes = {"axes_dims": [16, 24, 24], "axes_lens": [256, 64, 64]}
    return choosy(ZImageTransformer2DModel(in_channels=4, cap_feat_dim=32, **sizes, **axes))


def choosy(model):
    """The model, its queries and keys so large that attention is no average."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".norm_q." in name or ".norm_k." in name:
                weight.mul_(2)
    return model.eval()


def position_ids(height: int, width: int, frame: int = 0, axes: int = 3) -> Tensor:
    """Flux's positions of an image."""
    ids = torch.zeros(height, width, axes)
    ids[..., 0] = frame
    ids[..., 1] = torch.arange(height)[:, None]
    ids[..., 2] = torch.arange(width)
    return ids.flatten(0, 1)


def inputs(model, height: int = 8, width: int = 12, frames: int = 3, batch: int = 2) -> dict:
    """Arguments of `forward` for a grid of height x width tokens, or of as many per frame."""
    generator = torch.Generator().manual_seed(2)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    text, half = random(batch, NUM_TEXT, 32), torch.full((batch,), 0.5)
    tokens, pooled = random(batch, height * width, 4), random(batch, 64)
    latents, training = (2 * height, 2 * width), {"timestep": 1000 * half}
    own = {
        SD3Transformer2DModel: {"hidden_states": random(batch, 4, *latents), **training},
        FluxTransformer2DModel: {
            "img_ids": position_ids(height, width),
            "txt_ids": torch.zeros(NUM_TEXT, 3),
        },
        Flux2Transformer2DModel: {
            "guidance": half,
            "img_ids": position_ids(height, width, axes=4).expand(batch, -1, -1),
            "txt_ids": torch.zeros(batch, NUM_TEXT, 4),
        },
        FLUX3: {
            "img_ids": position_ids(height, width, axes=4),
            "txt_ids": torch.zeros(NUM_TEXT, 4),
        },
        QwenImageTransformer2DModel: {"img_shapes": [[(1, height, width)]] * batch},
        ZImageTransformer2DModel: {
            "x": [random(4, 1, *latents) for _ in range(batch)],
            "t": half,
            "cap_feats": list(text),
        },
        WanTransformer3DModel: {"hidden_states": random(batch, 4, frames, *latents), **training},
        LTXVideoTransformer3DModel: {
            "hidden_states": random(batch, frames * height * width, 4),
            "encoder_attention_mask": torch.ones(batch, NUM_TEXT),
            "num_frames": frames,
            "height": height,
            "width": width,
            **training,
        },
    }
    common = {
        "hidden_states": tokens,
        "encoder_hidden_states": text,
        "timestep": half,
        "pooled_projections": pooled,
    }
    known = inspect.signature(model.forward).parameters
    return {name: x for name, x in common.items() if name in known} | own[type(model)]


def predict(model, height: int = 8, width: int = 12, batch: int = 2, **overrides) -> Tensor:
    """The output for fixed inputs."""
    with torch.no_grad():
        output = model(**inputs(model, height, width, batch=batch) | overrides, return_dict=False)
    return torch.stack(output[0]) if isinstance(output[0], list) else output[0]


def tiny_vae(latent_channels: int = 4) -> AutoencoderKL:
    """Scales by 2."""
    torch.manual_seed(1)
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=latent_channels,
        shift_factor=0.1,
    ).eval()


def t5_encoder() -> T5EncoderModel:
    torch.manual_seed(2)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5EncoderModel(T5Config(vocab_size=len(tiny_tokenizer()), **sizes)).eval()


def sd3_pipe(cls=StableDiffusion3Pipeline, **components):
    """SD3's pipeline with its three text encoders."""
    tokenizer = tiny_tokenizer()
    components = {
        "transformer": sd3_transformer(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": tiny_vae(),
        "text_encoder": sdxl_text_encoder(CLIPTextModelWithProjection, 16),
        "tokenizer": tokenizer,
        "text_encoder_2": sdxl_text_encoder(CLIPTextModelWithProjection, 16),
        "tokenizer_2": tokenizer,
        "text_encoder_3": t5_encoder(),
        "tokenizer_3": tokenizer,
        **components,
    }
    return quiet(cls(**components))


def flux_pipe(cls=FluxPipeline, **components):
    tokenizer = tiny_tokenizer()
    components = {
        "transformer": flux_transformer(in_channels=16),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "vae": tiny_vae(),
        "text_encoder": sdxl_text_encoder(CLIPTextModel, 64),
        "tokenizer": tokenizer,
        "text_encoder_2": t5_encoder(),
        "tokenizer_2": tokenizer,
        **components,
    }
    return quiet(cls(**components))


def draw(pipe, **arguments) -> Tensor:
    """The latents of a one-step image of 8 x 12 tokens."""
    defaults = {
        "height": 32,
        "width": 48,
        "num_inference_steps": 1,
        "max_sequence_length": 8,
        "output_type": "latent",
    }
    generator = torch.Generator().manual_seed(0)
    return pipe("a red fox", generator=generator, **defaults | arguments).images


def save_tiny_mini_sd3(folder: Path) -> None:
    """Save it in the form of mini-sd3, for images of 64 x 64 pixels and up to twice that side."""
    sizes = {"sample_size": 16, "num_layers": 2, "attention_head_dim": 16}
    sizes |= {"joint_attention_dim": 384, "caption_projection_dim": 32}
    sizes |= {"pooled_projection_dim": 384, "pos_embed_max_size": 16}
    transformer = sd3_transformer(**sizes, dual_attention_layers=(0,))
    for name, parameter in transformer.named_parameters():
        if name.endswith("linear.bias"):  # gates that let attention act
            parameter.data.add_(1)
    save_sd3(make_sd3_pipeline(transformer, shared_parts(), 3.0), folder)
