"""Measure the layers of a UNet while it runs, by the part of the denoising."""

import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from tqdm import tqdm

from avq_diffusers.config import check_int
from avq_diffusers.plugin.layers import SelfAttentionLayer
from avq_diffusers.plugin.timesteps import NUM_TRAIN_TIMESTEPS, Timesteps, at_timestep

Profile = TypeVar("Profile")


def check_probe(num_inference_steps: int, parts: int) -> None:
    """Refuse numbers of steps and parts that a denoising cannot have.

    Raises:
        TypeError: one is not an int.
        ValueError: one is below 1, or above the number of training timesteps.
    """
    for name, number in (("num_inference_steps", num_inference_steps), ("parts", parts)):
        check_int(name, number, 1)
        if number > NUM_TRAIN_TIMESTEPS:
            raise ValueError(f"{name} must be at most {NUM_TRAIN_TIMESTEPS}, but got {number}.")


def load_profile(kind: type[Profile], path: str | Path, build: Callable[[Any], Profile]) -> Profile:
    """Read a profile that was saved as JSON.

    Args:
        kind: class of the profile.
        path: of the file.
        build: makes the profile of the document.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    try:
        return build(json.loads(Path(path).read_text()))
    except (
        AttributeError,
        KeyError,
        OverflowError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"{path} is not a saved {kind.__name__}: {error!r}.") from error


class Probe(ABC):
    """Tensors measured in each layer, in its calls in each part of the denoising.

    Second evaluations of noise-damped ScaleCrafter, inside a call of the UNet, do not count.

    Args:
        parts: how many equal parts of the training timesteps are kept apart.
        bar: moves by one per call of the UNet.
    """

    def __init__(self, parts: int, bar: tqdm) -> None:
        starts = [NUM_TRAIN_TIMESTEPS * (parts - part) // parts for part in range(parts)]
        self.starts = {start: start for start in starts}
        self.start = NUM_TRAIN_TIMESTEPS
        self.timesteps = Timesteps()
        self.bar = bar
        self.depth = 0  # calls of the UNet under way
        self.values: dict[str, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))

    @abstractmethod
    def measure(self, layer: SelfAttentionLayer, hidden_states: Tensor) -> Tensor | None:
        """Measure one call with `hidden_states` (B, N, channels); None does not count."""

    @contextmanager
    def watch(self, unet: nn.Module, layers: Collection[SelfAttentionLayer]) -> Iterator[None]:
        """Measure the layers in the calls of the UNet inside the `with` block."""
        with ExitStack() as hooks:
            hooks.enter_context(unet.register_forward_pre_hook(self.enter, with_kwargs=True))
            hooks.enter_context(unet.register_forward_hook(self.leave, always_call=True))
            for layer in layers:
                see_layer = partial(self.see_layer, layer)
                hooks.enter_context(layer.attn.register_forward_pre_hook(see_layer))
            yield

    def enter(self, unet: nn.Module, args: tuple, kwargs: dict) -> None:
        self.depth += 1
        if self.depth == 1:
            timestep = self.timesteps.of_call(args, kwargs) if len(self.starts) > 1 else None
            if timestep is not None:
                self.start = at_timestep(self.starts, timestep)
            self.bar.update()

    def leave(self, unet: nn.Module, args: tuple, output: Any) -> None:
        self.depth -= 1

    def see_layer(self, layer: SelfAttentionLayer, attn: Attention, args: tuple) -> None:
        value = self.measure(layer, args[0]) if self.depth == 1 else None
        if value is not None:
            self.values[layer.name][self.start].append(value)

    def values_of(self, name: str) -> dict[int, Tensor]:
        """The values (calls, ...) of a layer, by the start of each part that had a call.

        The first part that had a call also covers the parts before it.

        Raises:
            RuntimeError: no call counted.
        """
        measured = self.values[name]
        if not measured:
            raise RuntimeError(
                f"{name} did not run on its grid of tokens; measure before compiling and without "
                "merging tokens."
            )
        parts = [measured[start] for start in self.starts if start in measured]
        starts = [NUM_TRAIN_TIMESTEPS, *sorted(measured, reverse=True)[1:]]
        return {start: torch.stack(values) for start, values in zip(starts, parts, strict=True)}
