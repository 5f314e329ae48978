"""Help, refused options and `avq info` answer at once: without PyTorch and its libraries."""

import json
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from typer.testing import CliRunner

from avq_diffusers.cli.main import app

ROOT = Path(__file__).resolve().parents[2]

BLOCKED = """
import contextlib, io, json, os, runpy, sys, traceback
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
    os.environ["OMP_NUM_THREADS"] = "1"
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            run(command)
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            code = 1
            traceback.print_exc()
    has_one_thread = "OMP_NUM_THREADS" in os.environ
    found.append((code, has_one_thread, " ".join(printed.getvalue().split())))
print(json.dumps(found))
"""


def test_needs_no_pytorch():
    """Catches an import at the top of a module that costs seconds, and PyTorch on one thread, to
    which `accelerate launch` limits the only process of a machine."""
    expected = [
        ("avq --help", 0, "Images of diffusers models with adaptive"),
        ("avq generate --help", 0, "Denoising steps"),
        ("avq --version", 0, "avq-diffusers"),
        ("avq generate", 2, "Missing argument"),
        ("avq generate fox --height 100", 2, "--height must be a multiple of 8"),
        ("avq bench fox --config M4P2C2 --num-refined 5", 2, "M4P2C2 can refine 0 to 4 parents"),
        ("avq calibrate --output a --levels zero", 2, "--levels must be numbers such as 0"),
        ("avq bench fox --output a.txt", 2, "--output must end in .png"),
        ("eval --help", 0, "Measure AVQ attention"),
        ("eval scenes --help", 0, "Denoising steps"),
        ("eval scenes --size 100", 2, "--size must be a multiple of 64"),
        ("distill --help", 0, "Distil AVQ codebooks"),
        ("distill --config missing.yaml", 2, "missing.yaml"),
        ("distill.pretrain --help", 0, "Usage"),
        ("distill.vision --help", 0, "Usage"),
    ]
    given = "--num_processes=1 --num_machines=1 --mixed_precision=no --dynamo_backend=no "
    given += "--num_cpu_threads_per_process=1 -m distill"
    settings = launch_command_parser().parse_args(given.split(), Namespace(use_cpu=False))
    _, environment = prepare_simple_launcher_cmd_env(settings)
    assert environment["OMP_NUM_THREADS"] == "1"
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, json.dumps([x.split() for x, _, _ in expected])],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for (command, code, message), (actual, has_one_thread, output) in zip(
        expected, found, strict=True
    ):
        assert actual == code, (command, output)
        assert message in output, command
        # `avq` is not launched; the others lift the limit before they import PyTorch.
        assert command.startswith("avq") or not has_one_thread, command


def test_info_says_what_runs_here(monkeypatch, tmp_path):
    """Catches a package whose absence ends the command, and reasons that dispatch does not give."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0, result.output
    lines = dict(line.split("  ", 1) for line in result.output.splitlines() if "  " in line)
    found = {name.strip(): text.strip() for name, text in lines.items()}
    assert f"torch {version('torch')}" in found["packages"]
    assert found["backend torch"] == "runs"
    if torch.cuda.is_available():
        assert torch.cuda.get_device_name() in found["device"]
    else:
        reason = "query is on cpu, and the kernels need an NVIDIA GPU"
        assert found["backend triton"] == f"cannot run: {reason}"
    assert found["checks"] == f"0 in {tmp_path / 'avq-diffusers' / 'checks'}"
    assert found["routes"].endswith("routes.json, not written yet")
