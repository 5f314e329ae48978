"""The pages of the results, made from their JSON files: `python -m eval pages`.

A page has one table, one plot and one conclusion. Their figures come from the files, so new files
make new pages.
"""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from typing import Any

from avq_diffusers.attention.limits import VERIFIED
from avq_diffusers.files import atomic_write
from eval.names import CUDNN, EXACT, LIMIT, LINFUSION_CONFIG, NO_ATTENTION, TOME, method_label
from eval.quality.method_table import build_table, table_panels
from eval.quality.tolerance import SLACK, UNIFORM
from eval.store.markdown import Column, figure, number, rows_table
from eval.store.plots import Line, Panel, panel_plot
from eval.store.report import complete, read_result

Row = dict[str, Any]
AVQ, EXACT_KEYS, LARGE = "M64P16C8/own", "M64P16C8E256/own", "M128P32C8E256/own"
FLAT = "M192/own"
MINI = "avq_diffusers/mini"
COMPARED = [AVQ, "M64P16C8/own1", f"{MINI}/distilled", EXACT_KEYS, f"{MINI}/distilled-level1"]
COMPARED += [LARGE, FLAT, TOME, "eval/results/distilled/mini_linfusion", NO_ATTENTION]
MODES = {"compile": "compiled", "graph": "CUDA graph", "eager": "eager"}  # the first one is shown
LABELS = {
    EXACT: "exact attention",
    NO_ATTENTION: "control: a token sees itself only",
    LINFUSION_CONFIG: "LinFusion",
}
SIZES = (
    "AVQ 64/16/8 has 64 parent codewords. Each tile of 128 queries refines the 16 parents that "
    "matter most to it into 8 children each. *256 exact keys* adds the 256 keys per tile that gain "
    "most from exact attention. *Own codewords* are averages of the keys of the call itself, the "
    "default."
)


@dataclass(frozen=True)
class Page:
    """A page; `panels` are those of its plot, unless another command draws it."""

    title: str
    terms: Sequence[str]
    table: str
    plot: str
    caption: str
    conclusion: str
    files: Iterable[Path]
    panels: Sequence[Sequence[Panel]] = ()

    def markdown(self, folder: Path) -> str:
        """The text, with links from this folder."""
        places = sorted(path.relative_to(folder).as_posix() for path in {*self.files})
        made_of = ", ".join(f"[{place.removesuffix('.json')}]({place})" for place in places)
        parts = [
            f"# {self.title}",
            *map(_wrapped, self.terms),
            self.table,
            f"![{self.caption}]({self.plot})",
            _wrapped(f"**Conclusion.** {self.conclusion}"),
            _wrapped(
                "More terms: [glossary](../../guides/glossary.md). `python -m eval pages` makes "
                f"this page of files that say how each figure was measured: {made_of}."
            ),
        ]
        return "\n\n".join(parts) + "\n"


def make_pages(folder: Path) -> dict[str, Page]:
    """The pages of a folder of results, by name.

    Raises:
        FileNotFoundError: a result is missing.
        ValueError: a result is incomplete, or lacks a row that a page shows.
    """
    return {name: make(folder) for name, make in PAGES.items()}


def write_pages(folder: Path) -> Iterator[Path]:
    """Write the pages of a folder and their plots into it; for what is raised see `make_pages`."""
    for name, page in make_pages(folder).items():
        panel_plot(folder / page.plot, page.panels)
        path = folder / f"{name}.md"
        with atomic_write(path) as temporary:
            temporary.write_text(page.markdown(folder), encoding="utf-8")
        yield path


class Rows(dict[Any, Row]):
    """Rows by what they are of; one that is missing is an error that names the file."""

    def __init__(self, path: Path, rows: Mapping[Any, Row]) -> None:
        super().__init__(rows)
        self.path = path

    def __missing__(self, key: Any) -> Row:
        raise ValueError(f"{self.path} has no row of {key}; make it again.")


@dataclass(frozen=True)
class File:
    """A result, its rows by a field or several, which have at least some others."""

    rows: Rows
    document: Mapping[str, Any]
    device: str
    date: str


