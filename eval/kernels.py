"""Speed of the operation against exact and unfused attention: `python -m eval bench kernels`.

Three parts: the paper's table (B4 H12 D64), SD1.5's shapes with keys spread evenly and with 30 % of
them equal to one, and how time grows with the codebook and with N. The rows of one size are timed
in turns in one process, each over as many input sets as it takes to overflow the L2 cache, as
replays of a CUDA graph where there is one; SD1.5's shapes also over one set, which is in the cache
like the tokens that projections have just written. A row whose output is wrong gets no time.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from avq_diffusers import AVQConfig, Codebook, avq_attention, fit_codebook, query_order
from eval.plots import Line, log_log_plot
from eval.report import save_json

Row = dict[str, Any]

PARTS = ("table", "sd15", "scaling")
DEFAULT_SDPA = "default SDPA"
FUSED_SDPA = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
AGGREGATIONS = ("one-hot", "scatter")
# Far above what fp16 and a near-tie between parents cost, far below what another method gives.
TOLERANCE = 0.05
CHECKED_QUERIES = 64
CALIBRATION_KEYS = 16384
HOT_SHARE = 0.3


@dataclass(frozen=True)
class Shape:
    """One size of the operation."""

    batch: int
    num_heads: int
    num_tokens: int
    head_dim: int

    def __str__(self) -> str:
        return f"B{self.batch} H{self.num_heads} N{self.num_tokens} D{self.head_dim}"


@dataclass(frozen=True)
class Effort:
    """Rounds of one block per method; a block repeats the method for about `block_ms`."""

    rounds: int = 9
    block_ms: float = 20.0
    eager_rounds: int = 3


@dataclass(frozen=True)
class Suite:
    """The sizes that a run times."""

    table_shapes: tuple[Shape, ...]
    table_configs: tuple[str, ...]
    sd15_shapes: tuple[Shape, ...]
    sd15_config: str
    codebook_shapes: tuple[Shape, ...]
    codebook_configs: tuple[str, ...]
    token_shapes: tuple[Shape, ...]
    token_configs: tuple[str, ...]
    effort: Effort = field(default_factory=Effort)


def _paper_shapes(*tokens: int) -> tuple[Shape, ...]:
    return tuple(Shape(4, 12, num_tokens, 64) for num_tokens in tokens)


PAPER_CONFIGS = ("M256", "M512", "M64P8C8", "M64P16C8", "M128P8C8", "M128P16C8")
FLAT_SIZES = ("M64", "M128", "M256", "M512")
ADAPTIVE_SIZES = ("M32P8C8", "M64P8C8", "M64P16C8", "M128P16C8", "M128P32C8")

FULL = Suite(
    table_shapes=_paper_shapes(1024, 4096, 16384, 65536),
    table_configs=PAPER_CONFIGS,
    sd15_shapes=(
        *(Shape(2, 8, num_tokens, 40) for num_tokens in (4096, 16384, 65536)),
        *(Shape(2, 8, num_tokens, 80) for num_tokens in (4096, 16384)),
    ),
    sd15_config="M64P16C8",
    codebook_shapes=_paper_shapes(4096, 16384, 65536),
    codebook_configs=FLAT_SIZES + ADAPTIVE_SIZES,
    token_shapes=_paper_shapes(*(2**power for power in range(12, 19))),
    token_configs=("M64P16C8", "M256"),
)
QUICK = Suite(
    table_shapes=_paper_shapes(1024, 4096, 16384),
    table_configs=PAPER_CONFIGS,
    sd15_shapes=(Shape(2, 8, 4096, 40), Shape(2, 8, 16384, 40), Shape(2, 8, 4096, 80)),
    sd15_config="M64P16C8",
    codebook_shapes=_paper_shapes(16384),
    codebook_configs=("M64", "M256", "M64P8C8", "M128P16C8"),
    token_shapes=_paper_shapes(4096, 16384, 65536),
    token_configs=("M64P16C8", "M256"),
    effort=Effort(rounds=3, block_ms=5.0, eager_rounds=1),
)
TINY = Suite(
    table_shapes=(Shape(1, 2, 256, 16), Shape(1, 2, 1024, 16)),
    table_configs=("M16", "M8P2C4"),
    sd15_shapes=(Shape(1, 2, 256, 40),),
    sd15_config="M8P2C4",
    codebook_shapes=(Shape(1, 2, 1024, 16),),
    codebook_configs=("M8", "M64", "M8P2C4", "M16P8C4"),
    token_shapes=(Shape(1, 2, 512, 16), Shape(1, 2, 2048, 16)),
    token_configs=("M8P2C4",),
    effort=Effort(rounds=2, block_ms=1.0, eager_rounds=2),
)


@dataclass(frozen=True)
class Method:
    """What one row times; `expected` is computed once for the first input set.

    Attributes:
        name: of the row.
        run: attend on input set i, and return the output (B, H, N, D) or the stage's results.
        expected: the right output, possibly of the first queries only; None for a stage, which its
            whole method vouches for.
        time_field: of the row that gets the time.
        facts: further fields of the row.
    """

    name: str
    run: Callable[[int], Any]
    expected: Callable[[], Tensor] | None = None
    time_field: str = "ms"
    facts: Mapping[str, Any] = field(default_factory=dict)


class KeySource:
    """Queries, keys and values of one head shape, and codebooks fitted to these keys.

    Keys come from 64 clusters of 16 clusters each and Gaussian noise, so that two-level codebooks
    fit and every codeword is in use.
    """

    def __init__(self, num_heads: int, head_dim: int, device: torch.device, seed: int = 0) -> None:
        self.num_heads, self.head_dim, self.device = num_heads, head_dim, device
        self.generator = torch.Generator(device).manual_seed(seed)
        centres = self._normal(num_heads, 64, 1, head_dim)
        self.centres = (centres + 0.6 * self._normal(num_heads, 64, 16, head_dim)).flatten(1, 2)
        self._codebooks: dict[tuple[int, int], Codebook] = {}

    def inputs(
        self, shape: Shape, dtype: torch.dtype, hot_share: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value (B, H, N, D), views of (B, N, H, D) memory as projections write it.

        `hot_share` of the keys, at random places, are all equal to one key of their head.
        """
        size = (shape.batch, shape.num_tokens, self.num_heads)
        cluster = torch.randint(
            self.centres.shape[1], size, generator=self.generator, device=self.device
        )
        heads = torch.arange(self.num_heads, device=self.device)
        key = self.centres.to(dtype)[heads, cluster]
        key += 0.3 * self._normal(*size, self.head_dim, dtype=dtype)
        if hot_share:
            hot = torch.rand(size, generator=self.generator, device=self.device) < hot_share
            key = torch.where(hot[..., None], key[:1, :1], key)
        query, value = (self._normal(*size, self.head_dim, dtype=dtype) for _ in range(2))
        return tuple(tensor.transpose(1, 2) for tensor in (1.5 * query, key, value))

    def codebook(self, config: AVQConfig) -> Codebook:
        """The codebook of these sizes; k-means runs once for each."""
        sizes = config.num_parents, config.num_children
        if sizes not in self._codebooks:
            sample = Shape(1, self.num_heads, CALIBRATION_KEYS, self.head_dim)
            key = self.inputs(sample, torch.float32)[1]
            self._codebooks[sizes] = fit_codebook(key[0], *sizes, num_iterations=10)
        return self._codebooks[sizes]

    def _normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=dtype)


