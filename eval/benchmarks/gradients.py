"""Time attention with its gradients against exact attention's: `python -m eval bench gradients`."""

from collections.abc import Callable, Sequence
from functools import partial
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from avq_diffusers import AVQConfig, avq_attention
from avq_diffusers.attention.orders import query_order
from eval.benchmarks.contenders import DEFAULT_SDPA, FUSED_SDPA
from eval.benchmarks.inputs import KeySource, Shape
from eval.benchmarks.timing import Effort, time_in_turns
from eval.names import config_label
from eval.store.markdown import markdown_table, number

# SD1.5 at 512 px: level 0 with 4 and 12 images, level 1 with 12. Level 0 at 1024 px, level 1 of
# SDXL, and a DiT.
SHAPES = (
    Shape(4, 8, 4096, 40),
    Shape(12, 8, 4096, 40),
    Shape(12, 8, 1024, 80),
    Shape(4, 8, 16384, 40),
    Shape(4, 10, 4096, 64),
    Shape(2, 24, 4096, 128),
)
SMALL = (Shape(1, 2, 1024, 40),)
CONFIGS = ("M64P16C8", "M64P16C8E256", "M128P32C8")
EFFORT = Effort(rounds=7, block_ms=60)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def bench_gradients(
    shapes: Sequence[Shape],
    *,
    configs: Sequence[AVQConfig],
    device: torch.device,
    dtype: torch.dtype,
    effort: Effort = EFFORT,
) -> list[dict[str, Any]]:
    """Time forward passes, and those with the gradients of query, key and value, in turns.

    A row has `forward_ms`, `both_ms` and its share of the fastest exact attention, `over_exact`.
    Rows of AVQ have codewords from the call's keys. On a GPU they also have `error`: the largest
    relative difference of a gradient to that in PyTorch, which near-ties between parents add to.
    """
    rows = []
    for shape in tqdm(shapes, desc="shapes"):
        inputs = KeySource(shape.num_heads, shape.head_dim, device).inputs(shape, dtype)
        inputs = tuple(x.requires_grad_() for x in inputs)
        grad = torch.randn_like(inputs[0])
        own = {config_label(config, own=True): _avq(config, shape) for config in configs}
        exact = _exact(device)
        attentions = exact | own
        runs = [partial(_forward, attention, inputs) for attention in attentions.values()]
        runs += [partial(_both, attention, inputs, grad) for attention in attentions.values()]
        timings = time_in_turns(runs, 1, device, effort)
        found: list[dict[str, Any]] = []
        for index, name in enumerate(attentions):
            forward, both = timings[index], timings[index + len(attentions)]
            row = {"shape": str(shape), "attention": name, "forward_ms": forward["ms"]}
            row |= {"both_ms": both["ms"], "spread": both["spread"], "timer": both["timer"]}
            found.append(row)
        fastest = min(row["both_ms"] for row in found if row["attention"] in exact)
        for row in found:
            row["over_exact"] = row["both_ms"] / fastest
        if device.type == "cuda":
            for row, config in zip(found[len(exact) :], configs, strict=True):
                row["error"] = _error(config, shape, inputs, grad)
        rows += found
    return rows


def gradients_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    return markdown_table(
        ["shape", "attention", "forward ms", "with gradients ms", "over exact", "error"],
        (
            [
                row["shape"],
                row["attention"],
                number(row["forward_ms"], ".3f"),
                number(row["both_ms"], ".3f"),
                number(row["over_exact"], ".2f"),
                number(row.get("error"), ".1e"),
            ]
            for row in rows
        ),
    )


def _exact(device: torch.device) -> dict[str, Attention]:
    def fused(kernel: SDPBackend, *inputs: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(*inputs)

    if device.type != "cuda":
        return {DEFAULT_SDPA: F.scaled_dot_product_attention}
    return {name: partial(fused, kernel) for name, kernel in FUSED_SDPA.items()}


def _avq(config: AVQConfig, shape: Shape, backend: str = "auto") -> Attention:
    def avq(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        side = isqrt(shape.num_tokens)
        order = query_order(side, side, config.query_order, query.device)
        options = config.attention_arguments
        return avq_attention(query, key, value, query_order=order, backend=backend, **options)

    return avq


def _error(config: AVQConfig, shape: Shape, inputs: Sequence[Tensor], grad: Tensor) -> float:
    found, expected = (
        torch.autograd.grad(_avq(config, shape, backend)(*inputs), inputs, grad)
        for backend in ("auto", "torch")
    )
    return max(
        float((x - y).float().norm() / y.float().norm())
        for x, y in zip(found, expected, strict=True)
    )


@torch.no_grad()
def _forward(attention: Attention, inputs: Sequence[Tensor], _: int) -> Tensor:
    return attention(*inputs)


def _both(
    attention: Attention, inputs: Sequence[Tensor], grad: Tensor, _: int
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(attention(*inputs), inputs, grad)
