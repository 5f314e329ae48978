"""`DataConfig`: where images and captions come from."""

from typing import Literal

from pydantic.dataclasses import dataclass

from distill.config_file import Config, Count, Natural

# Source -> fields that it needs, and fields that it may have.
SOURCES = {
    "scenes": (("num_samples",), ()),
    "folder": (("path",), ("captions",)),
    "huggingface": (("path", "split", "image_column"), ("caption_column", "captions")),
}


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """The source of images and captions. Fields that a source does not use are None.

    Args:
        source: `"scenes"`, the procedural scenes of mini-sd; `"folder"`, a folder of image files
            with captions beside them, `fox.txt` for `fox.png`; `"huggingface"`, anything that
            `datasets.load_dataset` loads: a dataset on the Hub, or a folder of Parquet files,
            webdataset tars, or images with a metadata file.
        path: the folder, or the Hub id of a dataset.
        split: split of a dataset, such as `"train"`.
        image_column: column of the images; for tars the extension, such as `"jpg"`.
        caption_column: column of the captions, with keys of a mapping after dots, such as
            `"json.caption"`.
        captions: file that replaces the dataset's captions: a JSON list, or text with one caption
            per line, in row order. Images of a folder are sorted by path.
        num_samples: use the first `num_samples` samples; None uses all.
        preprocessing: `"crop"`, a centre crop resized with antialiasing, or `"linfusion"`,
            stretched to a square without antialiasing. Scenes are rendered at `image_size`.
        cache: folder for encoded samples, on a disk that all processes share; other data or another
            encoder get their own folder in it. None encodes samples again in every epoch.
        workers: processes that read images, per training process; 0 reads in the training process.

    Raises:
        ValueError: a value is out of range, or the source does not take it.
    """

    source: Literal["scenes", "folder", "huggingface"]
    path: str | None = None
    split: str | None = None
    image_column: str | None = None
    caption_column: str | None = None
    captions: str | None = None
    num_samples: Count | None = None
    preprocessing: Literal["crop", "linfusion"] = "crop"
    cache: str | None = None
    workers: Natural = 8

    def __post_init__(self) -> None:
        needed, optional = SOURCES[self.source]
        for name in ("path", "split", "image_column", "caption_column", "captions", "num_samples"):
            value = getattr(self, name)
            if name in needed and value is None:
                raise ValueError(f"source {self.source} needs {name}, but got None.")
            if name not in (*needed, *optional, "num_samples") and value is not None:
                raise ValueError(f"source {self.source} takes no {name}, but got {value!r}.")
        if self.caption_column is not None and self.captions is not None:
            raise ValueError("captions and caption_column exclude each other; drop one of them.")
        if self.image_column is not None and self.caption_column is self.captions is None:
            raise ValueError(f"source {self.source} needs caption_column or captions.")
