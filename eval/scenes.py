"""Quality of mini-sd on held-out scenes: FID, CLIP score and copy agreement, with controls."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import mean
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from tqdm import tqdm

from avq_diffusers.mini import IMAGE_SIZE, Scene, corrupt, render
from eval.frechet import fit_gaussian
from eval.markdown import markdown_table, number
from eval.methods import EXACT, attention_method, method_cells, prepare_methods
from eval.metrics import Scorer, clip_scores, copy_agreements, picture_features, psnr
from eval.pictures import dilation, generate
from eval.samples import LIKENESS, Sample, figures, likeness

FIGURES = ("fid", "clip_score", "copy_agreement", *LIKENESS, "seconds_per_picture")
MEASURED = {*FIGURES, *(f"{name}_sem" for name in FIGURES)}
PROTOCOL = ("num_inference_steps", "dtype", "size", "scalecrafter")
# Older files lack some of these; what a file does not say is not compared.
MAKING = ("model", "model_sha256", "scorer", "scorer_sha256", "guidance_scale")
HEADER = ("FID", "FID to exact", "CLIP score", "copy agreement", "PSNR dB, median (p10)")
# Of a run that is made in parts, what these share, beside device and versions.
WHOLE = ("pictures", "first_seed", "batch", "compiled", *PROTOCOL, *MAKING)
# Of an environment, what may differ between parts, which are made on several days.
CHANGING = ("date", "commit")
REFERENCE = "scenes of the reference"
REAL = "real scenes"
BROKEN = "real scenes, copies broken"


def score_methods(
    pipe: StableDiffusionPipeline,
    methods: Sequence[str],
    scenes: Sequence[Scene],
    reference_scenes: Sequence[Scene],
    scorer: Scorer,
    *,
    levels: tuple[int, ...] = (0,),
    calibration_prompts: Sequence[str],
    num_inference_steps: int = 25,
    batch_size: int = 64,
    first_seed: int = 0,
    first_index: int = 0,
    size: int = IMAGE_SIZE,
    is_dilated: bool = False,
    is_compiled: bool = False,
    finished: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    samples: dict[str, Sample] | None = None,
) -> Iterator[Mapping[str, Any]]:
    """Yield a row a method: its pictures of `scenes` against other scenes.

    The noise of picture i of a run has the seed `first_seed + i`, the same for every method. Two
    rows of rendered pictures come first, as ceiling and floor of the figures: other real scenes,
    and the same with their copies broken. Then comes `exact`, wherever it stands among the methods:
    PSNR and "FID to exact" compare the other methods' pictures with its own. At equal noise the
    latter tells methods apart that FID, which varies with the noise, does not. Seconds per picture
    are those of generation, first calls included.

    Real pictures are rendered at the size of the generated ones. Copy agreement is measured at this
    size; for FID and CLIP score the scorer resizes all of them to its own by an antialiased
    bilinear filter. Two rows of pictures are in memory at a time.

    Args:
        pipe: without AVQ.
        methods: names of `Method`.
        scenes: whose captions are drawn.
        reference_scenes: that FID compares with.
        scorer: gives features and CLIP scores.
        levels: UNet levels that change.
        calibration_prompts: of methods that are calibrated, at the model's own size.
        num_inference_steps: denoising steps.
        batch_size: pictures made at once.
        first_seed: of the noise.
        first_index: pictures of the run that come before these.
        size: side of the pictures, a multiple of 64.
        is_dilated: use ScaleCrafter.
        is_compiled: compile the UNet, anew for each method.
        finished: rows of an earlier run by method. Their methods are not run again, but for
            folders that have changed since, rows that were not compared with `exact` and now are,
            and for `exact` where the pictures of others are still to be compared with its own.
        samples: gets what is measured of each picture before the row comes, by method, and of
            `REFERENCE`. Of finished rows it has them from the earlier run; one without is made
            again.

    Raises:
        FileNotFoundError, ValueError: as `prepare_methods`, or the size is no multiple of 64 or one
            that ScaleCrafter has no settings for, or batches to compile for differ in size.
    """
    if size <= 0 or size % 64:
        raise ValueError(f"the size must be a multiple of 64, but got {size}.")
    if is_compiled and len(scenes) % batch_size:
        raise ValueError(
            f"a compiled UNet needs batches of one size, but {len(scenes)} pictures are no "
            f"multiple of {batch_size}."
        )
    with dilation(pipe, size, is_dilated=is_dilated):
        pass  # refuses sizes before the work
    noise = range(first_seed + first_index, first_seed + first_index + len(scenes))
    prepared = prepare_methods(
        pipe, methods, levels=levels, calibration_prompts=calibration_prompts
    )
    captions = [scene.caption for scene in scenes]
    is_compared = EXACT in methods
    finished = {
        method.name: row
        for method in prepared
        if (row := finished.get(method.name)) is not None
        and row["sha256"] == method.sha256
        and (samples is None or method.name in samples)
        and (method.name == EXACT or not is_compared or row["psnr_median"] is not None)
    }
    samples = {} if samples is None else samples
    samples[REFERENCE] = Sample(picture_features(scorer, _render_all(reference_scenes, size)))
    reference = fit_gaussian(samples[REFERENCE].features)

    def measure(pictures: np.ndarray, exact: np.ndarray | None) -> Sample:
        features = picture_features(scorer, pictures)
        values = (
            clip_scores(scorer, features, captions),
            copy_agreements(pictures, scenes),
            np.empty(0) if exact is None else _psnr(pictures, exact),
        )
        return Sample(features, *map(torch.from_numpy, values))

    for name in (REAL, BROKEN):
        breaks = range(first_index, first_index + len(scenes)) if name == BROKEN else None
        samples[name] = measure(_render_all(scenes, size, breaks), None)
        yield {"method": name, **figures(samples[name], reference)}
    exact = exact_features = None
    if is_compiled:
        pipe.unet.compile(dynamic=False)
    are_all_finished = len(finished) == len(prepared)
    for method in sorted(prepared, key=lambda method: method.name != EXACT):
        if method.name in finished and (are_all_finished or method.name != EXACT):
            yield finished[method.name]
            continue
        torch.compiler.reset()  # the code of the method before would count as a recompilation
        start = perf_counter()
        with attention_method(pipe, method):
            pictures = generate(
                pipe,
                captions,
                noise,
                num_inference_steps=num_inference_steps,
                batch_size=batch_size,
                size=size,
                is_dilated=is_dilated,
                description=method.name,
            )
        seconds = (perf_counter() - start) / len(captions)
        sample = samples[method.name] = measure(pictures, exact)
        alike = likeness(sample, exact_features)
        if method.name == EXACT:
            exact, exact_features = pictures, fit_gaussian(sample.features)
        unusual = {"fields": fields} if (fields := method.unusual_fields) else {}
        facts = method.facts() | unusual
        yield {**facts, **figures(sample, reference), **alike, "seconds_per_picture": seconds}
        del pictures  # before the next ones are made


def finished_rows(
    document: Mapping[str, Any], protocol: Mapping[str, Any], environment: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """The rows of a run that was killed, by method, for `score_methods` to go on from.

    Args:
        document: the content of its file.
        protocol: of the run that goes on, as fields of `document`.
        environment: of the run that goes on; its date may differ.

    Raises:
        ValueError: the file is of another protocol, commit, version or device.
    """
    stored = {**document, **document.get("environment", {})}
    expected = {**protocol, **environment}
    differing = [
        f"{name} ({stored.get(name)}, now {value})"
        for name, value in expected.items()
        if name != "date" and stored.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"only the same run can go on, but the stored one differs in {', '.join(differing)}; "
            "start again without --resume."
        )
    return {row["method"]: row for row in document["rows"]}


def part_of(part: str, count: int) -> range:
    """The indices of the part `K/N` of `count` pictures.

    Raises:
        ValueError: it has another form, or there is no such part.
    """
    form = re.fullmatch(r"(\d+)/(\d+)", part)
    number, total = map(int, form.groups()) if form else (0, 0)
    if not 1 <= number <= total <= count:
        raise ValueError(
            f"the part must be K/N, the K-th of N parts of at most {count} pictures, but got "
            f"{part!r}."
        )
    return range((number - 1) * count // total, number * count // total)


def pool_parts(
    parts: Sequence[tuple[Mapping[str, Any], Mapping[str, Sample]]],
) -> list[dict[str, Any]]:
    """The rows of a whole run, those that every part has, from all of its parts.

    Args:
        parts: of each, the content of its file and its samples.

    Raises:
        ValueError: a part is missing, is there twice, lacks samples, or is of another run, device
            or version.
    """
    documents = [document for document, _ in parts]
    environments = [document.get("environment", {}) for document in documents]
    names = {name: documents for name in WHOLE}
    names |= {name: environments for name in environments[0] if name not in CHANGING}
    for name, places in names.items():
        if len({json.dumps(place.get(name)) for place in places}) > 1:
            raise ValueError(f"the parts must be of one run, but differ in {name}.")
    whole = range(documents[0]["pictures"])
    made = [part_of(document["part"], len(whole)) for document in documents]
    if sorted(index for indices in made for index in indices) != list(whole):
        raise ValueError(
            f"a run is pooled from all of its parts, each once, but these are "
            f"{', '.join(document['part'] for document in documents)}."
        )
    in_order = [parts[index] for index in np.argsort([indices.start for indices in made])]

    def joined(name: str) -> Sample:
        if any(name not in samples for _, samples in in_order):
            raise ValueError(f"a part has no sample of {name}.")
        sample = Sample.join([samples[name] for _, samples in in_order])
        if len(sample.psnr) not in (0, len(sample.features)):
            raise ValueError(f"a part has not compared {name} with {EXACT}; go on with --resume.")
        return sample

    by_part = [{row_key(row): row for row in document["rows"]} for document, _ in in_order]
    common = [key for key in by_part[0] if all(key in rows for rows in by_part)]
    reference = fit_gaussian(joined(REFERENCE).features)
    exact = fit_gaussian(joined(EXACT).features) if (EXACT, ()) in common else None
    pooled = []
    for key in common:
        row = by_part[0][key]
        facts = {name: row[name] for name in row if name not in {*MEASURED, "num_pictures"}}
        if any({**rows[key], **facts} != rows[key] for rows in by_part):
            raise ValueError(f"the parts must be of one run, but differ in the method {key[0]}.")
        sample = joined(key[0])
        alike = likeness(sample, exact) if "psnr_median" in row else {}
        if "seconds_per_picture" in row:
            seconds = [rows[key]["seconds_per_picture"] for rows in by_part]
            alike["seconds_per_picture"] = mean(seconds)
        pooled.append({**facts, **figures(sample, reference), **alike})
    return pooled


def merge_runs(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows that every seed has: means, and standard errors over the seeds.

    Runs of one seed are joined; where several have the same row, the first one counts.

    Args:
        runs: the contents of files of `python -m eval scenes`, of at least two seeds.

    Raises:
        ValueError: there are fewer seeds, pictures of two seeds share noise, no row is of every
            seed, or the rest of the runs' protocol differs.
    """
    seeds = [run.get("first_seed") for run in runs]
    if len(set(seeds)) < 2 or None in seeds:
        raise ValueError(f"expected results of scenes with different seeds, but got seeds {seeds}.")
    protocols = [{name: run.get(name) for name in PROTOCOL} for run in runs]
    by_seed: dict[int, dict[tuple, Mapping[str, Any]]] = {seed: {} for seed in seeds}
    facts: dict[tuple, dict[str, Any]] = {}
    are_alike = all(x == protocols[0] for x in protocols) and not said_otherwise(runs)
    for run in runs:
        for row in run["rows"]:
            key = row_key(row)
            by_seed[run["first_seed"]].setdefault(key, row)
            said = {name: row[name] for name in row if name not in MEASURED}
            if row["method"] == EXACT:
                said.pop("levels", None)
            are_alike &= facts.setdefault(key, said) == said
    common = [key for key in facts if all(key in rows for rows in by_seed.values())]
    if not are_alike or not common:
        raise ValueError(
            "the runs must have the same methods and pictures, and the same "
            f"{', '.join((*PROTOCOL, *MAKING))}."
        )
    ranges = sorted({(x.start, x.stop) for x in map(noise_seeds, runs)})
    for (first, stop), (other, other_stop) in pairwise(ranges):
        if other < stop:
            raise ValueError(
                f"runs that are averaged must share no noise, but have the seeds {first} to "
                f"{stop - 1} and {other} to {other_stop - 1}."
            )
    return [
        {**facts[key], "num_runs": len(by_seed), **_over_runs([x[key] for x in by_seed.values()])}
        for key in common
    ]


