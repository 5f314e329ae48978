"""Real diffusers transformers at tiny size with random weights, and fixed inputs for them: a row
for each class."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    StableDiffusion3Pipeline,
)
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina
from tiny import quiet, sdxl_text_encoder, tiny_tokenizer
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from avq_diffusers import AVQConfig
from avq_diffusers.mini.loading import shared_parts
from distill.pretrain.export import make_sd3_pipeline, save_sd3

CONFIG = AVQConfig.parse("M4P2C2", query_tile=16)
EXACT = AVQConfig.parse("M4C2T0", query_tile=16)
BATCH, FRAMES, NUM_TEXT, NUM_SOUND = 2, 3, 24, 8
FLUX3 = getattr(diffusers, "Flux3Transformer2DModel", None)  # None before diffusers 0.42

# What a class gets of these is what it has an argument for.
SIZES = {
    **{"num_attention_heads": 2, "attention_head_dim": 64, "hidden_size": 128},
    **{"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1},
    **{"num_key_value_heads": 1, "num_kv_heads": 1, "mlp_ratio": 1.0},
    **{"ffn_dim": 64, "intermediate_size": 64, "freq_dim": 32, "time_embed_dim": 16},
    **{"in_channels": 4, "out_channels": 4, "audio_in_channels": 4},
    **{"text_dim": 32, "text_embed_dim": 32, "joint_attention_dim": 32, "caption_channels": 32},
    **{"cross_attention_dim": 128, "caption_projection_dim": 128, "pooled_projection_dim": 64},
    **{"axes_dims_rope": (16, 24, 24), "rope_axes_dim": (16, 24, 24), "rope_max_seq_len": 64},
    **{"sample_size": 16, "sample_height": 16, "sample_width": 24, "pos_embed_max_size": 16},
}


# What a grid's tokens are made of, after the batch.


def tokens(height: int, width: int) -> tuple[int, ...]:
    return height * width, 4


def latents(height: int, width: int) -> tuple[int, ...]:
    return 4, 2 * height, 2 * width


def video_tokens(height: int, width: int) -> tuple[int, ...]:
    return FRAMES * height * width, 4


def video(height: int, width: int) -> tuple[int, ...]:
    return 4, FRAMES, 2 * height, 2 * width


def frames_first(height: int, width: int) -> tuple[int, ...]:
    return FRAMES, 4, 2 * height, 2 * width


def channels_last(height: int, width: int) -> tuple[int, ...]:
    return FRAMES, 2 * height, 2 * width, 4


# Further arguments for a grid, from a function that draws a batch.
Further = Callable[[Callable[..., Tensor], int, int], dict[str, Any]]


class Row(NamedTuple):
    """A class of transformers.

    Attributes:
        shape: of `hidden_states` without the batch, for a grid.
        further: arguments of a call that others do not need, or not so.
        sizes: what the class needs beside `SIZES`.
    """

    shape: Callable[[int, int], tuple[int, ...]]
    further: Further
    sizes: dict[str, Any]


def row(
    shape: Callable[[int, int], tuple[int, ...]], further: Further = lambda *_: {}, **sizes: Any
) -> Row:
    return Row(shape, further, sizes)


def padding(length: int = NUM_TEXT, before: int = 0, after: int = 0) -> Tensor:
    """Of texts, the second of which is half as long, with other tokens."""
    mask = torch.arange(length) < torch.tensor([length, length // 2])[:, None]
    return nn.functional.pad(mask, (before, after), value=True)


def position_ids(height: int, width: int, frame: int = 0, axes: int = 3) -> Tensor:
    """Flux's positions of an image."""
    ids = torch.zeros(height, width, axes)
    ids[..., 0] = frame
    ids[..., 1] = torch.arange(height)[:, None]
    ids[..., 2] = torch.arange(width)
    return ids.flatten(0, 1)


def four_axes(random, height: int, width: int) -> dict[str, Any]:
    ids = {"img_ids": position_ids(height, width, axes=4), "txt_ids": torch.zeros(NUM_TEXT, 4)}
    return {"guidance": torch.full((BATCH,), 0.5), **ids}


