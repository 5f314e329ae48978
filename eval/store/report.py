"""Results as JSON files with command, commit, versions and device."""

import hashlib
import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from avq_diffusers.files import sha256, write_text
from distill.environment import environment

if TYPE_CHECKING:
    import torch

RESULTS = Path("runs")  # unless --output says otherwise
PUBLISHED = Path("eval/results")
SCORER = str(Path(__file__).parents[1] / "scorer")  # made by configs/mini_scorer.yaml
PROGRAM = "python -m eval"


def command_line() -> str:
    """The command line, without the option for the results' folder."""
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--output=")]
    if "--output" in arguments:
        index = arguments.index("--output")
        del arguments[index : index + 2]
    return f"{PROGRAM} {shlex.join(arguments)}"


def save_json(path: Path, *, device: "torch.device | str", **content: Any) -> None:
    """Write `content` with the command line and environment to `path`, atomically.

    JSON has no infinity or NaN, so they become null.
    """
    document = {"command": command_line(), "environment": environment(device), **content}
    write_text(path, json.dumps(without_nan(document), indent=2, allow_nan=False) + "\n")


def publish(
    path: Path, table: str, *, device: "torch.device | str" = "cpu", **content: Any
) -> None:
    """Print a result's table, then write the result."""
    print(table)
    save_json(path, device=device, **content)


def read_result(path: Path, command: str = "") -> Mapping[str, Any]:
    """Read a result of a command; without one, of any.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a result, or of another command.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    try:
        document = json.loads(path.read_text())
        is_result = document["command"].startswith(f"{PROGRAM} {command}")
    except (ValueError, LookupError, RecursionError, TypeError, AttributeError):
        is_result = False
    if not is_result:
        raise ValueError(f"{path} is not a result from {f'{PROGRAM} {command}'.strip()}.")
    return document


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
