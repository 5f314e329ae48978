"""Results as JSON files with command, commit, versions and device."""

import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from avq_diffusers.files import atomic_write, sha256

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "triton", "diffusers", "transformers", "tomesd")
RESULTS = Path("runs")  # unless --output says otherwise
PUBLISHED = Path("eval/results")
SCORER = str(Path(__file__).parents[1] / "scorer")  # made by configs/mini_scorer.yaml
PROGRAM = ["python", "-m", "eval"]
GROUPS = ("bench", "coco", "vision")
TABLE_KINDS = ("scenes", "merge", "bench steps")


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


def command_line() -> str:
    """The command line, without the option for the results' folder."""
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--output=")]
    if "--output" in arguments:
        place = arguments.index("--output")
        del arguments[place : place + 2]
    return f"python -m eval {shlex.join(arguments)}"


def save_json(path: Path, *, device: "torch.device | str", **content: Any) -> None:
    """Write `content` with the command line and environment to `path`, atomically.

    JSON has no infinity or NaN, so they become null.
    """
    document = {"command": command_line(), "environment": environment(device), **content}
    text = json.dumps(without_nan(document), indent=2, allow_nan=False) + "\n"
    with atomic_write(path) as temporary:
        temporary.write_text(text)


@dataclass(frozen=True)
class Result:
    """A file from `python -m eval`: `kind` is its command, `"scenes"` or `"bench steps"`."""

    path: Path
    kind: str
    document: Mapping[str, Any]


def read_result(path: Path) -> Result:
    """Read a result.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a result.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    try:
        document = json.loads(path.read_text())
        program, words = document["command"].split()[:3], document["command"].split()[3:]
        kind = " ".join(words[:2]) if words[0] in GROUPS else words[0]
    except (ValueError, LookupError, RecursionError, TypeError, AttributeError):
        program = []
    if program != PROGRAM:
        raise ValueError(f"{path} is not a result from python -m eval.")
    return Result(path, kind, document)


def check_kinds(results: Sequence[Result]) -> None:
    """Refuse results that no table of methods is made of.

    Raises:
        ValueError: one is not of `TABLE_KINDS`.
    """
    for result in results:
        if result.kind not in TABLE_KINDS:
            raise ValueError(
                f"a table is made of results of {', '.join(TABLE_KINDS)}, but {result.path} is one "
                f"of {result.kind}."
            )


@contextmanager
def complete(path: Path) -> Iterator[None]:
    """Name the file in errors about a missing field or a field of the wrong type.

    Raises:
        ValueError: the block hit one.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a complete result ({type(error).__name__}: {error}); make it again."
        ) from error


def folder_digest(source: str, marker: str) -> str | None:
    """Digest of all files in a local folder that has the file `marker`; None for other names."""
    if not (Path(source) / marker).is_file():
        return None
    digest = hashlib.sha256()
    for path in sorted(path for path in Path(source).rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(source)).encode())
        digest.update(bytes.fromhex(sha256(path)))
    return digest.hexdigest()


def without_nan(value: Any) -> Any:
    """JSON values with null in place of infinity and NaN."""
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _commit() -> str:
    """GIT_COMMIT (for copies without history), else HEAD, marked if files differ from it.

    Unknown if this file is not tracked at the root: the package may be inside another repository.
    """
    if commit := os.environ.get("GIT_COMMIT"):
        return commit
    root = Path(__file__).parents[2]
    try:
        _git(root, "ls-files", "--error-unmatch", "--", __file__)
        if Path(_git(root, "rev-parse", "--show-toplevel")) != root.resolve():
            return "unknown"
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if changed else head


def _git(root: Path, *arguments: str) -> str:
    environment = {x: value for x, value in os.environ.items() if not x.startswith("GIT_")}
    command = ["git", "-C", str(root), *arguments]
    completed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return completed.stdout.strip()
