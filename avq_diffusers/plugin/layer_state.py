"""What one self-attention layer needs to run AVQ, and what it did so far."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from avq_diffusers.attention.api import attention_and_backend
from avq_diffusers.attention.orders import joint_order, query_order
from avq_diffusers.config import AVQConfig, Sizes
from avq_diffusers.plugin.codebooks import AVQCodebooks
from avq_diffusers.plugin.layer_weights import LayerWeights
from avq_diffusers.plugin.layers import LayerSpec, SelfAttentionLayer, select_layers, unet_of
from avq_diffusers.plugin.per_thread import PerThread
from avq_diffusers.plugin.routing import LayerRoute, Workload, next_power_of_two

AVQ_CALL = "AVQ"
NO_BACKWARD = -1
_DISABLING = threading.Lock()

# Codewords from the keys of each call, or stored ones.
AVQSource: TypeAlias = AVQConfig | AVQCodebooks


class Call(NamedTuple):
    """How a layer runs in one call of its UNet.

    Attributes:
        query_order: the query order (N,) of the grid.
        sizes: of AVQ.
        exact_because: why the layer runs exact attention whatever its tokens, None if nothing was
            switched.
        backward: the backward pass that recomputes the call; `NO_BACKWARD` outside.
    """

    query_order: Tensor | None
    sizes: Sizes
    exact_because: str | None
    backward: int


class LayerState:
    """The AVQ of one layer.

    Attributes:
        config: sizes and tiles of this layer.
        weights: codebook, key norm and projection changes.
        route: from how many tokens on AVQ runs.
        sizes: of the next call; None runs exact attention.
        errors: measured with the sizes of each part of the denoising; empty if they were not.
        enabled: whether the next call runs AVQ; False inside `avq_disabled`.
        call: how the layer runs in the present call.
        calls: how many calls of each kind there were so far, by "AVQ" or the reason for exact
            attention. Calls in compiled code are not counted.
        last_call: the kind of the last one.
        last_backend: that ran the last AVQ call.
        measuring: what attends in place of `attention_and_backend` while errors are measured; else
            None.
    """

    def __init__(self, layer: LayerSpec, source: AVQSource, backend: str, route: str | int) -> None:
        if isinstance(source, AVQConfig):
            self.config = source.for_layer(layer.name, layer.level)
            self.weights = LayerWeights()
        else:
            self.config = source.layer_config(layer.name)
            self.weights = source.layer_weights(layer.name)
        self.route = LayerRoute(route, layer.num_heads)
        self.backend = backend
        self.num_heads = layer.num_heads
        self.head_dim = layer.head_dim
        self.sizes: PerThread[Sizes | None] = PerThread(self.config.sizes)
        self.errors: tuple[float, ...] = ()
        self.enabled = True
        self.num_disabling = 0  # open blocks of `avq_disabled`
        self.call = PerThread(Call(None, self.config.sizes, None, NO_BACKWARD))
        self.calls: Counter[str] = Counter()
        self.last_call: str | None = None
        self.last_backend: str | None = None
        self.measuring: Callable[..., tuple[Tensor, str]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy never sees the end of a block of `avq_disabled` that is open here.
        return {**self.__dict__, "enabled": True, "num_disabling": 0}

    @property
    def num_refined(self) -> int:
        """The refined parents per query tile in this thread's next AVQ call."""
        return (self.sizes.get() or self.config.sizes).num_refined

    def set_sizes(self, sizes: Sizes | None) -> None:
        """Run other sizes, or exact attention, in all threads."""
        # A new one: threads hold values of the earlier sizes.
        self.sizes = PerThread(sizes)
        self.errors = ()
        self.route.chosen_at = None

    def note_measurement(self, errors: tuple[float, ...], num_tokens: int) -> None:
        """Note the errors of the present sizes, and at how many tokens they were chosen."""
        self.errors = errors
        self.route.chosen_at = num_tokens

    def enter(
        self,
        hidden_states: Tensor,
        grid: Sequence[int] | None,
        dtype: torch.dtype,
        exact_because: str | None,
    ) -> None:
        """Begin a call for the tokens of a grid, on the device of `hidden_states`.

        Args:
            hidden_states: of the transformer, batch first.
            grid: height and width of the grid, after the frames of a video; None without a grid.
            dtype: the model's own; autocast does not change it.
            exact_because: why the layer runs exact attention, such as what acts on its scores.
        """
        device = hidden_states.device
        order = None
        if grid is not None:
            # A tensor, not (h, w): torch.compile would guard every block on the two integers.
            *frames, height, width = grid
            order = query_order(height, width, self.config.query_order, device, frames=prod(frames))
        sizes = self.sizes.get()
        if sizes is None:
            exact_because = "scheduled"
        if not self.enabled:
            exact_because = "disabled"
        self.call.set(Call(order, sizes or self.config.sizes, exact_because, _backward()))
        self.weights.move_to(device, dtype)
        if sizes is not None and not torch.compiler.is_compiling():
            self.route.learn(self.workload(hidden_states), device, measure=True)

    @contextmanager
    def recomputing(self, call: Call) -> Iterator[None]:
        """Run the layer as in an earlier call."""
        present = self.call.get()
        self.call.set(call._replace(backward=_backward()))
        try:
            yield
        finally:
            self.call.set(present)

    def present_call(self) -> Call:
        """How the layer runs in this thread's call.

        Raises:
            RuntimeError: a checkpoint recomputes the layer and does not know its call.
        """
        call = self.call.get()
        if _backward() not in (NO_BACKWARD, call.backward):
            raise RuntimeError(
                "a layer with AVQ is recomputed with the call it ran in, but a checkpoint around "
                "the layer or its block does not keep that; use the model's own gradient "
                "checkpointing, which does."
            )
        return call

    def is_on_grid(self, hidden_states: Tensor) -> bool:
        """Whether the tokens (B, N, channels) are those of the grid, none of them merged."""
        order = self.present_call().query_order
        return order is not None and hidden_states.shape[1] == order.shape[0]

    def routed_because(self, num_tokens: int, hidden_states: Tensor) -> str | None:
        """Why exact attention is the better one for that many tokens; None if AVQ is.

        Args:
            num_tokens: of the grid.
            hidden_states: batch first, in the dtype of the attention.
        """
        route = self.route
        if num_tokens < route.few_tokens:
            return "few tokens"
        if (
            route.chosen_at is None
            and route.break_even
            and num_tokens < route.least_tokens(self.workload(hidden_states))
        ):
            return "faster"
        return None

    def workload(self, hidden_states: Tensor) -> Workload:
        """What decides between AVQ and exact attention, for this batch and dtype."""
        device = hidden_states.device.type
        is_autocast = torch.is_autocast_enabled(device)
        return Workload(
            batch_heads=next_power_of_two(int(hidden_states.shape[0]) * self.num_heads),
            head_dim=self.head_dim,
            sizes=self.call.get().sizes,
            query_tile=self.config.query_tile,
            dtype=torch.get_autocast_dtype(device) if is_autocast else hidden_states.dtype,
            num_updates=self.config.num_updates,
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sink_key: Tensor | None = None,
        sink_value: Tensor | None = None,
        text_first: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """AVQ attention of the present call, as `avq_attention`.

        Args:
            query: (B, H, N, D) of the grid's N tokens, or (B, H, N + T, D) with those of a text.
            key, value: (B, H, N, D) of the grid's.
            sink_key, sink_value: (B, H, T, D), or None.
            text_first: whether the text's queries come before those of the grid.
            scale: factor on the logits; None is 1 / sqrt(D).

        Returns:
            As `query`, a view of (B, N, H, D) or (B, N + T, H, D) memory.

        Raises:
            NotImplementedError: ONNX exports the model.
        """
        if torch.onnx.is_in_onnx_export():
            raise NotImplementedError(
                "ONNX has no operations for AVQ; call remove_avq(pipe) to export exact attention."
            )
        config, call = self.config, self.present_call()
        queries = keys = call.query_order
        if queries is not None and query.shape[2] > key.shape[2]:
            num_text = query.shape[2] - key.shape[2]
            queries = joint_order(queries, num_text, text_first=text_first)
        output, backend = (self.measuring or attention_and_backend)(
            query,
            key,
            value,
            self.weights.codebook,
            num_parents=call.sizes.num_parents,
            num_children=call.sizes.num_children,
            num_refined=call.sizes.num_refined,
            codewords=config.codewords,
            num_updates=config.num_updates,
            exact_keys=call.sizes.exact_keys,
            sink_key=sink_key,
            sink_value=sink_value,
            query_tile=config.query_tile,
            # Parts of a model may be on other devices than its input.
            query_order=None if queries is None else queries.to(query.device),
            key_order=None if keys is None else keys.to(query.device),
            importance_tile=config.importance_tile,
            scale=scale,
            backend=self.backend,
        )
        if not torch.compiler.is_compiling():
            self.last_backend = backend
        return output

    def refuse_replica(self, module: nn.Module) -> None:
        """Refuse a copy of `nn.DataParallel` of the module that begins the layer's calls.

        Raises:
            NotImplementedError: the layer has a codebook or changes of projections.
        """
        if getattr(module, "_is_replica", False) and self.weights.are_stored:
            raise NotImplementedError(
                "nn.DataParallel runs one layer on several devices at once, but what codebooks "
                "hold of it is on one; use DistributedDataParallel, or AVQ without codebooks."
            )

    def count(self, call: str) -> None:
        self.calls[call] += 1
        self.last_call = call


def refuse_without_codebooks(
    source: AVQSource, maker: str = "calibrate(pipe, prompts, config)"
) -> None:
    """Refuse a configuration of what only codebooks hold.

    Args:
        source: of a layer's codewords.
        maker: the call that makes codebooks.

    Raises:
        ValueError: `source` is a configuration of stored codewords or of a key norm.
    """
    if not isinstance(source, AVQConfig):
        return
    for name, needs in (
        ('codewords="stored"', source.codewords == "stored"),
        ("key_norm", source.key_norm),
    ):
        if needs:
            raise ValueError(f"{name} needs codebooks, which {maker} makes.")


def check_source(source: AVQSource | None) -> None:
    """Refuse what AVQ cannot take its codewords from.

    Raises:
        TypeError: `source` is neither codebooks, nor a configuration, nor None.
    """
    if not isinstance(source, AVQCodebooks | AVQConfig | None):
        raise TypeError(
            f"expected AVQCodebooks, an AVQConfig or nothing, but got {type(source).__name__}."
        )


def default_source(unet: nn.Module) -> AVQConfig:
    """The default sizes at the finest level of a UNet that has self-attention."""
    return AVQConfig(levels=(min((layer.level for layer in select_layers(unet)), default=0),))


def states_of(pipe: DiffusionPipeline | nn.Module) -> dict[SelfAttentionLayer, LayerState]:
    """The layers that AVQ was applied to."""
    return {layer: layer.avq_state for layer in select_layers(unet_of(pipe)) if layer.avq_state}


def applied_states(pipe: DiffusionPipeline | nn.Module) -> dict[SelfAttentionLayer, LayerState]:
    """`states_of`, at least one.

    Raises:
        TypeError: `pipe` has no UNet.
        ValueError: it has no AVQ layer.
    """
    states = states_of(pipe)
    if not states:
        raise ValueError("this UNet has no AVQ layer; call apply_avq(pipe) first.")
    return states


@contextmanager
def disabled(states: Iterable[LayerState]) -> Iterator[None]:
    """Run exact attention in these layers inside the `with` block."""
    states = list(states)
    _disable(states, 1)
    try:
        yield
    finally:
        _disable(states, -1)


def _disable(states: Iterable[LayerState], change: int) -> None:
    """Open or close a block of `disabled`."""
    with _DISABLING:
        for state in states:
            state.num_disabling += change
            state.enabled = state.num_disabling == 0


def _backward() -> int:
    """Autograd's number of the backward pass that this thread runs, `NO_BACKWARD` outside."""
    return NO_BACKWARD if torch.compiler.is_compiling() else torch._C._current_graph_task_id()
