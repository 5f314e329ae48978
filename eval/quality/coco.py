"""Images for COCO's captions: one folder per row, filled by any number of processes and restarts.

FOLDER/manifest.json says how the images are made. FOLDER/captions.txt holds the captions, and
FOLDER/images/000017.png shows caption 17 with noise from seed 17. FOLDER/codebooks holds calibrated
codebooks.

An image does not depend on other images, the process, or restarts: its noise comes from its own
seed on the CPU, and every batch is full; the last one repeats an image, so that all run kernels of
one shape. Rounding may differ with the batch size, or in code compiled on another machine. A CPU
generates one image at a time; with the same number of threads, images are equal byte for byte.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from diffusers import PNDMScheduler, StableDiffusionPipeline
from PIL import Image
from tqdm import tqdm

from avq_diffusers import AVQCodebooks
from avq_diffusers.files import TEMPORARY, atomic_write, locked, write_text
from eval.methods.avq import AVQMethod
from eval.methods.base import AttentionMethod
from eval.methods.prepared import attention_method, load_methods
from eval.methods.registry import parse_method
from eval.methods.running import load_pipeline
from eval.quality.captions import Captions
from eval.quality.generation import (
    Sampling,
    compilation,
    dilation,
    dilation_facts,
    generate_batch,
)
from eval.quality.protocol import GENERATION
from eval.store.report import folder_digest, save_json

MANIFEST = "manifest.json"
MANIFEST_KEYS = ("command", "environment", "config", "row", "earlier_sessions")
CAPTIONS = "captions.txt"
IMAGES = "images"
CODEBOOKS = "codebooks"
LOCK_SECONDS = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """The images of one row of the table, and how they are made.

    Attributes:
        folder: the row's folder, on a disk that all processes see.
        captions: one per image.
        model: folder or Hub id of a Stable Diffusion model.
        method: see `parse_method`.
        levels: UNet levels to change.
        calibration_prompts: prompts for methods that are calibrated.
        settings: a CPU ignores the batch size.
    """

    folder: Path
    captions: Captions
    model: str
    method: str
    levels: tuple[int, ...]
    calibration_prompts: Sequence[str]
    settings: Sampling

    def generate(self, device: torch.device) -> None:
        """Generate this process's share of the folder's missing images, with PNDM.

        Args:
            device: this process's device.

        Raises:
            ValueError: the folder has another configuration or other content, the method cannot be
                used, or an image holds NaN.
            OSError: the model cannot be loaded, or an image cannot be written; earlier images stay.
        """
        num_threads = torch.get_num_threads()
        state = PartialState(cpu=device.type == "cpu")
        torch.set_num_threads(num_threads)  # accelerate's choice would round differently
        if state.num_processes > 1:
            device = state.device
        pipe = _load(self.model, device)
        check_folder(self.folder, self.config(pipe))
        (loaded,) = load_methods(pipe, [self.method], levels=self.levels)
        message = f"another command is writing {self.folder}; wait for it, or launch both with "
        message += "accelerate."
        is_main = state.is_main_process
        with locked(self.folder, LOCK_SECONDS, message) if is_main else nullcontext():
            if is_main:
                self._begin(pipe, loaded)
            state.wait_for_everyone()
            if self._has_codebooks:
                codebooks = AVQCodebooks.from_pretrained(self.folder / CODEBOOKS).to(device)
                loaded = replace(loaded, codebooks=codebooks)
            settings = self.settings
            if device.type == "cpu":
                settings = replace(settings, batch_size=1)
            drawn = attention_method(pipe, loaded)
            with dilation(pipe, settings), drawn, compilation(pipe, settings):
                row = replace(self, settings=settings)
                row.fill(pipe, state.process_index, state.num_processes)
        state.destroy_process_group()

    def config(self, pipe: StableDiffusionPipeline) -> dict[str, Any]:
        """What the images depend on."""
        settings, prompts = self.settings, "\n".join(self.calibration_prompts)
        source = parse_method(self.method, self.levels).source
        return {
            "model": self.model,
            "model_sha256": folder_digest(self.model, "model_index.json"),
            "method": self.method,
            "method_sha256": folder_digest(source, "config.json"),
            "levels": list(self.levels),
            "calibration_sha256": hashlib.sha256(prompts.encode()).hexdigest(),
            "captions": self.captions.origin,
            "captions_sha256": self.captions.sha256,
            "num_images": len(self.captions.texts),
            "size": settings.size,
            "compiled": settings.is_compiled,
            "sampler": GENERATION["sampler"],
            "num_inference_steps": settings.num_inference_steps,
            "guidance_scale": settings.guidance_scale,
            "dtype": str(pipe.dtype).removeprefix("torch."),
            "scalecrafter": dilation_facts(pipe, settings),
        }

    def fill(self, pipe: StableDiffusionPipeline, process: int = 0, num_processes: int = 1) -> None:
        """Generate one process's missing images, in full batches."""
        paths = [image_path(self.folder, index) for index in range(len(self.captions.texts))]
        share = range(process, len(paths), num_processes)
        for index in share:  # half-written by a killed process
            paths[index].with_name(f"{TEMPORARY}{paths[index].name}").unlink(missing_ok=True)
        missing = [index for index in share if not is_whole(paths[index], self.settings.size)]
        size = self.settings.batch_size
        progress = tqdm(
            total=len(share),
            initial=len(share) - len(missing),
            desc=f"{self.method}, process {process + 1} of {num_processes}",
            unit="image",
            disable=process > 0,
        )
        with progress, ThreadPoolExecutor() as pool:
            for start in range(0, len(missing), size):
                chosen = missing[start : start + size]
                full = chosen + chosen[-1:] * (size - len(chosen))
                prompts = [self.captions.texts[index] for index in full]
                images = generate_batch(pipe, prompts, full, self.settings)
                names = [paths[index] for index in chosen]
                list(pool.map(_write_image, names, images[: len(chosen)]))
                progress.update(len(chosen))

    @property
    def _has_codebooks(self) -> bool:
        return (self.folder / CODEBOOKS / "config.json").exists()

    def _begin(self, pipe: StableDiffusionPipeline, loaded: AttentionMethod) -> None:
        """Write the manifest, then everything else except the images.

        Codebooks are saved once, so that all processes and restarts share them. A complete folder
        keeps its manifest, which says how the images were made.
        """
        manifest = read_manifest(self.folder) if (self.folder / MANIFEST).exists() else None
        method = None
        if not self._has_codebooks:
            method = loaded.calibrated(pipe, self.calibration_prompts)
        row = manifest["row"] if method is None else method.facts()
        paths = (image_path(self.folder, number) for number in range(len(self.captions.texts)))
        if manifest is None or not all(is_whole(path, self.settings.size) for path in paths):
            earlier = []
            if manifest is not None:
                session = {key: manifest[key] for key in ("command", "environment")}
                earlier = [*manifest["earlier_sessions"], session]
            save_json(
                self.folder / MANIFEST,
                device=pipe.device,
                config=self.config(pipe),
                row=row,
                earlier_sessions=earlier,
            )
        write_text(self.folder / CAPTIONS, "\n".join(self.captions.texts) + "\n")
        (self.folder / IMAGES).mkdir(exist_ok=True)
        if isinstance(method, AVQMethod) and method.codebooks is not None:
            method.codebooks.save_pretrained(self.folder / CODEBOOKS)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder of images.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {MANIFEST}; make its images with python -m eval coco generate."
        )
    try:
        found = json.loads(path.read_text())
        manifest = {key: found[key] for key in MANIFEST_KEYS}
        if not all(isinstance(manifest[key], dict) for key in ("config", "row")):
            raise TypeError("config and row must be mappings")
        return manifest
    except (ValueError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"{path} is not the manifest of a folder of images ({error!r}).") from None


