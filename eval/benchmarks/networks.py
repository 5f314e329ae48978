"""Networks whose attention can switch to any of the timed methods.

With random queries and keys, attention is close to an average; they are scaled up so that it
selects, and AVQ's output differs from exact attention's. The limit is the fastest possible
attention: projections run, and each token takes its own value.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
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
from avq_diffusers.attention.exact import exact_attention
from avq_diffusers.attention.tensors import Attended, Tensors
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.codebook.kmeans import fit_codebook
from avq_diffusers.config import Spec
from avq_diffusers.extras.linfusion import LinFusionProcessor
from avq_diffusers.hosts import attention_replaced
from eval.benchmarks.contenders import FORCED
from eval.benchmarks.models import Model
from eval.methods.base import AttentionMethod
from eval.methods.peer import Peer
from eval.methods.registry import LIMIT, LINFUSION, PEERS, TOME, method_label, timed_method
from eval.methods.running import layers_run_by
from eval.methods.tome import merged_tokens

EAGER, GRAPH, COMPILE = "eager", "graph", "compile"
SHARPNESS = 2  # factor on untrained queries and keys, for a logit spread of about 1
CHANGE = 1e-3  # standard deviation of the projection changes in tuned rows
# Untrained modulations almost switch blocks off; this lets the blocks affect the output.
MODULATIONS = ("linear.bias", "scale_shift_table")
CALIBRATION_KEYS = 8192


class NetworkBench(ABC):
    """A network, and the methods that its attention can switch to.

    Runs in half precision on CUDA, elsewhere in float32. `compile_backend` is passed to
    `torch.compile`.
    """

    def __init__(
        self, model: Model, device: torch.device, *, compile_backend: str = "inductor"
    ) -> None:
        self.model, self.device, self.compile_backend = model, device, compile_backend
        self.cuda = device.type == "cuda"
        half = torch.float16 if model.is_unet else torch.bfloat16
        self.dtype = half if self.cuda else torch.float32
        self.backend, self.oracle = ("triton", "torch") if self.cuda else ("torch", "reference")
        self.network = model.build(device).eval().requires_grad_(False)
        if model.weights is None:
            self._sharpen()
        # One by one: diffusers' `to` keeps some in float32.
        for parameter in self.network.parameters():
            parameter.data = parameter.to(self.dtype)
        self.generator = torch.Generator(device).manual_seed(0)
        self._fixed: dict[str, Any] = {}
        self._names: tuple[str, ...] = ()

    def _sharpen(self) -> None:
        for name, parameter in self.network.named_parameters():
            if name.endswith("norm_q.weight"):
                parameter.mul_(SHARPNESS)
            elif name.endswith(MODULATIONS):
                parameter.add_(1)

    def inputs(self, side: int) -> tuple[Tensor, ...]:
        """Random inputs for `predict` at this image size; sets the size that it runs at."""
        tensors, self._fixed = self._draw(side)
        self._names = tuple(tensors)
        return tuple(tensors.values())

    def predict(self, *inputs: Tensor) -> Tensor:
        """The network's output for these inputs."""
        named = dict(zip(self._names, inputs, strict=True))
        first = named.pop(self._names[0])  # positional, where ToMe's hooks look for it
        return self.network(first, **named, **self._fixed, return_dict=False)[0]

    def cannot_run(self, name: str, mode: str) -> str | None:
        """Why this machine cannot time the row; None if it can."""
        kind = timed_method(name).kind
        if mode == GRAPH and not self.cuda:
            return "CUDA graphs need a CUDA device"
        if mode != EAGER and self.model.has_mask:
            return "AVQ reads a mask on the host, in eager steps only"
        if kind in (*FORCED, *PEERS) and not self.cuda:
            return f"{method_label(name)} needs a CUDA device"
        return "tomesd is not installed" if kind == TOME and not find_spec("tomesd") else None

    @contextmanager
    def method(self, name: str, *, oracle: bool = False) -> Iterator[None]:
        """Run attention with a `timed_method`; `oracle` selects the backend that checks AVQ."""
        method = timed_method(name)
        if method.config is None:
            with self._attention(method):
                yield
            return
        backend = self.oracle if oracle else self.backend
        apply_avq(self.network, self._codewords(method), backend=backend, route=method.route)
        try:
            yield
        finally:
            remove_avq(self.network)

    def compiled(self, step: FunctionType, name: str) -> Callable[..., Tensor]:
        """The compiled step, for use inside the `method` of this name."""
        return compiled_apart(step, name, self.compile_backend)

    def weights_of(self, method: AttentionMethod) -> list[Tensor]:
        """What a method adds to the network's weights: its stored codewords."""
        source = None if method.config is None else self._codewords(method)
        return list(source.parameters()) if isinstance(source, AVQCodebooks) else []

    def _attention(self, method: AttentionMethod) -> AbstractContextManager[None]:
        """Run attention with a method other than AVQ."""
        if method.source in FORCED:
            return forced_sdpa(FORCED[method.source])
        return nullcontext()

    @abstractmethod
    def _codewords(self, method: AttentionMethod) -> AVQConfig | AVQCodebooks:
        """The `source` of `apply_avq` for an AVQ method."""

    def _draw(self, side: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self.model.inputs(self.network.config, side, self.model.batch, self._normal)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)


