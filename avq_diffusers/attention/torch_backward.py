"""Exact gradients of AVQ attention in plain PyTorch, at linear cost on every device.

Query i gives column a the weight w_ia = n_a exp(q_i.c_a) / sum_b n_b exp(q_i.c_b), with the scale
in q. The spread s_a rides as one more channel of the value v_a. With d for gradients, and dr_i that
of the spread r_i that a query sees:

    p_ia = dy_i.v_a + dr_i s_a,   delta_i = sum_a w_ia p_ia
    dq_i = sum_a w_ia (p_ia - delta_i) c_a
    dv_a = sum_i w_ia dy_i,   ds_a = sum_i w_ia dr_i,   dc_a = sum_i w_ia (p_ia - delta_i) q_i

Keys that are columns, exact keys and sinks, take dv_a and dc_a. If means represent the other keys,
c_a and v_a are means of n_a keys and values, so these take the n_a-th part over the two codewords a
of key j: its parent in tiles that do not refine this parent, its leaf in the other tiles. Spreads
add 2 (k_j - c_a) ds_a / n_a.

The first-order term is g_i C q_i with g_i = r_i / (1 + r_i t_i) and t_i = |q_i|^2 / D:

    dg_i = dy_i.C q_i,   dr_i = dg_i / (1 + r_i t_i)^2,   dC = sum_i g_i dy_i q_i^T
    dq_i += g_i C^T dy_i - 2 g_i^2 dg_i q_i / D

C = A / S, with A = sum_j e_j d_j^T and S = sum_j |d_j|^2 of the offsets e_j and d_j of values and
keys to the means of their leaves. Derivatives of means vanish:

    dA = dC / S,   dS = -<dC, C> / S,   dv_j += dA d_j,   dk_j += dA^T e_j + 2 dS d_j

If stored codewords represent the keys, key gradients are straight-through (paper, section Method):

    dk_j = sum_a sum_i w_ia / n_a (dy_i.v_j - delta_i) q_i

This is affine in v_j, so each codeword stores the moments sum_i w_ia / n_a [q_i, 1] [dy_i,
delta_i]^T, at O(N M D^2), for its keys to read.

The choice of columns is a constant, which the code of `torch_forward` recomputes. After a forward
pass by the kernels, it may choose differently between nearly equal scores; so means in half
precision have a backward pass by kernels, too (`triton.gradients`).

Shapes: as in `torch_forward`, with L numbers per row that gradients are summed in.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention.tensors import Tensors, empty_tokens
from avq_diffusers.attention.torch_forward import (
    KeySummary,
    QueryTiles,
    choose,
    offsets_to,
    summarize,
    take,
    tile_queries,
    variance_of,
    width,
)
from avq_diffusers.codebook.assignment import chunk_length
from avq_diffusers.config import Spec

# Elements in the intermediates of one chunk, except on a CPU. A tile has many moments: with fewer
# elements, each tile would be its own chunk of about sixty launches.
ELEMENTS = 1 << 28


def gradients(
    grad_output: Tensor, tensors: Tensors, spec: Spec, needs_grad: Sequence[bool]
) -> list[Tensor]:
    """Gradients of `torch_forward.avq_attention` for those of the five tokens in `needs_grad`.

    They are views of (B, N, H, D) memory, in the dtype of their input.
    """
    batch, heads, num_keys, head_dim = tensors.key.shape
    grads = [
        empty_tokens(x) if needed and x is not None else None
        for x, needed in zip(tensors.tokens(), needs_grad, strict=True)
    ]
    channels = 2 * width(head_dim) if spec.means else (1 + head_dim) ** 2
    table_elements = heads * spec.num_parents * (2 + spec.num_children) * channels
    if spec.num_refined is None:
        table_elements += heads * num_keys * channels
    size = min(batch, chunk_length(grad_output.device, table_elements, ELEMENTS))
    for start in range(0, batch, size):
        elements = slice(start, min(start + size, batch))
        part_grads = [None if grad is None else grad[elements] for grad in grads]
        _write_gradients(grad_output[elements], tensors.part(elements), spec, part_grads)
    return [grad for grad in grads if grad is not None]


def _write_gradients(
    grad_output: Tensor, tensors: Tensors, spec: Spec, grads: Sequence[Tensor | None]
) -> None:
    """Write the token gradients of a chunk of batch elements."""
    grad_query, grad_key, grad_value, *grad_sinks = grads
    needs_key, needs_value, needs_sink_key, needs_sink_value = (x is not None for x in grads[1:])
    summary, tiles = summarize(tensors, spec), QueryTiles.of(tensors, spec.query_tile)
    queries = tile_queries(tensors, tiles, summary)
    grad_tiles, grad_queries = tiles.cut(grad_output, queries.dtype), torch.empty_like(queries)
    term = moments = None
    if summary.matrix is not None:
        term = _FirstOrder(summary.matrix, queries, grad_tiles)
    if spec.means:
        # Gradients of spreads ride with those of values.
        rides = needs_key and term is not None
        sums = _Sums(summary, needs_key or needs_sink_key, needs_value or needs_sink_value or rides)
    else:
        sums = _Sums(summary, needs_sink_key, needs_sink_value)
        moments = _Moments(summary, needs_key, needs_value)

    tile, channels = queries.shape[1:]
    moment_width = 0 if moments is None else moments.sums.shape[1]

    def elements(columns: int) -> int:
        return 4 * tile * columns + (4 * channels + moment_width) * (tile + columns)

    chosen = choose(queries, summary, tiles, spec)
    for pairs, rows in chosen.lists(summary, elements, ELEMENTS):
        keys, values = take(summary.keys, rows), take(summary.values, rows)
        weights = (queries[pairs] @ keys.mT).softmax(dim=-1)
        if term is not None:
            term.write_grad_seen(pairs, weights, values)
        found = _Attended.of(queries[pairs], grad_tiles[pairs], weights, values)
        if grad_query is not None:
            grad_queries[pairs] = found.grad_logits @ keys
        if moments is None:
            sums.add(rows, found)
        else:
            moments.add(rows[:, : spec.columns], found.part(slice(spec.columns)))
            sums.add(rows[:, spec.columns :], found.part(slice(spec.columns, None)))

    if grad_query is not None:
        if term is not None:
            term.add_to(grad_queries)
        head_dim = grad_query.shape[3]
        tiles.write(grad_query, tensors.scale * grad_queries[..., :head_dim])
    token_grads: Sequence[Tensor | None]
    value = tensors.value.flatten(0, 2).to(queries.dtype)
    if moments is None:
        token_grads = _through_means(summary, value, sums, term, needs_key, needs_value)
    else:
        token_grads = moments.gradients(value)
    for grad, token_grad in zip((grad_key, grad_value), token_grads, strict=True):
        if grad is not None and token_grad is not None:
            grad.copy_(token_grad.view(grad.shape))
    for grad, row_grads in zip(grad_sinks, (sums.keys, sums.values), strict=True):
        if grad is not None and row_grads is not None:
            grad.copy_(row_grads[summary.sink_rows, : grad.shape[3]].reshape(grad.shape))


class _Attended(NamedTuple):
    """What the gradients of the columns of G pairs are sums of."""

    queries: Tensor  # (G, I, W)
    grads: Tensor  # (G, I, W) of outputs and seen spreads
    weights: Tensor  # (G, I, K)
    delta: Tensor  # (G, I, 1)
    grad_logits: Tensor  # (G, I, K)

    @staticmethod
    def of(queries: Tensor, grads: Tensor, weights: Tensor, values: Tensor) -> "_Attended":
        products = grads @ values.mT
        delta = (weights * products).sum(dim=-1, keepdim=True)
        return _Attended(queries, grads, weights, delta, products.sub_(delta).mul_(weights))

    def part(self, columns: slice) -> "_Attended":
        """The same for some columns."""
        weights, grad_logits = self.weights[..., columns], self.grad_logits[..., columns]
        return self._replace(weights=weights, grad_logits=grad_logits)


class _FirstOrder:
    """The gradients of the first-order term."""

    def __init__(self, matrix: Tensor, queries: Tensor, grads: Tensor) -> None:
        head_dim = matrix.shape[1]
        self.matrix, self.grads = matrix, grads
        self.queries = queries[..., :head_dim]
        self.size = self.queries.square().mean(dim=-1, keepdim=True)
        self.pulled = self._by_head(grads[..., :head_dim]) @ matrix
        self.pulled = self.pulled.view(self.queries.shape)
        self.grad_share = (self.pulled * self.queries).sum(dim=-1, keepdim=True)
        self.seen = torch.empty_like(self.size)

    def _by_head(self, tokens: Tensor) -> Tensor:
        """Tokens (H T, I, D) as (H, T I, D)."""
        return tokens.unflatten(0, (len(self.matrix), -1)).flatten(1, 2)

    def write_grad_seen(self, pairs: Tensor, weights: Tensor, values: Tensor) -> None:
        """Write the gradients of the spreads that queries see into the channel of spreads."""
        head_dim = self.matrix.shape[1]
        spreads = slice(head_dim, head_dim + 1)
        seen = weights @ values[..., spreads]
        self.seen[pairs] = seen
        guard = 1 + seen * self.size[pairs]
        self.grads[pairs, :, spreads] = self.grad_share[pairs] / guard.square()

    @property
    def share(self) -> Tensor:
        """(H T, I, 1), by which C q counts."""
        return self.seen / (1 + self.seen * self.size)

    def add_to(self, grad_queries: Tensor) -> None:
        """Add the gradient of queries (H T, I, W)."""
        head_dim, share = self.matrix.shape[1], self.share
        grad_size = share.square() * self.grad_share * (2 / head_dim)
        grad_queries[..., :head_dim] += share * self.pulled - grad_size * self.queries

    def grad_matrix(self) -> Tensor:
        """(H, D, D)."""
        grads = self.share * self.grads[..., : self.matrix.shape[1]]
        return self._by_head(grads).mT @ self._by_head(self.queries)


class _Sums:
    """Gradients of the rows of the table, (rows, W) each; None where none is needed."""

    def __init__(self, summary: KeySummary, for_keys: bool, for_values: bool) -> None:
        self.keys = torch.zeros_like(summary.keys) if for_keys else None
        self.values = torch.zeros_like(summary.values) if for_values else None

    def add(self, rows: Tensor, found: _Attended) -> None:
        """Add the gradients of columns (G, K), which are these rows."""
        if self.keys is not None:
            _add_rows(self.keys, rows, found.grad_logits.mT @ found.queries)
        if self.values is not None:
            _add_rows(self.values, rows, found.weights.mT @ found.grads)


def _add_rows(sums: Tensor, rows: Tensor, added: Tensor) -> None:
    """Add (G, K, L) to rows (G, K) of the sums (all rows, L), in a fixed order."""
    if sums.device.type == "cpu":
        sums.index_add_(0, rows.flatten(), added.flatten(0, 1))
    else:  # where index_add_ uses unordered atomics, and this sorts
        sums.index_put_((rows.flatten(),), added.flatten(0, 1), accumulate=True)


def _leaf_shares(sums: Tensor, counts: Tensor) -> Tensor:
    """What a key of each leaf takes, (H, M0, 1 + C, L), from the two codewords (H R, L) that it is
    part of."""
    shares = sums.unflatten(0, counts.shape) / counts.clamp(min=1)[..., None]
    return shares[:, :, 1:] + shares[:, :, :1]


def _through_means(
    summary: KeySummary,
    value: Tensor,
    sums: _Sums,
    term: _FirstOrder | None,
    for_keys: bool,
    for_values: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of keys and values (H S, D), of which `value` holds the latter."""
    grad_keys, grad_values = (
        _token_gradients(summary, row_grads) if needed and row_grads is not None else None
        for needed, row_grads in ((for_keys, sums.keys), (for_values, sums.values))
    )
    if term is None or not (for_keys or for_values):
        return grad_keys, grad_values
    assert summary.offsets is not None  # own codewords are means
    codewords, leaves = summary.codewords, summary.leaves
    heads, head_dim = len(term.matrix), term.matrix.shape[1]
    key_offsets = summary.offsets.unflatten(0, (heads, -1))
    grad_matrix = term.grad_matrix() / variance_of(codewords)
    if grad_values is not None:
        grad_values += (key_offsets @ grad_matrix.mT).flatten(0, 1)
    if grad_keys is not None and sums.values is not None:
        value_offsets = offsets_to(codewords.values, value, leaves).unflatten(0, (heads, -1))
        grad_keys += (value_offsets @ grad_matrix).flatten(0, 1)
        grad_spreads = sums.values[: codewords.counts.numel(), head_dim, None]
        grad_spreads = 2 * grad_spreads.unflatten(0, codewords.counts.shape)
        grad_spreads /= codewords.counts.clamp(min=1)[..., None]
        # A key's offset to its cell is that to its leaf and that of its leaf.
        cell_shares, leaf_shares = (
            grad_spreads[:, :, :1],
            grad_spreads[:, :, :1] + grad_spreads[:, :, 1:],
        )
        between = cell_shares * (codewords.keys[:, :, 1:] - codewords.keys[:, :, :1])
        leaf_shares -= 2 * (grad_matrix * term.matrix).sum(dim=(1, 2))[:, None, None, None]
        shares = torch.cat([leaf_shares, between], dim=-1).flatten(0, 2)
        shares = shares.index_select(0, leaves.number)
        grad_keys += shares[:, :1] * key_offsets.flatten(0, 1) + shares[:, 1:]
    return grad_keys, grad_values


