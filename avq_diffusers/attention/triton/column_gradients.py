"""Column gradient kernel: one program per query tile, which makes its choices again.

With the weights w_ia of column a for query i, and d for gradients:

    delta_i = dy_i.y_i
    dq_i = s sum_a w_ia (dy_i.mean_a - delta_i) c_a
    dmean_a = sum_i w_ia dy_i
    dc_a = s sum_i w_ia (dy_i.mean_a - delta_i) q_i

A tile stores the last two for its own queries, column by column: of all parents, refined ones with
the keys that stay, then of the children of refined parents. Exact keys and sink keys follow, each a
mean of one key; the columns that they replace get 0.

Shapes: as in `attention`, T query tiles; a tile has MP + P CP columns of codewords.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.exact import (
    NEVER,
    exact_of_tile,
    exact_tokens,
    load_token_codes,
    load_tokens,
    sinks_of_head,
)
from avq_diffusers.attention.triton.rows import product
from avq_diffusers.attention.triton.softmax import (
    Sizes,
    Tables,
    load_codes,
    load_means,
    logits_of,
)
from avq_diffusers.attention.triton.tile import (
    attend_tile,
    load_refined,
    rows_of_children,
    rows_of_parents,
)

# 1 / log2(e): logits are in base 2.
LN2 = tl.constexpr(0.6931471805599453)


class Tile(NamedTuple):
    """What the gradients of the columns of a tile are made of.

    query: (BLOCK_N, DP).
    grad: (BLOCK_N, DP), gradients of the outputs.
    log_total: (BLOCK_N), log2 of the sum of weights.
    delta: (BLOCK_N).
    """

    query: tl.tensor
    grad: tl.tensor
    log_total: tl.tensor
    delta: tl.tensor


@triton.jit
def _load_queries(pointer, token, stride, is_query, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows (BLOCK_N, WIDTH), padded with zeros."""
    columns = tl.arange(0, WIDTH)
    offsets = token[:, None] * stride + columns[None, :]
    mask = is_query[:, None] & (columns < HEAD_DIM)[None, :]
    return tl.load(pointer + offsets, mask=mask, other=0.0)


@triton.jit
def _add_columns(grad_query, tile, codes, means, log_counts, column_ptr, columns, valid, sizes):
    """Store the gradients of some columns; return those of the queries with theirs added.

    grad_query: (BLOCK_N, DP), in units of base 2.
    codes, means: (columns, DP).
    log_counts: (columns), -inf where nothing attends.
    columns: where to store, from `column_ptr` on.
    """
    # (BLOCK_N, columns)
    bias = log_counts[None, :] - tile.log_total[:, None]
    weights = tl.exp2(logits_of((tile.query,), (codes,), bias))
    grad_logits = weights * (product(tile.grad, tl.trans(means)) - tile.delta[:, None])
    weights = weights.to(tile.grad.dtype)
    grad_logits = grad_logits.to(tile.grad.dtype)

    # (columns, DP)
    grad_means = product(tl.trans(weights), tile.grad)
    grad_codes = product(tl.trans(grad_logits), tile.query)
    numbers = tl.arange(0, sizes.PADDED_DIM)
    pointers = column_ptr + columns[:, None] * (2 * sizes.HEAD_DIM) + numbers[None, :]
    mask = valid[:, None] & (numbers < sizes.HEAD_DIM)[None, :]
    tl.store(pointers, grad_means, mask=mask)
    tl.store(pointers + sizes.HEAD_DIM, grad_codes, mask=mask)
    return tl.dot(grad_logits, codes, acc=grad_query, input_precision="tf32x3")


@triton.jit
def _add_codewords(grad_query, tile, tables, exact, column_ptr, rows, columns, valid, sizes):
    """`_add_columns` of `rows` of the tables."""
    codes = load_codes(tables, rows, valid, sizes)[0]
    means = load_means(tables, rows, valid, sizes)[0]
    log_counts = tl.load(tables.log_counts + rows, mask=valid, other=float("-inf"))
    if sizes.EXACT:
        first = tl.load(exact.first + columns, mask=valid, other=0)
        log_counts = tl.where(first == NEVER, log_counts, float("-inf"))
    return _add_columns(
        grad_query, tile, codes, means, log_counts, column_ptr, columns, valid, sizes
    )


@triton.jit
def _add_tokens(grad_query, tile, tokens, token, column_ptr, columns, valid, sizes):
    """`_add_columns` of keys that attend as themselves."""
    codes = load_token_codes(tokens, token, valid, 0, sizes.PADDED_DIM, sizes)
    values = load_tokens(
        tokens.value, token, tokens.value_stride, valid, 0, sizes.PADDED_DIM, sizes
    )
    log_counts = tl.where(valid, 0.0, float("-inf"))
    return _add_columns(
        grad_query, tile, codes, values, log_counts, column_ptr, columns, valid, sizes
    )


