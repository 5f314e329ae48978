"""Measure the rows of kernels.md, "A fourth round", with the code on `PYTHONPATH`, on one GPU.

Commit 8281089 has the code before thresholds:

    git worktree add ../before 8281089
    PYTHONPATH=../before python eval/results/notes/fourth_round.py operation before.json
    PYTHONPATH=. python eval/results/notes/fourth_round.py operation now.json

The other parts are `mini-sd`, `mini-sd3`, `FOLDER` (of eval.keys.vit's `download_vit`) and, each
with empty caches, `first/sd15/1024`, `first/sd35-medium/2048` and `first/flux/2048`. It only uses
what both commits have, so some small functions stand here although today's `eval` has them.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModel

from avq_diffusers import AVQConfig, apply_avq, avq_attention, select_layers
from avq_diffusers.attention.api import attend
from avq_diffusers.attention.exact import exact_attention
from avq_diffusers.attention.orders import query_order
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.hosts import attention_replaced
from avq_diffusers.mini import MINI_SD
from avq_diffusers.mini.loading import load_mini_sd3, usual_guidance
from eval.benchmarks import models
from eval.benchmarks.timing import Effort, time_in_turns
from eval.keys.photographs import photograph
from eval.keys.subjects import vision_pass

Row = dict[str, Any]

DEVICE = torch.device("cuda")
normal = partial(torch.randn, device=DEVICE)
SIZES = {"num_parents": 64, "num_children": 8, "num_refined": 16}
METHODS: dict[str, dict[str, Any]] = {"64/16/8": SIZES}
if "exact_keys" in signature(avq_attention).parameters:
    METHODS["64/16/8 + 256"] = {**SIZES, "exact_keys": 256}
else:
    THRESHOLDS = (4e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4, 5e-5)
    METHODS |= {f"{x:g}": {"threshold": x} for x in THRESHOLDS}
CASES = {  # batch, heads, tokens, head dim, dtype, factor on queries
    "N = 16384, 20 heads, D = 64": (1, 20, 16384, 64, torch.float16, 1.0),
    "N = 4096, 16 heads, D = 40": (1, 16, 4096, 40, torch.float16, 1.0),
    "N = 4096, B2, 8 heads, D = 80": (2, 8, 4096, 80, torch.float16, 1.0),
    "N = 4096, 24 heads, D = 128": (1, 24, 4096, 128, torch.bfloat16, 1.0),
    "N = 65536, B4, 12 heads, D = 64, diffuse": (4, 12, 65536, 64, torch.float16, 0.1),
}
CELLS = 8  # of a smooth field, per side
COLORS = ("blue", "red", "green", "yellow", "purple", "orange", "teal", "pink")
PROMPTS = [
    f"two large {color} striped stars above one small {other} plain moon on a tiled gray background"
    for color, other in zip(COLORS, COLORS[::-1], strict=True)
]
PROFILED_CALLS = 20


def operation() -> Iterator[Row]:
    """One call on smooth keys: its time, that of its kernels, and its error."""
    for name, case in CASES.items():
        tensors = smooth_inputs(*case)
        exact = exact_attention(tensors)
        rows: list[Row] = [{"case": name, "method": "exact"}]
        runs = [partial(run_exact, [tensors])]
        for method, sizes in METHODS.items():
            spec = AVQConfig(**sizes).spec
            attended = attend(tensors, spec, "triton")
            runs.append(partial(run_avq, [tensors], spec))
            row = {
                "case": name,
                "method": method,
                "columns": columns_of(attended, sizes),
                "error": relative_error(attended[0], exact),
                "kernels_us": kernel_us(runs[-1]),
            }
            rows.append(row)
        times = time_in_turns(runs, 1, DEVICE, Effort())
        yield from (row | {"ms": time["ms"]} for row, time in zip(rows, times, strict=True))


def denoiser(name: str) -> Iterator[Row]:
    """Errors of the output over eight steps; times of the attention of one, for 1 and 8 images."""
    if name == "mini-sd3":
        pipe = load_mini_sd3(dtype=torch.float16).to(DEVICE)
    else:
        pipe = DiffusionPipeline.from_pretrained(MINI_SD, torch_dtype=torch.float16).to(DEVICE)
    network = pipe.transformer if name == "mini-sd3" else pipe.unet
    calls: list[Any] = []

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((args, kwargs, output[0].float()))

    hook = network.register_forward_hook(record, with_kwargs=True)
    pipe(
        PROMPTS,
        generator=[torch.Generator().manual_seed(seed) for seed in range(len(PROMPTS))],
        guidance_scale=usual_guidance(pipe),
        num_inference_steps=8,
        output_type="latent",
    )
    hook.remove()

    args, kwargs, _ = calls[3]
    with watched(network, SIZES) as seen:
        network(*args, **kwargs)
    of_all = seen.calls
    of_one = [
        Tensors._make(x if i > 4 or x is None else x[:: len(PROMPTS)] for i, x in enumerate(one))
        for one in of_all
    ]
    rows: list[Row] = [{"method": "exact"}]
    runs: list[list[Callable[[int], Any]]] = [[partial(run_exact, own)] for own in (of_one, of_all)]
    for method, sizes in METHODS.items():
        squares = []
        with watched(network, sizes) as seen:
            for args, kwargs, exact in calls:
                found = network(*args, **kwargs)[0]
                squares.append(relative_error(found, exact) ** 2)
        assert len(seen.calls) == len(calls) * len(of_all)
        for own, some in zip((of_one, of_all), runs, strict=True):
            some.append(partial(run_avq, own, seen.spec))
        error, of_odd = (mean(some) ** 0.5 for some in (squares, squares[::2]))
        rows.append(
            {
                "method": method,
                "columns": seen.mean_columns(),
                "error": error,
                "error_of_steps_1_3_5_7": of_odd,
            }
        )
    for name_of_time, some in zip(("ms", "ms_of_eight"), runs, strict=True):
        for row, time in zip(rows, time_in_turns(some, 1, DEVICE, Effort()), strict=True):
            row[name_of_time] = time["ms"]
    yield from rows


def vision(folder: str) -> Iterator[Row]:
    """A ViT in float16 on two photographs of 5476 patches: errors of its layers and features."""
    wide, model = (
        AutoModel.from_pretrained(folder, dtype=dtype).eval().to(DEVICE)
        for dtype in (torch.float32, torch.float16)
    )
    images = [photograph(name, 1036) for name in ("astronaut", "coffee")]
    exact = [vision_pass(wide, image)() for image in images]
    for method, sizes in METHODS.items():
        with watched(model, sizes, passes_exact=True) as of_layers:
            for image in images:
                vision_pass(model, image)()
        with watched(model, sizes) as seen:
            found = [vision_pass(model, image)() for image in images]
        yield {
            "method": method,
            "columns": seen.mean_columns(),
            "error": mean(of_layers.errors),
            "features_off": [relative_error(*pair) for pair in zip(found, exact, strict=True)],
        }


def first_steps(name: str, size: str) -> Iterator[Row]:
    """Seconds of the first steps of a network with random weights."""
    known = vars(models).get("MODELS") or models.UNETS | models.TRANSFORMERS
    model = known[name]
    network = model.build(DEVICE).eval().requires_grad_(False)
    dtype = torch.float16 if name == "sd15" else torch.bfloat16
    for parameter in network.parameters():
        parameter.data = parameter.to(dtype)
    half = partial(torch.randn, device=DEVICE, dtype=dtype)
    tensors, fixed = model.inputs(network.config, int(size), model.batch, half)
    seconds = []
    for number in range(6):
        if number == 2:
            apply_avq(network)
        torch.cuda.synchronize()
        start = perf_counter()
        network(**tensors, **fixed, return_dict=False)
        torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    yield {"model": name, "size": size, "exact": seconds[:2], "avq": seconds[2:]}


def smooth_inputs(
    batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype, sharpness: float
) -> Tensors:
    """Keys and queries are fields with noise; queries share 0.6 with keys, values half."""
    torch.manual_seed(0)
    shape = batch, heads, tokens, dim
    key, query, value = (smooth_field(*shape) + 0.4 * normal(*shape) for _ in range(3))
    query = sharpness * (0.6 * key + 0.8 * query)
    value = (key @ normal(dim, dim) / dim**0.5 + value) / 2
    # Views of (B, N, H, D) memory, as projections write it.
    made = (x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
    side = round(tokens**0.5)
    order = query_order(side, side, device=DEVICE)
    return Tensors.of(*made, query_order=order, key_order=order)


def smooth_field(batch: int, heads: int, tokens: int, dim: int) -> Tensor:
    """Random numbers (B, H, N, D) of variance 1, smooth on a square grid."""
    coarse = normal(batch * heads, dim, CELLS, CELLS)
    fine = F.interpolate(coarse, size=(round(tokens**0.5),) * 2, mode="bicubic")
    return (fine / fine.std()).flatten(2).transpose(1, 2).reshape(batch, heads, tokens, dim)


@dataclass
class Seen:
    """Calls of attention, one option for all: inputs, columns and errors to exact attention."""

    calls: list[Tensors] = field(default_factory=list)
    columns: list[list[float]] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    spec: Any = None

    def mean_columns(self) -> list[float]:
        return [mean(own) for own in zip(*self.columns, strict=True)]


@contextmanager
def watched(
    model: nn.Module, sizes: dict[str, Any], *, passes_exact: bool = False
) -> Iterator[Seen]:
    """Run all layers of levels 0 and 1 with AVQ inside the `with` block and note their calls.

    With `passes_exact`, layers return exact attention's output.
    """
    layers, seen = select_layers(model), Seen()

    def answer(tensors: Tensors, spec: Any, backend: str) -> Any:
        attended, exact = attend(tensors, spec, backend), exact_attention(tensors)
        seen.calls.append(tensors)
        seen.columns.append(columns_of(attended, sizes))
        seen.errors.append(relative_error(attended[0], exact))
        seen.spec = spec
        kind = getattr(type(attended), "_make", tuple)  # 8281089 returns a tuple
        return kind((exact, *attended[1:])) if passes_exact else attended

    levels = tuple(sorted({layer.level for layer in layers} & {0, 1}))
    config = AVQConfig(levels=levels, **sizes)
    with attention_replaced(model, dict.fromkeys((x.name for x in layers), answer), config):
        yield seen


def run_avq(calls: Sequence[Tensors], spec: Any, index: int = 0) -> list[Tensor]:
    return [attend(tensors, spec, "triton")[0] for tensors in calls]


def run_exact(calls: Sequence[Tensors], index: int = 0) -> list[Tensor]:
    return [exact_attention(tensors) for tensors in calls]


def columns_of(attended: Any, sizes: dict[str, Any]) -> list[float]:
    """Codewords and keys of a tile: the mean of thresholds, the largest number of sizes."""
    if "num_refined" in sizes:
        return [64 + 16 * 8, sizes.get("exact_keys", 0)]
    return attended.shown.double().mean(dim=(0, 1, 2)).tolist()


def relative_error(output: Tensor, exact: Tensor) -> float:
    return float((output.float() - exact.float()).norm() / exact.float().norm())


def kernel_us(run: Callable[[int], Any]) -> dict[str, float]:
    """Mean us of each kernel of a call."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for index in range(PROFILED_CALLS):
            run(index)
        torch.cuda.synchronize()
    kernels = profiler.key_averages()
    return {one.key: one.device_time_total / PROFILED_CALLS for one in kernels}


@torch.no_grad()
def main(part: str, output: Path) -> None:
    if part == "operation":
        rows = operation()
    elif part in ("mini-sd", "mini-sd3"):
        rows = denoiser(part)
    elif part.startswith("first/"):
        rows = first_steps(*part.split("/")[1:])
    else:
        rows = vision(part)
    found = []
    for row in rows:
        print(row, flush=True)
        found.append(row)
    facts = {
        "part": part,
        "commit": os.environ.get("GIT_COMMIT"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    output.write_text(json.dumps(facts | {"rows": found}, indent=2) + "\n")


main(sys.argv[1], Path(sys.argv[2]))
