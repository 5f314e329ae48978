"""Time one denoising step of a transformer: `python -m eval bench transformer`.

Weights are random and nothing is downloaded. Without `whole`, a few blocks of each kind are timed,
in about the model's proportion, and the time is multiplied to that of all blocks. Blocks are
compiled one by one, as users of large models do.

The limit is the fastest attention possible: where there are as many queries as keys, it passes the
values on. PISA and Sol-Attn run in the same calls, over text and image together, with tokens in the
order they have: reordering once for all layers is not timed, and their output is not checked.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import FunctionType
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel, WanTransformer3DModel
from torch import Tensor, nn

from avq_diffusers import apply_avq, remove_avq
from eval.benchmarks.contenders import Row
from eval.benchmarks.step import COMPILE, EAGER, FORCED, GRAPH, compiled_apart, forced_sdpa, zero_of
from eval.benchmarks.step_rows import (
    MODES,
    MODES_WITHOUT_GRAPHS,
    plot_steps,
    result_path,
    step_rows,
)
from eval.benchmarks.transformer_configs import (
    FLUX,
    SD35_LARGE,
    SD35_MEDIUM,
    WAN,
    WAN_LATENTS,
    Inputs,
    Normal,
    flux_inputs,
    sd3_inputs,
    wan_inputs,
)
from eval.keys.peers import arranged, attention_in_order, check_peer
from eval.names import (
    CUDNN,
    EXACT,
    LABELS,
    LIMIT,
    PEERS,
    PISA,
    SOL,
    MethodName,
    timed_method,
)
from eval.store.markdown import markdown_table, number
from eval.store.report import save_json

# The ones a ratio needs first, so that a run that is cut off has them.
METHODS = (CUDNN, "M64P16C8/own", LIMIT, "M64P16C8E256/own", EXACT)
# Untrained keys and queries make attention an average; this factor of their norm makes it choose.
SHARPNESS = 2
# Untrained modulations leave blocks out, almost; one more lets them act on the output.
MODULATIONS = ("linear.bias", "scale_shift_table")


@dataclass(frozen=True)
class TransformerModel:
    """A model whose transformer is timed.

    Attributes:
        name: in results.
        kind: diffusers' class.
        config: its arguments.
        part: other arguments for the few blocks that stand for all.
        times: all blocks over those of the part.
        inputs: see `sd3_inputs`.
        batch: 2 with guidance by an empty prompt.
        sizes: default sides of the images in pixels, or lines of the videos.
        step: a side must be a multiple of it; None if only the default sides are possible.
    """

    name: str
    kind: type[nn.Module]
    config: Mapping[str, Any]
    part: Mapping[str, Any]
    times: float
    inputs: Callable[[Mapping[str, Any], int, int, Normal], Inputs]
    batch: int
    sizes: tuple[int, ...] = (1024, 2048, 4096)
    step: int | None = 16


SD35_MEDIUM_MODEL = TransformerModel(
    "SD3.5-medium",
    SD3Transformer2DModel,
    SD35_MEDIUM,
    {"num_layers": 11, "dual_attention_layers": tuple(range(6))},
    24 / 11,
    sd3_inputs,
    batch=2,
)
SD35_LARGE_MODEL = TransformerModel(
    "SD3.5-large", SD3Transformer2DModel, SD35_LARGE, {"num_layers": 4}, 38 / 4, sd3_inputs, batch=2
)
FLUX_MODEL = TransformerModel(
    "Flux",
    FluxTransformer2DModel,
    FLUX,
    {"num_layers": 1, "num_single_layers": 2},
    19,
    flux_inputs,
    batch=1,
)
WAN_MODEL = TransformerModel(
    "one block of Wan 14B",
    WanTransformer3DModel,
    WAN,
    {},
    1,
    wan_inputs,
    batch=1,
    sizes=tuple(WAN_LATENTS),
    step=None,
)
MODELS = {
    "sd35-medium": SD35_MEDIUM_MODEL,
    "sd35-large": SD35_LARGE_MODEL,
    "flux": FLUX_MODEL,
    "wan": WAN_MODEL,
}
# What stands for a model off CUDA.
TINY_SD3 = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "caption_projection_dim": 32,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
}
TINY = {
    "sd35-medium": {**TINY_SD3, "num_layers": 4, "dual_attention_layers": (0, 1)},
    "sd35-large": {**TINY_SD3, "num_layers": 4},
    "flux": {
        "in_channels": 4,
        "num_layers": 2,
        "num_single_layers": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 6, 6),
    },
    "wan": {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 64,
    },
}
TINY_PARTS = {
    "sd35-medium": {"num_layers": 2, "dual_attention_layers": (0,)},
    "sd35-large": {"num_layers": 2},
    "flux": {"num_layers": 1, "num_single_layers": 2},
    "wan": {},
}
TINY_LATENTS = {480: (3, 8, 12), 720: (3, 12, 20)}


def tiny_model(name: str) -> TransformerModel:
    """A tiny model of the same kind, whose part is half of its blocks."""
    model = MODELS[name]
    part = TINY_PARTS[name]
    return replace(
        model,
        name=f"tiny, for {model.name}",
        config={**model.config, **TINY[name]},
        part=part,
        times=2 if part else 1,
        inputs=partial(wan_inputs, latents=TINY_LATENTS) if name == "wan" else model.inputs,
    )


class TransformerBench:
    """A transformer with random weights, and the methods that its attention can switch to.

    It runs in bf16 on CUDA and in fp32 elsewhere. `compile_backend` goes to `torch.compile`.
    """

    def __init__(
        self,
        model: TransformerModel,
        device: torch.device,
        *,
        whole: bool = False,
        compile_backend: str = "inductor",
    ) -> None:
        self.model, self.device = model, device
        self.cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.backend, self.oracle = ("triton", "torch") if self.cuda else ("torch", "reference")
        self.compile_backend = compile_backend
        self.times = 1.0 if whole else model.times
        torch.manual_seed(0)
        with device:
            self.network = model.kind(**model.config if whole else {**model.config, **model.part})
        self.network.eval().requires_grad_(False)
        for name, parameter in self.network.named_parameters():
            parameter.data = parameter.to(self.dtype)
            if name.endswith("norm_q.weight"):
                parameter.mul_(SHARPNESS)
            elif name.endswith(MODULATIONS):
                parameter.add_(1)
        self.generator = torch.Generator(device).manual_seed(0)
        self._names: tuple[str, ...] = ()
        self._fixed: dict[str, Tensor] = {}

    def inputs(self, side: int) -> tuple[Tensor, ...]:
        """Random inputs of `predict`, which then runs at this size."""
        tensors, self._fixed = self.model.inputs(
            self.network.config, side, self.model.batch, self._normal
        )
        self._names = tuple(tensors)
        return tuple(tensors.values())

    def predict(self, *inputs: Tensor) -> Tensor:
        """The transformer's output for such inputs."""
        named = dict(zip(self._names, inputs, strict=True))
        return self.network(**named, **self._fixed, return_dict=False)[0]

    def cannot_run(self, name: str, mode: str) -> str | None:
        """Why this machine cannot time the row; None if it can."""
        if mode == GRAPH and not self.cuda:
            return "CUDA graphs need a CUDA device"
        source = timed_method(name).source
        if source in (*FORCED, *PEERS) and not self.cuda:
            return f"{LABELS[source]} needs a CUDA device"
        return None

    @contextmanager
    def method(self, name: str, *, oracle: bool = False) -> Iterator[None]:
        """Run attention by one of the methods; `oracle` chooses the backend that checks AVQ."""
        method = timed_method(name)
        with ExitStack() as stack:
            if method.source in FORCED:
                stack.enter_context(forced_sdpa(FORCED[method.source]))
            elif method.source == LIMIT:
                stack.enter_context(self_attention_by(pass_on))
            elif method.source in PEERS:
                attend = partial(by_peer, method.source, method.setting)
                stack.enter_context(self_attention_by(torch.compiler.disable(attend)))
            elif method.config is not None:
                config = replace(method.config, codewords="means", levels=(0,))
                backend = self.oracle if oracle else self.backend
                apply_avq(self.network, config, backend=backend, route=method.route)
                stack.callback(remove_avq, self.network)
            for block in self._blocks():
                stack.callback(vars(block).pop, "forward", None)
            yield

    def compiled(self, step: FunctionType, name: str) -> Callable[..., Tensor]:
        """The step, its blocks compiled until the `method` ends: once per kind of block."""
        calls: dict[type[nn.Module], Callable[..., Any]] = {}
        for block in self._blocks():
            kind = type(block)
            if kind not in calls:
                calls[kind] = compiled_apart(kind.forward, name, self.compile_backend)
            block.forward = partial(calls[kind], block)
        return step

    def _blocks(self) -> Iterator[nn.Module]:
        for part in self.network.children():
            if isinstance(part, nn.ModuleList):
                yield from part

    def weights_of(self, method: MethodName) -> list[Tensor]:
        """None: all codewords are own ones."""
        return []

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)


