"""Time the operation against exact and unfused attention: `python -m eval bench kernels`.

There are four parts: the paper's table (B4 H12 D64), SD1.5's shapes, Flux's joint attention, and
scaling with codebook size and N. SD1.5's shapes run with evenly spread keys, and with 30 % of the
keys equal to one. A row of own codewords has its time over that of stored ones of the same sizes on
the same keys.

The rows of one size are timed in turns in one process, by CUDA graphs where possible. They run over
enough input sets to overflow the L2 cache. SD1.5's shapes also run over one set: it stays in the
cache, like tokens that projections have just written.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import linear_regression

import torch

from avq_diffusers.attention.orders import query_order
from eval.benchmarks.contenders import DEFAULT_SDPA, Bench, Row
from eval.benchmarks.inputs import Shape
from eval.benchmarks.timing import Effort
from eval.names import MethodName, parse_method
from eval.store.markdown import markdown_table, number
from eval.store.plots import Line, Panel, panel_plot
from eval.store.report import save_json

HOT_SHARE = 0.3
SKEWED = ", skewed keys"


@dataclass(frozen=True)
class Suite:
    """The sizes of a run."""

    table_shapes: tuple[Shape, ...]
    table_configs: tuple[str, ...]
    sd15_shapes: tuple[Shape, ...]
    sd15_config: str
    joint_shapes: tuple[Shape, ...]
    joint_configs: tuple[str, ...]
    num_sinks: int
    codebook_shapes: tuple[Shape, ...]
    codebook_configs: tuple[str, ...]
    token_shapes: tuple[Shape, ...]
    token_configs: tuple[str, ...]
    effort: Effort


def _paper_shapes(*tokens: int) -> tuple[Shape, ...]:
    return tuple(Shape(4, 12, num_tokens, 64) for num_tokens in tokens)


FLAT_SIZES = ("M64", "M128", "M160", "M256", "M512")
ADAPTIVE_SIZES = ("M32P8C8", "M64P8C8", "M64P16C8", "M128P16C8", "M128P32C8")

FULL = Suite(
    table_shapes=_paper_shapes(1024, 4096, 16384, 65536),
    table_configs=(
        "M256",
        "M512",
        "M64P8C8",
        "M64P16C8",
        "M64P16C8/own",
        "M128P8C8",
        "M128P16C8",
    ),
    sd15_shapes=(
        *(Shape(2, 8, num_tokens, 40) for num_tokens in (4096, 16384, 65536)),
        *(Shape(2, 8, num_tokens, 80) for num_tokens in (4096, 16384)),
    ),
    sd15_config="M64P16C8",
    joint_shapes=tuple(Shape(1, 24, num_tokens, 128) for num_tokens in (4096, 16384)),
    joint_configs=("M64P16C8/own", "M64P16C8E256/own"),
    num_sinks=512,
    codebook_shapes=_paper_shapes(4096, 16384, 65536),
    codebook_configs=FLAT_SIZES + ADAPTIVE_SIZES,
    token_shapes=_paper_shapes(*(2**power for power in range(12, 19))),
    token_configs=("M64P16C8", "M256"),
    effort=Effort(),
)
TINY = Suite(
    table_shapes=(Shape(1, 2, 64, 16), Shape(1, 2, 150, 16)),
    table_configs=("M8", "M4P2C2", "M4P2C2/own"),
    sd15_shapes=(Shape(2, 2, 64, 40),),
    sd15_config="M4P2C2",
    joint_shapes=(Shape(1, 2, 64, 32),),
    joint_configs=("M4P2C2/own", "M4P2C2E8/own"),
    num_sinks=5,
    codebook_shapes=(Shape(1, 2, 64, 16),),
    codebook_configs=("M4", "M16", "M4P2C2", "M8P4C2"),
    token_shapes=(Shape(1, 2, 64, 16), Shape(1, 2, 256, 16)),
    token_configs=("M4P2C2",),
    effort=Effort(rounds=2, block_ms=1.0, eager_rounds=2),
)


def _method(text: str) -> MethodName:
    return parse_method(text, (0,))


def table_part(bench: Bench, suite: Suite) -> Iterator[list[Row]]:
    """The paper's Tab. speed_scaling, one list of rows per N."""
    for shape in suite.table_shapes:
        torch.compiler.reset()  # the unfused baseline is compiled for every size
        sets = bench.input_sets(shape)
        contenders = bench.exact(sets)
        for method in map(_method, suite.table_configs):
            fused = bench.avq(shape, sets, method.config, own=method.own)
            contenders.append(fused)
            if not method.config.num_children:
                contenders += bench.unfused(shape, sets, method.config, fused.expected)
        yield bench.rows(shape, contenders, len(sets))


