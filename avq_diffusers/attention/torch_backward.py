"""Exact gradients of AVQ attention in plain PyTorch, at linear cost on every device.

The choice of columns is a constant, which the code of `torch_forward` recomputes. All else is
differentiated by autograd in two steps: the attention of a few tiles at a time, whose gradients of
the table's rows add up, then the table. After a forward pass by the kernels, columns may be chosen
differently between nearly equal scores; so means in half precision have a backward pass by kernels,
too (`triton.gradients`).

If stored codewords represent the keys, key gradients are straight-through (paper, section Method):

    dk_j = sum_a sum_i w_ia / n_a (dy_i.v_j - delta_i) q_i,   delta_i = dy_i.y_i

with weights w_ia = n_a exp(q_i.c_a) / sum_b n_b exp(q_i.c_b) and the scale in q. This is affine in
v_j, so each codeword stores the moments sum_i w_ia / n_a [q_i, 1] [dy_i, delta_i]^T, at O(N M D^2),
for its keys to read.

Shapes: as in `torch_forward`, with L numbers per row that gradients are summed in.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention.tensors import Tensors, empty_tokens
from avq_diffusers.attention.torch_forward import (
    Summary,
    Tiles,
    choose,
    means_of,
    summarize,
    take,
    tile_queries,
    width,
    with_first_order,
)
from avq_diffusers.codebook.assignment import (
    across_heads,
    centre_of,
    chunk_length,
    nearest_leaves,
)
from avq_diffusers.config import Spec

# Elements in the intermediates of one chunk, except on a CPU. A tile has many moments: with fewer
# elements, each tile would be its own chunk of about sixty launches.
ELEMENTS = 1 << 28

# Flops that dense attention does in the time of one flop of `gradients`. Measured on two CPU cores
# and on an H200, where `gradients` is bound by memory and launches.
DENSE_SPEED_CPU = 2.0
DENSE_SPEED = 20.0


def dense_is_faster(tensors: Tensors, spec: Spec) -> bool:
    """Whether dense attention over quantized keys, where it can run, trains faster, estimated from
    flops per query."""
    head_dim = tensors.query.shape[3]
    dense = 14 * tensors.key.shape[2] * head_dim
    assert spec.columns is not None  # stored codewords have no threshold
    linear = 12 * spec.columns * head_dim + 2 * spec.columns * head_dim**2
    is_cpu = tensors.query.device.type == "cpu"
    return dense < (DENSE_SPEED_CPU if is_cpu else DENSE_SPEED) * linear


def quantize(key: Tensor, parents: Tensor, children: Tensor) -> Tensor:
    """Replace each key by its leaf's codeword, minus a vector per head that softmax ignores."""
    batch = key.shape[0]
    centre = centre_of(parents)
    parents, children = parents - centre, children - centre[:, None]
    leaf = nearest_leaves(
        (key - centre).flatten(0, 1),
        parents.expand(batch, -1, -1, -1).flatten(0, 1),
        children.expand(batch, -1, -1, -1, -1).flatten(0, 1),
    )
    codewords = torch.cat([parents[:, :, None], children], dim=2).to(key.dtype).flatten(0, 2)
    leaf = across_heads(leaf.view(key.shape[:3]), len(codewords) // len(parents))
    return codewords.index_select(0, leaf.flatten()).view(key.shape)


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
        of_part = [None if grad is None else grad[elements] for grad in grads]
        _write_gradients(grad_output[elements], tensors.part(elements), spec, of_part)
    return [grad for grad in grads if grad is not None]


def _write_gradients(
    grad_output: Tensor, tensors: Tensors, spec: Spec, grads: Sequence[Tensor | None]
) -> None:
    """Write the token gradients of a chunk of batch elements."""
    grad_query, grad_key, grad_value, *grad_sinks = grads
    of_key, of_value, of_sink_key, of_sink_value = (x is not None for x in grads[1:])
    summary, tiles = summarize(tensors, spec), Tiles.of(tensors, spec.query_tile)
    queries = tile_queries(tensors, tiles, summary)
    grad_tiles, head_dim = tiles.cut(grad_output, queries.dtype), grad_output.shape[3]
    tables = [queries, summary.keys, summary.values]
    if summary.matrix is not None:
        tables.append(summary.matrix)
    # Whose rows need a gradient. With a first-order term, keys have spreads, channels of values.
    needed = (
        grad_query is not None,
        of_sink_key or (of_key and spec.means),
        of_sink_value or (of_value and spec.means) or (of_key and len(tables) == 4),
        of_key or of_value,
    )
    sums = [torch.zeros_like(x) if y else None for x, y in zip(tables, needed, strict=False)]
    moments = None if spec.means else _Moments(summary, of_key, of_value)
    tile, channels = queries.shape[1:]
    of_moments = 0 if moments is None else moments.sums.shape[1]

    def elements(columns: int) -> int:
        return 4 * tile * columns + (4 * channels + of_moments) * (tile + columns)

    chosen = choose(queries, summary, tiles, spec)
    for pairs, rows in chosen.lists(summary, elements, ELEMENTS):
        places = pairs, rows, rows, pairs // tiles.number
        read = [take(*each) for each in zip(tables, places, strict=False)]
        inputs = [x.requires_grad_() for x, y in zip(read, needed, strict=False) if y]
        grad = grad_tiles[pairs][..., :head_dim]
        with _differentiable():
            query, keys, values, *matrix = read
            weights = (query @ keys.mT).softmax(dim=-1)
            output = weights @ values
            output = (
                with_first_order(query, matrix[0], output) if matrix else output[..., :head_dim]
            )
        found = iter(torch.autograd.grad(output, inputs, grad) if inputs else ())
        for total, place in zip(sums, places, strict=False):
            if total is not None:
                _add_rows(total, place, next(found))
        if moments is not None:
            weights, delta = weights.detach(), (grad * output.detach()).sum(dim=-1, keepdim=True)
            columns, right = slice(spec.columns), torch.cat([grad, delta], dim=-1)
            moments.add(rows[:, columns], queries[pairs], weights[..., columns], right)

    of_queries, of_keys, of_values, *_ = sums
    if grad_query is not None and of_queries is not None:
        tiles.write(grad_query, tensors.scale * of_queries[..., :head_dim])
    if moments is None:
        of_tokens = _through_means(summary, (of_key, of_value), sums[1:])
    else:
        of_tokens = moments.gradients(summary.tokens[1])
    for grad_token, of_token in zip((grad_key, grad_value), of_tokens, strict=True):
        if grad_token is not None and of_token is not None:
            grad_token.copy_(of_token.view(grad_token.shape))
    for grad_sink, of_rows in zip(grad_sinks, (of_keys, of_values), strict=True):
        if grad_sink is not None and of_rows is not None:
            grad_sink.copy_(of_rows[summary.sink_rows, :head_dim].reshape(grad_sink.shape))


@contextmanager
def _differentiable() -> Iterator[None]:
    """Let autograd record, also inside of an operator, where dispatch skips it.

    `torch.func.vjp` records there, too, but refuses to run beside saved-tensor hooks.
    """
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradCPU)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def _through_means(
    summary: Summary, needed: tuple[bool, bool], sums: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of keys and values (H S, D), of those that are `needed`, from `sums`, those of the
    table's keys and values and of any C."""
    key, value = (x.detach().requires_grad_(y) for x, y in zip(summary.tokens, needed, strict=True))
    given = [x for x in (key, value) if x.requires_grad]
    if not given:
        return [None, None]
    with _differentiable():
        counts, follow = summary.codewords.counts, summary.matrix is not None
        codewords, matrix = means_of(key, value, summary.leaves, counts, follow=follow)
        assert codewords.spreads is not None  # of means
        values = torch.cat([codewords.values, codewords.spreads[..., None]], dim=-1)
        made = codewords.keys.flatten(0, 2), values.flatten(0, 2), matrix
    outputs, grads = [], []
    for x, of_rows in zip(made, sums, strict=False):
        if x is not None and x.requires_grad and of_rows is not None:
            outputs.append(x)
            grads.append(of_rows[: len(x), : x.shape[1]])
    found = iter(torch.autograd.grad(outputs, given, grads))
    of_tokens: list[Tensor | None] = [None, None]
    for i, (x, of_rows) in enumerate(zip((key, value), sums[:2], strict=True)):
        if x.requires_grad and of_rows is not None:
            of_exact = of_rows[summary.key_rows, : x.shape[1]]
            of_tokens[i] = next(found) + of_exact if len(of_exact) else next(found)
    return of_tokens


def _add_rows(sums: Tensor, rows: Tensor, added: Tensor) -> None:
    """Add numbers (*P, ...) to rows (*P) of the sums (all rows, ...), in a fixed order."""
    rows, added = rows.flatten(), added.flatten(0, rows.ndim - 1)
    if sums.device.type == "cpu":
        sums.index_add_(0, rows, added)
    else:  # where index_add_ uses unordered atomics, and this sorts
        sums.index_put_((rows,), added, accumulate=True)


def _of_leaves(sums: Tensor, counts: Tensor) -> Tensor:
    """What a key of each leaf takes, (H, M0, 1 + C, L), from the two codewords (H R, L) that it is
    part of."""
    shares = sums.unflatten(0, counts.shape) / counts.clamp(min=1)[..., None]
    return shares[:, :, 1:] + shares[:, :, :1]


class _Moments:
    """What stored codewords accumulate for their keys: sum_i w_ia [q_i, 1] [dy_i, delta_i]^T, of
    the rows for keys, D, and for values, one."""

    def __init__(self, summary: Summary, for_keys: bool, for_values: bool) -> None:
        self.summary, self.needed = summary, (for_keys, for_values)
        codewords = summary.codewords.keys
        head_dim = codewords.shape[3]
        self.rows = slice(0 if for_keys else head_dim, head_dim + for_values)
        width = (self.rows.stop - self.rows.start) * (1 + head_dim)
        self.sums = codewords.new_zeros(codewords.shape[:3].numel(), width)

    def add(self, rows: Tensor, queries: Tensor, weights: Tensor, right: Tensor) -> None:
        """Add what columns (G, K), which are these codewords, see.

        Args:
            rows: of the codewords.
            queries: (G, I, W).
            weights: (G, I, K).
            right: (G, I, D + 1), gradients of the outputs, and delta.
        """
        if self.sums.shape[1]:
            outer = queries[..., self.rows, None] * right[..., None, :]
            _add_rows(self.sums, rows, weights.mT @ outer.flatten(-2))

    def gradients(self, value: Tensor) -> list[Tensor | None]:
        """Gradients of keys and values (H S, D); `value` is (H S, D)."""
        head_dim = value.shape[1]
        grads = [torch.empty_like(value) if needed else None for needed in self.needed]
        grad_keys, grad_values = grads
        of_leaves = _of_leaves(self.sums, self.summary.codewords.counts)
        of_leaves = of_leaves.flatten(0, 2).unflatten(-1, (-1, 1 + head_dim))
        length = chunk_length(value.device, max(1, self.sums.shape[1]), ELEMENTS)
        for start in range(0, len(value), length):
            part = slice(start, start + length)
            leaf = self.summary.leaves.number[part]
            if grad_values is not None:
                grad_values[part] = of_leaves[:, -1, :head_dim].index_select(0, leaf)
            if grad_keys is not None:
                matrices = of_leaves[:, :head_dim].index_select(0, leaf)
                values = F.pad(value[part], (0, 1), value=-1)[..., None]
                grad_keys[part] = (matrices @ values)[..., 0]
        return grads
