"""The efficient attentions that the paper compares with (paper, table of ADE20K).

Shapes: B batch, H heads, N tokens, n patches, D head dim. The first tokens, such as CLS, are the
prefix, which every patch attends to. The host decides how the prefix attends.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avq_diffusers.attention.orders import query_order
from avq_diffusers.attention.tensors import Attended, Tensors
from avq_diffusers.config import Spec
from distill.attention import with_sinks

WINDOW, SHIFT = 7, 3
NEIGHBOURHOOD = 5
PROJECTED_KEYS = 64
RANDOM_FEATURES = 256


class Grid(NamedTuple):
    """The tokens of a layer: `prefix`, then `height` x `width` patches in raster order."""

    prefix: int
    height: int
    width: int

    @property
    def num_patches(self) -> int:
        return self.height * self.width

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Row and column of each patch."""
        patch = torch.arange(self.num_patches)
        return patch // self.width, patch % self.width


class TokenAttention(nn.Module, ABC):
    """A function for `train_attention`; a subclass says how patches attend."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, tensors: Tensors, spec: Spec, backend: str) -> Attended:
        """Attend with queries (B, H, n, D) of the patches."""
        key = with_sinks(tensors.key, tensors.sink_key)
        value = with_sinks(tensors.value, tensors.sink_value)
        if key.shape[2] != self.grid.prefix + self.grid.num_patches:
            raise ValueError(
                f"the model was prepared for {self.grid.prefix} + {self.grid.height} x "
                f"{self.grid.width} tokens, but got {key.shape[2]}."
            )
        output = self.attend(tensors.query, key, value, tensors.scale)
        return Attended(output, type(self).__name__)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of the patches (B, H, n, D) over all N tokens."""


class ValueProjection(TokenAttention):
    """Negative control: the output of a patch is its own value."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return value[:, :, self.grid.prefix :]


class MaskedAttention(TokenAttention):
    """Patches attend to only some of the patches; uses `flex_attention` on a GPU.

    Args:
        grid: the layer's grid.
        sees: (n, n) bool, whether a patch attends to another.
    """

    def __init__(self, grid: Grid, sees: Tensor) -> None:
        super().__init__(grid)
        self.register_buffer("mask", F.pad(sees, (grid.prefix, 0), value=True), persistent=False)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if not query.is_cuda:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=self.mask, scale=scale
            )
        key, value = key.to(query.dtype), value.to(query.dtype)
        return _flex_attention()(query, key, value, block_mask=self.blocks, scale=scale)

    @cached_property
    def blocks(self) -> Any:
        """The mask for `flex_attention`."""
        from torch.nn.attention.flex_attention import create_block_mask

        mask = self.mask
        return create_block_mask(
            lambda batch, head, query, key: mask[query, key],
            None,
            None,
            *mask.shape,
            device=mask.device,
        )


def window_mask(grid: Grid, size: int, shift: int) -> Tensor:
    """Patches see their window (Swin): windows of `size`, shifted up and left by `shift`."""
    row, column = ((place + shift) // size for place in grid.places)
    return (row[:, None] == row) & (column[:, None] == column)


def neighbourhood_mask(grid: Grid, size: int) -> Tensor:
    """Patches see the `size` x `size` around them (NATTEN), moved into the grid at edges."""
    sees = torch.ones(grid.num_patches, grid.num_patches, dtype=torch.bool)
    for place, length in zip(grid.places, (grid.height, grid.width), strict=True):
        start = (place - size // 2).clamp(min=0).clamp(max=max(length - size, 0))[:, None]
        sees &= (start <= place) & (place < start + size)
    return sees


class Linformer(TokenAttention):
    """Keys and values are projected along the token axis (Wang et al. 2020).

    The projections are initialized to means of consecutive patches in Gilbert order.
    """

    def __init__(self, grid: Grid, num_keys: int) -> None:
        super().__init__(grid)
        order = query_order(grid.height, grid.width, "gilbert", "cpu").long()
        block = torch.empty_like(order)
        block[order] = torch.arange(len(order)) * num_keys // len(order)
        means = F.one_hot(block, num_keys).float().T
        means /= means.sum(dim=1, keepdim=True).clamp(min=1)
        self.key_projection = nn.Parameter(means)
        self.value_projection = nn.Parameter(means.clone())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        key = self._projected(key, self.key_projection)
        value = self._projected(value, self.value_projection)
        return F.scaled_dot_product_attention(query, key, value, scale=scale)

    def _projected(self, tokens: Tensor, projection: Tensor) -> Tensor:
        prefix, patches = tokens.tensor_split((self.grid.prefix,), dim=2)
        patches = torch.einsum("kn,bhnd->bhkd", projection.to(tokens.dtype), patches)
        return torch.cat([prefix, patches], dim=2)


class Performer(TokenAttention):
    """Softmax attention with positive orthogonal random features (Choromanski et al. 2021, FAVOR+).

    Computed in float32: exponentials exceed float16's range.
    """

    def __init__(self, grid: Grid, head_dim: int, num_features: int, seed: int) -> None:
        super().__init__(grid)
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("features", orthogonal_features(head_dim, num_features, generator))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            # A factor common to a query's features, or to those of all keys, cancels.
            query = self._mapped(query.float() * scale**0.5, (-1,))
            key = self._mapped(key.float() * scale**0.5, (-1, -2))
            numerator = query @ (key.transpose(-1, -2) @ value.float())
            denominator = query @ key.sum(dim=-2)[..., None]
            return (numerator / denominator.clamp(min=1e-20)).to(value.dtype)

    def _mapped(self, x: Tensor, largest_of: tuple[int, ...]) -> Tensor:
        exponents = x @ self.features - x.square().sum(dim=-1, keepdim=True) / 2
        return (exponents - exponents.amax(dim=largest_of, keepdim=True).detach()).exp()


def orthogonal_features(head_dim: int, count: int, generator: torch.Generator) -> Tensor:
    """(D, `count`) float32 of Gaussian columns, D at a time orthogonal to each other."""
    blocks = []
    for start in range(0, count, head_dim):
        directions, _ = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator))
        lengths = torch.randn(head_dim, head_dim, generator=generator).norm(dim=0)
        blocks.append((directions * lengths)[:, : count - start])
    return torch.cat(blocks, dim=1)


def _swin(grid: Grid, layer: int, head_dim: int, seed: int) -> TokenAttention:
    return MaskedAttention(grid, window_mask(grid, WINDOW, SHIFT * (layer % 2)))


# Name -> function that makes a layer's attention from its grid, index, head dim and a seed.
BASELINES: dict[str, Callable[[Grid, int, int, int], TokenAttention]] = {
    "swin": _swin,
    "neighbourhood": lambda grid, *_: MaskedAttention(
        grid, neighbourhood_mask(grid, NEIGHBOURHOOD)
    ),
    "linformer": lambda grid, *_: Linformer(grid, PROJECTED_KEYS),
    "performer": lambda grid, layer, head_dim, seed: Performer(
        grid, head_dim, RANDOM_FEATURES, seed + layer
    ),
    "value-projection": lambda grid, *_: ValueProjection(grid),
}


@cache
def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
