"""Captioned pictures from four sources.

A sample is a dict of `picture` (3, S, S) uint8 and `caption`.
"""

import glob
import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from avq_diffusers.mini import TRAINING_SEEDS, render, sample_scene
from distill.config_file import check_at_least_one_or_none, check_not_negative, check_one_of
from distill.data.pictures import PREPROCESSINGS, UNREADABLE, picture_endings, read_rgb, to_tensor

if TYPE_CHECKING:
    import datasets

# Per source the fields it needs, and those it takes besides.
SOURCES = {
    "scenes": (("num_samples",), ()),
    "folder": (("path",), ("caption_column", "captions")),
    "huggingface": (("path", "split", "image_column"), ("caption_column", "captions")),
    "webdataset": (("path", "image_column"), ("caption_column", "captions")),
}
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
# What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` leave in a folder.
SAVED = ("state.json", "dataset_dict.json")
# Endings of files in tars that `datasets` reads as text, and as JSON.
TEXT_ENDINGS = ("txt", "text", "transcript")
JSON_ENDINGS = ("json", "jsn")
# Samples at the beginning of the first tar that `datasets` takes the columns from.
NUM_FIRST = 5


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where pictures and captions come from. What a source does not use is None.

    Args:
        source: `"scenes"`, the procedural scenes of mini-sd; `"folder"` of picture files;
            `"huggingface"`, a data set of the Hub or on disk; `"webdataset"`, a set of tars.
        path: the folder, also of tars; a glob of tars; the Hub id or folder of a data set, also
            one that `save_to_disk` wrote. Tars and Hub data sets are unpacked into the cache of the
            package `datasets`.
        split: of a Hugging Face data set, such as `"train"`.
        image_column: of the pictures; in tars their file ending, such as `"jpg"`.
        caption_column: of the captions; in tars the file ending, such as `"txt"`, or ending and
            key, such as `"json.caption"`. For a folder the column of its metadata.jsonl,
            metadata.csv or metadata.parquet, whose `file_name` names the pictures; None reads
            `fox.txt` beside `fox.png`.
        captions: file of captions in the order of the rows, a JSON list or a text with one per
            line, in place of the data set's own; folders without metadata are in order of path.
        num_samples: use the first n; None uses all.
        preprocessing: `"crop"`, the middle square, antialiased, or `"linfusion"`, stretched to a
            square without antialiasing. Scenes are drawn at the size they need.
        cache: folder for encoded samples, on a disk that all processes share; None encodes them
            anew in every epoch.
        workers: processes per training process that read pictures; 0 reads in the process itself.

    Raises:
        ValueError: a field has a value outside its range, or the source does not go with it.
    """

    source: str
    path: str | None
    split: str | None
    image_column: str | None
    caption_column: str | None
    captions: str | None
    num_samples: int | None
    preprocessing: str
    cache: str | None
    workers: int

    def __post_init__(self) -> None:
        check_one_of(self, "source", SOURCES)
        check_one_of(self, "preprocessing", PREPROCESSINGS)
        needed, optional = SOURCES[self.source]
        for name in ("path", "split", "image_column", "caption_column", "captions", "num_samples"):
            value = getattr(self, name)
            if name in needed and value is None:
                raise ValueError(f"source {self.source} needs {name}, but got None.")
            if name not in (*needed, *optional, "num_samples") and value is not None:
                raise ValueError(f"source {self.source} takes no {name}, but got {value!r}.")
        if self.caption_column is not None and self.captions is not None:
            raise ValueError("captions must be None when caption_column is given, or the reverse.")
        if self.image_column is not None and self.caption_column is self.captions is None:
            raise ValueError(f"source {self.source} needs caption_column or captions.")
        image_column, caption_column = self.columns
        if image_column == caption_column.split(".")[0]:
            raise ValueError(
                f"pictures and captions must be of two columns, but image_column is {image_column} "
                f"and caption_column {caption_column}."
            )
        check_at_least_one_or_none(self, "num_samples")
        check_not_negative(self, "workers")

    @property
    def columns(self) -> tuple[str, str]:
        """Those of pictures and of captions, also where the fields leave them to the source."""
        return self.image_column or "image", self.caption_column or "caption"


class BrokenSample(ValueError):
    """A picture that cannot be read, or a caption that is missing or not text, by its name."""


class Scenes(Dataset):
    """The first scenes of mini-sd's training range, drawn when they are asked for."""

    def __init__(self, num_samples: int, image_size: int) -> None:
        if num_samples > len(TRAINING_SEEDS):
            raise ValueError(
                f"num_samples must be at most {len(TRAINING_SEEDS)}, but got {num_samples}."
            )
        self.seeds = TRAINING_SEEDS[:num_samples]
        self.image_size = image_size
        self[0]  # refuses sizes that scenes do not have

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, index: int) -> dict[str, Any]:
        scene = sample_scene(self.seeds[index])
        picture = to_tensor(render(scene, self.image_size))
        return {"picture": picture, "caption": scene.caption}

    def fingerprint(self) -> str:
        """Digest of how the first scenes look."""
        digest = hashlib.sha256()
        for index in range(min(8, len(self))):
            sample = self[index]
            digest.update(sample["picture"].numpy())
            digest.update(sample["caption"].encode())
        return digest.hexdigest()


