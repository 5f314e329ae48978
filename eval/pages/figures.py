"""Each page's figures, from the JSON files in a folder of results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from typing import Any

from avq_diffusers.attention.limits import VERIFIED
from eval.keys.measuring import dial_panels
from eval.methods.folder import LINFUSION_CONFIG
from eval.methods.registry import AVQ, EXACT, LIMIT, NO_ATTENTION, TOME, method_label
from eval.quality.scene_rows import LESS_EXACT, row_key
from eval.quality.tolerance import SLACK, last_psnr, tolerance_panels
from eval.store.markdown import Column, figure, number, rows_table
from eval.store.plots import LOGS, Line, Panel, bar_plot, lines, panel_plot
from eval.store.report import complete, read_result

Row = dict[str, Any]
FINE, DEFAULT, COARSE = "M64C8T2.5e-5", "M64C8T1e-4", "M64C8T4e-4"
PAPER, FLAT = "M64P16C8", "M192"
# What the quality page shows, in this order.
COMPARED = [DEFAULT, PAPER, FLAT, TOME, "eval/results/distilled/mini_linfusion", NO_ATTENTION]
STEPS = "speed/bench_steps_cuda.json"
UNSTEADY = 0.2  # range of a row's times, relative to their median, from which a footnote says so
PARALLEL = "speed/bench_parallel_cuda_x2.json"
OWN_SCHEME = ", own"
OPERATIONS = ("attention_cpu", "kernels_sd15_cuda", "kernels_joint_cuda")
LABELS = {
    EXACT: "exact attention",
    NO_ATTENTION: "control: each token sees itself only",
    LINFUSION_CONFIG: "LinFusion",
}


@dataclass(frozen=True)
class Figures:
    """What a page shows.

    Attributes:
        values: values for the template's placeholders.
        files: results that they come from; without one, the page only says that there is none.
        plot: file name of the plot.
        draw: draws the plot; None if another command does.
    """

    values: Mapping[str, Any]
    files: Sequence[Path]
    plot: str = ""
    draw: Callable[[Path], None] | None = None


class Rows(dict[Any, Row]):
    """Rows by key; a missing one raises an error that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __missing__(self, key: Any) -> Row:
        raise ValueError(f"{self.path} has no row of {key}; make it again.")


class File:
    """A result: `rows` by one or more fields, each with at least the other given fields."""

    def __init__(self, path: Path, keys: Sequence[str], *fields: str) -> None:
        self.path, self.document, self.rows = path, read_result(path), Rows(path)
        with complete(path):
            self.date = self.document["environment"]["date"]
            self.device = self.document["environment"]["device"].removesuffix(" 80GB HBM3")
            for row in self.document["rows"]:
                self.rows[itemgetter(*keys)(row)] = row | {name: row[name] for name in fields}


