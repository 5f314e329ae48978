"""Damaged files of every format: read, or refused by an error that names the file."""

import json
import math
import resource
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
import torch
import yaml
from tiny import random_codebooks, tiny_unet
from tiny_training import RUN_CONFIG
from torch import nn

from avq_diffusers import AVQCodebooks, AVQConfig, ErrorProfile
from avq_diffusers.extras.linfusion import (
    LinFusionProcessor,
    load_linfusion,
    remove_linfusion,
    save_linfusion,
)
from avq_diffusers.files import read_log
from avq_diffusers.hosts import LayerSpec, select_layers
from avq_diffusers.hosts.core import routing
from avq_diffusers.hosts.measuring.profile import LayerEffects, Measured, Part
from distill.checkpointing import checkpoint
from distill.config import DistillConfig
from distill.config_file import load_config
from distill.data.cache import CachedSamples, open_cache, shard_path
from distill.log import log_path
from distill.optimizer import load_optimizer, optimizer_tensors
from eval.quality.captions import read_captions
from eval.quality.coco import MANIFEST, MANIFEST_KEYS, read_manifest
from eval.store.report import read_result

DAMAGES = 20  # of each format
READER_BYTES = 1 << 30  # that a reader may allocate for a file of a few kilobytes


@dataclass(frozen=True)
class Format:
    """`write` makes a whole file in an empty folder and returns its path; `read` reads it."""

    name: str
    write: Callable[[Path], Path]
    read: Callable[[Path], Any]
    refusals: tuple[type[Exception], ...] = (ValueError, FileNotFoundError)


# Writers and readers

UNET = tiny_unet()
CODEBOOKS = random_codebooks(UNET)


def codebooks(folder: Path, file: str) -> Path:
    CODEBOOKS.save_pretrained(folder)
    return folder / file


def read_codebooks(path: Path) -> None:
    loaded = AVQCodebooks.from_pretrained(path.parent)
    for name in loaded.layer_specs:
        parents = loaded.codebook(name).parents
        assert parents.isfinite().all()
        assert (parents.device.type, parents.dtype) == ("cpu", torch.float32)


def linfusion(folder: Path, file: str) -> Path:
    (layer,) = select_layers(UNET)[:1]
    own = {name: x for name, x in layer.attn.state_dict().items() if "norm" not in name}
    state = LinFusionProcessor(layer.attn.query_dim).state_dict() | own
    save_linfusion(UNET, {layer.name: state}, folder)
    return folder / file


def read_linfusion(path: Path) -> None:
    try:
        load_linfusion(UNET, path.parent)
    finally:
        remove_linfusion(UNET)


def profile(folder: Path) -> Path:
    measured = {start: Measured([0.125, 0.5], [32.0, 8.0], [0.5, 0.25]) for start in (1000, 500)}
    layer = LayerEffects(LayerSpec("up_blocks.1.attn1", 0, 2, 8), 64, 1.0, measured)
    parts = {1000: Part(0.5, 1.5), 500: Part(0.5)}
    ErrorProfile(AVQConfig(), (layer,), parts, (1e-4, 4e-4)).save(folder / "profile.json")
    return folder / "profile.json"


def text(folder: Path, file: str, content: Any) -> Path:
    content = content if isinstance(content, str) else json.dumps(content)
    (folder / file).write_text(content, encoding="utf-8")
    return folder / file


def lines(*entries: Any) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def captions(path: Path) -> None:
    found = read_captions(path, 3)
    assert len(found.texts) == 3
    assert all(found.texts)


class FourSamples:
    """An encoder."""

    def __call__(self, batches):
        for batch in batches:
            yield {"moments": torch.ones(len(batch), 2), "text": torch.ones(len(batch), 3)}


def opened(root: Path) -> CachedSamples:
    sizes = {"num_samples": 4, "batch_size": 2, "process_index": 0, "num_processes": 1}
    return open_cache(root, {"size": 64}, FourSamples(), **sizes)


