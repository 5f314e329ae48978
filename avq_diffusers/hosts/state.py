"""What one self-attention layer needs to run AVQ, and what it did so far."""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import Tensor, nn

from avq_diffusers.attention.api import attention_and_backend
from avq_diffusers.attention.limits import faults
from avq_diffusers.attention.orders import joint_order, query_order
from avq_diffusers.config import MOST_CODEWORDS_PER_KEY, AVQConfig, Sizes
from avq_diffusers.hosts.interception import backend_interception, score_interception
from avq_diffusers.hosts.layer_weights import LayerWeights
from avq_diffusers.hosts.layers import LayerSpec, Replaced
from avq_diffusers.hosts.per_thread import PerThread
from avq_diffusers.hosts.routing import LayerRoute, Trial, Workload, next_power_of_two

AVQ_CALL = "AVQ"
OUTSIDE = "outside a call of the model"
DISABLED, SCHEDULED = "disabled", "scheduled"
NO_BACKWARD = -1
REST = -1  # of a layer's sequence is beside the grid
_DISABLING = threading.Lock()

# Height and width, after the frames of a video; or why there is no single grid.
Grid: TypeAlias = tuple[int, ...] | str
# Takes the arguments of `avq_attention`; returns the output and the name of what computed it.
AttentionFunction: TypeAlias = Callable[..., tuple[Tensor, str]]


class Tokens(NamedTuple):
    """The tokens of a call.

    Attributes:
        hidden_states: batch first, on the device of the call.
        dtype: the model's own; autocast does not change it.
        grid: of the image or video.
        beside: by modules of the model, how many tokens attend beside the grid's, or `REST`.
        beside_first: whether these come before the grid's.
    """

    hidden_states: Tensor
    dtype: torch.dtype
    grid: Grid
    beside: Mapping[str, int] = {}
    beside_first: bool = False


class Call(NamedTuple):
    """How a layer runs in one call of its model.

    Attributes:
        query_order: the query order (N,) of the grid; None without a grid.
        sizes: of AVQ.
        exact_because: why the layer runs exact attention whatever its tokens, None if nothing was
            switched.
        backward: the backward pass that recomputes the call; `NO_BACKWARD` outside.
        num_beside: how many other tokens, such as text, attend with those of the grid, or `REST`.
        beside_first: whether these come before the grid's.
    """

    query_order: Tensor | None
    sizes: Sizes
    exact_because: str | None
    backward: int
    num_beside: int = 0
    beside_first: bool = False