def _token_gradients(summary: KeySummary, sums: Tensor) -> Tensor:
    """Gradients (H S, D) of what became means and rows of the table (rows, W)."""
    counts, head_dim = summary.codewords.counts, summary.codewords.keys.shape[3]
    leaf_shares = _leaf_shares(sums[: counts.numel(), :head_dim], counts).flatten(0, 2)
    found = leaf_shares.index_select(0, summary.leaves.number)
    keys = sums[summary.key_rows, :head_dim]
    return found + keys if len(keys) else found


class _Moments:
    """What stored codewords accumulate for their keys: sum_i w_ia [q_i, 1] [dy_i, delta_i]^T, of
    the rows for keys, D, and for values, one."""

    def __init__(self, summary: KeySummary, for_keys: bool, for_values: bool) -> None:
        self.summary, self.needed = summary, (for_keys, for_values)
        codewords = summary.codewords.keys
        head_dim = codewords.shape[3]
        self.rows = slice(0 if for_keys else head_dim, head_dim + for_values)
        width = (self.rows.stop - self.rows.start) * (1 + head_dim)
        self.sums = codewords.new_zeros(codewords.shape[:3].numel(), width)

    def add(self, rows: Tensor, found: _Attended) -> None:
        """Add what columns (G, K), which are these codewords, see."""
        if self.sums.shape[1] == 0:
            return
        head_dim = self.summary.codewords.keys.shape[3]
        left = found.queries[..., self.rows, None]
        right = torch.cat([found.grads[..., :head_dim], found.delta], dim=-1)[..., None, :]
        _add_rows(self.sums, rows, found.weights.mT @ (left * right).flatten(-2))

    def gradients(self, value: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of keys and values (H S, D); `value` is (H S, D)."""
        head_dim = value.shape[1]
        grad_keys, grad_values = (
            torch.empty_like(value) if needed else None for needed in self.needed
        )
        leaf_shares = _leaf_shares(self.sums, self.summary.codewords.counts)
        leaf_shares = leaf_shares.flatten(0, 2).unflatten(-1, (-1, 1 + head_dim))
        length = chunk_length(value.device, max(1, self.sums.shape[1]), ELEMENTS)
        for start in range(0, len(value), length):
            part = slice(start, start + length)
            leaf = self.summary.leaves.number[part]
            if grad_values is not None:
                grad_values[part] = leaf_shares[:, -1, :head_dim].index_select(0, leaf)
            if grad_keys is not None:
                matrices = leaf_shares[:, :head_dim].index_select(0, leaf)
                values = F.pad(value[part], (0, 1), value=-1)[..., None]
                grad_keys[part] = (matrices @ values)[..., 0]
        return grad_keys, grad_values
