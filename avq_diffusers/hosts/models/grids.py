"""The image or video grid of a transformer's tokens, read from the transformer's own arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from avq_diffusers.hosts.core import (
    NUM_TRAIN_TIMESTEPS,
    REST,
    TIMESTEP,
    Grid,
    TimestepArgument,
    read_once,
)

SEVERAL, NO_GRID = "several images", "no grid"
READS_THE_GRID = "AVQ reads a transformer's grid outside compiled code; export it with strict=False"
Z_IMAGE_MULTIPLE = 32  # Z-Image pads image and text to this multiple with learned tokens
OUTPUT_IMAGE = 2  # Ideogram's indicator of image tokens

Arguments = Mapping[str, Any]


class Beside(NamedTuple):
    """The tokens beside the `N` of the grid.

    Attributes:
        number: of them, as `Tokens.beside`, from the arguments of `forward` and N; `REST` where
            these do not tell.
        first: whether they come before the grid.
    """

    number: Callable[[Arguments, int], dict[str, int]]
    first: bool = False


@dataclass(frozen=True)
class Family:
    """Diffusers transformers that specify the grid in the same way.

    Attributes:
        models: class names.
        read: the grid, from the model's config and the arguments of its `forward`.
        beside: the tokens beside the grid.
        parts: module paths, or parts of them, whose attention sees the grid; empty for all.
        hidden_states: a tensor with the batch, from the same arguments.
        timestep: the argument that tells the training timestep; None if a call does not tell it.
    """

    models: tuple[str, ...]
    read: Callable[[Arguments, Arguments], Grid]
    beside: Beside
    parts: tuple[str, ...] = ()
    hidden_states: Callable[[Arguments], Tensor] = lambda arguments: arguments["hidden_states"]
    timestep: TimestepArgument | None = TIMESTEP


def family_of(model: nn.Module) -> Family | None:
    """The family of a transformer's class or of its nearest known base; None if unknown."""
    names = [base.__name__ for base in type(model).__mro__]
    return next((_FAMILY_OF[name] for name in names if name in _FAMILY_OF), None)


