"""README and guides: their code runs, their commands exist, links lead somewhere."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import typer
from tiny import own_codebooks, tiny_pipe
from tiny_transformers import sd3_pipe
from tiny_vision import tiny_vision

import avq_diffusers
from avq_diffusers.cli.main import app as avq
from avq_diffusers.extras.hub.build import limits
from distill.__main__ import app as distill
from distill.pretrain.__main__ import app as pretrain
from distill.vision.__main__ import app as vision
from eval.__main__ import app as evaluate

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
FOLDERS = (".", ".github", "avq_diffusers/mini", "avq_diffusers/guides", "distill")
FOLDERS += ("eval", "eval/results", "eval/results/notes")
DOCUMENTS = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.md")]
# What the example says, and what it becomes for a tiny model on a CPU.
EXAMPLE = {
    '"stable-diffusion-v1-5/stable-diffusion-v1-5"': '"model"',
    "torch.float16": "torch.float32",
    '.to("cuda")': "",
    "height=1024, width=1024": "height=256, width=256, num_inference_steps=2",
}


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    """Catches names, arguments and an order of calls that are no longer right."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for shown, tiny in EXAMPLE.items():
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
    words = re.findall(r"(?<!--)\b\w+\b(?!=)", " ".join(code))  # no options, no arguments
    named = defined & set(words)
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


def test_readme_states_the_limits_of_the_kernels():
    """Those that dispatch reads: catches a limit that moves without its sentence."""
    assert f"{limits()};" in " ".join(README.split())


def test_readme_is_short():
    assert len(README.splitlines()) <= 100


def test_ci_runs_what_readme_says():
    """`.ci/run` takes the README's first line that names pytest."""
    line = next(line for line in README.splitlines() if "bin/pytest" in line)
    assert line.startswith("python -m venv .venv && ")
    assert line.endswith(" && .venv/bin/pytest -n 2")


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
    r"1554, 1554": "64, 64",
    r"(height|width)=\d+": r"\1=32",
    r', "(a bowl|a street|two cats|two red)[^"]*"': "",
    r"((?:= pipe|calibrate|measure_error)\(.*|apply_avq\(.*prompt=.*)\)(?=$|\.images)": (
        r"\1, num_inference_steps=1)"
    ),
    r'(codewords="stored"\))\n\)': r"\1, num_inference_steps=1)",
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


WITH_COMMANDS = [ROOT / x for x in ("README.md", "eval/README.md", "distill/README.md")]
WITH_COMMANDS += [ROOT / "avq_diffusers/mini/README.md", *GUIDES]


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=lambda path: str(path.relative_to(ROOT)))
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
        ("avq", "calibrate --model mini-sd", "Missing option '--output'"),
        ("avq", "generate fox --height 100", "--height must be a multiple of 8"),
        ("avq", "bench ' '", "the prompt is empty; say what the image shows."),
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