def speed(folder: Path) -> Figures:
    """A denoising step with `apply_avq(pipe)` against exact attention, by model, size and run."""
    path = folder / STEPS
    if not path.is_file():
        return Figures({}, [])
    file = File(path, ["model", "size", "run", "method"], "ms", "title", "times_as_fast")
    rows = []
    for (model, size, run, method), avq in file.rows.items():
        exact, limit = (file.rows.get((model, size, run, x), {}) for x in (EXACT, LIMIT))
        if method == AVQ and avq["times_as_fast"] is not None:
            base = avq.get("exact_ms", exact.get("ms"))
            rows.append(
                avq
                | {"exact": base, "limit": limit.get("times_as_fast")}
                | {
                    "image": f"{size}p video"
                    if avq["title"].startswith("one block")
                    else f"{size}²"
                }
                | {"memory": _memory(avq, exact)}
                | {"unsteady": max(x.get("spread", 0) for x in (avq, exact)) > UNSTEADY}
            )
    rows.sort(key=itemgetter("run", "title", "size"))
    columns = {
        "network": "title",
        "image": "image",
        "run": "run",
        "exact, ms": three_digits("exact"),
        "AVQ, ms": three_digits("ms"),
        "times as fast": lambda row: f"{row['times_as_fast']:.2f}{' ¹' * row['unsteady']}",
        "limit": figure("limit", ".2f"),
        "columns": figure("columns", ".0f"),
        "layers by AVQ": lambda row: " of ".join(map(str, row.get("layers", "-"))),
        "memory": figure("memory", ".2f"),
    }
    on_several = File(folder / PARALLEL, ["model", "degree", "method"], "attention_ms", "block_ms")
    values = {
        "table": rows_table(columns, rows),
        "several": _several_gpus(on_several),
        "device": file.device,
        "date": file.date,
        "gains": "\n".join(
            f"- {title}, {run}: "
            + ", ".join(f"{row['times_as_fast']:.2f} at {row['image']}" for row in found)
            for (run, title), found in groupby(rows, itemgetter("run", "title"))
        ),
    }
    bars = {
        run: {f"{row['title']}, {row['image']}": row["times_as_fast"] for row in found}
        for run, found in groupby(rows, itemgetter("run"))
    }
    draw = bars_plot("times as fast as exact attention", bars, reference=1)
    return Figures(values, [path, on_several.path], "speed.png", draw)


def _several_gpus(file: File) -> str:
    """Blocks of video transformers by Ulysses, exact by the faster of diffusers' backends."""
    rows = []
    for (model, degree, method), avq in file.rows.items():
        if method == AVQ:
            exact = min(
                (x for key, x in file.rows.items() if key[:2] == (model, degree) and key[2] != AVQ),
                key=itemgetter("block_ms"),
            )
            rows.append(
                avq | {f"exact_{name}": exact[name] for name in ("attention_ms", "block_ms")}
            )
    columns = {
        "network": "model",
        "tokens": lambda row: f"{row['tokens_of_rank'] * row['degree']}",
        "GPUs": lambda row: f"{row['degree']}",
        "exact: attention, ms": three_digits("exact_attention_ms"),
        "AVQ: attention, ms": three_digits("attention_ms"),
        "of it all-to-all, ms": figure("all_to_all_ms", ".2f"),
        "exact: block, ms": three_digits("exact_block_ms"),
        "AVQ: block, ms": three_digits("block_ms"),
        "times as fast": lambda row: f"{row['exact_block_ms'] / row['block_ms']:.2f}",
        "error to one GPU": figure("error_to_one_process", ".0e"),
    }
    return rows_table(columns, rows)


def _memory(row: Row, exact: Row) -> float | None:
    """A step's memory beside the weights, relative to exact attention's; None if not measured."""
    own, base = row.get("peak_mib"), exact.get("peak_mib")
    return own / base if own and base else None