def flux2(random, height: int, width: int) -> dict[str, Any]:
    arguments = four_axes(random, height, width)
    return {name: x if x.ndim < 2 else x.expand(BATCH, -1, -1) for name, x in arguments.items()}


def z_image(random, height: int, width: int) -> dict[str, Any]:
    return {
        "x": [*random(4, 1, 2 * height, 2 * width)],
        "t": torch.full((BATCH,), 0.5),
        "cap_feats": [*random(NUM_TEXT, 32)],
    }


def glm(random, height: int, width: int) -> dict[str, Any]:
    prior = torch.zeros(BATCH, height * width, dtype=torch.long)
    return {"prior_token_id": prior, "prior_token_drop": prior > 0}


def kandinsky5(random, height: int, width: int) -> dict[str, Any]:
    return {
        "visual_rope_pos": [torch.arange(size) for size in (FRAMES, height, width)],
        "text_rope_pos": torch.arange(NUM_TEXT),
    }


def hunyuan_dit(random, height: int, width: int) -> dict[str, Any]:
    return {
        "encoder_hidden_states_t5": random(7, 32),
        "text_embedding_mask": torch.ones(BATCH, NUM_TEXT),
        "text_embedding_mask_t5": torch.ones(BATCH, 7),
        "image_rotary_emb": (random(height * width, 64)[0], random(height * width, 64)[0]),
    }


def lumina_next(random, height: int, width: int) -> dict[str, Any]:
    return {
        "encoder_mask": padding(),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(64, 16, 16),
        "cross_attention_kwargs": {},
    }


def krea2(random, height: int, width: int) -> dict[str, Any]:
    ids = torch.cat([torch.zeros(NUM_TEXT, 3), position_ids(height, width)])
    return {"encoder_hidden_states": random(NUM_TEXT, 2, 32), "position_ids": ids}


def hidream(random, height: int, width: int) -> dict[str, Any]:
    return {
        "encoder_hidden_states_t5": random(NUM_TEXT, 32),
        "encoder_hidden_states_llama3": torch.stack([random(NUM_TEXT, 16), random(NUM_TEXT, 16)]),
        "pooled_embeds": random(32),
        "timesteps": torch.full((BATCH,), 0.5),
        "img_ids": None,
    }


def ideogram(random, height: int, width: int) -> dict[str, Any]:
    ids = torch.cat([torch.arange(NUM_TEXT)[:, None].expand(-1, 3), position_ids(height, width)])
    num_tokens = len(ids)
    marks = torch.where(torch.arange(num_tokens) < NUM_TEXT, 3, 2)
    return {
        "hidden_states": random(num_tokens, 4),
        "encoder_hidden_states": random(num_tokens, 32),
        "position_ids": ids.long().expand(BATCH, -1, -1),
        "segment_ids": torch.ones(BATCH, num_tokens, dtype=torch.long),
        "indicator": marks.expand(BATCH, -1),
    }


def minimax(random, height: int, width: int) -> dict[str, Any]:
    """A text, a keyframe, sound and the video."""
    frame = height * width
    starts = [0, NUM_TEXT, NUM_TEXT + frame, NUM_TEXT + frame + NUM_SOUND]
    num_tokens = starts[-1] + FRAMES * frame
    grid = torch.cartesian_prod(*(torch.arange(size) for size in (FRAMES, height, width))).float()
    rows = torch.arange(num_tokens)
    is_video = (rows >= starts[3]) | ((rows >= starts[1]) & (rows < starts[2]))
    return {
        "hidden_states": random(int(is_video.sum()), 16),
        "timestep": torch.tensor([0.5]),
        "timestep_indices": 0 * rows,
        "token_tags": 0 * rows,
        "position_ids": torch.cat([torch.zeros(num_tokens - len(grid), 3), grid / 4]),
        "video_indices": rows[is_video],
        "audio_indices": rows[starts[2] : starts[3]],
        "text_indices": rows[:NUM_TEXT],
    }


