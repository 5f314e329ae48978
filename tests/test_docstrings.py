"""Docstrings make the API pages: they name arguments, exceptions and nothing that is gone."""

import ast
import builtins
import importlib
import inspect
import keyword
import re
import textwrap
from pathlib import Path

import avq_diffusers

ROOT = Path(avq_diffusers.__file__).parent
# What `.ci/run` builds pages of, beside the public names; the rest of `attention` is its backends.
PACKAGES = ("codebook", "attention", "extras")
BACKENDS = {"autograd", "flops", "guarded", "operators", "own_codewords", "packing", "schema"}
BACKENDS |= {"self_check", "settled", "torch_backward", "torch_forward", "triton"}
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
        if parts[-1] == "__init__" or (BACKENDS | {"repository"}) & {*parts}:
            continue
        module = importlib.import_module(".".join(("avq_diffusers", *parts)))
        for name, value in vars(module).items():
            ours = getattr(value, "__module__", None) == module.__name__
            if ours and not name.startswith("_") and callable(value):
                found[".".join((*parts, name))] = value
    return found


def test_functions_and_classes_say_what_they_take_and_raise():
    """Catches an argument or an exception that was added and not written down."""
    found = _documented()
    assert {"avq_attention", "codebook.ema.ema_update", "AVQCodebooks"} <= {*found}
    lacking = {}
    for name, value in found.items():
        members = {"": value}
        if inspect.isclass(value):
            assert value.__doc__ not in (None, "", value.__bases__[0].__doc__), name
            members = {key: x for key, x in vars(value).items() if not key.startswith("_")}
        for key, member in members.items():
            function = inspect.unwrap(getattr(member, "fget", getattr(member, "__func__", member)))
            if inspect.isfunction(function):
                doc = inspect.getdoc(getattr(value, key) if key else value) or ""
                arguments = [] if key else undocumented_arguments(function, doc)
                missing = {*arguments, *undocumented_errors(function, doc)} if doc else {"all"}
                lacking |= {f"{name}.{key}": missing} if missing else {}
    assert not lacking


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