class Bench:
    """Builds and times the methods of one size after the other on one device."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype | None = None,
        effort: Effort | None = None,
    ) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.dtype = dtype or (torch.float16 if self.cuda else torch.float32)
        self.backend = "triton" if self.cuda else "torch"
        self.effort = effort or Effort()
        self._sources: dict[tuple[int, int], KeySource] = {}

    def source(self, shape: Shape) -> KeySource:
        sizes = shape.num_heads, shape.head_dim
        if sizes not in self._sources:
            self._sources[sizes] = KeySource(*sizes, self.device)
        return self._sources[sizes]

    def input_sets(self, shape: Shape, hot_share: float = 0.0) -> list[tuple[Tensor, ...]]:
        """As many input sets as overflow the L2 cache three times over, at most 32."""
        count = 2
        if self.cuda:
            elements = shape.batch * shape.num_heads * shape.num_tokens * shape.head_dim
            bytes_moved = 4 * elements * self.dtype.itemsize
            cache = torch.cuda.get_device_properties(self.device).L2_cache_size
            count = min(32, math.ceil(3 * cache / bytes_moved))
        source = self.source(shape)
        return [source.inputs(shape, self.dtype, hot_share) for _ in range(count)]

    def exact_methods(self, sets: Sequence[tuple[Tensor, ...]]) -> list[Method]:
        """Default SDPA, FlashAttention-2 and cuDNN."""

        def expected() -> Tensor:
            query, key, value = (tensor.float() for tensor in sets[0])
            logits = query[:, :, :CHECKED_QUERIES] @ key.transpose(2, 3)
            return (logits * query.shape[-1] ** -0.5).softmax(-1) @ value

        def fused(backend: SDPBackend, index: int) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*sets[index])

        def default(index: int) -> Tensor:
            return F.scaled_dot_product_attention(*sets[index])

        return [
            Method(DEFAULT_SDPA, default, expected),
            *(
                Method(name, partial(fused, backend) if self.cuda else _needs_cuda(name), expected)
                for name, backend in FUSED_SDPA.items()
            ),
        ]

    def avq_methods(
        self,
        shape: Shape,
        sets: Sequence[tuple[Tensor, ...]],
        config: AVQConfig,
        *,
        unfused: bool = False,
        order: Tensor | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> list[Method]:
        """The operation, its two stages where it has kernels, and the paper's unfused baseline."""
        codebook = self.source(shape).codebook(config)
        options = {
            "num_refined": config.num_refined,
            "query_tile": config.query_tile,
            "query_order": order,
        }
        expectations: list[Tensor] = []

        def expected() -> Tensor:
            if not expectations:
                oracle = "torch" if self.backend == "triton" else "reference"
                inputs = (tensor.float() for tensor in sets[0])
                expectations.append(avq_attention(*inputs, codebook, **options, backend=oracle))
            return expectations[0]

        def run(index: int) -> Tensor:
            return avq_attention(*sets[index], codebook, **options, backend=self.backend)

        name = method_name(config)
        facts = {"config": str(config), "effective_codewords": _effective(config), **(facts or {})}
        methods = [Method(name, run, expected, facts=facts)]
        if self.cuda:
            methods += _stage_methods(name, sets, config, codebook, order)
        if unfused:
            methods += self._unfused_methods(sets, config, codebook, expected)
        return methods

    def _unfused_methods(
        self,
        sets: Sequence[tuple[Tensor, ...]],
        config: AVQConfig,
        codebook: Codebook,
        expected: Callable[[], Tensor],
    ) -> list[Method]:
        """Compiled PyTorch for the precompute, our kernel for the attention (paper, Tab. speed)."""
        attend = _flat_attention(config, codebook, self.dtype, kernels=self.cuda)
        codewords = codebook.parents.to(self.dtype)
        bias = -0.5 * codewords.float().square().sum(-1)[:, None]
        methods = []
        precompute = unfused_precompute
        if self.cuda:
            precompute = torch.compile(precompute, dynamic=False)
        for aggregation in AGGREGATIONS:

            def run(index: int, one_hot: bool = aggregation == "one-hot") -> Tensor:
                query, key, value = sets[index]
                return attend(query, *precompute(key, value, codewords, bias, one_hot=one_hot))

            facts = {"effective_codewords": _effective(config)}
            if not self.cuda:
                facts["note"] = "precompute not compiled; attention by SDPA"
            name = f"unfused {method_name(config)} ({aggregation})"
            methods.append(Method(name, run, expected, facts=facts))
        return methods

    @torch.no_grad()
    def rows(self, shape: Shape, methods: Sequence[Method], num_sets: int) -> list[Row]:
        """Check every method's output, then time all of them in turns."""
        rows: dict[str, Row] = {}
        runs: dict[tuple[str, str], Callable[[int], Any]] = {}
        for method in methods:
            row = rows.setdefault(
                method.name,
                {
                    "method": method.name,
                    "batch": shape.batch,
                    "heads": shape.num_heads,
                    "tokens": shape.num_tokens,
                    "head_dim": shape.head_dim,
                    "dtype": str(self.dtype).removeprefix("torch."),
                    "input_sets": num_sets,
                    "ms": None,
                    **method.facts,
                },
            )
            if method.expected is None and not row.get("error", math.inf) <= TOLERANCE:
                continue
            try:
                output = method.run(0)
                if method.expected is not None:
                    row["error"] = _error(output, method.expected())
                    if not row["error"] <= TOLERANCE:
                        row["note"] = f"wrong output: relative error {row['error']:.3g}"
                        continue
            except (RuntimeError, ValueError) as error:
                row["note"] = str(error).splitlines()[0]
                continue
            runs[method.name, method.time_field] = method.run
        for (name, row_field), timing in time_in_turns(
            runs, num_sets, self.device, self.effort
        ).items():
            rows[name][row_field] = timing.pop("ms")
            if row_field == "ms":
                note = timing.pop("note", None)
                rows[name].update(timing, **({"note": note} if note else {}))
        return list(rows.values())


