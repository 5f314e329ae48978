"""The transformers of diffusers that need no tests of their own, at tiny size: a row each.

A row has what a class needs beside the heads, and the arguments of a call on a grid.
"""

import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina
from tiny_transformers import HEADS, NUM_TEXT, choosy, position_ids
from torch import Tensor, nn

BATCH, FRAMES = 2, 3
Inputs = Callable[[Callable[..., Tensor], int, int], dict[str, Any]]


def zoo_transformer(cls: str) -> nn.Module:
    """A model without weights of zero, with which many start as if they had no layers."""
    make = getattr(diffusers, cls)
    known = inspect.signature(make).parameters
    torch.manual_seed(0)
    model = make(**{key: x for key, x in (HEADS | ZOO[cls][0]).items() if key in known})
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.any():
                weight.normal_(std=0.2)
            elif "to_out" in name or "norm1" in name:  # attention counts
                weight.mul_(8)
    return choosy(model)


def zoo_inputs(name: str, model: nn.Module, height: int, width: int) -> dict[str, Any]:
    """Arguments for a grid, per frame of a video."""
    generator = torch.Generator().manual_seed(2)

    def random(*size: int) -> Tensor:
        return torch.randn(BATCH, *size, generator=generator)

    texts = {"encoder_hidden_states": random(NUM_TEXT, 32), "timestep": torch.full((BATCH,), 0.5)}
    arguments = texts | ZOO[name][1](random, height, width) | {"return_dict": False}
    known = inspect.signature(model.forward).parameters
    return {key: x for key, x in arguments.items() if key in known}