class UNetBench(NetworkBench):
    """A UNet: supports codebooks fitted to its keys, LinFusion and ToMe beside own codewords."""

    def __init__(self, model: Model, device: torch.device, **options: Any) -> None:
        super().__init__(model, device, **options)
        nn.Module.to(self.network, memory_format=torch.channels_last)
        self._fits: dict[tuple[int, int], dict[str, Codebook]] = {}
        # Never freed: captured graphs read these codewords by address.
        self._codebooks: dict[tuple[AVQConfig, bool], AVQCodebooks] = {}

    def _sharpen(self) -> None:
        for layer in select_layers(self.network, self.model.levels):
            layer.attn.to_q.weight.mul_(SHARPNESS)
            layer.attn.to_k.weight.mul_(SHARPNESS)

    def _attention(self, method: AttentionMethod) -> AbstractContextManager[None]:
        if method.source == LIMIT:
            names = [layer.name for layer in select_layers(self.network, self.model.levels)]
            return layers_run_by(self.network, dict.fromkeys(names, LimitProcessor()))
        if method.source == LINFUSION:
            return layers_run_by(self.network, self._linfusion)
        if method.source == TOME:
            return merged_tokens(self.network, method.levels, method.setting)
        return super()._attention(method)

    @torch.no_grad()
    def _codewords(self, method: AttentionMethod) -> AVQConfig | AVQCodebooks:
        """The configuration for own codewords, else codebooks of the keys: one k-means per size."""
        config = method.config
        if method.own and not method.tuned:
            return config
        if (config, method.tuned) not in self._codebooks:
            layers = select_layers(self.network, config.levels, config.exact)
            fits = None if method.own else self._fitted(config.num_parents, config.num_children)
            stored = fits and {layer.name: fits[layer.name] for layer in layers}
            changes = {layer.name: self._changes(layer.attn) for layer in layers}
            codebooks = gather_codebooks(
                self.network, config, stored, projection_changes=changes if method.tuned else None
            )
            self._codebooks[config, method.tuned] = codebooks.to(self.device)
        return self._codebooks[config, method.tuned]

    def _fitted(self, *sizes: int) -> dict[str, Codebook]:
        if sizes not in self._fits:
            self._fits[sizes] = {
                name: fit_codebook(keys, *sizes, num_iterations=8)
                for name, keys in self._keys.items()
            }
        return self._fits[sizes]

    def _changes(self, attn: Attention) -> dict[str, Tensor]:
        """Random projection changes, by their names in `attn`."""
        draw = partial(torch.randn, generator=self.generator, device=self.device)
        return {name: CHANGE * draw(x.shape) for name, x in attn.state_dict().items()}

    @cached_property
    def _linfusion(self) -> dict[str, LinFusionProcessor]:
        """LinFusion with random weights by layer name, kept alive for the graphs that read it."""
        torch.manual_seed(0)
        processors = {}
        for layer in select_layers(self.network):
            with self.device:
                processor = LinFusionProcessor(layer.attn.query_dim)
            for phi in (processor.phi_q, processor.phi_k):
                phi[-1].reset_parameters()  # initialized to zero, which would hide a missing phi
            processors[layer.name] = processor.to(self.dtype).requires_grad_(False)
        return processors

    @cached_property
    def _keys(self) -> dict[str, Tensor]:
        """Keys (H, S, D) in fp32 of each layer at the model's levels, from an exact step."""
        samples: dict[str, Tensor] = {}

        def keep(name: str, tensors: Tensors, spec: Spec, backend: str) -> Attended:
            rows = tensors.key.transpose(1, 2).flatten(0, 1)
            chosen = torch.randperm(len(rows), generator=self.generator, device=self.device)
            samples[name] = rows[chosen[:CALIBRATION_KEYS]].float().transpose(0, 1).contiguous()
            return Attended(exact_attention(tensors), "kept")

        layers = select_layers(self.network, self.model.levels)
        keepers = {layer.name: partial(keep, layer.name) for layer in layers}
        with attention_replaced(self.network, keepers, AVQConfig(levels=self.model.levels)):
            # Not `inputs`: a captured graph reads what its last call left there.
            tensors, fixed = self._draw(self.model.sizes[0])
            self.network(**tensors, **fixed)
        return samples


