"""One denoising step of a UNet by any of the methods whose time is compared.

A method is one of `LABELS`, or AVQ by a name of `parse_method`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from avq_diffusers import AVQCodebooks, AVQConfig, apply_avq, remove_avq, select_layers
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.codebook.kmeans import fit_codebook
from avq_diffusers.extras.linfusion import LinFusionProcessor
from eval.benchmarks.contenders import Row, method_name, relative_error
from eval.benchmarks.timing import block_ms
from eval.benchmarks.unet_configs import added_conditions
from eval.quality.methods import ValueProjectionProcessor, exact_labels

SDPA, FA2, LIMIT, LINFUSION = "sdpa", "fa2", "limit", "linfusion"
TOME, TOME_BOTH = "tome", "tome@L01"
# By name, down to which resolution ToMe merges tokens, as tomesd's max_downsample.
MAX_DOWNSAMPLE = {TOME: 1, TOME_BOTH: 2, "tome@L1": 2, "tome@L12": 4}
# At the end of a name of `parse_method`.
ROUTED, TUNED = "/fastest", "/tuned"
# Standard deviation of the changes of projections that a tuned row runs.
CHANGE = 1e-3
LABELS = {
    SDPA: "SDPA default",
    FA2: "FA2",
    LIMIT: "limit",
    TOME: "ToMe r=0.5",
    TOME_BOTH: "ToMe r=0.5, levels 0 and 1",
    "tome@L1": "ToMe r=0.5, level 1",
    "tome@L12": "ToMe r=0.5, levels 1 and 2",
    LINFUSION: "LinFusion",
}
EAGER, GRAPH, COMPILE = "eager", "graph", "compile"
LEVELS = (0, 1)

BATCH = 2
TEXT_TOKENS = 77
TIMESTEP = 150  # late, where trained attention does most
CALIBRATION_STEPS = (900, 650, 400, 150)
CALIBRATION_KEYS = 8192


@dataclass(frozen=True)
class Model:
    """A model whose UNet is timed.

    Attributes:
        unet: what results call its UNet.
        build: makes the UNet on a device, in float32.
        latent_scale: pixels per latent along a side of the picture.
        sizes: sides of the pictures, in pixels, where none are named.
        stem: what the names of its results begin with.
        methods: that are timed where none are named, the most important first.
        levels: at which attention may change.
    """

    unet: str
    build: Callable[[torch.device], UNet2DConditionModel]
    latent_scale: int
    sizes: tuple[int, ...]
    stem: str
    methods: tuple[str, ...]
    levels: tuple[int, ...] = LEVELS


class AVQMethod(NamedTuple):
    """How a row runs AVQ: what codebooks, by which route, and with tuned projections or not."""

    config: AVQConfig
    route: str = "always"
    tuned: bool = False


def parse_method(name: str) -> AVQMethod:
    """What `M64P16C8` stands for: levels 0 and 1, every layer by AVQ.

    `M64P16C8@L0` changes level 0 alone, `M64P16C8@L12` levels 1 and 2, `M64P16C8-up_blocks.2`
    leaves the layers of that block exact; `/fastest` at the end is the default route, which leaves
    layers exact where that is faster, and `/tuned` adds changes to the projections, as distilled
    codebooks do.

    Raises:
        ValueError: the name has another form.
    """
    form = rf"(.*?)(?:@L(\d+))?(?:-([^/]+))?({ROUTED}|{TUNED})?"
    text, digits, exact, way = re.fullmatch(form, name).groups()
    levels = LEVELS if digits is None else tuple(int(digit) for digit in digits)
    config = AVQConfig.parse(text, levels=levels, exact=(exact,) if exact else ())
    return AVQMethod(config, "fastest" if way == ROUTED else "always", way == TUNED)


def method_label(name: str) -> str:
    """The name that tables and plots print."""
    if name in LABELS:
        return LABELS[name]
    config, route, tuned = parse_method(name)
    changed = " and ".join(map(str, config.levels))
    levels = [] if config.levels == LEVELS else [f"level{'s' * (len(changed) > 1)} {changed}"]
    ways = [*["fastest route"] * (route == "fastest"), *["tuned projections"] * tuned]
    return ", ".join([method_name(config), *levels, *exact_labels(config), *ways])


@torch.library.custom_op("avq_eval::zero_of", mutates_args=())
def _zero_of(query: Tensor, key: Tensor) -> Tensor:
    """A zero for whose sake a compiler computes both."""
    return query.new_zeros(1)


@_zero_of.register_fake
def _(query: Tensor, key: Tensor) -> Tensor:
    return query.new_empty(1)


class LimitProcessor(ValueProjectionProcessor):
    """Self-attention but for the attention: its projections, and every token takes its value."""

    def __call__(self, attn, hidden_states: Tensor, **others: Any) -> Tensor:
        query, key = attn.to_q(hidden_states), attn.to_k(hidden_states)
        output = super().__call__(attn, hidden_states, **others)
        return output + _zero_of(query, key) if torch.compiler.is_compiling() else output


class StepBench:
    """A UNet, and the methods its attention can be switched to.

    Args:
        model: of the UNet.
        device: where it runs, in fp16 on CUDA and in fp32 elsewhere.
        compile_backend: of torch.compile.
    """

    def __init__(
        self, model: Model, device: torch.device, *, compile_backend: str = "inductor"
    ) -> None:
        self.model = model
        self.device = device
        self.cuda = device.type == "cuda"
        self.dtype = torch.float16 if self.cuda else torch.float32
        self.backend, self.oracle = ("triton", "torch") if self.cuda else ("torch", "reference")
        self.compile_backend = compile_backend
        self.unet = model.build(device).eval().requires_grad_(False)
        # Not diffusers' own `to`, which warns of a list of float32 modules that is empty.
        torch.nn.Module.to(self.unet, dtype=self.dtype, memory_format=torch.channels_last)
        self.generator = torch.Generator(device).manual_seed(0)
        self.conditions = added_conditions(self.unet, BATCH, self._normal)
        self._fits: dict[tuple[int, int], dict[str, Codebook]] = {}
        # Kept for good: captured graphs read these codewords by their address.
        self._codebooks: dict[tuple[AVQConfig, bool], AVQCodebooks] = {}

    def inputs(self, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random latents of a side x side picture, a timestep, random text states."""
        latent = side // self.model.latent_scale
        sample = self._normal(BATCH, self.unet.config.in_channels, latent, latent)
        text = self._normal(BATCH, TEXT_TOKENS, self.unet.config.cross_attention_dim)
        timestep = torch.full((), TIMESTEP, device=self.device)
        return sample.contiguous(memory_format=torch.channels_last), timestep, text

    def predict(self, sample: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """The UNet's output for such inputs."""
        return self.unet(sample, timestep, text, return_dict=False, **self.conditions)[0]

    def cannot_run(self, name: str, mode: str) -> str | None:
        """Why this machine has no such row; None if it can have one."""
        if mode == GRAPH and not self.cuda:
            return "CUDA graphs need a CUDA device"
        if name == FA2 and not self.cuda:
            return "FA2 needs a CUDA device"
        if name in MAX_DOWNSAMPLE and find_spec("tomesd") is None:
            return "tomesd is not installed"
        return None

    @contextmanager
    def method(self, name: str, *, oracle: bool = False) -> Iterator[None]:
        """Run the UNet's attention by `name` in the `with` block.

        Args:
            name: one of `LABELS` or of `parse_method`.
            oracle: run AVQ by the backend that checks the one that is timed.
        """
        with ExitStack() as stack:
            if name == FA2:
                stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
                # Its key leaves the SDPA backend out: FA2 would get what SDPA's step compiled to.
                stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
            elif name in (LIMIT, LINFUSION):
                layers = select_layers(self.unet, self.model.levels if name == LIMIT else None)
                for layer in layers:
                    stack.callback(layer.attn.set_processor, layer.attn.processor)
                    layer.attn.set_processor(
                        LimitProcessor() if name == LIMIT else self._linfusion[layer.name]
                    )
            elif name in MAX_DOWNSAMPLE:
                import tomesd

                # Without random destinations the step can be captured; its work is the same.
                tomesd.apply_patch(
                    self.unet, ratio=0.5, max_downsample=MAX_DOWNSAMPLE[name], use_rand=False
                )
                stack.callback(tomesd.remove_patch, self.unet)
            elif name != SDPA:
                config, route, tuned = parse_method(name)
                backend = self.oracle if oracle else self.backend
                codebooks = self.codebooks(config, tuned=tuned)
                apply_avq(self.unet, codebooks, backend=backend, route=route)
                stack.callback(remove_avq, self.unet)
            yield

    def route_as_compiled(self) -> None:
        """Let eager calls take the route of compiled ones, for the output that these must give."""
        for layer in select_layers(self.unet):
            if (state := layer.avq_state) is not None:
                state.route.break_even = {
                    workload: found._replace(eager=found.compiled)
                    for workload, found in state.route.break_even.items()
                }

    @torch.no_grad()
    def codebooks(self, config: AVQConfig, *, tuned: bool = False) -> AVQCodebooks:
        """Codebooks of the UNet's own keys; one k-means for each layer and size."""
        if (config, tuned) not in self._codebooks:
            sizes = config.num_parents, config.num_children
            if sizes not in self._fits:
                self._fits[sizes] = {
                    name: fit_codebook(keys, *sizes, num_iterations=8)
                    for name, keys in self._keys.items()
                }
            layers = select_layers(self.unet, config.levels, config.exact)
            fits = {layer.name: self._fits[sizes][layer.name] for layer in layers}
            changes = {layer.name: self._changes(layer.attn) for layer in layers}
            codebooks = AVQCodebooks.from_codebooks(
                config, fits, self.unet, projection_changes=changes if tuned else None
            )
            self._codebooks[config, tuned] = codebooks.to(self.device)
        return self._codebooks[config, tuned]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def _changes(self, attn: Attention) -> dict[str, Tensor]:
        """Random changes of the projections, by their names in `attn`."""
        draw = partial(torch.randn, generator=self.generator, device=self.device)
        return {name: CHANGE * draw(x.shape) for name, x in attn.state_dict().items()}

    @cached_property
    def _linfusion(self) -> dict[str, LinFusionProcessor]:
        """LinFusion of every self-attention by its name, with random weights.

        Kept for good as well, for the graphs that read them.
        """
        torch.manual_seed(0)
        processors = {}
        for layer in select_layers(self.unet):
            with self.device:
                processor = LinFusionProcessor(layer.attn.query_dim)
            for phi in (processor.phi_q, processor.phi_k):
                phi[-1].reset_parameters()  # zero at first, so that a phi left out would not show
            processors[layer.name] = processor.to(self.dtype).requires_grad_(False)
        return processors

    @cached_property
    def _keys(self) -> dict[str, Tensor]:
        """Keys (H, S, D) in fp32 of every layer at the model's levels, from a few exact steps."""
        layers = select_layers(self.unet, self.model.levels)
        samples: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}

        def keep(name: str, module, inputs, key: Tensor) -> None:
            rows = key.flatten(0, 1)
            count = min(len(rows), CALIBRATION_KEYS // len(CALIBRATION_STEPS))
            chosen = torch.randperm(len(rows), generator=self.generator, device=self.device)
            samples[name].append(rows[chosen[:count]].float())

        with ExitStack() as stack:
            for layer in layers:
                hook = layer.attn.to_k.register_forward_hook(partial(keep, layer.name))
                stack.enter_context(hook)
            side = self.unet.config.sample_size * self.model.latent_scale
            for step in CALIBRATION_STEPS:
                sample, _, text = self.inputs(side)
                self.predict(sample, torch.full((), step, device=self.device), text)
        return {
            layer.name: torch.cat(samples[layer.name])
            .unflatten(1, (layer.num_heads, -1))
            .transpose(0, 1)
            .contiguous()
            for layer in layers
        }


class Step:
    """One eager, compiled or captured step: `prepare` gives it the next inputs, `run` runs it."""

    def __init__(self, bench: StepBench, name: str, inputs: Sequence[tuple[Tensor, ...]]) -> None:
        def step(sample: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
            return bench.predict(sample, timestep, text)

        self.bench, self.name, self.inputs = bench, name, inputs
        self.current = tuple(tensor.clone() for tensor in inputs[0])
        self.model: Callable[..., Tensor] = step
        self.replay: Callable[[], None] | None = None
        self.alive: list[Any] = []

    def prepare(self, index: int) -> None:
        for target, source in zip(self.current, self.inputs[index % len(self.inputs)], strict=True):
            target.copy_(source)

    def run(self) -> Tensor | None:
        """The output, or None from a captured step."""
        return self.model(*self.current) if self.replay is None else self.replay()

    def first_runs(
        self, mode: str, pool: tuple[int, int] | None, exact: Tensor | None
    ) -> tuple[Tensor, Row]:
        """Bring the step into its mode, in which it stays.

        Args:
            mode: `"graph"`, `"compile"` or `"eager"`.
            pool: memory of the CUDA graph; None for a step that is not captured.
            exact: SDPA's eager output, if it is there, which FA2's must equal.

        Returns:
            the eager output, and fields of the row with a first time.
        """
        bench, name = self.bench, self.name
        with bench.method(name):
            eager = self.run().clone()
            if mode == COMPILE and name.endswith(ROUTED):
                bench.route_as_compiled()
                eager = self.run().clone()
        errors = []
        if name == FA2 and exact is not None:
            errors.append(relative_error(eager, exact))
        elif name not in LABELS and not name.endswith(ROUTED):
            with bench.method(name, oracle=True):
                errors.append(relative_error(eager, self.run()))
        facts: Row = {}
        with bench.method(name):
            if mode == COMPILE:
                self._compile()
            start = perf_counter()
            output = self.run().clone()
            facts["first_call_s"] = round(perf_counter() - start, 2)
            self.run()
            if bench.cuda:
                facts["peak_mib"] = self._peak_mib()
            if pool is not None:
                output = self._capture(pool)
            facts["ms"] = median(self.milliseconds(index) for index in range(3))
        errors.append(relative_error(output, eager))
        facts["error"] = torch.tensor(errors).max().item()  # Python's maximum loses NaN
        return eager, facts

    def milliseconds(self, index: int) -> float:
        """Time of one step; giving it the inputs is not part of it."""
        self.prepare(index)
        if self.bench.cuda:
            torch.cuda.synchronize()
        return block_ms(self.run, 1, self.bench.device)

    def _compile(self) -> None:
        # Dynamo keeps its results by code object and does not guard on the SDPA backend: with one
        # code object FA2 would run what was compiled for SDPA, and after a reset the code that
        # captured graphs still use would be gone.
        self.model.__code__ = self.model.__code__.replace(co_name=f"step_{self.name}")
        self.model = torch.compile(self.model, dynamic=False, backend=self.bench.compile_backend)

    def _capture(self, pool: tuple[int, int]) -> Tensor:
        """Record the step; its output for the first inputs."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self.run()
        self.prepare(0)
        graph.replay()
        self.replay = graph.replay
        # What AVQ's layers hold goes away with the method, and the graph still reads it.
        self.alive = [layer.avq_state for layer in select_layers(self.bench.unet)]
        return output.clone()

    def _peak_mib(self) -> float:
        """Weights, codebooks and the step's own allocations at their highest."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        tensors = list(self.bench.unet.parameters())
        if self.name not in LABELS:
            tensors += self.bench.codebooks(parse_method(self.name)[0]).parameters()
        return (peak + sum(tensor.nbytes for tensor in tensors)) / 2**20
