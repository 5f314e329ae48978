"""Downloads for the COCO protocol: LinFusion's captions and the images of val2014."""

import shutil
import zipfile
from pathlib import Path

from torch.hub import download_url_to_file

from avq_diffusers.files import TEMPORARY
from eval.quality.protocol import CAPTIONS_SHA256

CAPTIONS_URL = "https://raw.githubusercontent.com/Huage001/LinFusion/main/assets/captions.txt"
IMAGES_URL = "http://images.cocodataset.org/zips/val2014.zip"
CAPTIONS, IMAGES = "captions.txt", "val2014"


def download_coco(folder: Path) -> None:
    """Download `folder / CAPTIONS` and `folder / IMAGES` where missing.

    Raises:
        OSError: a file cannot be downloaded, or the disk is full.
        ValueError: a download is not what the protocol needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / CAPTIONS).exists():
        _download(CAPTIONS_URL, folder / CAPTIONS, CAPTIONS_SHA256)
    if (folder / IMAGES).exists():
        return
    archive = folder / f"{IMAGES}.zip"
    if not archive.exists():
        _download(IMAGES_URL, archive)
    temporary = folder / f"{TEMPORARY}{IMAGES}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(temporary)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{archive} is damaged ({error}); delete it and try again.") from error
    (temporary / IMAGES).rename(folder / IMAGES)
    temporary.rmdir()
    archive.unlink()


def _download(url: str, path: Path, digest: str | None = None) -> None:
    """Download a file; it only gets its name once complete."""
    try:
        download_url_to_file(url, str(path), digest)
    except OSError as error:
        raise OSError(f"{url} could not be downloaded ({error}).") from error
    except RuntimeError as error:
        raise ValueError(f"{url} is not the file of the protocol ({error}).") from error