def sd15_part(bench: Bench, suite: Suite) -> Iterator[list[Row]]:
    """SD1.5's self-attention in Gilbert order, stored and own codewords, even and skewed keys."""
    config = _method(suite.sd15_config).config
    forms = config, replace(config, codewords="means")
    for shape in suite.sd15_shapes:
        side = math.isqrt(shape.num_tokens)
        order = query_order(side, side, config.query_order, bench.device)
        sets = bench.input_sets(shape)
        hot = bench.input_sets(shape, HOT_SHARE)
        contenders = bench.exact(sets)
        for form, own in zip(forms, (False, True), strict=True):
            uniform = bench.avq(shape, sets, form, order, own=own)
            skewed = bench.avq(shape, hot, form, order, own=own)
            contenders += [
                replace(uniform, facts={**uniform.facts, "keys": "uniform"}),
                replace(
                    skewed,
                    name=f"{skewed.name}{SKEWED}",
                    facts={**skewed.facts, "keys": "skewed"},
                    stored=skewed.stored and f"{skewed.stored}{SKEWED}",
                ),
            ]
        rows = bench.rows(shape, contenders, len(sets))
        cached = bench.rows(shape, [replace(one, stages={}) for one in contenders], 1)
        for row, one in zip(rows, cached, strict=True):
            row["cached_ms"] = one["ms"]
        yield rows


def joint_part(bench: Bench, suite: Suite) -> Iterator[list[Row]]:
    """Image queries of Flux in Gilbert order, in bf16: with the text's keys as sinks and without.

    Exact attention has the keys of image and text.
    """
    bench = Bench(bench.device, bench.effort, torch.bfloat16)
    for shape in suite.joint_shapes:
        side = math.isqrt(shape.num_tokens)
        order = query_order(side, side, "gilbert", bench.device)
        sets = bench.input_sets(shape)
        sinks = bench.sinks(shape, suite.num_sinks, len(sets))
        joint = [
            (query, *(torch.cat(pair, 2) for pair in zip((key, value), text, strict=True)))
            for (query, key, value), text in zip(sets, sinks, strict=True)
        ]
        contenders = bench.exact(joint)
        for method in map(_method, suite.joint_configs):
            for text in ((), sinks):
                contender = bench.avq(shape, sets, method.config, order, own=True, sinks=text)
                contenders.append(replace(contender, stored=None))
        yield bench.rows(shape, contenders, len(sets))


def scaling_part(bench: Bench, suite: Suite) -> Iterator[list[Row]]:
    """Time against effective codewords, then against N."""
    for against, shapes, configs in (
        ("codewords", suite.codebook_shapes, suite.codebook_configs),
        ("tokens", suite.token_shapes, suite.token_configs),
    ):
        for shape in shapes:
            sets = bench.input_sets(shape)
            contenders = [bench.avq(shape, sets, _method(text).config) for text in configs]
            rows = bench.rows(shape, contenders, len(sets))
            yield [{"against": against, **row} for row in rows]


PARTS = {
    "table": table_part,
    "sd15": sd15_part,
    "joint": joint_part,
    "scaling": scaling_part,
}


def run_kernels(
    device: torch.device,
    output: Path,
    *,
    command: str,
    parts: Sequence[str] = tuple(PARTS),
) -> None:
    """Time the parts, print tables, and write one JSON file and one plot per part.

    The file is rewritten after every size. Off CUDA, the sizes are tiny.

    Raises:
        ValueError: a part is unknown.
    """
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"--parts must be some of {', '.join(PARTS)}, but got {part!r}.")
    if device.type != "cuda":
        print(f"{device.type}: tiny sizes, without CUDA graphs, FA2, cuDNN and stage times")
    suite = FULL if device.type == "cuda" else TINY
    bench = Bench(device, suite.effort)
    for part in parts:
        path = output / f"bench_kernels_{part}_{device.type}.json"
        rows: list[Row] = []
        for size in PARTS[part](bench, suite):
            for row in size:
                rows.append({"part": part, **row})
                print(f"N = {row['tokens']}, {row['method']}: {number(row['ms'])} ms", flush=True)
            fits = {"slopes": slopes(rows)} if part == "scaling" else {}
            save_json(
                path,
                command=command,
                device=device,
                backend=bench.backend,
                effort=asdict(suite.effort),
                rows=rows,
                **fits,
            )
        print(kernels_table(part, rows), flush=True)
        plot_kernels(path.with_suffix(".png"), part, rows)


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
        for name, slope in (
            ("ms", "slope"),
            ("precompute_ms", "precompute_slope"),
            ("attention_ms", "attention_slope"),
        ):
            if all(name in row for row in members):
                line[name] = [row[name] for row in members]
                if len(set(x)) > 1:
                    line[slope] = fit_slope(x, line[name])
        lines.append(line)
    return lines


