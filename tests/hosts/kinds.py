"""Every kind of model that AVQ runs in, as a table: a new kind of model is one row.

Rows hold real models at tiny size. Each is called on a grid of height x width tokens at its finest
level, per frame of a video.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import diffusers
import tiny_transformers
import tiny_vision
import torch
from checks import contents
from diffusers import (
    ControlNetModel,
    I2VGenXLUNet,
    UNet3DConditionModel,
    UNetSpatioTemporalConditionModel,
)
from tiny import (
    active,
    three_level_unet,
    tiny_unet,
    traced_unet,
    two_level_sdxl_unet,
    two_level_unet,
)
from tiny_transformers import FRAMES, NUM_TEXT, ROWS, padding, position_ids
from torch import Tensor, nn

from avq_diffusers import AVQConfig, select_layers

Size = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of model.

    Attributes:
        name: of its tests.
        make: a new model, the same each time.
        inputs: the arguments of a call of the model on a grid.
        part: of a pipeline that holds it; None for a vision model.
        output: the tensor of what it returns.
        has_others: whether there are tokens beside those of the grid.
        frames: of a video.
        sizes: of grids, as many tokens in another order where the kind can.
        mask: the argument of a layer that masks some of so many tokens; None if it takes none.
        references: arguments with a second image or no grid, by where images stand.
        padding: arguments that hide tokens of the text.
        counts_others: whether a call tells how many tokens there are beside those of the grid.
        timestep: arguments of a call at a training timestep; None if sizes cannot follow it.
        pickles: whether it may be pickled with AVQ.
        exports: whether `torch.export` takes it with AVQ.
        small: of fewer layers, for compilers and exporters; None where `make` is small.
        feature: of `eval/results/features.md`.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[..., dict[str, Any]]
    part: str | None
    output: Callable[[Any], Tensor] = lambda output: output[0]
    has_others: bool = False
    frames: int = 1
    sizes: tuple[Size, Size] = ((8, 12), (12, 8))
    mask: Callable[[int], dict[str, Tensor]] | None = None
    references: Mapping[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    padding: Mapping[str, Tensor] = field(default_factory=dict)
    counts_others: bool = True
    timestep: Callable[[float], dict[str, Tensor]] | None = None
    pickles: bool = True
    exports: bool = True
    small: Callable[[], nn.Module] | None = None
    feature: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether a text, and no part of an image, is beside the grid."""
        is_beside = self.part == "transformer" and self.has_others
        return is_beside and self.name != "MiniMaxH3"  # it has keyframes there

    @property
    def image(self) -> str:
        """The argument of a transformer that holds the image."""
        return "x" if self.name == "ZImage" else "hidden_states"

    def call(self, model: nn.Module, size: Size | None = None, **overrides) -> Tensor:
        """The output for fixed inputs."""
        return self.output(model(**self.inputs(model, *(size or self.sizes[0])) | overrides))

    @torch.no_grad()
    def predict(self, model: nn.Module, size: Size | None = None, **overrides) -> Tensor:
        """`call` without a gradient."""
        return self.call(model, size, **overrides)

    @cached_property
    def model(self) -> nn.Module:
        """One that tests share, and leave as it was."""
        return self.make()

    @cached_property
    def exact(self) -> Tensor:
        """What it predicts without AVQ."""
        return self.predict(self.model)

    @cached_property
    def contents(self) -> dict:
        """What the model holds when it has run."""
        return contents(self.model)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        return tuple({layer.level for layer in select_layers(self.model)})

    def config(self, **fields) -> AVQConfig:
        """At all levels."""
        return AVQConfig(**{"query_tile": 16, "levels": self.levels} | fields)


def timestep(value: float) -> dict[str, Tensor]:
    return {"timestep": torch.full((2,), float(value))}


def fraction(value: float) -> dict[str, Tensor]:
    return timestep(value / 1000)


def remainder(value: float) -> dict[str, Tensor]:
    return fraction(1000 - value)


