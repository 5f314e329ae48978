"""`summary`: what each self-attention layer runs, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diffusers import DiffusionPipeline
from diffusers.models.attention_processor import Attention
from torch import nn

from avq_diffusers.config import Sizes, configuration_string
from avq_diffusers.plugin.layer_state import AVQ_CALL, LayerState
from avq_diffusers.plugin.layers import LayerSpec, models_of, select_layers
from avq_diffusers.plugin.processor import AVQProcessor, custom_processor
from avq_diffusers.plugin.refinement import EXACT, SizeSchedule, schedules_of


@dataclass(frozen=True)
class LayerReport:
    """One row of a `Summary`.

    Attributes:
        name: module path of the self-attention layer.
        level: UNet level.
        num_heads: heads.
        head_dim: head dim.
        config: such as M64P16C8, M64P8-16C8 with a schedule from 8 to 16 refined parents, or
            "M64P8C8, exact" with one that ends exact; empty without AVQ.
        error: the largest that `measure_error` measured with this configuration; None if it was
            not measured.
        runs: what the last call did, or the next one will: AVQ with its backend and tuned
            projections if any, exact attention and why, or the attention of another processor.
        num_tokens: in the last grid; None before the first call.
        calls: how many calls of each kind there were. Calls in compiled code are not counted.
    """

    name: str
    level: int
    num_heads: int
    head_dim: int
    config: str
    error: float | None
    runs: str
    num_tokens: int | None
    calls: dict[str, int]


@dataclass(frozen=True)
class Summary:
    """What each self-attention layer runs; `str()` is a table."""

    rows: tuple[LayerReport, ...]

    def cells(self) -> list[list[str]]:
        """The rows of the table, header first."""
        is_measured = any(row.error is not None for row in self.rows)
        error = ["error"] if is_measured else []
        header = ["layer", "level", "heads", "config", *error, "runs", "tokens", "calls"]
        return [header] + [
            [
                row.name,
                str(row.level),
                f"{row.num_heads}x{row.head_dim}",
                row.config or "-",
                *(["-" if row.error is None else f"{row.error:.3f}"] if is_measured else []),
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


def summary(pipe: DiffusionPipeline | nn.Module) -> Summary:
    """Report whether each self-attention layer runs AVQ or exact attention, and why.

    The names of a ControlNet's layers begin with `controlnet.`.

    Raises:
        TypeError: `pipe` has no UNet.
    """
    rows = []
    for prefix, model in models_of(pipe).items():
        schedules = schedules_of(model)
        for layer in select_layers(model):
            state = layer.avq_state
            runs = _runs(layer.attn, state)
            rows.append(layer_report(prefix + layer.name, layer, state, runs, schedules))
    return Summary(tuple(rows))


def layer_report(
    name: str,
    layer: LayerSpec,
    state: LayerState | None,
    runs: str,
    schedules: Mapping[LayerState, SizeSchedule],
) -> LayerReport:
    """The row of a layer; without AVQ it has no state."""
    config, error, num_tokens, calls = "", None, None, {}
    if state is not None:
        order = state.call.get().query_order
        config = _config([*schedules.get(state, {0: state.sizes.get()}).values()])
        error = max(state.errors, default=None)
        num_tokens = None if order is None else len(order)
        calls = dict(state.calls)
    return LayerReport(
        name,
        layer.level,
        layer.num_heads,
        layer.head_dim,
        config,
        error,
        runs,
        num_tokens,
        calls,
    )


def _config(schedule: Sequence[Sizes | None]) -> str:
    avq = [sizes for sizes in schedule if sizes is not None]
    if len(avq) < len(schedule) or len({sizes._replace(num_refined=0) for sizes in avq}) > 1:
        return ", ".join(EXACT if sizes is None else str(sizes) for sizes in schedule)
    parents, _, children, exact_keys = avq[0]
    refined = "-".join(str(sizes.num_refined) for sizes in avq)
    return configuration_string(parents, refined, children, exact_keys)


def _runs(attn: Attention, state: LayerState | None) -> str:
    own_name = getattr(attn.processor, "runs", None)
    if own_name is not None:
        return own_name
    custom, processor = custom_processor(attn), type(attn.processor).__name__
    if custom is not None:
        return f"custom: {custom}"
    if state is None:
        return f"exact: {processor}"
    if not isinstance(attn.processor, AVQProcessor):
        return f"exact: replaced by {processor}"
    return runs_by_state(state)


def runs_by_state(state: LayerState) -> str:
    """What a layer with AVQ runs if nothing else took its place."""
    if not state.enabled:
        return "exact: disabled"
    if state.last_call not in (None, AVQ_CALL, "disabled"):
        return f"exact: {state.last_call}"
    backend = f" ({state.last_backend} backend)" if state.last_backend else ""
    return f"AVQ{backend}{', tuned' if state.weights.projection_changes else ''}"
