"""Images that `avq` writes."""

from pathlib import Path

from PIL import Image

from avq_diffusers.files import TEMPORARY, atomic_write


def sheet_path(output: Path) -> Path:
    """Return the path of `--output`'s sheet, beside it."""
    return output.parent / f"{output.stem}_sheet{output.suffix}"


def check_image_path(path: Path) -> None:
    """Refuse a bad `--output` before work starts."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--output must end in .png, but got {str(path)!r}.")
    for file in (path, sheet_path(path)):
        if file.is_dir():
            raise ValueError(f"--output {path} writes {file}, but that is a folder.")
        temporary = file.with_name(f"{TEMPORARY}{file.name}")
        try:
            temporary.touch()
            temporary.unlink()
        except OSError as error:
            raise ValueError(f"--output: {file} cannot be written ({error.strerror}).") from error


def save_sheet(sheet: Image.Image, output: Path) -> None:
    """Write the sheet of `output`, which has already been written."""
    try:
        save_image(sheet, sheet_path(output))
    except OSError as error:
        raise OSError(f"{output} is saved, but its sheet is not: {error}") from error


def save_image(image: Image.Image, path: Path) -> None:
    """Write a PNG atomically."""
    with atomic_write(path) as temporary:
        image.save(temporary)
