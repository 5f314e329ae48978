"""The documents: README's example runs, links lead somewhere, and README stays short."""

import re
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_pipe

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [
    path.relative_to(ROOT)
    for folder in (".", "eval", "eval/results", "distill", "avq_diffusers/mini", ".github")
    for path in (ROOT / folder).glob("*.md")
]
# What the example says, and what it becomes for a tiny model on a CPU.
TINY = {
    '"stable-diffusion-v1-5/stable-diffusion-v1-5"': '"model"',
    "torch.float16": "torch.float32",
    '.to("cuda")': "",
    "M64P16C8": "M4P2C2",
    "height=1024, width=1024": "height=256, width=256, num_inference_steps=2",
    "(pipe, 1024, 1024)": "(pipe, 256, 256)",
    "set_num_refined(pipe, 8)": "set_num_refined(pipe, 1)",
}


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    """Catches names, arguments and an order of calls that are no longer right."""
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    for shown, tiny in TINY.items():
        assert shown in code
        code = code.replace(shown, tiny)
    monkeypatch.chdir(tmp_path)
    tiny_pipe().save_pretrained("model")
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert Path("my-codebooks/config.json").is_file()
    assert not np.array_equal(names["image"], names["exact"])
    assert "AVQ (torch backend)" in capsys.readouterr().out
    assert not any(hasattr(module, "_avq") for module in names["pipe"].unet.modules())


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document):
    """Catches files that were moved, and headings that were renamed."""
    text = (ROOT / document).read_text()
    links = re.findall(r'\]\(([^)\s]+)\)|src="([^"]+)"', text)
    for link in filter(lambda link: not link.startswith("http"), map("".join, links)):
        path, _, anchor = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in map(_anchor, headings), link


def test_readme_is_short():
    assert len(README.read_text().splitlines()) < 150


def test_ci_runs_what_readme_says():
    """`.ci/run` takes README's first line that names pytest."""
    first, *_ = (line for line in README.read_text().splitlines() if "bin/pytest" in line)
    assert first.startswith("python -m venv .venv && ")
    assert first.endswith(" && .venv/bin/pytest -n 2")


def _anchor(heading):
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
