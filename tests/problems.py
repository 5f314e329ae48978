"""Random problems for `avq_attention`, and its error on them against the definition.

Shapes: B batch, H heads, N queries, S keys, D head dim, M0 parents, C children.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention import reference
from avq_diffusers.attention.api import avq_attention
from avq_diffusers.attention.limits import LIMITS
from avq_diffusers.attention.spec import DTYPES
from avq_diffusers.attention.triton import codewords
from avq_diffusers.codebook.assignment import centre_of
from avq_diffusers.codebook.codebook import Codebook

KERNELS = {name: limit.value for name, limit in LIMITS["triton"].items()}
KEYS = ("clustered", "spread", "skewed", "one hot leaf", "identical", "offset", "empty parents")
# Shares of the larger value below which roundings may decide which codeword or parent is taken.
KEY_TIE, PARENT_TIE = 1e-4, 1e-3
# And the share of a key's squared norm.
ROUNDING = 1e-9
# Float64 against the definition in float64.
EXACT = 1e-10
SINKS = ("sink_key", "sink_value")


@dataclass(frozen=True)
class Problem:
    """Arguments of `avq_attention`.

    Attributes:
        query, key, value: (B, H, N, D) and (B, H, S, D), of any strides.
        codebook: in float32, or float64 if the inputs are; None takes codewords from the keys.
        options: the other arguments, with the sizes of the codebook.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    codebook: Codebook | None
    options: dict[str, Any]

    def __str__(self) -> str:
        batch, heads, num_queries, head_dim = self.query.shape
        sizes = f"B{batch} H{heads} N{num_queries} S{self.key.shape[2]} D{head_dim}"
        origin = "keys" if self.codebook is None else "codebook"
        numbers = {name: x for name, x in self.options.items() if not isinstance(x, Tensor)}
        return f"{sizes} from {origin} {self.query.dtype} {numbers}"


def draw_problem(rng: Random, *, kernels: bool, device: torch.device, most: int = 300) -> Problem:
    """Draw arguments that the backend accepts.

    No key is nearly as close to another codeword of a codebook as to its own: such a key may
    rightly go to either.

    Args:
        rng: that everything is drawn from.
        kernels: within the limits of the kernels.
        device: of the tensors.
        most: queries and keys.
    """
    dtype = rng.choice(KERNELS["dtype"] if kernels else DTYPES)
    most = rng.choice((8, 64, most, most))
    batch, heads, num_queries = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, most)
    num_keys = rng.choice((num_queries, rng.randint(1, most)))
    multiples = [x for x in (8, 16, 24, 40, 64, 80, 128, 160) if x in KERNELS["head dim"]]
    head_dim = rng.choice(multiples if kernels else (*multiples, rng.randint(1, 50)))
    if kernels and dtype == torch.float32:
        head_dim = min(head_dim, KERNELS["head dim of float32"])
    num_parents = rng.choice((1, 2, rng.randint(3, 16), rng.randint(17, 64)))
    num_children = rng.choice((0, 1, rng.randint(2, 4), rng.randint(5, 9)))
    some = rng.randint(1, max(1, num_parents - 1))
    longest = KERNELS["query tile"] if kernels else 400
    is_own = rng.random() < 0.5
    options: dict[str, Any] = {
        "num_parents": num_parents,
        "num_children": num_children,
        "codewords": "means" if is_own else rng.choice(("means", "stored")),
        "num_updates": rng.choice((0, 0, 1, 2)) if is_own or not kernels else 0,
        "num_refined": rng.choice((0, num_parents, some, some, some)) if num_children else 0,
        "query_tile": rng.choice((1, 7, 16, 16, 128, rng.randint(1, longest))),
        "scale": rng.choice((None, None, 0.01, 0.1, 0.5, 1.0)),
    }
    kind = rng.choice(KEYS)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    if rng.random() < 0.7:
        order = torch.randperm(num_queries, generator=generator).to(device)
        options["query_order"] = order.to(rng.choice((torch.int32, torch.int64)))
    if is_own and rng.random() < 0.3:
        order = torch.randperm(num_keys, generator=generator).to(device)
        options["key_order"] = order.to(rng.choice((torch.int32, torch.int64)))
    if not kernels or options["codewords"] == "means":
        options["exact_keys"] = rng.choice((0, 0, rng.randint(1, num_keys)))
    sizes = (heads, num_parents, num_children, head_dim)
    while True:
        key, codebook = _keys_and_codebook(kind, batch, num_keys, sizes, dtype, generator)
        scale = options["scale"] or head_dim**-0.5
        exact = _rounded(codebook, scale, dtype) if kernels else codebook.to(dtype=torch.float64)
        clear = clear_keys(key.double(), exact.parents, exact.children)
        if clear.any(-1).all():
            break
    first_clear = clear.int().argmax(-1)[..., None, None].expand(-1, -1, 1, head_dim)
    key = torch.where(clear[..., None], key, key.gather(2, first_clear))
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    # Neighbours look at the same parents, so that tiles choose others.
    num_used = _num_used(num_parents)
    parents = exact.parents[:, :num_used] - exact.parents[:, :num_used].mean(1, keepdim=True)
    looked_at = torch.arange(num_queries) * num_used // num_queries
    query = normal(batch, heads, num_queries, head_dim) + parents[:, looked_at]
    query = rng.choice((0.3, 1.0, 4.0)) * query
    value = normal(batch, heads, num_keys, head_dim)
    query, key, value = (_strided(rng, x.to(device, dtype)) for x in (query, key, value))
    if rng.random() < 0.3:
        shape = batch, heads, rng.randint(1, 40), head_dim
        # Among the keys, so that neither side takes all attention.
        place = torch.randint(num_keys, (shape[2],), generator=generator)
        sinks = key[:, :, place.to(device)] + normal(*shape).to(device, dtype), normal(*shape)
        sinks = (_strided(rng, x.to(device, dtype)) for x in sinks)
        options |= dict(zip(("sink_key", "sink_value"), sinks, strict=True))
    return Problem(query, key, value, None if is_own else codebook.to(device), options)


