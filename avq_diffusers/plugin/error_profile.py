"""One dial from fast to exact: the error of each layer along a ladder of sizes.

A few denoising steps, or images, give the error of every rung in every layer. For a tolerance, each
layer then runs the cheapest rung that holds it, or exact attention.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from tqdm import tqdm

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.attention.orders import query_order
from avq_diffusers.config import AVQConfig, Sizes, check_int
from avq_diffusers.files import atomic_write
from avq_diffusers.plugin.codebooks import AVQCodebooks
from avq_diffusers.plugin.layer_state import (
    AVQSource,
    LayerState,
    applied_states,
    check_source,
    default_source,
    disabled,
    states_of,
)
from avq_diffusers.plugin.layer_weights import LayerWeights
from avq_diffusers.plugin.layers import (
    Layer,
    LayerSpec,
    SelfAttentionLayer,
    models_of,
    select_layers,
    unet_of,
)
from avq_diffusers.plugin.probe import Probe, check_probe, load_profile
from avq_diffusers.plugin.prompts import checked_prompts, run_prompts
from avq_diffusers.plugin.refinement import EXACT, set_sizes
from avq_diffusers.plugin.routing import Workload, next_power_of_two, relative_cost
from avq_diffusers.plugin.tensor_files import check_names
from avq_diffusers.plugin.timesteps import NUM_TRAIN_TIMESTEPS

# From fast to exact. On real keys more parents and refined parents pay first, then exact keys.
LADDER = (
    "M32P4C8",
    "M64P4C8",
    "M64P8C8",
    "M64P16C8",
    "M64P32C8",
    "M128P32C8",
    "M64P16C8E256",
    "M128P32C8E256",
    "M64P32C8E1024",
)
SHOWN_TOLERANCES = (0.05, 0.1, 0.2)
# What measured errors may take of a tolerance: others are a little larger than those of the probes.
MARGIN = 0.9
WITHOUT_CODEBOOKS = (
    "a tolerance chooses sizes of AVQ with codewords of each call; apply it without codebooks."
)


class Choice(NamedTuple):
    """What a layer runs in a part of the denoising.

    Attributes:
        sizes: of AVQ; None is exact attention.
        error: the measured one.
    """

    sizes: Sizes | None
    error: float

    def __str__(self) -> str:
        return EXACT if self.sizes is None else str(self.sizes)


@dataclass(frozen=True)
class LayerErrors:
    """The errors and costs of a layer, by configuration string.

    Attributes:
        layer: name, level and head shape.
        num_tokens: of the measured calls. With fewer, exact attention runs.
        costs: the time of AVQ over that of exact attention, or on a CPU the columns that a query
            meets over the number of tokens.
        errors: by the training timestep at which a part of the denoising begins, then by
            configuration string.
    """

    layer: LayerSpec
    num_tokens: int
    costs: Mapping[str, float]
    errors: Mapping[int, Mapping[str, float]]

    def __post_init__(self) -> None:
        check_int(f"num_tokens of {self.layer.name}", self.num_tokens, 1)
        if max(self.errors, default=None) != NUM_TRAIN_TIMESTEPS:
            raise ValueError(
                f"errors of {self.layer.name} must begin at timestep {NUM_TRAIN_TIMESTEPS}."
            )
        for errors in self.errors.values():
            if errors.keys() != self.costs.keys():
                raise ValueError(f"errors and costs of {self.layer.name} have different sizes.")
            if not all(0 <= x < math.inf for x in (*errors.values(), *self.costs.values())):
                raise ValueError(f"errors and costs of {self.layer.name} must be finite.")

    def within(self, tolerance: float) -> dict[int, Choice]:
        """The cheapest choice in each part; equal ones in a row are one."""
        limit = MARGIN * tolerance
        choices = {start: self._cheapest(errors, limit) for start, errors in self.errors.items()}
        runs = (list(run) for _, run in groupby(choices, key=lambda start: choices[start].sizes))
        return {run[0]: max(map(choices.__getitem__, run), key=_error_of) for run in runs}

    def _cheapest(self, errors: Mapping[str, float], limit: float) -> Choice:
        held = [x for x, error in errors.items() if error <= limit and self.costs[x] < 1]
        if not held:
            return Choice(None, 0.0)
        cheapest = min(held, key=self.costs.__getitem__)
        return Choice(AVQConfig.parse(cheapest).sizes, errors[cheapest])


@dataclass(frozen=True)
class ErrorProfile:
    """The error of every layer of a model along the ladder of sizes, for `apply_avq`.

    `str()` is a table of what `within` chooses for some tolerances.

    Attributes:
        config: levels, tiles and updates that the errors were measured with.
        layers: errors and costs.

    Raises:
        ValueError: there is no layer, or a layer lacks errors or costs.
    """

    config: AVQConfig = field(repr=False)
    layers: tuple[LayerErrors, ...] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("an error profile must have a layer.")

    def within(self, tolerance: float) -> dict[str, dict[int, Choice]]:
        """The cheapest sizes whose measured error is at most `MARGIN` times a tolerance.

        Args:
            tolerance: the largest relative error of a layer's attention; above 0.

        Returns:
            By layer name, then by the timestep from which on the choice holds.

        Raises:
            TypeError: `tolerance` is not a number.
            ValueError: it is not above 0, or not finite.
        """
        checked_tolerance(tolerance)
        return {one.layer.name: one.within(tolerance) for one in self.layers}

    def check_layers(self, layers: Sequence[LayerSpec]) -> None:
        """Refuse other layers than those that were measured.

        Raises:
            ValueError: a layer is missing, unexpected or of another head shape.
        """
        own = {one.layer.name: one.layer for one in self.layers}
        check_names("error profile of another model", own, [layer.name for layer in layers])
        for layer in layers:
            measured = own[layer.name]
            if (layer.num_heads, layer.head_dim) != (measured.num_heads, measured.head_dim):
                raise ValueError(
                    f"error profile of another model: {layer.name} has {layer.num_heads} heads of "
                    f"dim {layer.head_dim}, but was measured with {measured.num_heads} of dim "
                    f"{measured.head_dim}."
                )

    def save(self, path: str | Path) -> None:
        """Write a JSON file, in one step.

        Raises:
            OSError: the disk is full or not writable.
        """
        document = {
            "config": asdict(self.config),
            "layers": [
                {
                    "layer": one.layer.stored,
                    "num_tokens": one.num_tokens,
                    "costs": one.costs,
                    "errors": one.errors,
                }
                for one in self.layers
            ],
        }
        with atomic_write(Path(path)) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "ErrorProfile":
        """Read a file that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds something else.
        """
        return load_profile(
            cls,
            path,
            lambda document: cls(
                AVQConfig.from_dict(document["config"]), tuple(map(_read, document["layers"]))
            ),
        )

    def __str__(self) -> str:
        plans = [self.within(tolerance) for tolerance in SHOWN_TOLERANCES]
        cells = [["layer", *map(str, SHOWN_TOLERANCES)]] + [
            [
                one.layer.name,
                *(", ".join(map(str, plan[one.layer.name].values())) for plan in plans),
            ]
            for one in self.layers
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def set_tolerance(
    pipe: DiffusionPipeline | nn.Module, profile: ErrorProfile, tolerance: float
) -> None:
    """Set the sizes of a pipeline with AVQ, without codebooks, to those within a tolerance.

    Raises:
        TypeError: `tolerance` is not a number.
        ValueError: it is not above 0, or the profile is of other layers.
    """
    states = applied_states(pipe)
    choices = chosen_sizes(states, profile, tolerance)
    set_sizes(
        pipe,
        {
            state: {start: choice.sizes for start, choice in parts.items()}
            for state, parts in choices.items()
        },
    )
    measured = {one.layer.name: one.num_tokens for one in profile.layers}
    for layer, state in states.items():
        state.errors = tuple(choice.error for choice in choices[state].values())
        state.route.chosen_at = measured[layer.name]


def set_constant_sizes(
    states: Mapping[Layer, LayerState], profile: ErrorProfile, tolerance: float | None
) -> None:
    """Set the sizes of layers without timesteps to those within a tolerance.

    Raises:
        TypeError, ValueError: as `set_tolerance`, or the profile has several parts.
    """
    choices = chosen_sizes(states, profile, tolerance)
    if any(len(one.errors) > 1 for one in profile.layers):
        raise ValueError("error profile of another model: its errors change with timesteps.")
    measured = {one.layer.name: one.num_tokens for one in profile.layers}
    for layer, state in states.items():
        (choice,) = choices[state].values()
        state.set_sizes(choice.sizes, errors=(choice.error,), measured_tokens=measured[layer.name])


def chosen_sizes(
    states: Mapping[Layer, LayerState], profile: ErrorProfile, tolerance: float | None
) -> dict[LayerState, dict[int, Choice]]:
    """What layers run within a tolerance, by the start of each part.

    Raises:
        TypeError, ValueError: as `set_tolerance`.
    """
    plan = profile.within(checked_tolerance(tolerance))
    profile.check_layers([*states])
    return {state: plan[layer.name] for layer, state in states.items()}


def checked_tolerance(tolerance: Any) -> float:
    """Return a tolerance.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not above 0, or not finite.
    """
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool):
        raise TypeError(f"tolerance must be a number such as 0.1, but got {tolerance!r}.")
    if not 0 < tolerance < math.inf:
        raise ValueError(f"tolerance must be above 0 and finite, but got {tolerance}.")
    return tolerance


def resolve_source(
    source: AVQSource | ErrorProfile | None,
    tolerance: float | None,
    examples: Any,
    measurement: Mapping[str, Any],
    *,
    name: str,
    what: str,
    measure: Callable[..., ErrorProfile],
) -> AVQSource | ErrorProfile | None:
    """What `apply_avq` runs: a profile if there is a tolerance, else `source`.

    Args:
        source, tolerance: arguments of `apply_avq`.
        examples: what errors are measured on, None if nothing was given.
        measurement: further arguments of `measure`.
        name: the parameter of `examples`.
        what: the examples in words.
        measure: takes `examples`, `source` and `measurement`.

    Raises:
        TypeError, ValueError: as `apply_avq`.
    """
    given = [name] * (examples is not None) + [*measurement]
    if tolerance is None and not isinstance(source, ErrorProfile):
        if given:
            raise TypeError(
                f"{', '.join(given)} belong to the measurement of a tolerance; pass tolerance=0.1, "
                f"or drop them."
            )
        check_source(source)
        return source
    checked_tolerance(tolerance)
    if isinstance(source, ErrorProfile):
        if given:
            raise TypeError(
                f"an ErrorProfile is measured already; drop {name} and other arguments."
            )
        return source
    check_source(source)
    if isinstance(source, AVQCodebooks):
        raise ValueError(WITHOUT_CODEBOOKS)
    if examples is None:
        raise TypeError(f"a tolerance is measured on {what}; pass {name}, or an ErrorProfile.")
    return measure(examples, source, **measurement)


class Ladder:
    """The sizes that a layer is measured with: their costs, and their errors call by call.

    Args:
        layer: name, level and head shape.
        config: its sizes join those of `LADDER`.
        progress: show a progress bar while kernels compile.

    Attributes:
        num_tokens: of the first call.
        costs: by configuration string, for these tokens; sizes that meet as many
            columns as there are tokens are left out.
        calls: the errors (sizes,) of each call of `attend`.
    """

    def __init__(self, layer: LayerSpec, config: AVQConfig, progress: bool) -> None:
        self.layer = LayerSpec(**layer.stored)
        self.config = config
        self.progress = progress
        self.num_tokens = 0
        self.costs: dict[str, float] | None = None
        self.calls: list[Tensor] = []

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, codebook: None, **options: Any
    ) -> tuple[Tensor, str]:
        """Exact attention in place of `attention_and_backend`, whose arguments it takes."""
        exact, errors = self.measure(query, key, value, **options)
        self.calls.append(errors)
        return exact, EXACT

    def measure(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sink_key: Tensor | None = None,
        sink_value: Tensor | None = None,
        scale: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Exact attention, and the errors (sizes,) of AVQ with the same sinks and options.

        Raises:
            ValueError: attention has NaN or infinity.
        """
        keys, values = (
            own if sink is None else torch.cat([own, sink], dim=2)
            for own, sink in ((key, sink_key), (value, sink_value))
        )
        attend = partial(F.scaled_dot_product_attention, query, keys, values, scale=scale)
        exact = attend()
        if not exact.isfinite().all():
            raise ValueError(
                f"the attention of {self.layer.name} gives NaN or infinity; measure a model and "
                f"dtype whose output is finite."
            )
        options |= {"sink_key": sink_key, "sink_value": sink_value, "scale": scale}
        rungs = {
            sizes: partial(
                avq_attention,
                query,
                key,
                value,
                **options | AVQConfig.parse(sizes).sizes._asdict(),
            )
            for sizes in (self._rungs(key) if self.costs is None else self.costs)
        }
        if self.costs is None:
            self.num_tokens = key.shape[2]
            if key.is_cuda:
                self._compile(rungs.values(), key.device)
            self.costs = {
                sizes: relative_cost(
                    self._workload(sizes, key), self.num_tokens, key.device, avq=avq, exact=attend
                )
                for sizes, avq in rungs.items()
            }
        errors = [_relative_error(avq(), exact) for avq in rungs.values()]
        return exact, torch.tensor(errors, dtype=torch.float64)

    def layer_errors(self, values: Mapping[int, Tensor]) -> LayerErrors:
        """The largest errors among those (calls, sizes) of each part."""
        costs = self.costs or {}
        errors = {
            start: dict(zip(costs, calls.amax(0).tolist(), strict=True))
            for start, calls in values.items()
        }
        return LayerErrors(self.layer, self.num_tokens, costs, errors)

    def _rungs(self, key: Tensor) -> list[str]:
        """The sizes that meet fewer columns than there are tokens."""
        every = dict.fromkeys([*LADDER, str(self.config)])
        return [x for x in every if AVQConfig.parse(x).sizes.columns < key.shape[2]]

    def _workload(self, sizes: str, key: Tensor) -> Workload:
        batch, num_heads, _, head_dim = key.shape
        return Workload(
            next_power_of_two(batch * num_heads),
            head_dim,
            AVQConfig.parse(sizes).sizes,
            self.config.query_tile,
            key.dtype,
        )

    def _compile(self, calls: Collection[Callable[[], Tensor]], device: torch.device) -> None:
        """Run calls once in threads. Their kernels compile side by side, outside the GIL."""

        @torch.no_grad()
        def run(call: Callable[[], Tensor]) -> None:
            with torch.accelerator.device_index(device.index):
                call()

        with ThreadPoolExecutor() as pool:
            done = pool.map(run, calls)
            hidden = not self.progress
            list(tqdm(done, "kernels", total=len(calls), leave=False, disable=hidden))


