"""Docstrings make the API pages: they name arguments, exceptions and nothing that is gone."""

import ast
import builtins
import importlib
import inspect
import keyword
import re
import textwrap
from pathlib import Path

import pytest

import avq_diffusers

ROOT = Path(avq_diffusers.__file__).parent
# What `.ci/run` builds pages of, beside the public names; the rest of `attention` is its backends.
PACKAGES = ("codebook", "attention", "extras")
BACKENDS = {"own_codewords", "torch_backward", "torch_forward", "triton"}
# Names of PyTorch, diffusers and the Hub.
FOREIGN = {
    "cache_dir",
    "callback_on_step_end",
    "force_download",
    "from_pipe",
    "local_files_only",
    "push_to_hub",
    "revision",
}


def _documented() -> dict[str, object]:
    """The functions and classes of the API pages."""
    found = {name: getattr(avq_diffusers, name) for name in avq_diffusers.__all__}
    for path in sorted(path for x in PACKAGES for path in (ROOT / x).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__" or BACKENDS & {*parts}:
            continue
        module = importlib.import_module(".".join(("avq_diffusers", *parts)))
        for name, value in vars(module).items():
            ours = getattr(value, "__module__", None) == module.__name__
            if ours and not name.startswith("_") and callable(value):
                found[".".join((*parts, name))] = value
    return found


DOCUMENTED = _documented()
FUNCTIONS = [name for name, value in DOCUMENTED.items() if not inspect.isclass(value)]
CLASSES = [name for name, value in DOCUMENTED.items() if inspect.isclass(value)]


def test_public_names_and_packages_are_documented():
    assert {"avq_attention", "codebook.ema.ema_update", "attention.reference.select"} <= {
        *FUNCTIONS
    }
    assert {"AVQCodebooks", "codebook.codebook.Codebook"} <= {*CLASSES}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_say_what_they_take_and_raise(name):
    """Catches an argument or an exception that was added and not written down."""
    function = inspect.unwrap(DOCUMENTED[name])
    doc = inspect.getdoc(function) or ""
    assert not undocumented_arguments(function, doc)
    assert not undocumented_errors(function, doc)


@pytest.mark.parametrize("name", CLASSES)
def test_classes_say_what_they_take_and_raise(name):
    kind = DOCUMENTED[name]
    assert kind.__doc__
    assert kind.__doc__ != kind.__bases__[0].__doc__
    for member, value in vars(kind).items():
        method = inspect.unwrap(getattr(value, "fget", getattr(value, "__func__", value)))
        if not member.startswith("_") and inspect.isfunction(method):
            doc = inspect.getdoc(getattr(kind, member))
            assert doc, f"{name}.{member}"
            assert not undocumented_errors(method, doc)


def undocumented_arguments(function, doc: str) -> list[str]:
    words = {word.strip("`*.,:;()") for word in doc.split()}
    return [name for name in inspect.signature(function).parameters if name not in words]


def undocumented_errors(function, doc: str) -> set[str]:
    """The exceptions that the function's own body raises and its docstring does not name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        if (name := ast.unparse(node.exc.func)) not in doc
    }


def test_what_is_not_written_down_is_found():
    """The control."""

    def function(given, *, other):
        raise KeyError(given)

    doc = "Take what is `given`."
    assert undocumented_arguments(function, doc) == ["other"]
    assert undocumented_errors(function, doc) == {"KeyError"}


def test_docstrings_refer_to_what_exists():
    """Catches a name in backticks that was renamed or removed."""
    known = {*dir(builtins), *keyword.kwlist, *FOREIGN}
    docstrings = []
    for path in ROOT.rglob("*.py"):
        known |= {path.stem, path.parent.name}
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    known.add(name)
                case ast.alias(name=name):
                    known |= {*name.split(".")}
                case ast.keyword(arg=name):
                    known.add(name)
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                known.add(node.name)
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                where = f"{path.name}: {getattr(node, 'name', 'module')}"
                docstrings.append((where, ast.get_docstring(node) or ""))
    broken = [
        (where, name)
        for where, doc in docstrings
        for name in re.findall(r"(?<!`)`([a-z_]\w*|[A-Z][a-z]\w*|AVQ\w+)(?:\(\))?`(?!`)", doc)
        if name not in known
    ]
    assert not broken
