"""Random problems for `avq_attention`, and its error on them against the definition.

Shapes: B batch, H heads, N queries, S keys, D head dim, M0 parents, C children.
"""

import math
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.attention.triton import codewords
from avq_diffusers.codebook.assignment import assign, centre_of
from avq_diffusers.codebook.codebook import Codebook

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KEYS = ("clustered", "spread", "skewed", "one hot leaf", "identical", "offset", "empty parents")
# Shares of the larger value below which roundings may decide which codeword or parent is taken.
KEY_TIE, PARENT_TIE = 1e-4, 1e-3
# Float64 against the definition in float64.
EXACT = 1e-10


@dataclass(frozen=True)
class Problem:
    """Arguments of `avq_attention`.

    Attributes:
        query, key, value: (B, H, N, D) and (B, H, S, D), of any strides.
        codebook: in float32, or float64 if the inputs are.
        options: the other arguments.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    codebook: Codebook
    options: dict[str, Any]

    def __str__(self) -> str:
        batch, heads, num_queries, head_dim = self.query.shape
        sizes = f"B{batch} H{heads} N{num_queries} S{self.key.shape[2]} D{head_dim}"
        book = f"M{self.codebook.num_parents}C{self.codebook.num_children}"
        numbers = {name: x for name, x in self.options.items() if not isinstance(x, Tensor)}
        return f"{sizes} {book} {self.query.dtype} {numbers}"


def draw_problem(rng: Random, *, kernels: bool, device: torch.device, most: int = 300) -> Problem:
    """Draw arguments that the backend accepts.

    No key is nearly as close to another codeword as to its own: such a key may rightly go to
    either.

    Args:
        rng: that everything is drawn from.
        kernels: within the limits of the kernels.
        device: of the tensors.
        most: queries and keys.
    """
    dtype = rng.choice(DTYPES[:3] if kernels else DTYPES)
    most = rng.choice((8, 64, most, most))
    batch, heads, num_queries = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, most)
    num_keys = rng.choice((num_queries, rng.randint(1, most)))
    multiples = (8, 16, 24, 40, 64, 80, 128)
    head_dim = rng.choice(multiples if kernels else (*multiples, rng.randint(1, 50)))
    if kernels and dtype == torch.float32:
        head_dim = min(head_dim, 64)
    num_parents = rng.choice((1, 2, rng.randint(3, 16), rng.randint(17, 64)))
    num_children = rng.choice((0, 1, rng.randint(2, 4), rng.randint(5, 9)))
    some = rng.randint(1, max(1, num_parents - 1))
    longest = 128 if kernels else 400
    options: dict[str, Any] = {
        "num_refined": rng.choice((0, num_parents, some, some, some)) if num_children else 0,
        "query_tile": rng.choice((1, 7, 16, 16, 128, rng.randint(1, longest))),
        "scale": rng.choice((None, None, 0.01, 0.1, 0.5, 1.0)),
    }
    kind = rng.choice(KEYS)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    if rng.random() < 0.7:
        order = torch.randperm(num_queries, generator=generator).to(device)
        options["query_order"] = order.to(rng.choice((torch.int32, torch.int64)))
    if dtype == torch.float64:
        # An estimate from few parents makes near-ties that only float64 tells apart.
        options["importance_tile"] = rng.choice((None, rng.randint(1, 70)))
    sizes = (heads, num_parents, num_children, head_dim)
    while True:
        key, codebook = _keys_and_codebook(kind, batch, num_keys, sizes, dtype, generator)
        scale = options["scale"] or head_dim**-0.5
        exact = _rounded(codebook, scale, dtype) if kernels else codebook.to(dtype=torch.float64)
        clear = clear_keys(key.double(), exact)
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
    return Problem(query, key, value, codebook.to(device), options)


def error_over_budget(problem: Problem, backend: str) -> float:
    """Run a problem and return its error in units of what is allowed.

    The definition runs in float64 on the same rounded inputs, and on the codewords as the backend
    rounds them. Allowed is twice the error of PyTorch's exact attention in the same dtype, and
    roundings of the result and of float32. Query tiles whose last refined parent is nearly as
    important as the next one are left out.

    Raises:
        ArithmeticError: the output is not finite, or has another shape, dtype or layout.
    """
    query, key, value = problem.query, problem.key, problem.value
    output = avq_attention(query, key, value, problem.codebook, backend=backend, **problem.options)
    is_sound = output.isfinite().all() and output.transpose(1, 2).is_contiguous()
    if not is_sound or (output.shape, output.dtype) != (query.shape, query.dtype):
        raise ArithmeticError(f"{tuple(output.shape)} {output.dtype} is not as promised: {problem}")
    scale = problem.options["scale"] or query.shape[-1] ** -0.5
    codebook = problem.codebook.to(dtype=torch.float64)
    if backend == "triton":
        codebook = _rounded(problem.codebook, scale, query.dtype)
    wide = [x.double() for x in (query, key, value)]
    expected = avq_attention(*wide, codebook, backend="reference", **problem.options)
    if query.dtype == torch.float64:
        return _relative_error(output, expected) / EXACT
    clear = clear_queries(wide[0], wide[1], codebook, **problem.options)
    if not clear.any():
        return 0.0
    exact = F.scaled_dot_product_attention(*wide, scale=scale)
    attention = F.scaled_dot_product_attention(query, key, value, scale=scale)
    rounding = torch.finfo(query.dtype).eps + 2 * torch.finfo(torch.float32).eps
    allowed = 2 * _relative_error(attention, exact) + rounding
    return _relative_error(output[clear], expected[clear]) / allowed


def gradient_over_budget(problem: Problem) -> float:
    """The same of the gradients of a float64 problem in query, key and value, backend "torch"."""
    gradients = []
    for backend in ("torch", "reference"):
        tensors = [x.clone().requires_grad_() for x in (problem.query, problem.key, problem.value)]
        output = avq_attention(*tensors, problem.codebook, backend=backend, **problem.options)
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device)
        gradients.append(torch.autograd.grad((output * weights.view_as(output)).sum(), tensors))
    # A gradient of zero, as with one key, leaves roundings: they count against all gradients.
    size = max(float(x.norm()) for x in gradients[1])
    errors = [float((x - y).norm()) for x, y in zip(*gradients, strict=True)]
    return max(errors) / max(size, 1e-6) / EXACT


def clear_keys(key: Tensor, codebook: Codebook) -> Tensor:
    """(B, H, S) keys whose nearest parent, and nearest leaf in its cell, beat the next clearly.

    Args:
        key: (B, H, S, D) float64.
        codebook: in float64.
    """
    parent, _ = assign(key, codebook)
    heads = torch.arange(key.shape[1], device=key.device)[:, None]
    to_parents = torch.cdist(key, codebook.parents, compute_mode="donot_use_mm_for_euclid_dist")
    to_leaves = (codebook.leaves[heads, parent] - key[..., None, :]).norm(dim=-1)
    return _is_clear(to_parents) & _is_clear(to_leaves)


def _is_clear(distance: Tensor) -> Tensor:
    if distance.shape[-1] == 1:
        return torch.ones_like(distance[..., 0], dtype=torch.bool)
    nearest = distance.square().topk(2, largest=False).values
    return nearest[..., 1] - nearest[..., 0] > KEY_TIE * nearest.sum(-1)


def clear_queries(
    query: Tensor,
    key: Tensor,
    codebook: Codebook,
    *,
    num_refined: int,
    query_tile: int,
    scale: float | None,
    query_order: Tensor | None = None,
) -> Tensor:
    """(B, H, N) queries of tiles whose last refined parent beats the next one clearly.

    Args:
        query: (B, H, N, D) float64.
        key: (B, H, S, D) float64.
        codebook: in float64.
        num_refined, query_tile, scale, query_order: as in `avq_attention`.
    """
    clear = torch.ones(query.shape[:3], dtype=torch.bool, device=query.device)
    if not 0 < num_refined < codebook.num_parents:
        return clear
    parent, _ = assign(key, codebook)
    counts = F.one_hot(parent, codebook.num_parents).sum(-2).double()
    logits = (scale or query.shape[-1] ** -0.5) * query @ codebook.parents.mT
    share = (logits + counts.log()[:, :, None]).softmax(-1)
    order = (
        torch.arange(query.shape[2], device=query.device) if query_order is None else query_order
    )
    for tile in order.split(query_tile):
        importance = share[:, :, tile].sum(-2).sort(-1, descending=True).values
        last, following = importance[..., num_refined - 1], importance[..., num_refined]
        is_clear = (last - following > PARENT_TIE * last) | (following == 0)
        clear[:, :, tile] = is_clear[..., None]
    return clear


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
