"""What each layer runs, by timestep: a threshold, refined parents, or exact attention."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from avq_diffusers.config import is_within
from avq_diffusers.hosts.core.host import Hosted
from avq_diffusers.hosts.core.installing import hooks_of
from avq_diffusers.hosts.core.layers import ATTRIBUTE, LayerSpec
from avq_diffusers.hosts.core.state import LayerState, SpecSchedule
from avq_diffusers.hosts.core.timesteps import NUM_TRAIN_TIMESTEPS, Timesteps, at_timestep

EXACT = "exact"
# What sets the resolution, and the numbers it may be.
NUMBERS: dict[str, tuple[tuple[type, ...], str]] = {
    "threshold": ((int, float), "a number"),
    "num_refined": ((int,), "an int"),
}
# Training timestep from which an entry holds, downwards -> one of these numbers, or `EXACT`.
Schedule = Mapping[int, float | str]
Plan = Mapping[str, float | str | Schedule]


def planned_specs(
    states: Mapping[LayerSpec, LayerState],
    option: str,
    value: float | str | Schedule | Plan,
    *,
    level: int | None,
    layer: str | None,
) -> dict[LayerState, SpecSchedule]:
    """The options that `set_threshold` and `set_num_refined` set, with their arguments and errors.

    Args:
        states: the layers with AVQ.
        option: one of `NUMBERS`.
        value, level, layer: the arguments of the function of its name.
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
    is_plan = isinstance(value, Mapping) and {type(key) for key in value} == {str}
    wanted: Any = value if is_plan else {found.name: value for found in chosen}
    plan = {name: _schedule(option, wanted[name]) for name in sorted(wanted, key=len)}
    for name in plan:
        if not any(is_within(found.name, name) for found in chosen):
            names = ", ".join(found.name for found in chosen)
            raise ValueError(f"no AVQ layer is {name!r} or in it; the chosen layers are {names}.")
    schedules: dict[LayerState, SpecSchedule] = {}
    for found, state in chosen.items():
        most = state.config.most_refined
        for schedule in (plan[name] for name in plan if is_within(found.name, name)):
            for number in schedule.values():
                is_refined = option == "num_refined" and number is not None
                if is_refined and not 0 <= number <= most:
                    raise ValueError(
                        f"num_refined must be between 0 and {most} in {found.name}, but got "
                        f"{number}."
                    )
            schedules[state] = {
                start: None if number is None else state.config.spec.changed(**{option: number})
                for start, number in schedule.items()
            }
    return schedules


def set_specs(hosted: Hosted, schedules: Mapping[LayerState, SpecSchedule]) -> None:
    """Set the options of a model's layers by timestep; others stay as they are.

    The caller holds `CHANGES`.

    Args:
        hosted: the model.
        schedules: of its layers; those of other models are left out.
    """
    states, timesteps = [*hosted.states.values()], hosted.timesteps
    chosen = {state: schedules[state] for state in states if state in schedules}
    if timesteps is None and any(len(schedule) > 1 for schedule in chosen.values()):
        raise ValueError(f"this {hosted.host.kind} has no schedules by timestep, but got one.")
    for state, schedule in chosen.items():
        state.set_schedule(schedule)
    if timesteps is None:
        return
    scheduled = [state for state in states if len(state.schedule) > 1]
    hooks = hooks_of(hosted.model)
    hooks.detach()
    hooks.scheduler = Scheduler(hosted.entrance, timesteps, scheduled) if scheduled else None
    hooks.attach(hosted.model)
    if hooks.scheduler is None and hooks.watch is None:
        delattr(hosted.model, ATTRIBUTE)


class Scheduler(NamedTuple):
    """The hook that sets the options of scheduled layers at each call of the model."""

    entrance: nn.Module
    timesteps: Timesteps
    states: Sequence[LayerState]

    def attach(self, model: nn.Module) -> list[RemovableHandle]:
        hooks = {self.entrance: self.pre_forward}
        if model is not self.entrance:
            hooks[model] = self.pre_forward_past_the_entrance
        return [
            module.register_forward_pre_hook(hook, with_kwargs=True)
            for module, hook in hooks.items()
        ]

    def pre_forward_past_the_entrance(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Serves calls that bypass the model's compiled wrapper, but not other compiled code."""
        if not torch.compiler.is_compiling():
            self.pre_forward(model, args, kwargs)

    @torch.compiler.disable
    def pre_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_exporting():
            raise NotImplementedError(
                "an exported program cannot follow a schedule; set one number for all timesteps."
            )
        timestep = self.timesteps.read(args, kwargs)
        if timestep is not None:
            for state in self.states:
                state.spec.set(at_timestep(state.schedule, timestep))


def _schedule(option: str, value: float | str | Schedule) -> dict[int, Any]:
    """A schedule from 1000 down, without repeated entries; None is exact."""
    schedule = value if isinstance(value, Mapping) else {NUM_TRAIN_TIMESTEPS: value}
    kind, words = NUMBERS[option]
    for number in schedule.values():
        if number != EXACT and (not isinstance(number, kind) or isinstance(number, bool)):
            raise TypeError(
                f"{option} must be {words} or 'exact', but got {type(number).__name__}."
            )
    for timestep in schedule:
        if not isinstance(timestep, int):
            raise TypeError(
                f"a schedule must have ints as timesteps, but got {type(timestep).__name__}."
            )
    if max(schedule, default=None) != NUM_TRAIN_TIMESTEPS or min(schedule) < 0:
        raise ValueError(
            f"a schedule must begin at timestep {NUM_TRAIN_TIMESTEPS} and have none below 0, such "
            f"as {{1000: 8, 400: 16}}, but got {dict(schedule)}."
        )
    numbers = {start: None if x == EXACT else x for start, x in schedule.items()}
    parts = groupby(sorted(numbers, reverse=True), key=numbers.__getitem__)
    return {next(timesteps): number for number, timesteps in parts}
