"""The guides: their code runs as it stands, on tiny models, and their commands exist."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from tiny import own_codebooks, tiny_pipe
from tiny_transformers import sd3_pipe
from tiny_vision import tiny_vision

from avq_diffusers.cli.main import app as avq
from distill.__main__ import app as distill
from eval.__main__ import app as evaluate

ROOT = Path(__file__).resolve().parents[1]
GUIDES = sorted((ROOT / "guides").glob("*.md"))
TINY = {"images": tiny_pipe, "evaluation": tiny_pipe, "training": tiny_pipe}
TINY |= {"transformers": sd3_pipe, "vision": lambda: tiny_vision("dinov2")}
# What makes the code of a guide run on a CPU in seconds.
SMALL = {
    r'"(stable-diffusion-v1-5/|stabilityai/|facebook/|avq_diffusers/mini/)\S+"': '"model"',
    r"torch\.b?float16": "torch.float32",
    r'\.to\("cuda"\)': "",
    r', device="cuda"': "",
    r"1036, 1036": "64, 64",
    r"(height|width)=\d+": r"\1=32",
    r', "(a bowl|a street|two cats|two red)[^"]*"': "",
    r"((?:= pipe|calibrate|measure_error)\(.*|apply_avq\(.*prompt=.*)\)(?=$|\.images)": (
        r"\1, num_inference_steps=1)"
    ),
}
PROGRAMS = {"avq": avq, "distill": distill, "eval": evaluate}
COMMAND = re.compile(
    r"(?:^|&& )(?:\S*bin/)?(?:python -m |accelerate launch -m )?(avq|distill|eval) (.*)"
)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guide_is_short_and_runs(guide, tmp_path, monkeypatch):
    """Catches names, arguments and an order of calls that are no longer right."""
    text = guide.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    monkeypatch.chdir(tmp_path)
    if guide.stem in TINY:
        TINY[guide.stem]().save_pretrained("model")
        own_codebooks(tiny_pipe().unet).save_pretrained("runs/mini_own_m64p16c8/codebooks")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    for shown, small in SMALL.items():
        code = re.sub(shown, small, code, flags=re.MULTILINE)
    exec(compile(code, guide.name, "exec"), {})
    assert bool(code) == (guide.stem in TINY)


DOCUMENTS = [ROOT / "README.md", ROOT / "eval/README.md", ROOT / "distill/README.md", *GUIDES]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_accepted(document, monkeypatch):
    """Catches a command, an option, a value or a missing argument; the programs' own checks run."""
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```bash\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)
    for line in "".join(blocks).splitlines():
        if found := COMMAND.search(line):
            words = shlex.split(found[2], comments=True)
            command = typer.main.get_command(PROGRAMS[found[1]])
            while hasattr(command, "commands"):
                command = command.commands[words.pop(0)]
            assert all((ROOT / x).is_file() for x in words if x.startswith("configs/")), line
            command.make_context(line, words)