class Codewords(NamedTuple):
    """The codewords of a problem, by the definition, in float64.

    parents: (B, H, M0, D).
    children: (B, H, M0, C, D).
    is_clear: (B, H, S) keys whose choices, also in updates, no rounding can change.
    """

    parents: Tensor
    children: Tensor
    is_clear: Tensor


def codewords_of(problem: Problem, backend: str) -> Codewords:
    """The codewords that the backend takes, after updates, as it rounds them."""
    options, codebook, dtype = problem.options, problem.codebook, problem.query.dtype
    key = problem.key.double()
    is_clear = torch.ones_like(key[..., 0], dtype=torch.bool)
    if codebook is None:
        order = options.get("key_order")
        if order is None and problem.query.shape[2] == key.shape[2]:
            order = options.get("query_order")
        parents = reference.spaced_keys(key, options["num_parents"], order)
    else:
        codebook = codebook.to(dtype=torch.float64)
        if backend == "triton":
            scale = options["scale"] or key.shape[-1] ** -0.5
            codebook = _rounded(problem.codebook, scale, dtype)
        parents = codebook.parents.expand(len(key), -1, -1, -1)
    for _ in range(options["num_updates"]):
        is_clear &= _is_clear(_distances(key, parents), key)
        one_hot = F.one_hot(reference.nearest(key, parents), parents.shape[2]).double()
        counts = one_hot.sum(2)[..., None]
        parents = torch.where(counts > 0, one_hot.mT @ key / counts.clamp(min=1), parents)
        if backend == "triton":
            parents = parents.to(dtype).double()
    if codebook is None:
        is_clear &= _is_clear(_distances(key, parents), key)
        cell = reference.nearest(key, parents)
        children = reference.cell_keys(key, cell, parents, options["num_children"])
    else:
        children = codebook.children.expand(len(key), -1, -1, -1, -1)
    return Codewords(parents, children, is_clear & clear_keys(key, parents, children))