def row_key(row: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """What a row is of: a method at levels; exact attention is the same at any."""
    levels = () if row["method"] == EXACT else tuple(row.get("levels") or ())
    return row["method"], levels


def noise_seeds(run: Mapping[str, Any]) -> range:
    """The seeds of the noise of a run's pictures."""
    count = max((row["num_pictures"] for row in run["rows"]), default=0)
    return range(run["first_seed"], run["first_seed"] + count)


def said_otherwise(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of `MAKING` that two of the runs say with different values."""
    return [name for name in MAKING if len({run.get(name) for run in runs} - {None}) > 1]


def scenes_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table."""
    return markdown_table(
        ["method", "effective codewords", "levels", *HEADER],
        (
            [*method_cells(row), ", ".join(map(str, row_key(row)[1])) or "-", *figure_cells(row)]
            for row in rows
        ),
    )


def figure_cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of a row under `HEADER`; ± is one standard error."""

    def cell(name: str, form: str) -> str:
        spread = row.get(f"{name}_sem")
        return number(row.get(name), form) + ("" if spread is None else f" ± {spread:{form}}")

    median = cell("psnr_median", ".1f")
    if row.get("psnr_p10") is not None:
        median += f" ({row['psnr_p10']:.1f})"
    distances = (cell("fid", ".3f"), cell("fid_to_exact", ".3f"))
    return [*distances, cell("clip_score", ".2f"), cell("copy_agreement", ".3f"), median]


def _psnr(pictures: np.ndarray, exact: np.ndarray) -> np.ndarray:
    # One at a time: `psnr` computes in float64.
    pairs = zip(pictures, exact, strict=True)
    return np.concatenate([psnr(one[None], other[None]) for one, other in pairs])


def _over_runs(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Means and standard errors of each figure, None where a run has none."""
    figures = {}
    for name in FIGURES:
        values = [row.get(name) for row in rows]
        known = None not in values
        figures[name] = mean(values) if known else None
        figures[f"{name}_sem"] = _standard_error(np.array(values)) if known else None
    return figures


def _render_all(
    scenes: Sequence[Scene], size: int, breaks: Sequence[int] | None = None
) -> np.ndarray:
    """Pictures of the scenes, with copies broken by these seeds."""
    pictures = np.empty((len(scenes), size, size, 3), np.uint8)
    for index, scene in enumerate(tqdm(scenes, desc="rendering")):
        pictures[index] = (
            render(scene, size) if breaks is None else corrupt(scene, breaks[index], size)
        )
    return pictures


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5)