def read_file(path: Path, keys: Sequence[str], *fields: str) -> File:
    """Read a result whose rows have these fields.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a complete result.
    """
    document = read_result(path).document
    with complete(path):
        rows = [row | {name: row[name] for name in fields} for row in document["rows"]]
        made = document["environment"]
        return File(
            Rows(path, {itemgetter(*keys)(row): row for row in rows}),
            document,
            made["device"].removesuffix(" 80GB HBM3"),
            made["date"],
        )


def speed(folder: Path) -> Page:
    """A denoising step of each network and size."""
    steps: dict[tuple[str, int], Row] = {}
    for path in _files(folder, "bench_unet_*_cuda.json", "bench_transformer_*_cuda.json"):
        file = read_file(path, ["method"], "ms", "size", "mode")
        found = file.rows
        if not {AVQ, LIMIT} <= found.keys():
            continue
        with complete(path):
            name = file.document.get("unet") or file.document["model"]
            exact, avq, limit = found.get(EXACT) or found[CUDNN], found[AVQ], found[LIMIT]
            step = {
                "network": name.removesuffix(", random weights"),
                "image": f"{exact['size']}p video" if "Wan" in name else f"{exact['size']}²",
                "exact, ms": exact["ms"],
                "AVQ, ms": avq["ms"],
                "gain": exact["ms"] / avq["ms"],
                "exact keys, ms": found.get(EXACT_KEYS, {}).get("ms"),
                "limit, ms": limit["ms"],
                "run": MODES[exact["mode"]],
                "GPU": file.device,
                "path": path,
                "rank": (-[*MODES].index(exact["mode"]), file.date),
            }
        key = name, exact["size"]
        if key not in steps or steps[key]["rank"] < step["rank"]:
            steps[key] = step
    rows = [steps[key] for key in sorted(steps)]
    if not rows:
        raise ValueError(f"{folder} has no bench of a network with {AVQ}.")
    gains = [
        f"{network}: " + ", ".join(f"{row['gain']:.2f} at {row['image']}" for row in of_network)
        for network, of_network in groupby(rows, itemgetter("network"))
    ]
    over = max(row["AVQ, ms"] / row["limit, ms"] - 1 for row in rows)
    shown = {"AVQ": "AVQ, ms", "with 256 exact keys": "exact keys, ms", "limit": "limit, ms"}
    panel = Panel(
        "times as fast as exact attention",
        "",
        [
            _points(label, [(i, row["exact, ms"] / row[x]) for i, row in enumerate(rows) if row[x]])
            for label, x in shown.items()
        ],
        yscale="log",
        ticks=[f"{row['network']}, {row['image']}" for row in rows],
        reference=1,
    )

    def ms(name: str) -> Column:
        return lambda row: _short(row[name])

    return Page(
        "Speed",
        [
            "Time of one denoising step in half precision, of the real architectures with random "
            f"weights: weights do not change it. Exact attention is PyTorch's, by cuDNN. {SIZES}",
            'AVQ runs in every layer that it serves (`route="always"`). Without this option '
            "`apply_avq` keeps exact attention where that is faster, so that nobody pays for a "
            "number below 1. The *limit* is a step that only projects in place of self-attention: "
            "nothing that replaces self-attention can be faster.",
        ],
        rows_table(
            {
                "network": "network",
                "image": "image",
                "exact, ms": ms("exact, ms"),
                "AVQ, ms": ms("AVQ, ms"),
                "times as fast": figure("gain", ".2f"),
                "AVQ with 256 exact keys, ms": ms("exact keys, ms"),
                "limit, ms": ms("limit, ms"),
                "run": "run",
                "GPU": "GPU",
            },
            rows,
        ),
        "speed.png",
        "Times as fast as exact attention, for every network and size",
        f"The larger the image, the larger the gain. Times as fast: {'; '.join(gains)}. A step "
        f"with AVQ takes at most {over:.0%} longer than the limit.",
        [row["path"] for row in rows],
        [[panel]],
    )


