"""Exact gradients of AVQ attention in plain PyTorch, at O(N M D^2) on every device.

Query i gives each of the n_a keys of codeword a the weight
A_ia = exp(s q_i.c_a) / sum_b n_b exp(s q_i.c_b). With d for gradients, straight through the
quantization of keys (paper, section Method):

    delta_i = dy_i.y_i
    dq_i = s sum_a n_a A_ia (dy_i.mean_a - delta_i) c_a
    dv_j = sum_i A_ij dy_i
    dk_j = s sum_i A_ij (dy_i.v_j - delta_i) q_i

The last two are affine in v_j. So every codeword stores the moments
sum_i A_ia [1, s q_i] [dy_i, delta_i]^T, and its keys read them. A key has two codewords: its parent
in tiles that do not refine this parent, its leaf in the other tiles. Their moments add up.

The choice of parents is a constant. The code of `forward` makes it again. After a forward pass by
the kernels, it may choose differently between parents of nearly equal importance.

Shapes: as in `forward`, with L rows of moments.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention import forward
from avq_diffusers.attention.forward import CodewordTable
from avq_diffusers.codebook.assignment import (
    across_heads,
    centre_of,
    chunk_length,
    nearest_leaves,
)

# Numbers in the intermediates of one chunk, except on a CPU. A tile has many moments: with fewer
# numbers each tile would be a chunk of about sixty launches.
ELEMENTS = 1 << 28

# Flops of dense attention in the time of one flop of `gradients`. Measured on two CPU cores and on
# an H200, where memory and launches bound `gradients`.
DENSE_SPEED_CPU = 2.0
DENSE_SPEED = 20.0


def dense_is_faster(
    device: torch.device,
    *,
    num_keys: int,
    head_dim: int,
    num_parents: int,
    num_children: int,
    num_refined: int,
) -> bool:
    """Whether dense attention over quantized keys trains faster, counted in flops per query.

    False unless all tiles see the same keys: they refine no parent, or all.
    """
    if 0 < num_refined < num_parents:
        return False
    codewords = num_parents + num_refined * num_children
    dense = 14 * num_keys * head_dim
    linear = 12 * codewords * head_dim + 2 * codewords * head_dim**2
    return dense < (DENSE_SPEED_CPU if device.type == "cpu" else DENSE_SPEED) * linear


def quantize(key: Tensor, parents: Tensor, children: Tensor) -> Tensor:
    """Replace each key by its leaf's codeword minus one vector per head, which softmax ignores.

    Args:
        key: (B, H, S, D).
        parents: (H, M0, D).
        children: (H, M0, C, D).

    Returns:
        (B, H, S, D), dtype of `key`.
    """
    batch = key.shape[0]
    centre = centre_of(parents)[:, None]
    codewords = torch.cat([parents[:, :, None], children], dim=2) - centre
    codewords = codewords.to(key.dtype).flatten(0, 2)
    num_leaves = 1 + children.shape[2]
    leaf = nearest_leaves(
        key.flatten(0, 1),
        parents.expand(batch, -1, -1, -1).flatten(0, 1),
        children.expand(batch, -1, -1, -1, -1).flatten(0, 1),
    )
    leaf = across_heads(leaf.view(key.shape[:3]), parents.shape[1] * num_leaves)
    return codewords.index_select(0, leaf.flatten()).view(key.shape)


def gradients(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parents: Tensor,
    children: Tensor,
    *,
    needs_grad: Sequence[bool],
    num_refined: int,
    query_tile: int,
    query_order: Tensor | None,
    importance_tile: int | None,
    scale: float,
) -> list[Tensor]:
    """Gradients of `forward.avq_attention`.

    Args:
        grad_output: (B, H, N, D).
        needs_grad: for query, key and value.

        The other arguments are those of `forward.avq_attention`.

    Returns:
        The gradients that are needed: (B, H, N, D) or (B, H, S, D) views of (B, N, H, D) memory, in
        the dtype of their input.
    """
    batch, heads, _, head_dim = query.shape
    num_parents, num_children = children.shape[1:3]
    grads = [
        empty_gradient(x) if needed else None
        for x, needed in zip((query, key, value), needs_grad, strict=True)
    ]
    grad_query, grad_key, grad_value = grads
    # Of the moments: the first row is for values, the others are for keys.
    rows = slice(0 if needs_grad[2] else 1, 1 + head_dim if needs_grad[1] else 1)
    num_moments = (rows.stop - rows.start) * (1 + head_dim)

    table_elements = heads * num_parents * (2 + num_children) * max(1, num_moments)
    size = min(batch, chunk_length(query.device, table_elements, ELEMENTS))
    for start in range(0, batch, size):
        part = slice(start, min(start + size, batch))
        elements = part.stop - part.start
        part_parents = parents.expand(elements, -1, -1, -1).flatten(0, 1)
        part_children = children.expand(elements, -1, -1, -1, -1).flatten(0, 1)
        part_value = value[part].flatten(0, 1)
        leaf = nearest_leaves(key[part].flatten(0, 1), part_parents, part_children)
        counts, value_sums = forward.aggregate(leaf, part_value, part_parents, part_children)
        moments = _query_gradients(
            grad_output[part].flatten(0, 1),
            query[part].flatten(0, 1),
            forward.codeword_table(part_parents, part_children, counts, value_sums),
            None if grad_query is None else grad_query[part],
            rows,
            num_refined=num_refined,
            query_tile=query_tile,
            query_order=query_order,
            importance_tile=importance_tile,
            scale=scale,
        )
        if num_moments:
            _key_gradients(
                moments,
                leaf,
                part_value,
                None if grad_key is None else grad_key[part],
                None if grad_value is None else grad_value[part],
            )
    return [grad for grad in grads if grad is not None]


def empty_gradient(tokens: Tensor) -> Tensor:
    """An uninitialized gradient of (B, H, N, D) tokens, a view of (B, N, H, D) memory."""
    tokens = tokens.transpose(1, 2)
    return torch.empty_like(tokens, memory_format=torch.contiguous_format).transpose(1, 2)


def _query_gradients(
    grad_output: Tensor,
    query: Tensor,
    table: CodewordTable,
    grad_query: Tensor | None,
    rows: slice,
    *,
    num_refined: int,
    query_tile: int,
    query_order: Tensor | None,
    importance_tile: int | None,
    scale: float,
) -> Tensor:
    """Write the gradients (B, H / B, N, D) of the queries; return moments (H, M0, 2 + C, L, 1 + D).

    Computes only the `rows` of the moments.
    """
    heads, num_queries, head_dim = query.shape
    num_parents, per_cell = table.counts.shape[1:]
    num_rows = rows.stop - rows.start
    dtype = table.codewords.dtype
    query_tile = min(query_tile, num_queries)
    moments = table.codewords.new_zeros(heads, num_parents, per_cell, num_rows, 1 + head_dim)
    moments_of_codeword = moments.flatten(0, 2)

    num_visible = num_parents + num_refined * (per_cell - 2)
    moment_elements = (num_visible + query_tile) * num_rows * (1 + head_dim)
    tile_elements = moment_elements + 4 * num_visible * query_tile + 2 * num_visible * head_dim
    chunk = query_tile * chunk_length(query.device, heads * tile_elements, ELEMENTS)
    for start in range(0, num_queries, chunk):
        stop = min(start + chunk, num_queries)
        order = slice(start, stop) if query_order is None else query_order[start:stop].long()
        tiles = forward.cut_tiles(query, order, query_tile, dtype)
        visible = forward.visible_codewords(
            tiles,
            table,
            num_queries=stop - start,
            num_refined=num_refined,
            importance_tile=importance_tile,
            scale=scale,
        )
        tiles = tiles.transpose(0, 1)
        grads = forward.cut_tiles(grad_output, order, query_tile, dtype).transpose(0, 1)

        # (T, H, M0 + P C, ...)
        codewords = forward.gather_rows(table.codewords, visible)
        value_means = forward.gather_rows(table.value_means, visible)
        log_counts = forward.gather_rows(table.log_counts, visible)
        counts = forward.gather_rows(table.counts, visible)

        # (T, H, I, M0 + P C)
        logits = scale * tiles @ codewords.mT + log_counts[..., None, :]
        weights = logits.softmax(dim=-1)
        products = grads @ value_means.mT
        delta = (weights * products).sum(dim=-1, keepdim=True)
        if grad_query is not None:
            grad_logits = weights * (products - delta)
            grad_tiles = scale * grad_logits @ codewords
            forward.write_tiles(grad_query, grad_tiles.transpose(0, 1), order)
        if num_rows:
            left = F.pad(scale * tiles, (1, 0), value=1)[..., rows, None]
            right = torch.cat([grads, delta], dim=-1)[..., None, :]
            weights /= counts.clamp(min=1)[..., None, :]
            tile_moments = weights.mT @ (left * right).flatten(-2)
            # A tile sees no codeword twice, so no two rows of an addition collide.
            for seen, added in zip(visible.flatten(1), tile_moments.flatten(1, 2), strict=True):
                moments_of_codeword.index_add_(0, seen, added.view(-1, num_rows, 1 + head_dim))
    return moments


def _key_gradients(
    moments: Tensor,
    leaf: Tensor,
    value: Tensor,
    grad_key: Tensor | None,
    grad_value: Tensor | None,
) -> None:
    """Write the gradients (B, H / B, S, D) of keys and values from the moments of codewords."""
    num_keys, head_dim = value.shape[1:]
    num_leaves = moments.shape[2] - 1
    leaf = across_heads(leaf, moments.shape[1] * num_leaves)
    moments = (moments[:, :, 1:] + moments[:, :, :1]).flatten(0, 2)

    chunk = chunk_length(value.device, len(leaf) * moments[0].numel(), ELEMENTS)
    for start in range(0, num_keys, chunk):
        part = slice(start, start + chunk)
        of_leaf = leaf[:, part]
        if grad_value is not None:
            target = grad_value[:, :, part]
            target.copy_(moments[:, 0, :-1].index_select(0, of_leaf.flatten()).view(target.shape))
        if grad_key is not None:
            target = grad_key[:, :, part]
            values = F.pad(value[:, part].to(moments.dtype), (0, 1), value=-1)
            matrices = moments[:, -head_dim:].index_select(0, of_leaf.flatten())
            target.copy_((matrices @ values.reshape(-1, 1 + head_dim, 1)).view(target.shape))
