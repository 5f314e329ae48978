"""Random problems for `avq_attention`, and its error on them against the definition.

No choice is implemented here a second time. While the definition runs, `Choices` records what keys
choose by, and so where a rounding could have chosen otherwise. Its tiles show the keys at the
levels that the backend chose, which may differ from its own only by roundings.

Shapes: B batch, H heads, N queries, S keys, D head dim, T tiles, M0 parents, C children.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from cases import unchecked_call
from levels import levels_of
from torch import Tensor
from torch.overrides import TorchFunctionMode

from avq_diffusers.attention import reference
from avq_diffusers.attention.api import avq_attention
from avq_diffusers.attention.guarded import kernels
from avq_diffusers.attention.limits import obstacles
from avq_diffusers.attention.tensors import DTYPES, Tensors
from avq_diffusers.attention.triton import codewords
from avq_diffusers.codebook.assignment import centre_of
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import Spec

KEYS = ("clustered", "spread", "skewed", "one hot leaf", "identical", "offset", "empty parents")
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "heads first": lambda x: x.contiguous(),
    "channels first": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "part of a projection": lambda x: torch.cat([x + 1, x, x - 1], -1).chunk(3, -1)[1],
    "every second token": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
}
# Shares of the larger value below which roundings may decide which codeword is taken, and at which
# level a tile shows it.
KEY_TIE, LEVEL_TIE = 1e-4, 1e-3
# Further shares of a key's squared norm: of its mean, and of sums of products in roundings of
# float32. The first is also what a level gains that makes no difference.
ROUNDING, SCORE_ROUNDINGS = 1e-9, 4
# Float64 against the definition in float64.
EXACT = 1e-10
# What `draw_problem` draws beside options.
NOT_OPTIONS = "dtype", "kind", "batch", "heads", "queries", "keys", "head_dim", "num_sinks"
NOT_OPTIONS += ("has_codebook", "seed", "sharpness")
SINKS = ("sink_key", "sink_value")


@dataclass(frozen=True)
class Problem:
    """Arguments of `avq_attention`.

    Attributes:
        tokens: query (B, H, N, D), key and value (B, H, S, D), and perhaps sinks, of any strides.
        codebook: in float32, or float64 if the tokens are; None takes codewords from the keys.
        options: the other arguments, with the sizes of the codebook.
    """

    tokens: dict[str, Tensor]
    codebook: Codebook | None
    options: dict[str, Any]

    def __str__(self) -> str:
        tokens = {name: tuple(x.shape) for name, x in self.tokens.items()}
        origin = "keys" if self.codebook is None else "codebook"
        options = {k: x.dtype if isinstance(x, Tensor) else x for k, x in self.options.items()}
        return f"{tokens} {self.dtype}, codewords from {origin}, {options}"

    @property
    def dtype(self) -> torch.dtype:
        return self.tokens["query"].dtype

    @property
    def scale(self) -> float:
        return self.options["scale"] or self.tokens["query"].shape[-1] ** -0.5

    def attend(self, backend: str, **changes: Any) -> Tensor:
        """Run it with other tokens or options."""
        codebook = {"codebook": self.codebook}
        return avq_attention(**codebook | self.tokens | self.options | changes, backend=backend)

    def attend_exactly(self, query: Tensor, key: Tensor, value: Tensor, *sinks: Tensor) -> Tensor:
        """PyTorch's attention to all keys."""
        if sinks:
            key, value = torch.cat([key, sinks[0]], dim=2), torch.cat([value, sinks[1]], dim=2)
        return F.scaled_dot_product_attention(query, key, value, scale=self.scale)

    def call(self) -> tuple[Tensors, Spec]:
        """What `avq_attention` makes of it, with the key order that it decides for."""
        return unchecked_call(codebook=self.codebook, **self.tokens | self.options)

    def backend_of_gradients(self, backend: str) -> str:
        """The one that computes gradients, from levels that it chooses itself."""
        if backend != "triton":
            return backend
        means = self.options["codewords"] == "means"
        return backend if kernels().gradients.serves(self.tokens["query"], means=means) else "torch"

    def largest_logits(self) -> Tensor:
        """(B, H, N) around the mean of the keys, which a softmax ignores."""
        query, key, _, *sinks = (x.double() for x in self.tokens.values())
        keys = torch.cat([key, *sinks[:1]], dim=2) - key.mean(2, keepdim=True)
        return (self.scale * query @ keys.mT).abs().amax(-1)

    def without_ties(self, backend: str) -> "Problem":
        """The problem with a copy of another key in place of each that is nearly a tie."""
        key, query = self.tokens["key"], self.tokens["query"][:, :, :1]
        options = self.options | {"query_order": None, "key_order": self.call()[0].key_order}
        for _ in range(10):
            one_query = replace(self, tokens={**self.tokens, "query": query}, options=options)
            _, choices = one_query.define(backend, query=query.double(), key=key.double())
            clear = choices.clear_keys()
            if clear.all():
                break
            first_clear = clear.int().argmax(-1)[..., None, None]
            copies = key.gather(2, first_clear.expand_as(key[:, :, :1]))
            key[:] = torch.where(clear[..., None], key, copies)
        return self

    def define(
        self, backend: str, levels: Tensor | None = None, **tokens: Tensor
    ) -> tuple[Tensor, "Choices"]:
        """The definition in float64, on the codewords as the backend rounds them.

        Args:
            levels: at which tiles show the keys, from `levels_of`; None for those it chooses.
            tokens: instead of those of the problem, in float64.
        """
        wide = {name: x.double() for name, x in self.tokens.items()} | tokens
        inputs, spec = self.call()
        inputs = inputs._replace(**wide, scale=self.scale)
        choices = Choices(self)
        with choices, nullcontext() if levels is None else choices.fixed_to(levels, backend):
            if self.codebook is not None:
                rounds = backend == "triton"
                stored = self.rounded_codebook() if rounds else self.codebook
                inputs = inputs.with_codebook(stored.to(dtype=torch.float64))
            return reference.avq_attention(inputs, spec), choices

    def rounded_codebook(self) -> Codebook:
        """The codewords that the kernels use, in float64."""
        heads, num_parents, num_children, head_dim = self.codebook.children.shape
        _, first_child, child_rows = codewords.padded_sizes(head_dim, num_parents, num_children)
        parents, children = self.codebook.parents, self.codebook.children
        codes = codewords.pack(parents, children, scale=self.scale, dtype=self.dtype).codes
        table = codes[..., :head_dim].double() / (self.scale * math.log2(math.e))
        table += centre_of(parents.double())
        children = table[:, first_child:].view(heads, num_parents, child_rows, head_dim)
        return Codebook(table[:, :num_parents], children[:, :, :num_children])


