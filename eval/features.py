"""What of diffusers works with AVQ: a table from the outcomes of tests.

A test with the marker `feature(name)` stands for a feature; one that is also marked `gpu` for that
feature on a GPU. Besides these tests, which use tiny models, UNets of real configurations run one
step (`eval.full_size`). The files keep what ran last on a CPU and on a GPU, each with its own
environment, so that a run on one leaves the column of the other as it was.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import torch
from tqdm import tqdm

from eval.full_size import MODELS, run_full_size
from eval.store.markdown import markdown_table
from eval.store.report import ProcessFailed, environment, save_json

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Pipelines": (
        "text to image",
        "img2img",
        "inpainting",
        "upscaling",
        "AnimateDiff",
        "from_pipe",
        "save_pretrained",
        "push_to_hub",
        "several pipelines and threads",
    ),
    "Sampling": (
        "every scheduler",
        "negative prompts",
        "batches",
        "no guidance",
        "PAG",
        "callbacks",
    ),
    "Control": (
        "ControlNet",
        "AVQ inside the ControlNet",
        "T2I-Adapter",
        "IP-Adapter",
        "textual inversion",
        "LoRA (load/fuse/unfuse)",
        "LoRA hot-swap",
    ),
    "Other tools": (
        "FreeU",
        "DeepCache",
        "ToMe (merged layers run exact)",
        "attention slicing (replaces AVQ: reported)",
        "xFormers (replaces AVQ: reported)",
    ),
    "Memory": (
        "model offload",
        "sequential offload",
        "group offload",
        "layerwise casting",
        "torchao int8 weights",
        "bitsandbytes int8 weights",
        "gradient checkpointing",
    ),
    "Compilation": (
        "torch.compile of the UNet (one graph)",
        "torch.compile of its blocks (one graph)",
        "torch.compile of the UNet (inductor)",
        "torch.compile of its blocks (inductor)",
        "CUDA graphs",
    ),
    "Models, tiny": (
        "SD1.5",
        "inpainting model (9 channels)",
        "InstructPix2Pix",
        "LCM",
        "SD 2.x",
        "SDXL base",
        "SDXL refiner",
    ),
}
FULL_SIZE = "UNets at full size, random weights"
COLUMNS = {"cpu": "CPU", "cuda": "GPU"}
NO_DEVICE = "needs a CUDA device"
TESTS = Path(__file__).parents[1] / "tests"
PACKAGES = ("accelerate", "peft", "DeepCache", "torchao", "bitsandbytes", "xformers", "torchsde")
ENDED = (0, 1)  # pytest's exit codes where all tests ran: all passed, some failed
ERROR_LENGTH = 300


@dataclass
class Outcome:
    """Of the tests of one feature on one device."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    reasons: list[str] = field(default_factory=list)

    @property
    def works(self) -> bool:
        return self.passed > 0 and self.failed == 0

    def add(self, case: ElementTree.Element) -> None:
        """Count a test case of a JUnit file."""
        wrong = [x for kind in ("failure", "error", "skipped") for x in case.iter(kind)]
        if not wrong:
            self.passed += 1
            return
        if wrong[0].tag == "skipped":
            self.skipped += 1
        else:
            self.failed += 1
        reason = " ".join(wrong[0].get("message").split())
        self.reasons.append(f"{case.get('name')}: {reason}"[:ERROR_LENGTH])


def run_features(output: Path, *, command: str, full_size: bool = False) -> bool:
    """Run the tests of all features on this machine's device; update `features.json` and its table.

    Args:
        output: folder of both.
        command: that was typed.
        full_size: build the UNets at full size as well.

    Returns:
        whether nothing failed.

    Raises:
        FileNotFoundError: the tests are not there, as in an installed package.
        ValueError: a test names a feature that is not in `GROUPS`.
        ProcessFailed: pytest did not run all tests.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = output / "features.json"
    columns = {name: {"features": {}} for name in COLUMNS}
    if path.is_file():
        columns |= json.loads(path.read_text())["columns"]
    found = run_tests(TESTS, device)
    stamp = {"command": command, "environment": environment(device), "packages": _versions()}
    columns[device] |= {**stamp, "features": found[device]}
    if device == "cpu":  # tests that wait for a GPU were skipped; the table tells of them
        columns["cuda"]["features"] = found["cuda"] | columns["cuda"]["features"]
    if full_size:
        rows = [run_full_size(name, torch.device(device)) for name in tqdm(MODELS, "models")]
        columns[device]["full_size"] = {**stamp, "rows": rows}
    save_json(path, command=command, device=device, columns=columns)
    table = features_table(columns)
    (output / "features.md").write_text(table + "\n")
    print(table)
    outcomes = columns[device]["features"].values()
    rows = columns[device].get("full_size", {}).get("rows", [])
    return not any(x["failed"] for x in outcomes) and not any(row.get("failed") for row in rows)


def run_tests(tests: Path, device: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Run the tests that are marked `feature` in a process of their own.

    Args:
        tests: folder of the tests, whose conftest.py records for every marker the property
            `cpu`, or of a test marked `gpu` the property `cuda`, with the feature's name.
        device: `"cuda"` runs those marked `gpu` only; `"cpu"` runs all, of which they skip.

    Raises:
        FileNotFoundError: there is no such folder.
        ProcessFailed: pytest did not run all tests.
        ValueError: a test names a feature that is not in `GROUPS`.

    Returns:
        what `read_outcomes` returns.
    """
    if not tests.is_dir():
        raise FileNotFoundError(f"the tests are those of a checkout, but there is no {tests}.")
    marked = "feature and gpu" if device == "cuda" else "feature"
    with TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        arguments = ["-m", marked, "--junitxml", str(junit), "-p", "no:cacheprovider"]
        process = subprocess.run(
            [sys.executable, "-m", "pytest", str(tests), *arguments],
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )
        if process.returncode not in ENDED or not junit.is_file():
            raise ProcessFailed(f"pytest did not run all tests: exit code {process.returncode}.")
        return read_outcomes(junit)


