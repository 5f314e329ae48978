"""`open_samples`: the samples of a scene generator, a folder, a data set, or tars."""

import glob
import hashlib
import json
import tarfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from distill.data.config import DataConfig
from distill.data.images import image_extensions
from distill.data.samples import RowSamples, SceneSamples

if TYPE_CHECKING:
    import datasets

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
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
    datasets = _import_datasets(config.source)
    rows = _load_rows(datasets, config)
    image_column, caption_column = config.columns
    columns = [image_column]
    if config.caption_column is not None:
        columns.append(caption_column.split(".")[0])
    for column in columns:
        if column not in rows.column_names:
            raise ValueError(
                f"{config.path} has no column {column}, only {', '.join(rows.column_names)}."
            )
    origin = [rows._fingerprint]  # of data files, revision and split
    rows = rows.select_columns(columns)
    try:
        rows = rows.cast_column(image_column, datasets.Image(decode=False))
    except (NotImplementedError, TypeError) as error:
        raise ValueError(
            f"column {image_column} of {config.path} holds {rows.features[image_column]}, not "
            f"images; name another image_column."
        ) from error
    if config.source == "folder":
        files = [Path(file["path"]) for file in rows[image_column]]
        origin += [(str(path), *_size_and_time(path)) for path in files]
    if config.caption_column is None:
        captions = (
            _read_sidecars(files) if config.captions is None else _read_captions(config.captions)
        )
        if len(captions) != len(rows):
            raise ValueError(
                f"{config.captions} must have a caption for each of the {len(rows)} rows of "
                f"{config.path}, but has {len(captions)}."
            )
        origin += captions
        rows = rows.add_column(caption_column, captions)
    if config.num_samples is not None:
        if config.num_samples > len(rows):
            raise ValueError(
                f"num_samples is {config.num_samples}, but {config.path} has {len(rows)} samples."
            )
        rows = rows.select(range(config.num_samples))
    digest = hashlib.sha256(json.dumps(origin).encode()).hexdigest()
    return RowSamples(rows, config, image_size, digest)


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
    if config.source == "huggingface":
        arguments = {"path": config.path, "split": config.split}
    elif config.source == "folder" and config.caption_column is None:
        return datasets.Dataset.from_dict({"image": _image_files(config.path)})
    else:
        builder, files = (
            ("imagefolder", _metadata_files(config.path))
            if config.source == "folder"
            else ("webdataset", _tar_files(config.path))
        )
        data_files = [glob.escape(str(path)) for path in files]
        arguments = {"path": builder, "data_files": data_files, "split": "train"}
    try:
        if config.source == "huggingface" and any(Path(config.path, x).exists() for x in SAVED):
            return _load_saved(datasets, config)
        return datasets.load_dataset(**arguments)
    except (
        OSError,
        ValueError,
        IndexError,  # of an empty tar
        tarfile.TarError,
        datasets.exceptions.DatasetsError,
    ) as error:
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


def _image_files(folder: str) -> list[str]:
    extensions = image_extensions()
    files = [
        str(path)
        for path in sorted(Path(folder).absolute().rglob("*"))
        if path.suffix.lower() in extensions and not path.name.startswith(".")
    ]
    if not files:
        raise FileNotFoundError(f"there are no images in the folder {folder}.")
    return files


def _metadata_files(folder: str) -> list[Path]:
    files = [x for x in sorted(Path(folder).absolute().rglob("*")) if x.name in METADATA]
    if not files:
        raise FileNotFoundError(f"{folder} has none of {', '.join(METADATA)}.")
    return files


def _tar_files(path: str) -> list[Path]:
    tars = f"{path}/*.tar" if Path(path).is_dir() else path
    files = [Path(tar).absolute() for tar in sorted(glob.glob(tars))]
    if not files:
        raise FileNotFoundError(f"there are no tars at {tars}.")
    return files


def _size_and_time(path: Path) -> tuple[int, ...]:
    return (path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else ()


def _read_sidecars(images: list[Path]) -> list[str]:
    paths = [path.with_suffix(".txt") for path in images]
    if missing := [path for path in paths if not path.exists()]:
        raise FileNotFoundError(
            f"{len(missing)} of {len(paths)} images have no caption beside them, such as "
            f"{missing[0]}; add them or name the caption_column of the folder's metadata."
        )
    return [_read_text(path).strip() for path in paths]


def _read_captions(file: str) -> list[str]:
    path = Path(file)
    if path.suffix != ".json":
        return [line.strip() for line in _read_text(path).removesuffix("\n").split("\n")]
    try:
        captions = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    if not isinstance(captions, list) or not all(isinstance(item, str) for item in captions):
        raise ValueError(f"{path} must hold a JSON list of strings.")
    return captions


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text.") from error
