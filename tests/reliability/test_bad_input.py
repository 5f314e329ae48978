"""Bad input is refused, and what was there stays as it was: a pipeline, a file, a folder of a run.

The messages themselves are tested beside the code that gives them; here are the refusals whose
traces only show from outside.
"""

import pickle
import re
import resource
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny import LAYER, draw, random_codebooks, sdxl_unet, tiny_unet
from tiny_training import RUN_CONFIG
from typer.testing import CliRunner

from avq_diffusers import (
    AVQCodebooks,
    AVQConfig,
    apply_avq,
    calibrate,
    measure_error,
    set_num_refined,
    summary,
)
from avq_diffusers.cli import main as cli
from distill.__main__ import app as distill_app
from distill.checkpointing import checkpoint
from distill.config import DistillConfig
from distill.config_file import load_config

WEIGHTS = "diffusion_pytorch_model.safetensors"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def largest_file(size: int):
    """The operating system refuses to let a file grow beyond this many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def avq(*arguments):
    """Exit code of the command, run in this process."""
    argv, sys.argv = sys.argv, ["avq", *map(str, arguments)]
    try:
        cli.main()
    except SystemExit as exit_:
        return exit_.code
    finally:
        sys.argv = argv
    return 0


# A pipeline that runs AVQ goes on running it


def not_finite():
    codebooks = random_codebooks(tiny_unet())
    codebooks.codebook(LAYER).children[0, 0, 0] = float("inf")
    return codebooks


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: random_codebooks(tiny_unet(attention_head_dim=4)),
            "codebooks of another model: .* has 2 heads of dim 8, but its codebook has",
        ),
        (
            lambda: random_codebooks(sdxl_unet(), AVQConfig.parse("M4P2C2", levels=(1, 2))),
            "codebooks of another model: .* is ",
        ),
        (not_finite, r"children .*finite"),
    ],
    ids=["heads", "levels", "finite"],
)
def test_codebooks_that_do_not_fit_change_nothing(pipe, codebooks, make, message):
    """Catches an apply that removes or installs before it has looked at all layers."""
    apply_avq(pipe, codebooks, route="always")
    set_num_refined(pipe, 1)
    before = draw(pipe)
    others = make()
    with pytest.raises(ValueError, match=message):
        apply_avq(pipe, others)
    rows = [row.config for row in summary(pipe).rows if row.config]
    assert rows == ["M4P1C2"] * len(codebooks.layer_specs)
    assert torch.equal(draw(pipe), before)


def test_a_unet_without_the_levels_stays_as_it_is(codebooks):
    """Catches processors or state on a UNet that was refused."""
    unet = sdxl_unet()
    processors = dict(unet.attn_processors)
    attributes = {name: set(vars(module)) for name, module in unet.named_modules()}
    with pytest.raises(ValueError, match="no self-attention at level 0, only at levels 1, 2"):
        apply_avq(unet, codebooks)
    assert all(unet.attn_processors[name] is processors[name] for name in processors)
    assert {name: set(vars(module)) for name, module in unet.named_modules()} == attributes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pipe: draw(pipe, height=100, width=100), "divisible by 8"),
        (lambda pipe: measure_error(pipe, []), "at least one prompt, but got none"),
        (lambda pipe: calibrate(pipe, []), "at least one prompt, but got none"),
        (lambda pipe: measure_error(pipe, ["a"], height=100, width=100), "divisible by 8"),
    ],
    ids=["size", "no-prompt", "no-calibration-prompt", "measured-size"],
)
def test_a_refused_call_leaves_the_pipeline_usable(pipe, codebooks, call, message):
    """Catches hooks, a schedule or a setting that a failed call leaves behind."""
    apply_avq(pipe, codebooks, route="always")
    before = draw(pipe)
    hooks = sum(len(module._forward_pre_hooks) for module in pipe.unet.modules())
    with pytest.raises(ValueError, match=message):
        call(pipe)
    assert sum(len(module._forward_pre_hooks) for module in pipe.unet.modules()) == hooks
    assert torch.equal(draw(pipe), before)


# Files


def test_codebooks_that_cannot_be_written_leave_the_old_ones(codebooks, tmp_path):
    """Catches a config of the new codebooks beside the weights of the old ones."""
    old = AVQCodebooks.from_pretrained(_saved(codebooks, tmp_path / "kept"))
    (tmp_path / "kept" / "README.md").write_text("mine")
    before = contents(tmp_path)
    new = random_codebooks(tiny_unet(), AVQConfig.parse("M16P2C4", levels=(0, 1)))
    with (
        largest_file(4096),
        pytest.raises(OSError, match=r"codebooks could not be written to .*kept .*intact\."),
    ):
        new.save_pretrained(tmp_path / "kept")
    assert contents(tmp_path) == before
    with pytest.raises(OSError, match=r"codebooks could not be written to .*README\.md"):
        new.save_pretrained(tmp_path / "kept" / "README.md")
    assert contents(tmp_path) == before
    new.save_pretrained(tmp_path / "kept")
    assert str(AVQCodebooks.from_pretrained(tmp_path / "kept").avq_config) == "M16P2C4"
    assert str(old.avq_config) == "M4P2C2"
    names = {"README.md", "config.json", WEIGHTS}
    assert {path.name for path in (tmp_path / "kept").iterdir()} == names


def _saved(codebooks, folder: Path) -> Path:
    codebooks.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "a fox", "--model", "MODEL", "--codebooks", "CODEBOOKS", "--device", "cpu"],
        ["inspect", "CODEBOOKS"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_image_that_cannot_be_written_leaves_the_old_one(
    model, codebooks, tmp_path, capsys, arguments
):
    """Catches an image that is cut where the disk was full, and an error that names no file."""
    import matplotlib.figure  # noqa: F401 - it writes its cache of fonts without the limit

    places = {"MODEL": model, "CODEBOOKS": _saved(codebooks, tmp_path / "codebooks")}
    arguments = [places.get(argument, argument) for argument in arguments]
    if arguments[0] != "inspect":
        arguments += ["--steps", "1"]
    Image.effect_noise((256, 256), 50).save(tmp_path / "avq.png")
    before = contents(tmp_path)
    with largest_file(4096):
        assert avq(*arguments, "--out", tmp_path / "avq.png") == 2
    assert re.search(r"avq: .*avq\.png could not be written \(.*large", capsys.readouterr().err)
    assert contents(tmp_path) == before


def test_nothing_of_a_model_is_unpickled(model, tmp_path, capsys):
    """Catches a loader that takes weights in pickles, which may run anything."""
    marker = tmp_path / "was-unpickled"

    class Payload:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "unet" / WEIGHTS).unlink()
    (tmp_path / "model" / "unet" / "diffusion_pytorch_model.bin").write_bytes(
        pickle.dumps({"conv_in.weight": Payload()})
    )
    before = contents(tmp_path)
    arguments = ["--model", tmp_path / "model", "--device", "cpu"]
    assert avq("generate", "a fox", *arguments, "--out", tmp_path / "a.png") == 2
    assert "could not be loaded" in " ".join(capsys.readouterr().err.split())
    assert contents(tmp_path) == before
    assert not marker.exists()


# Distillation


@pytest.fixture
def finished(tmp_path):
    """The folder of a run with a checkpoint, as far as a refusal looks at it."""
    config = load_config(RUN_CONFIG, DistillConfig, [])
    tensors = {name: {"x": torch.ones(3)} for name in ("objective", "optimizer")}
    checkpoint.save(tmp_path / "run", 2, tensors, config=config, keep=1)
    (tmp_path / "run" / "log.jsonl").write_text('{"step": 2}\n')
    return tmp_path / "run"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def swap(path: Path) -> None:
    shutil.copy(path.with_name("optimizer.safetensors"), path)
    tensors = load_file(path)
    save_file({"x": 2 * tensors["x"]}, path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "seed=1"], "holds a run: add --resume or choose another --output"),
        (
            ["--resume", "--set", "seed=1", "--set", "log_every=3", "--set", "avq.num_parents=32"],
            r"has another configuration; it differs in avq\.num_parents, seed\.",
        ),
        (["--resume", "--set", "avq.parents=1"], "unknown key avq.parents"),
        (["--resume", "--set", "samples.prompts=[]"], "prompts must hold at least one prompt"),
    ],
    ids=["not-resumed", "configuration", "key", "prompts"],
)
def test_a_run_that_cannot_go_on_stays_as_it_is(finished, arguments, message):
    before = contents(finished)
    options = ["--config", str(RUN_CONFIG), "--output", str(finished)]
    result = CliRunner().invoke(distill_app, [*options, *arguments])
    assert result.exit_code == 2
    assert re.search(message, result.stderr)
    assert contents(finished) == before


@pytest.mark.parametrize(
    "damage",
    [lambda path: path.write_bytes(path.read_bytes()[:50]), flip, swap, Path.unlink],
    ids=["truncated", "one-bit", "swapped", "missing"],
)
def test_a_damaged_checkpoint_is_named(finished, damage):
    """Catches tensors that are loaded as long as their names and shapes fit."""
    found = checkpoint.newest(finished)
    assert torch.equal(found.tensors("objective")["x"], torch.ones(3))
    path = found.path / "objective.safetensors"
    damage(path)
    before = contents(finished)
    message = "it is not the file that was saved"
    expected = rf"{path} is damaged \({message}\); delete {found.path} to resume from"
    with pytest.raises(ValueError, match=expected):
        found.tensors("objective")
    assert contents(finished) == before


def test_a_checkpoint_without_its_values_is_named(finished):
    path = checkpoint.newest(finished).path / "run.json"
    path.write_text('{"step": "1"}')
    with pytest.raises(ValueError, match=rf"{path} is damaged \(it lacks step, .*sha256"):
        checkpoint.newest(finished)


def test_a_checkpoint_with_nan_is_refused(tmp_path):
    config = load_config(RUN_CONFIG, DistillConfig, [])
    tensors = {"objective": {"a": torch.ones(2), "b": torch.tensor([0, torch.nan])}}
    checkpoint.save(tmp_path, 1, tensors, config=config, keep=1)
    with pytest.raises(ValueError, match=r"objective\.safetensors is damaged \(b holds NaN"):
        checkpoint.newest(tmp_path).tensors("objective")