def time_in_turns(
    runs: Mapping[Any, Callable[[int], Any]], num_sets: int, device: torch.device, effort: Effort
) -> dict[Any, Row]:
    """Median time of each run over all input sets, in ms per set, the runs in turns.

    Returns:
        for each run `ms` (CUDA graph if it can be captured, else eager), `timer`, `eager_ms` and
        `spread`, the range of its blocks over their median.
    """

    def all_sets(run: Callable[[int], Any]) -> None:
        for index in range(num_sets):
            run(index)

    replays: dict[tuple[Any, str], Callable[[], Any]] = {}
    notes: dict[Any, str] = {}
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for name, run in runs.items():
        replays[name, "eager"] = partial(all_sets, run)
        if pool is None:
            continue
        all_sets(run)
        graph = torch.cuda.CUDAGraph()
        try:
            # Results are dropped at once, so all graphs may share one pool.
            with torch.cuda.graph(graph, pool=pool):
                all_sets(run)
        except RuntimeError as error:
            notes[name] = f"no CUDA graph: {str(error).splitlines()[0]}"
            continue
        replays[name, "graph"] = graph.replay

    repeats = {}
    for key, replay in replays.items():
        _block_ms(replay, 1, device)
        estimate = _block_ms(replay, 1, device)
        repeats[key] = max(1, min(200, round(effort.block_ms / max(estimate, 1e-3))))
    samples: dict[tuple[Any, str], list[float]] = {key: [] for key in replays}
    for turn in range(effort.rounds):
        for key in list(replays)[:: 1 if turn % 2 == 0 else -1]:
            has_graph = (key[0], "graph") in replays
            if key[1] == "eager" and has_graph and turn >= effort.eager_rounds:
                continue
            samples[key].append(_block_ms(replays[key], repeats[key], device) / num_sets)

    timings = {}
    for name in runs:
        timer = "graph" if (name, "graph") in replays else "eager"
        values = samples[name, timer]
        timings[name] = {
            "ms": median(values),
            "timer": timer,
            "eager_ms": median(samples[name, "eager"]),
            "spread": (max(values) - min(values)) / median(values),
        }
        if name in notes:
            timings[name]["note"] = notes[name]
    return timings


