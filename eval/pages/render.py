"""Render pages from templates and results: `python -m eval pages`.

A page has one table, one plot and one conclusion. New results need new pages.
"""

from collections.abc import Iterator
from pathlib import Path

from avq_diffusers.files import write_text
from eval.pages.figures import PAGES, Figures


def rendered(name: str, folder: Path, found: Figures) -> str:
    """The text of a page, with links relative to the results' folder."""
    if not found.files:
        return f"# {name.capitalize()}\n\nNot measured yet in this version.\n"
    places = sorted(path.relative_to(folder).as_posix() for path in found.files)
    files = ",\n".join(f"[{place.removesuffix('.json')}]({place})" for place in places)
    text = f"{_template(name)}\n{_template('end')}"
    return text.format(**found.values, sizes=_template("sizes").strip(), files=files)


def write_pages(folder: Path) -> Iterator[Path]:
    """Write the pages and their plots to a folder of results; yield the pages' paths.

    Raises:
        FileNotFoundError: a result is missing.
        ValueError: a result is incomplete, or lacks a row that a page shows.
    """
    for name, page in [(name, figures(folder)) for name, figures in PAGES.items()]:
        if page.draw is not None:
            page.draw(folder / page.plot)
        path = folder / f"{name}.md"
        write_text(path, rendered(name, folder, page))
        yield path


def _template(name: str) -> str:
    return (Path(__file__).parent / f"{name}.md").read_text(encoding="utf-8")
