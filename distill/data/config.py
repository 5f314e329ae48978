"""`DataConfig`: where images and captions come from."""

from dataclasses import dataclass

from distill.config_file import check_at_least, check_at_least_one_or_none, check_one_of

# For each source, the fields that it needs and the fields that it may have.
SOURCES = {
    "scenes": (("num_samples",), ()),
    "folder": (("path",), ("caption_column", "captions")),
    "huggingface": (("path", "split", "image_column"), ("caption_column", "captions")),
    "webdataset": (("path", "image_column"), ("caption_column", "captions")),
}
PREPROCESSINGS = ("crop", "linfusion")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The source of images and captions. Fields that a source does not use are None.

    Args:
        source: `"scenes"`, the procedural scenes of mini-sd; `"folder"`, a folder of image files;
            `"huggingface"`, a data set of the Hub or on disk; `"webdataset"`, a set of tars.
        path: a folder of images or tars, a glob of tars, or the Hub id or folder of a data set.
            Tars are read in place; the package `datasets` caches a Hub data set.
        split: split of a Hugging Face data set, such as `"train"`.
        image_column: column of the images. For tars, the file extension, such as `"jpg"`.
        caption_column: column of the captions. For tars, the file extension, such as `"txt"`, or
            extension and key, such as `"json.caption"`. For a folder, a column of its
            metadata.jsonl, metadata.csv or metadata.parquet, whose `file_name` names the images;
            None reads `fox.txt` for `fox.png`.
        captions: file that replaces the captions of the data set: a JSON list, or a text with one
            caption per line, in the order of the rows. Images of a folder are sorted by path.
        num_samples: number of samples to use, from the first; None uses all.
        preprocessing: `"crop"`, the middle square, resized with antialiasing, or `"linfusion"`,
            stretched to a square without antialiasing. Scenes are rendered at `image_size`.
        cache: folder for encoded samples, on a disk that all processes share; None encodes them
            again in every epoch.
        workers: processes that read images, per training process; 0 reads in the training process.

    Raises:
        ValueError: a value is out of range, or the source does not take it.
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
                f"images and captions must be two columns, but image_column is {image_column} and "
                f"caption_column {caption_column}."
            )
        check_at_least_one_or_none(self, "num_samples")
        check_at_least(self, 0, "workers")

    @property
    def columns(self) -> tuple[str, str]:
        """Columns of images and captions, with the defaults of sources that name none."""
        return self.image_column or "image", self.caption_column or "caption"
