"""Help and refused options answer at once: without PyTorch and the libraries on top of it."""

import subprocess
import sys
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