@contextmanager
def measuring(
    states: Mapping[Layer, LayerState], config: AVQConfig, *, progress: bool
) -> Iterator[Callable[[], ErrorProfile]]:
    """Run layers with AVQ exact inside the `with` block, and measure the sizes of the ladder.

    Compiled models run eagerly there.

    Args:
        states: of the layers.
        config: that the states were made of.
        progress: show a progress bar while kernels compile.

    Returns:
        A function that makes the profile of the calls so far. It raises RuntimeError if AVQ would
        have served no call of a layer.
    """
    ladders = {state: Ladder(layer, config, progress) for layer, state in states.items()}

    def profile() -> ErrorProfile:
        for state, ladder in ladders.items():
            if not ladder.calls:
                raise RuntimeError(
                    f"{ladder.layer.name} has no call that AVQ serves: "
                    f"{state.last_call or 'it did not run'}."
                )
        return ErrorProfile(
            config,
            tuple(
                ladder.layer_errors({NUM_TRAIN_TIMESTEPS: torch.stack(ladder.calls)})
                for ladder in ladders.values()
            ),
        )

    for state, ladder in ladders.items():
        state.measuring = ladder.attend
    with torch.compiler.set_stance("force_eager"):
        yield profile


@torch.no_grad()
def measure_error(
    pipe: DiffusionPipeline,
    prompts: Sequence[str],
    config: AVQConfig | None = None,
    *,
    num_inference_steps: int = 6,
    parts: int = 3,
    seed: int = 0,
    progress: bool = True,
    **pipe_arguments: Any,
) -> ErrorProfile:
    """`avq_diffusers.measure_error` of UNets.

    Raises:
        TypeError, ValueError, RuntimeError: as there.
    """
    prompts = checked_prompts(pipe, prompts, pipe_arguments)
    check_probe(num_inference_steps, parts)
    unet = unet_of(pipe)
    config = default_source(unet) if config is None else config
    check_measured(config)
    layers = select_layers(unet, config.levels, config.exact)
    if any(layer.has_linfusion for layer in layers):
        raise ValueError("this UNet has LinFusion layers; call remove_linfusion(pipe) first.")
    states = [state for model in models_of(pipe).values() for state in states_of(model).values()]
    bar = tqdm(total=len(prompts) * num_inference_steps, desc="error", disable=not progress)
    errors = _Errors(config, parts, bar)
    with bar, disabled(states), errors.watch(unet, layers):
        run_prompts(pipe, prompts, num_inference_steps, seed, pipe_arguments)
    return ErrorProfile(config, tuple(errors.of_layer(layer) for layer in layers))


