"""Where a transformer's tokens are the grid of an image or a video: read from its own arguments."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from avq_diffusers.hosts.state import Grid

SEVERAL, NO_GRID = "several images", "no grid"
READS_THE_GRID = "AVQ reads a transformer's grid outside compiled code; export it with strict=False"
Z_IMAGE_MULTIPLE = 32  # to which Z-Image pads image and text with learned tokens

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """Transformers whose `forward` tells the grid in the same way.

    Attributes:
        arguments: of `forward`, by which the family is known.
        read: the grid, of the model's config and these arguments.
        hidden_states: a tensor of the batch, of the same arguments.
        num_beside: by modules of the model, how many tokens attend beside the grid's `N`.
        beside_first: whether these come before the grid's.
        parts: modules of the model whose attention sees the grid; empty for all.
    """

    arguments: frozenset[str]
    read: Callable[[Arguments, Arguments], Grid]
    hidden_states: Callable[[Arguments], Tensor]
    num_beside: Callable[[Arguments, int], dict[str, int]]
    beside_first: bool = False
    parts: tuple[str, ...] = ()


@cache
def parameters_of(forward: Any) -> tuple[str, ...]:
    """The parameters of a class's `forward`, in their order."""
    return tuple(inspect.signature(forward).parameters)[1:]


def family_of(parameters: tuple[str, ...]) -> Family | None:
    """The family of a transformer whose `forward` has these parameters; None if it is unknown."""
    return next((family for family in FAMILIES if family.arguments <= {*parameters}), None)


def hidden_states(arguments: Arguments) -> Tensor:
    return arguments["hidden_states"]


def latent_grid(config: Arguments, arguments: Arguments) -> Grid:
    """SD3 and Wan: latents (B, C, h, w) or (B, C, t, h, w), cut into patches."""
    sizes = arguments["hidden_states"].shape[2:]
    patch = config.get("patch_size", ())
    patches = (patch, patch) if isinstance(patch, int) else patch
    if len(sizes) < 2 or len(patches) != len(sizes):
        return NO_GRID
    return tuple(size // patch for size, patch in zip(sizes, patches, strict=True))


def _numbers(config: Arguments, arguments: Arguments) -> Grid:
    """LTX: the three sizes."""
    names = ("num_frames", "height", "width")
    return tuple(x for name in names if (x := arguments.get(name)) is not None) or NO_GRID


def _shapes(config: Arguments, arguments: Arguments) -> Grid:
    """Qwen-Image: (frames, height, width) of the image and of all references."""
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


# Pipelines pass the same position ids in every step, and reading them waits for the device.
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _position_ids(config: Arguments, arguments: Arguments) -> Grid:
    """Flux: positions (N, 3 or 4) of tokens in frame, height and width."""
    if torch.compiler.is_exporting():
        raise NotImplementedError(
            "torch.export cannot read the positions that tell AVQ the grid of the image; call "
            "remove_avq(pipe) to export exact attention."
        )
    ids = arguments["img_ids"]
    if ids.is_inference():  # has no version
        return _grid_of_ids(ids)
    version, grid = _read.get(ids, (None, NO_GRID))
    if version != ids._version:
        grid = _grid_of_ids(ids)
        _read[ids] = ids._version, grid
    return grid


def _position_ids_without_references(config: Arguments, arguments: Arguments) -> Grid:
    """Flux3: its references are another argument."""
    if arguments.get("image_cond_hidden_states") is not None:
        return SEVERAL
    return _position_ids(config, arguments)


def _grid_of_ids(ids: Tensor) -> Grid:
    """The grid if the tokens are its rows one after another; references stand elsewhere."""
    if ids.ndim == 3 and not ids.eq(ids[:1]).all():
        return NO_GRID
    positions = ids.flatten(0, -2)[-ids.shape[-2] :, :3].long().cpu()
    frames, rows, columns = (positions - positions[0]).unbind(-1)
    if frames.any():
        return SEVERAL
    height, width = int(rows.max()) + 1, int(columns.max()) + 1
    indices = (rows * width + columns).tolist()
    return (height, width) if indices == list(range(height * width)) else NO_GRID


def _text_tokens(arguments: Arguments, num_tokens: int) -> dict[str, int]:
    return {"": _num_text(arguments)}


def _num_text(arguments: Arguments) -> int:
    return int(arguments["encoder_hidden_states"].shape[1])


def _text_in_joint_layers(arguments: Arguments, num_tokens: int) -> dict[str, int]:
    """Flux3: image and text attend to themselves first."""
    return {"mode_blocks.image": 0, "single_transformer_blocks": _num_text(arguments)}


def _no_tokens(arguments: Arguments, num_tokens: int) -> dict[str, int]:
    return {"": 0}


def _padding_and_text(arguments: Arguments, num_tokens: int) -> dict[str, int]:
    """Z-Image: the grid's padding, and in the later layers the padded text."""
    padding = -num_tokens % Z_IMAGE_MULTIPLE
    longest = max(len(text) for text in arguments["cap_feats"])
    return {"noise_refiner": padding, "layers": padding + longest + -longest % Z_IMAGE_MULTIPLE}


FAMILIES = (
    Family(
        frozenset({"img_ids", "txt_ids", "image_cond_ids"}),
        _position_ids_without_references,
        hidden_states,
        _text_in_joint_layers,
        beside_first=True,
        parts=("mode_blocks.image", "single_transformer_blocks"),
    ),
    Family(
        frozenset({"img_ids", "txt_ids"}),
        _position_ids,
        hidden_states,
        _text_tokens,
        beside_first=True,
    ),
    Family(frozenset({"img_shapes"}), _shapes, hidden_states, _text_tokens, beside_first=True),
    Family(
        frozenset({"x", "cap_feats"}),
        _list_of_latents,
        _first_latents,
        _padding_and_text,
        parts=("noise_refiner", "layers"),
    ),
    Family(frozenset({"num_frames", "height", "width"}), _numbers, hidden_states, _no_tokens),
    Family(
        frozenset({"hidden_states", "encoder_hidden_states"}),
        latent_grid,
        hidden_states,
        _no_tokens,
        parts=("blocks", "transformer_blocks"),  # others refine a text
    ),
)
