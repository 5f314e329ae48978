"""What a user's installation consists of, and the tools of a contributor."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "avq_diffusers"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the sources, without what the weights hold."""
    clone = tmp_path_factory.mktemp("clone")

    def copy(source, target):
        Path(target).touch() if source.endswith(".safetensors") else shutil.copy(source, target)

    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, clone)
    for package in ("avq_diffusers", "distill", "eval", "tests"):
        ignored = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(ROOT / package, clone / package, ignore=ignored, copy_function=copy)
    return clone


@pytest.fixture(scope="module")
def wheel(clone):
    """The names of the files in the wheel."""
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    (path,) = clone.glob("dist/*.whl")
    return zipfile.ZipFile(path).namelist()


def test_the_wheel_holds_one_package(wheel):
    """`distill` and `eval` must not land in a user's site-packages."""
    top = {name.split("/")[0] for name in wheel if ".dist-info/" not in name}
    assert top == {"avq_diffusers"}


def test_the_wheel_holds_the_whole_package(wheel):
    """Catches package data that the sources read and the wheel lacks."""
    files = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"
    }
    names = "__init__.pyi", "py.typed", "mini/mini-sd/model_index.json"
    assert {f"avq_diffusers/{name}" for name in names} <= files
    assert files <= set(wheel)
    assert "avq_diffusers/guides/glossary.md" in wheel


def test_type_checkers_follow_an_editable_installation(clone):
    """Catches setuptools' import hook, which they do not run."""
    build = "from setuptools import build_meta; build_meta.build_editable('editable')"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    (path,) = clone.glob("editable/*.whl")
    with zipfile.ZipFile(path) as archive:
        (paths,) = [name for name in archive.namelist() if name.endswith(".pth")]
        assert archive.read(paths).decode().strip() == str(clone)


def test_pre_commit_runs_the_linter_of_ci():
    """Catches an update of `constraints.txt` alone."""
    (pinned,) = re.findall(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"rev: v{pinned}\n" in (ROOT / ".pre-commit-config.yaml").read_text()