class _Errors(Probe):
    """The errors of each layer along the ladder."""

    def __init__(self, config: AVQConfig, parts: int, bar: tqdm) -> None:
        super().__init__(parts, bar)
        self.config = config
        self.grids: dict[nn.Module, tuple[int, int]] = {}
        self.ladders: dict[str, Ladder] = {}

    @contextmanager
    def watch(self, unet: nn.Module, layers: Collection[SelfAttentionLayer]) -> Iterator[None]:
        self.ladders = {
            layer.name: Ladder(layer, self.config, progress=not self.bar.disable)
            for layer in layers
        }
        with ExitStack() as hooks:
            for transformer in {layer.transformer for layer in layers}:
                see_grid = transformer.register_forward_pre_hook(self.see_grid, with_kwargs=True)
                hooks.enter_context(see_grid)
            hooks.enter_context(super().watch(unet, layers))
            yield

    def see_grid(self, transformer: nn.Module, args: tuple, kwargs: dict) -> None:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        self.grids[transformer] = hidden_states.shape[-2:]

    def measure(self, layer: SelfAttentionLayer, hidden_states: Tensor) -> Tensor | None:
        height, width = self.grids[layer.transformer]
        if hidden_states.shape[1] != height * width:
            return None
        query, key, value = (
            LayerWeights().project_heads(layer.attn, name, hidden_states)
            for name in ("to_q", "to_k", "to_v")
        )
        _, errors = self.ladders[layer.name].measure(
            query,
            key,
            value,
            num_updates=self.config.num_updates,
            query_tile=self.config.query_tile,
            query_order=query_order(height, width, self.config.query_order, key.device),
        )
        return errors

    def of_layer(self, layer: SelfAttentionLayer) -> LayerErrors:
        return self.ladders[layer.name].layer_errors(self.values_of(layer.name))


def _error_of(choice: Choice) -> float:
    return choice.error


def _relative_error(output: Tensor, exact: Tensor) -> float:
    exact = exact.float()
    return float((output.float() - exact).norm() / exact.norm())


def check_measured(config: AVQConfig) -> None:
    """Refuse a configuration whose sizes are no rung.

    Raises:
        TypeError: it is not an `AVQConfig`.
        ValueError: it has overrides, stored codewords, a key norm or tiled importance.
    """
    if not isinstance(config, AVQConfig):
        raise TypeError(f"config must be an AVQConfig, but got {config!r}.")
    for name, refused in (
        ("overrides", config.overrides),
        ('codewords="stored"', config.codewords == "stored"),
        ("key_norm", config.key_norm),
        ("importance_tile", config.importance_tile is not None),
    ):
        if refused:
            raise ValueError(
                f"a tolerance chooses sizes of AVQ with codewords of each call; drop {name}."
            )


def _read(stored: Mapping[str, Any]) -> LayerErrors:
    for sizes in stored["costs"]:
        AVQConfig.parse(sizes)
    return LayerErrors(
        LayerSpec(**stored["layer"]),
        stored["num_tokens"],
        stored["costs"],
        {int(start): errors for start, errors in stored["errors"].items()},
    )