class LayerState(Replaced):
    """The AVQ of one layer.

    Args:
        layer: name, level and head shape.
        config: sizes and tiles of this layer, its overrides resolved.
        weights: codebook, key norm and projection changes.
        backend, route: as for `apply_avq`.

    Attributes:
        previous: the layer's attention before AVQ, which serves the calls that AVQ does not.
        sizes: of the next call; None runs exact attention.
        allocation: that the sizes are part of; None if no tolerance chose them.
        enabled: whether the next call runs AVQ; False inside `avq_disabled`.
        call: how the layer runs in the present call of the model; None outside.
        last_order: the query order of the last grid.
        calls: how many calls of each kind there were since sizes were set, by "AVQ" or the reason
            for exact attention. Calls in compiled code are not counted.
        last_call: the kind of the last one.
        last_backend: that ran the last AVQ call.
        function: computes attention in measurements and trainings; None is AVQ.
        usual_backend: of diffusers when AVQ was applied; None for models outside diffusers.
    """

    def __init__(
        self,
        layer: LayerSpec,
        config: AVQConfig,
        weights: LayerWeights,
        backend: str,
        route: str | int,
    ) -> None:
        super().__init__(None)
        self.config = config
        self.weights = weights
        self.route = LayerRoute(route)
        self.backend = backend
        self.num_heads = layer.num_heads
        self.head_dim = layer.head_dim
        self.sizes: PerThread[Sizes | None] = PerThread(config.sizes)
        self.allocation: Any = None
        self.enabled = True
        self.num_disabling = 0  # open blocks of `avq_disabled`
        self.call: PerThread[Call | None] = PerThread(None, shared=False)
        self.last_order: Tensor | None = None
        self.calls: Counter[str] = Counter()
        self.last_call: str | None = None
        self.last_backend: str | None = None
        self.function: AttentionFunction | None = None
        self.usual_backend: AttentionBackendName | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy never sees the end of a block of `avq_disabled` that is open here.
        return {**self.__dict__, "enabled": True, "num_disabling": 0}

    def set_sizes(self, sizes: Sizes | None) -> None:
        """Run other sizes, or exact attention, in all threads."""
        # A new one: threads hold values of the earlier sizes.
        self.sizes = PerThread(sizes)
        self.calls, self.last_call = Counter(), None
        self.allocation = self.route.chosen_at = None

    def note_allocation(self, allocation: Any, num_tokens: int) -> None:
        """Note what chose the present sizes, and at how many tokens they were measured."""
        self.allocation = allocation
        self.route.chosen_at = num_tokens

    def enter(self, tokens: Tokens, exact_because: str | None, num_beside: int = 0) -> None:
        """Begin a call for the tokens of a grid, beside which `num_beside` others attend."""
        hidden_states, dtype, grid, _, beside_first = tokens
        device, order = hidden_states.device, None
        if isinstance(grid, str):
            exact_because = exact_because or grid
        else:
            # A tensor, not (h, w): torch.compile would guard every block on the two integers.
            *frames, height, width = grid
            order = query_order(height, width, self.config.query_order, device, frames=prod(frames))
            self.last_order = order
        sizes = self.sizes.get()
        if sizes is None:
            exact_because = SCHEDULED
        if not self.enabled:
            exact_because = DISABLED
        chosen = sizes or self.config.sizes
        call = Call(order, chosen, exact_because, _backward(), num_beside, beside_first)
        self.call.set(call)
        self.weights.move_to(device, dtype)
        if sizes is not None and not torch.compiler.is_compiling():
            workload = self.workload(hidden_states, chosen)
            self.route.learn(workload, device, self._trial(call, int(hidden_states.shape[0])))

    def enter_without_grid(self, exact_because: str) -> None:
        """Begin a call whose grid is not known yet, or not at all."""
        self.call.set(Call(None, self.config.sizes, exact_because, _backward()))

    def leave(self) -> None:
        """End the call."""
        self.call.set(None)

    @contextmanager
    def recomputing(self, call: Call | None) -> Iterator[None]:
        """Run the layer as in an earlier call."""
        present = self.call.get()
        if call is None:
            call = Call(None, self.config.sizes, OUTSIDE, NO_BACKWARD)
        self.call.set(call._replace(backward=_backward()))
        try:
            yield
        finally:
            self.call.set(present)

    def present_call(self) -> Call | None:
        """How the layer runs in this thread's call of the model; None outside.

        Raises:
            RuntimeError: a checkpoint recomputes the layer and does not know its call.
        """
        call = self.call.get()
        backward = _backward()
        if backward != NO_BACKWARD and (call is None or call.backward != backward):
            raise RuntimeError(
                "a layer with AVQ is recomputed with the call it ran in, but a checkpoint around "
                "the layer or its block does not keep that; use the model's own gradient "
                "checkpointing, which does."
            )
        return call

    def off_because(self) -> str | None:
        """Why no call of the layer can run AVQ at this moment; None if one can."""
        call = self.present_call()
        if call is None:
            return OUTSIDE
        return call.exact_because or self.interception()

    def interception(self) -> str | None:
        """What acts on the scores of exact attention, and would miss AVQ; None if nothing does."""
        return score_interception() or backend_interception(self.usual_backend)

    @property
    def num_beside(self) -> int:
        """How many other tokens attend with those of the grid."""
        call = self.call.get()
        return 0 if call is None else call.num_beside

    def exact_because(
        self, num_tokens: int, hidden_states: Tensor, own: Iterable[tuple[Any, str]] = ()
    ) -> str | None:
        """Why a call of the layer runs exact attention; None if it runs AVQ.

        Args:
            num_tokens: of the grid; fewer are left if some were merged.
            hidden_states: batch first, in the dtype of the attention.
            own: reasons of the kind of model, each behind whether it holds.
        """
        reason = self.off_because()
        if reason is not None:
            return reason
        for holds, why in own:
            if holds:
                return why
        call = self.call.get()
        order = None if call is None else call.query_order
        if order is None or order.shape[0] != num_tokens:
            return "tokens are not the grid"
        return self.routed_because(num_tokens, hidden_states)

    def routed_because(self, num_tokens: int, hidden_states: Tensor) -> str | None:
        """Why exact attention is the better one for that many tokens of a grid; None if AVQ is."""
        route, call = self.route, self.call.get()
        if self.backend == "auto" and (hidden_states.device,) in faults:
            return "the kernels are wrong on this GPU"
        if num_tokens < route.few_tokens:
            return "few tokens"
        if call is not None and not self._has_keys_for(call.sizes, num_tokens):
            return f"over {MOST_CODEWORDS_PER_KEY} codewords for each token"
        if (
            call is not None
            and route.chosen_at is None
            and route.break_even
            and num_tokens < route.least_tokens(self.workload(hidden_states, call.sizes))
        ):
            return "faster"
        return None

    def _trial(self, call: Call, batch: int) -> Trial | None:
        """What measures the present call; None if it may not run AVQ, or other than usual."""
        is_usual = self.function is None and self.backend == "auto"
        if not is_usual or call.exact_because or call.query_order is None:
            return None
        num_tokens = call.query_order.shape[0]
        if not self._has_keys_for(call.sizes, num_tokens):
            return None
        # Kernels are the same for one token and for all that a layer's sequence may have.
        num_beside = 1 if call.num_beside == REST else call.num_beside
        shape = batch, num_tokens + num_beside, self.num_heads, self.head_dim
        return Trial(self.attend, shape, num_tokens)

    def _has_keys_for(self, sizes: Sizes, num_tokens: int) -> bool:
        """Whether so many tokens are enough for the codewords that are taken from their keys."""
        is_own = self.function is None and self.weights.codebook is None
        return not is_own or num_tokens >= sizes.least_keys

    def workload(self, hidden_states: Tensor, sizes: Sizes) -> Workload:
        """What decides between AVQ and exact attention, for this batch, dtype and sizes."""
        device = hidden_states.device.type
        is_autocast = torch.is_autocast_enabled(device)
        return Workload(
            batch_heads=next_power_of_two(int(hidden_states.shape[0]) * self.num_heads),
            head_dim=self.head_dim,
            sizes=sizes,
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
        scale: float | None = None,
    ) -> Tensor:
        """AVQ attention of the present call, as `avq_attention`.

        `query` has the grid's N tokens, or N + T with those of a text; the output is a view of
        memory (B, N, H, D) or (B, N + T, H, D).
        """
        options, call = self.options(), self.call.get()
        assert call is not None
        assert call.query_order is not None
        attend = attention_and_backend if self.function is None else self.function
        output, backend = attend(
            query,
            key,
            value,
            self.weights.codebook,
            sink_key=sink_key,
            sink_value=sink_value,
            scale=scale,
            **orders(call.query_order, query, key, text_first=call.beside_first),
            **options,
        )
        if not torch.compiler.is_compiling():
            self.last_backend = backend
        return output

    def options(self) -> dict[str, Any]:
        """The arguments of `avq_attention` in the present call that are no tensors.

        Raises:
            NotImplementedError: ONNX exports the model.
        """
        if torch.onnx.is_in_onnx_export():
            raise NotImplementedError(
                "ONNX has no operations for AVQ; call remove_avq(pipe) to export exact attention."
            )
        config, call = self.config, self.call.get()
        assert call is not None
        return {
            "num_parents": call.sizes.num_parents,
            "num_children": call.sizes.num_children,
            "num_refined": call.sizes.num_refined,
            "exact_keys": call.sizes.exact_keys,
            "codewords": config.codewords,
            "num_updates": config.num_updates,
            "query_tile": config.query_tile,
            "backend": self.backend,
        }

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
        """Note the kind of a call, unless it is compiled. An exported program cannot tell later."""
        if torch.compiler.is_exporting() and call not in (AVQ_CALL, DISABLED, SCHEDULED):
            warnings.warn(
                f"the exported program holds exact attention in place of AVQ: {call}.", stacklevel=2
            )
        if not torch.compiler.is_compiling():
            self.calls[call] += 1
            self.last_call = call


