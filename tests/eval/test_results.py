"""Results on disk, and the command that writes them."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from typing import Annotated, get_origin, get_type_hints

import pytest
from eval_helpers import failed_command

from avq_diffusers.options import Dilated
from distill import environment
from eval.__main__ import app
from eval.commands import options
from eval.store import report
from eval.store.report import command_line


def test_a_digest_is_of_what_lies_in_the_folder(tmp_path):
    """Catches a digest of the way to it, and one that a file of another name leaves as it was."""
    found = []
    for name, files in {
        "a": {},
        "b": {},
        "c": {"x": "1"},
        "d": {"y": "1"},
        "e": {"unet/x": "1"},
        "f": {"unet/x": "2"},
    }.items():
        for path, text in {"config.json": "{}", **files}.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
        found.append(report.folder_digest(str(tmp_path / name), "config.json"))
    assert found[0] == found[1]
    assert len(set(found)) == 5


def test_the_command_that_is_kept(monkeypatch):
    """Catches arguments that a shell would take apart, and the folder where results went once."""
    for output in (["--output", "a b"], ["--output=a"]):
        monkeypatch.setattr(sys, "argv", ["eval", "x", *output, "--methods", "m 1,exact"])
        assert command_line() == "python -m eval x --methods 'm 1,exact'"


def test_a_result_is_json_with_its_environment(tmp_path, monkeypatch):
    """Infinity and NaN become null at any depth, other numbers stay."""
    monkeypatch.setattr(sys, "argv", ["eval", "x", "--size", "64", "--output", str(tmp_path)])
    path = tmp_path / "new" / "x.json"
    rows = [{"a": float("inf"), "b": (1.5, float("nan")), "c": [-float("inf"), None, 2]}]
    report.save_json(path, device="cpu", rows=rows)
    document = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert document["rows"] == [{"a": None, "b": [1.5, None], "c": [None, None, 2]}]
    assert document["command"] == "python -m eval x --size 64"
    assert document["environment"]["torch"] == version("torch")
    assert {"date", "commit", "device", "python", "diffusers"} <= set(document["environment"])
    assert "CPU" in document["environment"]["device"]
    before = path.read_bytes()
    with pytest.raises(TypeError, match="not JSON serializable"):
        report.save_json(path, device="cpu", rows=[object()])
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["x.json"]


def test_a_result_says_whether_its_commit_is_the_code_that_ran(tmp_path, monkeypatch):
    """Catches changed code that passes for its commit, results that change it, and the commit of
    another repository, around the package or in the environment."""
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    root = tmp_path / "outer" / "avq"
    own = root / "distill" / "environment.py"
    monkeypatch.setattr(environment, "__file__", str(own))
    own.parent.mkdir(parents=True)
    result = root / "distill" / "result.json"
    for path in (own, result):
        path.write_text("1")

    def git(folder, *arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a"]
        subprocess.run(["git", "-C", folder, *identity, *arguments], check=True)

    def commit_all(folder):
        for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
            git(folder, *arguments)

    def commit():
        environment._commit.cache_clear()
        return environment.environment("cpu")["commit"]

    assert commit() == "unknown"
    commit_all(root.parent)
    assert commit() == "unknown"
    git(root, "init", "-q")
    (root / "other.py").write_text("1")
    git(root, "add", "other.py")
    git(root, "commit", "-q", "-m", "another project's")
    assert commit() == "unknown"
    commit_all(root)
    result.write_text("2")
    head = commit()
    assert re.fullmatch("[0-9a-f]{40}", head)
    monkeypatch.setenv("GIT_DIR", str(root.parent / ".git"))
    assert commit() == head
    monkeypatch.delenv("GIT_DIR")
    own.write_text("2")
    changed = commit()
    assert re.fullmatch(rf"{head}\+[0-9a-f]{{8}}", changed)
    assert commit() == changed
    own.write_text("3")
    assert re.fullmatch(rf"{head}\+[0-9a-f]{{8}}", commit())
    assert commit() != changed
    monkeypatch.setenv("GIT_COMMIT", "a copy's")
    assert commit() == "a copy's"
    environment._commit.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "scenes --methods nothing --images 2",
            "methods must be exact, value-projection, tome, limit, linfusion, folders",
        ),
        ("scenes --methods exact,", "expected names between commas, but got 'exact,'"),
        ("bench steps --window nan", "--window must be finite, but got nan"),
        ("bench variants --head-dims 0", "--head-dims must be at least 1, but got 0"),
        (
            "bench variants --dtype float32 --capabilities 80 --head-dims 128",
            "--head-dims 128 must be smaller for --dtype float32 and --capabilities 80: the",
        ),
        (
            "bench attention --config M64C8T1e-4",
            'eval: codewords="stored" needs num_refined in place of a threshold.',
        ),
        ("bench attention --dtype int3", "--dtype must be one of float32, float16, bfloat16"),
        (
            "bench variants --capabilities 90,75",
            "some of 80, 86, 89, 90, 100, 120, but got '75'",
        ),
        ("scenes --levels zero", "--levels must be numbers such as 0 or 0,1, but got 'zero'"),
        ("ablate --variants bse", "--variants must be some of base, learning rate"),
        ("bench kernels --parts table,all", "some of table, sd15, joint, gradients, but got"),
        ("bench steps --models sd15@512 --methods tome@L1", "none out, but got levels (1,)"),
        ("bench steps --models sd3", "models must be some of sd15, sdxl, sd35-medium"),
        ("bench steps --methods xformers", "methods must be exact, "),
        ("bench steps --methods sol@1.3 --models sd15", "but got 'sol@1.3'"),
        ("bench steps --methods M64/stored --models flux", "for steps of a transformer are exact"),
        ("bench steps --runs jit", "--runs must be some of eager, compiled, but got 'jit'"),
        ("bench steps --models flux@100", "sizes must be multiples of 16 from 64 on, but got 100"),
        ("bench steps --models wan@512", "sizes must be 480 or 720 for one block of W"),
        ("bench steps --models flux@big", "a size must be a number, but got 'flux@big'"),
        ("bench attention --device abacus", "--device abacus cannot be used"),
        ("scenes --size 500", "eval: --size must be a multiple of 64, but got 500."),
        ("keys", "eval: there is no runs/vit; --download fetches it."),
        ("keys --sizes 518,14", "eval: --sizes must be at least 64, but got 14."),
        (
            "keys --model none/here",
            "none/here cannot be loaded as a diffusers pipeline or a transformers",
        ),
        ("vision features", "eval: there is no runs/vit; --download fetches it."),
        ("vision features --methods pisa@.5", "methods here are exact, value-projection and"),
        ("vision features --sizes 14", "eval: --sizes must be at least 64, but got 14."),
    ],
)
def test_the_command_ends_mistakes_with_code_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in failed_command(*arguments.split(), "--output", tmp_path / "results")
    assert not (tmp_path / "results").exists()


def commands_of(group):
    for command in group.registered_commands:
        yield command.callback
    for inner in group.registered_groups:
        yield from commands_of(inner.typer_instance)


def test_commands_share_their_options():
    """Catches an option that a command writes again, and a command that nobody can survey."""
    shared = [Dilated, *(x for x in vars(options).values() if get_origin(x) is Annotated)]
    seen = {}
    for command in commands_of(app):
        hints = get_type_hints(command, include_extras=True)
        own = [name for name, hint in hints.items() if name != "return" and hint not in shared]
        assert len(own) <= 8, command.__name__
        seen[command.__name__] = hints
    assert len(seen) == 20
    for option in ("device", "dilated", "model", "steps", "guidance"):
        named = {name for hints in seen.values() for name in hints if name.startswith(option)}
        assert len(named - {"models"}) == 1, named