def latent_grid(config: Arguments, arguments: Arguments, axes: tuple[int, ...] = ()) -> Grid:
    """The patch grid of latents (B, C, h, w) or (B, C, t, h, w), or with the grid in `axes`."""
    shape = arguments["hidden_states"].shape
    sizes = [shape[axis] for axis in axes or range(2, len(shape))]
    patch = config.get("patch_size", ())
    if isinstance(patch, int):
        frames = () if len(sizes) == 2 else (config.get("patch_size_t") or 1,)
        patch = (*frames, patch, patch)
    if len(sizes) < 2 or len(patch) != len(sizes):
        return NO_GRID
    return tuple(size // patch for size, patch in zip(sizes, patch, strict=True))


def _numbers(config: Arguments, arguments: Arguments) -> Grid:
    """LTX: three sizes."""
    names = ("num_frames", "height", "width")
    return tuple(x for name in names if (x := arguments.get(name)) is not None) or NO_GRID


def _shapes(config: Arguments, arguments: Arguments) -> Grid:
    """Qwen-Image: (frames, height, width) of the image and of each reference."""
    shapes = arguments["img_shapes"]
    images = [x if isinstance(x[0], list | tuple) else [x] for x in shapes]
    if len(images[0]) > 1 or any(image != images[0] for image in images):
        return SEVERAL
    return tuple(images[0][0])


def _first_latents(arguments: Arguments) -> Tensor:
    batch = arguments["x"]
    latents = batch[0][-1] if isinstance(batch[0], list) else batch[0]
    return latents.expand(len(batch), *latents.shape)


def _list_of_latents(config: Arguments, arguments: Arguments) -> Grid:
    """Z-Image: a list of latents (C, f, h, w)."""
    latents = arguments["x"]
    if isinstance(latents[0], list) or len({x.shape for x in latents}) > 1:
        return SEVERAL
    patch, frame_patch = arguments.get("patch_size", 2), arguments.get("f_patch_size", 1)
    frames, height, width = latents[0].shape[1:]
    return frames // frame_patch, height // patch, width // patch


def _read_once(ids: Tensor, read: Callable[[], Grid]) -> Grid:
    """`read()`, cached until these position ids change."""
    if torch.compiler.is_exporting():
        raise NotImplementedError(
            "torch.export cannot read the position ids that AVQ takes the grid from; call "
            "remove_avq(pipe) to export exact attention."
        )
    return read_once(ids, read)


def _position_ids(config: Arguments, arguments: Arguments, name: str = "img_ids") -> Grid:
    """Flux: token positions (N, 3 or 4) in frame, height, width; other tokens may come first."""
    ids, num_tokens = arguments[name], arguments["hidden_states"].shape[1]
    return _read_once(ids, lambda: _grid_of_ids(ids, num_tokens))


def _marked_position_ids(config: Arguments, arguments: Arguments) -> Grid:
    """Ideogram: positions of the whole sequence, with an indicator of each token's kind."""
    ids, marks = arguments["position_ids"], arguments["indicator"]
    return _read_once(ids, lambda: _grid_of_ids(ids, int((marks[0] == OUTPUT_IMAGE).sum())))


def _packed_video(config: Arguments, arguments: Arguments) -> Grid:
    """MiniMax-H3: positions (N, 3) of the whole sequence; the video comes last."""
    ids, rows = arguments["position_ids"], arguments["video_indices"]
    return _read_once(ids, lambda: _grid_of_last(ids, rows))


def _grid_of_last(ids: Tensor, rows: Tensor) -> Grid:
    """The grid of the last contiguous run of these rows; references come before it."""
    ends = (rows.diff() > 1).nonzero()
    first = int(rows[ends[-1] + 1]) if len(ends) else int(rows[0])
    axes = [axis.unique(return_inverse=True) for axis in ids[first:].unbind(-1)]
    frames, height, width = (len(values) for values, _ in axes)
    places = torch.stack([place for _, place in axes])
    indices = (places[0] * height + places[1]) * width + places[2]
    count = torch.arange(frames * height * width, device=ids.device)
    return (frames, height, width) if torch.equal(indices, count) else NO_GRID


def _position_ids_without_references(config: Arguments, arguments: Arguments) -> Grid:
    """Flux3: references are a separate argument."""
    if arguments.get("image_cond_hidden_states") is not None:
        return SEVERAL
    return _position_ids(config, arguments)


def _grid_of_ids(ids: Tensor, num_tokens: int) -> Grid:
    """The grid if the last tokens form it row by row; references come before it."""
    ids = ids[..., -num_tokens:, :3]
    if ids.ndim == 3 and not ids.eq(ids[:1]).all():
        return NO_GRID
    positions = ids.flatten(0, -2)[-num_tokens:].long().cpu()
    frames, rows, columns = (positions - positions[0]).unbind(-1)
    if frames.any():
        return SEVERAL
    height, width = int(rows.max()) + 1, int(columns.max()) + 1
    indices = (rows * width + columns).tolist()
    return (height, width) if indices == list(range(height * width)) else NO_GRID


def _beside(*names: str, more: int = 0, first: bool = False) -> Beside:
    """The tokens (B, T, channels) of these arguments, and `more` of the model's own."""

    def count(arguments: Arguments, num_tokens: int) -> dict[str, int]:
        given = [x for name in names if (x := arguments.get(name)) is not None]
        return {"": more + sum(int(tokens.shape[1]) for tokens in given)}

    return Beside(count, first)


NONE = _beside()
TEXT = _beside("encoder_hidden_states")
TEXT_FIRST = _beside("encoder_hidden_states", first=True)


def _sd3_text(arguments: Arguments, num_tokens: int) -> dict[str, int]:
    return {".attn2": 0, **TEXT.number(arguments, num_tokens)}  # attends within the image only


def _rest(arguments: Arguments, num_tokens: int) -> dict[str, int]:
    return {"": REST}


def _target_image(config: Arguments, arguments: Arguments) -> Grid:
    """Qwen-Image 2.1: the last image; its conditions come before it."""
    return tuple(arguments["img_shapes"][0][-1])


def _text_in_joint_layers(arguments: Arguments, num_tokens: int) -> dict[str, int]:
    """Flux3: in the first layers, image and text each attend to themselves."""
    text = TEXT.number(arguments, num_tokens)[""]
    return {"mode_blocks.image": 0, "single_transformer_blocks": text}


def _padding_and_text(arguments: Arguments, num_tokens: int) -> dict[str, int]:
    """Z-Image: the grid's padding, and in later layers the padded text."""
    padding = -num_tokens % Z_IMAGE_MULTIPLE
    longest = max(len(text) for text in arguments["cap_feats"])
    return {"noise_refiner": padding, "layers": padding + longest + -longest % Z_IMAGE_MULTIPLE}


OTHERS, OTHERS_FIRST = Beside(_rest), Beside(_rest, first=True)
_FRACTION = TimestepArgument(scale=NUM_TRAIN_TIMESTEPS)
_REMAINDER = TimestepArgument(scale=-NUM_TRAIN_TIMESTEPS, offset=NUM_TRAIN_TIMESTEPS)

FAMILIES = (
    Family(
        (
            *("FluxTransformer2DModel", "FluxControlNetModel", "Flux2Transformer2DModel"),
            *("ChromaTransformer2DModel", "LongCatImageTransformer2DModel"),
            "OvisImageTransformer2DModel",
        ),
        _position_ids,
        TEXT_FIRST,
        timestep=_FRACTION,
    ),
    Family(("BriaTransformer2DModel", "BriaFiboTransformer2DModel"), _position_ids, TEXT_FIRST),
    Family(
        ("Flux3Transformer2DModel",),
        _position_ids_without_references,
        Beside(_text_in_joint_layers, first=True),
        parts=("mode_blocks.image", "single_transformer_blocks"),
        timestep=_FRACTION,
    ),
    Family(
        ("QwenImageTransformer2DModel", "QwenImageControlNetModel"),
        _shapes,
        TEXT_FIRST,
        timestep=_FRACTION,
    ),
    Family(("NucleusMoEImageTransformer2DModel",), _shapes, TEXT, timestep=_FRACTION),
    Family(
        ("ZImageTransformer2DModel",),
        _list_of_latents,
        Beside(_padding_and_text),
        parts=("noise_refiner", "layers"),
        hidden_states=_first_latents,
        timestep=_REMAINDER._replace(name="t"),
    ),
    Family(("LTXVideoTransformer3DModel", "LTX2VideoTransformer3DModel"), _numbers, NONE),
    # Latents, text in cross-attention
    Family(
        (
            *("WanTransformer3DModel", "WanVACETransformer3DModel", "ChronoEditTransformer3DModel"),
            *("SkyReelsV2Transformer3DModel", "AllegroTransformer3DModel"),
            *("PixArtTransformer2DModel", "HunyuanDiT2DModel"),
        ),
        latent_grid,
        NONE,
    ),
    Family(("LuminaNextDiT2DModel",), latent_grid, NONE, timestep=_REMAINDER),
    # Its timesteps are other functions of the noise level.
    Family(("CosmosTransformer3DModel",), latent_grid, NONE, timestep=None),
    Family(
        ("LatteTransformer3DModel",),
        partial(latent_grid, axes=(3, 4)),  # frames are batch entries
        NONE,
        parts=("transformer_blocks",),  # the rest is temporal
    ),
    Family(("AnyFlowTransformer3DModel",), partial(latent_grid, axes=(1, 3, 4)), NONE),
    Family(
        ("Kandinsky5Transformer3DModel",),
        partial(latent_grid, axes=(1, 2, 3)),
        NONE,
        parts=("visual_transformer_blocks",),  # the rest refines text
    ),
    Family(
        ("Kandinsky6Transformer3DModel",),
        partial(latent_grid, axes=(1, 2, 3)),
        NONE,
        parts=("video_dec_block",),  # the rest is audio
    ),
    # Latents after text
    Family(
        ("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"),
        partial(latent_grid, axes=(1, 3, 4)),
        TEXT_FIRST,
    ),
    Family(
        ("CogView3PlusTransformer2DModel", "CogView4Transformer2DModel"), latent_grid, TEXT_FIRST
    ),
    Family(
        ("GlmImageTransformer2DModel",),
        latent_grid,
        TEXT_FIRST,
        timestep=TimestepArgument(offset=1.0),
    ),
    Family(("PRXTransformer2DModel",), latent_grid, TEXT_FIRST, timestep=_FRACTION),
    Family(
        ("AuraFlowTransformer2DModel",),
        latent_grid,
        _beside("encoder_hidden_states", more=8, first=True),  # register tokens
        timestep=_FRACTION,
    ),
    Family(
        ("EasyAnimateTransformer3DModel",),
        latent_grid,
        _beside("encoder_hidden_states", "encoder_hidden_states_t5", first=True),
    ),
    Family(
        ("Krea2Transformer2DModel",),
        partial(_position_ids, name="position_ids"),
        TEXT_FIRST,
        parts=("transformer_blocks",),
        timestep=_FRACTION,
    ),
    Family(
        ("Ideogram4Transformer2DModel",), _marked_position_ids, OTHERS_FIRST, timestep=_REMAINDER
    ),
    Family(
        ("MiniMaxH3Transformer3DModel",),
        _packed_video,
        OTHERS_FIRST,
        parts=("transformer_blocks",),
        timestep=None,  # one per reference
    ),
    Family(("QwenImage21Transformer2DModel",), _target_image, OTHERS_FIRST, timestep=_FRACTION),
    Family(
        ("Lumina2Transformer2DModel",),
        latent_grid,
        OTHERS_FIRST,
        parts=("noise_refiner", "layers"),
        timestep=_REMAINDER,
    ),
    Family(("HeliosTransformer3DModel",), latent_grid, OTHERS_FIRST, parts=("blocks",)),
    # Latents before text
    Family(("SD3Transformer2DModel", "SD3ControlNetModel"), latent_grid, Beside(_sd3_text)),
    Family(
        (
            *("HunyuanVideoTransformer3DModel", "HunyuanVideo15Transformer3DModel"),
            *("HunyuanImageTransformer2DModel", "MotifVideoTransformer3DModel"),
        ),
        latent_grid,
        _beside("encoder_hidden_states", "encoder_hidden_states_2", "image_embeds"),
        parts=("transformer_blocks", "single_transformer_blocks"),  # the rest refines text
    ),
    Family(("ErnieImageTransformer2DModel",), latent_grid, _beside("text_bth")),
    Family(
        ("HiDreamImageTransformer2DModel",),
        latent_grid,
        OTHERS,
        timestep=TimestepArgument("timesteps"),
    ),
    Family(("MochiTransformer3DModel",), latent_grid, OTHERS, timestep=None),  # it may rise
)
_FAMILY_OF = {name: family for family in FAMILIES for name in family.models}