def quality(folder: Path) -> Page:
    """Images of mini-sd and mini-sd3 against exact attention's."""
    timed = folder / "updates/bench_unet_1024_graph_cuda.json"
    groups = [
        [folder / "quality_peers_levels0.json", folder / "quality_peers_levels01.json"],
        [folder / "quality_own_levels01.json"],
        [max(_files(folder, "scenes_mini_sd3*.json"), key=lambda x: read_file(x, ["method"]).date)],
    ]
    tables = [build_table([*map(read_result, [*group, timed])]) for group in groups]
    found = Rows(groups[0][0], {})
    for table, group in zip(tables, groups, strict=True):
        ((size, protocol),) = table["quality"].items()
        with complete(group[0]):
            images = {row["method"]: row["quality"].get(size, {}) for row in table["rows"]}
            exact = images[EXACT]
            for row in table["rows"]:
                metrics, levels = row["quality"].get(size, {}), ", ".join(map(str, row["levels"]))
                if row["method"] not in COMPARED or metrics.get("psnr_median") is None:
                    continue
                model = f"{protocol['model']}, {size}"
                key = model, "all" if "sd3" in model else levels, row["method"]
                ms = None if "sd3" in model else next(iter(row["ms"].values()), None)
                less = {
                    f"{name}_less_exact": metrics[name] - exact[name]
                    for name in ("fid", "clip_score", "copy_agreement")
                }
                facts = {"model": model, "levels": key[1], "attention": _label(row), "ms": ms}
                found.setdefault(key, facts | less | metrics)
    rows = [found[key] for key in sorted(found, key=lambda x: (x[:2], COMPARED.index(x[2])))]
    mini = "mini-sd, 256²"
    default, tome = found[mini, "0", AVQ], found[mini, "0", TOME]
    keys, tome01 = found[mini, "0, 1", EXACT_KEYS], found[mini, "0, 1", TOME]

    def db(row: Row) -> str:
        return f"{row['psnr_median']:.1f} dB"

    columns = {
        "model": "model",
        "levels": "levels",
        "attention": "attention",
        "PSNR, dB": figure("psnr_median", ".1f"),
        "of the worst tenth": figure("psnr_p10", ".1f"),
        "FID": figure("fid_less_exact", "+.2f"),
        "CLIP score": figure("clip_score_less_exact", "+.3f"),
        "copies": figure("copy_agreement_less_exact", "+.4f"),
        "step of SD1.5 at 1024², ms": figure("ms", ".1f"),
    }
    return Page(
        "Quality",
        [
            "Images of the packaged models [mini-sd and mini-sd3](../../avq_diffusers/mini/"
            "README.md) with exact attention and with a replacement, from the same prompts and the "
            "same noise. Nothing is trained, but for rows that say *distilled*. *Levels* are those "
            "of the UNet that change; 0 is its highest resolution and the default.",
            "*PSNR* compares each image with exact attention's: the median over images, and the "
            "tenth percentile. Above 40 dB a difference is hard to see; at 30 dB details differ. "
            "*FID*, *CLIP score* and *copies* are differences to exact attention. FID is the "
            "distance to real images (lower is better), the CLIP score the agreement with the "
            "prompt, *copies* the correlation of objects that should be equal (higher is better). "
            "± is one standard error over three seeds.",
            SIZES,
        ],
        rows_table(columns, rows),
        "quality_time.png",
        "FID, CLIP score and PSNR over the time of a step",
        f"On mini-sd the default reaches {db(default)} in {default['ms']:.1f} ms a step; ToMe, "
        f"which merges half of the tokens, {db(tome)} in {tome['ms']:.1f} ms. With level 1 too, "
        f"256 exact keys reach {db(keys)} in {keys['ms']:.1f} ms and ToMe {db(tome01)}. FID, CLIP "
        f"score and copies of the default differ from exact attention's by "
        f"{default['fid_less_exact']:+.2f} ± {default['fid_less_exact_sem']:.2f}, "
        f"{default['clip_score_less_exact']:+.3f} ± {default['clip_score_less_exact_sem']:.3f} and "
        f"{default['copy_agreement_less_exact']:+.4f} ± "
        f"{default['copy_agreement_less_exact_sem']:.4f}.",
        [*groups[0], *groups[1], *groups[2], timed],
        table_panels(tables[0]),
    )


