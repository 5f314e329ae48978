"""`summary`: what each self-attention layer runs, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from avq_diffusers.hosts.core import (
    AVQ_CALL,
    DISABLED,
    EXACT,
    Hosted,
    Layer,
    LayerSpec,
    LayerState,
    as_table,
    short_names,
)
from avq_diffusers.hosts.measuring import Allocation


@dataclass(frozen=True)
class LayerReport(LayerSpec):
    """One row of a `Summary`.

    Attributes:
        name, level, num_heads, head_dim: of the self-attention layer.
        runs: what the last call outside compiled code ran, or the next one will: AVQ with its
            backend and tuned projections if any, exact attention and why, or another attention
            processor. Compiled code may run the other of AVQ and exact attention.
        config: such as M64C8T1e-4, or "M64C8T1e-3, exact" with a schedule that ends exact; empty
            without AVQ.
        effect: the model's output error if AVQ ran in this layer only; None if no tolerance chose
            its sizes.
        columns: codewords and exact keys that a query tile attended to in the last AVQ call, on
            average; None if none ran outside compiled code.
        num_tokens: tokens of the last grid; None before the first call.
        calls: number of calls of each kind since sizes were last set. Calls in compiled code are
            not counted.
    """

    runs: str
    config: str = ""
    effect: float | None = None
    columns: tuple[float, float] | None = None
    num_tokens: int | None = None
    calls: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """What each self-attention layer runs; `str()` is a table.

    Attributes:
        rows: one per layer.
        allocation: what a tolerance chose; None without one, or if sizes have changed since.
        parallelism: how several ranks run the models, such as "Ulysses, degree 2"; empty for one
            process.
    """

    rows: tuple[LayerReport, ...]
    allocation: Allocation | None = None
    parallelism: str = ""

    def cells(self) -> list[list[str]]:
        """The rows of the table, header first; layers without the ending that all names share."""
        shown_names = short_names([row.name for row in self.rows])
        is_measured = any(row.effect is not None for row in self.rows)
        effect = ["effect"] if is_measured else []
        names = ["layer", "level", "heads", "config", *effect, "runs", "columns", "tokens", "calls"]
        return [names] + [
            [
                shown_name,
                str(row.level),
                f"{row.num_heads}x{row.head_dim}",
                row.config or "-",
                *(["-" if row.effect is None else f"{row.effect:.2g}"] if is_measured else []),
                row.runs,
                _columns(row),
                "-" if row.num_tokens is None else str(row.num_tokens),
                ", ".join(f"{kind}: {count}" for kind, count in row.calls.items()) or "-",
            ]
            for shown_name, row in zip(shown_names, self.rows, strict=True)
        ]

    def __str__(self) -> str:
        lines = [as_table(self.cells())]
        if self.parallelism:
            lines.append(f"parallelism: {self.parallelism}")
        if self.allocation is not None:
            lines.append(str(self.allocation))
        return "\n".join(lines)


def report(models: Sequence[Hosted]) -> Summary:
    """What each layer of these models runs."""
    rows = [
        _row(hosted, layer, layer.avq_state)
        for hosted in models
        for layer in hosted.host.layers(hosted.model)
    ]
    states = [state for hosted in models for state in hosted.states.values()]
    allocation = states[0].allocation if states else None
    is_whole = all(state.allocation is allocation for state in states)
    ranks = dict.fromkeys(str(x) for hosted in models if (x := hosted.ranks))
    return Summary(tuple(rows), allocation if is_whole else None, "; ".join(ranks))


def _row(hosted: Hosted, layer: Layer, state: LayerState | None) -> LayerReport:
    name = hosted.prefix + layer.name
    row = LayerReport(**layer.stored | {"name": name}, runs=_runs(hosted, layer, state))
    if state is None:
        return row
    shown = state.shown
    return replace(
        row,
        config=", ".join(EXACT if x is None else str(x) for x in state.schedule.values()),
        effect=None if state.allocation is None else state.allocation.effect(name),
        columns=None if shown is None else tuple(shown.float().mean(dim=(0, 1, 2)).tolist()),
        num_tokens=None if state.last_order is None else len(state.last_order),
        calls=dict(state.calls),
    )


def _columns(row: LayerReport) -> str:
    if row.columns is None:
        return "-"
    codewords, keys = row.columns
    return f"{codewords:.0f}" + (f" + {keys:.0f} keys" if keys >= 0.5 else "")


def _runs(hosted: Hosted, layer: Layer, state: LayerState | None) -> str:
    own_name = getattr(getattr(layer.attn, "processor", None), "runs", None)
    if own_name is not None:
        return own_name
    other = hosted.host.other_attention(layer)
    if state is None:
        name, levels = hosted.host.runs_without_avq(layer), {x.level for x in hosted.states}
        if other is not None and not other.is_exact:
            return f"custom: {name}"
        if not levels:
            return f"exact: {name}"
        return f"exact: {'layer' if layer.level in levels else f'level {layer.level}'} not chosen"
    if other is not None:
        return f"exact: replaced by {other.name}" if other.is_exact else f"custom: {other.name}"
    if not state.enabled:
        return "exact: disabled"
    if state.last_call not in (None, AVQ_CALL, DISABLED):
        return f"exact: {state.last_call}"
    backend = f" ({state.last_backend} backend)" if state.last_backend else ""
    return f"AVQ{backend}{', tuned' if state.weights.projection_changes else ''}"
