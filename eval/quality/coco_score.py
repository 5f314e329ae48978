"""Score folders of images against real ones: FID and CLIP score."""

import hashlib
import json
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from avq_diffusers.files import atomic_write, sha256_all
from avq_diffusers.images import image_files
from eval.methods.registry import METHOD_COLUMNS
from eval.quality.coco import CAPTIONS, IMAGES, image_path, read_manifest
from eval.quality.frechet import distances, fit_gaussian
from eval.quality.metrics import Scorer
from eval.quality.networks import Inception, OpenCLIP
from eval.quality.protocol import (
    FID_SIZE,
    INCEPTION_SIZE,
    NUM_REAL,
)
from eval.store.markdown import figure, rows_table
from eval.store.report import SCORER, folder_digest

# What clean-fid reads of a folder, without its .npy.
IMAGE_ENDINGS = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# For the protocol's two resizes.
FID_FILTER, INCEPTION_FILTER = Image.Resampling.LANCZOS, Image.Resampling.BICUBIC
# What may differ between rows of one table.
FREE = ("model", "model_sha256", "method", "method_sha256", "levels", "calibration_sha256")
COLUMNS = {
    "model": itemgetter("model"),
    **METHOD_COLUMNS,
    "FID": figure("fid", ".2f"),
    "CLIP score": figure("clip_score", ".4f"),
}

Prepare = Callable[[Image.Image], dict[str, Tensor]]


