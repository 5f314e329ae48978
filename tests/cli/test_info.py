"""`avq info`: ten lines for a bug report."""

from importlib.metadata import version

import torch
from typer.testing import CliRunner

from avq_diffusers.cli.main import app


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
