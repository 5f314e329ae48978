"""diffusers' own tests of UNets and Stable Diffusion pipelines, without and with AVQ.

Every test file runs twice, each time in a process of its own: as it is, and with AVQ in every
self-attention layer of every UNet that a test builds (`eval.diffusers_suite_plugin` says how). A
test that fails only with AVQ is a feature that AVQ breaks. One whose process dies has failed, and
the file runs again without it. The installed diffusers is tested, by the tests of a checkout, best
of the same version.

Without the Hub, tests that need a model from there fail or skip in both runs, and mini-sd's
tokenizer stands in for the tiny one that most pipeline tests load; pictures then differ from the
stored ones, in both runs by the same numbers, which are compared instead.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from avq_diffusers.files import atomic_write
from eval.commands.options import Output, run_app
from eval.store.markdown import markdown_table
from eval.store.report import RESULTS, ProcessFailed, environment, save_json

TESTS = (
    "tests/models/unets/test_models_unet_2d_condition.py",
    "tests/models/unets/test_models_unet_motion.py",
    "tests/models/unets/test_models_unet_3d_condition.py",
    "tests/models/test_attention_processor.py",
    "tests/pipelines/stable_diffusion/test_stable_diffusion*.py",
    "tests/pipelines/stable_diffusion_2/*.py",
    "tests/pipelines/stable_diffusion_xl/*.py",
    "tests/pipelines/stable_diffusion_adapter/*.py",
    "tests/pipelines/stable_diffusion_image_variation/*.py",
    "tests/pipelines/controlnet/*.py",
    "tests/pipelines/ip_adapters/*.py",
    "tests/pipelines/latent_consistency_models/*.py",
    "tests/pipelines/ledits_pp/*.py",
    "tests/pipelines/pag/test_pag_*sd*.py",
    "tests/pipelines/pag/test_pag_animatediff.py",
    "tests/pipelines/animatediff/*.py",
    "tests/lora/test_lora_layers_sd.py",
    "tests/lora/test_lora_layers_sdxl.py",
)
LEFT_OUT = ("onnx", "sd3", "__init__")
SETTINGS = "settings.json"
PLUGIN = "eval.diffusers_suite_plugin"
RUNNING = ".running"
PYTEST_EXITS = range(6)
RUNS = ("plain", "avq")
OUTCOMES = ("passed", "failed", "skipped")
UNFINISHED = "did not finish"
ERROR_LENGTH = 300
ADDRESS = re.compile(r"0x[0-9a-f]+")  # of an object, another one in every process
# NumPy pads the numbers of an array, and breaks lines by their length.
LAYOUT = re.compile(r" |\\n")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")

# What AVQ is known to break and how the suite gets past it.
ADAPTED = {
    "set_default_attn_processor": "diffusers raises ValueError where a processor is not one of its "
    "own, so a user calls remove_avq first; with AVQ, the tests' calls do, and apply AVQ again.",
}
# By a part of the error: why a test that ends so with AVQ tells of nothing that AVQ broke.
EXPECTED = {
    "`from_pipe` changed the attention processor in original pipeline": "the test asserts that all "
    "processors are of diffusers' class AttnProcessor, after it has compared the pictures; AVQ's "
    "were there before `from_pipe` as well.",
}


def find_tests(checkout: Path, patterns: Sequence[str]) -> list[str]:
    """The test files of `checkout` that match one of `patterns`, as paths relative to it.

    Raises:
        ValueError: a pattern matches no file.
    """
    files: dict[str, None] = {}
    for pattern in patterns:
        found = sorted(str(path.relative_to(checkout)) for path in checkout.glob(pattern))
        if not found:
            raise ValueError(f"{checkout} must be a checkout of diffusers, but has no {pattern}.")
        files.update(dict.fromkeys(x for x in found if not any(name in x for name in LEFT_OUT)))
    return list(files)


def run_tests(
    checkout: Path, files: Sequence[str], folder: Path, *, device: str, hub: bool, jobs: int
) -> None:
    """Run each file without and with AVQ, and keep the outcomes in `folder`.

    A file whose outcomes are there already does not run again, unless its process died.

    Args:
        checkout: folder of the checkout.
        files: paths of test files, relative to it.
        folder: gets `plain/` and `avq/` with a JSON file of each test file.
        device: cpu, cuda or another that diffusers' tests know.
        hub: let tests load models from the Hub.
        jobs: test files that run at a time.

    Raises:
        ValueError: the outcomes in `folder` are of other versions or settings.
        ProcessFailed: pytest stopped early, as by Ctrl-C.
    """
    _check_settings(folder, _settings(checkout, device, hub))
    todo = [(file, run) for file in files for run in RUNS if not _is_done(_path(folder, run, file))]
    pool = ThreadPoolExecutor(jobs)
    futures = [pool.submit(_run_file, checkout, *x, folder, device, hub) for x in todo]
    try:
        for future in tqdm(as_completed(futures), "test files", len(futures)):
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def compare(folder: Path, files: Sequence[str]) -> dict[str, Any]:
    """Compare the outcomes in `folder` test by test.

    Returns:
        For JSON: the number of tests that passed, failed and skipped in both runs (`totals`, and by
        file `files`), what AVQ's layers did (`calls`), three lists of tests: those that fail only
        with AVQ (`new_failures`), for a reason of `EXPECTED` (`expected_failures`), and those that
        fail with another error (`changed_failures`), and the test files whose process died before
        the first test of a run, with its exit code (`dead_files`).
    """
    rows, new, expected, changed, dead, calls = [], [], [], [], [], Counter()
    for file in files:
        plain, avq = (json.loads(_path(folder, run, file).read_text()) for run in RUNS)
        rows.append(
            {"file": file, "plain": _counts(plain), "avq": _counts(avq), "calls": avq["calls"]}
        )
        calls.update(avq["calls"])
        runs = zip(RUNS, (plain, avq), strict=True)
        if exits := {
            run: f"exit {outcomes['exit']}" for run, outcomes in runs if "exit" in outcomes
        }:
            dead.append({"file": file, **exits})
        for test in sorted(plain["tests"].keys() | avq["tests"].keys()):
            before, after = (x["tests"].get(test, {"outcome": UNFINISHED}) for x in (plain, avq))
            difference = {"test": test, "plain": _describe(before), "avq": _describe(after)}
            reasons = [EXPECTED[x] for x in EXPECTED if x in after.get("error", "")]
            if after["outcome"] == before["outcome"] == "failed":
                if not same_error(before["error"], after["error"]):
                    changed.append(difference)
            elif after["outcome"] in (before["outcome"], "passed"):
                continue
            elif reasons:
                expected.append({**difference, "reason": reasons[0]})
            else:
                new.append(difference)
    return {
        "totals": {run: dict(sum((Counter(x[run]) for x in rows), Counter())) for run in RUNS},
        "calls": dict(calls),
        "new_failures": new,
        "changed_failures": changed,
        "expected_failures": expected,
        "dead_files": dead,
        "files": rows,
    }


def same_error(error: str, other: str) -> bool:
    """Whether two messages say the same, their numbers within 0.1 % or 0.0001."""
    error, other = (ADDRESS.sub("address", LAYOUT.sub("", x)) for x in (error, other))
    numbers, others = (map(float, NUMBER.findall(x)) for x in (error, other))
    return NUMBER.sub("#", error) == NUMBER.sub("#", other) and all(
        math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4) for a, b in zip(numbers, others, strict=True)
    )


def summary(result: dict[str, Any]) -> str:
    """The outcome of `compare` as Markdown."""
    totals = {run: Counter(result["totals"][run]) for run in RUNS}
    rows = [[run, *(str(totals[run][outcome]) for outcome in OUTCOMES)] for run in RUNS]
    calls = ", ".join(f"{kind}: {count}" for kind, count in sorted(result["calls"].items()))
    lines = [
        markdown_table(["run", *OUTCOMES], rows),
        "",
        f"Calls of AVQ layers: {calls or 'none'}",
    ]
    for title, name in (
        ("Fail only with AVQ", "new_failures"),
        ("Fail otherwise with AVQ", "changed_failures"),
        ("Expected to fail with AVQ", "expected_failures"),
        ("Files whose process died", "dead_files"),
    ):
        lines += ["", f"{title}: {len(result[name])}"]
        for found in result[name]:
            test, *details = found.items()
            lines += [f"- {test[1]}", *(f"  - {name}: {text}" for name, text in details)]
    return "\n".join(lines)


def diffusers_suite(
    checkout: Annotated[Path, typer.Option(help="Folder of a checkout of diffusers.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    tests: Annotated[
        list[str] | None, typer.Option(help="Test files relative to the checkout, as a glob.")
    ] = None,
    hub: Annotated[bool, typer.Option(help="Let the tests load models from the Hub.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Test files that run at a time.")] = 1,
    folder: Annotated[
        Path, typer.Option(help="Keeps the outcome of every file; a killed run goes on from it.")
    ] = Path("runs/diffusers_suite"),
    output: Output = RESULTS,
) -> None:
    """Run diffusers' own tests without and with AVQ in every UNet; only differences count.

    The tests need parameterized, pytest, pytest-timeout, requests-mock and torchsde.

    Example: python -m eval.diffusers_suite --checkout ../diffusers --jobs 2
    """
    checkout = checkout.resolve()
    files = find_tests(checkout, tests or TESTS)
    run_tests(checkout, files, folder, device=device, hub=hub, jobs=jobs)
    result = compare(folder, files)
    options = [f"--device {device}", *(f"--tests '{x}'" for x in tests or ())]
    options += ["--hub"] if hub else []
    save_json(
        output / f"diffusers_suite_{device}.json",
        command=" ".join(["python -m eval.diffusers_suite --checkout DIFFUSERS", *options]),
        device=device,
        suite=json.loads((folder / SETTINGS).read_text()),
        adapted=ADAPTED,
        **result,
    )
    print(summary(result))
    wrong = (result[name] for name in ("new_failures", "changed_failures", "dead_files"))
    if any(wrong) or not result["calls"].get("AVQ"):
        raise typer.Exit(1)


def _settings(checkout: Path, device: str, hub: bool) -> dict[str, Any]:
    tests_commit = "unknown"
    if (checkout / ".git").exists():
        head = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        tests_commit = subprocess.check_output(head, text=True).strip()
    return {
        "diffusers": version("diffusers"),
        "tests_commit": tests_commit,
        "commit": environment(device)["commit"],
        "device": device,
        "hub": hub,
    }


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / SETTINGS
    if not path.exists():
        for run in RUNS:
            (folder / run).mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=1) + "\n")
    kept = json.loads(path.read_text())
    differing = [name for name in settings if kept.get(name) != settings[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"{folder} holds outcomes with {name} {kept.get(name)!r}, not {settings[name]!r}; "
            f"choose another folder."
        )


def _run_file(checkout: Path, file: str, run: str, folder: Path, device: str, hub: bool) -> None:
    outcomes = _path(folder, run, file).resolve()
    outcomes.unlink(missing_ok=True)  # of a process that died
    running = outcomes.with_suffix(RUNNING)
    command = [sys.executable, "-m", "pytest", file, "--rootdir", ".", "-p", PLUGIN]
    command += ["-p", "no:cacheprovider", "-q", "--tb", "short", "--continue-on-collection-errors"]
    command += ["--outcomes", str(outcomes)]
    command += ["--avq"] if run == "avq" else []
    search_path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
        "DIFFUSERS_TEST_DEVICE": device,
        "HF_HUB_OFFLINE": "0" if hub else "1",
    }
    died: dict[str, dict[str, str]] = {}
    while not outcomes.exists():
        running.unlink(missing_ok=True)
        with outcomes.with_suffix(".log").open("w") as log:
            process = subprocess.run(
                [*command, *(f"--died={test}" for test in died)],
                cwd=checkout,
                env=os.environ | variables,
                stdout=log,
                stderr=log,
            )
        if outcomes.exists():
            break
        if process.returncode in PYTEST_EXITS:
            raise ProcessFailed(f"pytest did not finish {file}; see {log.name}.")
        if not running.exists():
            # It came to no test: they count as not finished, and run again next time.
            outcomes.write_text(json.dumps({"tests": {}, "calls": {}, "exit": process.returncode}))
            return
        error = f"the process died: exit {process.returncode}"
        died[running.read_text()] = {"outcome": "failed", "error": error}
    running.unlink(missing_ok=True)
    if died:
        document = json.loads(outcomes.read_text())
        document["tests"] |= died
        with atomic_write(outcomes) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n")


def _is_done(outcomes: Path) -> bool:
    return outcomes.exists() and "exit" not in json.loads(outcomes.read_text())


def _path(folder: Path, run: str, file: str) -> Path:
    return folder / run / (file.replace("/", "-").removesuffix(".py") + ".json")


def _counts(outcomes: dict[str, Any]) -> dict[str, int]:
    return dict(Counter(test["outcome"] for test in outcomes["tests"].values()))


def _describe(result: dict[str, str]) -> str:
    return ": ".join(result.values())[:ERROR_LENGTH]


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(diffusers_suite)
    run_app(app)