def quality(folder: Path) -> Figures:
    """Images of mini-sd and mini-sd3 against exact attention's."""
    paths = files_of(folder, "quality_*.json")
    found = Rows(paths[0])
    for path in paths:
        document = read_result(path)
        with complete(path):
            model = f"{document['model']}, {document['size']}²"
            measured = {(row["method"], *row_key(row)[1]): row for row in document["rows"]}
            exact = measured[EXACT,]
            for (method, *at_levels), row in measured.items():
                if method in COMPARED:
                    levels = "all" if "sd3" in model else ", ".join(map(str, at_levels))
                    facts = {"model": model, "levels": levels, "attention": label_of(row)}
                    facts["images"] = row["num_runs"] * row["num_images"]
                    less = {column: row[x] - exact[x] for x, column in LESS_EXACT.items()}
                    found[model, levels, method] = less | row | facts
    rows = [found[key] for key in sorted(found, key=lambda x: (x[:2], COMPARED.index(x[2])))]
    columns = {
        "model": "model",
        "levels": "levels",
        "attention": "attention",
        "images": "images",
        "PSNR, dB": figure("psnr_median", ".1f"),
        "nine of ten above": figure("psnr_p10", ".1f"),
        "FID": figure(LESS_EXACT["fid"], "+.2f"),
        "CLIP score": figure(LESS_EXACT["clip_score"], "+.3f"),
        "copies": figure(LESS_EXACT["copy_agreement"], "+.4f"),
    }
    mini = "mini-sd, 256²"
    avq = found[mini, "0, 1", DEFAULT]
    named = {"avq": avq, "tome": found[mini, "0, 1", TOME]}
    named |= {"avq0": found[mini, "0", DEFAULT], "tome0": found[mini, "0", TOME]}
    values = {
        "table": rows_table(columns, rows),
        "fid": columns["FID"](avq),
        "clip": columns["CLIP score"](avq),
        "copies": columns["copies"](avq),
        **{name: f"{row['psnr_median']:.1f} dB" for name, row in named.items()},
    }
    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        names = {"all": "all layers", "0": "level 0"}
        panel = f"{row['model']}, {names.get(row['levels'], 'levels 0 and 1')}"
        more = ", level 2 too" if row["levels"].endswith("2") else ""
        bars.setdefault(panel, {})[row["attention"] + more] = row["psnr_median"]
    draw = bars_plot("PSNR to exact attention's images, dB", bars)
    return Figures(values, paths, "quality_psnr.png", draw)


def tolerance(folder: Path) -> Figures:
    """What tolerances and plans by effect give, against equal plans in all layers and peers."""
    rows, sentences, panels = [], [], []
    paths = files_of(folder, "tolerance_*.json")
    for path in paths:
        file = File(path, ["plan"], "scheme", "errors", "psnr", "ms")
        size = file.document["size"]
        model = ("mini-sd3" if "sd3" in path.stem else "mini-sd") + (f", {size}²" if size else "")
        found = [
            row | {"model": model, "error": median(row["errors"])} for row in file.rows.values()
        ]
        rows += found
        panels += tolerance_panels(found, model)
        plans = [row for row in found if row["plan"].startswith(("at the time", "tolerance"))]
        others = [row for row in found if row not in plans and row["scheme"] != EXACT]
        beaten = [
            any(plan["ms"] <= row["ms"] and last_psnr(plan) > last_psnr(row) for plan in plans)
            for row in others
        ]
        held = [
            f"{mean(error <= SLACK * row['tolerance'] for error in row['errors']):.0%} for "
            f"{row['tolerance']:g}"
            for row in plans
            if row["plan"].startswith("tolerance")
        ]
        sentences.append(
            f"- {model}: plans by effect beat {sum(beaten)} of {len(others)} rows of other methods "
            f"and equal plans: no slower, and a higher PSNR with the most steps. Prompts whose "
            f"error is within {SLACK} times the tolerance: {', '.join(held)}."
        )
    columns: dict[str, Column] = {
        "model": "model",
        "thresholds or method": "plan",
        "columns": figure("columns", ".0f"),
        "step, ms": figure("ms", ".2f"),
        "output error, median": figure("error", ".4f"),
        "largest": lambda row: number(max(row["errors"]), ".4f"),
    }
    for steps in rows[0]["psnr"]:
        columns[f"PSNR, {steps} steps"] = lambda row, steps=steps: number(
            row["psnr"].get(steps, {}).get("psnr_median"), ".1f"
        )
    values = {"table": rows_table(columns, rows), "conclusion": "\n".join(sentences)}
    return Figures(values, paths, "tolerance.png", partial(panel_plot, rows=panels))


