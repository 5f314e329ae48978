"""The documents: the README's example runs, its names are public, links lead somewhere."""

import ast
import re
from pathlib import Path

import pytest
from tiny import tiny_pipe

import avq_diffusers

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
FOLDERS = (".", ".github", "avq_diffusers/mini", "avq_diffusers/guides", "distill")
FOLDERS += ("eval", "eval/results", "eval/results/notes")
DOCUMENTS = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.md")]
# What the example says, and what it becomes for a tiny model on a CPU.
TINY = {
    '"stable-diffusion-v1-5/stable-diffusion-v1-5"': '"model"',
    "torch.float16": "torch.float32",
    '.to("cuda")': "",
    "height=1024, width=1024": "height=256, width=256, num_inference_steps=2",
}


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    """Catches names, arguments and an order of calls that are no longer right."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for shown, tiny in TINY.items():
        assert shown in code
        code = code.replace(shown, tiny)
    monkeypatch.chdir(tmp_path)
    tiny_pipe().save_pretrained("model")
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert re.search(r"AVQ \(torch backend\).* AVQ: [1-9]", capsys.readouterr().out)
    assert not any(hasattr(module, "_avq") for module in names["pipe"].unet.modules())


def test_readme_names_public_names_only():
    """Catches a name of a module that the README presents as one of the package."""
    defined = {
        node.name
        for path in (ROOT / "avq_diffusers").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    code = re.findall(r"```python.*?```|(?<!`)`(?!avq[ .])[^`\n]+`(?!`)", README, re.DOTALL)
    named = defined & set(re.findall(r"\w+\b(?!=)", " ".join(code)))  # and no arguments
    assert {"AVQProcessor", "avq_attention", "apply_avq"} <= named <= set(avq_diffusers.__all__)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    """Catches files that were moved, and headings that were renamed."""
    links = re.findall(r'\]\(([^)\s]+)\)|src="([^"]+)"', document.read_text())
    for link in filter(lambda link: not link.startswith("http"), map("".join, links)):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in map(_anchor, headings), link


def _anchor(heading):
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_readme_is_short():
    assert len(README.splitlines()) <= 100


def test_ci_runs_what_readme_says():
    """`.ci/run` takes the README's first line that names pytest."""
    line = next(line for line in README.splitlines() if "bin/pytest" in line)
    assert line.startswith("python -m venv .venv && ")
    assert line.endswith(" && .venv/bin/pytest -n 2")