def read_cache(path: Path) -> None:
    samples = opened(path.parents[1])
    assert len([samples[index] for index in range(4)]) == 4


def cache(folder: Path) -> Path:
    return shard_path(opened(folder).folder, 0)


def whole_config() -> DistillConfig:
    return load_config(RUN_CONFIG, DistillConfig, [])


def training_checkpoint(folder: Path, file: str) -> Path:
    torch.manual_seed(0)
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters(), fused=False)
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    groups = {"model": module.state_dict(), "optimizer": optimizer_tensors(module, optimizer)}
    return checkpoint.save(folder, 3, groups, config=whole_config(), keep=1) / file


def read_checkpoint(path: Path) -> None:
    found = checkpoint.newest(path.parents[2])
    checkpoint.check_config(path.parents[2], found, whole_config(), free=())
    module = nn.Linear(2, 2)
    module.load_state_dict(found.tensors("model"))
    optimizer = torch.optim.AdamW(module.parameters(), fused=False)
    load_optimizer(module, optimizer, found.tensors("optimizer"))
    assert found.step >= 0


def read_config(path: Path) -> None:
    assert isinstance(load_config(path, DistillConfig, []), DistillConfig)


def read_routes(path: Path) -> None:
    for entry in routing._read(path).values():
        assert all(type(tokens) is int for tokens in routing.BreakEven(**entry))


ANNOTATIONS = [{"id": 9 - i, "image_id": i % 3, "caption": f"fox {i}"} for i in range(6)]
TIMES = [{"config": "M64P16C8", "tokens": 64, "batch": 2, "heads": 8, "head_dim": 40, "ms": 0.1}]
RESULT = {
    "command": "python -m eval bench kernels",
    "environment": {"device": "GPU"},
    "rows": TIMES,
}
MANIFEST_VALUES = {key: {"num_images": 2} for key in MANIFEST_KEYS} | {"command": "c"}
LOG_LINES = [{"step": i, "loss": 1.0} for i in range(3)]
ROUTES = {"GPU, float16": {"eager": 1024, "compiled": 512}}


def of_text(name: str, file: str, content: Any, read: Callable[[Path], Any], *refusals) -> Format:
    write = partial(text, file=file, content=content)
    return Format(name, write, read, refusals or (ValueError, FileNotFoundError))


FORMATS = [
    *(
        Format(f"codebooks, {file}", partial(codebooks, file=file), read_codebooks)
        for file in ("config.json", "diffusion_pytorch_model.safetensors")
    ),
    *(
        Format(f"LinFusion layers, {file}", partial(linfusion, file=file), read_linfusion)
        for file in ("config.json", "model.safetensors")
    ),
    Format("error profile", profile, ErrorProfile.load),
    of_text("annotations", "captions.json", {"annotations": ANNOTATIONS}, captions),
    of_text("captions", "captions.txt", "a fox\nzwei Füchse\n" * 3, captions),
    of_text("manifest", MANIFEST, MANIFEST_VALUES, lambda path: read_manifest(path.parent)),
    of_text("result", "result.json", RESULT, read_result),
    of_text("distill config", "a.yaml", RUN_CONFIG.read_text(), read_config, ValueError, TypeError),
    # JSON is YAML, and its values can be changed one by one.
    of_text(
        "config values",
        "a.json",
        yaml.safe_load(RUN_CONFIG.read_text()),
        read_config,
        *(ValueError, TypeError),
    ),
    *(
        Format(f"checkpoint, {file}", partial(training_checkpoint, file=file), read_checkpoint)
        for file in ("digests.json", "model.safetensors")
    ),
    Format("cache", cache, read_cache),
    of_text("distill log", log_path(Path()).name, lines(*LOG_LINES), read_log),
    Format(
        "break-even numbers", partial(text, file="routes.json", content=ROUTES), read_routes, ()
    ),
]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_damaged_file_is_read_or_refused_by_name(form):
    """Catches another exception than the reader promises, one that names no file, a hang, and
    memory for what a file of a few kilobytes claims."""
    with TemporaryDirectory() as folder:
        form.read(form.write(Path(folder)))  # the whole file is read
    outcomes = set()
    for seed in range(DAMAGES):
        with TemporaryDirectory() as folder:
            outcomes.add(read_damaged(Random(seed), form, Path(folder)))
    assert ("refused" in outcomes) == bool(form.refusals)


