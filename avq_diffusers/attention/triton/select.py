"""Select kernel: what each query tile attends to, as a list of columns.

With a threshold, a cell is shown as its parent, as its leaves, or leaf by leaf as its keys: at the
coarsest level at which a further column would fix at most the threshold. With m the mean attention
of some queries of the tile, s a spread and size the mean of |q|^2 / D, times the squared scale:

    refine parent p   m_p (growth(size s_p) - growth(size mean spread of its leaves))
                      > threshold (number of its leaves - 1)
    show keys of l    m_l growth(size s_l) > threshold n_l

At a threshold of 0, whose limit is below 0, and where the left side is NaN, everything is shown.

With `num_refined`, the paper's form, the parents with the largest importance are refined.

Two other kinds of programs share the launch, because the attention needs what they write and they
need no more than tiles do: some sort each cell's keys by leaf, some add up the first-order term.

Shapes: as in `attention`; SAMPLES queries of a tile decide, and ROWS are those of the tables.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.first_order import add_covariances
from avq_diffusers.attention.triton.leaf_order import LeafPointers, order_leaves
from avq_diffusers.attention.triton.pieces import Chunks
from avq_diffusers.attention.triton.problem import Strides
from avq_diffusers.attention.triton.rows import Tables
from avq_diffusers.attention.triton.softmax import LOG_ZERO, load_codes, logits_of
from avq_diffusers.attention.triton.sort import SortPointers
from avq_diffusers.attention.triton.tile import (
    head_of_tables,
    load_queries,
    query_rows,
    size_of,
    tile_at,
)
from avq_diffusers.attention.triton.tokens import (
    TokenLayout,
    TokenPointers,
    centre_logits,
    centre_of_head,
    token_logits,
    tokens_of_head,
)

# From here on, growth is continued by its tangent.
MOST_GROWTH = tl.constexpr(20.0)
EXP_MOST_GROWTH = tl.constexpr(485165195.40979)
LOG2E = tl.constexpr(math.log2(math.e))


class ColumnPointers(NamedTuple):
    """The columns of each tile but sinks.

    level: how each row is shown, for the backward pass; or None.
    """

    # (B, H, T, MOST) int32. From the front, rows of the tables whose codewords are shown; from the
    # back, where the keys of a leaf start in the order of leaves, if they are shown.
    row: tl.tensor
    # (B, H, T, MOST) float32. log2 of the number of keys of these codewords; from the back, how
    # many keys these leaves have.
    bias: tl.tensor
    shown: tl.tensor  # (B, H, T, 2) int32, numbers of codewords and of keys
    num_leaves: tl.tensor  # (B, H, T) int32, number of leaves whose keys are shown
    # (B, H, T, MP) int32 workspace: masses as bits; then the refined parents, and 0 after them.
    refined: tl.tensor
    level: tl.tensor  # (B, H, T, ROWS) int8, 1 for a codeword, 2 for keys, 0 if not shown


class SelectBlocks(NamedTuple):
    """Compile-time blocks: parents, refined parents with their children, and sinks, per step.

    KEYS: keys that a program of the leaf order places at once.
    LEVELS: whether levels are stored.
    """

    SAMPLES: tl.constexpr
    M: tl.constexpr
    P: tl.constexpr
    K: tl.constexpr
    KEYS: tl.constexpr
    LEVELS: tl.constexpr


class Programs(NamedTuple):
    """How many programs of a head sort leaves, and how many add up the first-order term."""

    pieces: tl.tensor
    matrix: tl.tensor


class Counted(NamedTuple):
    """What a tile shows so far."""

    codewords: tl.tensor
    leaves: tl.tensor
    keys: tl.tensor


class Deciding(NamedTuple):
    """The queries of a tile that decide its columns, and the limit of the choice: the threshold, or
    how many parents are refined."""

    query: tl.tuple
    valid: tl.tensor  # (SAMPLES) False on padding
    number: tl.tensor
    limit: tl.tensor


class Asked(NamedTuple):
    """What these queries tell."""

    query: tl.tuple
    maximum: tl.tensor  # (SAMPLES) of their logits of parents and sinks
    # (SAMPLES) What a weight relative to the maximum adds to a mean attention, 0 on padding.
    share: tl.tensor
    size: tl.tensor
    limit: tl.tensor


@triton.jit
def _growth(x):
    """exp(x) - 1, continued by its tangent; exact for small x, where the difference cancels."""
    small = tl.minimum(x, MOST_GROWTH)
    exact = tl.where(
        small < 1e-2, small * (1 + small * (0.5 + small * (1 / 6))), tl.exp2(small * LOG2E) - 1.0
    )
    return exact + EXP_MOST_GROWTH * tl.maximum(x - MOST_GROWTH, 0.0)


@triton.jit
def _append(columns, counted, rows, counts, log_counts, starts, is_fine, SIZES, BLOCKS):
    """Add rows that hold keys to the columns, key by key where `is_fine`."""
    has_keys = counts > 0
    # Numbers of leaves in the upper half, of codewords in the lower.
    is_column = tl.where(has_keys, tl.where(is_fine, 1 << 16, 1), 0)
    through = tl.cumsum(is_column, axis=0)
    total = tl.sum(is_column, axis=0)
    slot = counted.codewords + (through & 0xFFFF) - 1
    bias = log_counts
    column = rows
    num_keys = counted.keys
    if SIZES.REFINES == "threshold":
        slot = tl.where(is_fine, SIZES.MOST - counted.leaves - (through >> 16), slot)
        bias = tl.where(is_fine, counts.to(tl.float32), bias)
        column = tl.where(is_fine, starts, column)
        num_keys += tl.sum(tl.where(is_fine, counts, 0), axis=0)
    tl.store(columns.row + slot, column, mask=has_keys)
    tl.store(columns.bias + slot, bias, mask=has_keys)
    if BLOCKS.LEVELS:
        level = tl.where(is_fine, 2, 1).to(tl.int8)
        tl.store(columns.level + rows, level, mask=has_keys)
    return Counted(counted.codewords + (total & 0xFFFF), counted.leaves + (total >> 16), num_keys)


@triton.jit
def _add_logits(running_max, total, logits):
    """Add logits (SAMPLES, columns) to sums of weights relative to a maximum; and the weights."""
    new_max = tl.maximum(running_max, tl.max(logits, axis=1))
    weights = tl.exp2(logits - new_max[:, None])
    return new_max, total * tl.exp2(running_max - new_max) + tl.sum(weights, axis=1), weights


@triton.jit
def _parent_logits(query, tables, first, SIZES, BLOCKS):
    """Logits (SAMPLES, M) of parents, -inf for those without keys."""
    rows = first + tl.arange(0, BLOCKS.M)
    codes = load_codes(tables, rows, rows >= 0, SIZES)
    return logits_of(query, codes, tl.load(tables.log_counts + rows)[None, :])


@triton.jit
def _add_sinks(running_max, total, query, centre_ptr, sinks, SIZES, BLOCKS):
    """Add the logits of all sinks."""
    centre_bias = centre_logits(query, centre_ptr, SIZES)
    for first in tl.range(0, sinks.number, BLOCKS.K):
        token = first + tl.arange(0, BLOCKS.K)
        logits = token_logits(query, centre_bias, sinks, token, token < sinks.number, SIZES)
        running_max, total, _ = _add_logits(running_max, total, logits)
    return running_max, total


@triton.jit
def _mean(weights, share):
    """(rows) Mean attention of the queries that decide, from their weights (rows, SAMPLES)."""
    mean = tl.sum(weights * share[None, :], axis=1)
    # After a product many threads hold the same row; a gather leaves it to one.
    return tl.gather(mean, tl.arange(0, mean.shape[0]), axis=0)


@triton.jit
def _ask(deciding, tables, columns, centre_ptr, sinks, SIZES, BLOCKS):
    """What queries that decide tell about parents; with a threshold, sinks share attention."""
    PARENT_ROWS: tl.constexpr = SIZES.PARENT_ROWS
    query = deciding.query
    running_max = tl.full([BLOCKS.SAMPLES], LOG_ZERO, tl.float32)
    total = tl.zeros([BLOCKS.SAMPLES], tl.float32)
    if BLOCKS.M == PARENT_ROWS:
        logits = _parent_logits(query, tables, 0, SIZES, BLOCKS)
        running_max, total, weights = _add_logits(running_max, total, logits)
    else:
        for first in tl.range(0, PARENT_ROWS, BLOCKS.M):
            logits = _parent_logits(query, tables, first, SIZES, BLOCKS)
            running_max, total, _ = _add_logits(running_max, total, logits)
    parent_max = running_max
    if SIZES.SINKS and SIZES.REFINES == "threshold":
        running_max, total = _add_sinks(running_max, total, query, centre_ptr, sinks, SIZES, BLOCKS)
    share = tl.where(deciding.valid, 1.0 / (total * deciding.number), 0.0)
    size = tl.sum(size_of(query, SIZES), axis=0) / deciding.number
    asked = Asked(query, running_max, share, size, deciding.limit)
    if BLOCKS.M == PARENT_ROWS:
        masses = _mean(tl.trans(weights), share * tl.exp2(parent_max - running_max))
    else:
        masses = _masses_of_parents(asked, tables, columns, 0, SIZES, BLOCKS)
    return asked, masses


@triton.jit
def _masses(asked, codes, counts):
    """(rows) Mean attention of the queries that decide to some rows."""
    weights = tl.exp2(logits_of(codes, asked.query, -asked.maximum[None, :]))
    return tl.where(counts > 0, counts * _mean(weights, asked.share), 0.0)


@triton.jit
def _masses_of_parents(asked, tables, columns, FIRST_ROW, SIZES, BLOCKS):
    """(MP) `_masses` of as many rows as there are parents, M at a time."""
    PARENT_ROWS: tl.constexpr = SIZES.PARENT_ROWS
    every = tl.arange(0, PARENT_ROWS)
    if BLOCKS.M == PARENT_ROWS:
        counts = tl.load(tables.counts + FIRST_ROW + every)
        codes = load_codes(tables, FIRST_ROW + every, every >= 0, SIZES)
        masses = _masses(asked, codes, counts)
    else:
        for first in tl.range(0, PARENT_ROWS, BLOCKS.M):
            parent = first + tl.arange(0, BLOCKS.M)
            counts = tl.load(tables.counts + FIRST_ROW + parent)
            codes = load_codes(tables, FIRST_ROW + parent, parent >= 0, SIZES)
            bits = _masses(asked, codes, counts).to(tl.int32, bitcast=True)
            tl.store(columns.refined + parent, bits)
        # Threads exchange masses through memory, and more follow there.
        tl.debug_barrier()
        masses = tl.load(columns.refined + every).to(tl.float32, bitcast=True)
        tl.debug_barrier()
    return masses


@triton.jit
def _is_fine(asked, masses, spread, counts):
    """Whether rows of leaves are worth as many columns as they have keys."""
    is_coarse = masses * _growth(asked.size * spread) <= asked.limit * counts
    return (counts > 1) & ~is_coarse


@triton.jit
def _rank_of(score, PARENT_ROWS):
    """Rank of each parent by decreasing score; ties go to the lower index."""
    # A score is not negative, so its bits order like integers, and the index breaks ties.
    key = score.to(tl.int32, bitcast=True).to(tl.int64) << 32
    key |= PARENT_ROWS - 1 - tl.arange(0, PARENT_ROWS)
    ahead = key[None, :] > key[:, None]
    return tl.sum(ahead.to(tl.int32), axis=1)


@triton.jit
def _refined(asked, masses, tables, counts, SIZES):
    """(MP) The parents whose leaves are shown; only those with keys matter."""
    parents = tl.arange(0, SIZES.PARENT_ROWS)
    is_refined = parents < 0
    if SIZES.REFINES == "all":
        is_refined = parents >= 0
    elif SIZES.REFINES == "some":
        score = masses
        if SIZES.MEANS:
            score *= tl.load(tables.spread + parents)
        is_refined = _rank_of(score, SIZES.PARENT_ROWS) < asked.limit
    elif SIZES.REFINES == "threshold":
        inside = tl.load(tables.inside + 2 * parents)
        further = tl.load(tables.inside + 2 * parents + 1)
        spread = tl.load(tables.spread + parents)
        gain = masses * (_growth(asked.size * spread) - _growth(asked.size * inside))
        is_refined = (further < 0.5) | ~(gain <= asked.limit * further)
    return is_refined & (counts > 0)


@triton.jit
def _load_children(tables, parents, SIZES):
    """Codes of all children of some parents, in blocks of dims."""
    ROWS: tl.constexpr = parents.shape[0] * SIZES.CHILD_ROWS
    FIRST: tl.constexpr = SIZES.CODE_ROWS - SIZES.ROWS + 2 * SIZES.PARENT_ROWS
    child = FIRST + tl.arange(0, SIZES.CHILD_ROWS)
    cell = parents * (SIZES.CHILD_ROWS * SIZES.PADDED_DIM)
    first_dims = child[:, None] * SIZES.PADDED_DIM + tl.arange(0, SIZES.BLOCK_D)[None, :]
    pointers = tables.codes + first_dims[None, :, :] + cell[:, None, None]
    codes = (tl.load(pointers).reshape(ROWS, SIZES.BLOCK_D),)
    if SIZES.REST_D > 0:
        dims = SIZES.BLOCK_D + tl.arange(0, SIZES.REST_D)
        rest = child[:, None] * SIZES.PADDED_DIM + dims[None, :]
        pointers = tables.codes + rest[None, :, :] + cell[:, None, None]
        codes += (tl.load(pointers).reshape(ROWS, SIZES.REST_D),)
    return codes


@triton.jit
def _append_children(asked, tables, row_start_ptr, columns, counted, first, stop, SIZES, BLOCKS):
    """Add the children of P of a tile's refined parents, `first` to `stop`, to the columns."""
    CHILD_ROWS: tl.constexpr = SIZES.CHILD_ROWS
    parent = tl.load(columns.refined + first + tl.arange(0, BLOCKS.P))
    rows = parent[:, None] * CHILD_ROWS + tl.arange(0, CHILD_ROWS)[None, :]
    rows = 2 * SIZES.PARENT_ROWS + rows.reshape(BLOCKS.P * CHILD_ROWS)
    child = tl.arange(0, BLOCKS.P * CHILD_ROWS)
    is_refined = first + child // CHILD_ROWS < stop
    counts = tl.load(tables.counts + rows, mask=is_refined, other=0)
    log_counts = tl.load(tables.log_counts + rows)
    is_fine = child < 0
    starts = rows
    if SIZES.REFINES == "threshold":
        spread = tl.load(tables.spread + rows)
        starts = tl.load(row_start_ptr + rows)
        masses = _masses(asked, _load_children(tables, parent, SIZES), counts)
        is_fine = _is_fine(asked, masses, spread, counts)
    return _append(columns, counted, rows, counts, log_counts, starts, is_fine, SIZES, BLOCKS)


