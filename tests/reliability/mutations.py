"""Small faults in a copy of the sources, and whether the tests nearest to them fail.

    python tests/reliability/mutations.py --seed 0 --number 40 --seconds 600

The seed draws the places among all comparisons, terms, numbers, axes and guards. A fault counts as
caught if a test fails that passes without it.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MUTATED = ("avq_diffusers/attention", "avq_diffusers/hosts", "distill/objective.py")
MUTATED += ("distill/quantizer.py",)
LEFT_OUT = {"annotation", "returns", "decorator_list"}
# Tests of what a path begins with.
NEAREST = {
    "avq_diffusers/attention": ("attention",),
    "avq_diffusers/hosts": ("hosts", "extras"),
    "distill": ("distill/test_distill_objective.py",),
}
SWAPPED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
SWAPPED |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}


class Mutation(NamedTuple):
    """What stands in place of some bytes of a file."""

    path: str
    line: int
    start: int
    stop: int
    fault: str
    text: str


def mutations_of(path: str) -> Iterator[Mutation]:
    """All that a file has a place for."""
    source = (ROOT / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def text(node: ast.AST) -> str:
        start, stop = place(node)
        return source[start:stop].decode()

    def place(node: ast.AST) -> tuple[int, int]:
        start = starts[node.lineno - 1] + node.col_offset
        return start, starts[node.end_lineno - 1] + node.end_col_offset

    for node in executed(ast.parse(source)):
        for fault, changed, replacement in faults(node, text):
            yield Mutation(path, changed.lineno, *place(changed), fault, replacement)


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of docstrings, types and errors' messages."""
    yield tree
    for name, value in ast.iter_fields(tree):
        if name in LEFT_OUT or isinstance(tree, ast.Raise):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                yield from executed(node)


def faults(node: ast.AST, text) -> Iterator[tuple[str, ast.AST, str]]:
    """Kinds of faults of one node: what is replaced, by what."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield "comparison", node, f"{text(left)} {SWAPPED[type(op)]} {text(right)}"
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
            yield "term", node, f"({text(left)})"
        case ast.Subscript(slice=ast.Slice() as cut):
            for end in filter(None, (cut.lower, cut.upper)):
                yield "off by one", end, f"{text(end)} + 1"
        case ast.Call(func=ast.Name(id="range"), args=[*_, last]):
            yield "off by one", last, f"{text(last)} - 1"
        case ast.keyword(arg="dim", value=ast.UnaryOp(operand=ast.Constant(value=1)) as axis):
            yield "axis", axis, "-2"
        case ast.Call(func=ast.Attribute(attr="sum" | "mean" | "amax" | "argmin"), args=[axis]):
            if text(axis) in ("-1", "-2", "1", "2"):
                yield "axis", axis, str(int(text(axis)) - 1)
        case ast.If(test=test, body=[ast.Raise() | ast.Return() | ast.Continue()]):
            yield "guard", test, "False"
        case ast.BoolOp(values=[first, *_]):
            yield "condition", node, f"({text(first)})"


def nearest(path: str) -> tuple[str, ...]:
    return next(tests for start, tests in NEAREST.items() if path.startswith(start))


def run(copy: Path, tests: Sequence[str], seconds: int) -> tuple[str, list[str]]:
    """How the tests end, and the first that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return "out of time", []
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return ("survived" if done.returncode == 0 else "caught"), failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("seed", 0), ("number", 40), ("seconds", 600)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    paths = [path for x in MUTATED for path in [ROOT / x, *sorted((ROOT / x).rglob("*.py"))]]
    names = [str(path.relative_to(ROOT)) for path in paths if path.suffix == ".py"]
    places = [mutation for name in names for mutation in mutations_of(name)]
    outcomes: Counter[str] = Counter()
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"))
        for mutation in Random(given.seed).sample(places, given.number):
            path = copy / mutation.path
            whole = path.read_bytes()
            was = whole[mutation.start : mutation.stop]
            start, end = whole[: mutation.start], whole[mutation.stop :]
            path.write_bytes(start + mutation.text.encode() + end)
            tests = [f"tests/{name}" for name in nearest(mutation.path)]
            outcome, failed = run(copy, tests, given.seconds)
            path.write_bytes(whole)
            if outcome == "caught" and run(copy, failed or tests, given.seconds)[0] != "survived":
                outcome = "failed without it, too"
            outcomes[outcome] += 1
            place = f"{mutation.fault}, {mutation.path}:{mutation.line}"
            print(f"{outcome}: {place}: {was.decode()!r} -> {mutation.text!r} {failed}")
            print(dict(outcomes), flush=True)


if __name__ == "__main__":
    main()
