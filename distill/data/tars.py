"""`TarRows`: samples of webdataset tars, read in place."""

import os
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from avq_diffusers.captions import decode_json, decode_text

# Sample and ending of a member, such as `a/000` and `seg.png` of `a/000.seg.png`.
MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")
ABSENT = (0, 0)


class TarRows:
    """The samples of tars, each a dict of columns like a row of a `datasets.Dataset`.

    A column is the ending of its members. The first one holds images, as a dict of `path` and
    undecoded `bytes`. Others hold text, or the value of a `.json` member. A missing image has no
    bytes, and other missing members are None. Members of other endings are not read.

    Reading a row raises `ValueError` if its text is not UTF-8 or its JSON is damaged.

    Args:
        tars: uncompressed tars, whose samples follow one another.
        columns: endings to read, the first one of images.

    Raises:
        ValueError: a tar is damaged, compressed, or has a wanted member twice.
    """

    def __init__(self, tars: Sequence[Path], columns: Sequence[str]) -> None:
        self.tars = tars
        self.columns = columns
        self.endings: dict[str, None] = {}  # a set in order of appearance
        # Arrays, since worker processes copy lists as they count references.
        names, places = [], []
        for number, tar in enumerate(tars):
            try:
                samples = self._scan(tar)
            except (OSError, tarfile.TarError) as error:
                raise ValueError(f"{tar} is damaged, or no uncompressed tar: {error}.") from error
            names.append(np.array([os.fsencode(name) for name in samples], np.bytes_))
            found = [(number, *np.ravel(members)) for members in samples.values()]
            places.append(np.array(found, np.int64).reshape(-1, 1 + 2 * len(columns)))
        self.names = np.concatenate(names)
        self.places = np.concatenate(places)

    def _scan(self, path: Path) -> dict[str, list[tuple[int, int]]]:
        """Return offset and size of the wanted members of each sample."""
        samples: dict[str, list[tuple[int, int]]] = {}
        with tarfile.open(path, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep a million of them
                match = MEMBER.fullmatch(member.name)
                if not member.isreg() or match is None:
                    continue
                name, ending = match.groups()
                self.endings[ending] = None
                places = samples.setdefault(name, [ABSENT] * len(self.columns))
                if ending in self.columns:
                    index = self.columns.index(ending)
                    if places[index] != ABSENT:
                        raise ValueError(f"{path} has the member {member.name} twice.")
                    places[index] = (member.offset_data, member.size)
        return samples

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, *places = self.places[index].tolist()
        tar = self.tars[number]
        sample = self.names[index].decode(errors="backslashreplace")
        row: dict[str, Any] = {}
        with tar.open("rb") as file:
            for column, offset, size in zip(self.columns, places[::2], places[1::2], strict=True):
                name = f"{tar}/{sample}.{column}"
                file.seek(offset)
                content = file.read(size)
                if column == self.columns[0]:
                    row[column] = {"path": name, "bytes": content}
                elif (offset, size) == ABSENT:
                    row[column] = None
                else:
                    decode = decode_json if column.endswith("json") else decode_text
                    row[column] = decode(content, name)
        return row
