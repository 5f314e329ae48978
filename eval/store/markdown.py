"""Results as Markdown."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import stdev
from typing import Any

Column = str | Callable[[Any], Any]  # a field of a row, or a function of the row


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with these cells."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def rows_table(
    columns: Mapping[str, Column], rows: Sequence[Mapping[str, Any]], form: str = ".4g"
) -> str:
    """A table with one line per row.

    Args:
        columns: title -> column. Fields that no row has are left out.
        rows: a missing field, or None, is shown as a dash.
        form: format of floats.
    """
    shown = {
        title: column
        for title, column in columns.items()
        if callable(column) or any(column in row for row in rows)
    }

    def cell(row: Mapping[str, Any], column: Column) -> str:
        value = column(row) if callable(column) else row.get(column)
        return number(value, form) if isinstance(value, float | None) else str(value)

    cells = ([cell(row, column) for column in shown.values()] for row in rows)
    return markdown_table(list(shown), cells)


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of a mean; None for a single value."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def figure(name: str, form: str = ".4g") -> Column:
    """A column for a field, ± its standard error if there is a `{name}_sem`."""

    def cell(row: Mapping[str, Any]) -> str:
        value, error = row.get(name), row.get(f"{name}_sem")
        has_error = value is not None and error is not None and not math.isnan(error)
        return number(value, form) + (f" ± {error:{form.removeprefix('+')}}" if has_error else "")

    return cell


def number(value: float | None, form: str = ".4g") -> str:
    """A cell: the value in this format, or a dash for None."""
    return "-" if value is None else format(value, form)
