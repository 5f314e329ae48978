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

from avq_diffusers.attention.triton.attention import add_columns, attend_tile, centre_of_head
from avq_diffusers.attention.triton.first_order import matrix_block, matrix_size
from avq_diffusers.attention.triton.leaf_order import LeafPointers
from avq_diffusers.attention.triton.problem import Strides
from avq_diffusers.attention.triton.rows import Tables, product
from avq_diffusers.attention.triton.select import ColumnPointers
from avq_diffusers.attention.triton.softmax import (
    load_codes,
    load_values,
    logits_of,
    total_spread,
    total_weight,
)
from avq_diffusers.attention.triton.tile import (
    SQUARED_LN2,
    head_of_tables,
    load_queries,
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
    load_tokens,
    token_logits,
)

# 1 / log2(e): logits are in base 2.
LN2 = tl.constexpr(0.6931471805599453)


class QueryNumbers(NamedTuple):
    """Numbers of each query, (B, H, N) float32."""

    log_total: tl.tensor  # log2 of the sum of weights
    token_total: tl.tensor  # the same for logits of keys that are not centred; or None
    delta: tl.tensor
    grad_seen: tl.tensor  # dr, like the next one None without a first-order term
    share: tl.tensor  # g


class QueryStrides(NamedTuple):
    """Compile-time strides of the tokens of queries and of the gradients of their outputs."""

    QUERY: tl.constexpr
    GRAD: tl.constexpr


class GradientTile(NamedTuple):
    """The queries of a tile, the gradients of their outputs, and their numbers."""

    query: tl.tensor  # (BLOCK_N, DP)
    grad: tl.tensor  # (BLOCK_N, DP)
    log_total: tl.tensor
    delta: tl.tensor
    grad_seen: tl.tuple  # nothing without a first-order term


class GradQuery(NamedTuple):
    """Sums over the columns of a tile."""

    total: tl.tensor  # (BLOCK_N, DP) the gradient divided by LN2
    of_keys: tl.tensor  # (BLOCK_N) gradients of the logits of keys, times their factor


@triton.jit
def load_tile(pointer, strides, tile, dims, STRIDE, SIZES):
    """Some dims of a tile's queries, padded with zeros."""
    start = tile.batch * strides.batch + tile.head.to(tl.int64) * strides.head
    # One pointer for all rows: more of them, as in `query_rows`, spill.
    offsets = tile.token[:, None] * STRIDE + dims[None, :]
    mask = tile.valid[:, None] & (dims < SIZES.HEAD_DIM)[None, :]
    return tl.load(pointer + tl.multiple_of(start, 8) + offsets, mask=mask, other=0.0)


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
    values, _ = load_values(tables, rows, valid, SIZES)
    logits = logits_of((tile.query,), codes, bias[None, :])
    products = tl.zeros(logits.shape, tl.float32)
    if SIZES.FIRST_ORDER:
        spread = tl.load(tables.spread + rows, mask=valid, other=0.0)
        products = tile.grad_seen[0][:, None] * spread[None, :]
    grad_logits = _grad_logits(tile, logits, values[0], products)
    grad_logits = grad_logits.to(codes[0].dtype)
    return GradQuery(product(grad_logits, codes[0], sums.total), sums.of_keys)


@triton.jit
def _add_tokens(tile, of_centre, tokens, token, valid, sums, SIZES):
    """Add some tokens, around the centre, to the gradients of queries."""
    logits = token_logits((tile.query,), of_centre, tokens, token, valid, SIZES)
    values = load_tokens(tokens.value, token, tokens.value_stride, valid, SIZES)[0]
    grad_logits = _grad_logits(tile, logits, values, tl.zeros(logits.shape, tl.float32))
    keys = load_tokens(tokens.key, token, tokens.key_stride, valid, SIZES)[0]
    grad_logits = (grad_logits * SIZES.FACTOR).to(keys.dtype)
    # Sums of what has been rounded take the centre away exactly.
    of_keys = sums.of_keys + tl.sum(grad_logits.to(tl.float32), axis=1)
    return GradQuery(product(grad_logits, keys, sums.total), of_keys)


@triton.jit
def _pull(grad_ptr, strides, tile, tables, STRIDE, SIZES):
    """(BLOCK_N, DP) The transposed matrix times gradients of outputs, some of their dims at once,
    because the whole matrix spills."""
    DIM: tl.constexpr = SIZES.PADDED_DIM
    SOME: tl.constexpr = DIM if DIM < 32 else 32
    largest = matrix_size(tables, SIZES)
    pulled = tl.zeros([tile.token.shape[0], DIM], tl.float32)
    for first in tl.range(0, DIM, SOME):
        dims = first + tl.arange(0, SOME)
        grad = load_tile(grad_ptr, strides, tile, dims, STRIDE, SIZES)
        matrix = matrix_block(tables, largest, first, SOME, 0, DIM, SIZES)
        pulled = product(grad, tl.trans(matrix), pulled)
    return pulled * largest