def tolerance(folder: Path) -> Page:
    """What a tolerance and sizes by effect give, beside equal sizes in all layers."""
    files = [
        read_file(path, ["plan"], "times_as_fast", "errors", "psnr_median")
        for path in _files(folder, "tolerance_*.json")
    ]
    rows, sentences, panels = [], [], []
    for file in files:
        path = file.rows.path
        size = f", {file.document.get('size')}²" if file.document.get("size") else ""
        model = ("mini-sd3" if "sd3" in path.stem else "mini-sd") + size
        rows += [{"model": model, **row} for row in file.rows.values()]
        pairs = [(file.rows[x], file.rows[f"at the time of {x}"]) for x in UNIFORM]
        times = [median(one["errors"]) / median(other["errors"]) for one, other in pairs]
        within = [row for row in file.rows.values() if row["tolerance"] is not None]
        held = [f"{row['tolerance']:g}: {_held(row):.0%}" for row in within]
        sentences.append(
            f"{model}: sizes by effect divide the error of equal sizes by {min(times):.1f} to "
            f"{max(times):.1f} in the same time. Prompts within {SLACK} times a tolerance of "
            f"{', '.join(held)}."
        )
        kinds = {"equal sizes": [one for one, _ in pairs], "by effect": [two for _, two in pairs]}
        kinds["a tolerance"] = within
        lines = [
            _points(kind, [(median(row["errors"]), row["times_as_fast"]) for row in of_kind])
            for kind, of_kind in kinds.items()
        ]
        panels.append(Panel(f"attention, times as fast, {model}", "error of the output", lines))
    return Page(
        "Tolerance",
        [
            "`apply_avq(pipe, tolerance=0.02, prompt=...)` keeps the model's output (the noise or "
            "velocity that it predicts) within 2% of exact attention's, in the least time. It "
            "measures how much each layer's error changes the output, and gives large sizes, or "
            "exact attention, to the layers that matter.",
            "*Output error* is |output - exact output| / |exact output|, over six denoising steps "
            "of prompts that were not measured. *PSNR* is the median of the final images against "
            "exact attention's from the same noise. *At the time of* a row means sizes by effect "
            f"that take as long. {SIZES}",
        ],
        rows_table(
            {
                "model": "model",
                "sizes": "plan",
                "attention, times as fast": figure("times_as_fast", ".2f"),
                "output error, median": lambda row: number(median(row["errors"]), ".4f"),
                "largest": lambda row: number(max(row["errors"]), ".4f"),
                "PSNR, dB": figure("psnr_median", ".1f"),
            },
            rows,
        ),
        "tolerance.png",
        "Speed of the attention over the error of the output",
        " ".join(sentences),
        [file.rows.path for file in files],
        [panels],
    )


def keys(folder: Path) -> Page:
    """One layer on real keys: AVQ beside Sol-Attn and PISA."""
    file = read_file(folder / "keys_vit_cuda_bfloat16.json", ["method"], "error", "ms", "columns")
    rows, exact = file.rows, file.rows[EXACT]
    ours = [row for name, row in rows.items() if name.startswith("M") and name != FLAT]
    peers = [row for row in rows.values() if row["scheme"].startswith(("PISA", "Sol"))]
    ratios = [
        peer["error"] / min(row["error"] for row in ours if row["ms"] <= peer["ms"])
        for peer in peers
        if peer["ms"] < exact["ms"]
    ]
    default, large = rows[AVQ], rows[LARGE]
    return Page(
        "Real keys",
        [
            "How far the output of one attention layer is from exact attention, and its time. "
            "Queries, keys and values are those of all 12 layers of a pretrained vision "
            f"transformer on {file.document['num_images']} photographs of {exact['size']}² pixels "
            f"({exact['tokens']} tokens, heads of 64, bfloat16, {file.device}). *Error* is "
            "|output - exact output| / |exact output|. *Columns* are the codewords and keys that "
            "a query meets.",
            "Sol-Attn and PISA are training-free sparse attentions: they compute blocks of keys "
            "that matter exactly, and approximate the others by their mean (PISA: of first order "
            "unless *zeroth* is said; Sol-Attn: with columns as its threshold finds them). They "
            "ran by their authors' kernels.",
            SIZES,
        ],
        rows_table(
            {
                "attention": _label,
                "columns": "columns",
                "error": figure("error", ".3f"),
                "ms": figure("ms", ".3f"),
            },
            sorted(
                (row for row in rows.values() if not row["method"].startswith("pooled")),
                key=itemgetter("error"),
                reverse=True,
            ),
        ),
        "keys_vit_cuda_bfloat16_dial.png",
        "Error of a layer over its time; dashed is the time of exact attention",
        f"The default is {exact['ms'] / default['ms']:.1f} times as fast as exact attention, with "
        f"an error of {default['error']:.3f}; 128/32/8 with 256 exact keys is "
        f"{exact['ms'] / large['ms']:.1f} times as fast, with an error of {large['error']:.3f}. In "
        f"no more time, the error of AVQ is {min(ratios):.1f} to {max(ratios):.1f} times smaller "
        "than that of Sol-Attn and PISA, whatever their setting.",
        [rows.path],
    )


