"""Results as Markdown."""

import math
from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of these cells."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def number(value: float | None, form: str = ".4g") -> str:
    """A cell: the value in this format, or a dash for None."""
    return "-" if value is None else format(value, form)


def with_error(value: float | None, error: float | None, form: str) -> str:
    """A cell: the value and its standard error in this format; without one that is None or NaN."""
    has_error = value is not None and error is not None and not math.isnan(error)
    return number(value, form) + (f" ± {error:{form.removeprefix('+')}}" if has_error else "")
