"""Calls of exact runs, repeated with other attention: output errors and step times."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from avq_diffusers.hosts import at_timestep, select_layers
from eval.benchmarks.timing import block_ms, in_turns
from eval.methods.running import network_of

TURNS = 7
WHOLE = (1000,)  # one part: the denoising begins at this timestep


class RecordedCall(NamedTuple):
    """A call of the UNet or transformer of an exact run.

    Attributes:
        prompts: indices of the prompts in its batch, once or twice (guidance).
        part: the timestep at which its part of the denoising begins.
        args, kwargs: the call's arguments.
        output: the exact output, (B, ...).
    """

    prompts: range
    part: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


@torch.no_grad()
def recorded_calls(
    pipe: DiffusionPipeline,
    prompts: Sequence[str],
    first_seed: int,
    batch_size: int,
    starts: Iterable[int] = WHOLE,
    **arguments: Any,
) -> list[RecordedCall]:
    """Record the calls of exact runs; prompt i has noise from seed `first_seed + i`.

    `starts` are the timesteps at which parts of the denoising begin, as in a profile; by default
    there is one part.
    """
    parts = {start: start for start in starts}
    calls: list[RecordedCall] = []
    batch = range(0)

    def record(network: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        timestep = float((args[1] if len(args) > 1 else kwargs["timestep"]).flatten()[0])
        part = at_timestep(parts, timestep)
        calls.append(RecordedCall(batch, part, args, kwargs, output[0].clone()))

    handle = network_of(pipe).register_forward_hook(record, with_kwargs=True)
    try:
        for start in range(0, len(prompts), batch_size):
            batch = range(start, min(start + batch_size, len(prompts)))
            seeds = [torch.Generator().manual_seed(first_seed + number) for number in batch]
            chosen = [prompts[number] for number in batch]
            pipe(chosen, generator=seeds, output_type="latent", **arguments)
    finally:
        handle.remove()
    return calls


@torch.no_grad()
def repeated_errors(pipe: DiffusionPipeline, calls: Sequence[RecordedCall]) -> list[float]:
    """Each prompt's output error, |model - exact| / |exact|.

    That of a part of the denoising is the root mean square over its calls; the largest counts.
    """
    network = network_of(pipe)
    squared: dict[tuple[int, int], list[float]] = defaultdict(list)
    for call in calls:
        exact = call.output.float()
        found = network(*call.args, **call.kwargs)[0].float()
        squares = torch.stack([found - exact, exact]).square().flatten(2).sum(dim=2)
        off, size = squares.unflatten(1, (-1, len(call.prompts))).sum(dim=1)
        for prompt, value in zip(call.prompts, (off / size).tolist(), strict=True):
            squared[prompt, call.part].append(value)
    errors: dict[int, float] = defaultdict(float)
    for (prompt, _), values in squared.items():
        errors[prompt] = max(errors[prompt], mean(values) ** 0.5)
    return [errors[prompt] for prompt in sorted(errors)]


class CapturedSteps:
    """Steps captured in CUDA graphs, to be timed in turns.

    A step that changes during denoising is captured at each of the calls.
    """

    def __init__(self, pipe: DiffusionPipeline, calls: Sequence[RecordedCall]) -> None:
        self.network, self.calls = network_of(pipe), calls
        self.replays: list[list[Callable[[], None]]] = []
        self.alive: list[Any] = []
        self.pool = torch.cuda.graph_pool_handle()

    @torch.no_grad()
    def capture(self) -> None:
        """Capture the calls with the network's current attention."""
        replays = []
        for call in self.calls:
            self.network(*call.args, **call.kwargs)  # compiles, and reads the timestep
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                self.network(*call.args, **call.kwargs)
            replays.append(graph.replay)
        # Graphs read what AVQ's layers hold, which `remove_avq` would free.
        self.alive += [layer.avq_state for layer in select_layers(self.network)]
        self.replays.append(replays)

    def milliseconds(self) -> list[float]:
        """Time of a step, averaged over the calls; one number per `capture`."""
        device = next(self.network.parameters()).device
        windows = [partial(_window, replays, device) for replays in self.replays]
        return [median(times) for times in in_turns(windows, TURNS)]


def _window(replays: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    return [mean(block_ms(replay, 1, device) for replay in replays) for _ in range(4)][1:]