def keys(folder: Path) -> Figures:
    """One layer on real keys, compared with Sol-Attn and PISA."""
    path = folder / "keys/keys_vit_cuda_bfloat16.json"
    file = File(path, ["method"], "error", "ms", "columns", "scheme")
    rows, exact = file.rows, file.rows[EXACT]
    ours = [row for row in rows.values() if row["scheme"].startswith("AVQ")]
    peers = [row for row in rows.values() if row["scheme"].startswith(("PISA", "Sol"))]
    rivals = [peer for peer in peers if peer["ms"] < exact["ms"]]
    fastest = min(row["ms"] for row in ours)
    faster = [peer["error"] for peer in rivals if peer["ms"] < fastest]
    ratios = [
        peer["error"] / min(row["error"] for row in ours if row["ms"] <= peer["ms"])
        for peer in rivals
        if peer["ms"] >= fastest
    ]
    columns = {
        "attention": label_of,
        "columns": figure("columns", ".0f"),
        "error": figure("error", ".3f"),
        "ms": figure("ms", ".3f"),
    }
    shown = [*ours, *peers, exact, rows[FLAT], rows[NO_ATTENTION]]
    values = {
        "table": rows_table(columns, sorted(shown, key=itemgetter("error"), reverse=True)),
        "least": f"{min(ratios):.1f}",
        "most": f"{max(ratios):.1f}",
        "images": file.document["num_images"],
        "side": exact["size"],
        "tokens": exact["tokens"],
        "device": file.device,
        "faster": len(faster),
        "faster_error": f"{min(faster, default=1):.2f}",
        "default_columns": columns["columns"](rows[DEFAULT]),
        "default_gain": f"{exact['ms'] / rows[DEFAULT]['ms']:.1f}",
        "coarse_gain": f"{exact['ms'] / rows[COARSE]['ms']:.1f}",
        "coarse_error": columns["error"](rows[COARSE]),
    }
    draw = partial(panel_plot, rows=dial_panels([*rows.values()]))
    return Figures(values, [path], f"keys/{path.stem}_dial.png", draw)


def vision(folder: Path) -> Figures:
    """Vision transformers with AVQ in all layers, without training."""
    features = folder / "vision/vision_features_vit_cuda.json"
    file = File(features, ["method", "size"], "features_off")
    sides = sorted({side for _, side in file.rows})

    def side_column(side: int, name: str, form: str) -> Column:
        return lambda row: number(file.rows[row["method"], side].get(name), form)

    columns: dict[str, Column] = {"attention": label_of}
    columns |= {f"ms, {side}²": side_column(side, "ms", ".2f") for side in sides}
    columns[f"columns, {sides[-1]}²"] = side_column(sides[-1], "columns", ".0f")
    columns |= {
        f"feature error, {side}²": side_column(side, "features_off", ".3f") for side in sides
    }
    first, *_, last = sides
    methods = [EXACT, FINE, DEFAULT, COARSE, PAPER, FLAT, NO_ATTENTION]
    methods = [method for method in methods if (method, first) in file.rows]
    values = {
        "table": rows_table(columns, [{"method": method} for method in methods]),
        "device": file.device,
        "images": file.document["num_images"],
        "first": first,
        "last": last,
        "first_gain": side_column(first, "speedup", ".2f")({"method": DEFAULT}),
        "last_gain": side_column(last, "speedup", ".2f")({"method": DEFAULT}),
        "last_off": side_column(last, "features_off", ".3f")({"method": DEFAULT}),
        "last_off_paper": side_column(last, "features_off", ".3f")({"method": PAPER}),
    }
    panels = []
    for side in sides:
        size_rows = [
            row | {"attention": row["scheme"].replace(OWN_SCHEME, "")}
            for row in file.rows.values()
            if row["size"] == side and row.get("ms") and row["method"] != EXACT
        ]
        curves = lines(size_rows, "attention", "ms", "features_off")
        exact_ms = file.rows[EXACT, side]["ms"]
        title, time = f"error of the features, {side}²", "ms of a forward pass; dashed: exact"
        panels.append(Panel(title, time, curves, **LOGS, reference_x=exact_ms))
    draw = partial(panel_plot, rows=[panels])
    return Figures(values, [features], "vision.png", draw)


