"""Results as Markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of these cells."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def number(value: float | None, form: str = ".4g") -> str:
    """A cell: the value in this format, or a dash for None."""
    return "-" if value is None else format(value, form)
