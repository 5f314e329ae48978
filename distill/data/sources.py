"""`open_samples`: the samples of a scene generator, a folder, a data set, or tars."""

import glob
import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from avq_diffusers.captions import read_caption_list
from distill.data.config import DataConfig
from distill.data.folder import folder_rows
from distill.data.samples import RowSamples, SceneSamples
from distill.data.tars import TarRows

if TYPE_CHECKING:
    import datasets

# What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` leave in a folder.
SAVED = ("state.json", "dataset_dict.json")


def open_samples(config: DataConfig, image_size: int) -> SceneSamples | RowSamples:
    """Open the source as a map-style data set of S x S images with captions.

    Args:
        config: the source.
        image_size: S.

    Raises:
        FileNotFoundError: the folder, tars, images or captions do not exist.
        ImportError: the source needs the package `datasets`.
        ValueError: the source cannot be read, a column is missing or holds no images, the number of
            captions is not that of the images, or there are fewer samples than `num_samples`.
    """
    if config.source == "scenes":
        return SceneSamples(config.num_samples, image_size)
    rows, origin = ROWS[config.source](config)
    captions = None
    if config.captions is not None:
        captions = read_caption_list(Path(config.captions))
        if len(captions) != len(rows):
            raise ValueError(
                f"{config.captions} must have a caption for each of the {len(rows)} rows of "
                f"{config.path}, but has {len(captions)}."
            )
        origin += captions
    if config.num_samples is not None and config.num_samples > len(rows):
        raise ValueError(
            f"num_samples is {config.num_samples}, but {config.path} has {len(rows)} samples."
        )
    digest = hashlib.sha256(json.dumps(origin, default=str).encode()).hexdigest()
    return RowSamples(rows, captions, config, image_size, digest)


def _folder_rows(config: DataConfig) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the images of a folder, and what they were made from."""
    rows = folder_rows(config)
    files = [Path(row[config.columns[0]]["path"]) for row in rows]
    return rows, [*rows, *map(_size_and_time, files)]


def _tar_rows(config: DataConfig) -> tuple[TarRows, list[Any]]:
    """Return the samples of the tars, and what they were made from."""
    columns = _columns(config)
    tars = _tar_files(config.path)
    rows = TarRows(tars, columns)
    _check_columns(config, columns, rows.endings)
    return rows, [columns, *((str(path), *_size_and_time(path)) for path in tars)]


def _dataset_rows(config: DataConfig) -> tuple["datasets.Dataset", list[Any]]:
    """Return the rows of a data set, and what they were made from."""
    datasets = _import_datasets(config.source)
    rows = _load_rows(datasets, config)
    image_column, *_ = columns = _columns(config)
    _check_columns(config, columns, rows.column_names)
    origin = [rows._fingerprint]  # of data files, revision and split
    rows = rows.select_columns(columns)
    try:
        rows = rows.cast_column(image_column, datasets.Image(decode=False))
    except (NotImplementedError, TypeError) as error:
        raise ValueError(
            f"column {image_column} of {config.path} holds {rows.features[image_column]}, not "
            f"images; name another image_column."
        ) from error
    return rows, origin


def _columns(config: DataConfig) -> list[str]:
    """Return the columns that are read, without keys of their mappings."""
    image_column, caption_column = config.columns
    captions = [] if config.caption_column is None else [caption_column.split(".")[0]]
    return [image_column, *captions]


def _check_columns(config: DataConfig, columns: list[str], present: Collection[str]) -> None:
    for column in columns:
        if column not in present:
            raise ValueError(f"{config.path} has no column {column}, only {', '.join(present)}.")


def _import_datasets(source: str) -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"source {source} needs the package datasets: "
            f'install it with pip install "avq-diffusers[train]".'
        ) from error
    return datasets


def _load_rows(datasets: ModuleType, config: DataConfig) -> "datasets.Dataset":
    try:
        if any(Path(config.path, name).exists() for name in SAVED):
            return _load_saved(datasets, config)
        return datasets.load_dataset(config.path, split=config.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(
            f"{config.path} cannot be loaded as source {config.source}: {reason}"
        ) from error


def _load_saved(datasets: ModuleType, config: DataConfig) -> "datasets.Dataset":
    try:
        saved = datasets.load_from_disk(config.path)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{' or '.join(SAVED)} in it is damaged ({error!r}).") from None
    if isinstance(saved, datasets.Dataset):
        saved = {str(saved.split or config.split): saved}
    if config.split not in saved:
        raise ValueError(f"it has no split {config.split}, only {', '.join(saved)}.")
    return saved[config.split]


def _tar_files(path: str) -> list[Path]:
    tars = f"{path}/*.tar" if Path(path).is_dir() else path
    files = [Path(tar).absolute() for tar in sorted(glob.glob(tars))]
    if not files:
        raise FileNotFoundError(f"there are no tars at {tars}.")
    return files


def _size_and_time(path: Path) -> tuple[int, ...]:
    return (path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else ()


ROWS = {"folder": _folder_rows, "huggingface": _dataset_rows, "webdataset": _tar_rows}
