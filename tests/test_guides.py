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
from distill.pretrain.__main__ import app as pretrain
from distill.vision.__main__ import app as vision
from eval.__main__ import app as evaluate
from eval.benchmarks.parallel_costs import costs_table

ROOT = Path(__file__).resolve().parents[1]
GUIDES = sorted((ROOT / "avq_diffusers" / "guides").glob("*.md"))
IN_ONE_PROCESS = [guide for guide in GUIDES if guide.stem != "parallel"]
TINY = {"images": tiny_pipe, "README": tiny_pipe, "transformers": sd3_pipe}
TINY |= {"vision": lambda: tiny_vision("dinov2")}
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
PROGRAMS |= {"distill.pretrain": pretrain, "distill.vision": vision}
START = r"(?:\S*bin/)?(?:(?:python|accelerate launch|torchrun)(?: --nproc-per-node \d)? -m )?"
COMMAND = re.compile(rf"{START}({'|'.join(map(re.escape, PROGRAMS))}) (.*)")


@pytest.mark.parametrize(
    "guide", [*IN_ONE_PROCESS, ROOT / "distill/README.md"], ids=lambda x: x.stem
)
def test_a_guide_is_short_and_runs(guide, tmp_path, monkeypatch):
    """Catches names, arguments and an order of calls that are no longer right."""
    text = guide.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60 or guide not in GUIDES
    monkeypatch.chdir(tmp_path)
    if guide.stem in TINY:
        TINY[guide.stem]().save_pretrained("model")
        own_codebooks(tiny_pipe().unet).save_pretrained("runs/mini_own_m64p16c8/codebooks")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    for shown, small in SMALL.items():
        code = re.sub(shown, small, code, flags=re.MULTILINE)
    exec(compile(code, guide.name, "exec"), {})
    assert bool(code) == (guide.stem in TINY)


def test_the_guide_to_several_processes():
    """Its script runs in the ranks of `test_parallel.py`."""
    text = (ROOT / "avq_diffusers/guides/parallel.md").read_text()
    assert len(text.splitlines()) <= 60
    assert text.endswith(f"\n\n{costs_table()}\n")


DOCUMENTS = [ROOT / x for x in ("README.md", "eval/README.md", "distill/README.md")]
DOCUMENTS += [ROOT / "avq_diffusers/mini/README.md", *GUIDES]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_accepted(document, monkeypatch):
    """Catches a command, an option, a value or a missing argument; the programs' own checks run."""
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```bash\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)
    for line in re.split(r"\n| && ", "".join(blocks)):
        if found := COMMAND.fullmatch(line):
            parse(found[1], found[2])
        else:
            assert not re.search(r"\b(avq|distill|eval)\b(?!/)", line.partition("#")[0]), line


def test_commands_with_mistakes_are_refused():
    """Catches a parser that only knows the names of options."""
    for program, words, message in [
        ("avq", "bench --model mini-sd", "Missing argument 'prompt'"),
        ("avq", "calibrate --model mini-sd", "Missing option '--out'"),
        ("avq", "generate fox --height 100", "--height must be a multiple of 8"),
        ("distill.vision", "train", "Missing option '--config'"),
    ]:
        with pytest.raises((typer.BadParameter, ValueError)) as refused:
            parse(program, words)
        assert message in getattr(refused.value, "format_message", refused.value.__str__)()


def parse(program: str, line: str) -> None:
    """Refuse what the program would refuse before its command's function begins."""
    words = shlex.split(line, comments=True)
    command = typer.main.get_command(PROGRAMS[program])
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    assert all((ROOT / x).is_file() for x in words if x.startswith("configs/")), line
    command.make_context(line, words)