def orders(order: Tensor, query: Tensor, key: Tensor, *, text_first: bool) -> dict[str, Any]:
    """The orders of `avq_attention` for the keys of a grid, and queries of a text beside it.

    Args:
        order: (N,) of the grid.
        query: (B, H, N or N + T, D).
        key: (B, H, N, D).
        text_first: whether the text is before the grid.
    """
    queries, num_text = order, query.shape[2] - key.shape[2]
    if num_text:
        queries = joint_order(order, num_text, text_first=text_first)
    # Parts of a model may be on other devices than its input.
    return {"query_order": queries.to(query.device), "key_order": order.to(query.device)}


def with_sinks(
    key: Tensor, value: Tensor, *, sink_key: Tensor | None, sink_value: Tensor | None, **_: Any
) -> tuple[Tensor, Tensor]:
    """All keys and values that exact attention has, of the arguments of `avq_attention`."""
    if sink_key is None or sink_value is None:
        return key, value
    return torch.cat([key, sink_key], dim=2), torch.cat([value, sink_value], dim=2)


def as_attended(tokens: Tensor) -> Tensor:
    """Convert to the dtype that autocast gives to attention."""
    device = tokens.device.type
    if not torch.is_autocast_enabled(device):
        return tokens
    return tokens.to(torch.get_autocast_dtype(device))


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
