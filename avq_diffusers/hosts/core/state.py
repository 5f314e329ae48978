"""What one self-attention layer needs to run AVQ, and what it has done so far."""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import Tensor, nn

from avq_diffusers.attention.api import attend
from avq_diffusers.attention.limits import faults
from avq_diffusers.attention.orders import joint_order, query_order
from avq_diffusers.attention.tensors import Attended, Tensors
from avq_diffusers.config import MOST_CODEWORDS_PER_KEY, AVQConfig, Spec
from avq_diffusers.hosts.core.columns import LAST_READING, MOST_KINDS, Needed, rounded
from avq_diffusers.hosts.core.interception import backend_interception, score_interception
from avq_diffusers.hosts.core.layers import LayerSpec
from avq_diffusers.hosts.core.ranks import Joined, Ranks, joined_order
from avq_diffusers.hosts.core.routing import (
    NEVER_FASTER,
    BreakEven,
    LayerRoute,
    Trial,
    Workload,
    is_recorded,
    next_power_of_two,
)
from avq_diffusers.hosts.core.timesteps import NUM_TRAIN_TIMESTEPS
from avq_diffusers.hosts.core.weights import LayerWeights

AVQ_CALL = "AVQ"
OUTSIDE = "outside a call of the model"
DISABLED, SCHEDULED = "disabled", "scheduled"
NO_BACKWARD = -1
REST = -1  # everything else in a layer's sequence is beside the grid
_DISABLING, _REMEMBERING = threading.Lock(), threading.Lock()

Value = TypeVar("Value")
# Height and width, preceded by frames for videos; or why there is no single grid.
Grid: TypeAlias = tuple[int, ...] | str
# Computes a call. `attend` is one.
AttentionFunction: TypeAlias = Callable[[Tensors, Spec, str], Attended]
# Training timestep from which options hold, downwards -> the options; None is exact attention.
SpecSchedule: TypeAlias = Mapping[int, Spec | None]


class Tokens(NamedTuple):
    """The tokens of a call.

    Attributes:
        hidden_states: batch first, on the device of the call.
        dtype: the model's own, whatever autocast says.
        grid: the grid of the image or video.
        beside: number of tokens beside the grid, or `REST`, by module of the model, or by the end
            of a layer's name; the first that fits counts.
        beside_first: whether these come before the grid.
        ranks: the ranks that run the model together; None if it runs in one process.
    """

    hidden_states: Tensor
    dtype: torch.dtype
    grid: Grid
    beside: Mapping[str, int] = {}
    beside_first: bool = False
    ranks: Ranks | None = None


class Call(NamedTuple):
    """How a layer runs in one call of its model.

    Attributes:
        query_order: the query order (N,) of the grid; None without a grid.
        spec: AVQ's options.
        exact_because: why the layer runs exact attention whatever its tokens; None if it need not.
        backward: the backward pass that recomputes the call; `NO_BACKWARD` outside.
        num_beside: number of other tokens beside the grid, such as text, or `REST`.
        beside_first: whether these come before the grid.
        needed: the columns that such calls need; None without a threshold, or in compiled code.
        break_even: the numbers of tokens from which AVQ is faster; None if AVQ runs whatever they
            are.
        ranks: the ranks that run the model together; None if it runs in one process.
        joined: the order of the tokens in attention, if it is not that of one process.
    """

    query_order: Tensor | None
    spec: Spec
    exact_because: str | None
    backward: int
    num_beside: int = 0
    beside_first: bool = False
    needed: Needed | None = None
    break_even: BreakEven | None = None
    ranks: Ranks | None = None
    joined: Joined | None = None


class PerThread(Generic[Value]):
    """A value that each thread sets for itself.

    Compiled code reads the value that any thread set last.

    Args:
        value: initial value.
        shared: whether threads and copies that have not set a value read the one set last; if
            False, they read the initial one.
    """

    def __init__(self, value: Value, *, shared: bool = True) -> None:
        self.first = self.last = value
        self.shared = shared
        self.local = _ThreadLocal()

    def set(self, value: Value) -> None:
        self.last = value
        if not torch.compiler.is_compiling():
            self.local.value = value

    def get(self) -> Value:
        if torch.compiler.is_compiling():
            return self.last
        return getattr(self.local, "value", self.last if self.shared else self.first)


