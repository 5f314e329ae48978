"""Results as Markdown."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Column = str | Callable[[Any], Any]  # the field of a row, or what is made of the row


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of these cells."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def rows_table(
    columns: Mapping[str, Column], rows: Sequence[Mapping[str, Any]], form: str = ".4g"
) -> str:
    """A table with a line for each row.

    Args:
        columns: by their titles. A field that no row has is left out.
        rows: a field that one lacks, or that is None, is a dash.
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


def figure(name: str, form: str = ".4g") -> Column:
    """A column of a field, ± its standard error if `{name}_sem` has one."""
    return lambda row: with_error(row.get(name), row.get(f"{name}_sem"), form)


def number(value: float | None, form: str = ".4g") -> str:
    """A cell: the value in this format, or a dash for None."""
    return "-" if value is None else format(value, form)


def with_error(value: float | None, error: float | None, form: str) -> str:
    """A cell: the value and its standard error in this format; without one that is None or NaN."""
    has_error = value is not None and error is not None and not math.isnan(error)
    return number(value, form) + (f" ± {error:{form.removeprefix('+')}}" if has_error else "")
