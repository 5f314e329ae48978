"""One denoising step of a model with any of the timed methods; the UNet among the models."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from avq_diffusers import (
    AVQCodebooks,
    AVQConfig,
    apply_avq,
    gather_codebooks,
    remove_avq,
    select_layers,
)
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.codebook.kmeans import fit_codebook
from avq_diffusers.extras.linfusion import LinFusionProcessor
from avq_diffusers.hosts import attention_replaced
from eval.benchmarks.contenders import Row, relative_error
from eval.benchmarks.timing import block_ms
from eval.benchmarks.unet_configs import added_conditions
from eval.methods import layers_run_by, merged_tokens
from eval.names import (
    CUDNN,
    FA2,
    LABELS,
    LEVELS,
    LIMIT,
    LINFUSION,
    TOME,
    MethodName,
    timed_method,
)

# Standard deviation of the changes of projections that a tuned row runs.
CHANGE = 1e-3
FORCED = {FA2: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}
EAGER, GRAPH, COMPILE = "eager", "graph", "compile"

BATCH = 2
TEXT_TOKENS = 77
TIMESTEP = 150  # late, where trained attention does most
CALIBRATION_STEPS = (900, 650, 400, 150)
CALIBRATION_KEYS = 8192


@dataclass(frozen=True)
class Model:
    """A model whose UNet is timed.

    Attributes:
        unet: name of the UNet in results.
        build: makes the UNet on a device, in float32.
        latent_scale: pixels per latent along a side.
        sizes: default sides of the images, in pixels.
        stem: prefix of the result files.
        methods: default methods, the most important first.
        levels: UNet levels at which attention may change.
    """

    unet: str
    build: Callable[[torch.device], UNet2DConditionModel]
    latent_scale: int
    sizes: tuple[int, ...]
    stem: str
    methods: tuple[str, ...]
    levels: tuple[int, ...] = LEVELS


@torch.library.custom_op("avq_eval::zero_of", mutates_args=())
def zero_of(query: Tensor, key: Tensor) -> Tensor:
    """A zero that keeps a compiler from dropping both arguments."""
    return query.new_zeros(1)


@zero_of.register_fake
def _(query: Tensor, key: Tensor) -> Tensor:
    return query.new_empty(1)


class LimitProcessor:
    """Self-attention without the attention: projections run, and each token takes its value.

    A processor has no hooks: those of `attention_replaced` take host time, which counts here.
    """

    def __call__(self, attn: Attention, hidden_states: Tensor, **others: Any) -> Tensor:
        query, key = attn.to_q(hidden_states), attn.to_k(hidden_states)
        output = attn.to_out[1](attn.to_out[0](attn.to_v(hidden_states)))
        return output + zero_of(query, key) if torch.compiler.is_compiling() else output


class NetworkBench(Protocol):
    """A network, and the methods that its attention can switch to.

    Attributes:
        network: what runs.
        device: where it runs.
        cuda: whether that is a CUDA device.
        compile_backend: of `torch.compile`.
    """

    network: nn.Module
    device: torch.device
    cuda: bool
    compile_backend: str

    def inputs(self, side: int) -> tuple[Tensor, ...]:
        """Random inputs for an image of side x side pixels."""

    def predict(self, *inputs: Tensor) -> Tensor:
        """The network's output for such inputs."""

    def cannot_run(self, name: str, mode: str) -> str | None:
        """Why this machine cannot time the row; None if it can."""

    def method(self, name: str, *, oracle: bool = False) -> AbstractContextManager[None]:
        """Run attention by a `timed_method`; `oracle` chooses the backend that checks AVQ."""

    def compiled(self, step: FunctionType, name: str) -> Callable[..., Tensor]:
        """The step with compiled code, for use in the `method` of this name."""

    def weights_of(self, method: MethodName) -> list[Tensor]:
        """What a method adds to the network's weights."""


def layer_states(network: nn.Module) -> list[Any]:
    """What AVQ keeps at the layers of a network."""
    return [state for layer in select_layers(network) if (state := layer.avq_state) is not None]


def route_as_compiled(network: nn.Module) -> None:
    """Let eager calls take the route of compiled ones, to get the expected output of these."""
    for state in layer_states(network):
        state.route.break_even = {
            workload: found._replace(eager=found.compiled)
            for workload, found in state.route.break_even.items()
        }


