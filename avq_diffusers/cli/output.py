"""Where `avq` writes images."""

from pathlib import Path

from PIL import Image

from avq_diffusers.files import TEMPORARY, atomic_write
from avq_diffusers.options import check_writable


def sheet_path(out: Path) -> Path:
    """Return the path of `--out`'s sheet, beside it."""
    return out.parent / f"{out.stem}_sheet{out.suffix}"


def check_image_path(path: Path, *others: Path) -> None:
    """Refuse a bad `--out` before work starts; `others` are written beside `path`."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--out must end in .png, but got {str(path)!r}.")
    for file in (path, *others):
        if file.is_dir():
            raise ValueError(f"--out {path} writes {file}, but that is a folder.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--out: the folder {folder} does not exist.")
    check_writable("--out", folder)
    for file in (path, *others):
        temporary = file.with_name(f"{TEMPORARY}{file.name}")
        try:
            temporary.touch()
            temporary.unlink()
        except OSError as error:
            raise ValueError(f"--out: {file} cannot be written ({error.strerror}).") from error


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
