"""Damaged files of every format that the library and the evaluation read, and their readers."""

import json
import math
import resource
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import torch
from diffusers import StableDiffusionPipeline

from avq_diffusers import AVQCodebooks, CaptureProfile, select_layers
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.extras.linfusion import (
    LinFusionProcessor,
    load_linfusion,
    remove_linfusion,
    save_linfusion,
)
from eval.codebooks.errors import read_kernel_times
from eval.codebooks.training import LOG, read_log
from eval.quality.captions import read_captions
from eval.quality.coco import MANIFEST, MANIFEST_KEYS, read_manifest
from eval.store.stored import read_result

# What a reader may allocate on files of a few kilobytes, and how long it may take.
READER_BYTES, READER_SECONDS = 1 << 30, 10.0


@dataclass(frozen=True)
class Format:
    """A kind of file that is read.

    Attributes:
        name: of the kind.
        write: makes a whole file in an empty folder, and returns its path.
        read: reads it.
        refusals: what `read` raises for a damaged file; ValueError and FileNotFoundError name it.
    """

    name: str
    write: Callable[[Path], Path]
    read: Callable[[Path], Any]
    refusals: tuple[type[Exception], ...] = (ValueError, FileNotFoundError)


def library_formats(pipe: StableDiffusionPipeline, codebooks: AVQCodebooks) -> list[Format]:
    """The formats that the library and the evaluation read.

    Args:
        pipe: whose UNet LinFusion layers are loaded into, and removed from again.
        codebooks: that are saved.
    """
    unet = pipe.unet

    def save_codebooks(folder: Path, file: str) -> Path:
        codebooks.save_pretrained(folder)
        return folder / file

    def save_layers(folder: Path, file: str) -> Path:
        chosen = select_layers(unet)[:1]
        states = {
            layer.name: LinFusionProcessor(layer.attn.query_dim).state_dict()
            | {name: x for name, x in layer.attn.state_dict().items() if "norm" not in name}
            for layer in chosen
        }
        save_linfusion(unet, states, folder)
        return folder / file

    def load_layers(path: Path) -> None:
        try:
            load_linfusion(unet, path.parent)
        finally:
            remove_linfusion(unet)

    def save_profile(folder: Path) -> Path:
        curves = {"up_blocks.1.attn1": {1000: [(0.0, 0.5, 1.0)] * 2, 500: [(0.0, 1.0)]}}
        CaptureProfile(curves).save(folder / "profile.json")
        return folder / "profile.json"

    annotations = [{"id": 9 - i, "image_id": i % 3, "caption": f"fox {i}"} for i in range(6)]
    manifest = {key: {"num_pictures": 2} for key in MANIFEST_KEYS} | {"command": "python -m eval"}
    times = [
        {"config": "M64P16C8", "tokens": 64, "batch": 2, "heads": 8, "head_dim": 40, "ms": 0.1}
    ]
    result = {"command": "python -m eval bench kernels", "environment": {"device": "GPU"}}
    log = [{"step": i, "samples": 4 * i, "loss": 0.5, "capture": {"a": 0.1}} for i in range(3)]
    return [
        Format(f"codebooks, {file}", partial(save_codebooks, file=file), _load_codebooks)
        for file in ("config.json", "diffusion_pytorch_model.safetensors")
    ] + [
        *(
            Format(f"LinFusion layers, {file}", partial(save_layers, file=file), load_layers)
            for file in ("config.json", "model.safetensors")
        ),
        Format("capture profile", save_profile, CaptureProfile.load),
        Format("annotations", _writer("captions.json", {"annotations": annotations}), _captions),
        Format("captions", _writer("captions.txt", "a fox\nzwei Füchse\n" * 3), _captions),
        Format("manifest", _writer(MANIFEST, manifest), lambda path: read_manifest(path.parent)),
        Format("result", _writer("result.json", result | {"rows": times}), read_result),
        Format(
            "kernel times",
            _writer("kernels.json", result | {"rows": times}),
            partial(read_kernel_times, num_tokens=64),
        ),
        Format(
            "training log",
            _writer(LOG, "".join(json.dumps(line) + "\n" for line in log)),
            lambda path: read_log(path.parent),
        ),
    ]


def read_damaged(rng: Random, form: Format, folder: Path) -> str:
    """Damage a file of a format in an empty folder and read it.

    Returns:
        "read" or "refused".

    Raises:
        ArithmeticError: it took too long, or the message does not name the file.
        Exception: the reader's own, if it is none of the format's refusals.
    """
    path = form.write(folder)
    path.write_bytes(damage(rng, path))
    start = time.perf_counter()
    try:
        with limited_memory(READER_BYTES), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            form.read(path)
        outcome = "read"
    except form.refusals as error:
        if (
            TypeError not in form.refusals
            and path.name not in str(error)
            and str(folder) not in str(error)
        ):
            raise ArithmeticError(f"a message that does not name the file: {error!r}") from error
        outcome = "refused"
    if (seconds := time.perf_counter() - start) > READER_SECONDS:
        raise ArithmeticError(f"reading {form.name} took {seconds:.1f} s")
    return outcome