@triton.jit
def _tile_gradients(
    query,
    grad,
    is_query,
    tables,
    exact,
    sinks,
    column_ptr,
    exact_column_ptr,
    sink_column_ptr,
    sizes,
    IMPORTANCE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GRAD_M: tl.constexpr,
    GRAD_P: tl.constexpr,
):
    """Store the gradients of the columns of a tile; return those of its queries (BLOCK_N, DP)."""
    softmax, total, chosen = attend_tile(
        (query,),
        is_query,
        tables,
        exact,
        sinks,
        sizes,
        IMPORTANCE_TILE,
        BLOCK_M,
        BLOCK_P,
        True,
        BLOCK_M,
        BLOCK_P,
    )
    delta = tl.sum(softmax.numerator[0] * grad.to(tl.float32), axis=1) / total
    tile = Tile(query, grad, softmax.running_max + tl.log2(total), delta)

    grad_query = tl.zeros(query.shape, tl.float32)
    refined = None
    if sizes.SELECTS:
        refined = load_refined(tables, sizes)
    for start in tl.range(0, sizes.PARENT_ROWS, GRAD_M):
        parents, rows = rows_of_parents(refined, start, sizes, GRAD_M)
        valid = tl.full([GRAD_M], True, tl.int1)
        grad_query = _add_codewords(
            grad_query, tile, tables, exact, column_ptr, rows, parents, valid, sizes
        )
    if sizes.NUM_REFINED > 0:
        for start in tl.range(0, sizes.NUM_REFINED, GRAD_P):
            columns, rows, valid = rows_of_children(tables, start, sizes, GRAD_P)
            rows += 2 * sizes.PARENT_ROWS
            grad_query = _add_codewords(
                grad_query, tile, tables, exact, column_ptr, rows, columns, valid, sizes
            )
    if sizes.EXACT:
        for first in tl.range(0, chosen[1], max(sizes.VISIBLE, sizes.BLOCK_K)):
            tokens, number = exact_tokens(exact, chosen, first, sizes)
            for start in tl.range(0, number, sizes.BLOCK_K):
                rank = start + tl.arange(0, sizes.BLOCK_K)
                token = tl.gather(tokens, rank, axis=0)
                valid = rank < number
                grad_query = _add_tokens(
                    grad_query, tile, exact, token, exact_column_ptr, first + rank, valid, sizes
                )
    if sizes.SINKS:
        for start in tl.range(0, sinks.number, sizes.BLOCK_K):
            token = start + tl.arange(0, sizes.BLOCK_K)
            valid = token < sinks.number
            grad_query = _add_tokens(
                grad_query, tile, sinks, token, sink_column_ptr, token, valid, sizes
            )
    return grad_query * LN2