class _ThreadLocal(threading.local):
    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _ThreadLocal, ()


class LayerState:
    """The AVQ of one layer.

    Args:
        layer: name, level and head shape.
        config: the configuration of this layer, overrides resolved.
        weights: codebook, key norm and projection changes.
        backend, route: as in `apply_avq`.

    Attributes:
        previous: the layer's attention before AVQ, for calls that AVQ does not serve.
        schedule: the options by timestep, of which most layers have one.
        spec: options of the next call; None runs exact attention.
        allocation: the allocation that the options belong to; None if no tolerance chose them.
        enabled: whether the next call runs AVQ; False inside `avq_disabled`.
        call: how the layer runs in the current call of the model; None outside.
        last_order: the query order of the last grid.
        calls: number of calls since options were set, by "AVQ" or the reason for exact attention.
            Calls in compiled code are not counted.
        last_call: the kind of the last call.
        last_backend: the backend of the last AVQ call.
        shown: `Attended.shown` of the last AVQ call outside compiled code and CUDA graphs.
        needed: the columns that the last call with a threshold needed.
        kinds: those of the last kinds of calls, by options and number of tokens.
        settled: what decided the last call, None if the next one may run otherwise, and the call.
        function: computes attention in measurements and training; None is AVQ.
        bypassed_by: the processor class that computed the last call's attention out of AVQ's sight;
            None if none did.
        usual_backend: diffusers' backend when AVQ was applied; None for models outside diffusers.
    """

    def __init__(
        self,
        layer: LayerSpec,
        config: AVQConfig,
        weights: LayerWeights,
        backend: str,
        route: str | int,
    ) -> None:
        self.previous: Any = None
        self.config = config
        self.weights = weights
        self.route = LayerRoute(route)
        self.backend = backend
        self.num_heads = layer.num_heads
        self.head_dim = layer.head_dim
        self.schedule: SpecSchedule = {NUM_TRAIN_TIMESTEPS: config.spec}
        self.spec: PerThread[Spec | None] = PerThread(config.spec)
        self.allocation: Any = None
        self.enabled = True
        self.num_disabling = 0  # open blocks of `avq_disabled`
        self.call: PerThread[Call | None] = PerThread(None, shared=False)
        self.last_order: Tensor | None = None
        self.calls: Counter[str] = Counter()
        self.last_call: str | None = None
        self.last_backend: str | None = None
        self.shown: Tensor | None = None
        self.needed = Needed()
        self.kinds: dict[tuple[Spec, int], Needed] = {}
        self.settled: tuple[tuple[Any, ...] | None, Call | None] = None, None
        self.function: AttentionFunction | None = None
        self.bypassed_by: type | None = None
        self.usual_backend: AttentionBackendName | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy never sees the end of an `avq_disabled` block that is open here.
        return {**self.__dict__, "enabled": True, "num_disabling": 0}

    def set_schedule(self, schedule: SpecSchedule) -> None:
        """Set other options, or exact attention, in all threads."""
        self.schedule = schedule
        # A new object: threads hold values of the old one.
        self.spec = PerThread(schedule[NUM_TRAIN_TIMESTEPS])
        self.calls, self.last_call = Counter(), None
        self.shown, self.needed, self.kinds, self.settled = None, Needed(), {}, (None, None)
        self.allocation = self.route.chosen_at = None

    def note_allocation(self, allocation: Any, num_tokens: int) -> None:
        """Record what chose the current options, and at how many tokens they were measured."""
        self.allocation = allocation
        self.route.chosen_at = num_tokens

    def enter(self, tokens: Tokens, exact_because: str | None, num_beside: int = 0) -> None:
        """Begin a call on a grid's tokens, with `num_beside` others beside them."""
        if isinstance(tokens.grid, str):
            exact_because = exact_because or tokens.grid
        spec = self.spec.get()
        if spec is None:
            exact_because = SCHEDULED
        if not self.enabled:
            exact_because = DISABLED
        hidden_states, *others = tokens
        device = hidden_states.device
        if self.weights.are_stored:
            self.weights.move_to(device, tokens.dtype)
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            self.call.set(self._begun(tokens, spec, exact_because, num_beside))
            return
        setting = device, _autocast_dtype(device.type) or hidden_states.dtype, _backward()
        facts = hidden_states.shape, *setting, *others, spec, exact_because, self.route.route
        known, call = self.settled  # once: other threads may replace it
        if known != facts:
            call = self._begun(tokens, spec, exact_because, num_beside)
            self.settled = (facts, call) if self._is_settled(call, device) else (None, None)
        self.call.set(call)

    def _begun(
        self, tokens: Tokens, spec: Spec | None, exact_because: str | None, num_beside: int
    ) -> Call:
        """How the layer runs on these tokens."""
        hidden_states, _, grid, _, beside_first, ranks = tokens
        device, order, joined = hidden_states.device, None, None
        if not isinstance(grid, str):
            # A tensor, not (h, w): torch.compile would guard each block on the two integers.
            self.last_order = order = self._order(grid, device)
            # All tokens of a packed sequence (`REST`) are one tensor, whose shards are in order.
            if ranks is not None and ranks.has_shards and num_beside > 0:
                sizes = num_beside, prod(grid)
                joined = joined_order(*sizes, beside_first, ranks.degree, device)
        call = Call(
            order,
            spec or self.config.spec,
            exact_because,
            _backward(),
            num_beside,
            beside_first,
            ranks=ranks,
            joined=joined,
        )
        if exact_because is not None or not self.route.is_open(device):
            return call
        if not torch.compiler.is_compiling():
            call = call._replace(needed=self._needed_in(call))
        elif ranks is None:
            self._measure_while_tracing(call, tokens)
        return call._replace(break_even=self._break_even(call, hidden_states))

    def _is_settled(self, call: Call, device: torch.device) -> bool:
        """Whether a call with the same facts would be decided the same."""
        if call.ranks is not None:
            return False
        if call.exact_because is not None or not self.route.is_open(device):
            return True
        if call.break_even is None or call.query_order is None:
            return False
        is_read = call.needed is None or call.needed.num_read >= LAST_READING
        return is_read and not call.break_even.unknown(call.query_order.shape[0])

    def _order(self, grid: tuple[int, ...], device: torch.device) -> Tensor:
        *frames, height, width = grid
        return query_order(height, width, self.config.query_order, device, frames=prod(frames))

    def enter_without_grid(self, exact_because: str) -> None:
        """Begin a call whose grid is unknown, or not yet known."""
        self.call.set(Call(None, self.config.spec, exact_because, _backward()))

    def leave(self) -> None:
        """End the call."""
        self.call.set(None)

    @contextmanager
    def recomputing(self, call: Call | None) -> Iterator[None]:
        """Run the layer as in an earlier call."""
        present = self.call.get()
        if call is None:
            call = Call(None, self.config.spec, OUTSIDE, NO_BACKWARD)
        self.call.set(call._replace(backward=_backward()))
        try:
            yield
        finally:
            self.call.set(present)

    def present_call(self) -> Call | None:
        """How the layer runs in this thread's call of the model; None outside."""
        call = self.call.get()
        backward = _backward()
        if backward != NO_BACKWARD and (call is None or call.backward != backward):
            raise RuntimeError(
                "a layer with AVQ must be recomputed with the call it ran in, which a checkpoint "
                "around the layer or its block does not keep; use the model's own gradient "
                "checkpointing, which does."
            )
        return call

    def interception(self) -> str | None:
        """What acts on attention scores and would bypass AVQ; None if nothing does."""
        return score_interception() or backend_interception(self.usual_backend)

    @property
    def num_beside(self) -> int:
        """Number of other tokens beside the grid."""
        call = self.call.get()
        return 0 if call is None else call.num_beside

    def exact_because(
        self, num_tokens: int, hidden_states: Tensor, reasons: Iterable[tuple[Any, str]] = ()
    ) -> str | None:
        """Why a call of the layer runs exact attention; None if it runs AVQ.

        Args:
            num_tokens: tokens in the call; fewer than the grid's if some were merged.
            hidden_states: batch first, in the dtype of the attention.
            reasons: reasons specific to the kind of model, each after whether it applies.
        """
        call = self.present_call()
        if call is None:
            return OUTSIDE
        reason = call.exact_because or self.interception()
        if reason is not None:
            return reason
        for holds, why in reasons:
            if holds:
                return why
        if call.query_order is None or call.query_order.shape[0] != num_tokens:
            return "tokens are not the grid"
        if faults and self.backend == "auto" and (hidden_states.device,) in faults:
            return "the kernels are wrong on this GPU"
        if num_tokens < self.route.few_tokens:
            return "few tokens"
        if not self._has_keys_for(call.spec, num_tokens):
            return f"over {MOST_CODEWORDS_PER_KEY} codewords for each token"
        if call.break_even is not None and num_tokens < call.break_even.least_tokens():
            return "faster"
        return None

    def _break_even(self, call: Call, hidden_states: Tensor) -> BreakEven | None:
        """The numbers of tokens from which AVQ is faster in a call on a grid; None if unknown."""
        assert call.query_order is not None
        device, num_tokens = hidden_states.device, call.query_order.shape[0]
        batch = int(hidden_states.shape[0])
        setting = batch, hidden_states.dtype, device, call.spec, call.ranks
        if torch.compiler.is_compiling():
            traced = self.workload(*setting)
            may_be_faster = traced.may_be_faster(num_tokens)
            return self.route.learn(traced, device) if may_be_faster else NEVER_FASTER
        if call.needed is not None:
            self.needed, has_begun = call.needed, call.needed.has_begun
            call.needed.has_begun = True
            if not has_begun:
                return None
            # All ranks count alike, also where one of them runs exact attention.
            has_shown = call.needed.shown is not None or call.ranks is not None
            if has_shown and not is_recorded(device):
                call.needed.count(call.ranks)
        workload = self.workload(*setting, call.needed)
        if not workload.may_be_faster(num_tokens):
            return NEVER_FASTER
        return self.route.learn(workload, device, self._trial(call, batch), call.ranks)

    def _needed_in(self, call: Call) -> Needed | None:
        """The columns that calls like this one need, as far as known."""
        if call.spec.threshold is None or call.query_order is None:
            return None
        kind = call.spec, call.query_order.shape[0]
        with _REMEMBERING:
            self.kinds[kind] = needed = self.kinds.pop(kind, None) or Needed()
            if len(self.kinds) > MOST_KINDS:
                del self.kinds[next(iter(self.kinds))]
        return needed

    def _measure_while_tracing(self, call: Call, tokens: Tokens) -> None:
        """Measure the route of a call that is being compiled, unless its sizes are symbols."""
        if torch.compiler.is_exporting():  # for other devices, too
            return
        from torch.fx.experimental.symbolic_shapes import has_static_value  # seconds, for SymPy

        device, batch = tokens.hidden_states.device, tokens.hidden_states.shape[0]
        dtype = _autocast_dtype(device.type) or tokens.hidden_states.dtype
        for size in (batch, call.num_beside, *tokens.grid):
            if not has_static_value(size):
                return
        others = call.num_beside, call.beside_first
        self._measure_outside(batch, (*tokens.grid,), *others, dtype, device)

    @torch.compiler.assume_constant_result
    def _measure_outside(
        self,
        batch: int,
        grid: tuple[int, ...],
        num_beside: int,
        beside_first: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Measure in a new thread: compilers run this while they trace with fake tensors."""

        def learn() -> None:
            spec, order = self.spec.get() or self.config.spec, self._order(grid, device)
            call = Call(order, spec, None, NO_BACKWARD, num_beside, beside_first)
            workload = self.workload(batch, dtype, device, spec)
            trial = self._trial(call, batch)
            if trial is not None and workload.may_be_faster(trial.num_tokens):
                self.route.learn_compiled(workload, device, trial)

        with ThreadPoolExecutor(max_workers=1) as worker:
            worker.submit(learn).result()

    def _trial(self, call: Call, batch: int) -> Trial | None:
        """A trial of such calls; None if the call cannot run AVQ, or has unusual settings."""
        assert call.query_order is not None
        num_tokens = call.query_order.shape[0]
        is_usual = self.function is None and self.backend == "auto"
        if not is_usual or not self._has_keys_for(call.spec, num_tokens):
            return None
        # Kernels are the same for one token as for all that a layer's sequence may have.
        num_beside = 1 if call.num_beside == REST else call.num_beside
        shape = batch, num_tokens + num_beside, self._num_heads_in(call.ranks), self.head_dim

        def attend(spec: Spec, **tensors: Any) -> Attended:
            return self._attended(call._replace(spec=spec), **tensors)

        return Trial(attend, shape, num_tokens)

    def _has_keys_for(self, spec: Spec, num_tokens: int) -> bool:
        """Whether this many tokens are enough to take the codewords from."""
        is_own = self.function is None and self.weights.codebook is None
        return not is_own or num_tokens >= spec.least_keys

    def _num_heads_in(self, ranks: Ranks | None) -> int:
        """Number of heads that a rank attends with."""
        return self.num_heads if ranks is None else -(-self.num_heads // ranks.degree)

    def workload(
        self,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        spec: Spec,
        ranks: Ranks | None = None,
        needed: Needed | None = None,
    ) -> Workload:
        """The workload for a batch of tokens; with a threshold, that of the columns needed, by
        default in the last call."""
        columns = spec.columns
        if columns is None:
            columns = rounded(max(spec.num_parents, (needed or self.needed).columns))
        return Workload(
            batch_heads=next_power_of_two(batch * self._num_heads_in(ranks)),
            head_dim=self.head_dim,
            spec=spec,
            columns=columns,
            dtype=_autocast_dtype(device.type) or dtype,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """AVQ attention for the current call, like `avq_attention`.

        `query` has the grid's N tokens, or N + T with a text's; the output is a view of (B, N, H,
        D) or (B, N + T, H, D) memory.

        Args:
            query, key, value: as in `avq_attention`.
            **options: `sink_key`, `sink_value` and `scale`.
        """
        if torch.onnx.is_in_onnx_export():
            raise NotImplementedError(
                "ONNX has no operators for AVQ; call remove_avq(pipe) to export exact attention."
            )
        call = self.call.get()
        assert call is not None
        attended = self._attended(call, query, key, value, **options)
        if not torch.compiler.is_compiling():
            self.last_backend = attended.backend
            if not is_recorded(query.device):
                self.shown = attended.shown
                if call.needed is not None:
                    call.needed.shown = attended.shown
        return attended.output

    def _attended(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Attended:
        assert call.query_order is not None
        placed = orders(call.query_order, query, key, text_first=call.beside_first)
        tensors = Tensors.of(query, key, value, self.weights.codebook, **options, **placed)
        function = attend if self.function is None else self.function
        return function(tensors, call.spec, self.backend)

    def refuse_replica(self, module: nn.Module) -> None:
        """Refuse an `nn.DataParallel` replica of the module that begins the layer's calls."""
        if "_is_replica" in vars(module) and self.weights.are_stored:
            raise NotImplementedError(
                "nn.DataParallel runs one layer on several devices at once, but its codebook is on "
                "one; use DistributedDataParallel, or AVQ without codebooks."
            )

    def count(self, call: str) -> None:
        """Count a call by kind, unless compiled; warn during export, which cannot report later."""
        if not torch.compiler.is_compiling():
            self.calls[call] += 1
            self.last_call = call
            return
        # torch 2.10 takes all that Dynamo traces for an export.
        is_export = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
        if is_export and call not in (AVQ_CALL, DISABLED, SCHEDULED):
            warnings.warn(
                f"the exported program runs exact attention instead of AVQ: {call}.", stacklevel=2
            )


def orders(order: Tensor, query: Tensor, key: Tensor, *, text_first: bool) -> dict[str, Any]:
    """The order arguments of `avq_attention` for a grid's keys, and for text queries beside it.

    Args:
        order: (N,), query order of the grid.
        query: (B, H, N or N + T, D).
        key: (B, H, N, D).
        text_first: whether the text comes before the grid.
    """
    queries, num_text = order, query.shape[2] - key.shape[2]
    if num_text:
        queries = joint_order(order, num_text, text_first=text_first)
    # Parts of a model may be on a different device than its input.
    return {"query_order": queries.to(query.device), "key_order": order.to(query.device)}


def as_attended(tokens: Tensor) -> Tensor:
    """Convert to the dtype that autocast uses for attention."""
    dtype = _autocast_dtype(tokens.device.type)
    return tokens if dtype is None else tokens.to(dtype)


def _autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast on this type of device; None outside autocast."""
    has_autocast = device != "meta"
    if has_autocast and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


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
    """Autograd's id of the backward pass this thread is running, `NO_BACKWARD` outside."""
    return NO_BACKWARD if torch.compiler.is_compiling() else torch._C._current_graph_task_id()
