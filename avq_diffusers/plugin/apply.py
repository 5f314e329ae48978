"""Switch AVQ on and off in a pipeline: `apply_avq`, `remove_avq`, and what lies between.

Every function takes a pipeline with a `unet`, or the UNet itself, compiled or not. AVQ is put on
that UNet; a ControlNet is passed itself. `remove_avq`, `avq_disabled` and `summary` of a pipeline
are for its ControlNets as well.
"""

import inspect
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from avq_diffusers.config import is_within
from avq_diffusers.extras.linfusion import LinFusionProcessor
from avq_diffusers.plugin.layers import (
    PipelineOrUNet,
    SelfAttentionLayer,
    models_of,
    select_layers,
    uncompiled,
    unet_of,
)
from avq_diffusers.plugin.processor import (
    AVQ_CALL,
    AVQProcessor,
    LayerState,
    PerThread,
    install,
    uninstall,
)
from avq_diffusers.plugin.timesteps import NUM_TRAIN_TIMESTEPS, Timesteps, at_timestep
from avq_diffusers.plugin.weights import AVQCodebooks

# Numbers of parents by the training timestep from which on, downwards, they hold.
Schedule = Mapping[int, int]
_DISABLING = threading.Lock()


def apply_avq(
    pipe: PipelineOrUNet,
    codebooks: AVQCodebooks,
    *,
    backend: str = "auto",
    route: str = "fastest",
) -> PipelineOrUNet:
    """Run the self-attention layers of `codebooks` with AVQ.

    An earlier AVQ is removed first. Processors of all other layers stay, and the processor that a
    chosen layer has now serves the calls that AVQ does not (attention masks, merged tokens). While
    codebooks and UNet are on one device, changes made in place to the codewords take effect.

    What distillation changed in the projections is added, in the UNet's dtype, to what the layer's
    own give in the calls that AVQ serves. The UNet's parameters stay as they are and are what runs:
    fine-tunes of the base model and LoRA, fused or not, act as in exact attention.

    Pipelines that share the UNet, as by `from_pipe`, share its AVQ. A model that diffusers builds
    from the UNet is without it: `ControlNetModel.from_unet`, and AnimateDiff's, by `from_pipe` too.

    Args:
        pipe: a pipeline with a `unet`, or the UNet.
        codebooks: of that UNet.
        backend: of `avq_attention`.
        route: `"fastest"` runs exact attention where that is faster on this GPU for the number of
            tokens, by a table that comes with the package and measurements of about a second per
            new shape, kept in the user's cache folder; `"always"` runs AVQ.

    Returns:
        `pipe`.

    Raises:
        TypeError: `pipe` has no UNet, or `codebooks` is not an `AVQCodebooks`.
        ValueError: the codebooks are those of another model, backend or route are unknown, or the
            UNet has LinFusion layers.
    """
    unet = unet_of(pipe)
    if not isinstance(codebooks, AVQCodebooks):
        raise TypeError(f"codebooks must be AVQCodebooks, but got {type(codebooks).__name__}.")
    processor = AVQProcessor()
    layers = install(unet, codebooks, backend, route)
    # By these names diffusers chooses what a processor gets.
    known = {*inspect.signature(processor.__call__).parameters, "args", "kwargs"}
    lost = {
        name
        for layer in layers
        for name in inspect.signature(layer.attn.processor.__call__).parameters
        if name not in known
    }
    if lost:
        warnings.warn(
            f"the arguments {', '.join(sorted(lost))} of cross_attention_kwargs no longer reach "
            f"the processors that had them; keep their layers exact, by AVQConfig(exact=...).",
            stacklevel=2,
        )
    for layer in layers:
        layer.attn._avq_previous = layer.attn.processor
        layer.attn.set_processor(processor)
    return pipe


def remove_avq(pipe: PipelineOrUNet) -> PipelineOrUNet:
    """Undo `apply_avq`: the same processor objects are back, and nothing of AVQ remains.

    A processor that another tool has set over AVQ since stays. Without AVQ nothing happens.

    Raises:
        TypeError: `pipe` has no UNet.
    """
    for model in models_of(pipe).values():
        uninstall(model)
    return pipe


@contextmanager
def avq_disabled(pipe: Any) -> Iterator[None]:
    """Run exact attention inside the `with` block, in all threads that draw with these models.

    Blocks may be nested, and overlap in threads: AVQ is back when the last one has ended. What
    `apply_avq` puts on the UNet inside of a block runs AVQ at once.

    Raises:
        TypeError: `pipe` has no UNet.
    """
    states = [state for model in models_of(pipe).values() for state in _states(model).values()]
    _disable(states, 1)
    try:
        yield
    finally:
        _disable(states, -1)