def read_damaged(rng: Random, form: Format, folder: Path) -> str:
    path = form.write(folder)
    path.write_bytes(damage(rng, path))
    try:
        with limited_memory(READER_BYTES), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            form.read(path)
        return "read"
    except form.refusals as error:
        message = str(error)
        assert TypeError in form.refusals or path.name in message or str(folder) in message
        return "refused"


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Let the process take at most `more` bytes of address space beyond what it has."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


# Damages

# What parsers stumble over; the last one is nested deeper than Python's own stack.
TOKENS = (
    *(b"", b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-1", b"0", b'"', b"{}", b"[]"),
    *(b"9" * 30, b"9" * 5000, b"\xff\xfe", b"\xef\xbb\xbf", b"\x00", b'"\\ud800"', b"[" * 100_000),
)
VALUES = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, -0.0, math.nan, math.inf, "", "x"),
    *("\ud800", "a" * 10_000, "../..", "1", [], [[]], {}, {"": None}, [1, "a"], [2**40, 2**40]),
)


def damage(rng: Random, path: Path) -> bytes:
    """The content of a file with one to three things wrong in it."""
    content = path.read_bytes()
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.5:
            content = damaged_bytes(rng, content)
        elif path.suffix == ".safetensors" and len(content) > 8:
            content = damaged_header(rng, content)
        elif path.suffix == ".json":
            content = damaged_json(rng, content)
    return content


def damaged_bytes(rng: Random, content: bytes) -> bytes:
    start = rng.randint(0, len(content))
    stop = min(len(content), start + rng.choice((1, 2, 8, 64)))
    before, middle, after = content[:start], content[start:stop], content[stop:]
    flipped = bytes(byte ^ 1 << rng.randint(0, 7) for byte in middle)
    put = (b"", middle + middle, rng.randbytes(16), rng.choice(TOKENS), flipped)
    return before if rng.random() < 0.15 else before + rng.choice(put) + after


def damaged_json(rng: Random, content: bytes) -> bytes:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return content
    return json.dumps(damaged_value(rng, document)).encode()


def damaged_header(rng: Random, content: bytes) -> bytes:
    """A safetensors file whose header, or its length, says something else."""
    (length,) = struct.unpack("<Q", content[:8])
    header, body = content[8 : 8 + length], content[8 + length :]
    if rng.random() < 0.2:
        length = rng.choice((0, 1, length - 1, length + 1, 10**8, 2**40, 2**63, -1))
        return struct.pack("<Q", length % 2**64) + header + body
    header = damaged_json(rng, header)
    return struct.pack("<Q", len(header)) + header + body


def damaged_value(rng: Random, document: Any) -> Any:
    """Plain nested values with one of them replaced, removed, renamed or wrapped."""
    holders = list(all_holders(document))
    if not holders or rng.random() < 0.03:
        return rng.choice(VALUES)
    holder = rng.choice(holders)
    place = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    change = rng.choice(("replace", "replace", "remove", "rename", "wrap"))
    value = holder.pop(place) if change in ("remove", "rename") else holder[place]
    if change == "replace":
        holder[place] = rng.choice(VALUES)
    elif change == "wrap":
        holder[place] = [value]
    elif change == "rename" and isinstance(holder, dict):
        holder[rng.choice(("", "x", "__class__", "\ud800"))] = value
    return document


def all_holders(value: Any) -> Iterator[dict | list]:
    """The non-empty mappings and lists in plain nested values."""
    if isinstance(value, dict | list) and value:
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from all_holders(item)
