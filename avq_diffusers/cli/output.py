"""Where `avq` writes images."""

from pathlib import Path

from PIL import Image

from avq_diffusers.files import atomic_write
from avq_diffusers.options import check_writable


def sheet_path(out: Path) -> Path:
    """Return where the sheet of `--out` goes: beside it."""
    return out.parent / f"{out.stem}_sheet{out.suffix}"


def check_image_path(path: Path, *others: Path) -> None:
    """Refuse a bad `--out` before the work starts; `others` are written beside `path`."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--out must end in .png, but got {str(path)!r}.")
    for file in (path, *others):
        if file.is_dir():
            raise ValueError(f"--out {path} writes {file}, but that is a folder.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--out: the folder {folder} does not exist.")
    check_writable("--out", folder)


def save_image(image: Image.Image, path: Path) -> None:
    """Write a PNG in one step."""
    with atomic_write(path) as temporary:
        image.save(temporary)
