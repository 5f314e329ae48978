"""The kernel for the Hub: it runs without us, and gives what `avq_attention` gives."""

import ast
import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random

import pytest
import torch
from problems import draw_problem, solve

from avq_diffusers.extras.hub.build import build


def from_file(repository):
    spec = spec_from_file_location("_any_name", repository / "build/torch-cuda/__init__.py")
    kernel = sys.modules["_any_name"] = module_from_spec(spec)
    spec.loader.exec_module(kernel)
    return kernel


def by_kernels(repository):
    return import_module("kernels").get_local_kernel(repository)


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
        assert ".numpy()" not in text, path
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
    loaders = [from_file, *([by_kernels] if find_spec("kernels") else [])]
    kernels = [load(repository) for load in loaders]
    for kernel in kernels:
        root = Path(kernel.__file__).parent
        for path in root.rglob("*/*.py"):
            import_module(
                ".".join([kernel.__name__, *path.relative_to(root).with_suffix("").parts])
            )
    fixed = {"queries": 100, "keys": 100, "head_dim": 64, "num_parents": 12, "num_children": 4}
    fixed |= {"num_refined": 3, "threshold": None, "codewords": "means", "dtype": torch.float32}
    fixed |= {"device": "cuda" if backend == "triton" else "cpu", "backend": backend}

    def results(attend, tokens):
        tokens = {name: x.requires_grad_() for name, x in tokens.items()}
        output = attend(**tokens)
        return [output, *torch.autograd.grad(output.sum(), tokens.values())]

    for problem in (draw_problem(Random(3), has_codebook=x, **fixed) for x in (False, True)):
        assert 0 < solve(problem, backend).error <= 1
        expected = results(partial(problem.attend, backend), problem.tokens)
        for kernel in kernels:
            options = {**problem.options, "backend": backend}
            if (codebook := problem.codebook) is not None:
                options["codebook"] = kernel.Codebook(codebook.parents, codebook.children)
            found = results(partial(kernel.avq_attention, **options), problem.tokens)
            assert all(map(torch.equal, found, expected))