def error_over_budget(problem: Problem, backend: str) -> float:
    """Run a problem and return its error in units of what is allowed.

    The definition runs in float64 on the same rounded inputs, and on the codewords as the backend
    rounds them. Allowed is twice the error of PyTorch's exact attention in the same dtype, and
    roundings of the result and of float32. Query tiles whose last refined parent has nearly the
    score of the next one are left out, and so is a problem where roundings may decide which
    codeword a key takes.

    Raises:
        ArithmeticError: the output is not finite, or has another shape, dtype or layout.
    """
    query, key, value, options = problem.query, problem.key, problem.value, problem.options
    output = avq_attention(query, key, value, problem.codebook, backend=backend, **options)
    is_sound = output.isfinite().all() and output.transpose(1, 2).is_contiguous()
    if not is_sound or (output.shape, output.dtype) != (query.shape, query.dtype):
        raise ArithmeticError(f"{tuple(output.shape)} {output.dtype} is not as promised: {problem}")
    found = codewords_of(problem, backend)
    if not found.is_clear.all():
        return 0.0
    wide = [x.double() for x in (query, key, value)]
    sinks = {name: options[name].double() for name in SINKS if name in options}
    expected = reference.avq_attention(
        *wide, found.parents, found.children, **options | {"num_updates": 0} | sinks
    )
    if query.dtype == torch.float64:
        return _relative_error(output, expected) / EXACT
    clear = clear_queries(problem, found, backend)
    if not clear.any():
        return 0.0
    scale = options["scale"] or query.shape[-1] ** -0.5
    for i, name in enumerate(SINKS, start=1):
        if name in options:
            wide[i] = torch.cat([wide[i], sinks[name]], dim=2)
    exact = F.scaled_dot_product_attention(*wide, scale=scale)
    attention = F.scaled_dot_product_attention(*(x.to(query.dtype) for x in wide), scale=scale)
    rounding = torch.finfo(query.dtype).eps + 2 * torch.finfo(torch.float32).eps
    allowed = 2 * _relative_error(attention, exact) + rounding
    if options.get("exact_keys"):
        # Both paths round keys around the centre: kernels in the dtype of the keys, PyTorch in
        # float32. Exact attention has them as they are.
        logits = scale * wide[0] @ (wide[1] - wide[1].mean(2, keepdim=True)).mT
        centred = query.dtype if backend == "triton" else torch.float32
        allowed += float(logits.abs().amax()) * torch.finfo(centred).eps / 2
    return _relative_error(output[clear], expected[clear]) / allowed


def gradient_over_budget(problem: Problem) -> float:
    """The same of the gradients of a float64 problem in all tokens, backend "torch"."""
    gradients = []
    for backend in ("torch", "reference"):
        tokens = [problem.query, problem.key, problem.value]
        names = [name for name in SINKS if name in problem.options]
        tensors = [x.clone().requires_grad_() for x in tokens + [problem.options[n] for n in names]]
        options = problem.options | dict(zip(names, tensors[3:], strict=True))
        output = avq_attention(*tensors[:3], problem.codebook, backend=backend, **options)
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device)
        gradients.append(torch.autograd.grad((output * weights.view_as(output)).sum(), tensors))
    # A gradient of zero, as with one key, leaves roundings: they count against all gradients.
    size = max(float(x.norm()) for x in gradients[1])
    errors = [float((x - y).norm()) for x, y in zip(*gradients, strict=True)]
    return max(errors) / max(size, 1e-6) / EXACT


def kernel_gradient_over_budget(problem: Problem) -> float:
    """The same of the gradients of all tokens by the kernels.

    Queries of tiles that are left out get no gradient. An error counts against the largest gradient
    of the definition: that of one key's query is zero, and roundings remain.

    Raises:
        ArithmeticError: a gradient is not finite, or has another shape.
    """
    options, dtype = problem.options, problem.query.dtype
    found = codewords_of(problem, "triton")
    if not found.is_clear.all():
        return 0.0
    clear = clear_queries(problem, found, "triton")
    weights = torch.linspace(-1, 1, clear.numel() * problem.query.shape[-1]).to(problem.query)
    weights = weights.sin().view_as(problem.query) * clear[..., None]
    sinks = [name for name in SINKS if name in options]
    tokens = [problem.query, problem.key, problem.value, *(options[name] for name in sinks)]
    scale = options["scale"] or problem.query.shape[-1] ** -0.5

    def gradients(attention: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in tokens]
        return torch.autograd.grad(attention(*inputs), inputs, weights.to(dtype))

    def by_kernels(query: Tensor, key: Tensor, value: Tensor, *of_sinks: Tensor) -> Tensor:
        given = options | dict(zip(sinks, of_sinks, strict=True))
        return avq_attention(query, key, value, problem.codebook, backend="triton", **given)

    def by_definition(query: Tensor, key: Tensor, value: Tensor, *of_sinks: Tensor) -> Tensor:
        fixed = options | {"num_updates": 0} | dict(zip(sinks, of_sinks, strict=True))
        return reference.avq_attention(query, key, value, found.parents, found.children, **fixed)

    def exact(query: Tensor, key: Tensor, value: Tensor, *of_sinks: Tensor) -> Tensor:
        if of_sinks:
            pairs = zip((key, value), of_sinks, strict=True)
            key, value = (torch.cat(pair, dim=2) for pair in pairs)
        return F.scaled_dot_product_attention(query, key, value, scale=scale)

    errors, of_exact = [], []
    for errors_of, attention, definition in (
        (errors, by_kernels, by_definition),
        (of_exact, exact, exact),
    ):
        expected = gradients(definition, torch.float64)
        size = max(float(x.norm()) for x in expected)
        for gradient, target in zip(gradients(attention, dtype), expected, strict=True):
            if not gradient.isfinite().all() or gradient.shape != target.shape:
                raise ArithmeticError(f"{tuple(gradient.shape)} is not as promised: {problem}")
            errors_of.append(float((gradient.double() - target).norm()) / max(size, 1e-6))
    # Kernels round what represents the keys around the centre: an error of every logit.
    centred = problem.key.double() - problem.key.double().mean(2, keepdim=True)
    logits = scale * problem.query.double() @ centred.mT
    rounding = torch.finfo(dtype).eps
    allowed = 2 * max(of_exact) + rounding + float(logits.square().mean().sqrt()) * rounding / 2
    return max(errors) / allowed


