"""Build the AVQ attention repository for the kernels Hub.

`python -m avq_diffusers.extras.hub.build FOLDER ORG/avq-attention` writes the sources for the Hub's
kernel-builder, and to `build` what `kernels.get_local_kernel` loads: the files beside this one, and
the operation's modules with relative imports and with operators in the build's own namespace.
"""

import json
import re
import shutil
import sys
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from string import Template
from typing import Any

from avq_diffusers.attention.limits import LIMITS, MATRIX_INSTRUCTIONS, VERIFIED

OWN = Path(__file__).parent / "repository"
LIBRARY = Path(__file__).parents[2]
CODEBOOK = ("codebook/__init__.py", "codebook/assignment.py", "codebook/codebook.py")
MODULES = ("config.py", *CODEBOOK, "attention/**/*.py")
UNUSED = ("attention/diagnostics.py",)
GENERAL: dict[str, Any] = {"name": "avq-attention", "version": 1, "license": "Apache-2.0"}
BACKENDS = ("cpu", "cuda")
OPS = '''"""The namespace of this build's operators."""


def add_op_namespace_prefix(name: str) -> str:
    return f"{id}::{{name}}"
'''


def build(folder: Path, repo_id: str) -> None:
    """Write the repository.

    Args:
        folder: new or empty.
        repo_id: the repository's Hub id.
    """
    backends = json.dumps(BACKENDS)
    values = {**GENERAL, "backends": backends, "repo_id": repo_id, "limits": limits()}
    for path in (x for x in OWN.rglob("*.*") if x.suffix != ".pyc"):
        target = folder / path.relative_to(OWN)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(path.read_text()).substitute(values))
    shutil.copy(LIBRARY.parent / "LICENSE", folder)
    module = GENERAL["name"].replace("-", "_")
    package = folder / "torch-ext" / module
    for path in sorted({x for pattern in MODULES for x in LIBRARY.glob(pattern)}):
        name = path.relative_to(LIBRARY)
        if name.as_posix() not in UNUSED:
            (package / name).parent.mkdir(exist_ok=True)
            (package / name).write_text(_exported(path))
    content = "".join(path.read_text() for path in sorted(package.rglob("*.py")))
    for backend in BACKENDS:
        identity = f"_{module}_{backend}_{sha256(content.encode()).hexdigest()[:7]}"
        variant = folder / "build" / f"torch-{backend}"
        shutil.copytree(package, variant)
        (variant / "_ops.py").write_text(OPS.format(id=identity))
        _write_metadata(variant, backend, identity)


def _exported(path: Path) -> str:
    """A library module, rewritten as a module of the kernel."""
    text, root = path.read_text(), "." * len(path.relative_to(LIBRARY).parts)
    text, num_operators = re.subn(r'"avq_diffusers::(\w+)"', r'add_op_namespace_prefix("\1")', text)
    if num_operators:
        ops = f"from {root}_ops import add_op_namespace_prefix\n"
        text = text.replace("from avq_diffusers.", f"{ops}from avq_diffusers.", 1)
    return text.replace("from avq_diffusers.", f"from {root}")


def limits() -> str:
    """What the kernels need, for the README and the card."""
    of = {name: limit.value for name, limit in LIMITS["triton"].items()}
    (vendor,), (major, minor), head_dims = of["vendor"], of["capability"], of["head dim"]
    *dtypes, last_dtype = (str(dtype).removeprefix("torch.") for dtype in of["dtype"])
    wide = " or ".join(str(x) for x, kind in MATRIX_INSTRUCTIONS.items() if kind == "wgmma")
    verified = " and ".join(f"{card} (Triton {triton})" for card, triton in VERIFIED.items())
    return (
        f"Triton kernels need an {vendor.upper()} GPU of compute capability {major}.{minor} or "
        f"higher, {', '.join(dtypes)} or {last_dtype}, head dims that are multiples of "
        f"{head_dims.step} up to {head_dims[-1]} (float32: {of['head dim of float32']}, and "
        f"{head_dims[-1]} on capability {wide}), query tiles of up to {of['query tile']}, and at "
        f"most {of['parents if tiles choose']} parents (flat: {of['parents']}) with "
        f"{of['children']} children. They are verified on {verified}"
    )


def _write_metadata(variant: Path, backend: str, identity: str) -> None:
    """Write what `kernels` reads before it loads a build."""
    digests = {
        path.relative_to(variant).as_posix(): b64encode(sha256(path.read_bytes()).digest()).decode()
        for path in sorted(variant.rglob("*.py"))
    }
    metadata = {
        **GENERAL,
        "id": identity,
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2])
