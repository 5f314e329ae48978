"""Where a result was measured: commit, versions and device."""

import hashlib
import os
import platform
import subprocess
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "triton", "diffusers", "transformers", "tomesd")


def environment(device: "torch.device | str") -> dict[str, Any]:
    """Commit, versions and device of the running process."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    else:
        device_name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": _commit(),
        "device": device_name,
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES if find_spec(name) is not None},
    }


@cache
def _commit() -> str:
    """GIT_COMMIT (for copies without history), else HEAD, with a digest of changes to it.

    Unknown if this file is not tracked at the root: the package may be inside another repository.
    """
    if commit := os.environ.get("GIT_COMMIT"):
        return commit
    root = Path(__file__).parents[1]
    try:
        _git(root, "ls-files", "--error-unmatch", "--", __file__)
        if Path(_git(root, "rev-parse", "--show-toplevel")) != root.resolve():
            return "unknown"
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "diff", "HEAD", "--", "*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    digest = hashlib.sha256(changed.encode()).hexdigest()
    return f"{head}+{digest[:8]}" if changed else head


def _git(root: Path, *arguments: str) -> str:
    environment = {x: value for x, value in os.environ.items() if not x.startswith("GIT_")}
    command = ["git", "-C", str(root), *arguments]
    completed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return completed.stdout.strip()
