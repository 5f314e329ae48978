"""What each layer runs: refined parents or exact attention, by timestep and by layer."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from avq_diffusers.config import Sizes, is_within
from avq_diffusers.plugin.layer_state import LayerState, applied_states
from avq_diffusers.plugin.layers import Layer, PipelineOrUNet, unet_of, unwrapped
from avq_diffusers.plugin.timesteps import NUM_TRAIN_TIMESTEPS, Timesteps, at_timestep

EXACT = "exact"
# Numbers of parents, or `EXACT`, by the training timestep from which they hold, downwards.
Schedule = Mapping[int, int | str]
# The same with all sizes; None is exact attention.
SizeSchedule = Mapping[int, Sizes | None]


def set_num_refined(
    pipe: PipelineOrUNet,
    num_refined: int | str | Schedule | Mapping[str, int | str | Schedule],
    *,
    level: int | None = None,
    layer: str | None = None,
) -> PipelineOrUNet:
    """`avq_diffusers.set_num_refined` of UNets.

    Raises:
        TypeError, ValueError: as there.
    """
    set_sizes(pipe, planned_sizes(applied_states(pipe), num_refined, level=level, layer=layer))
    return pipe


def planned_sizes(
    states: Mapping[Layer, LayerState],
    num_refined: int | str | Schedule | Mapping[str, int | str | Schedule],
    *,
    level: int | None,
    layer: str | None,
) -> dict[LayerState, SizeSchedule]:
    """The sizes that `set_num_refined` gives to layers.

    Args:
        states: of the layers with AVQ, at least one.
        num_refined, level, layer: as `set_num_refined`.

    Raises:
        TypeError, ValueError: as `set_num_refined`.
    """
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
    wanted: Any = num_refined if is_plan else {found.name: num_refined for found in chosen}
    plan = {name: _schedule(wanted[name]) for name in sorted(wanted, key=len)}
    for name in plan:
        if not any(is_within(found.name, name) for found in chosen):
            names = ", ".join(found.name for found in chosen)
            raise ValueError(f"no AVQ layer is {name!r} or in it; the chosen layers are {names}.")
    schedules: dict[LayerState, SizeSchedule] = {}
    for found, state in chosen.items():
        most = state.config.most_refined
        for schedule in (plan[name] for name in plan if is_within(found.name, name)):
            for count in schedule.values():
                if count is not None and not 0 <= count <= most:
                    raise ValueError(
                        f"num_refined must be between 0 and {most} in {found.name}, but got "
                        f"{count}."
                    )
            schedules[state] = {
                start: None if count is None else state.config.sizes._replace(num_refined=count)
                for start, count in schedule.items()
            }
    return schedules


def set_sizes(
    pipe: DiffusionPipeline | nn.Module, schedules: Mapping[LayerState, SizeSchedule]
) -> None:
    """Set the sizes of layers by timestep; others stay as they are."""
    for state, schedule in schedules.items():
        state.set_sizes(schedule[NUM_TRAIN_TIMESTEPS])
    _Scheduler.install(unet_of(pipe), {**schedules_of(pipe), **schedules})


def refinable_parents(pipe: DiffusionPipeline | nn.Module) -> dict[str, int]:
    """How many parents each AVQ layer can refine, by its name: all of them, or 0 if it is flat.

    Raises:
        ValueError: the pipeline has no AVQ layer.
    """
    return {layer.name: state.config.most_refined for layer, state in applied_states(pipe).items()}


class _Scheduler:
    """The hook that sets the scheduled layers to the timestep of each UNet call."""

    def __init__(self, unet: nn.Module, schedules: dict[LayerState, SizeSchedule]) -> None:
        self.schedules = schedules
        self.timesteps = Timesteps()
        self.handle = unet.register_forward_pre_hook(self.pre_forward, with_kwargs=True)

    @classmethod
    def install(cls, unet: nn.Module, schedules: dict[LayerState, SizeSchedule]) -> None:
        """Replace an earlier one; without a layer that has several sizes, just remove it."""
        scheduled = {state: schedule for state, schedule in schedules.items() if len(schedule) > 1}
        original = unwrapped(unet)
        if hasattr(original, "_avq_scheduler"):
            original._avq_scheduler.remove()
            del original._avq_scheduler
        if scheduled:
            original._avq_scheduler = cls(unet, scheduled)

    def remove(self) -> None:
        self.handle.remove()

    @torch.compiler.disable
    def pre_forward(self, unet: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        timestep = self.timesteps.of_call(args, kwargs)
        if timestep is not None:
            for state, schedule in self.schedules.items():
                state.sizes.set(at_timestep(schedule, timestep))


def schedules_of(pipe: DiffusionPipeline | nn.Module) -> dict[LayerState, SizeSchedule]:
    """The schedules of the layers whose sizes change while an image is generated."""
    scheduler: _Scheduler | None = getattr(unwrapped(unet_of(pipe)), "_avq_scheduler", None)
    return {} if scheduler is None else scheduler.schedules


def _schedule(num_refined: int | str | Schedule) -> dict[int, int | None]:
    """A schedule from 1000 down, without entries that repeat the one before; None is exact."""
    if not isinstance(num_refined, Mapping):
        num_refined = {NUM_TRAIN_TIMESTEPS: num_refined}
    for count in num_refined.values():
        if count != EXACT and (not isinstance(count, int) or isinstance(count, bool)):
            raise TypeError(
                f"num_refined must be an int, but got {type(count).__name__}; only 'exact' may "
                f"take the place of a number."
            )
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
    counts = {
        timestep: count if isinstance(count, int) else None
        for timestep, count in num_refined.items()
    }
    parts = groupby(sorted(counts, reverse=True), key=counts.__getitem__)
    return {next(timesteps): count for count, timesteps in parts}