def unfused_precompute(
    key: Tensor, value: Tensor, codewords: Tensor, bias: Tensor, *, one_hot: bool
) -> tuple[Tensor, Tensor]:
    """Flat VQ in plain PyTorch: nearest codeword of every key, then its values' mean and count.

    Args:
        key, value: (B, H, N, D).
        codewords: (H, M, D) of the same dtype.
        bias: (H, 1, M) fp32, minus half the codewords' square norms.
        one_hot: aggregate by a product with one-hot assignments, else by scattered additions.

    Returns:
        means: (B, H, M, D), dtype of `value`, zero for codewords without keys.
        counts: (B, H, M) fp32.
    """
    num_codewords, head_dim = codewords.shape[1:]
    logits = (key @ codewords.transpose(1, 2)).float() + bias
    assignment = logits.argmax(-1)
    if one_hot:
        hot = assignment[..., None] == torch.arange(num_codewords, device=key.device)
        counts = hot.sum(2, dtype=torch.float32)
        sums = (hot.to(value.dtype).transpose(2, 3) @ value).float()
    else:
        counts = logits.new_zeros(*assignment.shape[:2], num_codewords)
        counts = counts.scatter_add(2, assignment, torch.ones_like(assignment, dtype=counts.dtype))
        sums = counts.new_zeros(*counts.shape, head_dim)
        sums = sums.scatter_add(2, assignment[..., None].expand_as(value), value.float())
    return (sums / counts.clamp(min=1)[..., None]).to(value.dtype), counts