def compiled_apart(function: FunctionType, name: str, backend: str) -> Callable[..., Any]:
    """Compile a copy of a function, whose code is not shared with other names.

    Dynamo keeps its results by code object and does not guard on the SDPA backend: with one code
    object FA2 would run what was compiled for SDPA, and after a reset the code that captured
    graphs still use would be gone.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{name}")
    copy = FunctionType(
        code, function.__globals__, None, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(copy, dynamic=False, backend=backend)


@contextmanager
def forced_sdpa(backend: SDPBackend) -> Iterator[None]:
    """Run SDPA by this backend alone."""
    # The key of the cache leaves the backend out: one would get what another's step compiled to.
    with sdpa_kernel(backend), functorch_config.patch(enable_autograd_cache=False):
        yield


class StepBench:
    """A UNet, and the methods that its attention can switch to.

    It runs in fp16 on CUDA and in fp32 elsewhere. `compile_backend` goes to `torch.compile`.
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
        self.network = self.unet = model.build(device).eval().requires_grad_(False)
        # Not diffusers' own `to`, which warns of a list of float32 modules that is empty.
        torch.nn.Module.to(self.unet, dtype=self.dtype, memory_format=torch.channels_last)
        self.generator = torch.Generator(device).manual_seed(0)
        self.conditions = added_conditions(self.unet, BATCH, self._normal)
        self._fits: dict[tuple[int, int], dict[str, Codebook]] = {}
        # Kept for good: captured graphs read these codewords by their address.
        self._codebooks: dict[tuple[AVQConfig, bool], AVQCodebooks] = {}

    def inputs(self, side: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random latents of a side x side image, a timestep, random text states."""
        latent = side // self.model.latent_scale
        sample = self._normal(BATCH, self.unet.config.in_channels, latent, latent)
        text = self._normal(BATCH, TEXT_TOKENS, self.unet.config.cross_attention_dim)
        timestep = torch.full((), TIMESTEP, device=self.device)
        return sample.contiguous(memory_format=torch.channels_last), timestep, text

    def predict(self, sample: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """The UNet's output for such inputs."""
        return self.unet(sample, timestep, text, return_dict=False, **self.conditions)[0]

    def cannot_run(self, name: str, mode: str) -> str | None:
        """Why this machine cannot time the row; None if it can."""
        if mode == GRAPH and not self.cuda:
            return "CUDA graphs need a CUDA device"
        if name in FORCED and not self.cuda:
            return f"{LABELS[name]} needs a CUDA device"
        if timed_method(name).source == TOME and find_spec("tomesd") is None:
            return "tomesd is not installed"
        return None

    def compiled(self, step: FunctionType, name: str) -> Callable[..., Tensor]:
        """The step, compiled as a whole."""
        return compiled_apart(step, name, self.compile_backend)

    @contextmanager
    def method(self, name: str, *, oracle: bool = False) -> Iterator[None]:
        """Run attention by a `timed_method`; `oracle` chooses the backend that checks AVQ."""
        method = timed_method(name)
        with ExitStack() as stack:
            if method.source in FORCED:
                stack.enter_context(forced_sdpa(FORCED[method.source]))
            elif method.source == LIMIT:
                names = [layer.name for layer in select_layers(self.unet, self.model.levels)]
                limit = dict.fromkeys(names, LimitProcessor())
                stack.enter_context(layers_run_by(self.unet, limit))
            elif method.source == LINFUSION:
                stack.enter_context(layers_run_by(self.unet, self._linfusion))
            elif method.source == TOME:
                stack.enter_context(merged_tokens(self.unet, method.levels))
            elif method.config is not None:
                backend = self.oracle if oracle else self.backend
                source = method.config
                if not method.own:
                    source = self.codebooks(method.config, tuned=method.tuned)
                apply_avq(self.unet, source, backend=backend, route=method.route)
                stack.callback(remove_avq, self.unet)
            yield

    @torch.no_grad()
    def codebooks(self, config: AVQConfig, *, tuned: bool = False) -> AVQCodebooks:
        """Codebooks of the UNet's own keys. K-means runs once per layer and size."""
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
            codebooks = gather_codebooks(
                self.unet, config, fits, projection_changes=changes if tuned else None
            )
            self._codebooks[config, tuned] = codebooks.to(self.device)
        return self._codebooks[config, tuned]

    def weights_of(self, method: MethodName) -> list[Tensor]:
        """The codebooks of a method with stored codewords."""
        if method.config is None or method.own:
            return []
        return list(self.codebooks(method.config).parameters())

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def _changes(self, attn: Attention) -> dict[str, Tensor]:
        """Random changes of the projections, by their names in `attn`."""
        draw = partial(torch.randn, generator=self.generator, device=self.device)
        return {name: CHANGE * draw(x.shape) for name, x in attn.state_dict().items()}

    @cached_property
    def _linfusion(self) -> dict[str, LinFusionProcessor]:
        """LinFusion with random weights by layer name, kept for the graphs that read it."""
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

        def keep(
            name: str, query: Tensor, key: Tensor, value: Tensor, codebook: None, **options: Any
        ) -> tuple[Tensor, str]:
            rows = key.transpose(1, 2).flatten(0, 1)
            count = min(len(rows), CALIBRATION_KEYS // len(CALIBRATION_STEPS))
            chosen = torch.randperm(len(rows), generator=self.generator, device=self.device)
            samples[name].append(rows[chosen[:count]].float())
            scale = options["scale"]
            return F.scaled_dot_product_attention(query, key, value, scale=scale), "kept"

        side = self.unet.config.sample_size * self.model.latent_scale
        keepers = {name: partial(keep, name) for name in samples}
        with attention_replaced(self.unet, keepers, AVQConfig(levels=self.model.levels)):
            for step in CALIBRATION_STEPS:
                sample, _, text = self.inputs(side)
                self.predict(sample, torch.full((), step, device=self.device), text)
        return {name: torch.cat(x).transpose(0, 1).contiguous() for name, x in samples.items()}


class Step:
    """One eager, compiled or captured step: `prepare` copies the next inputs in, `run` runs it."""

    def __init__(
        self, bench: NetworkBench, name: str, inputs: Sequence[tuple[Tensor, ...]]
    ) -> None:
        def step(*tensors: Tensor) -> Tensor:
            return bench.predict(*tensors)

        self.bench, self.name, self.inputs = bench, name, inputs
        self.method = timed_method(name)
        self.current = tuple(tensor.clone() for tensor in inputs[0])
        self.model: Callable[..., Tensor] = step
        self.replay: Callable[[], None] | None = None
        self.alive: list[Any] = []

    def prepare(self, index: int) -> None:
        for target, source in zip(self.current, self.inputs[index % len(self.inputs)], strict=True):
            target.copy_(source)

    def run(self) -> Tensor | None:
        """The output; None from a captured step."""
        return self.model(*self.current) if self.replay is None else self.replay()

    def first_runs(
        self, mode: str, pool: tuple[int, int] | None, exact: Tensor | None
    ) -> tuple[Tensor, Row]:
        """Bring the step into its mode, `"graph"`, `"compile"` or `"eager"`.

        Args:
            mode: the mode.
            pool: memory of the CUDA graph; None if the step is not captured.
            exact: SDPA's eager output for FA2 and cuDNN to match, if known.

        Returns:
            The eager output, and fields of the row with a first time.
        """
        bench, name, method = self.bench, self.name, self.method
        may_be_exact = method.route == "fastest"
        with bench.method(name):
            eager = self.run().clone()
            if mode == COMPILE and may_be_exact:
                route_as_compiled(bench.network)
                eager = self.run().clone()
        errors = []
        if name in FORCED and exact is not None:
            errors.append(relative_error(eager, exact))
        elif method.config is not None and not may_be_exact:
            with bench.method(name, oracle=True):
                errors.append(relative_error(eager, self.run()))
        facts: Row = {}
        with bench.method(name):
            if mode == COMPILE:
                self.model = bench.compiled(self.model, name)
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
        """Time of one step, without copying its inputs."""
        self.prepare(index)
        if self.bench.cuda:
            torch.cuda.synchronize()
        return block_ms(self.run, 1, self.bench.device)

    def _capture(self, pool: tuple[int, int]) -> Tensor:
        """Record the step; its output for the first inputs."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self.run()
        self.prepare(0)
        graph.replay()
        self.replay = graph.replay
        # What AVQ's layers hold goes away with the method, and the graph still reads it.
        self.alive = layer_states(self.bench.network)
        return output.clone()

    def _peak_mib(self) -> float:
        """Weights, codebooks and the step's own allocations at their peak."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        tensors = [*self.bench.network.parameters(), *self.bench.weights_of(self.method)]
        return (peak + sum(tensor.nbytes for tensor in tensors)) / 2**20
