"""Images and tables that `avq` writes."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from rich.box import SIMPLE_HEAD
from rich.table import Table

from avq_diffusers.files import TEMPORARY, atomic_write


def sheet_path(out: Path) -> Path:
    """Return the path of `--out`'s sheet, beside it."""
    return out.parent / f"{out.stem}_sheet{out.suffix}"


def check_image_path(path: Path) -> None:
    """Refuse a bad `--out` before work starts."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--out must end in .png, but got {str(path)!r}.")
    for file in (path, sheet_path(path)):
        if file.is_dir():
            raise ValueError(f"--out {path} writes {file}, but that is a folder.")
        temporary = file.with_name(f"{TEMPORARY}{file.name}")
        try:
            temporary.touch()
            temporary.unlink()
        except OSError as error:
            raise ValueError(f"--out: {file} cannot be written ({error.strerror}).") from error


def table_of(
    rows: Sequence[Sequence[str]], title: str | None = None, caption: str | None = None
) -> Table:
    """A table without lines; its first row and column are headings."""
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if column else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    return table


def save_sheet(sheet: Image.Image, out: Path) -> None:
    """Write the sheet of `out`, which has already been written."""
    try:
        save_image(sheet, sheet_path(out))
    except OSError as error:
        raise OSError(f"{out} is saved, but its sheet is not: {error}") from error


def save_image(image: Image.Image, path: Path) -> None:
    """Write a PNG atomically."""
    with atomic_write(path) as temporary:
        image.save(temporary)