def table_part(bench: Bench, suite: Suite) -> Iterator[list[Row]]:
    """The paper's Tab. speed_scaling, one list of rows for each N."""
    for shape in suite.table_shapes:
        torch.compiler.reset()  # the unfused baseline is compiled for every size
        sets = bench.input_sets(shape)
        methods = bench.exact_methods(sets)
        for text in suite.table_configs:
            config = AVQConfig.parse(text)
            methods += bench.avq_methods(shape, sets, config, unfused=not config.num_children)
        yield [{"part": "table", **row} for row in bench.rows(shape, methods, len(sets))]


def sd15_part(bench: Bench, suite: Suite) -> Iterator[list[Row]]:
    """SD1.5's self-attention in Gilbert order, keys spread evenly and skewed."""
    config = AVQConfig.parse(suite.sd15_config)
    for shape in suite.sd15_shapes:
        side = math.isqrt(shape.num_tokens)
        order = query_order(side, side, config.query_order, bench.device)
        sets = bench.input_sets(shape)
        skewed = bench.input_sets(shape, HOT_SHARE)
        skewed_methods = [
            Method(f"{m.name}, skewed keys", m.run, m.expected, m.time_field, m.facts)
            for m in bench.avq_methods(shape, skewed, config, order=order, facts={"keys": "skewed"})
        ]
        methods = [
            *bench.exact_methods(sets),
            *bench.avq_methods(shape, sets, config, order=order, facts={"keys": "uniform"}),
            *skewed_methods,
        ]
        rows = bench.rows(shape, methods, len(sets))
        wholes = [method for method in methods if method.time_field == "ms"]
        cached = bench.rows(shape, wholes, 1)
        yield [
            {"part": "sd15", **row, "cached_ms": one["ms"]}
            for row, one in zip(rows, cached, strict=True)
        ]


def scaling_part(bench: Bench, suite: Suite) -> Iterator[list[Row]]:
    """Time against the effective codebook size, then against N."""
    for against, shapes, configs in (
        ("codewords", suite.codebook_shapes, suite.codebook_configs),
        ("tokens", suite.token_shapes, suite.token_configs),
    ):
        for shape in shapes:
            sets = bench.input_sets(shape)
            methods = []
            for text in configs:
                methods += bench.avq_methods(shape, sets, AVQConfig.parse(text))
            rows = bench.rows(shape, methods, len(sets))
            yield [{"part": "scaling", "against": against, **row} for row in rows]


RUN_PART = {"table": table_part, "sd15": sd15_part, "scaling": scaling_part}


def run_kernels(
    device: torch.device,
    output: Path,
    *,
    command: str,
    parts: Sequence[str] = PARTS,
    quick: bool = False,
    suite: Suite | None = None,
) -> None:
    """Time the parts, print their tables, and write one JSON file and one plot for each.

    A file is rewritten whenever the rows of one size are there, so that a run that is cut off keeps
    what it has. Off CUDA the sizes are tiny.

    Raises:
        ValueError: a part is unknown.
    """
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"--parts must be some of {', '.join(PARTS)}, but got {part!r}.")
    if suite is None:
        suite = (QUICK if quick else FULL) if device.type == "cuda" else TINY
        if suite is TINY:
            print(f"{device.type}: tiny sizes, without CUDA graphs, FA2, cuDNN and stage times")
    bench = Bench(device, effort=suite.effort)
    for part in parts:
        path = output / f"bench_kernels_{part}_{device.type}.json"
        rows: list[Row] = []
        for group in RUN_PART[part](bench, suite):
            rows += group
            for row in group:
                print(f"N = {row['tokens']}, {row['method']}: {_ms(row['ms'])} ms", flush=True)
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
        print(kernels_table(rows), flush=True)
        plot_kernels(path.with_suffix(".png"), rows)


