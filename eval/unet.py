"""One denoising step of SD1.5's UNet, batch 2: `python -m eval bench unet`.

The UNet has SD1.5's configuration and random weights, so nothing is downloaded; its codebooks are
k-means of its own keys. The limit keeps the projections of level-0 and level-1 self-attention and
passes the values on: no attention can be faster. Rows of one size and mode are timed in turns, and
a row whose output is wrong gets no time.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from avq_diffusers import (
    AVQCodebooks,
    AVQConfig,
    Codebook,
    apply_avq,
    fit_codebook,
    remove_avq,
    select_layers,
)
from eval.kernels import TOLERANCE, Row, method_name
from eval.plots import bar_plot
from eval.report import save_json

SDPA, FA2, LIMIT, TOME = "sdpa", "fa2", "limit", "tome"
LEVELS = (0, 1)
# The ones a ratio needs first, so that a run that is cut off has them.
METHODS = (
    SDPA,
    LIMIT,
    "M64P16C8",
    "M64P16C8/fastest",
    "M64P16C8@0",
    "M32P8C8",
    "M128P32C8",
    FA2,
    TOME,
)
ROUTED = "/fastest"
LABELS = {SDPA: "SDPA default", FA2: "FA2", LIMIT: "limit", TOME: "ToMe r=0.5"}
EAGER, GRAPH, COMPILE = "eager", "graph", "compile"
MODES = {
    GRAPH: "CUDA graph, not compiled",
    COMPILE: "torch.compile in a CUDA graph",
    EAGER: "eager",
}
MODES_WITHOUT_GRAPHS = {**MODES, COMPILE: "torch.compile"}

SD15 = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "center_input_sample": False,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "downsample_padding": 1,
    "mid_block_scale_factor": 1,
    "act_fn": "silu",
    "norm_num_groups": 32,
    "norm_eps": 1e-5,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,  # the number of heads, by the name SD1.5's own config gives it
}
TINY = {
    **SD15,
    "block_out_channels": (16, 32, 64, 64),
    "norm_num_groups": 8,
    "cross_attention_dim": 32,
    "attention_head_dim": 2,
}
BATCH = 2
TEXT_TOKENS = 77
LATENT_SCALE = 8
CALIBRATION_STEPS = (900, 650, 400, 150)
CALIBRATION_KEYS = 8192
NUM_INPUTS = 4


@torch.library.custom_op("avq_eval::zero_of", mutates_args=())
def _zero_of(query: Tensor, key: Tensor) -> Tensor:
    """A zero for whose sake a compiler computes both."""
    return query.new_zeros(1)


@_zero_of.register_fake
def _(query: Tensor, key: Tensor) -> Tensor:
    return query.new_empty(1)


class LimitProcessor(AttnProcessor2_0):
    """Self-attention but for the attention: its projections, and every token takes its value."""

    def __call__(
        self,
        attn,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        query, key = attn.to_q(hidden_states), attn.to_k(hidden_states)
        hidden_states = attn.to_out[0](attn.to_v(hidden_states))
        if torch.compiler.is_compiling():
            hidden_states = hidden_states + _zero_of(query, key)
        return attn.to_out[1](hidden_states)


class StepBench:
    """A UNet with random weights, and the methods its attention can be switched to.

    Args:
        config: of the UNet.
        device: where it runs.
        dtype: fp16 on CUDA and fp32 elsewhere when None.
        calibration_side: picture side whose keys the codebooks are fitted to.
        compile_backend: of torch.compile.
    """

    def __init__(
        self,
        config: dict[str, Any],
        device: torch.device,
        dtype: torch.dtype | None = None,
        *,
        calibration_side: int = 512,
        compile_backend: str = "inductor",
    ) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.dtype = dtype or (torch.float16 if self.cuda else torch.float32)
        self.backend = "triton" if self.cuda else "torch"
        self.oracle = "torch" if self.cuda else "reference"
        self.calibration_side = calibration_side
        self.compile_backend = compile_backend
        torch.manual_seed(0)
        with device:
            unet = UNet2DConditionModel(**config)
        self.unet = unet.eval().requires_grad_(False)
        # Untrained keys and queries make attention an average; these make it choose.
        for layer in select_layers(unet, LEVELS):
            layer.attn.to_q.weight.mul_(4)
            layer.attn.to_k.weight.mul_(4)
        # Not diffusers' own `to`, which warns of a list of float32 modules that is empty.
        torch.nn.Module.to(unet, dtype=self.dtype, memory_format=torch.channels_last)
        self.generator = torch.Generator(device).manual_seed(0)
        self._keys: dict[str, Tensor] | None = None
        self._layer_codebooks: dict[tuple[str, int, int], Codebook] = {}
        # Kept for good: captured graphs read these codewords by their address.
        self._codebooks: dict[str, AVQCodebooks] = {}

    def inputs(self, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random latents of a side x side picture, a timestep, random text states."""
        latent = side // LATENT_SCALE
        sample = self._normal(BATCH, self.unet.config.in_channels, latent, latent)
        text = self._normal(BATCH, TEXT_TOKENS, self.unet.config.cross_attention_dim)
        timestep = torch.full((), 500, device=self.device)
        return sample.contiguous(memory_format=torch.channels_last), timestep, text

    @contextmanager
    def method(self, name: str, *, oracle: bool = False) -> Iterator[None]:
        """Run the UNet's attention by `name` in the `with` block.

        Args:
            name: `"sdpa"`, `"fa2"`, `"limit"`, `"tome"`, or a configuration such as `"M64P16C8"`
                for levels 0 and 1, with `"@0"` for level 0 alone, and with `"/fastest"` at the end
                for the default route, which leaves layers exact where that is faster.
            oracle: run AVQ by the backend that checks the one that is timed.
        """
        with ExitStack() as stack:
            if name == FA2:
                if not self.cuda:
                    raise RuntimeError("FA2 needs a CUDA device")
                stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
            elif name == LIMIT:
                for layer in select_layers(self.unet, LEVELS):
                    stack.callback(layer.attn.set_processor, layer.attn.processor)
                    layer.attn.set_processor(LimitProcessor())
            elif name == TOME:
                if find_spec("tomesd") is None:
                    raise RuntimeError("tomesd is not installed")
                import tomesd

                # Without random destinations the step can be captured; its work is the same.
                tomesd.apply_patch(self.unet, ratio=0.5, use_rand=False)
                stack.callback(tomesd.remove_patch, self.unet)
            elif name != SDPA:
                backend = self.oracle if oracle else self.backend
                route = "fastest" if name.endswith(ROUTED) else "always"
                apply_avq(
                    self.unet,
                    self.codebooks(name.removesuffix(ROUTED)),
                    backend=backend,
                    route=route,
                )
                stack.callback(remove_avq, self.unet)
            yield

    @torch.no_grad()
    def codebooks(self, name: str) -> AVQCodebooks:
        """Codebooks of the UNet's own keys; one k-means for each layer and size."""
        if name in self._codebooks:
            return self._codebooks[name]
        if self._keys is None:
            self._keys = self._sample_keys()
        config = parse_method(name)
        sizes = config.num_parents, config.num_children
        chosen = {}
        for layer in select_layers(self.unet, config.levels):
            key = (layer.name, *sizes)
            if key not in self._layer_codebooks:
                self._layer_codebooks[key] = fit_codebook(
                    self._keys[layer.name], *sizes, num_iterations=8
                )
            chosen[layer.name] = self._layer_codebooks[key]
        codebooks = AVQCodebooks.from_codebooks(config, chosen, self.unet).to(self.device)
        self._codebooks[name] = codebooks
        return codebooks

    def _sample_keys(self) -> dict[str, Tensor]:
        """Keys (H, S, D) in fp32 of every layer at LEVELS, from a few exact steps."""
        layers = select_layers(self.unet, LEVELS)
        samples: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}

        def keep(name: str, module, inputs, key: Tensor) -> None:
            rows = key.flatten(0, 1)
            count = min(len(rows), CALIBRATION_KEYS // len(CALIBRATION_STEPS))
            chosen = torch.randperm(len(rows), generator=self.generator, device=self.device)
            samples[name].append(rows[chosen[:count]].float())

        hooks = [
            layer.attn.to_k.register_forward_hook(partial(keep, layer.name)) for layer in layers
        ]
        try:
            for step in CALIBRATION_STEPS:
                sample, _, text = self.inputs(self.calibration_side)
                self.unet(sample, torch.full((), step, device=self.device), text)
        finally:
            for hook in hooks:
                hook.remove()
        return {
            layer.name: torch.cat(samples[layer.name])
            .unflatten(1, (layer.num_heads, -1))
            .transpose(0, 1)
            .contiguous()
            for layer in layers
        }

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(
            shape, generator=self.generator, device=self.device, dtype=torch.float32
        ).to(self.dtype)


class Step:
    """One captured, compiled or eager step: `prepare` gives it the next inputs, `run` runs it."""

    def __init__(self, bench: StepBench, inputs: Sequence[tuple[Tensor, ...]]) -> None:
        self.bench = bench
        self.inputs = inputs
        self.current = tuple(tensor.clone() for tensor in inputs[0])
        self.model: Callable[..., Tensor] = self._call
        self.compiled = False
        self.replay: Callable[[], None] | None = None
        self.alive: list[Any] = []

    def prepare(self, index: int) -> None:
        for target, source in zip(self.current, self.inputs[index % len(self.inputs)], strict=True):
            target.copy_(source)

    def run(self) -> Tensor | None:
        """The output, or None from a captured step."""
        if self.replay is not None:
            return self.replay()
        return self.model(*self.current)

    def compile(self, name: str) -> None:
        unet = self.bench.unet

        def step(sample: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
            return unet(sample, timestep, text, return_dict=False)[0]

        # Dynamo keeps its results by code object and does not guard on the SDPA backend: with one
        # code object FA2 would run what was compiled for SDPA, and after a reset the code that
        # captured graphs still use would be gone.
        step.__code__ = step.__code__.replace(co_name=f"step_{name}")
        self.model = torch.compile(step, dynamic=False, backend=self.bench.compile_backend)
        self.compiled = True

    def capture(self, pool: tuple[int, int]) -> Tensor:
        """Record the step; its output for the first inputs."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self.run()
        self.prepare(0)
        graph.replay()
        self.replay = graph.replay
        # What AVQ's layers hold goes away with the method, and the graph still reads it.
        self.alive = [
            layer.attn._avq
            for layer in select_layers(self.bench.unet)
            if hasattr(layer.attn, "_avq")
        ]
        return output.clone()

    def _call(self, sample: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        return self.bench.unet(sample, timestep, text, return_dict=False)[0]

    def milliseconds(self, index: int) -> float:
        """Time of one step; giving it the inputs is not part of it."""
        self.prepare(index)
        if not self.bench.cuda:
            start = perf_counter()
            self.run()
            return (perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def run_unet(
    device: torch.device,
    output: Path,
    *,
    command: str,
    sizes: Sequence[int] = (512, 1024, 2048),
    methods: Sequence[str] = METHODS,
    modes: Sequence[str] = tuple(MODES),
    minutes: float | None = None,
) -> None:
    """Time the steps, print the tables, and write a JSON file per size and mode, a plot per size.

    A file is rewritten after every row. Off CUDA the UNet is a tiny one of the same topology.

    Args:
        device: where the UNet runs.
        output: folder of the results.
        command: that was typed.
        sizes: sides of the picture.
        methods: of `bench_unet`.
        modes: `"graph"`, `"compile"`, `"eager"`.
        minutes: no row is started after this time.

    Raises:
        ValueError: a method, mode or size is unknown or impossible.
    """
    check_choices(methods, modes)
    for side in sizes:
        if side < 64 or side % 64:
            raise ValueError(f"--sizes must be multiples of 64, but got {side}.")
    deadline = None if minutes is None else perf_counter() + 60 * minutes
    cuda = device.type == "cuda"
    labels = MODES if cuda else MODES_WITHOUT_GRAPHS
    if not cuda:
        print(f"{device.type}: a tiny UNet, without CUDA graphs and FA2")
    bench = StepBench(SD15 if cuda else TINY, device)
    for side in sizes:
        for mode in modes:
            rows: list[Row] = []
            steps = bench_unet(bench, side, mode, methods=methods, deadline=deadline)
            for turn, rows in enumerate(steps):
                save_json(
                    _result(output, side, mode, device),
                    command=command,
                    device=device,
                    unet="SD1.5, random weights" if cuda else "tiny, random weights",
                    dtype=str(bench.dtype).removeprefix("torch."),
                    batch=BATCH,
                    backend=bench.backend,
                    mode=labels[mode],
                    rows=rows,
                )
                if turn == len(methods):  # the final medians, which the table prints
                    continue
                last = rows[-1]
                print(
                    f"{side} {mode} {last['label']}: {_number(last['ms'], '.4g')} ms "
                    f"{last.get('note', '')}",
                    flush=True,
                )
            print(unet_table(rows, labels), flush=True)
        # The modes of a size may have run in other commands.
        found = [_result(output, side, mode, device) for mode in MODES]
        rows = [
            row for path in found if path.is_file() for row in json.loads(path.read_text())["rows"]
        ]
        plot_unet(output / f"bench_unet_{side}_{device.type}.png", rows, labels)


def _result(output: Path, side: int, mode: str, device: torch.device) -> Path:
    return output / f"bench_unet_{side}_{mode}_{device.type}.json"


@torch.no_grad()
def bench_unet(
    bench: StepBench,
    side: int,
    mode: str,
    *,
    methods: Sequence[str] = METHODS,
    deadline: float | None = None,
    window_ms: float = 2000.0,
) -> Iterator[list[Row]]:
    """Time one step at side x side pixels; all rows so far, after every row and at the end.

    Args:
        bench: the UNet.
        side: of the picture.
        mode: `"graph"`, `"compile"` or `"eager"`.
        methods: those of `StepBench.method`, the most important first.
        deadline: value of `perf_counter` after which no row is started.
        window_ms: time spent on each row, in 5 to 40 steps.
    """
    torch.compiler.reset()
    inputs = [bench.inputs(side) for _ in range(NUM_INPUTS)]
    outputs: dict[str, Tensor] = {}
    rows: list[Row] = []
    ready: list[tuple[Row, Step, int]] = []
    pool = torch.cuda.graph_pool_handle() if bench.cuda else None
    for name in methods:
        row: Row = {
            "size": side,
            "mode": mode,
            "method": name,
            "label": method_label(name),
            "ms": None,
        }
        rows.append(row)
        if deadline is not None and perf_counter() > deadline:
            row["note"] = "not started: out of time"
        elif mode == GRAPH and not bench.cuda:
            row["note"] = "CUDA graphs need a CUDA device"
        else:
            step = Step(bench, inputs)
            try:
                _prepare(bench, step, row, outputs, pool)
            except (RuntimeError, ValueError, AttributeError, TypeError) as error:
                # Foreign code (ToMe, compilers, backends) fails in all of these ways.
                row["note"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            if "note" not in row:
                steps = max(5, min(40, round(window_ms / row["ms"])))
                ready.append((row, step, steps))
        yield with_ratios(rows)
    _time_in_turns(bench, ready)
    yield with_ratios(rows)


def _prepare(
    bench: StepBench,
    step: Step,
    row: Row,
    outputs: dict[str, Tensor],
    pool: tuple[int, int] | None,
) -> None:
    """Warm the row's step up, check it, measure its memory and a first time."""
    name, mode = row["method"], row["mode"]
    if name not in outputs:
        _eager_output(bench, step, row, outputs)
    with bench.method(name):
        if mode == COMPILE:
            step.compile(name)
        start = perf_counter()
        output = step.run().clone()
        row["first_call_s"] = round(perf_counter() - start, 2)
        step.run()
        if bench.cuda:
            row["peak_mib"] = _peak_mib(bench, step)
            if mode != EAGER:
                output = step.capture(pool)
        expected = outputs[name]
        row["error"] = max(row.get("error", 0.0), _difference(output, expected))
        row["difference_from_sdpa"] = (
            _difference(expected, outputs[SDPA]) if SDPA in outputs else None
        )
        # Closer to what it should be than half-way to SDPA, or the method did not run.
        exact = name in (SDPA, FA2) or name.endswith(ROUTED)  # a routed step may be
        distance = None if exact else row["difference_from_sdpa"]
        if not row["error"] < (TOLERANCE if distance is None else distance / 2):
            row["note"] = f"wrong output: relative error {row['error']:.3g}"
            if distance is not None:
                row["note"] += f", difference from SDPA {distance:.3g}"
            return
        row["ms"] = median(step.milliseconds(index) for index in range(3))


def _eager_output(bench: StepBench, step: Step, row: Row, outputs: dict[str, Tensor]) -> None:
    """Keep the method's eager output, checked: AVQ by its oracle, FA2 by SDPA."""
    name = row["method"]
    with bench.method(name):
        output = step.run().clone()
    if name == FA2 and SDPA in outputs:
        row["error"] = _difference(output, outputs[SDPA])
    elif name not in LABELS and not name.endswith(ROUTED):
        with bench.method(name, oracle=True):
            row["error"] = _difference(output, step.run())
    outputs[name] = output


def _time_in_turns(bench: StepBench, ready: Sequence[tuple[Row, Step, int]]) -> None:
    """Replace the first times by medians of steps taken in turns."""
    samples: dict[int, list[float]] = {index: [] for index in range(len(ready))}
    for turn in range(max((steps for *_, steps in ready), default=0)):
        for index, (row, step, steps) in enumerate(ready):
            if turn >= steps or (step.compiled and step.replay is None):
                continue
            if step.replay is not None:
                samples[index].append(step.milliseconds(turn))
                continue
            with bench.method(row["method"]):
                step.run()
                samples[index].append(step.milliseconds(turn))
    for index, (row, *_) in enumerate(ready):
        if not samples[index]:
            continue
        row["ms"] = median(samples[index])
        row["steps"] = len(samples[index])
        row["spread"] = (max(samples[index]) - min(samples[index])) / row["ms"]


def _peak_mib(bench: StepBench, step: Step) -> float:
    """Weights, codebooks and the step's own allocations at their highest."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step.run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    tensors = list(bench.unet.parameters())
    for layer in select_layers(bench.unet):
        if hasattr(layer.attn, "_avq"):
            codebook = layer.attn._avq.codebook
            tensors += [codebook.parents, codebook.children]
    return (peak + sum(tensor.nbytes for tensor in tensors)) / 2**20


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows with their time over that of the limit and of SDPA of the same size and mode."""
    times = {(row["size"], row["mode"], row["method"]): row["ms"] for row in rows}
    filled = []
    for row in rows:
        ratios = {}
        for field, method in (("over_limit", LIMIT), ("over_sdpa", SDPA)):
            base = times.get((row["size"], row["mode"], method))
            ratios[field] = row["ms"] / base if row["ms"] and base else None
        filled.append({**row, **ratios})
    return filled


def unet_table(rows: Sequence[Row], modes: dict[str, str] = MODES) -> str:
    """The rows as Markdown."""
    lines = [
        "| size | mode | method | ms | / limit | / SDPA | peak MiB | error | note |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            str(row["size"]),
            modes[row["mode"]],
            row["label"],
            _number(row["ms"], ".4g"),
            _number(row["over_limit"], ".3f"),
            _number(row["over_sdpa"], ".3f"),
            _number(row.get("peak_mib"), ".0f"),
            _number(row.get("error"), ".1e"),
            row.get("note", ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot_unet(path: Path, rows: Sequence[Row], modes: dict[str, str] = MODES) -> None:
    """Write the times as bars, one panel for each mode that has any."""
    panels: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["ms"] is not None:
            panels.setdefault(modes[row["mode"]], {})[row["label"]] = row["ms"]
    size = rows[0]["size"]
    bar_plot(path, panels, xlabel="time per step (ms)", title=f"UNet step at {size} x {size}")


def parse_method(name: str) -> AVQConfig:
    """The configuration of `M64P16C8` (levels 0 and 1) or `M64P16C8@0` (level 0)."""
    text, _, levels = name.removesuffix(ROUTED).partition("@")
    chosen = tuple(int(level) for level in levels.split("+")) if levels else LEVELS
    return AVQConfig.parse(text, levels=chosen)


def check_choices(methods: Sequence[str], modes: Sequence[str]) -> None:
    """Refuse unknown methods and modes before the work.

    Raises:
        ValueError: a method or mode is unknown.
    """
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"modes must be {', '.join(MODES)}, but got {mode!r}.")
    for name in methods:
        if name in LABELS:
            continue
        try:
            parse_method(name)
        except ValueError as error:
            raise ValueError(
                f"methods must be {', '.join(LABELS)} or configurations such as M64P16C8, "
                f"M64P16C8@0 or M64P16C8/fastest: {error}"
            ) from None


def method_label(name: str) -> str:
    """The name that tables and plots print."""
    if name in LABELS:
        return LABELS[name]
    config = parse_method(name)
    levels = "" if config.levels == LEVELS else f", level {'+'.join(map(str, config.levels))}"
    return method_name(config) + levels + (", fastest route" if name.endswith(ROUTED) else "")


def _difference(output: Tensor, expected: Tensor) -> float:
    expected = expected.float()
    return float((output.float() - expected).norm() / expected.norm())


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