def clear_keys(key: Tensor, parents: Tensor, children: Tensor) -> Tensor:
    """(B, H, S) keys whose nearest parent, and nearest leaf in its cell, beat the next clearly.

    Args:
        key: (B, H, S, D) float64.
        parents: (H, M0, D) or (B, H, M0, D) float64.
        children: (H, M0, C, D) or (B, H, M0, C, D) float64.
    """
    to_parents = _distances(key, parents)
    cell = to_parents.argmin(-1)
    leaves = torch.cat([parents[..., None, :], children], dim=-2)
    leaves = leaves.expand(len(key), *leaves.shape[-4:])
    to_leaves = [
        (leaf.gather(2, cell[..., None].expand_as(key)) - key).norm(dim=-1)
        for leaf in leaves.unbind(3)
    ]
    return _is_clear(to_parents, key) & _is_clear(
        torch.stack(to_leaves, dim=-1), key, may_be_equal=True
    )


def _distances(key: Tensor, parents: Tensor) -> Tensor:
    """(B, H, S, M0)."""
    return torch.cdist(key, parents, compute_mode="donot_use_mm_for_euclid_dist")


def _is_clear(distance: Tensor, key: Tensor, *, may_be_equal: bool = False) -> Tensor:
    """(B, H, S) keys whose least distance beats the next, of (B, H, S, codewords).

    Args:
        may_be_equal: equal leaves have equal scores in every backend, and the first of them wins.
            Equal parents may differ by a rounding of the matrix product.
    """
    squared = distance.square()
    least = squared.amin(-1)
    is_first = F.one_hot(squared.argmin(-1), squared.shape[-1]).bool()
    is_out = squared == least[..., None] if may_be_equal else is_first
    following = squared.masked_fill(is_out, torch.inf).amin(-1)
    # A mean of equal keys may be off by a rounding.
    rounding = ROUNDING * key.square().sum(-1)
    return following.isinf() | (following - least > KEY_TIE * (following + least) + rounding)


def clear_queries(problem: Problem, codewords: Codewords, backend: str) -> Tensor:
    """(B, H, N) queries of tiles whose choices of parents and of exact keys are clear.

    The last refined parent beats the next one, and so do the last leaf that is exact and the first
    one that is not.
    """
    options, query, key = problem.options, problem.query.double(), problem.key.double()
    clear = torch.ones(query.shape[:3], dtype=torch.bool, device=query.device)
    num_refined, num_parents = options["num_refined"], options["num_parents"]
    exact_keys = options.get("exact_keys", 0)
    if not (0 < num_refined < num_parents or exact_keys):
        return clear
    cell, leaf = reference.assign(key, codewords.parents, codewords.children)
    num_children = codewords.children.shape[3]
    leaf = torch.where(
        leaf > 0, num_parents * 2 + cell * num_children + leaf - 1, num_parents + cell
    )
    rows = codewords.parents, codewords.parents, codewords.children.flatten(2, 3)
    rows = torch.cat(rows, dim=2)
    if options["codewords"] == "means":
        for index in (cell, leaf):
            one_hot = F.one_hot(index, rows.shape[2]).double()
            sums, members = one_hot.mT @ key, one_hot.sum(-2)[..., None]
            rows = torch.where(members > 0, sums / members.clamp(min=1), rows)
    parents = rows[:, :, :num_parents]
    counts = F.one_hot(cell, num_parents).double().sum(-2)
    scale = options["scale"] or query.shape[-1] ** -0.5
    order = options.get("query_order")
    order = torch.arange(query.shape[2], device=query.device) if order is None else order
    cell_spread = reference.spread(key, cell, parents)
    for tile in order.split(options["query_tile"]):
        score = reference.importance(query[:, :, tile], parents, counts, scale)
        if options["codewords"] == "means":
            score = score * cell_spread
        is_clear = torch.ones_like(counts[..., 0], dtype=torch.bool)
        if 0 < num_refined < num_parents:
            ranked = score.sort(-1, descending=True).values
            is_clear = _beats(ranked[..., num_refined - 1], ranked[..., num_refined])
        if exact_keys:
            refined = reference.select(score, num_refined)
            row = torch.where(refined.gather(-1, cell), leaf, cell)
            members = F.one_hot(row, rows.shape[2]).sum(-2)
            spread = reference.spread(key, row, rows)
            gain = reference.exact_gain(query[:, :, tile], rows, spread, parents, counts, scale)
            gain, ranking = gain.sort(dim=-1, descending=True, stable=True)
            num_exact = (members.gather(-1, ranking).cumsum(-1) <= exact_keys).sum(-1, keepdim=True)
            gain = F.pad(gain, (1, 2))  # nothing comes before the first, nor after the last
            gain[..., 0] = 2 * gain[..., 1]
            last, following, third = (gain.gather(-1, num_exact + i)[..., 0] for i in range(3))
            tie = PARENT_TIE
            if backend == "triton":  # whose scores come from rounded means of keys
                logits = scale * query[:, :, tile] @ rows.mT
                tie += float(logits.abs().amax()) * torch.finfo(problem.query.dtype).eps
            is_clear &= _beats(last, following, tie) & _beats(following, third, tie)
        clear[:, :, tile] = is_clear[..., None]
    return clear