class Choices(TorchFunctionMode):
    """Records what keys choose by while the definition runs; can fix the levels of its tiles.

    Attributes:
        distances: (B, H, S, codewords) squared, of the parents in their order of use, then of the
            leaves of every key's parent.
        agree: (B, H) for each fixed level, whether the definition chooses the same up to roundings.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem
        self.distances: list[Tensor] = []
        self.agree: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.argmin:
            self.distances.append(args[0])
        return func(*args, **(kwargs or {}))

    def fixed_to(self, levels: Tensor, backend: str) -> AbstractContextManager:
        """The definition with levels of a backend, from `levels_of`, in place of its own."""
        tiles, defined, tie = cycle(levels.unbind(2)), reference.resolution, LEVEL_TIE
        if backend == "triton" and self.problem.options["codewords"] == "means":
            # Its logits come from rounded means of keys.
            logits = float(self.problem.largest_logits().amax())
            tie += logits * torch.finfo(self.problem.dtype).eps

        def resolution(*inputs: Any) -> reference.Levels:
            *others, threshold = inputs
            shown = next(tiles)
            leaves = torch.cat([shown[..., 1], shown[..., 2:].flatten(2)], dim=-1)
            found = reference.Levels(shown[..., 0] != 1, leaves > 1)
            # At thresholds that a rounding may take for this one.
            least = defined(*others, threshold * math.exp(tie) + ROUNDING)
            most = defined(*others, threshold * math.exp(-tie) - ROUNDING)
            for low, level, high in zip(least, found, most, strict=True):
                self.agree.append(((low <= level) & (level <= high)).all(-1))
            return found

        def select(score: Tensor, num_refined: int) -> Tensor:
            refined, matters = next(tiles)[..., 0] != 1, score > ROUNDING
            found = refined & matters
            least, others = score.where(found, torch.inf), score.masked_fill(found, 0)
            is_ahead = least.amin(-1) >= others.amax(-1) * math.exp(-tie)
            self.agree.append(is_ahead & (found.sum(-1) == matters.sum(-1).clamp(max=num_refined)))
            return refined

        return patch.multiple(reference, resolution=resolution, select=select)

    def clear_keys(self) -> Tensor:
        """(B, H, S) keys whose choices no rounding can change."""
        *of_parents, of_leaves = self.distances
        clear = self._beats_the_next(of_leaves, may_be_equal=True)
        for distance in of_parents:
            clear &= self._beats_the_next(distance)
        return clear

    def _beats_the_next(self, distance: Tensor, *, may_be_equal: bool = False) -> Tensor:
        """
        Args:
            may_be_equal: equal leaves have equal scores in every backend, and the first of them
                wins. Equal parents may differ by a rounding of the matrix product.
        """
        least = distance.amin(-1)
        is_first = F.one_hot(distance.argmin(-1), distance.shape[-1]).bool()
        is_out = distance == least[..., None] if may_be_equal else is_first
        following = distance.masked_fill(is_out, torch.inf).amin(-1)
        # Backends compare k.c - |c|^2 / 2, whose roundings grow with what all keys share.
        dtype = torch.promote_types(self.problem.dtype, torch.float32)
        rounding = ROUNDING + SCORE_ROUNDINGS * torch.finfo(dtype).eps
        rounding = rounding * self.problem.tokens["key"].double().square().sum(-1)
        return following.isinf() | (following - least > KEY_TIE * (following + least) + rounding)


class Outcome(NamedTuple):
    """What came of a problem.

    error: the largest, of the output and all gradients, in units of what is allowed.
    compared: share of the heads that were compared; in the others, keys are near ties.
    """

    error: float
    compared: float


def solve(
    problem: Problem, backend: str, *, attend: Callable[..., Tensor] | None = None
) -> Outcome:
    """Run a problem and compare with the definition in float64 on the same rounded inputs.

    Allowed is twice the error of PyTorch's exact attention in the same dtype, and roundings: of the
    result, of float32, and of the keys. The error of a gradient counts against the largest
    gradient: that of one key's query is zero, and roundings remain. Heads with a key whose choice a
    rounding could change are left out, and get no gradient. Tiles show the keys at the levels that
    the backend chose, in a gradient at those that it chose again.

    Args:
        attend: what runs in place of the backend, a function of the tokens.

    Raises:
        ArithmeticError: a result is not finite, or has another shape, dtype or layout, or no
            rounding explains the levels.
    """
    dtype = problem.dtype
    levels, backward = levels_of(*problem.call(), backend), problem.backend_of_gradients(backend)
    attend = attend or partial(problem.attend, backend)

    def run(attend: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        tokens = {n: x.detach().to(dtype).requires_grad_() for n, x in problem.tokens.items()}
        return attend(**tokens), list(tokens.values())

    found: list[Choices] = []

    def definition(**tokens: Tensor) -> Tensor:
        output, choices = problem.define(backend, levels, **tokens)
        found.append(choices)
        if backward != backend:
            again, choices = problem.define(
                backward, levels_of(*problem.call(), backward), **tokens
            )
            found.append(choices)
            output = again + (output - again).detach()
        return output

    expected = run(definition, torch.float64)
    clear = found[0].clear_keys().all(-1)
    compared = float(clear.double().mean())
    actual = run(attend, dtype)
    output, query = actual[0], problem.tokens["query"]
    is_sound = output.isfinite().all() and output.transpose(1, 2).is_contiguous()
    if not is_sound or (output.shape, output.dtype) != (query.shape, dtype):
        raise ArithmeticError(f"{tuple(output.shape)} {output.dtype} is not as promised: {problem}")
    if not all(x[clear].all() for choices in found for x in choices.agree):
        raise ArithmeticError(f"the levels of tiles are beyond roundings: {problem}")
    if compared == 0:
        return Outcome(0.0, 0.0)
    # Of one sign, or sums over queries would cancel.
    weights = torch.linspace(0, 100, query.numel(), dtype=torch.float64, device=query.device)
    weights = (1 + weights.sin()).view(query.shape) * clear[..., None, None]

    def errors(actual: tuple[Tensor, list[Tensor]], expected: tuple[Tensor, list[Tensor]]):
        """Of the output, and the largest of the gradients."""
        found, target = (
            [output.detach()[clear], *torch.autograd.grad(output, tokens, weights.to(output))]
            for output, tokens in (actual, expected)
        )
        for x, y in zip(found, target, strict=True):
            if not x.isfinite().all() or x.shape != y.shape:
                raise ArithmeticError(f"a gradient {tuple(x.shape)} is not sound: {problem}")
        of_output, *of_gradients = (
            float((x.double() - y).norm()) for x, y in zip(found, target, strict=True)
        )
        size, *sizes = (float(x.norm()) for x in target)
        return of_output / size, max(of_gradients) / max(sizes)

    off = errors(actual, expected)
    if dtype == torch.float64:
        return Outcome(max(off) / EXACT, compared)

    def exact(**tokens: Tensor) -> Tensor:
        return problem.attend_exactly(*tokens.values())

    of_exact = errors(run(exact, dtype), run(exact, torch.float64))
    # All round what represents the keys around the centre, the PyTorch path in float32, others in
    # the dtype of the keys: half a rounding of every logit, and of two in a gradient.
    centred = torch.finfo(torch.float32 if backend == "torch" else dtype).eps
    logits = float(problem.largest_logits().square().mean().sqrt())
    rounding = torch.finfo(dtype).eps + 3 * torch.finfo(torch.float32).eps
    budget = (2 * of_exact[i] + rounding + logits * centred * (i + 1) / 2 for i in range(2))
    return Outcome(max(x / y for x, y in zip(off, budget, strict=True)), compared)


def draw_problem(
    rng: Random,
    *,
    backend: str = "torch",
    device: torch.device | str = "cpu",
    most: int = 300,
    **fixed: Any,
) -> Problem:
    """Draw arguments that the backend accepts.

    A key that is nearly as close to another codeword as to its own may rightly go to either:
    another key takes its place.

    Args:
        rng: that everything is drawn from.
        backend: whose `LIMITS` are kept.
        device: of the tensors.
        most: queries and keys.
        **fixed: numbers that are not drawn.
    """
    device = torch.device(device)
    while True:
        drawn = _draw_numbers(rng, most, fixed)
        problem = _problem_of(drawn, rng, device)
        is_bfloat = drawn["dtype"] == torch.bfloat16
        # Triton's interpreter multiplies the bits of bfloat16 numbers as integers.
        if not obstacles(backend, *problem.call()) and not (
            is_bfloat and backend == "triton" and device.type == "cpu"
        ):
            return problem.without_ties(backend)


def _draw_numbers(rng: Random, most: int, fixed: dict[str, Any]) -> dict[str, Any]:
    drawn: dict[str, Any] = {}

    def draw(name: str, *choices: Any) -> Any:
        drawn[name] = rng.choice(choices)
        drawn[name] = fixed.get(name, drawn[name])
        return drawn[name]

    draw("dtype", *DTYPES)
    most = rng.choice((8, 64, most, most))
    draw("batch", 1, 2, 3)
    draw("heads", 1, 2, 3)
    num_queries = draw("queries", rng.randint(1, most))
    num_keys = draw("keys", num_queries, rng.randint(1, most))
    draw("head_dim", 8, 16, 24, 40, 64, 80, 128, 160, rng.randint(1, 50))
    draw("num_sinks", 0, 0, rng.randint(1, 40))
    has_codebook = draw("has_codebook", False, True)
    # Of equal keys or fewer keys than parents, parents from the keys are equal: all are ties.
    draw("kind", *(KEYS if has_codebook else [kind for kind in KEYS if kind != "identical"]))
    several = 1, 2, rng.randint(3, 16), rng.randint(17, 64)
    num_parents = draw(
        "num_parents", *several if has_codebook else (min(x, num_keys) for x in several)
    )
    num_children = draw("num_children", 0, 1, rng.randint(2, 4), rng.randint(5, 9))
    some = rng.randint(1, max(1, num_parents - 1))
    draw("num_refined", *((0, num_parents, some, some, some) if num_children else (0,)))
    codewords = draw("codewords", "means", "stored" if has_codebook else "means")
    has_threshold = codewords == "means" and fixed.get("num_refined") is None
    draw(
        "threshold", None, *((math.inf, *[10 ** rng.uniform(-5, -1)] * 3) if has_threshold else ())
    )
    if drawn["threshold"] is not None:
        drawn["num_refined"] = None
    draw("query_tile", 1, 7, 16, 16, 128, rng.randint(1, 400))
    draw("scale", None, None, 0.01, 0.1, 0.5)
    draw("query_order", None, torch.int32, torch.int64)
    draw("key_order", None, None, None if has_codebook else torch.int64)
    drawn["seed"] = rng.getrandbits(32)
    draw("sharpness", 0.3, 1.0, 4.0)  # of the attention, times the queries
    unknown = fixed.keys() - drawn.keys()
    assert not unknown, unknown
    return drawn


def _problem_of(drawn: dict[str, Any], rng: Random, device: torch.device) -> Problem:
    numbers = dict(drawn)
    (
        dtype,
        kind,
        batch,
        heads,
        num_queries,
        num_keys,
        head_dim,
        num_sinks,
        has_codebook,
        seed,
        sharpness,
    ) = (numbers.pop(name) for name in NOT_OPTIONS)
    num_parents = numbers["num_parents"]
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    sizes = heads, num_parents, numbers["num_children"], head_dim
    key, codebook = _keys_and_codebook(kind, batch, num_keys, sizes, generator)
    # Neighbours look at the same parents, so that tiles choose others.
    num_used = _num_used(num_parents)
    parents = codebook.parents[:, :num_used]
    looked_at = torch.arange(num_queries) * num_used // num_queries
    query = normal(batch, heads, num_queries, head_dim)
    query += (parents - parents.mean(1, keepdim=True))[:, looked_at]
    query *= sharpness
    tokens = {"query": query, "key": key, "value": normal(key.shape)}
    if num_sinks:
        # Among the keys, so that neither side takes all attention.
        place = torch.randint(num_keys, (num_sinks,), generator=generator)
        tokens["sink_key"] = key[:, :, place] + normal(batch, heads, num_sinks, head_dim)
        tokens["sink_value"] = normal(tokens["sink_key"].shape)
    layouts = list(LAYOUTS.values())
    tokens = {name: rng.choice(layouts)(x.to(device, dtype)) for name, x in tokens.items()}
    for name, length in (("query_order", num_queries), ("key_order", num_keys)):
        order = torch.randperm(length, generator=generator)
        numbers[name] = numbers[name] and order.to(device, numbers[name])
    if dtype != torch.float64:
        codebook = codebook.to(dtype=torch.float32)
    return Problem(tokens, codebook.to(device) if has_codebook else None, numbers)


def _keys_and_codebook(
    kind: str,
    batch: int,
    num_keys: int,
    sizes: tuple[int, int, int, int],
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
    return key, Codebook(parents, children)


def _num_used(num_parents: int) -> int:
    """Parents that have keys, where some have none."""
    return num_parents - num_parents // 3