def set_num_refined(
    pipe: PipelineOrUNet,
    num_refined: int | Schedule | Mapping[str, int | Schedule],
    *,
    level: int | None = None,
    layer: str | None = None,
) -> PipelineOrUNet:
    """Change how many parents each query tile refines: quality against speed, without reloading.

    A schedule switches by itself, at the timestep of each call of the UNet; threads that draw with
    one UNet are each at a timestep of their own, but not in compiled code. `torch.compile(unet)`
    makes one graph for each part of it, and blocks that are compiled one by one make one for each
    number of parents: where these are more than 8, raise `torch._dynamo.config.recompile_limit`.
    Where the UNet must compile without a graph break (`fullgraph=True`), compile it by `pipe.unet =
    torch.compile(pipe.unet, fullgraph=True)` before setting a schedule; it then acts in calls of
    the compiled UNet, not of the one inside. A CUDA graph keeps the number of parents that it was
    captured with, and gradient checkpointing computes a layer again with that of the last timestep.

    Args:
        pipe: a pipeline or UNet with AVQ.
        num_refined: between 0 and the number of parents of every layer concerned. Or a schedule in
            training timesteps, which fall from 1000 to 0: `{1000: 8, 400: 16}` refines 8 parents
            from timestep 1000 down and 16 from 400 down; the UNet then refuses samplers with other
            timesteps, such as EDM's and IPNDM. Or a plan, such as
            `CaptureProfile.at_least` makes: numbers or schedules by the name of a layer, or of a
            module for all layers in it, longer names winning over shorter ones; layers without an
            entry stay as they are, and an entry without a layer is refused.
        level: only the layers of this UNet level.
        layer: only the layer of this name, or the layers in this module, such as `"up_blocks.3"`.

    Returns:
        `pipe`.

    Raises:
        TypeError: `pipe` has no UNet, or a number of parents or a timestep is not an int.
        ValueError: no AVQ layer matches, an entry of a plan is for none of those that do, a layer
            cannot refine that many parents, or a schedule does not begin at timestep 1000.
    """
    states = applied_states(pipe)
    names = ", ".join(found.name for found in states)
    chosen = {
        found: state
        for found, state in states.items()
        if level in (None, found.level) and (layer is None or is_within(found.name, layer))
    }
    if not chosen:
        raise ValueError(
            f"no AVQ layer matches level={level!r}, layer={layer!r}; the layers are {names}."
        )
    is_plan = isinstance(num_refined, Mapping) and {type(key) for key in num_refined} == {str}
    plan = num_refined if is_plan else {found.name: num_refined for found in chosen}
    plan = {name: _schedule(plan[name]) for name in sorted(plan, key=len)}
    for name in plan:
        if not any(is_within(found.name, name) for found in chosen):
            names = ", ".join(found.name for found in chosen)
            raise ValueError(f"no AVQ layer is {name!r} or in it; the chosen layers are {names}.")
    schedules = {}
    for found, state in chosen.items():
        most = state.codebook.most_refined
        for schedule in (plan[name] for name in plan if is_within(found.name, name)):
            for count in schedule.values():
                if not 0 <= count <= most:
                    raise ValueError(
                        f"num_refined must be between 0 and {most} in {found.name}, but got "
                        f"{count}."
                    )
            schedules[state] = schedule

    for state, schedule in schedules.items():
        # Anew, without what threads have of an earlier schedule.
        state.refined = PerThread(schedule[NUM_TRAIN_TIMESTEPS])
    _Scheduler.install(unet_of(pipe), _schedules(pipe) | schedules)
    return pipe


def applied_states(pipe: Any) -> dict[SelfAttentionLayer, LayerState]:
    """The layers that AVQ was applied to.

    Raises:
        TypeError: `pipe` has no UNet.
        ValueError: there is none.
    """
    states = _states(pipe)
    if not states:
        raise ValueError("this UNet has no AVQ layer; call apply_avq(pipe, codebooks) first.")
    return states


def refinable_parents(pipe: Any) -> dict[str, int]:
    """By name, how many parents each AVQ layer can refine: all of them, or 0 if it is flat.

    Raises:
        ValueError: the pipeline has no AVQ layer.
    """
    return {
        layer.name: state.codebook.most_refined for layer, state in applied_states(pipe).items()
    }


@dataclass(frozen=True)
class LayerReport:
    """One row of a `Summary`.

    Attributes:
        name: module path of the self-attention layer.
        level: UNet level.
        num_heads: heads.
        head_dim: head dim.
        config: such as M64P16C8, or M64P8-16C8 with a schedule from 8 to 16 refined parents; empty
            without codebooks.
        runs: what a call does, or did when last called: AVQ, by which backend and whether with
            tuned projections, exact and why, LinFusion, or replaced by which processor.
        num_tokens: tokens of the grid last seen; None before the first call.
        calls: number of calls so far by kind. Calls in compiled code are not counted.
    """

    name: str
    level: int
    num_heads: int
    head_dim: int
    config: str
    runs: str
    num_tokens: int | None
    calls: dict[str, int]


@dataclass(frozen=True)
class Summary:
    """What each self-attention layer runs; `str()` is a table."""

    rows: tuple[LayerReport, ...]

    def cells(self) -> list[list[str]]:
        """The table as text, its header first."""
        header = ["layer", "level", "heads", "config", "runs", "tokens", "calls"]
        return [header] + [
            [
                row.name,
                str(row.level),
                f"{row.num_heads}x{row.head_dim}",
                row.config or "-",
                row.runs,
                "-" if row.num_tokens is None else str(row.num_tokens),
                ", ".join(f"{kind}: {count}" for kind, count in row.calls.items()) or "-",
            ]
            for row in self.rows
        ]

    def __str__(self) -> str:
        cells = self.cells()
        widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        )


