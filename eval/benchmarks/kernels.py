"""Time the operation: `python -m eval bench kernels`, `bench attention` and `bench gradients`.

`kernels` has three parts: the paper's table (B4 H12 D64), SD1.5's shapes and Flux's joint
attention. A row with own codewords also has its time relative to stored
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
from eval.store.markdown import figure, markdown_table, number, rows_table
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
    print(kernels_table(part, rows), flush=True)


def kernels_table(part: str, rows: Sequence[Row]) -> str:
    """The rows of one part as Markdown: the paper's table, or all measurements."""
    sections = [_paper_table(rows) if part == "table" else _figures_table(rows)]
    notes = {
        f"- {row['method']}, N = {row['tokens']}: {row['note']}" for row in rows if "note" in row
    }
    return "\n\n".join(sections + (["\n".join(sorted(notes))] if notes else []))


def _paper_table(rows: Sequence[Row]) -> str:
    """Methods by N: ms, and how many times faster than default SDPA."""
    found = {(row["method"], row["tokens"]): row["ms"] for row in rows}
    methods, tokens = ([*dict.fromkeys(key[i] for key in found)] for i in range(2))

    def cell(method: str, num_tokens: int) -> str:
        ms, exact = (found.get((name, num_tokens)) for name in (method, DEFAULT_SDPA))
        return number(ms) + (f" ({exact / ms:.3g}x)" if ms and exact else "")

    return markdown_table(
        [f"ms (x {DEFAULT_SDPA})", *(f"N = {n}" for n in tokens)],
        ([method, *(cell(method, n) for n in tokens)] for method in methods),
    )


def _figures_table(rows: Sequence[Row]) -> str:
    """All measurements, one line per row."""
    shape = "B{batch} H{heads} N{tokens} D{head_dim}"
    columns = {"shape": lambda row: shape.format(**row), "method": itemgetter("method")}
    for field, (title, form) in FIGURES.items():
        if any(row.get(field) is not None for row in rows):
            columns[title] = figure(field, form)
    return rows_table(columns, rows)
