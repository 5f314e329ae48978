"""The efficient attentions that the paper compares with (paper, table of ADE20K).

Shapes: B batch, H heads, N tokens, n patches, D head dim. The first tokens, such as CLS, are the
prefix, a key of every patch. How the prefix attends is the host's.
"""

from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from avq_diffusers.attention.orders import query_order
from distill.attention import with_sinks
from distill.vision.calls import Grid

WINDOW, SHIFT = 7, 3
NEIGHBOURHOOD = 5
PROJECTED_KEYS = 64
RANDOM_FEATURES = 256


class TokenAttention(nn.Module, ABC):
    """A function for `train_attention`; a subclass says how patches attend."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        codebook: None = None,
        *,
        sink_key: Tensor | None = None,
        sink_value: Tensor | None = None,
        scale: float,
        **options: Any,
    ) -> tuple[Tensor, str]:
        """Attend with queries (B, H, n, D) of the patches."""
        key, value = with_sinks(key, sink_key), with_sinks(value, sink_value)
        if key.shape[2] != self.grid.prefix + self.grid.num_patches:
            raise ValueError(
                f"the model was prepared for {self.grid.prefix} + {self.grid.height} x "
                f"{self.grid.width} tokens, but got {key.shape[2]}."
            )
        return self.attend(query, key, value, scale), type(self).__name__

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of the patches (B, H, n, D) over all N tokens."""


class ValueProjection(TokenAttention):
    """Negative control: the output of a patch is its own value."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return value[:, :, self.grid.prefix :]


class BoxAttention(TokenAttention):
    """A patch attends to the patches of a rectangle.

    Masked attention, by `flex_attention` on a GPU.

    Args:
        grid: of the layer.
        boxes: (n, 4) int64, the first row and column of each patch's rectangle, and the first ones
            after it.
    """

    def __init__(self, grid: Grid, boxes: Tensor) -> None:
        super().__init__(grid)
        self.register_buffer("boxes", boxes, persistent=False)
        row, column = _places(grid)
        self.register_buffer("row", F.pad(row, (grid.prefix, 0), value=-1), persistent=False)
        self.register_buffer("column", F.pad(column, (grid.prefix, 0), value=-1), persistent=False)
        self._mask: Any = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if not query.is_cuda:
            mask = self.sees(None, None, *self._indices(query.device))
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        if self._mask is None:
            from torch.nn.attention.flex_attention import create_block_mask

            self._mask = create_block_mask(
                self._mask_function(), None, None, *self._lengths(), device=query.device
            )
        value = value.to(query.dtype)
        return _flex_attention()(
            query, key.to(query.dtype), value, block_mask=self._mask, scale=scale
        )

    def sees(self, batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        """Whether patch `query` attends to token `key`; all of equal or broadcast shapes."""
        return self._mask_function()(batch, head, query, key)

    def _mask_function(self) -> Any:
        top, left, bottom, right = (x.contiguous() for x in self.boxes.unbind(dim=1))
        row, column = self.row, self.column

        def sees(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
            in_rows = (top[query] <= row[key]) & (row[key] < bottom[query])
            in_columns = (left[query] <= column[key]) & (column[key] < right[query])
            return (row[key] < 0) | (in_rows & in_columns)

        return sees

    def _lengths(self) -> tuple[int, int]:
        return len(self.boxes), len(self.row)

    def _indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        queries, keys = (torch.arange(length, device=device) for length in self._lengths())
        return queries[:, None], keys[None]


def window_boxes(grid: Grid, size: int, shift: int) -> Tensor:
    """The window of each patch (Swin): windows of `size`, moved up and left by `shift`."""
    starts = [(place + shift) // size * size - shift for place in _places(grid)]
    return torch.stack([*starts, *(start + size for start in starts)], dim=1)


def neighbourhood_boxes(grid: Grid, size: int) -> Tensor:
    """The `size` x `size` patches around each patch (NATTEN), moved into the grid at its edges."""
    limits = (grid.height - size, grid.width - size)
    starts = [
        (place - size // 2).clamp(min=0).clamp(max=max(limit, 0))
        for place, limit in zip(_places(grid), limits, strict=True)
    ]
    return torch.stack([*starts, *(start + size for start in starts)], dim=1)


class Linformer(TokenAttention):
    """Keys and values are projected along the tokens (Wang et al. 2020).

    The projections start as means of consecutive patches in Gilbert order.
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
        prefix = self.grid.prefix
        key, value = (
            torch.cat(
                [x[:, :, :prefix], torch.einsum("kn,bhnd->bhkd", projection.to(x.dtype), patches)],
                dim=2,
            )
            for x, projection in ((key, self.key_projection), (value, self.value_projection))
            for patches in (x[:, :, prefix:],)
        )
        return F.scaled_dot_product_attention(query, key, value, scale=scale)


class Performer(TokenAttention):
    """Softmax attention by positive orthogonal random features (Choromanski et al. 2021, FAVOR+).

    Computed in float32: exponentials leave the range of float16.
    """

    def __init__(self, grid: Grid, head_dim: int, num_features: int, seed: int) -> None:
        super().__init__(grid)
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("features", orthogonal_features(head_dim, num_features, generator))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            query, key = query.float() * scale**0.5, key.float() * scale**0.5
            # A common factor of a query's features, or of those of all keys, cancels.
            query = (self._exponents(query) - self._most(query, (-1,))).exp()
            key = (self._exponents(key) - self._most(key, (-1, -2))).exp()
            numerator = query @ (key.transpose(-1, -2) @ value.float())
            denominator = query @ key.sum(dim=-2)[..., None]
            return (numerator / denominator.clamp(min=1e-20)).to(value.dtype)

    def _exponents(self, x: Tensor) -> Tensor:
        return x @ self.features - x.square().sum(dim=-1, keepdim=True) / 2

    def _most(self, x: Tensor, dim: tuple[int, ...]) -> Tensor:
        return self._exponents(x).amax(dim=dim, keepdim=True).detach()


def orthogonal_features(head_dim: int, count: int, generator: torch.Generator) -> Tensor:
    """(D, `count`) float32 of Gaussian columns, D at a time orthogonal to each other."""
    blocks = []
    for start in range(0, count, head_dim):
        directions, _ = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator))
        lengths = torch.randn(head_dim, head_dim, generator=generator).norm(dim=0)
        blocks.append((directions * lengths)[:, : count - start])
    return torch.cat(blocks, dim=1)


def make_baseline(name: str, index: int, grid: Grid, head_dim: int, seed: int) -> TokenAttention:
    """A baseline of `BASELINES` for the layer `index` of a model."""
    if name == "swin":
        return BoxAttention(grid, window_boxes(grid, WINDOW, SHIFT * (index % 2)))
    if name == "neighbourhood":
        return BoxAttention(grid, neighbourhood_boxes(grid, NEIGHBOURHOOD))
    if name == "linformer":
        return Linformer(grid, PROJECTED_KEYS)
    if name == "performer":
        return Performer(grid, head_dim, RANDOM_FEATURES, seed + index)
    return ValueProjection(grid)


BASELINES = ("swin", "neighbourhood", "linformer", "performer", "value-projection")


def _places(grid: Grid) -> tuple[Tensor, Tensor]:
    """Row and column of each patch."""
    patch = torch.arange(grid.num_patches)
    return patch // grid.width, patch % grid.width


@cache
def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