@dataclass(frozen=True)
class Networks:
    """The networks that score.

    Attributes:
        features: maps float images (n, 3, 299, 299) in 0..255 to features (n, D).
        clip: computes the CLIP score.
        name: name of `features` and its weights.
        device: device of both.
        batch_size: images per batch.
        threads: number of threads that read and resize images.
    """

    features: nn.Module
    clip: Scorer | OpenCLIP
    name: str
    device: torch.device
    batch_size: int
    threads: int

    def __call__(
        self,
        paths: Sequence[Path],
        prepare: Prepare,
        *,
        description: str,
        captions: Sequence[str] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Features (n, D) of images and, with captions, cosines (n,)."""
        features, cosines = [], []
        progress = tqdm(total=len(paths), desc=description, unit="image")
        # Float32 convolutions would otherwise use TF32 on a GPU.
        exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
        with progress, exact:
            first = 0  # the bar's own count stays 0 if TQDM_DISABLE is set
            for batch in _prepared(paths, prepare, self.batch_size, self.threads):
                end = first + len(batch["pixels"])
                features.append(self.features(batch["pixels"]).float())
                if captions is not None:
                    chosen = list(captions[first:end])
                    cosines.append(self.clip.cosines(batch["bytes"], chosen))
                progress.update(end - first)
                first = end
        return torch.cat(features), torch.cat(cosines) if cosines else None


@dataclass(frozen=True)
class ImageFolder:
    """A folder of images to score.

    Attributes:
        path: the folder.
        manifest: see `read_manifest`.
        captions: captions of the images to score, which are the first ones.
    """

    path: Path
    manifest: Mapping[str, Any]
    captions: list[str]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.manifest["config"]

    @property
    def shared(self) -> dict[str, Any]:
        """What all folders of a table must have in common."""
        return {key: value for key, value in self.config.items() if key not in FREE}

    @property
    def images(self) -> list[Path]:
        return [image_path(self.path, index) for index in range(len(self.captions))]


def load_networks(
    scorer: str | None, device: torch.device, batch_size: int, threads: int
) -> Networks:
    """Load the protocol's networks, or a CLIP-style scorer in place of both.

    Raises:
        FileNotFoundError: there is no such scorer.
        ImportError: a package of the protocol's networks is not installed.
        OSError: weights cannot be loaded.
    """
    if scorer is None:
        features, clip = Inception().to(device), OpenCLIP().to(device)
        name = "inception-2015-12-05"
    elif (digest := folder_digest(scorer, "config.json")) is None:
        raise FileNotFoundError(f"there is no scorer in {scorer}; mini-sd's is {SCORER}.")
    else:
        features = clip = Scorer(scorer).to(device)
        name = f"scorer {digest}"
    return Networks(features, clip, name, device, batch_size, threads)


def read_folders(paths: Sequence[Path], num_images: int | None = None) -> list[ImageFolder]:
    """Read folders from `Row.generate` for one table; `num_images` takes only the first images.

    Raises:
        FileNotFoundError: a folder has no manifest or no captions.
        ValueError: images are missing, or the folders have different protocols.
    """
    first, *others = folders = [_read_folder(path, num_images) for path in paths]
    for folder in others:
        shared = first.shared
        if differing := sorted(key for key in shared if folder.shared.get(key) != shared[key]):
            raise ValueError(
                f"{folder.path} and {first.path} cannot go into one table; they differ in "
                f"{', '.join(differing)}."
            )
    return folders


def real_images(folder: Path) -> list[Path]:
    """Return the images in a folder and its subfolders, as `image_files` lists them.

    They are scored as clean-fid reads them: see `eval.quality.protocol`.

    Raises:
        FileNotFoundError: there are none.
        ValueError: there is only one, so there is no covariance.
    """
    found = image_files(folder, IMAGE_ENDINGS)
    if not found:
        raise FileNotFoundError(
            f"there are no images in {folder}; unpack there "
            f"images.cocodataset.org/zips/val2014.zip, whose {NUM_REAL} images are the reference."
        )
    if len(found) == 1:
        raise ValueError(f"at least 2 real images are needed, but {folder} has 1.")
    return found


def score_folders(
    folders: Sequence[ImageFolder],
    real: Path,
    load: Callable[[], Networks],
    *,
    cache: Path,
) -> Iterator[dict[str, Any]]:
    """Yield one row of metrics per folder.

    FID compares with all images in `real`. Its error is one standard deviation, from a jackknife
    over the generated images. The CLIP score is the plain cosine.

    Args:
        folders: see `read_folders`.
        real: folder of real images.
        load: loads the networks; called once the folders have been checked.
        cache: folder for features of real images, reused while the files are unchanged.

    Raises:
        FileNotFoundError: a folder has no images.
        ValueError: an image cannot be read, or does not have the size that its folder states.
    """
    files = real_images(real)
    extract = load()
    reference = fit_gaussian(real_features(real, files, extract, cache))
    prepare_generated = partial(_prepare_generated, size=folders[0].config["size"])
    for folder in folders:
        features, cosines = extract(
            folder.images,
            prepare_generated,
            captions=folder.captions,
            description=folder.config["method"],
        )
        yield {
            **folder.manifest["row"],
            "model": Path(folder.config["model"]).name,
            "model_sha256": folder.config["model_sha256"],
            "num_images": len(folder.captions),
            "num_real": len(files),
            **distances(reference, features),
            "clip_score": float(cosines.mean()),
            "clip_score_sem": float(cosines.std() / len(cosines) ** 0.5),
        }


def coco_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table; ± is one standard error."""
    return rows_table(COLUMNS, rows)


def real_features(folder: Path, files: Sequence[Path], extract: Networks, cache: Path) -> Tensor:
    """Features (n, D) of real images, through the cache, which need not be writable."""
    names = [str(path.relative_to(folder)) for path in files]
    resizing = [FID_SIZE, FID_FILTER.name, INCEPTION_SIZE, INCEPTION_FILTER.name]
    fingerprint = json.dumps([extract.name, "whole", resizing, names, sha256_all(files)])
    cached = cache / f"{hashlib.sha256(fingerprint.encode()).hexdigest()}.safetensors"
    try:
        return load_file(cached, device=str(extract.device))["features"]
    except (OSError, KeyError, SafetensorError):
        features, _ = extract(files, prepare, description=f"images in {folder}")
    try:
        with atomic_write(cached, shared=True) as temporary:
            save_file({"features": features.cpu()}, temporary)
    except OSError as error:
        warnings.warn(f"features of real images are not kept: {error}", stacklevel=2)
    return features


def prepare(image: Image.Image) -> dict[str, Tensor]:
    """The centre square at 256 in bytes, and resized from that at 299 in floats."""
    side = min(image.size)
    left, top = (round((length - side) / 2) for length in image.size)
    square = image.crop((left, top, left + side, top + side))
    small = square.resize((FID_SIZE, FID_SIZE), FID_FILTER)
    channels = [
        np.asarray(
            Image.fromarray(channel).resize((INCEPTION_SIZE, INCEPTION_SIZE), INCEPTION_FILTER)
        )
        for channel in np.moveaxis(np.asarray(small, np.float32), 2, 0)
    ]
    pixels = torch.from_numpy(np.stack(channels).clip(0, 255))
    return {"pixels": pixels, "bytes": torch.from_numpy(np.array(small)).permute(2, 0, 1)}


def _prepare_generated(image: Image.Image, *, size: int) -> dict[str, Tensor]:
    if image.size != (size, size):
        width, height = image.size
        raise ValueError(
            f"it has {width} x {height} pixels, not {size} x {size}; its folder's command makes it "
            "again"
        )
    return prepare(image)


def _prepared(
    paths: Sequence[Path], prepare: Prepare, batch_size: int, threads: int
) -> Iterator[dict[str, Tensor]]:
    """Batches in order, with the next one prepared in the background."""
    starts = iter(range(0, len(paths), batch_size))
    with ThreadPoolExecutor(threads) as pool:

        def begin(start: int) -> list[Future]:
            batch = paths[start : start + batch_size]
            return [pool.submit(_read, path, prepare) for path in batch]

        waiting = deque(map(begin, islice(starts, 2)))
        while waiting:
            samples = [future.result() for future in waiting.popleft()]
            yield {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
            waiting.extend(map(begin, islice(starts, 1)))


def _read(path: Path, prepare: Prepare) -> dict[str, Tensor]:
    """Prepare an image as clean-fid reads it, not as `avq_diffusers.images.read_rgb` does."""
    try:
        with Image.open(path) as image:
            return prepare(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"the image {path} cannot be used: {error}.") from error


def _read_folder(path: Path, num_images: int | None) -> ImageFolder:
    manifest = read_manifest(path)
    made = manifest["config"]["num_images"]
    file = path / CAPTIONS
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no {CAPTIONS}; run its command again.")
    # Not as text, which also ends lines at carriage returns.
    captions = file.read_bytes().decode().removesuffix("\n").split("\n")
    if (
        hashlib.sha256("\n".join(captions).encode()).hexdigest()
        != (manifest["config"]["captions_sha256"])
    ):
        raise ValueError(f"{file} is not what the images were made from; run their command again.")
    num_images = made if num_images is None else num_images
    if not 2 <= num_images <= made:
        raise ValueError(
            f"the number of images to score must be between 2 and the {made} of {path}, but "
            f"got {num_images}."
        )
    folder = ImageFolder(path, manifest, captions[:num_images])
    found = {image.name for image in image_files(path / IMAGES)}
    if len(found) > made:
        raise ValueError(f"{path / IMAGES} has {len(found)} files for {made} captions.")
    if missing := [image for image in folder.images if image.name not in found]:
        raise ValueError(
            f"{path} lacks {len(missing)} of {num_images} images, such as "
            f"{missing[0].name}; run this again to make them: {manifest['command']}"
        )
    return folder