def damage(rng: Random, path: Path) -> bytes:
    """The content of a file with one to three things wrong in it."""
    content = path.read_bytes()
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.5:
            content = _damaged_bytes(rng, content)
        elif path.suffix == ".safetensors" and len(content) > 8:
            content = _damaged_header(rng, content)
        elif path.suffix == ".json":
            content = _damaged_json(rng, content)
    return content


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Let the process take at most `more` bytes of address space beyond what it has."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _damaged_bytes(rng: Random, content: bytes) -> bytes:
    start = rng.randint(0, len(content))
    stop = min(len(content), start + rng.choice((1, 2, 8, 64)))
    middle = content[start:stop]
    return rng.choice(
        (
            content[:start],
            content[:start] + content[stop:],
            content[:start] + middle + content[start:],
            content[:start] + bytes(len(middle)) + content[stop:],
            content[:start] + rng.randbytes(rng.choice((1, 2, 16))) + content[stop:],
            content[:start] + rng.choice(TOKENS) + content[stop:],
            content[:start]
            + bytes(byte ^ 1 << rng.randint(0, 7) for byte in middle)
            + content[stop:],
        )
    )


# What parsers stumble over; the last one is nested deeper than Python's own stack.
TOKENS = (
    *(b"", b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b'"', b"{}", b"[]"),
    *(b"9" * 30, b"9" * 5000, b"\xff\xfe", b"\xef\xbb\xbf", b"\x00", b'"\\ud800"', b"[" * 100_000),
)
VALUES = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, -0.0, math.nan, math.inf, "", "x"),
    *("\ud800", "a" * 10_000, "../..", "1", [], [[]], {}, {"": None}, [1, "a"], [2**40, 2**40]),
)


def _damaged_json(rng: Random, content: bytes) -> bytes:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return content
    return json.dumps(damaged_value(rng, document)).encode()


def _damaged_header(rng: Random, content: bytes) -> bytes:
    """A safetensors file whose header, or its length, says something else."""
    (length,) = struct.unpack("<Q", content[:8])
    header, body = content[8 : 8 + length], content[8 + length :]
    if rng.random() < 0.2:
        length = rng.choice((0, 1, length - 1, length + 1, 10**8, 2**40, 2**63, -1))
        return struct.pack("<Q", length % 2**64) + header + body
    header = _damaged_json(rng, header)
    return struct.pack("<Q", len(header)) + header + body


def damaged_value(rng: Random, document: Any) -> Any:
    """Plain nested values with one of them replaced, removed, renamed, repeated or added."""
    document = deepcopy(document)
    holders = list(_holders(document))
    if not holders or rng.random() < 0.03:
        return deepcopy(rng.choice(VALUES))
    holder = rng.choice(holders)
    place = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    change = rng.choice(("replace", "replace", "remove", "rename", "repeat", "wrap"))
    if change == "replace":
        holder[place] = deepcopy(rng.choice(VALUES))
    elif change == "remove":
        del holder[place]
    elif change == "wrap":
        holder[place] = [holder[place]]
    elif isinstance(holder, dict):
        name = f"{place}x" if change == "repeat" else rng.choice(("", "x", "__class__", "\ud800"))
        holder[name] = holder[place] if change == "repeat" else holder.pop(place)
    else:
        holder.insert(place, deepcopy(holder[place]))
    return document


def _holders(value: Any) -> Iterator[dict | list]:
    """The non-empty mappings and lists in plain nested values."""
    if isinstance(value, dict | list) and value:
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _holders(item)


def _writer(file: str, content: str | Mapping[str, Any]) -> Callable[[Path], Path]:
    text = content if isinstance(content, str) else json.dumps(content)

    def write(folder: Path) -> Path:
        path = folder / file
        path.write_text(text, encoding="utf-8")
        return path

    return write


def _load_codebooks(path: Path) -> None:
    loaded = AVQCodebooks.from_pretrained(path.parent)
    for name in loaded.layer_specs:
        codebook = loaded.codebook(name)
        Codebook(codebook.parents, codebook.children)
        if codebook.parents.device.type != "cpu" or codebook.parents.dtype != torch.float32:
            raise ArithmeticError(
                f"{name} is {codebook.parents.dtype} on {codebook.parents.device}"
            )


def _captions(path: Path) -> None:
    found = read_captions(path, 3)
    if len(found.texts) != 3 or not all(found.texts) or len(found.sha256) != 64:
        raise ArithmeticError(f"no captions, but accepted: {found}")