@triton.jit(
    do_not_specialize=[
        "num_queries",
        "query_stride_batch",
        "query_stride_head",
        "grad_stride_batch",
        "grad_stride_head",
        "num_keys",
        "exact_keys",
        "key_stride_batch",
        "key_stride_head",
        "key_stride_token",
        "value_stride_batch",
        "value_stride_head",
        "value_stride_token",
        "num_sinks",
        "sink_key_stride_batch",
        "sink_key_stride_head",
        "sink_key_stride_token",
        "sink_value_stride_batch",
        "sink_value_stride_head",
        "sink_value_stride_token",
    ]
)
def column_gradients_kernel(
    query_ptr,
    grad_output_ptr,
    query_order_ptr,
    codes_ptr,
    means_ptr,
    log_counts_ptr,
    spread_ptr,
    refined_ptr,
    grad_query_ptr,
    column_ptr,
    key_ptr,
    value_ptr,
    sink_key_ptr,
    sink_value_ptr,
    centre_ptr,
    leaf_order_ptr,
    row_start_ptr,
    row_count_ptr,
    row_weight_ptr,
    score_ptr,
    row_ptr,
    ranked_row_ptr,
    first_ptr,
    exact_column_ptr,
    sink_column_ptr,
    num_queries,
    query_stride_batch,
    query_stride_head,
    grad_stride_batch,
    grad_stride_head,
    num_keys,
    exact_keys,
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    value_stride_batch,
    value_stride_head,
    value_stride_token,
    num_sinks,
    sink_key_stride_batch,
    sink_key_stride_head,
    sink_key_stride_token,
    sink_value_stride_batch,
    sink_value_stride_head,
    sink_value_stride_token,
    QUERY_STRIDE_TOKEN: tl.constexpr,
    GRAD_STRIDE_TOKEN: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PARENTS: tl.constexpr,
    NUM_CHILDREN: tl.constexpr,
    NUM_REFINED: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    IMPORTANCE_TILE: tl.constexpr,
    PARENT_ROWS: tl.constexpr,
    CHILD_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MEAN_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OWN_CENTRE: tl.constexpr,
    FACTOR: tl.constexpr,
    VISIBLE: tl.constexpr,
    LOG2_VISIBLE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGN: tl.constexpr,
    GRAD_M: tl.constexpr,
    GRAD_P: tl.constexpr,
):
    """Write the gradients of the queries of one tile, and what the tile gives its columns.

    refined: (B, H, T, P) int32, the parents that every tile refines.
    grad_query: (B, N, H, D).
    column: (B, H, T, MP + P CP, 2 D) float32, gradients of mean values, then of mean keys over s.
    first: (B, H, T, VISIBLE) int32, where the keys of every column begin among the exact keys of
        the tile, `NEVER` if they are not exact; None without exact keys.
    exact_column, sink_column: (B, H, T, keys, 2 D) float32, as `column`; or None.
    """
    num_tiles = tl.num_programs(0) // HEADS
    # Heads first: the rows of neighbouring heads share cache lines.
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    batch = tl.program_id(1).to(tl.int64)
    batch_head = batch * HEADS + head

    MEAN_ROWS: tl.constexpr = 2 * PARENT_ROWS + NUM_PARENTS * CHILD_ROWS
    COLUMNS: tl.constexpr = PARENT_ROWS + NUM_REFINED * CHILD_ROWS
    query_start = batch * query_stride_batch + head.to(tl.int64) * query_stride_head
    query_ptr += tl.multiple_of(query_start, 8)
    grad_start = batch * grad_stride_batch + head.to(tl.int64) * grad_stride_head
    grad_output_ptr += tl.multiple_of(grad_start, 8)
    codes_ptr += batch_head * (MEAN_ROWS * PADDED_DIM)
    means_ptr += batch_head * (MEAN_ROWS * MEAN_COLUMNS)
    log_counts_ptr += batch_head * MEAN_ROWS
    spread_ptr += batch_head * PARENT_ROWS
    grad_query_ptr += batch * num_queries * (HEADS * HEAD_DIM) + head * HEAD_DIM
    column_ptr += (batch_head * num_tiles + tile) * (COLUMNS * 2 * HEAD_DIM)
    SELECTS: tl.constexpr = NUM_REFINED > 0 and NUM_REFINED < NUM_PARENTS
    if SELECTS:
        refined_ptr += (batch_head * num_tiles + tile) * NUM_REFINED

    EXACT: tl.constexpr = score_ptr is not None
    SINKS: tl.constexpr = sink_key_ptr is not None
    exact = None
    sinks = None
    if EXACT or SINKS:
        centre_ptr += (batch_head if OWN_CENTRE else head) * PADDED_DIM
    if EXACT:
        exact_column_ptr += (batch_head * num_tiles + tile) * exact_keys * (2 * HEAD_DIM)
        exact = exact_of_tile(
            key_ptr,
            value_ptr,
            centre_ptr,
            leaf_order_ptr,
            row_start_ptr,
            row_count_ptr,
            row_weight_ptr,
            score_ptr,
            row_ptr,
            ranked_row_ptr,
            first_ptr,
            batch,
            head,
            batch_head * num_tiles + tile,
            num_keys,
            exact_keys,
            key_stride_batch,
            key_stride_head,
            key_stride_token,
            value_stride_batch,
            value_stride_head,
            value_stride_token,
            HEADS,
            MEAN_ROWS,
            VISIBLE,
            ALIGN,
        )
    if SINKS:
        sink_column_ptr += (batch_head * num_tiles + tile) * num_sinks * (2 * HEAD_DIM)
        sinks = sinks_of_head(
            sink_key_ptr,
            sink_value_ptr,
            centre_ptr,
            batch,
            head,
            num_sinks,
            sink_key_stride_batch,
            sink_key_stride_head,
            sink_key_stride_token,
            sink_value_stride_batch,
            sink_value_stride_head,
            sink_value_stride_token,
            ALIGN,
        )

    row = tl.arange(0, BLOCK_N)
    token = tile * QUERY_TILE + row
    is_query = (row < QUERY_TILE) & (token < num_queries)
    if query_order_ptr is not None:
        token = tl.load(query_order_ptr + token, mask=is_query, other=0).to(tl.int32)

    # (BLOCK_N, DP)
    query = _load_queries(query_ptr, token, QUERY_STRIDE_TOKEN, is_query, HEAD_DIM, PADDED_DIM)
    grad = _load_queries(grad_output_ptr, token, GRAD_STRIDE_TOKEN, is_query, HEAD_DIM, PADDED_DIM)

    # Assigned to a variable, sizes would no longer be constants.
    grad_query = _tile_gradients(
        query,
        grad,
        is_query,
        Tables(codes_ptr, means_ptr, log_counts_ptr, spread_ptr, refined_ptr),
        exact,
        sinks,
        column_ptr,
        exact_column_ptr,
        sink_column_ptr,
        Sizes(
            HEAD_DIM,
            NUM_PARENTS,
            NUM_CHILDREN,
            NUM_REFINED,
            PARENT_ROWS,
            CHILD_ROWS,
            PADDED_DIM,
            0,
            PADDED_DIM,
            MEAN_COLUMNS,
            SELECTS,
            True,
            EXACT,
            SINKS,
            VISIBLE,
            LOG2_VISIBLE,
            BLOCK_C,
            BLOCK_K,
            FACTOR,
        ),
        IMPORTANCE_TILE,
        BLOCK_M,
        BLOCK_P,
        GRAD_M,
        GRAD_P,
    )

    columns = tl.arange(0, PADDED_DIM)
    pointers = grad_query_ptr + token[:, None] * (HEADS * HEAD_DIM) + columns[None, :]
    mask = is_query[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, grad_query, mask=mask)