def read_outcomes(junit: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """By device and feature the fields of `Outcome`, from a JUnit file.

    Raises:
        ValueError: a test names a feature that is not in `GROUPS`.
    """
    outcomes: dict[str, dict[str, Outcome]] = {column: {} for column in COLUMNS}
    for case in ElementTree.parse(junit).iter("testcase"):
        for mark in case.iter("property"):
            outcome = outcomes[mark.get("name")].setdefault(mark.get("value"), Outcome())
            outcome.add(case)
    known = {name for names in GROUPS.values() for name in names}
    for names in outcomes.values():
        if unknown := sorted(names.keys() - known):
            raise ValueError(f"features must be those of GROUPS, but a test is for {unknown[0]!r}.")
    return {
        column: {name: vars(outcome) for name, outcome in names.items()}
        for column, names in outcomes.items()
    }


def features_table(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of `features.json`'s columns as Markdown: a line per group of features.

    A feature is named as working where tests passed and none failed.
    """
    header = ["feature"] + [
        f"{title}{_provenance(columns[name])}" for name, title in COLUMNS.items()
    ]
    rows = [
        [group, *(_cell(names, columns[column]["features"]) for column in COLUMNS)]
        for group, names in GROUPS.items()
    ]
    rows.append([FULL_SIZE, *(_full_size_cell(columns[column]) for column in COLUMNS)])
    tested = {name for column in COLUMNS for name in columns[column]["features"]}
    untested = [name for names in GROUPS.values() for name in names if name not in tested]
    notes = [f"No test: {', '.join(untested)}."] if untested else []
    for column in COLUMNS:
        for name, outcome in columns[column]["features"].items():
            reasons = [text for text in outcome["reasons"] if NO_DEVICE not in text]
            if reasons:
                notes.append(f"- {COLUMNS[column]}, {name}: {reasons[0]}")
    return "\n".join([markdown_table(header, rows), *([""] if notes else []), *notes])


def _versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES if find_spec(name) is not None}


def _provenance(column: Mapping[str, Any]) -> str:
    """Where and when the tests of a column ran."""
    if "environment" not in column:
        return ": not run yet"
    made = column["environment"]
    tests = sum(outcome["passed"] for outcome in column["features"].values())
    commit = f"{made['commit'][:9]}{'+changes' if '+' in made['commit'] else ''}"
    return f": {tests} tests passed, {made['device']}, torch {made['torch']}, {commit}"


def _cell(names: Sequence[str], outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    found = {name: Outcome(**outcomes[name]) for name in names if name in outcomes}
    works = [
        f"{name} ({x.passed} of {x.passed + x.skipped})" if x.skipped else name
        for name, x in found.items()
        if x.works
    ]
    return _parts(
        works,
        failed=[name for name, x in found.items() if x.failed],
        not_run=[name for name, x in found.items() if not x.passed and not x.failed],
    )


def _full_size_cell(column: Mapping[str, Any]) -> str:
    rows = column.get("full_size", {}).get("rows", [])
    names = {row["model"]: f"{row['model']} ({row['dtype']})" for row in rows}
    failed = [row["model"] for row in rows if "failed" in row]
    not_run = [row["model"] for row in rows if "not_run" in row]
    works = [text for name, text in names.items() if name not in (*failed, *not_run)]
    return _parts(works, failed=failed, not_run=not_run)


def _parts(works: Iterable[str], *, failed: Sequence[str], not_run: Sequence[str]) -> str:
    parts = [", ".join(works)]
    parts += [f"**failed**: {', '.join(failed)}"] if failed else []
    parts += [f"not run: {', '.join(not_run)}"] if not_run else []
    return "; ".join(filter(None, parts)) or "-"
