"""`open_samples`: the samples of a scene generator, a folder, or a dataset."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from avq_diffusers.captions import read_caption_list, read_text
from avq_diffusers.files import sha256_all
from avq_diffusers.images import image_files, refuse_linked_folders
from distill.data.config import DataConfig
from distill.data.samples import RowSamples, SceneSamples

if TYPE_CHECKING:
    import datasets

# What `datasets` raises, beside its own errors, for a wrong name, split or column.
LOADING_ERRORS = (NotImplementedError, OSError, TypeError, ValueError)


def open_samples(config: DataConfig, image_size: int) -> SceneSamples | RowSamples:
    """Open the source as a map-style dataset of S x S images with captions.

    Args:
        config: the source.
        image_size: S.

    Raises:
        FileNotFoundError: the folder, images or captions do not exist.
        ValueError: the source cannot be read, a column is missing or holds no images, the numbers
            of captions and images differ, or there are fewer samples than `num_samples`.
    """
    if config.source == "scenes":
        return SceneSamples(config.num_samples, image_size)
    captions = None if config.captions is None else read_caption_list(Path(config.captions))
    if config.source == "folder":
        rows, origin = _folder_rows(Path(config.path), has_sidecars=captions is None)
    else:
        rows, origin = _dataset_rows(config)
    if captions is not None and len(captions) != len(rows):
        raise ValueError(
            f"{config.captions} must have one caption per row of {config.path}, {len(rows)}, but "
            f"has {len(captions)}."
        )
    if config.num_samples is not None and config.num_samples > len(rows):
        raise ValueError(
            f"num_samples is {config.num_samples}, but {config.path} has {len(rows)} samples."
        )
    digest = hashlib.sha256(json.dumps([origin, captions]).encode()).hexdigest()
    return RowSamples(rows, captions, config, image_size, digest)


def _folder_rows(folder: Path, *, has_sidecars: bool) -> tuple[list[dict[str, Any]], Any]:
    """Return a folder's images by path, with the captions beside them, and their origin."""
    files = image_files(folder.absolute())
    if not files:
        raise FileNotFoundError(f"there are no images in the folder {folder}.")
    sidecars = [path.with_suffix(".txt") for path in files] if has_sidecars else []
    if missing := [path for path in sidecars if not path.is_file()]:
        raise FileNotFoundError(
            f"{len(missing)} of {len(files)} images have no caption beside them, such as "
            f"{missing[0]}; add them or name a file of captions."
        )
    captions = [read_text(path).strip() for path in sidecars] or [None] * len(files)
    rows = [
        {"image": {"path": str(path), "bytes": None}, "caption": caption}
        for path, caption in zip(files, captions, strict=True)
    ]
    return rows, [_contents(folder.absolute(), files), captions]


def _dataset_rows(config: DataConfig) -> tuple["datasets.Dataset", Any]:
    """Return the rows of a dataset with undecoded images, and their origin."""
    import datasets

    refuse_linked_folders(Path(config.path))
    image_column = config.image_column
    columns = [image_column]
    if config.caption_column is not None:
        columns.append(config.caption_column.split(".")[0])
    try:
        rows = datasets.load_dataset(config.path, split=config.split)
        local = sorted(path for path in Path(config.path).rglob("[!.]*") if path.is_file())
        # Of a dataset on the Hub, the fingerprint covers revision and split.
        contents = _contents(Path(config.path), local) if local else rows._fingerprint
        found = rows.select_columns(columns).cast_column(image_column, datasets.Image(decode=False))
    except (*LOADING_ERRORS, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(
            f"{config.path} cannot be loaded as source huggingface with images in the column "
            f"{image_column}: {reason}"
        ) from error
    return found, [contents, config.split, columns]


def _contents(folder: Path, files: Sequence[Path]) -> list[tuple[str, str | None]]:
    """Return what decides samples and their order, wherever the folder is and whenever copied."""
    names = (path.relative_to(folder).as_posix() for path in files)
    return list(zip(names, sha256_all(files), strict=True))
