"""Networks whose attention can switch to any of the timed methods.

The limit is the fastest possible attention: projections run, and each token takes its own value.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from operator import attrgetter
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from avq_diffusers import AVQCodebooks, apply_avq, remove_avq, select_layers, set_threshold
from avq_diffusers.attention.api import attend
from avq_diffusers.attention.tensors import Attended, Tensors, mean_columns
from avq_diffusers.config import Spec
from avq_diffusers.extras.linfusion import LinFusionProcessor
from eval.benchmarks.contenders import backends
from eval.benchmarks.models import Model
from eval.keys.calls import relative_error
from eval.methods.base import AttentionMethod
from eval.methods.folder import Folder
from eval.methods.peer import Peer
from eval.methods.registry import AVQ, EXACT, LIMIT, LINFUSION, PEERS, TOME, timed_method
from eval.methods.running import avq_in, layers_run_by
from eval.methods.tome import merged_tokens

SDPA = F.scaled_dot_product_attention
SHARPNESS = 2  # factor on untrained queries and keys, for a logit spread of about 1
# Untrained modulations almost switch blocks off; this lets the blocks affect the output.
MODULATIONS = ("linear.bias", "scale_shift_table")
# As in the guides: a UNet in CUDA graphs, and a transformer block by block.
COMPILE_UNET: Mapping[str, Any] = {"mode": "reduce-overhead", "dynamic": False}
COMPILE_BLOCK: Mapping[str, Any] = {}
SETTLING_CALLS = 17  # a route reads the columns of the first 16 calls, and measures
BISECTIONS = 10


class NetworkBench:
    """A network with random weights, and the methods that its attention can switch to.

    Runs in half precision on CUDA, elsewhere in float32.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model, self.device = model, device
        self.cuda = device.type == "cuda"
        half = torch.float16 if model.is_unet else torch.bfloat16
        self.dtype = half if self.cuda else torch.float32
        self.network = model.build(device).eval().requires_grad_(False)
        self._sharpen()
        # One by one: diffusers' `to` keeps some in float32.
        for parameter in self.network.parameters():
            parameter.data = parameter.to(self.dtype)
        self.exact_network = deepcopy(self.network)
        self.generator = torch.Generator(device).manual_seed(0)
        self._fixed: dict[str, Any] = {}
        self._names: tuple[str, ...] = ()
        self._thresholds: dict[torch.Size, tuple[dict[str, float], dict[str, Any]]] = {}

    def inputs(self, size: int) -> tuple[Tensor, ...]:
        """Random inputs for `predict` at this size, which becomes the one that it runs at."""
        self.generator.manual_seed(0)
        config, batch = self.network.config, self.model.batch
        tensors, self._fixed = self.model.inputs(config, size, batch, self._normal)
        self._names = tuple(tensors)
        return tuple(tensors.values())

    def predict(self, *inputs: Tensor) -> Tensor:
        """The network's output for these inputs."""
        return self._output(self.network, inputs)

    def predict_exact(self, *inputs: Tensor) -> Tensor:
        """The output of a copy of the network that keeps its attention, whatever replaces SDPA."""
        with patch.object(F, "scaled_dot_product_attention", SDPA):
            return self._output(self.exact_network, inputs)

    def _output(self, network: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        named = dict(zip(self._names, inputs, strict=True))
        first = named.pop(self._names[0])  # positional, where ToMe's hooks look for it
        return network(first, **named, **self._fixed, return_dict=False)[0]

    def cannot_run(self, name: str) -> str | None:
        """Why this machine cannot time the method; None if it can."""
        kind = name if name == AVQ else timed_method(name).kind
        if kind in PEERS and not self.cuda:
            return f"{name} needs a CUDA device"
        return "tomesd is not installed" if kind == TOME and not find_spec("tomesd") else None

    @contextmanager
    def method(self, name: str, inputs: Sequence[Tensor]) -> Iterator[dict[str, Any]]:
        """Run attention with a method inside the `with` block, which gets facts about its row."""
        if name == AVQ:
            thresholds, facts = self.solve_columns(inputs)
            apply_avq(self.network)
            if thresholds:
                set_threshold(self.network, thresholds)
        elif (method := timed_method(name)).kind == Folder.kind:
            codebooks = AVQCodebooks.from_pretrained(method.source).to(self.device)
            apply_avq(self.network, codebooks, route="always")
        elif method.config is not None:
            levels = method.config.levels if self.model.is_unet else (0,)
            apply_avq(self.network, method.config.changed(levels=levels), route="always")
        else:
            with self._attention(method):
                yield {}
            return
        try:
            for _ in range(SETTLING_CALLS):
                self.predict(*inputs)
            yield facts if name == AVQ else {}
        finally:
            remove_avq(self.network)

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Compile the network inside the `with` block, as the guides do."""
        is_unet = self.model.is_unet
        parts = [self.network] if is_unet else [*self._blocks()]
        for part in parts:
            part.compile(**(COMPILE_UNET if is_unet else COMPILE_BLOCK))
        try:
            yield
        finally:
            for part in parts:
                part._compiled_call_impl = None

    def layers_run(self, *, is_compiled: bool) -> dict[str, Any]:
        """How many layers run AVQ, and how many AVQ can serve."""
        states = [x for x in layer_states(self.network) if x.last_call in ("AVQ", "faster")]
        return {"layers": [sum(_runs_avq(x, is_compiled=is_compiled) for x in states), len(states)]}

    @contextmanager
    def layers_of_compiled(self) -> Iterator[None]:
        """Run AVQ in the layers inside the `with` block that compiled code runs it in."""
        with ExitStack() as stack:
            for state in layer_states(self.network):
                route = "always" if _runs_avq(state, is_compiled=True) else sys.maxsize
                stack.enter_context(patch.object(state.route, "route", route))
            yield

    @torch.no_grad()
    def error(self, inputs: Sequence[Tensor]) -> dict[str, float]:
        """The largest relative error of AVQ to its oracle, in one pass; nothing without AVQ.

        The oracle computes the first call of each shape again, with the same inputs and options,
        also in layers that the route keeps exact.
        """
        errors: dict[tuple[torch.Size, torch.Size], float] = {}
        timed, oracle = backends(self.device)

        def checked(tensors: Tensors, spec: Spec, backend: str) -> Attended:
            found = attend(tensors, spec, timed)
            shapes = tensors.query.shape, tensors.key.shape
            if shapes not in errors:
                expected = attend(tensors, spec, oracle)
                errors[shapes] = relative_error(found.output, expected.output)
            return found

        with ExitStack() as stack:
            for state in layer_states(self.network):
                stack.enter_context(patch.object(state, "function", checked))
                stack.enter_context(patch.object(state.route, "route", "always"))
            self.predict(*inputs)
        # Python's max drops NaN.
        return {"error": torch.tensor([*errors.values()]).max().item()} if errors else {}

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)

    def _sharpen(self) -> None:
        for name, parameter in self.network.named_parameters():
            if name.endswith(("attn1.to_q.weight", "attn1.to_k.weight", "norm_q.weight")):
                parameter.mul_(SHARPNESS)
            elif name.endswith(MODULATIONS) and not self.model.is_unet:
                parameter.add_(1)

    def solve_columns(self, inputs: Sequence[Tensor]) -> tuple[dict[str, float], dict[str, Any]]:
        """By layer, its level's threshold, with which the level has the model's columns; and the
        columns that it then has."""
        key = inputs[0].shape
        if key in self._thresholds:
            return self._thresholds[key]
        with avq_in(self.network, None):
            self.predict(*inputs)
            served = [
                layer
                for layer in select_layers(self.network)
                if layer.avq_state is not None and layer.avq_state.last_call == "AVQ"
            ]
            level_layers = groupby(sorted(served, key=attrgetter("level")), attrgetter("level"))
            layers = {level: [*found] for level, found in level_layers}
            powers = dict.fromkeys(layers, (-9.0, 1.0))
            for _ in range(BISECTIONS if served else 0):
                set_threshold(self.network, _thresholds(layers, powers))
                self.predict(*inputs)
                for level, (low, high) in powers.items():
                    middle = (low + high) / 2
                    is_over = mean(map(_columns, layers[level])) > self.model.columns[level]
                    powers[level] = (middle, high) if is_over else (low, middle)
            found = {level: [*map(_columns, own)] for level, own in layers.items()}
        columns = mean(x for level in found.values() for x in level) if found else None
        facts = {"columns": columns, "by_level": {x: mean(own) for x, own in found.items()}}
        thresholds = _thresholds(layers, powers)
        self._thresholds[key] = thresholds, facts
        return thresholds, facts

    def _attention(self, method: AttentionMethod) -> AbstractContextManager[None]:
        """Run attention with a method other than AVQ."""
        if method.source == EXACT:
            return nullcontext()
        if method.source == LIMIT and not self.model.is_unet:
            return self_attention_by(pass_on)
        if method.source == LIMIT:
            layers = [x for x in select_layers(self.network) if x.level in self.model.columns]
            return layers_run_by(self.network, {x.name: LimitProcessor() for x in layers})
        if method.source == LINFUSION:
            return layers_run_by(self.network, self._linfusion())
        if method.source == TOME:
            return merged_tokens(self.network, method.levels, method.setting)
        return self_attention_by(torch.compiler.disable(partial(by_peer, method)))

    def _linfusion(self) -> dict[str, LinFusionProcessor]:
        """LinFusion with random weights in each self-attention layer."""
        torch.manual_seed(0)
        processors = {}
        for layer in select_layers(self.network):
            with self.device:
                processor = LinFusionProcessor(layer.attn.query_dim)
            for phi in (processor.phi_q, processor.phi_k):
                phi[-1].reset_parameters()  # initialized to zero, which would hide a missing phi
            processors[layer.name] = processor.to(self.dtype).requires_grad_(False)
        return processors

    def _blocks(self) -> Iterator[nn.Module]:
        for part in self.network.children():
            if isinstance(part, nn.ModuleList):
                yield from part


def layer_states(network: nn.Module) -> list[Any]:
    """AVQ's states of a network's layers."""
    return [state for layer in select_layers(network) if (state := layer.avq_state) is not None]


def _thresholds(
    layers: Mapping[int, Sequence[Any]], powers: Mapping[int, tuple[float, float]]
) -> dict[str, float]:
    """The thresholds in the middle of each level's powers of ten, by layer."""
    return {
        layer.name: 10.0 ** mean(powers[level]) for level, own in layers.items() for layer in own
    }


def _columns(layer: Any) -> float:
    """Of the layer's last call."""
    return mean_columns(layer.avq_state.shown)


def _runs_avq(state: Any, *, is_compiled: bool) -> bool:
    """Whether a layer that AVQ can serve runs it, by what its last eager calls learned."""
    if not is_compiled or not state.route.break_even:
        return state.last_call == "AVQ"
    *_, known = state.route.break_even.values()
    return len(state.last_order) >= known.compiled


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
