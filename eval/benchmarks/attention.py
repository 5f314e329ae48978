"""Time AVQ attention against exact attention: `python -m eval bench attention`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from avq_diffusers import AVQConfig, avq_attention
from avq_diffusers.attention.orders import query_order
from avq_diffusers.codebook.codebook import Codebook
from eval.benchmarks.inputs import KeySource, Shape
from eval.benchmarks.timing import Effort, time_in_turns
from eval.store.markdown import markdown_table, number

METRICS = (
    "num_tokens",
    "exact_ms",
    "exact_spread",
    "avq_ms",
    "avq_spread",
    "ratio",
    "own_ms",
    "own_spread",
    "own_over_stored",
)
EFFORT = Effort(rounds=9, block_ms=300)


@torch.no_grad()
def bench_attention(
    tokens: Sequence[int],
    *,
    config: AVQConfig,
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    num_heads: int,
    head_dim: int,
    effort: Effort = EFFORT,
    max_exact_tokens: int = 16384,
) -> list[dict[str, Any]]:
    """Time AVQ of stored and of own codewords (precompute included) and SDPA in turns.

    Queries follow a square grid where N is a square. A row has median times: `avq_ms` with stored
    codewords, `own_ms` with those of the call's keys. `ratio` is exact over stored AVQ time, and a
    spread is the range of the times over their median.
    """
    source = KeySource(num_heads, head_dim, device)
    codebook = source.codebook(config)
    rows = []
    for num_tokens in tqdm(tokens, desc="attention"):
        inputs = source.inputs(Shape(batch, num_heads, num_tokens, head_dim), dtype)
        side = isqrt(num_tokens)
        grid = (side, side) if side * side == num_tokens else (1, num_tokens)
        order = query_order(*grid, config.query_order, device)

        def avq(codebook: Codebook | None, _: int, inputs=inputs, order=order) -> Tensor:
            form = replace(config, codewords="means" if codebook is None else "stored")
            return avq_attention(*inputs, codebook, query_order=order, **form.attention_arguments)

        def exact(_: int, inputs=inputs) -> Tensor:
            return F.scaled_dot_product_attention(*inputs)

        runs = {"avq": partial(avq, codebook), "own": partial(avq, None)}
        if num_tokens <= max_exact_tokens:
            runs["exact"] = exact
        row: dict[str, Any] = dict.fromkeys(METRICS) | {"num_tokens": num_tokens}
        timings = time_in_turns(list(runs.values()), 1, device, effort)
        for name, timing in zip(runs, timings, strict=True):
            row |= {f"{name}_ms": timing["ms"], f"{name}_spread": timing["spread"]}
        if row["exact_ms"] is not None:
            row["ratio"] = row["exact_ms"] / row["avq_ms"]
        row["own_over_stored"] = row["own_ms"] / row["avq_ms"]
        rows.append(row)
    return rows


def attention_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    return markdown_table(
        ["N", "exact ms", "AVQ ms", "exact / AVQ", "own ms", "own / stored", "spread"],
        (
            [
                str(row["num_tokens"]),
                number(row["exact_ms"], ".1f"),
                number(row["avq_ms"], ".1f"),
                number(row["ratio"], ".1f"),
                number(row["own_ms"], ".1f"),
                number(row["own_over_stored"], ".2f"),
                ", ".join(number(row[f"{name}_spread"], ".0%") for name in ("exact", "avq", "own")),
            ]
            for row in rows
        ),
    )