def padding(length: int = NUM_TEXT, before: int = 0, after: int = 0) -> Tensor:
    """Of texts, the second of which is half as long, with other tokens."""
    mask = torch.arange(length) < torch.tensor([length, length // 2])[:, None]
    return nn.functional.pad(mask, (before, after), value=True)


def latents(random, height: int, width: int, **others) -> dict[str, Any]:
    return {"hidden_states": random(4, 2 * height, 2 * width), **others}


def video(random, height: int, width: int, **others) -> dict[str, Any]:
    return {"hidden_states": random(4, FRAMES, 2 * height, 2 * width), **others}


def frames_first(random, height: int, width: int, **others) -> dict[str, Any]:
    return {"hidden_states": random(FRAMES, 4, 2 * height, 2 * width), **others}


def flux_tokens(random, height: int, width: int, **others) -> dict[str, Any]:
    ids = {"img_ids": position_ids(height, width), "txt_ids": torch.zeros(NUM_TEXT, 3)}
    return {"hidden_states": random(height * width, 4), **ids, **others}


def cogview(random, height: int, width: int, **others) -> dict[str, Any]:
    sizes = dict.fromkeys(("original_size", "target_size", "crop_coords"), torch.ones(BATCH, 2))
    return latents(random, height, width, **sizes, **others)


def glm(random, height: int, width: int) -> dict[str, Any]:
    prior = torch.zeros(BATCH, height * width, dtype=torch.long)
    arguments = cogview(random, height, width, prior_token_id=prior, prior_token_drop=prior > 0)
    return {name: x for name, x in arguments.items() if name != "original_size"}


def ltx2(random, height: int, width: int) -> dict[str, Any]:
    return {
        "hidden_states": random(FRAMES * height * width, 4),
        "audio_hidden_states": random(7, 4),
        "audio_encoder_hidden_states": random(NUM_TEXT, 32),
        **{"num_frames": FRAMES, "height": height, "width": width, "audio_num_frames": 7},
    }


def kandinsky5(random, height: int, width: int) -> dict[str, Any]:
    return {
        "hidden_states": random(FRAMES, 2 * height, 2 * width, 4),
        "pooled_projections": random(16),
        "visual_rope_pos": [torch.arange(size) for size in (FRAMES, height, width)],
        "text_rope_pos": torch.arange(NUM_TEXT),
    }


def hunyuan_dit(random, height: int, width: int) -> dict[str, Any]:
    return latents(
        random,
        height,
        width,
        encoder_hidden_states=random(5, 32),
        encoder_hidden_states_t5=random(7, 32),
        text_embedding_mask=torch.ones(BATCH, 5),
        text_embedding_mask_t5=torch.ones(BATCH, 7),
        image_rotary_emb=(random(height * width, 64)[0], random(height * width, 64)[0]),
        style=None,
        image_meta_size=None,
    )


def lumina_next(random, height: int, width: int) -> dict[str, Any]:
    return latents(
        random,
        height,
        width,
        encoder_mask=padding(),
        image_rotary_emb=get_2d_rotary_pos_embed_lumina(64, 16, 16),
        cross_attention_kwargs={},
    )


def ernie(random, height: int, width: int) -> dict[str, Any]:
    return {
        "hidden_states": random(4, 2 * height, 2 * width),
        "text_bth": random(NUM_TEXT, 32),
        "text_lens": torch.tensor([NUM_TEXT, NUM_TEXT]),
    }


def krea2(random, height: int, width: int) -> dict[str, Any]:
    ids = torch.cat([torch.zeros(NUM_TEXT, 3), position_ids(height, width)])
    tokens, text = random(height * width, 4), random(NUM_TEXT, 2, 32)
    return {"hidden_states": tokens, "encoder_hidden_states": text, "position_ids": ids}


def hunyuan_video(random, height: int, width: int, **others) -> dict[str, Any]:
    return video(random, height, width, encoder_attention_mask=padding() | True, **others)


def hidream(random, height: int, width: int) -> dict[str, Any]:
    llama = torch.stack([random(NUM_TEXT, 16), random(NUM_TEXT, 16)])
    texts = {
        "encoder_hidden_states_t5": random(NUM_TEXT, 32),
        "encoder_hidden_states_llama3": llama,
    }
    timesteps = torch.full((BATCH,), 0.5)
    return latents(random, height, width, timesteps=timesteps, pooled_embeds=random(32), **texts)


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
    frame, num_sound = height * width, 8
    starts = [0, NUM_TEXT, NUM_TEXT + frame, NUM_TEXT + frame + num_sound]
    num_tokens = starts[-1] + FRAMES * frame
    grid = torch.cartesian_prod(*(torch.arange(size) for size in (FRAMES, height, width))).float()
    rows = torch.arange(num_tokens)
    is_video = (rows >= starts[3]) | ((rows >= starts[1]) & (rows < starts[2]))
    return {
        "hidden_states": random(int(is_video.sum()), 16),
        "audio_hidden_states": random(num_sound, 4),
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
    texts = {"encoder_hidden_states": random(NUM_TEXT, 32), "timestep": torch.full((BATCH,), 0.5)}
    arguments = hunyuan_video(random, height, width, **texts)
    return {name: x[:1] for name, x in arguments.items()}


def helios(random, height: int, width: int) -> dict[str, Any]:
    history = random(4, 1, 2 * height, 2 * width)
    times = torch.arange(FRAMES + 1).expand(BATCH, -1)
    of_history = {
        "latents_history_short": history,
        "indices_latents_history_short": times[:, :1],
        "indices_hidden_states": times[:, 1:],
    }
    return video(random, height, width, **of_history)


def kandinsky6(random, height: int, width: int) -> dict[str, Any]:
    return {
        "hidden_states": random(FRAMES, 2 * height, 2 * width, 4),
        "pooled_projections": random(16),
        "audio_hidden_states": random(7, 4),
    }


def with_(inputs: Callable[..., dict[str, Any]], **sizes: tuple[int, ...]) -> Inputs:
    """These inputs and random tensors."""

    def make(random, height: int, width: int) -> dict[str, Any]:
        return inputs(random, height, width) | {name: random(*x) for name, x in sizes.items()}

    return make


LATENTS = {"in_channels": 4, "out_channels": 4, "patch_size": 2}
JOINT = {"in_channels": 4, "joint_attention_dim": 32, "axes_dims_rope": (16, 24, 24)}
JOINT |= {"num_layers": 1, "num_single_layers": 1}
WAN = LATENTS | {"text_dim": 32, "freq_dim": 32, "ffn_dim": 64, "num_layers": 2}
WAN |= {"rope_max_seq_len": 64, "patch_size": (1, 2, 2)}
COG = LATENTS | {"num_layers": 1, "text_embed_dim": 32, "time_embed_dim": 16, "condition_dim": 8}
COG |= {"sample_size": 16, "sample_width": 24, "sample_height": 16}
PIXART = LATENTS | {"num_layers": 1, "cross_attention_dim": 128, "caption_channels": 32}
PIXART |= {"sample_size": 16, "norm_type": "ada_norm_single", "norm_elementwise_affine": False}
PIXART |= {"activation_fn": "gelu-approximate"}
HUNYUAN = LATENTS | {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1}
HUNYUAN |= {"text_embed_dim": 32, "rope_axes_dim": (16, 24, 24)}

ZOO: dict[str, tuple[dict[str, Any], Inputs]] = {
    "ChromaTransformer2DModel": (
        JOINT
        | {"approximator_num_channels": 8, "approximator_hidden_dim": 8, "approximator_layers": 1},
        flux_tokens,
    ),
    "BriaTransformer2DModel": (JOINT | {"pooled_projection_dim": None}, flux_tokens),
    "BriaFiboTransformer2DModel": (
        JOINT | {"text_encoder_dim": 16},
        lambda *x: flux_tokens(*x, text_encoder_layers=[x[0](NUM_TEXT, 16)] * 2),
    ),
    "LongCatImageTransformer2DModel": (JOINT | {"pooled_projection_dim": 32}, flux_tokens),
    "OvisImageTransformer2DModel": (JOINT, flux_tokens),
    "NucleusMoEImageTransformer2DModel": (
        JOINT | {"num_key_value_heads": 1, "moe_enabled": False, "capacity_factors": [1.0]},
        lambda random, height, width: {
            "hidden_states": random(height * width, 4),
            "img_shapes": [(1, height, width)] * BATCH,
        },
    ),
    "LTX2VideoTransformer3DModel": (
        {"in_channels": 4, "num_layers": 1, "cross_attention_dim": 128, "caption_channels": 32}
        | {"audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2}
        | {"audio_attention_head_dim": 32, "audio_cross_attention_dim": 64},
        ltx2,
    ),
    "WanVACETransformer3DModel": (
        WAN | {"vace_layers": [0], "vace_in_channels": 8},
        lambda random, height, width: video(
            *(random, height, width),
            control_hidden_states=random(8, FRAMES, 2 * height, 2 * width),
        ),
    ),
    "ChronoEditTransformer3DModel": (WAN, video),
    "SkyReelsV2Transformer3DModel": (WAN, video),
    "AnyFlowTransformer3DModel": (
        WAN,
        lambda *x: frames_first(*x, timestep=x[0](FRAMES), r_timestep=x[0](FRAMES)),
    ),
    "CosmosTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_layers": 1, "text_embed_dim": 32}
        | {"adaln_lora_dim": 8, "concat_padding_mask": False, "extra_pos_embed_type": None},
        video,
    ),
    "AllegroTransformer3DModel": (
        PIXART | {"sample_height": 16, "sample_width": 24, "sample_frames": 3},
        lambda *x: video(*x, encoder_hidden_states=x[0](1, NUM_TEXT, 32)),
    ),
    "PixArtTransformer2DModel": (PIXART | {"use_additional_conditions": False}, latents),
    "LatteTransformer3DModel": (PIXART | {"video_length": FRAMES}, video),
    "HunyuanDiT2DModel": (
        {"in_channels": 4, "num_layers": 2, "hidden_size": 128, "patch_size": 2, "mlp_ratio": 1.0}
        | {"cross_attention_dim": 32, "cross_attention_dim_t5": 32, "pooled_projection_dim": 16}
        | {"sample_size": 16, "text_len": 5, "text_len_t5": 7}
        | {"use_style_cond_and_image_meta_size": False},
        hunyuan_dit,
    ),
    "LuminaNextDiT2DModel": (
        {"hidden_size": 128, "num_layers": 2, "num_kv_heads": 1, "cross_attention_dim": 32},
        lumina_next,
    ),
    "Kandinsky5Transformer3DModel": (
        {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 32, "in_text_dim2": 16}
        | {"time_dim": 32, "model_dim": 128, "ff_dim": 64, "axes_dims": (16, 24, 24)}
        | {"num_text_blocks": 1, "num_visual_blocks": 2},
        kandinsky5,
    ),
    "CogVideoXTransformer3DModel": (
        COG | {"max_text_seq_length": NUM_TEXT, "sample_frames": 9, "num_layers": 2},
        frames_first,
    ),
    "ConsisIDTransformer3DModel": (
        COG | {"max_text_seq_length": NUM_TEXT, "sample_frames": 9, "is_train_face": False},
        frames_first,
    ),
    "CogView3PlusTransformer2DModel": (COG | {"pos_embed_max_size": 16}, cogview),
    "CogView4Transformer2DModel": (COG | {"rope_axes_dim": (32, 32)}, cogview),
    "GlmImageTransformer2DModel": (COG | {"prior_vq_quantizer_codebook_size": 16}, glm),
    "PRXTransformer2DModel": (
        {"in_channels": 4, "context_in_dim": 32, "hidden_size": 128, "mlp_ratio": 1.0}
        | {"num_heads": 2, "depth": 2, "axes_dim": [32, 32]},
        latents,
    ),
    "AuraFlowTransformer2DModel": (
        LATENTS
        | {"num_mmdit_layers": 1, "num_single_dit_layers": 1, "joint_attention_dim": 32}
        | {"caption_projection_dim": 128, "pos_embed_max_size": 256},
        latents,
    ),
    "EasyAnimateTransformer3DModel": (
        COG
        | {"mmdit_layers": 1, "num_layers": 2, "text_embed_dim_t5": 16}
        | {"add_norm_text_encoder": False},
        with_(video, encoder_hidden_states_t5=(5, 16)),
    ),
    "Krea2Transformer2DModel": (
        JOINT
        | {"num_key_value_heads": 1, "intermediate_size": 64, "timestep_embed_dim": 16}
        | {"text_hidden_dim": 32, "text_num_attention_heads": 2, "text_num_key_value_heads": 2}
        | {"text_intermediate_size": 32, "num_layerwise_text_blocks": 1, "num_text_layers": 2}
        | {"num_refiner_text_blocks": 1},
        krea2,
    ),
    "HunyuanVideoTransformer3DModel": (
        HUNYUAN | {"pooled_projection_dim": 16, "guidance_embeds": False},
        with_(hunyuan_video, pooled_projections=(16,)),
    ),
    "HunyuanVideo15Transformer3DModel": (
        HUNYUAN | {"text_embed_2_dim": 16, "image_embed_dim": 8, "num_layers": 2},
        lambda *x: hunyuan_video(
            *x,
            encoder_hidden_states_2=x[0](6, 16),
            encoder_attention_mask_2=padding(6),
            image_embeds=torch.zeros(BATCH, 5, 8),
        ),
    ),
    "HunyuanImageTransformer2DModel": (
        HUNYUAN | {"patch_size": (2, 2), "rope_axes_dim": (32, 32)},
        lambda *x: latents(*x, encoder_attention_mask=padding() | True),
    ),
    "MotifVideoTransformer3DModel": (
        HUNYUAN | {"num_decoder_layers": 0},
        video,
    ),
    "ErnieImageTransformer2DModel": (
        LATENTS
        | {"hidden_size": 128, "num_layers": 1, "ffn_hidden_size": 64, "text_in_dim": 32}
        | {"rope_axes_dim": (16, 24, 24)},
        ernie,
    ),
    "Lumina2Transformer2DModel": (
        {"hidden_size": 128, "num_layers": 2, "num_refiner_layers": 1, "num_kv_heads": 1}
        | {"axes_dim_rope": (16, 24, 24), "axes_lens": (64, 32, 32), "cap_feat_dim": 32}
        | {"in_channels": 4, "sample_size": 16},
        lambda *x: latents(*x, encoder_attention_mask=padding() | True),
    ),
    "HiDreamImageTransformer2DModel": (
        LATENTS
        | {"num_layers": 1, "num_single_layers": 1, "caption_channels": [32, 16]}
        | {"text_emb_dim": 32, "num_routed_experts": 2, "num_activated_experts": 1}
        | {"axes_dims_rope": (32, 16, 16), "max_resolution": (16, 32), "llama_layers": (0, 1)},
        hidream,
    ),
    "MochiTransformer3DModel": (
        LATENTS
        | {"num_layers": 2, "pooled_projection_dim": 32, "text_embed_dim": 32}
        | {"time_embed_dim": 8, "max_sequence_length": NUM_TEXT},
        mochi,
    ),
    "Ideogram4Transformer2DModel": (
        {"in_channels": 4, "num_layers": 2, "intermediate_size": 64, "adaln_dim": 16}
        | {"llm_features_dim": 32, "mrope_section": (12, 10, 10)},
        ideogram,
    ),
    "MiniMaxH3Transformer3DModel": (
        {"hidden_size": 128, "num_layers": 2, "num_refiner_layers": 1, "ffn_dim": 64}
        | {"in_channels": 4, "audio_in_channels": 4, "text_dim": 32, "freq_dim": 16}
        | {"time_embed_hidden_dim": 16, "time_embed_dim": 16, "rope_freq_dim": 8},
        minimax,
    ),
    "HeliosTransformer3DModel": (
        WAN | {"rope_dim": (20, 22, 22), "num_layers": 2},
        helios,
    ),
    "Kandinsky6Transformer3DModel": (
        {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 32, "in_text_dim2": 16}
        | {"time_dim": 32, "model_dim": 128, "ff_dim": 64, "axes_dims": (16, 24, 24)}
        | {"num_text_blocks": 1, "num_visual_blocks": 2, "visual_cond": False}
        | {"in_audio_dim": 4, "out_audio_dim": 4},
        kandinsky6,
    ),
}
