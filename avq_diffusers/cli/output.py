"""Images that `avq` writes."""

from pathlib import Path

from PIL import Image

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
