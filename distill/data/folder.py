"""`folder_rows`: the image files of a folder, with captions of sidecars or of its metadata."""

import csv
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from avq_diffusers.captions import decode_json, read_text
from distill.data.config import DataConfig
from distill.data.images import image_extensions

FILE_NAME = "file_name"


def folder_rows(config: DataConfig) -> list[dict[str, Any]]:
    """Return a dict of `image` and caption for each image, where `image` holds a path.

    Raises:
        FileNotFoundError: there are no images, sidecars or metadata.
        ImportError: metadata.parquet needs the package `pyarrow`.
        ValueError: a file of captions cannot be read, or metadata lacks a column.
    """
    folder = Path(config.path).absolute()
    image_column, caption_column = config.columns
    column = caption_column.split(".")[0]
    if config.caption_column is not None:
        pairs = list(_metadata(folder, column))
    else:
        images = _images(folder)
        captions = _sidecars(images) if config.captions is None else [None] * len(images)
        pairs = list(zip(images, captions, strict=True))
    return [
        {image_column: {"path": str(path), "bytes": None}, column: caption}
        for path, caption in pairs
    ]


def _images(folder: Path) -> list[Path]:
    extensions = image_extensions()
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in extensions and not path.name.startswith(".")
    ]
    if not files:
        raise FileNotFoundError(f"there are no images in the folder {folder}.")
    return files


def _sidecars(images: list[Path]) -> list[str]:
    paths = [path.with_suffix(".txt") for path in images]
    if missing := [path for path in paths if not path.exists()]:
        raise FileNotFoundError(
            f"{len(missing)} of {len(paths)} images have no caption beside them, such as "
            f"{missing[0]}; add them or name the caption_column of the folder's metadata."
        )
    return [read_text(path).strip() for path in paths]


def _metadata(folder: Path, column: str) -> Iterator[tuple[Path, Any]]:
    """Yield the image and the value of a column of each entry."""
    files = [path for path in sorted(folder.rglob("*")) if path.name in METADATA]
    if not files:
        raise FileNotFoundError(f"{folder} has none of {', '.join(METADATA)}.")
    for path in files:
        for number, entry in enumerate(METADATA[path.name](path), 1):
            if not isinstance(entry, dict):
                raise ValueError(f"entry {number} of {path} must be an object, but is {entry!r}.")
            for name in (FILE_NAME, column):
                if name not in entry:
                    raise ValueError(
                        f"entry {number} of {path} has no column {name}, only {', '.join(entry)}."
                    )
            if not isinstance(entry[FILE_NAME], str):
                raise ValueError(
                    f"entry {number} of {path}: {FILE_NAME} must be text, but is "
                    f"{entry[FILE_NAME]!r}."
                )
            yield path.parent / entry[FILE_NAME], entry[column]


def _read_jsonl(path: Path) -> list[Any]:
    lines = enumerate(read_text(path).split("\n"), 1)
    return [decode_json(text.encode(), f"line {n} of {path}") for n, text in lines if text.strip()]


def _read_csv(path: Path) -> list[dict[str, str | None]]:
    text = StringIO(read_text(path))
    try:
        return [{x: y or None for x, y in row.items()} for row in csv.DictReader(text)]
    except csv.Error as error:
        raise ValueError(f"{path} is not CSV ({error}).") from error


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            f'{path} needs the package pyarrow: install it with pip install "avq-diffusers[train]".'
        ) from error
    try:
        return parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not Parquet ({error}).") from error


METADATA = {
    "metadata.jsonl": _read_jsonl,
    "metadata.csv": _read_csv,
    "metadata.parquet": _read_parquet,
}
