"""Time the operation: `python -m eval bench kernels` and `bench attention`.

`kernels` has four parts: the paper's table (B4 H12 D64), SD1.5's shapes, Flux's joint attention,
and training's passes with gradients. A row with own codewords also has its time relative to stored
codewords of the same sizes on the same keys.

The rows of one size are timed in turns in one process, in CUDA graphs where possible, over enough
input sets to overflow the L2 cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path

from eval.benchmarks.contenders import DEFAULT_SDPA, Bench, Row, backends
from eval.benchmarks.parts import Sizes, part_rows
from eval.store.markdown import figure, number, rows_table
from eval.store.report import save_json

# Field -> column title and format.
FIGURES = {
    "ms": ("ms", ".4g"),
    "forward_ms": ("forward ms", ".4g"),
    "precompute_ms": ("precompute ms", ".4g"),
    "attention_ms": ("attention ms", ".4g"),
    "eager_ms": ("eager ms", ".4g"),
    "spread": ("spread", ".0%"),
    "over_sdpa": (f"/ {DEFAULT_SDPA}", ".3f"),
    "over_stored": ("own / stored", ".3f"),
    "error": ("error", ".1e"),
}


def run_part(part: str, bench: Bench, sizes: Mapping[str, Sizes], path: Path) -> None:
    """Time a part, print its table, and rewrite its JSON file after every size."""
    rows: list[Row] = []
    for found in part_rows(bench, part, sizes):
        rows += [{"part": part, **row} for row in found]
        for row in found:
            print(f"N = {row['tokens']}, {row['method']}: {number(row['ms'])} ms", flush=True)
        save_json(
            path,
            device=bench.device,
            backend=backends(bench.device)[0],
            effort=asdict(bench.effort),
            rows=rows,
        )
    print(kernels_table(rows), flush=True)


def kernels_table(rows: Sequence[Row]) -> str:
    """All measurements of a part as Markdown, one line per row, and what went wrong."""
    shape = "B{batch} H{heads} N{tokens} D{head_dim}"
    columns = {"shape": lambda row: shape.format(**row), "method": itemgetter("method")}
    for field, (title, form) in FIGURES.items():
        if any(row.get(field) is not None for row in rows):
            columns[title] = figure(field, form)
    notes = {
        f"- {row['method']}, N = {row['tokens']}: {row['note']}" for row in rows if "note" in row
    }
    return "\n\n".join([rows_table(columns, rows), *sorted(notes)])
