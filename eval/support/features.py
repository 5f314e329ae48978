"""Which features of diffusers have a test that passed: `python -m eval features JUNIT`.

A test with the marker `feature(name)` stands for a feature. Results are kept in `features.json`, so
that one column stays while the other is written.
"""

import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from avq_diffusers.files import write_text
from distill.environment import environment
from eval.store.markdown import markdown_table
from eval.store.report import save_json

COLUMNS = {"cpu": "CPU", "cuda": "GPU"}
INTRODUCTION = """# Features

Which features of diffusers work together with AVQ: each entry stands for tests that passed. A note
in brackets says what happens: *runs exact*, these layers or calls run exact attention; *kept*, the
other tool's attention stays; *reported*, `summary` says so. *Tiny* models are the real classes with
few and narrow layers. A dash means that no test runs on that device.
"""
GROUPS = {
    "Pipelines": (
        *("text to image", "img2img", "inpainting", "upscaling", "AnimateDiff", "from_pipe"),
        *("save_pretrained", "push_to_hub", "several pipelines and threads"),
        "set_attn_processor(AVQProcessor()) on a stock pipeline",
    ),
    "Sampling": (
        *("every scheduler", "negative prompts", "batches", "no guidance", "PAG", "callbacks"),
    ),
    "Control": (
        *("ControlNet", "AVQ inside the ControlNet", "T2I-Adapter", "IP-Adapter"),
        *("textual inversion", "LoRA (load/fuse/unfuse)", "LoRA hot-swap"),
    ),
    "Other tools": (
        *("FreeU", "DeepCache", "ToMe (merged layers run exact)"),
        "attention slicing (replaces AVQ: reported)",
        "xFormers (replaces AVQ: reported)",
        "processors that share tokens (kept)",
        "guiders of modular pipelines",
    ),
    "Memory": (
        *("model offload", "sequential offload", "group offload", "layerwise casting"),
        *("torchao int8 weights", "bitsandbytes int8 weights", "gradient checkpointing"),
        "two forwards per backward",
    ),
    "Compilation": (
        "torch.compile of the UNet (one graph)",
        "torch.compile of its blocks (one graph)",
        "torch.compile of the UNet (inductor)",
        "torch.compile of its blocks (inductor)",
        "CUDA graphs",
    ),
    "Wrapped UNets": (*("PEFT model", "DistributedDataParallel", "FSDP", "nn.DataParallel"),),
    "Several processes": (
        *("Ulysses", "Ulysses with sizes that do not divide", "schedules under Ulysses"),
        *("training under Ulysses", "a tolerance under Ulysses", "ring attention (runs exact)"),
        *("tensor parallelism", "FSDP and Ulysses", "guidance in two processes", "device_map"),
    ),
    "Models, tiny": (
        *("SD1.5", "inpainting model (9 channels)", "InstructPix2Pix", "LCM", "SD 2.x"),
        *("SDXL base", "SDXL refiner"),
    ),
    "Transformers, tiny": (
        *("SD3", "Flux", "Flux2", "Qwen-Image", "Z-Image", "Wan", "LTX"),
        *("img2img of SD3", "inpainting of SD3", "img2img of Flux"),
        *("ControlNet of SD3", "ControlNet of Flux", "skip-layer guidance of SD3"),
        *("PAG of SD3 (runs exact)", "IP-Adapter of SD3 (kept)", "IP-Adapter of Flux"),
        *("other processors of SD3 (kept)", "LoRA of transformers (load/fuse/unload)"),
        *("offload of transformers", "layerwise casting of transformers"),
        *("gradient checkpointing of SD3", "gradient checkpointing of Flux"),
        *("blocks of SD3 compiled one by one", "repeated blocks of Flux compiled"),
        "fused projections of SD3 (replace AVQ: reported)",
        *("fused projections of Flux", "torch.compile of transformers (one graph)"),
        *("transformers in several threads", "PEFT model of a transformer"),
    ),
    "Caches of transformers, tiny": (
        *("FirstBlockCache", "MagCache", "TaylorSeer", "PyramidAttentionBroadcast", "FasterCache"),
    ),
    "UNets at full size, random weights": (
        *("SD1.5 at full size", "SD 2.1 at full size"),
        *("SDXL base at full size", "SDXL refiner at full size"),
    ),
}


def read_outcomes(junit: Path) -> dict[str, dict[str, dict[str, int]]]:
    """By device and feature: how many tests passed, failed and were skipped.

    Raises:
        ValueError: `junit` is no JUnit file, or names a feature that is not in `GROUPS`.
    """
    outcomes: dict[str, dict[str, Counter]] = {device: {} for device in COLUMNS}
    known = {name for names in GROUPS.values() for name in names}
    try:
        cases = [*ElementTree.parse(junit).iter("testcase")]
    except ElementTree.ParseError as error:
        raise ValueError(f"{junit} is no JUnit file: {error}.") from error
    for case in cases:
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "passed"
        outcome = "skipped" if "skipped" in tags else outcome
        for mark in case.iter("property"):
            device, name = mark.get("name"), mark.get("value")
            if name not in known:
                raise ValueError(f"features must be those of GROUPS, but a test is for {name!r}.")
            outcomes[device].setdefault(name, Counter())[outcome] += 1
    return outcomes


def features_table(columns: dict) -> str:
    """A line per group; a feature works where tests passed and none failed."""
    header = ["feature"]
    for device, title in COLUMNS.items():
        if "environment" in columns[device]:
            made = columns[device]["environment"]
            passed = sum(x.get("passed", 0) for x in columns[device]["features"].values())
            title += f": {passed} tests passed, {made['device']}, torch {made['torch']}"
            title += f", {made['commit'][:9]}"
        header.append(title)
    rows = [
        [group, *(_cell(names, columns[device]["features"]) for device in COLUMNS)]
        for group, names in GROUPS.items()
    ]
    return f"{INTRODUCTION}\n{markdown_table(header, rows)}"


def _cell(names: tuple[str, ...], outcomes: dict[str, dict[str, int]]) -> str:
    found = {name: Counter(outcomes[name]) for name in names if name in outcomes}
    failed = [name for name, x in found.items() if x["failed"]]
    works = [name for name, x in found.items() if x["passed"] and not x["failed"]]
    not_run = [name for name in found if name not in (*works, *failed)]
    parts = [", ".join(works)]
    parts += [f"**failed**: {', '.join(failed)}"] * bool(failed)
    parts += [f"not run: {', '.join(not_run)}"] * bool(not_run)
    return "; ".join(filter(None, parts)) or "-"


def write_features(junit: Path, results: Path, device: str) -> None:
    """Put the outcomes of a JUnit file into the column of `device`, and write the table.

    Raises:
        ValueError: `junit` is no JUnit file, or names a feature that is not in `GROUPS`.
    """
    path = results / "features.json"
    columns = {name: {"features": {}} for name in COLUMNS}
    if path.is_file():
        columns |= json.loads(path.read_text())["columns"]
    features = read_outcomes(junit)[device]
    columns[device] = {"environment": environment(device), "features": features}
    save_json(path, device=device, columns=columns)
    write_text(results / "features.md", features_table(columns) + "\n")
