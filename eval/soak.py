"""Long random runs: the operation against its definition, damaged files, memory, threads.

Every case is drawn from a `random.Random` of its own, so that the seed and number of a case are
enough to repeat it; the tests draw the same cases from hypothesis.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from torch import Tensor
from tqdm import tqdm

from avq_diffusers import AVQCodebooks, apply_avq, remove_avq, set_num_refined
from avq_diffusers.mini import MINI_CODEBOOKS, MINI_SD
from eval.damage import Format, library_formats, read_damaged
from eval.problems import draw_problem, error_over_budget, gradient_over_budget
from eval.store.markdown import markdown_table, number

FILES_PER_PROBLEM = 4
MOST_TOKENS = {False: 300, True: 2000}  # by whether kernels run
PICTURES_PER_APPLY = 5
THREAD_ROUNDS = 10
# Bytes per picture that an allocator may still be settling by; the codebooks of mini-sd, if one
# apply leaked them, would be 9 times this.
FLAT = 20_000


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


def soak(
    minutes: float, *, device: torch.device, seed: int, generations: int, first_case: int
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