@triton.jit
def _first_order(query, pulled, seen, SIZES):
    """The gradients of the first-order term.

    Returns:
        grad_query: (BLOCK_N, DP), divided by LN2.
        grad_seen, share: (BLOCK_N).
    """
    guard = 1.0 / (1.0 + seen * size_of((query,), SIZES))
    share = seen * guard
    wide = query.to(tl.float32)
    grad_share = tl.sum(wide * pulled, axis=1)
    of_size = share * share * grad_share * (2.0 * SQUARED_LN2 / SIZES.HEAD_DIM)
    grad_query = (share[:, None] * pulled - of_size[:, None] * wide) * (1.0 / LN2)
    return grad_query, grad_share * guard * guard, share


@triton.jit
def query_gradients_kernel(
    query_ptr,
    query_order_ptr,
    grad_output_ptr,
    grad_query_ptr,
    tables: Tables,
    tokens: TokenPointers,
    leaves: LeafPointers,
    columns: ColumnPointers,
    numbers: QueryNumbers,
    num_queries,
    query_strides: Strides,
    grad_strides: Strides,
    key_layout: TokenLayout,
    sink_layout: TokenLayout,
    STRIDES: tl.constexpr,
    SIZES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the gradients of the queries of one tile, and their numbers.

    grad_query: (B, N, H, D).
    """
    tile = whole_tile(query_order_ptr, num_queries, SIZES, BLOCKS.N)
    tables = head_of_tables(tables, tile.batch_head, tile.head, SIZES)
    softmax = attend_tile(
        load_queries(query_rows(query_ptr, query_strides, tile, STRIDES.QUERY), tile, SIZES),
        tile,
        tables,
        tokens,
        leaves,
        columns,
        key_layout,
        sink_layout,
        SIZES,
        BLOCKS,
    )
    dims = tl.arange(0, SIZES.PADDED_DIM)
    query = load_tile(query_ptr, query_strides, tile, dims, STRIDES.QUERY, SIZES)
    grad = load_tile(grad_output_ptr, grad_strides, tile, dims, STRIDES.GRAD, SIZES)
    total = total_weight(softmax, SIZES)
    log_total = softmax.running_max + tl.log2(total)
    delta = tl.sum(softmax.numerator[0] * grad.to(tl.float32), axis=1) / total

    number = tile.batch_head * num_queries + tile.token
    grad_query = tl.zeros(query.shape, tl.float32)
    grad_seen = ()
    if SIZES.FIRST_ORDER:
        seen = total_spread(softmax, SIZES) / total
        pulled = _pull(grad_output_ptr, grad_strides, tile, tables, STRIDES.GRAD, SIZES)
        grad_query, of_seen, share = _first_order(query, pulled, seen, SIZES)
        delta += of_seen * seen
        grad_seen += (of_seen,)
        tl.store(numbers.grad_seen + number, of_seen, mask=tile.valid)
        tl.store(numbers.share + number, share, mask=tile.valid)
    tl.store(numbers.log_total + number, log_total, mask=tile.valid)
    tl.store(numbers.delta + number, delta, mask=tile.valid)
    of_centre = ()
    centre_ptr = centre_of_head(tokens, tile, SIZES)
    if SIZES.REFINES == "threshold" or SIZES.SINKS:
        of_centre = centre_logits((query,), centre_ptr, SIZES)
        tl.store(numbers.token_total + number, log_total - of_centre, mask=tile.valid)

    sums = add_columns(
        GradientTile(query, grad, log_total, delta, grad_seen),
        of_centre,
        GradQuery(grad_query, tl.zeros([BLOCKS.N], tl.float32)),
        tile,
        tables,
        tokens,
        leaves,
        columns,
        key_layout,
        sink_layout,
        _add_codewords,
        _add_tokens,
        SIZES,
        BLOCKS,
    )
    grad_query = sums.total
    if SIZES.REFINES == "threshold" or SIZES.SINKS:
        centre = tl.load(centre_ptr + dims)
        grad_query -= sums.of_keys[:, None] * centre[None, :]
    rows = output_rows(grad_query_ptr, tile, num_queries, SIZES)
    store_dims(rows, 0, tile, grad_query * LN2, SIZES.HEAD_DIM)
