"""Pooled blocks with exact blocks: the common core of Sol-Attn and PISA, in plain PyTorch.

Keys are cut into blocks of `BLOCK` consecutive tokens in the query order. Block j with n_j keys is
represented by its mean key, its mean value and log n_j. Each query tile scores the blocks by the
attention mass that they receive from its queries, as AVQ scores parents, and attends to the keys of
the best ones exactly:

    y = (sum_exact exp(s q.k) v + sum_rest n_j exp(s q.mean_j k) mean_j v) / (the same without v)

Sol-Attn (arXiv 2607.24027) chooses blocks with a threshold. PISA (arXiv 2602.01077) chooses them
with the tile's mean query, and its first version has a Taylor term for the rest.

Shapes: B batch, H heads (of all batch elements within functions), N tokens, D head dim, J blocks, E
exact blocks, T query tiles of I queries.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from avq_diffusers.codebook.assignment import chunk_length
from eval.methods.base import KEYS
from eval.methods.peer import Blocks

BLOCK = 64


class Pooled(Blocks):
    """`pooled@256`: the best 256 keys are exact."""

    kind, example = "pooled", "pooled@256"
    places = (KEYS,)

    @classmethod
    def parse(cls, name: str, levels: tuple[int, ...]) -> Self | None:
        found = super().parse(name, levels)
        if found is not None and found.setting % BLOCK:
            raise ValueError(f"pooled has whole blocks of {BLOCK} keys, but got {name!r}.")
        return found

    @property
    def scheme(self) -> str:
        return "pooled blocks"

    def columns(self, num_tokens: int) -> int:
        return pooled_columns(num_tokens, int(self.setting) // BLOCK)

    def on_sequence(
        self, tensors: Sequence[Tensor], order: Tensor, scale: float | None, *, timed: bool
    ) -> Callable[[], Tensor]:
        num_exact = int(self.setting) // BLOCK
        options = {"num_exact": num_exact, "query_order": order, "scale": scale}
        return partial(pooled_attention, *tensors, **options)


def pooled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_exact: int,
    block: int = BLOCK,
    query_tile: int = 128,
    query_order: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention over the keys of the best blocks and the means of all others.

    Args:
        query, key, value: (B, H, N, D), same dtype; half precision is computed in float32.
        num_exact: number of blocks whose keys a query tile attends to; all blocks if there are
            fewer.
        block: tokens per block; the last one may have fewer.
        query_tile: number of consecutive queries that share one choice of blocks.
        query_order: (N,) integer permutation of the tokens; None is their own order.
        scale: factor on the logits; None is 1 / sqrt(D).

    Returns:
        (B, H, N, D), dtype of `query`.
    """
    dtype, shape = query.dtype, query.shape
    num_tokens, head_dim = shape[2:]
    scale = head_dim**-0.5 if scale is None else scale
    order = torch.arange(num_tokens) if query_order is None else query_order
    order = order.to(query.device).long()
    wide = torch.promote_types(dtype, torch.float32)
    query, key, value = (x[:, :, order].flatten(0, 1).to(wide) for x in (query, key, value))
    tiles, keys, values = cut(query, query_tile), cut(key, block), cut(value, block)

    is_key = cut(query.new_ones(1, num_tokens, 1), block)[0, :, :, 0]  # (J, block)
    counts = is_key.sum(dim=1)
    log_counts = counts.log()
    mean_keys, mean_values = (x.sum(dim=2) / counts[:, None] for x in (keys, values))
    logits = torch.einsum("hnd,hjd->hnj", query, mean_keys) * scale + log_counts
    mass = cut(logits.softmax(dim=-1), query_tile).sum(dim=2)  # (H, T, J)
    ranking = mass.sort(dim=-1, descending=True, stable=True).indices
    exact = ranking[..., : min(num_exact, len(counts))]
    log_rest = log_counts.expand_as(mass).scatter(-1, exact, -torch.inf)

    head = torch.arange(len(query), device=query.device)[:, None, None]
    columns = exact.shape[-1] * block + len(counts)
    length = chunk_length(query.device, 2 * len(query) * columns * head_dim)
    outputs = []
    for start in range(0, tiles.shape[1], length):
        part = slice(start, start + length)
        chosen = exact[:, part]
        seen_keys, seen_values = (
            torch.cat(
                [x[head, chosen].flatten(2, 3), means[:, None].expand(-1, len(chosen[0]), -1, -1)],
                2,
            )
            for x, means in ((keys, mean_keys), (values, mean_values))
        )
        bias = torch.cat([is_key.log()[chosen].flatten(2), log_rest[:, part]], dim=-1)
        outputs.append(
            F.scaled_dot_product_attention(
                tiles[:, part], seen_keys, seen_values, bias[:, :, None], scale=scale
            )
        )
    output = torch.cat(outputs, dim=1).flatten(1, 2)[:, :num_tokens]
    return torch.empty_like(output).index_copy_(1, order, output).view(shape).to(dtype)


def pooled_columns(num_tokens: int, num_exact: int, block: int = BLOCK) -> int:
    """How many block means and keys a query attends to."""
    num_blocks = math.ceil(num_tokens / block)
    num_exact = min(num_exact, num_blocks)
    return num_blocks - num_exact + min(num_exact * block, num_tokens)


def cut(tokens: Tensor, length: int) -> Tensor:
    """(H, N, D) to (H, pieces, length, D), the last piece padded with 0."""
    return F.pad(tokens, (0, 0, 0, -tokens.shape[1] % length)).unflatten(1, (-1, length))