def mochi(random, height: int, width: int) -> dict[str, Any]:
    """One video: its layers call attention for each."""
    return {
        "hidden_states": random(*video(height, width))[:1],
        "encoder_hidden_states": random(NUM_TEXT, 32)[:1],
        "encoder_attention_mask": torch.ones(1, NUM_TEXT, dtype=torch.bool),
        "timestep": torch.tensor([0.5]),
    }


def helios(random, height: int, width: int) -> dict[str, Any]:
    times = torch.arange(FRAMES + 1).expand(BATCH, -1)
    return {
        "latents_history_short": random(4, 1, 2 * height, 2 * width),
        "indices_latents_history_short": times[:, :1],
        "indices_hidden_states": times[:, 1:],
    }


PIXART = {"norm_type": "ada_norm_single", "norm_elementwise_affine": False}
PIXART |= {"activation_fn": "gelu-approximate"}
COGVIDEO = {"max_text_seq_length": NUM_TEXT, "sample_frames": 9}
COGVIEW = {"condition_dim": 8}
KANDINSKY = {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 32, "in_text_dim2": 64}
KANDINSKY |= {"time_dim": 32, "model_dim": 128, "ff_dim": 64, "axes_dims": (16, 24, 24)}
KANDINSKY |= {"num_text_blocks": 1, "num_visual_blocks": 2}