class Rows(Dataset):
    """Rows of a `datasets.Dataset` as samples.

    Args:
        rows: with undecoded pictures.
        config: columns, that of captions with keys inside it after dots; preprocessing; and path
            for messages.
        image_size: S.
        origin: digest of what the rows were made from.
    """

    def __init__(
        self,
        rows: "datasets.Dataset",
        config: DataConfig,
        image_size: int,
        origin: str,
    ) -> None:
        self.rows = rows
        self.columns = config.columns
        self.path = config.path
        self.preprocess = partial(PREPROCESSINGS[config.preprocessing], size=image_size)
        self.origin = origin

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        image_column, caption_column = self.columns
        file = row[image_column] or {"path": None, "bytes": None}
        name = f"sample {index} of {self.path}" + (f" ({file['path']})" if file["path"] else "")
        caption = row
        for key in caption_column.split("."):
            caption = caption.get(key) if isinstance(caption, dict) else None
        if caption is None:
            raise BrokenSample(f"{name} has no caption")
        if not isinstance(caption, str):
            raise BrokenSample(f"the caption of {name} is {type(caption).__name__}, not text")
        if not file["bytes"] and not file["path"]:
            raise BrokenSample(f"{name} has no picture")
        try:
            picture = read_rgb(BytesIO(file["bytes"]) if file["bytes"] else file["path"])
        except UNREADABLE as error:
            raise BrokenSample(f"{name} cannot be read: {error}") from error
        return {"picture": self.preprocess(picture), "caption": caption}

    def fingerprint(self) -> str:
        """Digest of what the rows were made from."""
        return self.origin


def open_samples(config: DataConfig, image_size: int) -> Scenes | Rows:
    """Open the source as a map-style data set of S x S pictures with captions.

    Reading a sample raises `BrokenSample` if its picture is damaged, or its caption missing or
    not text.

    Args:
        config: which source.
        image_size: S.

    Raises:
        FileNotFoundError: the folder, tars, pictures or captions do not exist.
        ImportError: the source needs the package `datasets`.
        ValueError: the source cannot be read, a column is missing or does not hold pictures,
            the captions are not as many as the pictures, or there are fewer than `num_samples`.
    """
    if config.source == "scenes":
        return Scenes(config.num_samples, image_size)
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
    origin = [rows._fingerprint]  # of data files, revision, split
    rows = rows.select_columns(columns)
    try:
        rows = rows.cast_column(image_column, datasets.Image(decode=False))
    except (NotImplementedError, TypeError) as error:
        raise ValueError(
            f"column {image_column} of {config.path} holds {rows.features[image_column]}, not "
            f"pictures; name another image_column."
        ) from error
    if config.source == "folder":
        files = [Path(file["path"]) for file in rows[image_column]]
        origin += [(str(path), *_state(path)) for path in files]
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
    return Rows(rows, config, image_size, digest)