def _beats(value: Tensor, other: Tensor, tie: float = PARENT_TIE) -> Tensor:
    return (value - other > tie * value) | (other == 0)


def _keys_and_codebook(
    kind: str,
    batch: int,
    num_keys: int,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Tensor, Codebook]:
    """Keys (B, H, S, D) of a distribution, and a codebook that fits them roughly."""
    heads, num_parents, num_children, head_dim = sizes
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    parents = 1.5 * normal(heads, num_parents, head_dim)
    children = parents[:, :, None] + 0.7 * normal(heads, num_parents, num_children, head_dim)
    place = torch.rand(batch, heads, num_keys, generator=generator, dtype=torch.float64)
    if kind == "skewed":
        place = place**6
    elif kind == "empty parents":
        num_used = _num_used(num_parents)
        place = place * num_used / num_parents
        parents[:, num_used:] += 50
        children[:, num_used:] += 50
    cell = (place * num_parents).long()
    spread = 4.0 if kind == "spread" else 0.7
    key = parents[torch.arange(heads)[:, None], cell] + spread * normal(*cell.shape, head_dim)
    if kind == "one hot leaf":
        leaf = parents if num_children == 0 else children[:, :, -1]
        key[:, :, : num_keys // 2] = leaf[:, :1] + 0.01 * normal(1, 1, 1, head_dim)
    elif kind == "identical":
        key = key[:, :, :1].expand_as(key)
    elif kind == "offset":
        offset = 30 * normal(head_dim)
        key, parents, children = key + offset, parents + offset, children + offset
    codebook = Codebook(parents, children)
    if dtype != torch.float64:
        codebook = codebook.to(dtype=torch.float32)
    return key.to(dtype), codebook


def _num_used(num_parents: int) -> int:
    """Parents that have keys, where some have none."""
    return num_parents - num_parents // 3


def _strided(rng: Random, x: Tensor) -> Tensor:
    """The values of `x` in one of the memory layouts that callers have."""
    kind = rng.choice(("tokens first", "heads first", "part of a projection", "every second token"))
    if kind == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "part of a projection":
        return torch.cat([x + 1, x, x - 1], -1)[..., x.shape[-1] : 2 * x.shape[-1]]
    if kind == "every second token":
        return x.repeat_interleave(2, dim=2)[:, :, ::2]
    return x


def _rounded(codebook: Codebook, scale: float, dtype: torch.dtype) -> Codebook:
    """The codewords that the kernels use for inputs of `dtype`, in float64."""
    heads, num_parents, num_children, head_dim = codebook.children.shape
    _, first_child, child_rows = codewords.padded_sizes(head_dim, num_parents, num_children)
    codes = codewords.pack(codebook.parents, codebook.children, scale=scale, dtype=dtype).codes
    centre = centre_of(codebook.parents.double())
    table = codes[..., :head_dim].double() / (scale * math.log2(math.e)) + centre
    children = table[:, first_child:].view(heads, num_parents, child_rows, head_dim)
    return Codebook(table[:, :num_parents], children[:, :, :num_children])


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())