def bool_mask(num_tokens: int) -> dict[str, Tensor]:
    return {"attention_mask": (torch.arange(num_tokens) < num_tokens // 2)[None, None, None]}


def added_mask(num_tokens: int) -> dict[str, Tensor]:
    """As `Attention.prepare_attention_mask` takes it."""
    is_masked = torch.arange(num_tokens) >= num_tokens // 2
    return {"attention_mask": -1e4 * is_masked.float().expand(2, 1, -1)}


# UNets: two levels.
ADDED = {
    "block_out_channels": (32, 64),
    "down_block_types": ("SimpleCrossAttnDownBlock2D", "ResnetDownsampleBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "up_block_types": ("ResnetUpsampleBlock2D", "SimpleCrossAttnUpBlock2D"),
    "attention_head_dim": 16,
}


def controlnet() -> ControlNetModel:
    return active(ControlNetModel.from_unet(three_level_unet(), conditioning_channels=3)).eval()


def residuals(output: tuple[list[Tensor], Tensor]) -> Tensor:
    return torch.cat([x.flatten(1) for x in (*output[0], output[1])], dim=1)


def unet_inputs(model, height: int, width: int, **others) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    return {
        "sample": torch.randn(2, 4, height, width, generator=generator),
        "timestep": 10,
        "encoder_hidden_states": torch.randn(2, 5, 32, generator=generator),
        "return_dict": False,
        **others,
    }


def controlnet_inputs(model, height: int, width: int) -> dict[str, Any]:
    condition = torch.ones(2, 3, 8 * height, 8 * width)
    return unet_inputs(model, height, width, controlnet_cond=condition)


def unet3d(cls=UNet3DConditionModel) -> nn.Module:
    torch.manual_seed(0)
    blocks = {
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    }
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
    model = cls(**blocks, **sizes, cross_attention_dim=32, attention_head_dim=8)
    return tiny_transformers.choosy(model)


def video_inputs(model, height: int, width: int) -> dict[str, Any]:
    """Two frames, which are entries of its batch."""
    arguments = unet_inputs(model, height, width)
    sample = arguments["sample"].transpose(0, 1)[None]
    return arguments | {"sample": sample, "encoder_hidden_states": torch.ones(1, 5, 32)}


def i2vgen_inputs(model, height: int, width: int) -> dict[str, Any]:
    arguments = video_inputs(model, height, width)
    image = {"image_latents": arguments["sample"], "image_embeddings": torch.ones(1, 32)}
    return arguments | image | {"fps": torch.tensor([8])}


def svd() -> nn.Module:
    torch.manual_seed(0)
    blocks = {
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    }
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 32}
    heads = {"num_attention_heads": (2, 4), "projection_class_embeddings_input_dim": 768}
    return UNetSpatioTemporalConditionModel(**blocks, **sizes, **heads).eval()


def svd_inputs(model, height: int, width: int) -> dict[str, Any]:
    arguments = unet_inputs(model, height, width)
    sample = torch.cat([arguments["sample"]] * 2, dim=1)[None]
    times = {"encoder_hidden_states": torch.ones(1, 1, 32), "added_time_ids": torch.ones(1, 3)}
    return arguments | {"sample": sample, **times}


def sdxl_inputs(model, height: int, width: int) -> dict[str, Any]:
    added = {"text_embeds": torch.ones(2, 32), "time_ids": torch.ones(2, 6)}
    return unet_inputs(model, 2 * height, 2 * width, added_cond_kwargs=added)


unet_kind = partial(
    Kind,
    inputs=unet_inputs,
    part="unet",
    timestep=timestep,
)


# Transformers of diffusers


def sd3_transformer(**sizes) -> nn.Module:
    """Without norms of queries and keys, and without a second attention."""
    sizes |= {"qk_norm": None, "dual_attention_layers": ()}
    model = tiny_transformers.sd3_transformer(**sizes)
    with torch.no_grad():
        for layer in select_layers(model):
            layer.attn.to_q.weight.mul_(4)
            layer.attn.to_k.weight.mul_(4)
    return model


def transformer_inputs(model, height: int, width: int) -> dict[str, Any]:
    return {**tiny_transformers.inputs(model, height, width), "return_dict": False}


def random_tokens(num_tokens: int) -> Tensor:
    return torch.randn(2, num_tokens, 4, generator=torch.Generator().manual_seed(4))


def flux_images(axes: int, images: Sequence[Tensor]) -> dict[str, Any]:
    ids = torch.cat([*images])
    shape = {} if axes == 3 else {"img_ids": ids.expand(2, -1, -1)}
    return {"hidden_states": random_tokens(len(ids)), "img_ids": ids, **shape}


def flux_references(axes: int) -> dict[str, Callable[[], dict[str, Any]]]:
    image = position_ids(8, 12, axes=axes)
    other, beside = position_ids(4, 6, frame=10, axes=axes), image + 12 * torch.eye(axes)[2]
    orders = {
        "another frame": (image, other),
        "another frame before": (other, image),
        "beside": (image, beside),
        "beside, before": (beside, image),
        "the same place": (image, image),
    }
    orders |= {"all in one place": (0 * image,)}
    found = {name: partial(flux_images, axes, images) for name, images in orders.items()}
    if axes == 4:  # a batch of them
        several = torch.stack([image, position_ids(12, 8, axes=axes)])
        found["two grids"] = lambda: flux_images(axes, [image]) | {"img_ids": several}
    return found


def flux3_reference(num_tokens: int) -> dict[str, Any]:
    ids = position_ids(1, num_tokens, frame=10, axes=4)
    return {"image_cond_hidden_states": random_tokens(num_tokens), "image_cond_ids": ids}


def qwen_images(*shapes: tuple[int, int, int]) -> dict[str, Any]:
    num_tokens = sum(height * width for _, height, width in shapes)
    return {"img_shapes": [[*shapes]] * 2, "hidden_states": random_tokens(num_tokens)}


def z_images(*sizes: Size) -> dict[str, Any]:
    """The omni form: per prompt several images, the last of which is made."""
    generator = torch.Generator().manual_seed(4)
    images = [torch.randn(4, 1, 2 * h, 2 * w, generator=generator) for h, w in sizes]
    text = torch.randn(len(sizes) + 1, 10, 32, generator=generator)
    noise = [[0] * (len(sizes) - 1) + [1]] * 2
    return {
        "x": [images] * 2,
        "cap_feats": [[*text]] * 2,
        "siglip_feats": [None] * 2,
        "image_noise_mask": noise,
    }


def coordinates() -> dict[str, Any]:
    """Of LTX, in place of sizes."""
    sizes = dict.fromkeys(("num_frames", "height", "width"))
    return {**sizes, "video_coords": torch.arange(1728.0).view(2, 3, 288)}


CROSS_ATTENTION = (  # to the text
    *("Wan", "LTXVideo", "LTX2Video", "WanVACE", "ChronoEdit", "SkyReelsV2", "AnyFlow", "Cosmos"),
    *("Allegro", "PixArt", "Latte", "HunyuanDiT", "LuminaNextDiT", "Kandinsky5", "Kandinsky6"),
)
HIDDEN_TEXT = {"padding": {"encoder_attention_mask": padding()}}
NOT_COUNTED = {"counts_others": False}
FRACTION, REMAINDER = {"timestep": fraction}, {"timestep": remainder}
# The grid is in the values of tensors.
FLUX = FRACTION | {"exports": False}
# What is particular to a class; the timestep is what pipelines pass, where it is not the training
# timestep, and None where sizes cannot follow it.
FACTS: dict[str, dict[str, Any]] = {
    "Flux": {
        **FLUX,
        "pickles": False,
        "mask": bool_mask,
        "references": flux_references(3),
        "small": partial(tiny_transformers.flux_transformer, num_single_layers=0),
        "feature": "Flux",
    },
    "Flux2": {**FLUX, "references": flux_references(4), "feature": "Flux2"},
    "Flux3": {
        **FLUX,
        "references": {
            "smaller": partial(flux3_reference, 24),
            "of as many tokens as image and text": partial(flux3_reference, 96 + NUM_TEXT),
        },
    },
    "QwenImage": {
        **FRACTION,
        "padding": {
            "encoder_hidden_states_mask": torch.arange(NUM_TEXT) < torch.tensor([[NUM_TEXT], [8]])
        },
        "references": {
            "after": partial(qwen_images, (1, 8, 12), (1, 4, 6)),
            "before": partial(qwen_images, (1, 4, 6), (1, 8, 12)),
            "of the same size": partial(qwen_images, (1, 8, 12), (1, 8, 12)),
        },
        "feature": "Qwen-Image",
    },
    "ZImage": {
        "sizes": ((6, 10), (10, 6)),  # not multiples of 32, to which it pads
        "output": lambda output: torch.cat([image.flatten() for image in output[0]]),
        "timestep": lambda value: {"t": remainder(value)["timestep"]},
        "references": {
            "before": partial(z_images, (4, 6), (8, 12)),
            "of another size": lambda: {"x": [torch.ones(4, 1, 16, 24), torch.ones(4, 1, 24, 16)]},
        },
        "feature": "Z-Image",
    },
    "Wan": {"feature": "Wan"},
    "LTXVideo": {
        "mask": added_mask,
        "references": {"coordinates": coordinates},
        "feature": "LTX",
    },
    "Chroma": {**FRACTION, "padding": {"attention_mask": padding(after=96)}},
    **dict.fromkeys(("LongCatImage", "OvisImage", "NucleusMoEImage", "AuraFlow"), FRACTION),
    "PRX": {**FRACTION, "padding": {"attention_mask": padding()}},
    "Krea2": FRACTION | HIDDEN_TEXT,
    **dict.fromkeys(("MotifVideo", "HunyuanVideo", "HunyuanVideo15", "HunyuanImage"), HIDDEN_TEXT),
    "ErnieImage": {"padding": {"text_lens": torch.tensor([NUM_TEXT, 8])}},
    "LuminaNextDiT": REMAINDER,
    "Lumina2": REMAINDER | NOT_COUNTED,
    "HiDreamImage": {
        **NOT_COUNTED,
        "timestep": lambda value: {"timesteps": timestep(value)["timestep"]},
    },
    "GlmImage": {"timestep": lambda value: timestep(value - 1)},
    "Cosmos": {"timestep": None},
    "Mochi": {
        **NOT_COUNTED,
        "timestep": None,
        "padding": {"encoder_attention_mask": padding()[1:]},
    },
    "Ideogram4": {
        **REMAINDER,
        **NOT_COUNTED,
        "padding": {"segment_ids": padding(after=96).long()},
        "output": lambda output: output[0][:, NUM_TEXT:],
    },
    "MiniMaxH3": NOT_COUNTED | {"timestep": None},
    "Helios": NOT_COUNTED,
}

transformer_kind = partial(Kind, inputs=transformer_inputs, part="transformer", timestep=timestep)


def kind_of(cls: str) -> Kind:
    """Of a class on diffusers' attention dispatch."""
    name = re.sub("(Transformer)?[23]D.*Model", "", cls)
    is_video = ROWS[cls].shape not in (tiny_transformers.tokens, tiny_transformers.latents)
    known = {
        "has_others": name not in CROSS_ATTENTION,
        "frames": FRAMES if is_video and name != "Latte" else 1,
    }
    make = partial(tiny_transformers.tiny_transformer, cls)
    return transformer_kind(name, make, **known | FACTS.get(name, {}))


# Vision models of transformers


def vision_inputs(model, height: int, width: int, **others) -> dict[str, Any]:
    return {"pixel_values": tiny_vision.images(8 * height, 8 * width), **others}


sized_inputs = partial(vision_inputs, **tiny_vision.ANY_SIZE)
clip_inputs = partial(sized_inputs, input_ids=torch.tensor([[3, 5, 7, 98]] * 2))


def vision_kind(family: str, inputs=sized_inputs, **others) -> Kind:
    make = partial(tiny_vision.tiny_vision, family)
    has_others = tiny_vision.FAMILIES[family][-1] > 0
    known = {"make": make, "has_others": has_others}
    return Kind(family, inputs=inputs, part=None, **known | others)


KINDS = (
    unet_kind("SD1.5", two_level_unet, mask=added_mask, small=traced_unet),
    unet_kind("SDXL", two_level_sdxl_unet, inputs=sdxl_inputs),
    unet_kind("ControlNet", controlnet, inputs=controlnet_inputs, output=residuals),
    unet_kind("UNet3D", unet3d, inputs=video_inputs),
    unet_kind("I2VGen-XL", partial(unet3d, I2VGenXLUNet), inputs=i2vgen_inputs),
    unet_kind("Stable Video Diffusion", svd, inputs=svd_inputs),
    unet_kind(
        "Kandinsky 2",
        partial(tiny_unet, **ADDED),
        has_others=True,
        counts_others=False,
    ),
    transformer_kind(
        "SD3",
        sd3_transformer,
        has_others=True,
        small=partial(sd3_transformer, num_layers=2),
        feature="SD3",
    ),
    transformer_kind("SD3.5", tiny_transformers.sd3_transformer, has_others=True, feature="SD3"),
    *(kind_of(cls) for cls in ROWS if hasattr(diffusers, cls) and not cls.startswith("SD3")),
    vision_kind("vit", mask=bool_mask),
    vision_kind("deit"),
    vision_kind(
        "dinov2 with registers",
        inputs=vision_inputs,
        small=partial(tiny_vision.tiny_vision, "dinov2 with registers", num_hidden_layers=1),
    ),
    vision_kind("dinov3", inputs=vision_inputs),
    vision_kind("dpt", inputs=vision_inputs, sizes=((8, 8), (4, 4))),
    vision_kind(
        "clip",
        inputs=clip_inputs,
        make=tiny_vision.tiny_clip,
        output=lambda output: output.image_embeds,
    ),
    vision_kind("siglip"),
    vision_kind("aimv2", inputs=vision_inputs),
)
KIND = {kind.name: kind for kind in KINDS}