def hardware(folder: Path) -> Figures:
    """The attention operation alone, per device."""
    paths = [folder / f"speed/bench_{name}.json" for name in OPERATIONS]
    rows = [row for path in paths for row in calls_of(path)]
    timed = [row | {"gain": row["exact"] / row["avq"]} for row in rows if row["exact"] is not None]
    columns = {
        "device": "device",
        "dtype": "dtype",
        "batch, heads, head dim": lambda x: f"{x['batch']}, {x['heads']}, {x['head_dim']}",
        "codewords": "codewords",
        "tokens": "tokens",
        "exact, ms": three_digits("exact"),
        "AVQ, ms": three_digits("avq"),
        "times as fast": figure("gain", ".1f"),
    }
    sentences = []
    for device, device_rows in groupby(timed, itemgetter("device")):
        rows = list(device_rows)
        most = max(rows, key=itemgetter("gain"))
        gain = f"{most['gain']:.0f} times as fast at {most['tokens']}"
        lost = max((row["tokens"] for row in rows if row["gain"] <= 1), default=0)
        least = min((row["tokens"] for row in rows if row["tokens"] > lost), default=None)
        never = f"no faster in a row of {lost} tokens"
        pays = f"faster from {least} tokens on, {gain}" if least else never
        sentences.append(f"- {device}: AVQ is {pays}.")
    lines = []
    for name, curve_rows in groupby(timed, itemgetter("device", "dtype", "head_dim")):
        x, y = zip(*[(row["tokens"], row["gain"]) for row in curve_rows], strict=True)
        lines.append(Line("{}, {}, head dim {}".format(*name), x, y))
    panel = Panel("times as fast as exact attention", "tokens", lines, **LOGS, reference=1)
    values = {
        "table": rows_table(columns, timed),
        "conclusion": "\n".join(sentences),
        "verified": " and ".join(f"{name} (Triton {triton})" for name, triton in VERIFIED.items()),
    }
    draw = partial(panel_plot, rows=[[panel]])
    return Figures(values, paths, "hardware.png", draw)


def calls_of(path: Path) -> list[Row]:
    """Times of exact attention and AVQ by shape, with own codewords if there are any."""
    shape = ["batch", "heads", "head_dim", "dtype", "tokens"]
    file, found = File(path, [*shape, "method"], "ms"), []
    for *call, method in file.rows:
        if method == "default SDPA":
            own = (*call, "AVQ 64/16/8") in file.rows
            avq = file.rows[(*call, f"AVQ 64/16/8{'' if own else ', stored codewords'}")]
            times = {"exact": file.rows[(*call, method)]["ms"], "avq": avq["ms"]}
            facts = {"device": file.device, "codewords": "own" if own else "stored"}
            found.append(dict(zip(shape, call, strict=True)) | times | facts)
    return found


PAGES: Mapping[str, Callable[[Path], Figures]] = {
    function.__name__: function for function in (speed, quality, tolerance, keys, vision, hardware)
}


def files_of(folder: Path, *patterns: str) -> list[Path]:
    """The matching files in or below the folder, at least one per pattern."""
    found = {pattern: sorted(folder.rglob(pattern)) for pattern in patterns}
    for pattern, paths in found.items():
        if not paths:
            raise FileNotFoundError(f"there is no file {folder / pattern}.")
    return [path for paths in found.values() for path in paths]


def label_of(row: Mapping[str, Any]) -> str:
    """The attention in words."""
    name = row.get("config") or row["method"]
    label = LABELS.get(name) or method_label(name)
    return f"{label}, distilled" if row.get("origin") == "distilled" else label


def three_digits(name: str) -> Column:
    """A column for a field with three digits, never in scientific notation."""
    return lambda row: number(row[name] and float(f"{row[name]:.3g}"), "g")


def bars_plot(
    xlabel: str, panels: Mapping[str, Mapping[str, float]], reference: float | None = None
) -> Callable[[Path], None]:
    """A function that draws a panel of bars per entry."""
    return partial(bar_plot, panels=panels, xlabel=xlabel, reference=reference)