def _import_datasets(source: str) -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"source {source} needs the package datasets: "
            f'install it by pip install "avq-diffusers[train]".'
        ) from error
    return datasets


def _load_rows(datasets: ModuleType, config: DataConfig) -> "datasets.Dataset":
    if config.source == "huggingface":
        arguments = {"path": config.path, "split": config.split}
    elif config.source == "folder":
        found = sorted(Path(config.path).absolute().rglob("*"))
        if config.caption_column is None:
            files = [
                str(path)
                for path in found
                if path.suffix.lower() in picture_endings() and not path.name.startswith(".")
            ]
            if not files:
                raise FileNotFoundError(f"there are no pictures in the folder {config.path}.")
            return datasets.Dataset.from_dict({"image": files})
        files = [path for path in found if path.name in METADATA]
        if not files:
            raise FileNotFoundError(f"{config.path} has none of {', '.join(METADATA)}.")
        arguments = {"path": "imagefolder"}
    else:
        tars = f"{config.path}/*.tar" if Path(config.path).is_dir() else config.path
        files = [Path(tar).absolute() for tar in sorted(glob.glob(tars))]
        if not files:
            raise FileNotFoundError(f"there are no tars at {tars}.")
        arguments = {"path": "webdataset"}
    if config.source != "huggingface":
        arguments |= {"data_files": [glob.escape(str(path)) for path in files], "split": "train"}
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
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())
        # Tars may be large, and are not at fault where the system refuses, as on a full disk.
        if config.source == "webdataset" and not getattr(cause, "errno", None):
            reason = _tar_fault(files) or reason
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


def _tar_fault(tars: list[Path]) -> str | None:
    """The first tar that `datasets` cannot read and why; None if the tars are as they should."""
    for path in tars:
        samples = []
        try:
            for sample, ending, content in _tar_files(path):
                if fault := _text_fault(ending, content):
                    return f"{sample}.{ending} in {path} is not {fault}."
                if not samples or samples[-1][0] != sample:
                    samples.append((sample, set()))
                samples[-1][1].add(ending)
        except (OSError, EOFError, tarfile.TarError) as error:
            return f"{path} is not a tar, or is damaged: {error}."
        if path == tars[0]:
            if not samples:
                return f"{path} holds no samples."
            first, wanted = samples[0]
            for sample, endings in samples[:NUM_FIRST]:
                if endings != wanted:
                    return (
                        f"in {path} the sample {sample} has {', '.join(sorted(endings))}, but "
                        f"{first} has {', '.join(sorted(wanted))}; samples must have the same "
                        f"files, one sample's after the other's."
                    )
    return None


def _tar_files(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Sample, ending and content of the files in a tar that belong to samples."""
    with tarfile.open(path, "r|*") as tar:
        for member in tar:
            folder, name = os.path.split(member.name)
            stem, _, ending = name.partition(".")
            if member.isreg() and stem and ending and not stem.startswith("__"):
                yield os.path.join(folder, stem), ending, tar.extractfile(member).read()


def _text_fault(ending: str, content: bytes) -> str | None:
    kind = ending.rpartition(".")[2].lower()
    try:
        if kind in TEXT_ENDINGS:
            content.decode()
        elif kind in JSON_ENDINGS:
            json.loads(content)
    except UnicodeDecodeError:
        return "UTF-8 text"
    except json.JSONDecodeError as error:
        return f"JSON ({error})"
    return None


def _state(path: Path) -> tuple[int, ...]:
    return (path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else ()


def _read_sidecars(pictures: list[Path]) -> list[str]:
    paths = [path.with_suffix(".txt") for path in pictures]
    if missing := [path for path in paths if not path.exists()]:
        raise FileNotFoundError(
            f"{len(missing)} of {len(paths)} pictures have no caption beside them, such as "
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
