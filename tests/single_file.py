"""A Stable Diffusion 1.x pipeline as one file, in the layout of the model's first publication."""

import re
from pathlib import Path

from diffusers import StableDiffusionPipeline
from safetensors.torch import save_file

UNET = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_in": "input_blocks.0.0",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
VAE = {
    "conv_norm_out": "norm_out",
    "conv_shortcut": "nin_shortcut",
    "mid_block.resnets.0": "mid.block_1",
    "mid_block.resnets.1": "mid.block_2",
    "mid_block.attentions.0": "mid.attn_1",
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
    "down_blocks": "down",
    "up_blocks": "up",
    "resnets": "block",
    "downsamplers.0": "downsample",
    "upsamplers.0": "upsample",
}


def save_single_file(pipe: StableDiffusionPipeline, path: Path) -> None:
    """Write the weights of the UNet, the VAE and the text encoder."""
    weights = {
        f"model.diffusion_model.{_unet_name(name, pipe.unet.config.layers_per_block)}": weight
        for name, weight in pipe.unet.state_dict().items()
    }
    last = len(pipe.vae.config.block_out_channels) - 1
    for name, weight in pipe.vae.state_dict().items():
        name = re.sub(r"up_blocks\.(\d)", lambda block: f"up.{last - int(block[1])}", name)
        name = _renamed(name, VAE)
        if ".attn_1." in name and weight.dim() == 2:
            weight = weight[..., None, None]
        weights[f"first_stage_model.{name}"] = weight
    for name, weight in pipe.text_encoder.state_dict().items():
        weights[f"cond_stage_model.transformer.text_model.{name}"] = weight
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path)


def _unet_name(name: str, layers_per_block: int) -> str:
    """Blocks are numbered through; a resnet is part 0 of one, attention and sampling follow."""
    pattern = r"(down|up)_blocks\.(\d)\.(resnet|attention|downsampler|upsampler)s\.(\d)"
    found = re.match(pattern, name)
    if found is None:
        name = _renamed(name, UNET)
        return name if "middle_block.1" in name else _renamed(name, UNET_RESNET)
    side, level, kind, index = found[1], int(found[2]), found[3], int(found[4])
    first = level * (layers_per_block + 1)
    rest = name.removeprefix(found[0])
    if kind == "downsampler":
        return f"input_blocks.{first + layers_per_block + 1}.0{rest.replace('conv', 'op')}"
    if kind == "upsampler":
        has_attention = level > 0
        return f"output_blocks.{first + layers_per_block}.{1 + has_attention}{rest}"
    blocks, block = ("input", first + 1) if side == "down" else ("output", first)
    part = 1 if kind == "attention" else 0
    rest = rest if kind == "attention" else _renamed(rest, UNET_RESNET)
    return f"{blocks}_blocks.{block + index}.{part}{rest}"


def _renamed(name: str, table: dict[str, str]) -> str:
    for old, new in table.items():
        name = re.sub(rf"(?<![^.]){re.escape(old)}(?![^.])", new, name)
    return name
