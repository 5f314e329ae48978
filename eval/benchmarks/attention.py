"""Speed of the operation against exact attention, in one process on one device."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer
from tqdm import tqdm

from avq_diffusers import AVQConfig, Codebook, avq_attention, query_order
from eval.markdown import markdown_table, number


def attention_inputs(
    batch: int, num_heads: int, num_tokens: int, head_dim: int, config: AVQConfig, *, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Codebook]:
    """Queries, keys and values (B, H, N, D) in (B, N, H, D) memory, and a codebook of the keys.

    Keys come from as many clusters as there are leaves, so that every codeword is in use.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    parents = normal(num_heads, config.num_parents, head_dim)
    offsets = 0.5 * normal(num_heads, config.num_parents, config.num_children, head_dim)
    if config.num_children:
        offsets = offsets - offsets.mean(2, keepdim=True)
    codebook = Codebook(parents, parents[:, :, None] + offsets)
    leaves = codebook.leaves.flatten(1, 2)
    cluster = torch.randint(leaves.shape[1], (batch, num_tokens), generator=generator)
    key = leaves[:, cluster].permute(1, 2, 0, 3).contiguous()
    key += 0.1 * normal(batch, num_tokens, num_heads, head_dim)
    query, value = (normal(batch, num_tokens, num_heads, head_dim) for _ in range(2))
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), codebook


def bench_attention(
    tokens: Sequence[int],
    *,
    config: AVQConfig,
    device: torch.device,
    dtype: torch.dtype,
    batch: int = 2,
    num_heads: int = 8,
    head_dim: int = 40,
    rounds: int = 5,
    max_exact_tokens: int = 16384,
) -> list[dict[str, Any]]:
    """Time AVQ (precompute and attention) and SDPA in turns; square grids where N is a square.

    Returns:
        a row for each N with median times; `ratio` is exact over AVQ time.
    """
    rows = []
    for num_tokens in tqdm(tokens, desc="attention"):
        query, key, value, codebook = attention_inputs(
            batch, num_heads, num_tokens, head_dim, config
        )
        query, key, value = (x.to(device, dtype) for x in (query, key, value))
        codebook = codebook.to(device)
        side = int(num_tokens**0.5)
        height, width = (side, side) if side * side == num_tokens else (1, num_tokens)
        order = query_order(height, width, config.query_order, device)

        def avq(query=query, key=key, value=value, codebook=codebook, order=order):
            return avq_attention(
                query,
                key,
                value,
                codebook,
                num_refined=config.num_refined,
                query_tile=config.query_tile,
                query_order=order,
            )

        def exact(query=query, key=key, value=value):
            return F.scaled_dot_product_attention(query, key, value)

        with_exact = num_tokens <= max_exact_tokens
        times: dict[str, list[float]] = {"avq": [], "exact": []}
        for _ in range(rounds):
            times["avq"].append(_milliseconds(avq))
            if with_exact:
                times["exact"].append(_milliseconds(exact))
        avq_ms = median(times["avq"])
        exact_ms = median(times["exact"]) if with_exact else None
        ratio = exact_ms / avq_ms if with_exact else None
        rows.append(
            {"num_tokens": num_tokens, "exact_ms": exact_ms, "avq_ms": avq_ms, "ratio": ratio}
        )
    return rows


def attention_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    return markdown_table(
        ["N", "exact ms", "AVQ ms", "exact / AVQ"],
        (
            [
                str(row["num_tokens"]),
                number(row["exact_ms"], ".1f"),
                number(row["avq_ms"], ".1f"),
                number(row["ratio"], ".1f"),
            ]
            for row in rows
        ),
    )


def _milliseconds(function: Callable[[], Any]) -> float:
    """Median of one block of calls, device synchronised by the timer."""
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.3).median * 1e3
