"""Long random runs: the operation against its definition, damaged files, memory, threads.

Every case is drawn from a `random.Random` of its own, so that the seed and number of a case are
enough to repeat it; the tests draw the same cases from hypothesis.

Shapes: B batch, H heads, N queries, S keys, D head dim, M0 parents, C children.
"""

import gc
import json
import math
import resource
import struct
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from torch import Tensor
from tqdm import tqdm

from avq_diffusers import (
    AVQCodebooks,
    CaptureProfile,
    Codebook,
    LinFusionProcessor,
    apply_avq,
    assign,
    avq_attention,
    load_linfusion,
    remove_avq,
    remove_linfusion,
    save_linfusion,
    select_layers,
    set_num_refined,
)
from avq_diffusers.kernels import codewords
from avq_diffusers.mini import MINI_CODEBOOKS, MINI_SD
from eval.captions import read_captions
from eval.coco import MANIFEST, MANIFEST_KEYS, read_manifest
from eval.errors import read_kernel_times
from eval.markdown import markdown_table, number
from eval.stored import read_result
from eval.training import LOG, read_log

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KEYS = ("clustered", "spread", "skewed", "one hot leaf", "identical", "offset", "empty parents")
# Shares of the larger value below which roundings may decide which codeword or parent is taken.
KEY_TIE, PARENT_TIE = 1e-4, 1e-3
# Float64 against the definition in float64.
EXACT = 1e-10
# What a reader may allocate on files of a few kilobytes, and how long it may take.
READER_BYTES, READER_SECONDS = 1 << 30, 10.0
FILES_PER_PROBLEM = 4
MOST_TOKENS = {False: 300, True: 2000}  # by whether kernels run
PICTURES_PER_APPLY = 5
THREAD_ROUNDS = 10
# Bytes per picture that an allocator may still be settling by; the codebooks of mini-sd, if one
# apply leaked them, would be 9 times this.
FLAT = 20_000


# The operation against its definition