def fit_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of log y over log x."""
    log_x = [math.log(value) for value in x]
    log_y = [math.log(value) for value in y]
    mean_x, mean_y = sum(log_x) / len(log_x), sum(log_y) / len(log_y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(log_x, log_y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in log_x)


def slopes(rows: Sequence[Row]) -> list[Row]:
    """The fitted lines of the scaling rows: points, slope, and the slopes of the two stages."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.get("part") != "scaling" or row["ms"] is None:
            continue
        if row["against"] == "codewords":
            kind = "VQ" if AVQConfig.parse(row["config"]).num_children == 0 else "AVQ"
            label = f"{kind}, N = {row['tokens']}"
        else:
            label = row["method"]
        groups.setdefault((row["against"], label), []).append(row)
    lines = []
    for (against, label), members in groups.items():
        axis = "effective_codewords" if against == "codewords" else "tokens"
        members = sorted(members, key=lambda row: row[axis])
        x = [row[axis] for row in members]
        line: Row = {"against": against, "label": label, "x": x}
        for name in ("ms", "precompute_ms", "attention_ms"):
            y = [row.get(name) for row in members]
            if None in y:
                continue
            line[name] = y
            if len(set(x)) > 1:
                line[f"{name.removesuffix('ms')}slope"] = fit_slope(x, y)
        lines.append(line)
    return lines


def kernels_table(rows: Sequence[Row]) -> str:
    """The rows of one run as Markdown: methods over N, the stages, and the fitted slopes."""
    sections = []
    table = [row for row in rows if row["part"] == "table"]
    if table:
        sections.append(_paper_table(table))
    sd15 = [row for row in rows if row["part"] == "sd15"]
    if sd15:
        sections.append(_stage_table(sd15))
    scaling = [row for row in rows if row["part"] == "scaling"]
    if scaling:
        sections += [_stage_table(scaling), _slope_table(slopes(scaling))]
    notes = {
        f"- {row['method']}, N = {row['tokens']}: {row['note']}" for row in rows if "note" in row
    }
    if notes:
        sections.append("\n".join(sorted(notes)))
    return "\n\n".join(sections)


def plot_kernels(path: Path, rows: Sequence[Row]) -> None:
    """Write the scaling rows, or the table's, as log-log plots."""
    fitted = slopes(rows)
    if fitted:
        panels: dict[str, list[Line]] = {"time over codebook size": [], "time over tokens": []}
        for line in fitted:
            title = f"time over {'codebook size' if line['against'] == 'codewords' else 'tokens'}"
            slope = f", slope {line['slope']:.2f}" if "slope" in line else ""
            panels[title].append(Line(line["label"] + slope, line["x"], line["ms"]))
        xlabels = ["effective codewords M0 + P C", "tokens N"]
    else:
        panels = {}
        for row in rows:
            title = f"B{row['batch']} H{row['heads']} D{row['head_dim']}, {row['dtype']}"
            lines = panels.setdefault(title, [])
            if row["ms"] is not None and row["method"] not in [line.label for line in lines]:
                same = [
                    other
                    for other in rows
                    if other["method"] == row["method"]
                    and other["head_dim"] == row["head_dim"]
                    and other["ms"] is not None
                ]
                lines.append(
                    Line(row["method"], [o["tokens"] for o in same], [o["ms"] for o in same])
                )
        xlabels = ["tokens N"] * len(panels)
    log_log_plot(path, panels, xlabels=xlabels, ylabel="time (ms)")


def method_name(config: AVQConfig) -> str:
    """`AVQ 64/16/8` or `VQ 256`, as in the paper's table."""
    if config.num_children == 0:
        return f"VQ {config.num_parents}"
    return f"AVQ {config.num_parents}/{config.num_refined}/{config.num_children}"


def _stage_methods(
    name: str,
    sets: Sequence[tuple[Tensor, ...]],
    config: AVQConfig,
    codebook: Codebook,
    order: Tensor | None,
) -> list[Method]:
    """The two stages of the kernels apart, on the codewords that the operation packs."""
    from avq_diffusers.kernels import attention, codewords, precompute

    codes, bias = codewords.pack(
        codebook.parents,
        codebook.children,
        scale=codebook.head_dim**-0.5,
        dtype=_code_dtype(sets[0][0].dtype),
    )
    sizes = {"num_parents": config.num_parents, "num_children": config.num_children}

    def aggregate(index: int) -> tuple[Tensor, Tensor]:
        _, key, value = sets[index]
        return precompute.precompute(key, value, codes, bias, **sizes)

    aggregates: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(index: int) -> Tensor:
        if index not in aggregates:
            aggregates[index] = aggregate(index)
        return attention.attend(
            sets[index][0],
            codes,
            *aggregates[index],
            **sizes,
            num_refined=config.num_refined,
            query_tile=config.query_tile,
            query_order=order,
            importance_tile=config.importance_tile,
        )

    return [
        Method(name, aggregate, time_field="precompute_ms"),
        Method(name, attend, time_field="attention_ms"),
    ]