def vision(folder: Path) -> Page:
    """Vision transformers with AVQ in all layers, nothing trained with it."""
    features = read_file(
        folder / "vision_features_vit_cuda.json", ["method", "size"], "features_off"
    )
    tasks = {
        title: read_file(folder / f"{name}.json", ["name"], "untrained").rows
        for title, name in {
            "mean IoU, %": "vision_seg_exact_keys",
            "top-1, %": "vision_cls_exact_keys",
        }.items()
    }
    sides = sorted({side for _, side in features.rows})

    def of_size(side: int, name: str, form: str) -> Callable[[Row], str]:
        return lambda row: number(features.rows[row["method"], side].get(name), form)

    columns: dict[str, Any] = {"attention": _label}
    columns |= {f"ms, {side}²": of_size(side, "ms", ".2f") for side in sides}
    columns |= {f"features off, {side}²": of_size(side, "features_off", ".3f") for side in sides}
    columns |= {
        title: lambda row, of_task=of_task: number(
            of_task.get(row["method"], {}).get("untrained"), ".1f"
        )
        for title, of_task in tasks.items()
    }
    methods = [EXACT, FLAT, AVQ, EXACT_KEYS, LARGE, NO_ATTENTION]
    rows, last = features.rows, sides[-1]

    def gain(method: str, side: int) -> str:
        return f"{rows[method, side]['speedup']:.2f}"

    losses = [
        f"{of_task[EXACT]['untrained'] - of_task[name]['untrained']:.1f}"
        for name in (AVQ, EXACT_KEYS)
        for of_task in tasks.values()
    ]
    return Page(
        "Vision transformers",
        [
            "A pretrained vision transformer with AVQ in all 12 layers and nothing trained with "
            f"it: time of a forward pass ({features.device}, half precision) and how far the "
            f"final features of {features.document['num_images']} photographs are from exact "
            "attention's, |features - exact| / |exact|.",
            "Mean IoU (segmentation) and top-1 accuracy (classification) are of models that were "
            "trained with exact attention, at 518 pixels, on shapes over photographs. AVQ was put "
            "in afterwards.",
            f"{SIZES} *Flat VQ* has no children: the same codewords for every query.",
        ],
        rows_table(columns, [{"method": method} for method in methods]),
        "vision_features_vit_cuda.png",
        "Features and the map of salient pixels, off exact attention's, over time",
        f"The default is {gain(AVQ, sides[0])} times as fast as exact attention at {sides[0]}² and "
        f"{gain(AVQ, last)} times at {last}². It costs {losses[0]} points of mean IoU and "
        f"{losses[1]} of top-1; with 256 exact keys {losses[2]} and {losses[3]}, and the speed at "
        f"{last}² is {gain(EXACT_KEYS, last)} times that of exact attention.",
        [features.rows.path, *(of_task.path for of_task in tasks.values())],
    )


