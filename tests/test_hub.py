"""The kernel for the Hub: it runs without us, and gives what `avq_attention` gives."""

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from random import Random

import pytest
import torch
from problems import draw_problem, solve

from avq_diffusers.extras.hub.build import build

# numpy is what Triton's interpreter needs, and a GPU does not.
RUN = """
import sys
for name in ("avq_diffusers", "diffusers", "numpy"):
    sys.modules[name] = None
import torch
from importlib import import_module, util
from pathlib import Path

def from_file():
    path = folder / "build" / "torch-cuda" / "__init__.py"
    spec = util.spec_from_file_location("_any_name", path)
    kernel = sys.modules["_any_name"] = util.module_from_spec(spec)
    spec.loader.exec_module(kernel)
    return kernel

def by_kernels():
    import kernels
    return kernels.get_local_kernel(folder)

def results(kernel):
    root = Path(kernel.__file__).parent
    for path in root.rglob("*/*.py"):
        import_module(".".join([kernel.__name__, *path.relative_to(root).with_suffix("").parts]))
    for tokens, codebook, options in torch.load(folder / "problems.pt"):
        tokens = {name: x.requires_grad_() for name, x in tokens.items()}
        if codebook is not None:
            options["codebook"] = kernel.Codebook(*codebook)
        output = kernel.avq_attention(**tokens, **options, backend=backend)
        yield [output, *torch.autograd.grad(output.sum(), tokens.values())]

backend, folder = sys.argv[1], Path(sys.argv[2])
loaders = [from_file, *([by_kernels] if util.find_spec("kernels") else [])]
torch.set_num_threads(1)
torch.save([list(results(load())) for load in loaders], folder / "found.pt")
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    build(folder, "ours/avq-attention")
    return folder


def test_it_imports_nothing_but_torch_and_triton(repository):
    """Catches a dependency of a module that loads late, and a name of ours that is left."""
    paths = list(repository.rglob("build/*/**/*.py"))
    assert len(paths) > 60
    for path in paths:
        text = path.read_text()
        assert "avq_diffusers" not in text, path
        for node in ast.walk(ast.parse(text)):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            roots = {name.split(".")[0] for name in names}
            assert roots <= {"torch", "triton", *sys.stdlib_module_names}, path


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
def test_it_gives_what_the_library_gives(repository, backend):
    """From a file and, where it is installed, by `kernels`. Catches an import, an operator or a
    module that is lost on the way."""
    device = "cuda" if backend == "triton" else "cpu"
    fixed = {"queries": 100, "keys": 100, "head_dim": 64, "num_parents": 12, "num_children": 4}
    fixed |= {"num_refined": 3, "threshold": None, "codewords": "means", "dtype": torch.float32}
    fixed |= {"device": device, "backend": backend}
    problems = [draw_problem(Random(3), has_codebook=x, **fixed) for x in (False, True)]
    parts = [
        (x.tokens, x.codebook and (x.codebook.parents, x.codebook.children), x.options)
        for x in problems
    ]
    torch.save(parts, repository / "problems.pt")
    command = [sys.executable, "-W", "ignore", "-c", RUN, backend, str(repository)]
    subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    by_loader = torch.load(repository / "found.pt")
    assert len(by_loader) == 1 + (find_spec("kernels") is not None)
    for problem, *found in zip(problems, *by_loader, strict=True):
        assert 0 < solve(problem, backend).error <= 1
        tokens = {name: x.requires_grad_() for name, x in problem.tokens.items()}
        output = problem.attend(backend, **tokens)
        expected = [output, *torch.autograd.grad(output.sum(), tokens.values())]
        assert all(torch.equal(*pair) for one in found for pair in zip(one, expected, strict=True))
