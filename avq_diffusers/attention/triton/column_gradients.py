"""Column gradient kernel: one program per query tile, which makes its choice of parents again.

With the weights w_ia of codeword a for query i, and d for gradients:

    delta_i = dy_i.y_i
    dq_i = s sum_a w_ia (dy_i.mean_a - delta_i) c_a
    dmean_a = sum_i w_ia dy_i
    dc_a = s sum_i w_ia (dy_i.mean_a - delta_i) q_i

A tile stores the last two for its own queries, column by column: of all parents, refined ones with
the keys that stay, then of the children of refined parents.

Shapes: as in `attention`, T query tiles; a tile has MP + P CP columns.
"""

import triton
import triton.language as tl

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


@triton.jit
def _load_tokens(pointer, token, stride, is_token, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows (BLOCK_N, WIDTH) of tokens, padded with zeros."""
    columns = tl.arange(0, WIDTH)
    offsets = token[:, None] * stride + columns[None, :]
    mask = is_token[:, None] & (columns < HEAD_DIM)[None, :]
    return tl.load(pointer + offsets, mask=mask, other=0.0)


@triton.jit
def _add_columns(
    grad_query, query, grad, log_total, delta, tables, column_ptr, rows, columns, valid, sizes
):
    """Store the gradients of some columns; return those of the queries with theirs added.

    grad_query: (BLOCK_N, DP), in units of base 2.
    query, grad: (BLOCK_N, DP) and the gradients of outputs.
    log_total, delta: (BLOCK_N).
    rows: (columns) of codes and means.
    """
    codes = load_codes(tables, rows, valid, sizes)
    means = load_means(tables, rows, valid, sizes)[0]
    log_counts = tl.load(tables.log_counts + rows, mask=valid, other=float("-inf"))

    # (BLOCK_N, columns)
    weights = tl.exp2(logits_of((query,), codes, log_counts[None, :] - log_total[:, None]))
    grad_logits = weights * (product(grad, tl.trans(means)) - delta[:, None])
    weights = weights.to(grad.dtype)
    grad_logits = grad_logits.to(grad.dtype)

    # (columns, DP)
    grad_means = product(tl.trans(weights), grad)
    grad_codes = product(tl.trans(grad_logits), query)
    numbers = tl.arange(0, sizes.PADDED_DIM)
    pointers = column_ptr + columns[:, None] * (2 * sizes.HEAD_DIM) + numbers[None, :]
    mask = valid[:, None] & (numbers < sizes.HEAD_DIM)[None, :]
    tl.store(pointers, grad_means, mask=mask)
    tl.store(pointers + sizes.HEAD_DIM, grad_codes, mask=mask)
    return tl.dot(grad_logits, codes[0], acc=grad_query, input_precision="tf32x3")


@triton.jit
def _tile_gradients(
    query,
    grad,
    is_query,
    tables,
    column_ptr,
    sizes,
    IMPORTANCE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GRAD_M: tl.constexpr,
    GRAD_P: tl.constexpr,
):
    """Store the gradients of the columns of a tile; return those of its queries (BLOCK_N, DP)."""
    softmax, total = attend_tile(
        (query,),
        is_query,
        tables,
        None,
        None,
        sizes,
        IMPORTANCE_TILE,
        BLOCK_M,
        BLOCK_P,
        True,
        BLOCK_M,
        BLOCK_P,
    )
    log_total = softmax.running_max + tl.log2(total)
    delta = tl.sum(softmax.numerator[0] * grad.to(tl.float32), axis=1) / total

    grad_query = tl.zeros(query.shape, tl.float32)
    refined = None
    if sizes.SELECTS:
        refined = load_refined(tables, sizes)
    for start in tl.range(0, sizes.PARENT_ROWS, GRAD_M):
        parents, rows = rows_of_parents(refined, start, sizes, GRAD_M)
        valid = tl.full([GRAD_M], True, tl.int1)
        grad_query = _add_columns(
            grad_query,
            query,
            grad,
            log_total,
            delta,
            tables,
            column_ptr,
            rows,
            parents,
            valid,
            sizes,
        )
    if sizes.NUM_REFINED > 0:
        for start in tl.range(0, sizes.NUM_REFINED, GRAD_P):
            columns, rows, valid = rows_of_children(tables, start, sizes, GRAD_P)
            grad_query = _add_columns(
                grad_query,
                query,
                grad,
                log_total,
                delta,
                tables,
                column_ptr,
                2 * sizes.PARENT_ROWS + rows,
                columns,
                valid,
                sizes,
            )
    return grad_query * LN2


@triton.jit(
    do_not_specialize=[
        "num_queries",
        "query_stride_batch",
        "query_stride_head",
        "grad_stride_batch",
        "grad_stride_head",
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
    num_queries,
    query_stride_batch,
    query_stride_head,
    grad_stride_batch,
    grad_stride_head,
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
    GRAD_M: tl.constexpr,
    GRAD_P: tl.constexpr,
):
    """Write the gradients of the queries of one tile, and what the tile gives its columns.

    refined: (B, H, T, P) int32, the parents that every tile refines.
    grad_query: (B, N, H, D).
    column: (B, H, T, MP + P CP, 2 D) float32, gradients of mean values, then of mean keys over s.
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

    row = tl.arange(0, BLOCK_N)
    token = tile * QUERY_TILE + row
    is_query = (row < QUERY_TILE) & (token < num_queries)
    if query_order_ptr is not None:
        token = tl.load(query_order_ptr + token, mask=is_query, other=0).to(tl.int32)

    # (BLOCK_N, DP)
    query = _load_tokens(query_ptr, token, QUERY_STRIDE_TOKEN, is_query, HEAD_DIM, PADDED_DIM)
    grad = _load_tokens(grad_output_ptr, token, GRAD_STRIDE_TOKEN, is_query, HEAD_DIM, PADDED_DIM)

    # Assigned to a variable, sizes would no longer be constants.
    grad_query = _tile_gradients(
        query,
        grad,
        is_query,
        Tables(codes_ptr, means_ptr, log_counts_ptr, spread_ptr, refined_ptr),
        column_ptr,
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
            False,
            False,
            0,
            0,
            0,
            0,
            0.0,
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