def pass_on(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The values, as the output of attention."""
    return value + zero_of(query, key) if torch.compiler.is_compiling() else value


def by_peer(source: str, setting: float, *tensors: Tensor, scale: float | None = None) -> Tensor:
    """Attention by a peer over query, key and value (B, H, N, D), in their order."""
    return attention_in_order(source, setting, arranged(source, *tensors), scale)


@contextmanager
def self_attention_by(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Replace SDPA of as many queries as keys by a function of query, key, value and `scale`."""
    exact = nn.functional.scaled_dot_product_attention

    def chosen(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.shape != value.shape:
            return exact(query, key, value, *args, **kwargs)
        return attend(query, key, value, scale=kwargs.get("scale"))

    nn.functional.scaled_dot_product_attention = chosen
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = exact


def run_transformer(
    device: torch.device,
    output: Path,
    *,
    command: str,
    model: str,
    sizes: Sequence[int] | None = None,
    methods: Sequence[str] = METHODS,
    modes: Sequence[str] = (COMPILE, GRAPH, EAGER),
    whole: bool = False,
    seconds: float = 4.0,
    minutes: float | None = None,
) -> None:
    """Time the steps, print tables, and write one JSON file per size and mode, one plot per size.

    The file is rewritten after every row. Off CUDA, tiny transformers take the place of the models.

    Args:
        device: where the transformer runs.
        output: folder of the results.
        command: command line to store.
        model: one of `MODELS`.
        sizes: sides of the images, or lines of the videos; None takes the model's.
        methods: methods, the most important first.
        modes: `"graph"`, `"compile"`, `"eager"`.
        whole: time all blocks.
        seconds: of steps per row; the second half counts.
        minutes: no row starts after this time.

    Raises:
        ValueError: a model, method, mode or size is unknown or impossible.
    """
    if model not in MODELS:
        raise ValueError(f"--model must be one of {', '.join(MODELS)}, but got {model!r}.")
    cuda = device.type == "cuda"
    chosen = MODELS[model] if cuda else tiny_model(model)
    sizes = chosen.sizes if sizes is None else sizes
    check_choices(chosen, sizes, methods, modes)
    deadline = None if minutes is None else perf_counter() + 60 * minutes
    labels = MODES if cuda else MODES_WITHOUT_GRAPHS
    if not cuda:
        print(f"{device.type}: {chosen.name}; without CUDA graphs, FA2 and cuDNN")
    bench = TransformerBench(chosen, device, whole=whole)
    for name in methods if cuda else ():
        if (method := timed_method(name)).source in PEERS:
            check_peer(name, method.source, next(bench.network.parameters()))
    stem = f"bench_transformer_{model}"
    for side in sizes:
        for mode in modes:
            rows: list[Row] = []
            for timed in step_rows(
                bench,
                side,
                mode,
                methods=methods,
                deadline=deadline,
                window_ms=1000 * seconds,
            ):
                rows = [in_all_blocks(row, bench.times, timed) for row in timed]
                save_json(
                    result_path(output, stem, side, mode, device),
                    command=command,
                    device=device,
                    model=chosen.name,
                    weights="random",
                    dtype=str(bench.dtype).removeprefix("torch."),
                    batch=chosen.batch,
                    backend=bench.backend,
                    mode=labels[mode],
                    timed_blocks={
                        name: value
                        for name, value in bench.network.config.items()
                        if name.endswith("_layers")
                    },
                    multiplied_by=bench.times,
                    rows=rows,
                )
            print(transformer_table(rows, labels), flush=True)
            if bench.times != 1:
                print(f"A part was timed; times are multiplied by {bench.times:.3g}.")
        plot_transformer(output, stem, side, device, labels)


def check_choices(
    model: TransformerModel, sizes: Sequence[int], methods: Sequence[str], modes: Sequence[str]
) -> None:
    """Refuse what cannot be timed.

    Raises:
        ValueError: a size, method or mode is unknown or impossible.
    """
    for side in sizes:
        if model.step is None and side not in model.sizes:
            raise ValueError(
                f"--sizes must be {' or '.join(map(str, model.sizes))} for {model.name}, but got "
                f"{side}."
            )
        if model.step is not None and (side < 64 or side % model.step):
            raise ValueError(
                f"--sizes must be multiples of {model.step} from 64 on, but got {side}."
            )
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"modes must be {', '.join(MODES)}, but got {mode!r}.")
    for name in methods:
        method = timed_method(name)
        has_own_codewords = method.own or method.route == "fastest"
        if not has_own_codewords and method.source not in (EXACT, LIMIT, *FORCED, *PEERS):
            raise ValueError(
                f"methods of a transformer are {', '.join((EXACT, *FORCED, LIMIT))}, PISA and "
                f"Sol-Attn as {PISA}@.15 and {SOL}@1.3, and configurations with /own or /fastest, "
                f"but got {name!r}."
            )


def in_all_blocks(row: Row, times: float, rows: Sequence[Row]) -> Row:
    """A row with its time for all blocks, its speed over cuDNN and the share of the limit's."""
    ms = {other["method"]: other["ms"] for other in rows}

    def over(name: str) -> float | None:
        return ms[name] / row["ms"] if row["ms"] and ms.get(name) else None

    return {
        **row,
        "ms": row["ms"] and row["ms"] * times,
        "speedup_over_cudnn": over(CUDNN),
        "speedup_over_sdpa": over(EXACT),
        "share_of_limit": over(LIMIT),
    }


def transformer_table(rows: Sequence[Row], modes: Mapping[str, str]) -> str:
    """The rows as Markdown."""
    return markdown_table(
        ["size", "mode", "method", "ms", "x cuDNN", "x SDPA", "of the limit", "error", "note"],
        (
            [
                str(row["size"]),
                modes[row["mode"]],
                row["label"],
                number(row["ms"]),
                number(row["speedup_over_cudnn"], ".2f"),
                number(row["speedup_over_sdpa"], ".2f"),
                number(row["share_of_limit"], ".0%"),
                number(row.get("error"), ".1e"),
                row.get("note", ""),
            ]
            for row in rows
        ),
    )


def plot_transformer(
    output: Path, stem: str, side: int, device: torch.device, modes: Mapping[str, str]
) -> None:
    """Plot the times of one size as bars, one panel per mode with a result in the folder."""
    title = "Transformer step at {side} ({model}, random weights)"
    plot_steps(output, stem, side, device, modes, title)