@dataclass(frozen=True)
class Problem:
    """Arguments of `avq_attention`.

    Attributes:
        query, key, value: (B, H, N, D) and (B, H, S, D), of any strides.
        codebook: in float32, or float64 if the inputs are.
        options: the other arguments.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    codebook: Codebook
    options: dict[str, Any]

    def __str__(self) -> str:
        batch, heads, num_queries, head_dim = self.query.shape
        sizes = f"B{batch} H{heads} N{num_queries} S{self.key.shape[2]} D{head_dim}"
        book = f"M{self.codebook.num_parents}C{self.codebook.num_children}"
        numbers = {name: x for name, x in self.options.items() if not isinstance(x, Tensor)}
        return f"{sizes} {book} {self.query.dtype} {numbers}"


def draw_problem(rng: Random, *, kernels: bool, device: torch.device, most: int = 300) -> Problem:
    """Draw arguments that the backend accepts.

    No key is nearly as close to another codeword as to its own: such a key may rightly go to
    either.

    Args:
        rng: that everything is drawn from.
        kernels: within the limits of the kernels.
        device: of the tensors.
        most: queries and keys.
    """
    dtype = rng.choice(DTYPES[:3] if kernels else DTYPES)
    most = rng.choice((8, 64, most, most))
    batch, heads, num_queries = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, most)
    num_keys = rng.choice((num_queries, rng.randint(1, most)))
    multiples = (8, 16, 24, 40, 64, 80, 128)
    head_dim = rng.choice(multiples if kernels else (*multiples, rng.randint(1, 50)))
    if kernels and dtype == torch.float32:
        head_dim = min(head_dim, 64)
    num_parents = rng.choice((1, 2, rng.randint(3, 16), rng.randint(17, 64)))
    num_children = rng.choice((0, 1, rng.randint(2, 4), rng.randint(5, 9)))
    some = rng.randint(1, max(1, num_parents - 1))
    longest = 128 if kernels else 400
    options: dict[str, Any] = {
        "num_refined": rng.choice((0, num_parents, some, some, some)) if num_children else 0,
        "query_tile": rng.choice((1, 7, 16, 16, 128, rng.randint(1, longest))),
        "scale": rng.choice((None, None, 0.01, 0.1, 0.5, 1.0)),
    }
    kind = rng.choice(KEYS)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    if rng.random() < 0.7:
        order = torch.randperm(num_queries, generator=generator).to(device)
        options["query_order"] = order.to(rng.choice((torch.int32, torch.int64)))
    if dtype == torch.float64:
        # An estimate from few parents makes near-ties that only float64 tells apart.
        options["importance_tile"] = rng.choice((None, rng.randint(1, 70)))
    sizes = (heads, num_parents, num_children, head_dim)
    while True:
        key, codebook = _keys_and_codebook(kind, batch, num_keys, sizes, dtype, generator)
        scale = options["scale"] or head_dim**-0.5
        exact = _rounded(codebook, scale, dtype) if kernels else codebook.to(dtype=torch.float64)
        clear = clear_keys(key.double(), exact)
        if clear.any(-1).all():
            break
    first_clear = clear.int().argmax(-1)[..., None, None].expand(-1, -1, 1, head_dim)
    key = torch.where(clear[..., None], key, key.gather(2, first_clear))
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    # Neighbours look at the same parents, so that tiles choose others.
    num_used = _num_used(num_parents)
    parents = exact.parents[:, :num_used] - exact.parents[:, :num_used].mean(1, keepdim=True)
    looked_at = torch.arange(num_queries) * num_used // num_queries
    query = normal(batch, heads, num_queries, head_dim) + parents[:, looked_at]
    query = rng.choice((0.3, 1.0, 4.0)) * query
    value = normal(batch, heads, num_keys, head_dim)
    query, key, value = (_strided(rng, x.to(device, dtype)) for x in (query, key, value))
    return Problem(query, key, value, codebook.to(device), options)


def error_over_budget(problem: Problem, backend: str) -> float:
    """Run a problem and return its error in units of what is allowed.

    The definition runs in float64 on the same rounded inputs, and on the codewords as the backend
    rounds them. Allowed is twice the error of PyTorch's exact attention in the same dtype, and
    roundings of the result and of float32. Query tiles whose last refined parent is nearly as
    important as the next one are left out.

    Raises:
        ArithmeticError: the output is not finite, or has another shape, dtype or layout.
    """
    query, key, value = problem.query, problem.key, problem.value
    output = avq_attention(query, key, value, problem.codebook, backend=backend, **problem.options)
    is_sound = output.isfinite().all() and output.transpose(1, 2).is_contiguous()
    if not is_sound or (output.shape, output.dtype) != (query.shape, query.dtype):
        raise ArithmeticError(f"{tuple(output.shape)} {output.dtype} is not as promised: {problem}")
    scale = problem.options["scale"] or query.shape[-1] ** -0.5
    codebook = problem.codebook.to(dtype=torch.float64)
    if backend == "triton":
        codebook = _rounded(problem.codebook, scale, query.dtype)
    wide = [x.double() for x in (query, key, value)]
    expected = avq_attention(*wide, codebook, backend="reference", **problem.options)
    if query.dtype == torch.float64:
        return _relative_error(output, expected) / EXACT
    clear = clear_queries(wide[0], wide[1], codebook, **problem.options)
    if not clear.any():
        return 0.0
    exact = F.scaled_dot_product_attention(*wide, scale=scale)
    attention = F.scaled_dot_product_attention(query, key, value, scale=scale)
    rounding = torch.finfo(query.dtype).eps + 2 * torch.finfo(torch.float32).eps
    allowed = 2 * _relative_error(attention, exact) + rounding
    return _relative_error(output[clear], expected[clear]) / allowed


def gradient_over_budget(problem: Problem) -> float:
    """The same of the gradients of a float64 problem in query, key and value, backend "torch"."""
    gradients = []
    for backend in ("torch", "reference"):
        tensors = [x.clone().requires_grad_() for x in (problem.query, problem.key, problem.value)]
        output = avq_attention(*tensors, problem.codebook, backend=backend, **problem.options)
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device)
        gradients.append(torch.autograd.grad((output * weights.view_as(output)).sum(), tensors))
    # A gradient of zero, as with one key, leaves roundings: they count against all gradients.
    size = max(float(x.norm()) for x in gradients[1])
    errors = [float((x - y).norm()) for x, y in zip(*gradients, strict=True)]
    return max(errors) / max(size, 1e-6) / EXACT


def clear_keys(key: Tensor, codebook: Codebook) -> Tensor:
    """(B, H, S) keys whose nearest parent, and nearest leaf in its cell, beat the next clearly.

    Args:
        key: (B, H, S, D) float64.
        codebook: in float64.
    """
    parent, _ = assign(key, codebook)
    heads = torch.arange(key.shape[1], device=key.device)[:, None]
    to_parents = torch.cdist(key, codebook.parents, compute_mode="donot_use_mm_for_euclid_dist")
    to_leaves = (codebook.leaves[heads, parent] - key[..., None, :]).norm(dim=-1)
    return _is_clear(to_parents) & _is_clear(to_leaves)


def _is_clear(distance: Tensor) -> Tensor:
    if distance.shape[-1] == 1:
        return torch.ones_like(distance[..., 0], dtype=torch.bool)
    nearest = distance.square().topk(2, largest=False).values
    return nearest[..., 1] - nearest[..., 0] > KEY_TIE * nearest.sum(-1)


def clear_queries(
    query: Tensor,
    key: Tensor,
    codebook: Codebook,
    *,
    num_refined: int,
    query_tile: int,
    scale: float | None,
    query_order: Tensor | None = None,
) -> Tensor:
    """(B, H, N) queries of tiles whose last refined parent beats the next one clearly.

    Args:
        query: (B, H, N, D) float64.
        key: (B, H, S, D) float64.
        codebook: in float64.
        num_refined, query_tile, scale, query_order: as in `avq_attention`.
    """
    clear = torch.ones(query.shape[:3], dtype=torch.bool, device=query.device)
    if not 0 < num_refined < codebook.num_parents:
        return clear
    parent, _ = assign(key, codebook)
    counts = F.one_hot(parent, codebook.num_parents).sum(-2).double()
    logits = (scale or query.shape[-1] ** -0.5) * query @ codebook.parents.mT
    share = (logits + counts.log()[:, :, None]).softmax(-1)
    order = (
        torch.arange(query.shape[2], device=query.device) if query_order is None else query_order
    )
    for tile in order.split(query_tile):
        importance = share[:, :, tile].sum(-2).sort(-1, descending=True).values
        last, following = importance[..., num_refined - 1], importance[..., num_refined]
        is_clear = (last - following > PARENT_TIE * last) | (following == 0)
        clear[:, :, tile] = is_clear[..., None]
    return clear


def _keys_and_codebook(
    kind: str,
    batch: int,
    num_keys: int,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Tensor, Codebook]:
    """Keys (B, H, S, D) of a distribution, and a codebook that fits them roughly."""
    heads, num_parents, num_children, head_dim = sizes
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    parents = 1.5 * normal(heads, num_parents, head_dim)
    children = parents[:, :, None] + 0.7 * normal(heads, num_parents, num_children, head_dim)
    place = torch.rand(batch, heads, num_keys, generator=generator, dtype=torch.float64)
    if kind == "skewed":
        place = place**6
    elif kind == "empty parents":
        num_used = _num_used(num_parents)
        place = place * num_used / num_parents
        parents[:, num_used:] += 50
        children[:, num_used:] += 50
    cell = (place * num_parents).long()
    spread = 4.0 if kind == "spread" else 0.7
    key = parents[torch.arange(heads)[:, None], cell] + spread * normal(*cell.shape, head_dim)
    if kind == "one hot leaf":
        leaf = parents if num_children == 0 else children[:, :, -1]
        key[:, :, : num_keys // 2] = leaf[:, :1] + 0.01 * normal(1, 1, 1, head_dim)
    elif kind == "identical":
        key = key[:, :, :1].expand_as(key)
    elif kind == "offset":
        offset = 30 * normal(head_dim)
        key, parents, children = key + offset, parents + offset, children + offset
    codebook = Codebook(parents, children)
    if dtype != torch.float64:
        codebook = codebook.to(dtype=torch.float32)
    return key.to(dtype), codebook


def _num_used(num_parents: int) -> int:
    """Parents that have keys, where some have none."""
    return num_parents - num_parents // 3


def _strided(rng: Random, x: Tensor) -> Tensor:
    """The values of `x` in one of the memory layouts that callers have."""
    kind = rng.choice(("tokens first", "heads first", "part of a projection", "every second token"))
    if kind == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "part of a projection":
        return torch.cat([x + 1, x, x - 1], -1)[..., x.shape[-1] : 2 * x.shape[-1]]
    if kind == "every second token":
        return x.repeat_interleave(2, dim=2)[:, :, ::2]
    return x


def _rounded(codebook: Codebook, scale: float, dtype: torch.dtype) -> Codebook:
    """The codewords that the kernels use for inputs of `dtype`, in float64."""
    heads, num_parents, num_children, head_dim = codebook.children.shape
    _, first_child, child_rows = codewords.padded_sizes(head_dim, num_parents, num_children)
    table = torch.float32 if dtype == torch.float32 else torch.float16
    codes, _ = codewords.pack(codebook.parents, codebook.children, scale=scale, dtype=table)
    parents = codebook.parents.double()
    centre = parents.sort(dim=1).values[:, num_parents // 2, None]
    table = codes[..., :head_dim].double() / (scale * math.log2(math.e)) + centre
    children = table[:, first_child:].view(heads, num_parents, child_rows, head_dim)
    return Codebook(table[:, :num_parents], children[:, :, :num_children])


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


# Damaged files


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


# Memory and threads


@dataclass(frozen=True)
class Growth:
    """Memory over generations.

    Attributes:
        bytes_per_generation: slope of the later half of `memory`.
        memory: bytes after each apply and remove.
    """

    bytes_per_generation: float
    memory: tuple[int, ...]


def generation_growth(
    pipe: DiffusionPipeline,
    codebooks: AVQCodebooks,
    generations: int,
    measure: Mapping[str, Callable[[], int]],
    **arguments: Any,
) -> dict[str, Growth]:
    """Make pictures with AVQ applied, changed and removed in between, and see memory grow or not.

    Args:
        pipe: without AVQ, which it is again afterwards.
        codebooks: for it.
        generations: pictures; AVQ is applied anew every 5 of them.
        measure: by name, functions that return bytes.
        **arguments: of the pipeline's call.
    """
    found: dict[str, list[int]] = {name: [] for name in measure}
    for start in tqdm(range(0, generations, PICTURES_PER_APPLY), desc="pictures", mininterval=2):
        apply_avq(pipe, codebooks, route="always")
        for index in range(start, min(start + PICTURES_PER_APPLY, generations)):
            set_num_refined(pipe, index % 3)
            pipe(**arguments, generator=torch.Generator().manual_seed(index))
        remove_avq(pipe)
        gc.collect()
        for name, function in measure.items():
            found[name].append(function())
    return {name: Growth(_slope(memory), tuple(memory)) for name, memory in found.items()}


def _slope(memory: Sequence[int]) -> float:
    """Bytes per picture in the later half: the median over all pairs, which no peak moves."""
    later = memory[len(memory) // 2 :]
    pairs = combinations(enumerate(later), 2)
    slopes = [(y - x) / (PICTURES_PER_APPLY * (j - i)) for (i, x), (j, y) in pairs]
    return median(slopes)


def resident_bytes() -> int:
    """Memory of this process."""
    return psutil.Process().memory_info().rss


def threads_agree(draws: Sequence[Callable[[], Tensor]], rounds: int) -> bool:
    """Whether pipelines give the same bits when they run at once, in threads, as alone."""
    alone = [draw() for draw in draws]
    with ThreadPoolExecutor(len(draws)) as threads:
        return all(
            torch.equal(got, expected)
            for _ in range(rounds)
            for got, expected in zip(threads.map(lambda draw: draw(), draws), alone, strict=True)
        )


# All of it


def soak(
    minutes: float, *, device: torch.device, seed: int, generations: int, first_case: int = 0
) -> dict[str, Any]:
    """Run generations and threads, then problems and files until the time is over.

    Args:
        minutes: of problems and files; at least one case is run.
        device: kernels run on cuda, PyTorch elsewhere.
        seed: of all cases.
        generations: pictures of mini-sd at 32 x 32, one step each.
        first_case: number of the first case.

    Returns:
        counts, errors, slopes and what failed, for `save_json`.
    """
    start = time.perf_counter()
    pipe, other = (_mini_sd(device) for _ in range(2))
    codebooks = AVQCodebooks.from_pretrained(MINI_CODEBOOKS)
    arguments = {"prompt": "a large red star", "height": 32, "width": 32, "num_inference_steps": 1}
    measure = {"resident": resident_bytes}
    if device.type == "cuda":
        measure["allocated on the GPU"] = partial(torch.cuda.memory_allocated, device)
    growth = generation_growth(pipe, codebooks, generations, measure, **arguments)

    halved = deepcopy(codebooks)
    for parameter in halved.parameters():
        parameter.data.mul_(0.5)
    apply_avq(pipe, codebooks, route="always")
    apply_avq(other, halved, route="always")
    draws = [partial(_picture, one, arguments) for one in (pipe, other)]
    agree = threads_agree(draws, THREAD_ROUNDS)
    remove_avq(pipe)

    report = _cases(minutes, library_formats(pipe, codebooks), device, seed, first_case)
    failures = report.pop("failures")
    if not agree:
        failures.append({"error": "two pipelines in threads give other bits than alone"})
    for name, grown in growth.items():
        if grown.bytes_per_generation > FLAT:
            slope = f"{grown.bytes_per_generation:.0f} bytes a picture"
            failures.append({"error": f"{name} memory grows by {slope}"})
    return {
        "seed": seed,
        "first_case": first_case,
        "seconds": time.perf_counter() - start,
        **report,
        "generations": generations,
        "bytes_per_generation": {name: x.bytes_per_generation for name, x in growth.items()},
        "memory": {name: list(x.memory) for name, x in growth.items()},
        "thread_rounds": THREAD_ROUNDS,
        "threads_agree": agree,
        "failures": failures,
    }


def soak_table(found: Mapping[str, Any]) -> str:
    """What `soak` found, as a Markdown table."""
    worst, growth = found["worst_error_over_budget"], found["bytes_per_generation"]
    return markdown_table(
        ["what", "result"],
        [
            ["cases", number(found["cases"], "d")],
            *([name, number(count, "d")] for name, count in found["counts"].items()),
            *([f"worst {name} error, allowed 1", number(x, ".3f")] for name, x in worst.items()),
            *([f"{name} bytes per picture", number(x, ".0f")] for name, x in growth.items()),
            ["threads give the bits of one", str(found["threads_agree"])],
            ["failures", number(len(found["failures"]), "d")],
        ],
    )


def _cases(
    minutes: float, formats: Sequence[Format], device: torch.device, seed: int, first_case: int
) -> dict[str, Any]:
    kernels = device.type == "cuda"
    end = time.perf_counter() + 60 * minutes
    worst: dict[str, float] = {"output": 0.0, "gradient": 0.0}
    counts: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    case = first_case
    with tqdm(desc="cases", unit="case", mininterval=2) as bar:
        while case == first_case or time.perf_counter() < end:
            rng = Random(f"{seed} {case}")
            problem = draw_problem(rng, kernels=kernels, device=device, most=MOST_TOKENS[kernels])
            try:
                errors = {"output": error_over_budget(problem, "triton" if kernels else "torch")}
                counts["problems"] += 1
                if problem.query.dtype == torch.float64:
                    errors["gradient"] = gradient_over_budget(problem)
                    counts["gradients"] += 1
            except (ArithmeticError, TypeError, ValueError, RuntimeError) as error:
                failures.append({"case": case, "error": f"{error!r}: {problem}"})
                errors = {}
            for name, error in errors.items():
                worst[name] = max(worst[name], error)
                if not error <= 1:
                    failures.append({"case": case, "error": f"{name} {error:.3g}: {problem}"})
            for _ in range(FILES_PER_PROBLEM):
                form = rng.choice(formats)
                with TemporaryDirectory() as folder:
                    try:
                        counts[f"files {read_damaged(rng, form, Path(folder))}"] += 1
                    except Exception as error:  # what a reader lets through is what is looked for
                        failures.append({"case": case, "error": f"{form.name}: {error!r}"[:500]})
            case += 1
            bar.update()
    return {
        "cases": case - first_case,
        "counts": dict(sorted(counts.items())),
        "worst_error_over_budget": worst,
        "failures": failures,
    }


def _mini_sd(device: torch.device) -> StableDiffusionPipeline:
    pipe = StableDiffusionPipeline.from_pretrained(MINI_SD).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _picture(pipe: StableDiffusionPipeline, arguments: Mapping[str, Any]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return pipe(**arguments, generator=generator, output_type="latent").images
