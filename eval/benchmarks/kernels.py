"""Time the operation: `python -m eval bench kernels`, `bench attention` and `bench gradients`.

`kernels` has four parts: the paper's table (B4 H12 D64), SD1.5's shapes, Flux's joint attention,
and scaling with codebook size and N. A row with own codewords also has its time relative to stored
codewords of the same sizes on the same keys.

The rows of one size are timed in turns in one process, in CUDA graphs where possible, over enough
input sets to overflow the L2 cache.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from statistics import linear_regression

from eval.benchmarks.contenders import DEFAULT_SDPA, Bench, Row, backends
from eval.benchmarks.parts import KERNEL_PARTS, Sizes, part_rows
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
    for name in KERNEL_PARTS.get(part, (part,)):
        facts = {"part": part} if name == part else {"part": part, "against": name}
        for found in part_rows(bench, name, sizes):
            rows += [{**facts, **row} for row in found]
            for row in found:
                print(f"N = {row['tokens']}, {row['method']}: {number(row['ms'])} ms", flush=True)
            save_json(
                path,
                device=bench.device,
                backend=backends(bench.device)[0],
                effort=asdict(bench.effort),
                rows=rows,
                **({"slopes": slopes(rows)} if part == "scaling" else {}),
            )
    print(kernels_table(part, rows), flush=True)


def fit_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of log y over log x."""
    return linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def slopes(rows: Sequence[Row]) -> list[Row]:
    """The fitted lines of the scaling rows: points, slope, and the slopes of both stages."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        label = row["method"]
        if row["against"] == "codewords":
            label = f"{label.partition(' ')[0]}, N = {row['tokens']}"
        if row["ms"] is not None:
            groups.setdefault((row["against"], label), []).append(row)
    lines = []
    for (against, label), members in groups.items():
        axis = "effective_codewords" if against == "codewords" else "tokens"
        members.sort(key=lambda row: row[axis])
        x = [row[axis] for row in members]
        line: Row = {"against": against, "label": label, "x": x}
        for stage in ("", "precompute_", "attention_"):
            if all(f"{stage}ms" in row for row in members):
                line[f"{stage}ms"] = [row[f"{stage}ms"] for row in members]
                if len(set(x)) > 1:
                    line[f"{stage}slope"] = fit_slope(x, line[f"{stage}ms"])
        lines.append(line)
    return lines


def kernels_table(part: str, rows: Sequence[Row]) -> str:
    """The rows of one part as Markdown: the paper's table, or all measurements, and slopes."""
    sections = [_paper_table(rows) if part == "table" else _figures_table(rows)]
    if part == "scaling":
        columns = {"time over": itemgetter("against"), "line": itemgetter("label")}
        columns |= {
            title: figure(f"{stage}slope", ".3f")
            for title, stage in (
                ("slope", ""),
                ("of the precompute", "precompute_"),
                ("of the attention", "attention_"),
            )
        }
        sections.append(rows_table(columns, slopes(rows)))
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
