"""Query gradients kernel: one program per query tile, which attends to the tile's columns again.

With the weights w_ia, mean value v_a, spread s_a and mean key c_a of column a for query i, the
matrix M and the size of `first_order`, and d for gradients:

    r_i = sum_a w_ia s_a            g_i = r_i / (1 + r_i size_i)
    dg_i = dy_i.M q_i               dr_i = dg_i / (1 + r_i size_i)^2
    p_ia = dy_i.v_a + dr_i s_a      delta_i = sum_a w_ia p_ia
    dq_i = sum_a w_ia (p_ia - delta_i) c_a + g_i M^T dy_i - g_i^2 dg_i dsize_i / dq_i

Other kernels need a few numbers of each query to find the gradients of the columns.

Shapes: as in `attention`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.attention import (
    add_columns,
    attend_tile,
    seen_by_tile,
)
from avq_diffusers.attention.triton.first_order import matrix_block, matrix_size, relative_to
from avq_diffusers.attention.triton.leaf_order import LeafPointers
from avq_diffusers.attention.triton.problem import Strides
from avq_diffusers.attention.triton.rows import Tables, product
from avq_diffusers.attention.triton.select import ColumnPointers
from avq_diffusers.attention.triton.softmax import (
    LN2,
    load_codes,
    load_values,
    logits_of,
)
from avq_diffusers.attention.triton.tile import (
    SQUARED_LN2,
    head_of_tables,
    load_queries,
    load_query_dims,
    output_rows,
    query_rows,
    size_of,
    store_dims,
    whole_tile,
)
from avq_diffusers.attention.triton.tokens import (
    TokenLayout,
    TokenPointers,
    centre_logits,
    centre_of_head,
    load_tokens,
    token_logits,
)


class QueryPointers(NamedTuple):
    """The queries, the gradients of their outputs, and numbers (B, H, N) of each in float32."""

    query: tl.tensor
    grad_output: tl.tensor
    order: tl.tensor
    log_total: tl.tensor  # log2 of the sum of weights
    token_total: tl.tensor  # the same for logits of keys that are not centred; or None
    delta: tl.tensor
    grad_seen: tl.tensor  # dr, like the next one None without a first-order term
    share: tl.tensor  # g


class GradientBlocks(NamedTuple):
    """Compile-time blocks: queries, rows, keys, and query tiles that are looked at at once.

    SCALE: factor on the logits.
    QUERY_STRIDE, GRAD_STRIDE: of tokens, for queries and the gradients of their outputs.
    """

    N: tl.constexpr
    ROWS: tl.constexpr
    KEYS: tl.constexpr
    TILES: tl.constexpr
    SCALE: tl.constexpr
    QUERY_STRIDE: tl.constexpr
    GRAD_STRIDE: tl.constexpr


class GradientTile(NamedTuple):
    """The queries of a tile, the gradients of their outputs, and their numbers."""

    query: tl.tuple  # (BLOCK_N, DP) alone
    grad: tl.tensor  # (BLOCK_N, DP)
    log_total: tl.tensor
    delta: tl.tensor
    grad_seen: tl.tuple  # nothing without a first-order term


class GradQuery(NamedTuple):
    """Sums over the columns of a tile."""

    total: tl.tensor  # (BLOCK_N, DP) the gradient divided by LN2
    key_logits: tl.tensor  # (BLOCK_N) gradients of the logits of keys, times their factor


@triton.jit
def _grad_logits(tile, logits, values, products):
    """Gradients (BLOCK_N, columns) of logits, divided by LN2.

    products: to add those of gradients and values to.
    """
    weights = tl.exp2(logits - tile.log_total[:, None])
    return weights * product(tile.grad, tl.trans(values), products - tile.delta[:, None])


@triton.jit
def _add_codewords(tile, tables, rows, bias, valid, sums, SIZES):
    """Add rows of the tables to the gradients of queries."""
    codes = load_codes(tables, rows, valid, SIZES)
    values = load_values(tables, rows, valid, SIZES)
    logits = logits_of(tile.query, codes, bias[None, :])
    products = tl.zeros(logits.shape, tl.float32)
    if SIZES.FIRST_ORDER:
        spread = tl.load(tables.spread + rows, mask=valid, other=0.0)
        products = tile.grad_seen[0][:, None] * spread[None, :]
    grad_logits = _grad_logits(tile, logits, values[0], products)
    grad_logits = grad_logits.to(codes[0].dtype)
    return GradQuery(product(grad_logits, codes[0], sums.total), sums.key_logits)


@triton.jit
def _add_tokens(tile, centre_bias, tokens, token, valid, sums, SIZES):
    """Add some tokens, around the centre, to the gradients of queries."""
    logits = token_logits(tile.query, centre_bias, tokens, token, valid, SIZES)
    values = load_tokens(tokens.value, token, tokens.value_stride, valid, SIZES)[0]
    grad_logits = _grad_logits(tile, logits, values, tl.zeros(logits.shape, tl.float32))
    keys = load_tokens(tokens.key, token, tokens.key_stride, valid, SIZES)[0]
    grad_logits = (grad_logits * SIZES.FACTOR).to(keys.dtype)
    # Sums of what has been rounded take the centre away exactly.
    key_logits = sums.key_logits + tl.sum(grad_logits.to(tl.float32), axis=1)
    return GradQuery(product(grad_logits, keys, sums.total), key_logits)


@triton.jit
def _pull(grad_rows, tile, tables, SIZES):
    """(BLOCK_N, DP) The transposed matrix times gradients of outputs, some of their dims at once,
    because the whole matrix spills."""
    DIM: tl.constexpr = SIZES.PADDED_DIM
    SOME: tl.constexpr = DIM if DIM < 32 else 32
    largest = matrix_size(tables, SIZES)
    pulled = tl.zeros([tile.token.shape[0], DIM], tl.float32)
    for first in tl.range(0, DIM, SOME):
        grad = load_query_dims(grad_rows, first, tile, SIZES.HEAD_DIM, SOME)
        matrix = relative_to(largest, matrix_block(tables, first, SOME, 0, DIM, SIZES), grad.dtype)
        pulled = product(grad, tl.trans(matrix), pulled)
    return pulled * largest


@triton.jit
def _first_order(query, pulled, seen, SIZES):
    """The gradients of the first-order term.

    Returns:
        grad_query: (BLOCK_N, DP), divided by LN2.
        grad_seen, share: (BLOCK_N).
    """
    guard = 1.0 / (1.0 + seen * size_of(query, SIZES))
    share = seen * guard
    wide = query[0].to(tl.float32)
    grad_share = tl.sum(wide * pulled, axis=1)
    grad_size = share * share * grad_share * (2.0 * SQUARED_LN2 / SIZES.HEAD_DIM)
    grad_query = (share[:, None] * pulled - grad_size[:, None] * wide) * (1.0 / LN2)
    return grad_query, grad_share * guard * guard, share


@triton.jit
def query_gradients_kernel(
    grad_query_ptr,
    queries: QueryPointers,
    tables: Tables,
    tokens: TokenPointers,
    leaves: LeafPointers,
    columns: ColumnPointers,
    num_queries,
    query_strides: Strides,
    grad_strides: Strides,
    key_layout: TokenLayout,
    sink_layout: TokenLayout,
    SIZES: tl.constexpr,
    BLOCKS: tl.constexpr,
    GRADIENT_BLOCKS: tl.constexpr,
):
    """Write the gradients of the queries of one tile, and their numbers.

    grad_query: (B, N, H, D).
    """
    HAS_TOKENS: tl.constexpr = SIZES.REFINES == "threshold" or SIZES.SINKS
    tile = whole_tile(queries.order, columns.shown, num_queries, SIZES, BLOCKS.N)
    tables = head_of_tables(tables, tile.batch_head, tile.head, SIZES)
    rows = query_rows(queries.query, query_strides, tile, GRADIENT_BLOCKS.QUERY_STRIDE)
    grad_rows = query_rows(queries.grad_output, grad_strides, tile, GRADIENT_BLOCKS.GRAD_STRIDE)
    query = load_queries(rows, tile, SIZES)
    seen = seen_by_tile(tile, tables, tokens, leaves, columns, key_layout, sink_layout, SIZES)
    softmax = attend_tile(query, tile, seen, SIZES, BLOCKS)
    query = load_queries(rows, tile, SIZES, True)
    grad = load_queries(grad_rows, tile, SIZES)[0]
    total = softmax.total
    log_total = softmax.running_max + tl.log2(total)
    delta = tl.sum(softmax.numerator[0] * grad.to(tl.float32), axis=1) / total

    number = tile.batch_head * num_queries + tile.token
    grad_query = tl.zeros(grad.shape, tl.float32)
    grad_seen = ()
    if SIZES.FIRST_ORDER:
        spread = softmax.spread / total
        pulled = _pull(grad_rows, tile, tables, SIZES)
        grad_query, grad_of_seen, share = _first_order(query, pulled, spread, SIZES)
        delta += grad_of_seen * spread
        grad_seen += (grad_of_seen,)
        tl.store(queries.grad_seen + number, grad_of_seen, mask=tile.valid)
        tl.store(queries.share + number, share, mask=tile.valid)
    tl.store(queries.log_total + number, log_total, mask=tile.valid)
    tl.store(queries.delta + number, delta, mask=tile.valid)
    centre_bias = ()
    centre_ptr = centre_of_head(tokens, tile, SIZES)
    if HAS_TOKENS:
        centre_bias = centre_logits(query, centre_ptr, SIZES)
        tl.store(queries.token_total + number, log_total - centre_bias, mask=tile.valid)

    queries_of_tile = GradientTile(query, grad, log_total, delta, grad_seen)
    sums = GradQuery(grad_query, tl.zeros([BLOCKS.N], tl.float32))
    sums = add_columns(
        queries_of_tile, centre_bias, sums, tile, seen, _add_codewords, _add_tokens, SIZES, BLOCKS
    )
    grad_query = sums.total
    if HAS_TOKENS:
        centre = tl.load(centre_ptr + tl.arange(0, SIZES.PADDED_DIM))
        grad_query -= sums.key_logits[:, None] * centre[None, :]
    output_row_ptr = output_rows(grad_query_ptr, tile, num_queries, SIZES)
    store_dims(output_row_ptr, 0, tile, grad_query * LN2, SIZES.HEAD_DIM)