ROWS = {
    # SD3.5-medium has norms of queries and keys, and a second attention in its first blocks.
    "SD3Transformer2DModel": row(
        latents,
        **{"sample_size": 32, "pos_embed_max_size": 96, "num_layers": 3},
        **{"dual_attention_layers": (0, 1), "qk_norm": "rms_norm"},
    ),
    "FluxTransformer2DModel": row(tokens, num_single_layers=2, out_channels=None),
    "Flux2Transformer2DModel": row(tokens, flux2, axes_dims_rope=(16,) * 4),
    "Flux3Transformer2DModel": row(tokens, four_axes, cond_in_channels=4, axes_dims_rope=(16,) * 4),
    "QwenImageTransformer2DModel": row(tokens, num_layers=2),
    "ZImageTransformer2DModel": row(
        latents,
        z_image,
        **{"dim": 128, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2},
        **{"axes_dims": [16, 24, 24], "axes_lens": [256, 64, 64], "cap_feat_dim": 32},
    ),
    "WanTransformer3DModel": row(video, num_layers=2),
    "LTXVideoTransformer3DModel": row(video_tokens, num_layers=2),
    "ChromaTransformer2DModel": row(
        tokens, approximator_num_channels=8, approximator_hidden_dim=8, approximator_layers=1
    ),
    "BriaTransformer2DModel": row(tokens, pooled_projection_dim=None),
    "BriaFiboTransformer2DModel": row(
        tokens,
        lambda random, *_: {"text_encoder_layers": [random(NUM_TEXT, 16)] * 2},
        text_encoder_dim=16,
    ),
    "LongCatImageTransformer2DModel": row(tokens),
    "OvisImageTransformer2DModel": row(tokens),
    "NucleusMoEImageTransformer2DModel": row(tokens, moe_enabled=False, capacity_factors=[1.0]),
    "LTX2VideoTransformer3DModel": row(
        video_tokens,
        **{"audio_out_channels": 4, "audio_num_attention_heads": 2},
        **{"audio_attention_head_dim": 32, "audio_cross_attention_dim": 64},
    ),
    "WanVACETransformer3DModel": row(
        video,
        lambda random, height, width: {
            "control_hidden_states": random(8, FRAMES, 2 * height, 2 * width)
        },
        **{"vace_layers": [0], "vace_in_channels": 8},
    ),
    "ChronoEditTransformer3DModel": row(video),
    "SkyReelsV2Transformer3DModel": row(video),
    "AnyFlowTransformer3DModel": row(
        frames_first,
        lambda random, *_: {"timestep": random(FRAMES), "r_timestep": random(FRAMES)},
    ),
    "CosmosTransformer3DModel": row(
        video, adaln_lora_dim=8, concat_padding_mask=False, extra_pos_embed_type=None
    ),
    "AllegroTransformer3DModel": row(
        video,
        lambda random, *_: {"encoder_hidden_states": random(1, NUM_TEXT, 32)},
        **PIXART | {"sample_frames": 3},
    ),
    "PixArtTransformer2DModel": row(latents, **PIXART, use_additional_conditions=False),
    "LatteTransformer3DModel": row(
        video,
        lambda *_: {"encoder_attention_mask": None},  # of a batch of frames
        **PIXART | {"patch_size": 2, "video_length": FRAMES},
    ),
    "HunyuanDiT2DModel": row(
        latents,
        hunyuan_dit,
        **{"num_layers": 2, "patch_size": 2},
        **{"cross_attention_dim": 32, "cross_attention_dim_t5": 32},
        **{"text_len": NUM_TEXT, "text_len_t5": 7, "use_style_cond_and_image_meta_size": False},
    ),
    "LuminaNextDiT2DModel": row(latents, lumina_next, num_layers=2, cross_attention_dim=32),
    "Kandinsky5Transformer3DModel": row(channels_last, kandinsky5, **KANDINSKY),
    "CogVideoXTransformer3DModel": row(frames_first, num_layers=2, **COGVIDEO),
    "ConsisIDTransformer3DModel": row(frames_first, **COGVIDEO, is_train_face=False),
    "CogView3PlusTransformer2DModel": row(latents, **COGVIEW),
    "CogView4Transformer2DModel": row(latents, **COGVIEW, rope_axes_dim=(32, 32)),
    "GlmImageTransformer2DModel": row(latents, glm, **COGVIEW, prior_vq_quantizer_codebook_size=16),
    "PRXTransformer2DModel": row(
        latents, context_in_dim=32, num_heads=2, depth=2, axes_dim=[32, 32]
    ),
    "AuraFlowTransformer2DModel": row(
        latents, num_mmdit_layers=1, num_single_dit_layers=1, pos_embed_max_size=256
    ),
    "EasyAnimateTransformer3DModel": row(
        video,
        lambda random, *_: {"encoder_hidden_states_t5": random(5, 16)},
        **{"num_layers": 2, "mmdit_layers": 1, "patch_size": 2},
        **{"text_embed_dim_t5": 16, "add_norm_text_encoder": False},
    ),
    "Krea2Transformer2DModel": row(
        tokens,
        krea2,
        **{"timestep_embed_dim": 16, "text_hidden_dim": 32, "text_intermediate_size": 32},
        **{"text_num_attention_heads": 2, "text_num_key_value_heads": 2, "num_text_layers": 2},
        **{"num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1},
    ),
    "HunyuanVideoTransformer3DModel": row(video, guidance_embeds=False),
    "HunyuanVideo15Transformer3DModel": row(
        video,
        lambda random, *_: {
            "encoder_hidden_states_2": random(6, 16),
            "encoder_attention_mask_2": padding(6),
            "image_embeds": torch.zeros(BATCH, 5, 8),
        },
        **{"num_layers": 2, "patch_size": 2, "text_embed_2_dim": 16, "image_embed_dim": 8},
    ),
    "HunyuanImageTransformer2DModel": row(latents, patch_size=(2, 2), rope_axes_dim=(32, 32)),
    "MotifVideoTransformer3DModel": row(video, num_decoder_layers=0),
    "ErnieImageTransformer2DModel": row(
        latents,
        lambda random, *_: {
            "text_bth": random(NUM_TEXT, 32),
            "text_lens": torch.tensor([NUM_TEXT] * BATCH),
        },
        **{"patch_size": 2, "ffn_hidden_size": 64, "text_in_dim": 32},
    ),
    "Lumina2Transformer2DModel": row(
        latents,
        **{"num_layers": 2, "cap_feat_dim": 32},
        **{"axes_dim_rope": (16, 24, 24), "axes_lens": (64, 32, 32)},
    ),
    "HiDreamImageTransformer2DModel": row(
        latents,
        hidream,
        **{"patch_size": 2, "caption_channels": [32, 16], "text_emb_dim": 32},
        **{"num_routed_experts": 2, "num_activated_experts": 1, "llama_layers": (0, 1)},
        **{"axes_dims_rope": (32, 16, 16), "max_resolution": (16, 32)},
    ),
    "MochiTransformer3DModel": row(
        video, mochi, num_layers=2, time_embed_dim=8, max_sequence_length=NUM_TEXT
    ),
    "Ideogram4Transformer2DModel": row(
        tokens,
        ideogram,
        **{"num_layers": 2, "adaln_dim": 16, "llm_features_dim": 32},
        mrope_section=(12, 10, 10),
    ),
    "MiniMaxH3Transformer3DModel": row(
        video_tokens,
        minimax,
        **{"num_layers": 2, "time_embed_hidden_dim": 16, "rope_freq_dim": 8},
    ),
    "HeliosTransformer3DModel": row(video, helios, num_layers=2, rope_dim=(20, 22, 22)),
    "Kandinsky6Transformer3DModel": row(
        channels_last,
        **KANDINSKY,
        **{"visual_cond": False, "in_audio_dim": 4, "out_audio_dim": 4},
    ),
}


def tiny_transformer(name: str, **overrides: Any) -> nn.Module:
    """A model without weights of zero, with which many start as if they had no layers."""
    make, sizes = getattr(diffusers, name), SIZES | ROWS[name].sizes
    known = inspect.signature(make).parameters
    torch.manual_seed(0)
    model = make(**{key: x for key, x in sizes.items() if key in known} | overrides)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if not weight.any():
                weight.normal_(std=0.2)
            elif not name.startswith("SD3") and ("to_out" in path or "norm1" in path):
                weight.mul_(8)  # attention counts; that of SD3 does
    return choosy(model)


sd3_transformer = partial(tiny_transformer, "SD3Transformer2DModel")
flux_transformer = partial(tiny_transformer, "FluxTransformer2DModel")
qwen_transformer = partial(tiny_transformer, "QwenImageTransformer2DModel")
wan_transformer = partial(tiny_transformer, "WanTransformer3DModel")


def choosy(model):
    """The model, its queries and keys so large that attention is no average."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".norm_q." in name or ".norm_k." in name:
                weight.mul_(2)
    return model.eval()


def inputs(model: nn.Module, height: int = 8, width: int = 12, batch: int = BATCH) -> dict:
    """Arguments of `forward` for a grid of height x width tokens, or of as many per frame."""
    generator = torch.Generator().manual_seed(2)

    def random(*size: int) -> Tensor:
        return torch.randn(batch, *size, generator=generator)

    shape, further, _ = ROWS[type(model).__name__]
    arguments = {
        "hidden_states": random(*shape(height, width)),
        "encoder_hidden_states": random(NUM_TEXT, 32),
        "encoder_attention_mask": torch.ones(batch, NUM_TEXT, dtype=torch.bool),
        "pooled_projections": random(64),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": position_ids(height, width),
        "txt_ids": torch.zeros(NUM_TEXT, 3),
        "img_shapes": [[(1, height, width)]] * batch,
        **{"num_frames": FRAMES, "height": height, "width": width},
        **dict.fromkeys(("original_size", "target_size", "crop_coords"), torch.ones(batch, 2)),
        "audio_hidden_states": random(NUM_SOUND, 4),
        "audio_encoder_hidden_states": random(NUM_TEXT, 32),
        "audio_num_frames": NUM_SOUND,
        **further(random, height, width),
    }
    known = inspect.signature(model.forward).parameters
    return {name: x for name, x in arguments.items() if name in known}


def predict(model, height: int = 8, width: int = 12, batch: int = BATCH, **overrides) -> Tensor:
    """The output for fixed inputs."""
    with torch.no_grad():
        output = model(**inputs(model, height, width, batch) | overrides, return_dict=False)
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
