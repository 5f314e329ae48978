"""Keys that take part as themselves: those of leaves that a tile shows key by key, and sink keys.

Shapes: as in `attention`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from avq_diffusers.attention.triton.softmax import accumulate, logits_of, weigh


class TokenPointers(NamedTuple):
    """Keys and sinks with their values, and where the codes have their zero."""

    key: tl.tensor
    value: tl.tensor
    sink_key: tl.tensor
    sink_value: tl.tensor
    centre: tl.tensor


class TokenLayout(NamedTuple):
    """Their number in a head, and strides that have been divided by ALIGN."""

    number: tl.tensor
    key_batch: tl.tensor
    key_head: tl.tensor
    key_token: tl.tensor
    value_batch: tl.tensor
    value_head: tl.tensor
    value_token: tl.tensor


class HeadTokens(NamedTuple):
    """Keys and values of a head."""

    key: tl.tensor
    value: tl.tensor
    key_stride: tl.tensor
    value_stride: tl.tensor
    number: tl.tensor


@triton.jit
def tokens_of_head(key_ptr, value_ptr, layout, batch, head, SIZES):
    """The `HeadTokens` of a head."""
    head = head.to(tl.int64)
    key_start = batch * layout.key_batch + head * layout.key_head
    value_start = batch * layout.value_batch + head * layout.value_head
    return HeadTokens(
        key_ptr + key_start * SIZES.ALIGN,
        value_ptr + value_start * SIZES.ALIGN,
        layout.key_token.to(tl.int64) * SIZES.ALIGN,
        layout.value_token.to(tl.int64) * SIZES.ALIGN,
        layout.number,
    )


@triton.jit
def load_tokens(pointer, token, stride, valid, SIZES):
    """Some keys or values in blocks of dims, padded with zeros."""
    rows = pointer + token.to(tl.int64)[:, None] * stride
    dims = tl.arange(0, SIZES.BLOCK_D)[None, :]
    blocks = (tl.load(rows + dims, mask=valid[:, None] & (dims < SIZES.HEAD_DIM), other=0.0),)
    if SIZES.REST_D > 0:
        dims = SIZES.BLOCK_D + tl.arange(0, SIZES.REST_D)[None, :]
        mask = valid[:, None] & (dims < SIZES.HEAD_DIM)
        blocks += (tl.load(rows + dims, mask=mask, other=0.0),)
    return blocks


@triton.jit
def centre_of_head(tokens, tile, SIZES):
    """(DP) pointer to the centre of the codes."""
    centre_head = tile.batch_head if SIZES.OWN_CENTRE else tile.head.to(tl.int64)
    return tokens.centre + centre_head * SIZES.PADDED_DIM


@triton.jit
def centre_logits(query, centre_ptr, SIZES):
    """(BLOCK_N) What keys lack that have not been centred: minus the logits of the centre."""
    dims = tl.arange(0, SIZES.BLOCK_D)
    logits = tl.sum(query[0] * tl.load(centre_ptr + dims)[None, :], axis=1)
    if SIZES.REST_D > 0:
        dims = SIZES.BLOCK_D + tl.arange(0, SIZES.REST_D)
        logits += tl.sum(query[1] * tl.load(centre_ptr + dims)[None, :], axis=1)
    return -SIZES.FACTOR * logits


@triton.jit
def token_logits(query, centre_bias, tokens, token, valid, SIZES):
    """Logits (BLOCK_N, tokens) around the centre, -inf where not valid."""
    keys = load_tokens(tokens.key, token, tokens.key_stride, valid, SIZES)
    products = logits_of(query, keys, tl.zeros([1, token.shape[0]], tl.float32))
    bias = tl.where(valid[None, :], centre_bias[:, None], float("-inf"))
    return products * SIZES.FACTOR + bias


@triton.jit
def attend_tokens(query, centre_bias, tokens, token, valid, softmax, SIZES):
    """Add some tokens to a softmax."""
    logits = token_logits(query, centre_bias, tokens, token, valid, SIZES)
    values = load_tokens(tokens.value, token, tokens.value_stride, valid, SIZES)
    weights, softmax = weigh(softmax, logits)
    return accumulate(softmax, weights, values)
