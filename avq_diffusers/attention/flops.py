"""Operations of the custom operators, for PyTorch's FlopCounterMode, which cannot look inside.

As in PyTorch's formulas, a product of matrices counts 2 operations per multiplication, and a
softmax none. Sums of keys and values count 1 per addition.

Shapes: B batch, H heads, N queries, S keys, T sinks, D head dim, V = M0 + P C visible codewords,
E exact keys.
"""

from collections.abc import Sequence
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from avq_diffusers.attention.spec import NUM_TOKENS, Spec

Shape = Sequence[int]


def assignment_flops(key: Shape, num_parents: int, num_children: int) -> int:
    """Distances of each key to all parents, and to its parent's children.

    Args:
        key: (B, H, S, D).
        num_parents, num_children: sizes of the codebook.
    """
    batch, heads, num_keys, head_dim = key
    return 2 * batch * heads * num_keys * (num_parents + num_children) * head_dim


def summary_flops(key: Shape, spec: Spec) -> int:
    """Codewords, the assignment of the keys to them, and the sums of values and keys.

    Args:
        key: (B, H, S, D).
        spec: the call's options.
    """
    batch, heads, num_keys, head_dim = key
    sums = batch * heads * num_keys * head_dim
    update = assignment_flops(key, spec.num_parents, 0) + sums
    aggregation = (2 if spec.means else 1) * sums
    assignment = assignment_flops(key, spec.num_parents, spec.num_children)
    return spec.num_updates * update + assignment + aggregation


def choice_flops(query: Shape, spec: Spec) -> int:
    """Importance of the parents, and gain of the visible codewords' exact keys.

    Args:
        query: (B, H, N, D).
        spec: the call's options.
    """
    batch, heads, num_queries, head_dim = query
    columns = spec.num_parents if spec.num_refined or spec.exact_keys else 0
    if spec.exact_keys:
        columns += spec.num_visible()
    return 2 * batch * heads * num_queries * columns * head_dim


def attention_flops(query: Shape, key: Shape, num_sinks: int, spec: Spec) -> int:
    """Forward pass: summary, choice, then logits and output over V + E + T columns.

    Args:
        query: (B, H, N, D).
        key: (B, H, S, D).
        num_sinks: T.
        spec: the call's options.
    """
    batch, heads, num_queries, head_dim = query
    columns = spec.num_visible() + _num_single(key, num_sinks, spec)
    attention = 4 * batch * heads * num_queries * columns * head_dim
    return summary_flops(key, spec) + choice_flops(query, spec) + attention


def gradient_flops(
    query: Shape, key: Shape, num_sinks: int, spec: Spec, needs_grad: Sequence[bool]
) -> int:
    """Backward pass: it makes summary, choice and logits again.

    Args:
        query: (B, H, N, D).
        key: (B, H, S, D).
        num_sinks: T.
        spec: the call's options.
        needs_grad: which of query, key, value and sinks need a gradient.
    """
    of_query, of_key, of_value, of_sink_key, of_sink_value = needs_grad
    num_single = _num_single(key, num_sinks, spec)
    num_exact = num_single - num_sinks
    num_columns = spec.num_visible() + num_single
    batch, heads, num_queries, head_dim = query
    if spec.means:
        width, readings = (of_key + of_value) * head_dim, 0
    else:
        width = (of_value + of_key * head_dim) * (1 + head_dim)
        readings = of_key * key[2] * head_dim * (1 + head_dim)
    per_query = (
        (2 + of_query) * num_columns * head_dim
        + spec.num_visible() * width
        + num_exact * (of_key + of_value) * head_dim
        + num_sinks * (of_sink_key + of_sink_value) * head_dim
    )
    products = 2 * batch * heads * (num_queries * per_query + readings)
    return summary_flops(key, spec) + choice_flops(query, spec) + products


def _num_single(key: Shape, num_sinks: int, spec: Spec) -> int:
    return min(spec.exact_keys, key[2]) + num_sinks


def register_attention(operators: Any) -> None:
    """Register the formulas of operators with the arguments of an attention call.

    Args:
        operators: the operator packets, such as `torch.ops.avq_diffusers.attention`.
    """

    @register_flop_formula(operators)
    def _(*arguments: Any, out_shape: Any = None) -> int:
        return attention_flops(*_sizes(arguments))


def register_backward(operator: Any) -> None:
    """Register the formula of an operator for gradients.

    Args:
        operator: the operator packet.
    """

    @register_flop_formula(operator)
    def _(grad_output: Shape, *arguments: Any, out_shape: Any = None) -> int:
        *call, needs_grad, _ = arguments
        return gradient_flops(*_sizes(call), needs_grad)


def register_quantize(operator: Any) -> None:
    """Register the formula of an operator that replaces keys by codewords.

    Args:
        operator: the operator packet.
    """

    @register_flop_formula(operator)
    def _(key: Shape, parents: Shape, children: Shape, out_shape: Any = None) -> int:
        return assignment_flops(key, parents[1], children[2])


def register_masked(operator: Any) -> None:
    """Register the formula of an operator for joint attention, as if the mask hid no key.

    Args:
        operator: the operator packet.
    """

    @register_flop_formula(operator)
    def _(
        query: Shape,
        key: Shape,
        value: Shape,
        mask: Shape,
        order: Shape,
        start: int,
        stop: int,
        *others: Any,
        out_shape: Any = None,
        **options: Any,
    ) -> int:
        numbers = {name: options[name] for name in Spec._fields if name in options}
        spec = Spec(**numbers, means=options["codewords"] == "means", scale=1.0)
        batch, num_queries, heads, head_dim = query
        of_grid = batch, heads, stop - start, head_dim
        num_sinks = key[1] - of_grid[2]
        return attention_flops((batch, heads, num_queries, head_dim), of_grid, num_sinks, spec)


def _sizes(arguments: Sequence[Any]) -> tuple[Shape, Shape, int, Spec]:
    """The sizes in an operator's arguments."""
    query, key, _, sink_key = arguments[: NUM_TOKENS - 1]
    num_sinks = 0 if sink_key is None else sink_key[2]
    return query, key, num_sinks, Spec.of_numbers(arguments[-2], arguments[-1])