def check_folder(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a non-empty folder with another configuration.

    Raises:
        ValueError: it is one; the message names the differing keys.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder.")
    if not (folder / MANIFEST).exists():
        if folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise ValueError(f"{folder} holds other files; name a new folder, or empty it.")
        return
    found = read_manifest(folder)["config"]
    differing = sorted(
        key for key in config.keys() | found.keys() if config.get(key) != found.get(key)
    )
    if differing:
        raise ValueError(
            f"{folder} holds images with a different configuration: {', '.join(differing)}."
        )


def image_path(folder: Path, index: int) -> Path:
    """The path of the image of caption `index`."""
    return folder / IMAGES / f"{index:06d}.png"


def is_whole(path: Path, size: int) -> bool:
    """Whether a file is a complete PNG of this size."""
    if not path.is_file():
        return False
    try:
        with Image.open(path) as image:
            fits = image.format == "PNG" and image.mode == "RGB"
            fits = fits and image.size == (size, size)
            image.verify()
    except (OSError, SyntaxError):
        return False
    return fits


def _load(model: str, device: torch.device) -> StableDiffusionPipeline:
    dtype = "float16" if device.type == "cuda" else "float32"
    without = {"safety_checker": None, "requires_safety_checker": False}
    pipe = load_pipeline(model, device, dtype, **without)
    pipe.scheduler = PNDMScheduler.from_config(pipe.scheduler.config, skip_prk_steps=True)
    # Half-precision convolutions are fastest in this layout.
    for network in (pipe.unet, pipe.vae):
        network.to(memory_format=torch.channels_last)
    return pipe


def _write_image(path: Path, image: np.ndarray) -> None:
    try:
        with atomic_write(path) as temporary:
            Image.fromarray(image).save(temporary)
    except OSError as error:
        raise OSError(f"{error} Once that is fixed, the same command continues.") from error
