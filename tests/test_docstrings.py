"""The API pages are made of docstrings: every public name has one that says what it takes."""

import ast
import inspect
import textwrap

import pytest

import avq_diffusers

FUNCTIONS = sorted(
    name for name in avq_diffusers.__all__ if inspect.isfunction(getattr(avq_diffusers, name))
)
CLASSES = sorted(set(avq_diffusers.__all__) - set(FUNCTIONS))


def test_every_public_name_is_a_function_or_a_class():
    assert all(inspect.isclass(getattr(avq_diffusers, name)) for name in CLASSES)
    assert "avq_attention" in FUNCTIONS
    assert "AVQCodebooks" in CLASSES


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_say_what_they_take_and_raise(name):
    """Catches an argument or an exception that was added and not written down."""
    function = inspect.unwrap(getattr(avq_diffusers, name))
    doc = inspect.getdoc(function)
    assert not undocumented_arguments(function, doc)
    assert not undocumented_errors(function, doc)


@pytest.mark.parametrize("name", CLASSES)
def test_classes_say_what_they_take_and_raise(name):
    kind = getattr(avq_diffusers, name)
    assert kind.__doc__
    assert kind.__doc__ != kind.__bases__[0].__doc__
    for member, value in vars(kind).items():
        method = getattr(kind, member)
        if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
            doc = inspect.getdoc(method)
            assert doc, f"{name}.{member}"
            assert not undocumented_errors(inspect.unwrap(getattr(method, "fget", method)), doc)


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