def hardware(folder: Path) -> Page:
    """The bare operation on each device."""
    rows = []
    cpu = read_file(folder / "bench_attention_cpu.json", ["num_tokens"], "exact_ms", "avq_ms")
    with complete(cpu.rows.path):
        shape = cpu.document["shape"]
        for tokens, row in cpu.rows.items():
            call = {**shape, "tokens": tokens, "device": cpu.device}
            rows.append(call | {"exact": row["exact_ms"], "avq": row["avq_ms"]})
    kernels = [folder / f"bench_kernels_{part}_cuda.json" for part in ("sd15", "joint")]
    for path in kernels:
        shape = ["batch", "heads", "tokens", "head_dim", "dtype"]
        file = read_file(path, [*shape, "method"], "ms")
        for *call, method in file.rows:
            if method == "default SDPA":
                names = [f"AVQ 64/16/8{own}" for own in ("", ", own codewords")]
                avq = next(file.rows[*call, name] for name in names if (*call, name) in file.rows)
                facts = dict(zip(shape, call, strict=True)) | {"device": file.device}
                exact = file.rows[*call, method]["ms"]
                rows.append(facts | {"exact": exact, "avq": avq["ms"]})
    timed = [row for row in rows if row["exact"] is not None]
    pays = []
    for device in dict.fromkeys(row["device"] for row in timed):
        faster = [x for x in timed if x["device"] == device and x["avq"] < x["exact"]]
        gains = [row["exact"] / row["avq"] for row in faster]
        pays.append(
            f"on {device} AVQ is {min(gains):.1f} times as fast as exact attention or more from "
            f"{min(row['tokens'] for row in faster)} tokens on, and up to {max(gains):.0f} times"
        )
    shapes = {}
    for row in timed:
        shape = f"{row['device']}, {row['dtype']}, head dim {row['head_dim']}"
        shapes.setdefault(shape, []).append(row)
    panel = Panel(
        "times as fast as exact attention",
        "tokens",
        [
            Line(shape, [x["tokens"] for x in of_shape], [x["exact"] / x["avq"] for x in of_shape])
            for shape, of_shape in shapes.items()
        ],
        xscale="log",
        yscale="log",
        reference=1,
    )
    verified = " and ".join(f"{name} (Triton {version})" for name, version in VERIFIED.items())
    return Page(
        "Hardware",
        [
            "The operation alone, forward pass: exact attention by PyTorch's "
            "`scaled_dot_product_attention`, and AVQ with everything it computes from the keys. "
            "*Tokens* are the positions that attend to each other: a layer of SD1.5 at 1024² has "
            f"16384. {SIZES}",
            f"Triton kernels need an NVIDIA GPU of compute capability 8.0 or higher (from the A100 "
            f"and RTX 30 on). They are verified on {verified}; on other GPUs each kernel is "
            "compared with PyTorch once, before its first use. Everything else, CPUs included, "
            "runs the PyTorch path, whose cost is linear in the tokens too. "
            "`variants.md` lists what the kernels compile to for cards that nobody timed, and "
            "`avq info` prints what runs on yours.",
        ],
        rows_table(
            {
                "device": "device",
                "dtype": "dtype",
                "batch, heads, head dim": lambda x: f"{x['batch']}, {x['heads']}, {x['head_dim']}",
                "tokens": "tokens",
                "exact, ms": lambda row: _short(row["exact"]),
                "AVQ, ms": lambda row: _short(row["avq"]),
                "times as fast": lambda row: number(
                    row["exact"] and row["exact"] / row["avq"], ".1f"
                ),
            },
            rows,
        ),
        "hardware.png",
        "Times as fast as exact attention over the number of tokens",
        f"The gain grows with the number of tokens: {'; '.join(pays)}.",
        [cpu.rows.path, *kernels],
        [[panel]],
    )


PAGES: Mapping[str, Callable[[Path], Page]] = {
    "speed": speed,
    "quality": quality,
    "tolerance": tolerance,
    "keys": keys,
    "vision": vision,
    "hardware": hardware,
}


def _files(folder: Path, *patterns: str) -> list[Path]:
    """The files in the folder or below it, at least one of each pattern."""
    found = []
    for pattern in patterns:
        if not (of_pattern := sorted(folder.rglob(pattern))):
            raise FileNotFoundError(f"there is no file {folder / pattern}.")
        found += of_pattern
    return found


def _label(row: Row) -> str:
    """The method in words."""
    name = row.get("config") or row["method"]
    label = LABELS.get(name) or method_label(name)
    return f"{label}, distilled" if row.get("origin") == "distilled" else label


def _points(label: str, points: Sequence[tuple[float, float]]) -> Line:
    x, y = zip(*points, strict=True)
    return Line(label, x, y, [0] * len(x))


def _held(row: Row) -> float:
    return mean(error <= SLACK * row["tolerance"] for error in row["errors"])


def _short(value: float | None) -> str:
    """Three digits."""
    return number(value and float(f"{value:.3g}"), "g")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
