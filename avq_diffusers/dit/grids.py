"""Where a transformer's tokens are the grid of an image or a video: read from its own arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Height and width, after the frames of a video; or why there is no single grid.
Grid: TypeAlias = tuple[int, ...] | str
SEVERAL, NO_GRID = "several images", "no grid"


@dataclass(frozen=True)
class Family:
    """Transformers whose `forward` tells the grid in the same way.

    Attributes:
        arguments: of `forward`, by which the family is known.
        read: the grid, of the model's config and these arguments.
        hidden_states: a tensor of the batch, of the same arguments.
        text_first: whether text tokens come before the grid's; None if they do not attend with it.
        parts: modules of the model whose attention sees the grid; empty for all.
    """

    arguments: frozenset[str]
    read: Callable[[Mapping[str, Any], Mapping[str, Any]], Grid]
    hidden_states: Callable[[Mapping[str, Any]], Tensor]
    text_first: bool | None
    parts: tuple[str, ...] = ()


def family_of(parameters: tuple[str, ...]) -> Family | None:
    """The family of a transformer whose `forward` has these parameters; None if it is unknown."""
    return next((family for family in FAMILIES if family.arguments <= {*parameters}), None)


def _hidden_states(arguments: Mapping[str, Any]) -> Tensor:
    return arguments["hidden_states"]


def _latents(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> Grid:
    """SD3 and Wan: latents (B, C, h, w) or (B, C, t, h, w), cut into patches."""
    sizes = arguments["hidden_states"].shape[2:]
    patch = config.get("patch_size", ())
    patches = [patch] * len(sizes) if isinstance(patch, int) else patch
    if len(sizes) < 2 or len(patches) != len(sizes):
        return NO_GRID
    return tuple(size // patch for size, patch in zip(sizes, patches, strict=True))


def _numbers(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> Grid:
    """LTX: the three sizes."""
    names = ("num_frames", "height", "width")
    return tuple(x for name in names if (x := arguments.get(name)) is not None) or NO_GRID


def _shapes(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> Grid:
    """Qwen-Image: (frames, height, width) of the image and of all references."""
    shapes = arguments["img_shapes"]
    images = [x if isinstance(x[0], list | tuple) else [x] for x in shapes]
    if len(images[0]) > 1 or any(image != images[0] for image in images):
        return SEVERAL
    return tuple(images[0][0])


def _first_latents(arguments: Mapping[str, Any]) -> Tensor:
    batch = arguments["x"]
    latents = batch[0][-1] if isinstance(batch[0], list) else batch[0]
    return latents.expand(len(batch), *latents.shape)


def _list_of_latents(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> Grid:
    """Z-Image: a list of latents (C, f, h, w)."""
    latents = arguments["x"]
    if isinstance(latents[0], list) or len({x.shape for x in latents}) > 1:
        return SEVERAL
    patch, frame_patch = arguments.get("patch_size", 2), arguments.get("f_patch_size", 1)
    frames, height, width = latents[0].shape[1:]
    return frames // frame_patch, height // patch, width // patch


# Pipelines pass the same position ids in every step, and reading them waits for the device.
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _position_ids(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> Grid:
    """Flux: positions (N, 3 or 4) of tokens in frame, height and width, references last."""
    ids = arguments["img_ids"]
    if ids.is_inference():  # has no version
        return _grid_of_ids(ids)
    version, grid = _read.get(ids, (None, NO_GRID))
    if version != ids._version:
        grid = _grid_of_ids(ids)
        _read[ids] = ids._version, grid
    return grid


def _grid_of_ids(ids: Tensor) -> Grid:
    positions = ids.flatten(0, -2)[-ids.shape[-2] :, :3].long()
    least, most = positions.min(0).values.tolist(), positions.max(0).values.tolist()
    frames, height, width = (b - a + 1 for a, b in zip(least, most, strict=True))
    if frames > 1:
        return SEVERAL
    return (height, width) if height * width == len(positions) else NO_GRID


FAMILIES = (
    Family(frozenset({"img_ids", "txt_ids"}), _position_ids, _hidden_states, text_first=True),
    Family(frozenset({"img_shapes"}), _shapes, _hidden_states, text_first=True),
    Family(
        frozenset({"x", "cap_feats"}),
        _list_of_latents,
        _first_latents,
        text_first=False,
        parts=("noise_refiner", "layers"),
    ),
    Family(frozenset({"num_frames", "height", "width"}), _numbers, _hidden_states, text_first=None),
    Family(
        frozenset({"hidden_states", "encoder_hidden_states"}),
        _latents,
        _hidden_states,
        text_first=None,
    ),
)