class TransformerBench(NetworkBench):
    """A transformer: it has own codewords, and blocks are compiled one by one.

    PISA and Sol-Attn run in the same calls as AVQ, over text and image together, with tokens in
    their given order: reordering once for all layers is not timed, and the output is not checked.
    """

    def _attention(self, method: AttentionMethod) -> AbstractContextManager[None]:
        if method.source == LIMIT:
            return self_attention_by(pass_on)
        if method.source in PEERS:
            return self_attention_by(torch.compiler.disable(partial(by_peer, method)))
        return super()._attention(method)

    def _codewords(self, method: AttentionMethod) -> AVQConfig:
        return replace(method.config, codewords="means", levels=(0,))

    @contextmanager
    def method(self, name: str, *, oracle: bool = False) -> Iterator[None]:
        with super().method(name, oracle=oracle):
            try:
                yield
            finally:
                for block in self._blocks():
                    vars(block).pop("forward", None)

    def compiled(self, step: FunctionType, name: str) -> Callable[..., Tensor]:
        """The step, with blocks compiled until the `method` ends, once per kind of block."""
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


def bench_of(model: Model, device: torch.device, **options: Any) -> NetworkBench:
    """The bench for a UNet or a transformer."""
    return (UNetBench if model.is_unet else TransformerBench)(model, device, **options)


def layer_states(network: nn.Module) -> list[Any]:
    """AVQ's states of a network's layers."""
    return [state for layer in select_layers(network) if (state := layer.avq_state) is not None]


def compiled_apart(function: FunctionType, name: str, backend: str) -> Callable[..., Any]:
    """Compile a copy of a function whose code object no other name shares.

    Dynamo caches by code object and does not guard on the SDPA backend: with a shared code object,
    FA2 would run what was compiled for SDPA, and a reset would free code that captured graphs still
    use.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{name}")
    copy = FunctionType(
        code, function.__globals__, None, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return torch.compile(copy, dynamic=False, backend=backend)


@contextmanager
def forced_sdpa(backend: SDPBackend) -> Iterator[None]:
    """Run SDPA with this backend only."""
    # The cache key ignores the backend: a step would get what another backend's step compiled to.
    with sdpa_kernel(backend), functorch_config.patch(enable_autograd_cache=False):
        yield


@contextmanager
def self_attention_by(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Replace SDPA with as many queries as keys by a function of query, key, value and `scale`."""
    exact = F.scaled_dot_product_attention

    def chosen(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.shape != value.shape:
            return exact(query, key, value, *args, **kwargs)
        return attend(query, key, value, scale=kwargs.get("scale"))

    F.scaled_dot_product_attention = chosen
    try:
        yield
    finally:
        F.scaled_dot_product_attention = exact


@torch.library.custom_op("avq_eval::zero_of", mutates_args=())
def zero_of(query: Tensor, key: Tensor) -> Tensor:
    """A zero that keeps compilers from dropping both arguments."""
    return query.new_zeros(1)


@zero_of.register_fake
def _(query: Tensor, key: Tensor) -> Tensor:
    return query.new_empty(1)


def pass_on(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The values, as the output of attention."""
    return value + zero_of(query, key) if torch.compiler.is_compiling() else value


def by_peer(peer: Peer, *tensors: Tensor, scale: float | None = None) -> Tensor:
    """A peer's attention over query, key and value (B, H, N, D), in their given order."""
    return peer.attend(peer.arranged(*tensors), scale)


class LimitProcessor:
    """A UNet layer without attention; hooks instead would cost host time, which counts."""

    def __call__(self, attn: Attention, hidden_states: Tensor, **others: Any) -> Tensor:
        query, key = attn.to_q(hidden_states), attn.to_k(hidden_states)
        return attn.to_out[1](attn.to_out[0](pass_on(query, key, attn.to_v(hidden_states))))