@triton.jit
def _select(asked, masses, tables, row_start_ptr, columns, SIZES, BLOCKS):
    """Write the columns of a tile; return how many there are."""
    PARENT_ROWS: tl.constexpr = SIZES.PARENT_ROWS
    counted = Counted(0, 0, 0)
    parents = tl.arange(0, PARENT_ROWS)
    counts = tl.load(tables.counts + parents)
    log_counts = tl.load(tables.log_counts + parents)
    is_refined = _refined(asked, masses, tables, counts, SIZES)
    is_fine = parents < 0
    rows = parents
    starts = parents
    if SIZES.REFINES != "none":
        stays = PARENT_ROWS + parents
        if SIZES.REFINES == "threshold":
            spread = tl.load(tables.spread + stays)
            starts = tl.load(row_start_ptr + stays)
            stay_counts = tl.load(tables.counts + stays)
            masses = _masses_of_parents(asked, tables, columns, PARENT_ROWS, SIZES, BLOCKS)
            is_fine = _is_fine(asked, masses, spread, stay_counts) & is_refined
        rows = tl.where(is_refined, stays, rows)
        counts = tl.where(is_refined, tl.load(tables.counts + stays), counts)
        log_counts = tl.where(is_refined, tl.load(tables.log_counts + stays), log_counts)
    counted = _append(columns, counted, rows, counts, log_counts, starts, is_fine, SIZES, BLOCKS)
    if SIZES.REFINES != "none" and SIZES.CHILD_ROWS > 0:
        num_refined = tl.sum(is_refined.to(tl.int32), axis=0)
        through = tl.cumsum(is_refined.to(tl.int32), axis=0)
        slot = tl.where(is_refined, through - 1, num_refined + parents - through)
        tl.store(columns.refined + slot, tl.where(is_refined, parents, 0))
        # The loop reads what other threads of this program wrote.
        tl.debug_barrier()
        for first in tl.range(0, num_refined, BLOCKS.P):
            counted = _append_children(
                asked, tables, row_start_ptr, columns, counted, first, num_refined, SIZES, BLOCKS
            )
    return counted


