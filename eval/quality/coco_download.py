"""The downloads of the COCO protocol: LinFusion's captions and the images of val2014."""

import shutil
import zipfile
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tqdm import tqdm

from avq_diffusers.files import TEMPORARY, sha256
from eval.quality.protocol import CAPTIONS_SHA256

CAPTIONS_URL = "https://raw.githubusercontent.com/Huage001/LinFusion/main/assets/captions.txt"
IMAGES_URL = "http://images.cocodataset.org/zips/val2014.zip"
CAPTIONS, IMAGES = "captions.txt", "val2014"
PIECE = 1 << 20  # bytes
TIMEOUT = 60  # seconds without a byte


def download_coco(folder: Path) -> None:
    """Make `folder / CAPTIONS` and `folder / IMAGES`, as far as they are missing.

    A repeated call goes on where a killed one stopped.

    Raises:
        OSError: a download ended early, or the disk is full.
        ValueError: a download is not what the protocol needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    captions, images = folder / CAPTIONS, folder / IMAGES
    if not captions.exists():
        download(CAPTIONS_URL, captions)
    if sha256(captions) != CAPTIONS_SHA256:
        raise ValueError(f"{captions} of {CAPTIONS_URL} is not the list of the protocol.")
    if images.exists():
        return
    archive = folder / f"{IMAGES}.zip"
    if not archive.exists():
        download(IMAGES_URL, archive)
    temporary = folder / f"{TEMPORARY}{IMAGES}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(temporary)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{archive} is damaged ({error}); delete it and try again.") from error
    (temporary / IMAGES).rename(images)
    temporary.rmdir()
    archive.unlink()


def download(url: str, path: Path) -> None:
    """Download a file; what an earlier call has of it is kept.

    Raises:
        OSError: the server cannot be reached, or the download ended early; the message names the
            URL.
    """
    part = path.with_name(f"{TEMPORARY}{path.name}")
    start = part.stat().st_size if part.exists() else 0
    try:
        answer = urlopen(Request(url, headers={"Range": f"bytes={start}-"}), timeout=TIMEOUT)
    except HTTPError as error:
        if error.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise OSError(f"{url} could not be downloaded ({error}).") from error
        part.unlink(missing_ok=True)  # whole, or of another file
        return download(url, path)
    except OSError as error:
        raise OSError(f"{url} could not be downloaded ({error}).") from error
    with closing(answer):
        if answer.status != HTTPStatus.PARTIAL_CONTENT:
            start = 0
        left = int(answer.headers["Content-Length"])
        bar = tqdm(desc=path.name, total=start + left, initial=start, unit="B", unit_scale=True)
        with bar, part.open("r+b" if start else "wb") as file:
            file.seek(start)
            while piece := answer.read(PIECE):
                bar.update(file.write(piece))
    if part.stat().st_size != start + left:
        raise OSError(
            f"{url} ended after {part.stat().st_size} of {start + left} bytes; repeat the command "
            f"to go on."
        )
    part.rename(path)