def _flat_attention(
    config: AVQConfig, codebook: Codebook, dtype: torch.dtype, *, kernels: bool
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention of queries over codewords, from their means and counts (B, H, M)."""
    if not kernels:

        def by_sdpa(query: Tensor, means: Tensor, counts: Tensor) -> Tensor:
            keys = codebook.parents.to(query.dtype).expand(len(query), -1, -1, -1)
            log_counts = counts.log().to(query.dtype)[:, :, None]
            return F.scaled_dot_product_attention(query, keys, means, attn_mask=log_counts)

        return by_sdpa

    from avq_diffusers.kernels import attention, codewords

    codes, _ = codewords.pack(
        codebook.parents,
        codebook.children,
        scale=codebook.head_dim**-0.5,
        dtype=_code_dtype(dtype),
    )
    padding = codes.shape[1] - config.num_parents
    shares = codewords.mean_columns(codebook.head_dim) - codebook.head_dim

    def by_kernel(query: Tensor, means: Tensor, counts: Tensor) -> Tensor:
        # Rows of the kernel: every parent, padding, then what stays with parents, unread here.
        means = F.pad(means.to(codes.dtype), (0, shares), value=1.0)
        return attention.attend(
            query,
            codes,
            F.pad(means, (0, 0, 0, codes.shape[1] + padding)),
            F.pad(counts.log2(), (0, padding), value=-math.inf),
            num_parents=config.num_parents,
            num_children=0,
            num_refined=0,
            query_tile=config.query_tile,
            query_order=None,
            importance_tile=None,
        )

    return by_kernel


def _code_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that the kernels keep codewords and means in."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def _needs_cuda(name: str) -> Callable[[int], Tensor]:
    def run(index: int) -> Tensor:
        raise RuntimeError(f"{name} needs a CUDA device")

    return run


def _effective(config: AVQConfig) -> int:
    return config.num_parents + config.num_refined * config.num_children


def _error(output: Tensor, expected: Tensor) -> float:
    """Relative root mean square error over the queries of `expected`."""
    difference = output[:, :, : expected.shape[2]].float() - expected
    return float(difference.norm() / expected.norm())


def _block_ms(function: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Mean time of one call among `repeats` calls back to back."""
    if device.type != "cuda":
        start = perf_counter()
        for _ in range(repeats):
            function()
        return (perf_counter() - start) * 1e3 / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def _paper_table(rows: Sequence[Row]) -> str:
    tokens = sorted({row["tokens"] for row in rows})
    times = {(row["method"], row["tokens"]): row["ms"] for row in rows}
    first = rows[0]
    lines = [
        f"B{first['batch']} H{first['heads']} D{first['head_dim']}, {first['dtype']}: ms, and how "
        f"many times faster than {DEFAULT_SDPA}",
        "",
        f"| method | {' | '.join(f'N = {n}' for n in tokens)} |",
        f"|---|{'---|' * len(tokens)}",
    ]
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for n in tokens:
            ms, exact = times.get((method, n)), times.get((DEFAULT_SDPA, n))
            ratio = f" ({exact / ms:.3g}x)" if ms and exact else ""
            cells.append(f"{_ms(ms)}{ratio}")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _stage_table(rows: Sequence[Row]) -> str:
    lines = [
        "| shape | method | ms | precompute ms | attention ms | eager ms | cached ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shape = Shape(row["batch"], row["heads"], row["tokens"], row["head_dim"])
        fields = ("ms", "precompute_ms", "attention_ms", "eager_ms", "cached_ms")
        cells = " | ".join(_ms(row.get(name)) for name in fields)
        lines.append(f"| {shape} | {row['method']} | {cells} |")
    return "\n".join(lines)


def _slope_table(lines: Sequence[Row]) -> str:
    text = [
        "| time over | line | slope | of the precompute | of the attention |",
        "|---|---|---|---|---|",
    ]
    for line in lines:
        cells = " | ".join(
            f"{line[name]:.3f}" if name in line else "-"
            for name in ("slope", "precompute_slope", "attention_slope")
        )
        text.append(f"| {line['against']} | {line['label']} | {cells} |")
    return "\n".join(text)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