def summary(pipe: Any) -> Summary:
    """Report, for every self-attention layer, whether it runs AVQ or exact attention, and why.

    Names of a ControlNet's layers begin with `controlnet.`.

    Raises:
        TypeError: `pipe` has no UNet.
    """
    return Summary(
        tuple(
            _report(prefix + layer.name, layer, _schedules(model))
            for prefix, model in models_of(pipe).items()
            for layer in select_layers(model)
        )
    )


def _states(pipe: Any) -> dict[SelfAttentionLayer, LayerState]:
    return {layer: layer.avq_state for layer in select_layers(unet_of(pipe)) if layer.avq_state}


class _Scheduler:
    """The hook that sets scheduled layers for the timestep of each call of a UNet."""

    def __init__(self, unet: nn.Module, schedules: dict[LayerState, Schedule]) -> None:
        self.schedules = schedules
        self.timesteps = Timesteps()
        self.handle = unet.register_forward_pre_hook(self.see_call, with_kwargs=True)

    @classmethod
    def install(cls, unet: nn.Module, schedules: dict[LayerState, Schedule]) -> None:
        """Put it in place of an earlier one, if any layer has more than one number."""
        scheduled = {state: schedule for state, schedule in schedules.items() if len(schedule) > 1}
        original = uncompiled(unet)
        if hasattr(original, "_avq_scheduler"):
            original._avq_scheduler.remove()
            del original._avq_scheduler
        if scheduled:
            original._avq_scheduler = cls(unet, scheduled)

    def remove(self) -> None:
        self.handle.remove()

    @torch.compiler.disable
    def see_call(self, unet: nn.Module, args: tuple, kwargs: dict) -> None:
        timestep = self.timesteps.of_call(args, kwargs)
        if timestep is not None:
            for state, schedule in self.schedules.items():
                state.refined.set(at_timestep(schedule, timestep))


def _schedules(pipe: Any) -> dict[LayerState, Schedule]:
    """Those that `set_num_refined` left, of layers with more than one number of parents."""
    scheduler: _Scheduler | None = getattr(uncompiled(unet_of(pipe)), "_avq_scheduler", None)
    return {} if scheduler is None else scheduler.schedules


def _schedule(num_refined: int | Schedule) -> Schedule:
    """A schedule from 1000 down, without entries that change nothing."""
    if not isinstance(num_refined, Mapping):
        num_refined = {NUM_TRAIN_TIMESTEPS: num_refined}
    for count in num_refined.values():
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"num_refined must be an int, but got {type(count).__name__}.")
    for timestep in num_refined:
        if not isinstance(timestep, int):
            raise TypeError(
                f"a schedule must have ints as timesteps, but got {type(timestep).__name__}."
            )
    if max(num_refined, default=None) != NUM_TRAIN_TIMESTEPS or min(num_refined) < 0:
        raise ValueError(
            f"a schedule must begin at timestep {NUM_TRAIN_TIMESTEPS} and have none below 0, such "
            f"as {{1000: 8, 400: 16}}, but got {dict(num_refined)}."
        )
    parts = groupby(sorted(num_refined, reverse=True), key=num_refined.get)
    return {next(timesteps): count for count, timesteps in parts}


def _disable(states: Iterable[LayerState], change: int) -> None:
    """Open or close a block of `avq_disabled`."""
    with _DISABLING:
        for state in states:
            state.num_disabling += change
            state.enabled = state.num_disabling == 0


def _report(
    name: str, layer: SelfAttentionLayer, schedules: dict[LayerState, Schedule]
) -> LayerReport:
    state: LayerState | None = layer.avq_state
    config, num_tokens, calls = "", None, {}
    processor = type(layer.attn.processor).__name__
    if state is None:
        runs = f"exact: {processor}"
    else:
        codebook = state.codebook
        refined = "-".join(map(str, schedules.get(state, {0: state.num_refined}).values()))
        config = f"M{codebook.num_parents}P{refined}C{codebook.num_children}"
        num_tokens = None if state.query_order is None else len(state.query_order)
        calls = dict(state.calls)
        if not isinstance(layer.attn.processor, AVQProcessor):
            runs = f"exact: replaced by {processor}"
        elif not state.enabled:
            runs = "exact: disabled"
        elif state.last_call in (None, AVQ_CALL, "disabled"):
            runs = f"AVQ ({state.last_backend} backend)" if state.last_backend else "AVQ"
            runs += ", tuned" if state.projection_changes else ""
        else:
            runs = f"exact: {state.last_call}"
    if isinstance(layer.attn.processor, LinFusionProcessor):
        runs = "LinFusion"
    return LayerReport(
        name, layer.level, layer.num_heads, layer.head_dim, config, runs, num_tokens, calls
    )