@triton.jit
def _show_nothing(columns, SIZES):
    """Set the level of all rows to 0."""
    for first in tl.range(0, SIZES.ROWS, 256):
        rows = first + tl.arange(0, 256)
        tl.store(columns.level + rows, tl.zeros([256], tl.int8), mask=rows < SIZES.ROWS)
    # Other threads store levels next.
    tl.debug_barrier()


@triton.jit
def columns_of_tile(columns, tile, SIZES):
    """The `ColumnPointers` of a tile."""
    return ColumnPointers(
        columns.row + tile.number * SIZES.MOST,
        columns.bias + tile.number * SIZES.MOST,
        columns.shown + tile.number * 2,
        columns.num_leaves + tile.number,
        columns.refined + tile.number * SIZES.PARENT_ROWS,
        columns.level + tile.number * SIZES.ROWS,
    )


@triton.jit
def _sampled_rows(num_valid, BLOCKS):
    """(SAMPLES) Evenly spaced queries of a tile, and which are valid."""
    sample = tl.arange(0, BLOCKS.SAMPLES)
    row = sample
    if num_valid > BLOCKS.SAMPLES:
        row = sample * num_valid // BLOCKS.SAMPLES
    return row, row < num_valid


@triton.jit
def select_kernel(
    query_ptr,
    query_order_ptr,
    leaf_ptr,
    piece_counts_ptr,
    covariance_ptr,
    tables: Tables,
    tokens: TokenPointers,
    sort: SortPointers,
    leaves: LeafPointers,
    columns: ColumnPointers,
    num_queries,
    num_tiles,
    num_pieces,
    programs: Programs,
    limit,
    query_strides: Strides,
    sink_layout: TokenLayout,
    chunks: Chunks,
    summed: Chunks,
    QUERY_STRIDE: tl.constexpr,
    SIZES: tl.constexpr,
    CELLS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the columns of one query tile, or a part of the leaf order or of the matrix."""
    head = tl.program_id(0) % SIZES.HEADS
    index = tl.program_id(0) // SIZES.HEADS
    batch = tl.program_id(1).to(tl.int64)
    batch_head = batch * SIZES.HEADS + head
    if CELLS.LEAVES and index < programs.pieces:
        piece_counts_ptr += batch_head * num_pieces * CELLS.LEAF_ROWS
        order_leaves(
            leaf_ptr, piece_counts_ptr, sort, leaves, chunks, batch_head, index, CELLS, BLOCKS.KEYS
        )
        return
    index -= programs.pieces
    if SIZES.FIRST_ORDER and index < programs.matrix:
        SIZE: tl.constexpr = SIZES.PADDED_DIM * SIZES.PADDED_DIM
        covariance_ptr += batch_head * summed.number * SIZE
        tables = head_of_tables(tables, batch_head, head, SIZES)
        add_covariances(covariance_ptr, tables, summed.number, index, SIZES)
        return
    index -= programs.matrix

    num_valid = tl.minimum(num_queries - index * SIZES.QUERY_TILE, SIZES.QUERY_TILE)
    row, valid = _sampled_rows(num_valid, BLOCKS)
    tile = tile_at(query_order_ptr, batch, head, index, num_tiles, row, valid, SIZES)
    tables = head_of_tables(tables, batch_head, head, SIZES)
    columns = columns_of_tile(columns, tile, SIZES)
    sinks = tokens_of_head(tokens.sink_key, tokens.sink_value, sink_layout, batch, head, SIZES)
    centre_ptr = centre_of_head(tokens, tile, SIZES)

    asked = ()
    masses = ()
    if SIZES.REFINES == "threshold" or SIZES.REFINES == "some":
        rows = query_rows(query_ptr, query_strides, tile, QUERY_STRIDE)
        query = load_queries(rows, tile, SIZES)
        deciding = Deciding(query, valid, tl.minimum(num_valid, BLOCKS.SAMPLES), limit)
        asked, masses = _ask(deciding, tables, columns, centre_ptr, sinks, SIZES, BLOCKS)
    if BLOCKS.LEVELS:
        _show_nothing(columns, SIZES)
    row_start_ptr = leaves.row_start + batch_head * SIZES.ROWS
    counted = _select(asked, masses, tables, row_start_ptr, columns, SIZES, BLOCKS)
    tl.store(columns.shown, counted.codewords)
    tl.store(columns.shown + 1, counted.keys)
    tl.store(columns.num_leaves, counted.leaves)
