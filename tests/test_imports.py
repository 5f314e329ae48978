"""Who may import whom (design, section 4), and that importing changes nothing."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("avq_diffusers", "distill", "eval")

# From the bottom up; a module imports only from modules that stand before its own line.
LAYERS = (
    ("config", "timesteps", "files", "tensors", "runs"),
    ("unets", "query_order", "codebook"),
    ("reference", "fallback", "kernels", "ema", "validation"),
    ("reverse",),
    ("ops",),
    ("diagnostics",),
    ("routing",),
    ("weights",),
    ("processor", "linfusion"),
    ("pipeline",),
    ("calibrate", "scalecrafter", "inspection", "sheet", "comparison"),
    ("elastic", "sensitivity", "mini"),
    ("app", "sweep", "options"),
    ("loading",),
    ("cli",),
)
BACKENDS = ("reference", "fallback", "kernels")
KNOW_DIFFUSERS = {"weights", "processor", "linfusion", "pipeline", "calibrate", "scalecrafter"}
KNOW_DIFFUSERS |= {"unets", "runs", "elastic", "sensitivity", "loading", "cli"}
SHARED = {f"avq_diffusers.{name}" for name in ("files", "mini", "options", "runs")}
HEAVY = {"triton", "torchvision", "matplotlib", "torchmetrics", "open_clip", "tensorboard", "yaml"}


def sources(package):
    return sorted((ROOT / package).rglob("*.py"))


def imports(path):
    """(dotted module, imported name or None, at top level) of every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top_level = set(ast.walk(ast.Module(tree.body, []))) - {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None, node in top_level
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                yield node.module, alias.name, node in top_level


def unit(module, name):
    """The unit."""
    parts = [*module.split("."), *([name] if module == "avq_diffusers" else [])]
    if parts[0] != "avq_diffusers" or len(parts) == 1:
        return None
    return parts[1]


def module_name(path):
    """The unit a file of avq_diffusers belongs to."""
    return path.relative_to(ROOT / "avq_diffusers").parts[0].removesuffix(".py")


def library_edges():
    for path in sources("avq_diffusers"):
        importer = module_name(path)
        if importer == "__init__":
            continue
        for module, name, _ in imports(path):
            imported = unit(module, name)
            if imported is not None and imported != importer:
                yield path, importer, imported


def rank(name):
    ranks = [index for index, names in enumerate(LAYERS) if name in names]
    assert ranks, f"avq_diffusers.{name} has no place in LAYERS"
    return ranks[0]


def test_imports_go_down_only():
    """Catches a kernel that knows the plugin, or a cycle in the making."""
    edges = list(library_edges())
    assert ("processor", "ops") in {edge[1:] for edge in edges}  # the scan finds imports at all
    for path, importer, imported in edges:
        assert rank(imported) < rank(importer), f"{path} imports avq_diffusers.{imported}"


def test_backends_do_not_import_each_other():
    """Catches an oracle that shares code with what it judges."""
    for path, importer, imported in library_edges():
        assert not (importer in BACKENDS and imported in BACKENDS), f"{path} imports {imported}"


def test_only_the_plugin_knows_diffusers():
    """Catches mathematics that can no longer be used, or tested, without diffusers."""
    users = set()
    for path in sources("avq_diffusers"):
        if any(m.split(".")[0] in ("diffusers", "transformers") for m, _, _ in imports(path)):
            users.add(module_name(path))
    assert {"weights", "processor", "pipeline"} <= users
    assert users <= KNOW_DIFFUSERS | {"__init__"}


@pytest.mark.parametrize("package", ["distill", "eval"])
def test_programs_use_public_names_only(package):
    """Catches a program that reaches into the library, or into the other program."""
    import avq_diffusers

    other = {"distill": "eval", "eval": "distill"}[package]
    for path in sources(package):
        for module, name, _ in imports(path):
            assert module.split(".")[0] != other, f"{path} imports {module}"
            if module.split(".")[0] != "avq_diffusers":
                continue
            if module == "avq_diffusers":
                assert name in {*avq_diffusers.__all__, "mini"}, f"{path} imports {name}"
            elif not (package == "eval" and module == "avq_diffusers.attention.triton"):
                assert module in SHARED, f"{path} imports {module}"


def test_optional_packages_are_imported_where_they_are_used():
    """Catches an extra that everyone needs: those imports belong inside functions."""
    for path in sources("avq_diffusers"):
        if module_name(path) == "kernels":  # imported only where Triton runs
            continue
        for module, _, top_level in imports(path):
            assert not (top_level and module.split(".")[0] in HEAVY), f"{path} imports {module}"


FRESH_IMPORT = """
import socket, sys, warnings
for name in ("triton", "torchvision", "matplotlib"):
    sys.modules[name] = None

import torch, torch._dynamo
from diffusers import StableDiffusionPipeline  # transformers says here that it lacks torchvision

def refuse(*args, **kwargs):
    raise RuntimeError("the import opened a connection")

def flags():
    return (
        torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(), torch.initial_seed(),
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch._dynamo.config.get_config_copy(), list(warnings.filters), list(sys.path),
    )

def mark():
    for stream in (sys.stdout, sys.stderr):
        print("-----", file=stream, flush=True)

socket.socket.connect = refuse
before = flags()
mark()
import avq_diffusers
for name in avq_diffusers.__all__:
    getattr(avq_diffusers, name)
mark()
assert flags() == before
assert not torch.cuda.is_initialized()
"""


def test_importing_changes_nothing():
    """Catches prints, downloads, global flags, CUDA contexts and hard needs for extras."""
    result = subprocess.run(
        [sys.executable, "-c", FRESH_IMPORT],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    for stream in (result.stdout, result.stderr):
        assert stream.split("-----")[1].strip() == ""


def test_public_names_exist():
    """Catches a name that is exported and misspelt, or defined and forgotten."""
    import avq_diffusers

    assert sorted(avq_diffusers.__all__) == sorted(set(avq_diffusers.__all__))
    for name in avq_diffusers.__all__:
        assert hasattr(avq_diffusers, name)
