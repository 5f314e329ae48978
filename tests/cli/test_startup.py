"""Help and refused options answer at once: without PyTorch and the libraries on top of it."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BLOCKED = """
import runpy, sys
for name in ("torch", "diffusers", "transformers", "gradio", "matplotlib"):
    sys.modules[name] = None
module = sys.argv.pop(1)
sys.argv[0] = module
if module == "avq":
    from avq_diffusers.cli.main import main
    main()
else:
    runpy.run_module(module, run_name="__main__")
"""

LAUNCHED = """
import atexit, os, runpy, sys
atexit.register(lambda: print("torch" in sys.modules, os.environ.get("OMP_NUM_THREADS")))
sys.argv = [sys.argv[1], "--help"]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
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
    ],
)
def test_needs_no_pytorch(command, code, message):
    """Catches an import at the top of a module that costs seconds."""
    arguments = [sys.executable, "-c", BLOCKED, *command.split()]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert message in " ".join((done.stdout + done.stderr).split())


SCENES = {"first_seed": 0, "rows": [{"method": "exact", "num_images": 1}]}


@pytest.mark.parametrize(
    ("command", "documents", "message"),
    [
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
    ],
)
def test_refused_results_need_no_pytorch(tmp_path, command, documents, message):
    """Catches an import at the top of a module that plots, joins or merges stored results."""
    paths = [tmp_path / f"{number}.json" for number in range(len(documents))]
    for path, (kind, content) in zip(paths, documents, strict=True):
        path.write_text(json.dumps({"command": f"python -m eval {kind}"} | content))
    arguments = [sys.executable, "-c", BLOCKED, "eval", *command.format(*paths).split()]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


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
