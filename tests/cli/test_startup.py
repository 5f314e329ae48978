"""Help and refused options answer at once: without PyTorch and the libraries on top of it."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BLOCKED = """
import contextlib, io, json, runpy, sys, traceback
for name in ("torch", "diffusers", "transformers", "gradio", "matplotlib"):
    sys.modules[name] = None

def run(command):
    sys.argv = command
    if command[0] == "avq":
        from avq_diffusers.cli.main import main
        main()
    else:
        runpy.run_module(command[0], run_name="__main__")

found = []
for command in json.loads(sys.argv[1]):
    code, printed = 0, io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            run(command)
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            code = 1
            traceback.print_exc()
    found.append((code, " ".join(printed.getvalue().split())))
print(json.dumps(found))
"""

LAUNCHED = """
import atexit, os, runpy, sys
atexit.register(lambda: print("torch" in sys.modules, os.environ.get("OMP_NUM_THREADS")))
sys.argv = [sys.argv[1], "--help"]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


def run_blocked(commands: list[list[str]]) -> list[tuple[int, str]]:
    """Exit code and output of each command, in one process without PyTorch."""
    arguments = [sys.executable, "-c", BLOCKED, json.dumps(commands)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_needs_no_pytorch():
    """Catches an import at the top of a module that costs seconds."""
    expected = [
        ("avq --help", 0, "Stable Diffusion with adaptive"),
        ("avq generate --help", 0, "Denoising steps"),
        ("avq --version", 0, "avq-diffusers"),
        ("avq generate", 2, "Missing argument"),
        ("avq generate fox --height 100", 2, "--height must be a multiple of 8"),
        ("avq bench fox --config M4P2C2 --refined 5", 2, "M4P2C2 can refine 0 to 4 parents"),
        ("avq calibrate --out a --levels zero", 2, "--levels must be numbers such as 0"),
        ("avq inspect --out a.txt", 2, "--out must end in .png"),
        ("eval --help", 0, "Measure AVQ attention"),
        ("eval compare --help", 0, "Denoising steps"),
        ("eval compare --size 100", 2, "--size must be a multiple of 64"),
        ("distill --help", 0, "Distil AVQ codebooks"),
        ("distill --config missing.yaml", 2, "missing.yaml"),
    ]
    found = run_blocked([command.split() for command, _, _ in expected])
    for (command, code, message), (actual_code, output) in zip(expected, found, strict=True):
        assert actual_code == code, (command, output)
        assert message in output, command


SCENES = {"first_seed": 0, "rows": [{"method": "exact", "num_images": 1}]}


def test_refused_results_need_no_pytorch(tmp_path):
    """Catches an import at the top of a module that plots, joins or merges stored results."""
    refused = [
        ("plot {0}", [("bench kernels", {"rows": []})], "is not a complete result"),
        ("plot {0}", [("bench unet", {})], "is not a complete result"),
        ("plot {0}", [("bench transformer", {})], "is not a complete result"),
        ("plot {0}", [("errors", {})], "is not a complete result"),
        ("plot {0}", [("analyse", {})], "is not a complete result"),
        ("plot {0}", [("keys", {})], "is not a complete result"),
        ("plot {0}", [("vision features", {})], "is not a complete result"),
        ("plot {0}", [("table", {"rows": []})], "is not a complete result"),
        ("plot {0}", [("scenes", {})], "plots are those of"),
        ("table {0}", [("errors", {})], "a table is made of results of"),
        ("table {0}", [("scenes", {})], "does not say the size of its images"),
        ("merge {0} --output {0}", [("scenes", {})], "is not a complete result"),
        ("merge {0} {1} --output {0}", [("scenes", SCENES)] * 2, "different seeds"),
        ("merge {0} --output {0}", [("ablate", {})], "is not a complete result"),
    ]
    commands = []
    for number, (command, documents, _) in enumerate(refused):
        paths = [tmp_path / f"{number}-{place}.json" for place in range(len(documents))]
        for path, (kind, content) in zip(paths, documents, strict=True):
            path.write_text(json.dumps({"command": f"python -m eval {kind}"} | content))
        commands.append(["eval", *command.format(*paths).split()])
    found = run_blocked(commands)
    for (_, _, message), command, (code, output) in zip(refused, commands, found, strict=True):
        assert code == 2, (command, output)
        assert message in output, command


@pytest.mark.parametrize(
    ("module", "changes", "expected"),
    [
        ("distill", {}, "None"),
        ("distill.pretrain", {}, "None"),
        ("distill.vision", {}, "None"),
        ("eval", {}, "None"),
        ("eval", {"OMP_NUM_THREADS": "2"}, "2"),  # what a user asked for
        ("eval", {"LOCAL_WORLD_SIZE": "2"}, "1"),  # processes share the cores
    ],
)
def test_a_launched_process_has_all_cores(module, changes, expected):
    """Catches PyTorch on one thread, or imported before the launcher's limit is lifted."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    given = "--num_processes=1 --num_machines=1 --mixed_precision=no --dynamo_backend=no "
    given += f"--num_cpu_threads_per_process=1 -m {module}"
    settings = launch_command_parser().parse_args(given.split(), Namespace(use_cpu=False))
    _, environment = prepare_simple_launcher_cmd_env(settings)
    assert environment["OMP_NUM_THREADS"] == "1"
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHED, module],
        cwd=ROOT,
        env=environment | changes,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1] == f"False {expected}"
