"""Errors and costs along the ladder of sizes, measured while the layers run exact attention."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from tqdm import tqdm

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.attention.orders import query_order
from avq_diffusers.config import AVQConfig
from avq_diffusers.plugin.error_profile import ErrorProfile, LayerErrors
from avq_diffusers.plugin.layer_state import LayerState, default_source, disabled, states_of
from avq_diffusers.plugin.layer_weights import LayerWeights
from avq_diffusers.plugin.layers import (
    Layer,
    LayerSpec,
    SelfAttentionLayer,
    models_of,
    select_layers,
    unet_of,
)
from avq_diffusers.plugin.probe import Probe, check_probe
from avq_diffusers.plugin.prompts import checked_prompts, run_prompts
from avq_diffusers.plugin.refinement import EXACT
from avq_diffusers.plugin.routing import Workload, next_power_of_two, relative_cost
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
            self.config.num_updates,
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