def kernels_table(part: str, rows: Sequence[Row]) -> str:
    """The rows of one part as Markdown: methods over N, or stages and fitted slopes."""
    sections = [_paper_table(rows) if part == "table" else _stage_table(rows)]
    if part == "scaling":
        sections.append(_slope_table(slopes(rows)))
    notes = {
        f"- {row['method']}, N = {row['tokens']}: {row['note']}" for row in rows if "note" in row
    }
    if notes:
        sections.append("\n".join(sorted(notes)))
    return "\n\n".join(sections)


def plot_kernels(path: Path, part: str, rows: Sequence[Row]) -> None:
    """Plot the fitted lines of the scaling part, or the times of another part over N."""
    panels: dict[tuple[str, str], list[Line]] = {}
    if part == "scaling":
        for line in slopes(rows):
            xlabel = "effective codewords" if line["against"] == "codewords" else "tokens N"
            slope = f", slope {line['slope']:.2f}" if "slope" in line else ""
            lines = panels.setdefault((f"ms over {xlabel}", xlabel), [])
            lines.append(Line(line["label"] + slope, line["x"], line["ms"]))
    else:
        times: dict[tuple[str, str], Row] = {}
        for row in rows:
            title = f"ms, B{row['batch']} H{row['heads']} D{row['head_dim']}, {row['dtype']}"
            if row["ms"] is not None:
                times.setdefault((title, row["method"]), {})[row["tokens"]] = row["ms"]
        for (title, method), ms in times.items():
            lines = panels.setdefault((title, "tokens N"), [])
            lines.append(Line(method, list(ms), list(ms.values())))
    panel_plot(
        path,
        [
            [
                Panel(title, xlabel, lines, xscale="log", yscale="log")
                for (title, xlabel), lines in panels.items()
            ]
        ],
    )


def _paper_table(rows: Sequence[Row]) -> str:
    tokens = sorted({row["tokens"] for row in rows})
    found = {(row["method"], row["tokens"]): row for row in rows}

    def cell(method: str, num_tokens: int) -> str:
        row, exact = (found.get((name, num_tokens), {}) for name in (method, DEFAULT_SDPA))
        ms, exact_ms = row.get("ms"), exact.get("ms")
        notes = [f"{exact_ms / ms:.3g}x"] if ms and exact_ms else []
        if "over_stored" in row:
            notes.append(f"{row['over_stored']:.3f} of stored")
        return number(ms) + (f" ({', '.join(notes)})" if notes else "")

    first = rows[0]
    title = (
        f"B{first['batch']} H{first['heads']} D{first['head_dim']}, {first['dtype']}: ms, and how "
        f"many times faster than {DEFAULT_SDPA}; time of own over stored codewords"
    )
    table = markdown_table(
        ["method", *(f"N = {n}" for n in tokens)],
        (
            [method, *(cell(method, n) for n in tokens)]
            for method in dict.fromkeys(row["method"] for row in rows)
        ),
    )
    return f"{title}\n\n{table}"


def _stage_table(rows: Sequence[Row]) -> str:
    fields = ("ms", "precompute_ms", "attention_ms", "eager_ms", "cached_ms")
    return markdown_table(
        ["shape", "method", *(name.replace("_", " ") for name in fields), "own / stored"],
        (
            [
                str(Shape(row["batch"], row["heads"], row["tokens"], row["head_dim"])),
                row["method"],
                *(number(row.get(name)) for name in fields),
                number(row.get("over_stored"), ".3f"),
            ]
            for row in rows
        ),
    )


def _slope_table(lines: Sequence[Row]) -> str:
    fields = ("slope", "precompute_slope", "attention_slope")
    return markdown_table(
        ["time over", "line", "slope", "of the precompute", "of the attention"],
        (
            [line["against"], line["label"], *(number(line.get(name), ".3f") for name in fields)]
            for line in lines
        ),
    )
