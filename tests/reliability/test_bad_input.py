"""Bad input is refused, and what was there stays as it was: a pipeline, a file, a folder of a run.

The messages themselves are tested beside the code that gives them; here are the refusals whose
traces only show from outside.
"""

import hashlib
import json
import pickle
import re
import resource
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny import CONFIG, draw, random_codebooks, sdxl_unet, tiny_pipe, tiny_unet
from typer.testing import CliRunner

from avq_diffusers import (
    AVQCodebooks,
    apply_avq,
    calibrate,
    measure_capture,
    set_num_refined,
    summary,
)
from distill.__main__ import app as distill_app
from distill.checkpointing import checkpoint
from distill.config import DistillConfig
from distill.config_file import load_config
from eval.quality.coco import CAPTIONS, MANIFEST

LAYER = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
WEIGHTS = "diffusion_pytorch_model.safetensors"
DISTILL = Path(__file__).parents[2] / "configs" / "mini_m64p16c8.yaml"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_pipe().save_pretrained(folder)
    return folder


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


def command(module, program, *arguments):
    """Exit code of a command's `main`, run in this process."""
    argv, sys.argv = sys.argv, [program, *map(str, arguments)]
    try:
        module.main()
    except SystemExit as exit_:
        return exit_.code
    finally:
        sys.argv = argv
    return 0


def avq(*arguments):
    from avq_diffusers.cli import main as cli

    return command(cli, "avq", *arguments)


def evaluate(*arguments):
    from eval import __main__ as evaluation

    return command(evaluation, "eval", *arguments)


# A pipeline that runs AVQ goes on running it


def other_model(codebooks):
    return random_codebooks(tiny_unet(layers_per_block=1))


def other_heads(codebooks):
    return random_codebooks(tiny_unet(attention_head_dim=4))


def other_levels(codebooks):
    return random_codebooks(sdxl_unet(), type(CONFIG)(4, 2, 2, levels=(1, 2)))


def not_finite(codebooks):
    codebooks.codebook(LAYER).children[0, 0, 0] = float("inf")
    return codebooks


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_model, r"codebooks of another model: .* is missing \(4 missing in all\)"),
        (other_heads, "codebooks of another model: .* has 2 heads of dim 8, but its codebook has"),
        (other_levels, "codebooks of another model: .* is "),
        (not_finite, r"children .*finite"),
    ],
    ids=["model", "heads", "levels", "finite"],
)
def test_codebooks_that_do_not_fit_change_nothing(pipe, codebooks, make, message):
    """Catches an apply that removes or installs before it has looked at all layers."""
    apply_avq(pipe, codebooks, route="always")
    set_num_refined(pipe, 1)
    before = draw(pipe)
    others = make(random_codebooks(pipe.unet, seed=1))
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
        (lambda pipe: set_num_refined(pipe, 5), "num_refined must be between 0 and 4"),
        (lambda pipe: set_num_refined(pipe, {"up_blocks": 1, "mid": 1}), "layer is 'mid' or in it"),
        (lambda pipe: measure_capture(pipe, []), "at least one prompt, but got none"),
        (lambda pipe: calibrate(pipe, []), "at least one prompt, but got none"),
        (lambda pipe: measure_capture(pipe, ["a"], height=100, width=100), "divisible by 8"),
    ],
    ids=["size", "num-refined", "plan", "no-prompt", "no-calibration-prompt", "capture-size"],
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
    new = random_codebooks(tiny_unet(), type(CONFIG)(16, 4, 2, levels=(0, 1)))
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


def test_calibration_into_a_file_is_refused_before_it_runs(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert avq("calibrate", "--out", tmp_path / "thesis.txt") == 2
    error = capsys.readouterr().err
    assert re.search(r"avq: --out must be a folder, but .*thesis\.txt is a file\.", error)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_image_that_cannot_be_written_leaves_the_old_one(model, codebooks, tmp_path, capsys):
    """Catches an image that is cut where the disk was full."""
    _saved(codebooks, tmp_path / "codebooks")
    Image.effect_noise((256, 256), 50).save(tmp_path / "avq.png")
    before = contents(tmp_path)
    arguments = ["generate", "a fox", "--model", model, "--codebooks", tmp_path / "codebooks"]
    arguments += ["--steps", "1", "--out", tmp_path / "avq.png", "--device", "cpu"]
    with largest_file(4096):
        assert avq(*arguments) == 2
    assert re.search(r"avq: .*avq\.png could not be written \(.*large", capsys.readouterr().err)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["inspect", "bench"])
def test_a_plot_that_cannot_be_written_leaves_the_old_one(model, codebooks, tmp_path, capsys, name):
    """Catches a plot that is drawn over the old one, and an error that does not name the file."""
    import matplotlib.figure  # noqa: F401 - it writes its cache of fonts without the limit

    folder = _saved(codebooks, tmp_path / "codebooks")
    Image.effect_noise((256, 256), 50).save(tmp_path / "plot.png")
    before = contents(tmp_path)
    arguments = ["inspect", folder]
    if name == "bench":
        arguments = ["bench", "a fox", "--model", model, "--codebooks", folder]
        arguments += ["--steps", "1", "--refined", "0", "--device", "cpu"]
    with largest_file(4096):
        assert avq(*arguments, "--out", tmp_path / "plot.png") == 2
    assert re.search(r"avq: .*plot\.png could not be written \(.*large", capsys.readouterr().err)
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


# Evaluation


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"captions\.json is not JSON"),
        ('{"annotations": [{"id": 1, "image_id": 2}]}', "does not hold captions as COCO's"),
    ],
    ids=["json", "captions"],
)
def test_malformed_annotations_leave_no_folder(model, tmp_path, capsys, content, message):
    (tmp_path / "captions.json").write_text(content)
    arguments = ["--model", model, "--captions", tmp_path / "captions.json", "--images", "2"]
    assert evaluate("coco", "generate", tmp_path / "row", *arguments) == 2
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["captions.json"]


def write_row(folder: Path, size: int) -> None:
    texts = ["a fox", "a hill"]
    config = {
        "captions_sha256": hashlib.sha256("\n".join(texts).encode()).hexdigest(),
        "num_images": len(texts),
        "size": size,
    }
    (folder / "images").mkdir(parents=True)
    for index in range(len(texts)):
        image = Image.fromarray(np.full((size, size, 3), index, np.uint8))
        image.save(folder / "images" / f"{index:06d}.png")
    (folder / CAPTIONS).write_text("\n".join(texts) + "\n")
    facts = {"command": "c", "environment": {}, "row": {}, "earlier_sessions": []}
    (folder / MANIFEST).write_text(json.dumps({"config": config, **facts}))


def test_rows_of_different_protocols_leave_no_table(tmp_path, capsys):
    """Catches a table that is begun before all of its rows are known to belong together."""
    for size in (64, 128):
        write_row(tmp_path / f"row-{size}", size)
    before = contents(tmp_path)
    rows = [tmp_path / "row-64", tmp_path / "row-128"]
    options = ["--real", tmp_path / "row-64" / "images", "--output", tmp_path / "results"]
    assert evaluate("coco", "score", *rows, *options, "--cache", tmp_path / "cache") == 2
    assert "cannot stand in one table; they differ in size." in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_results_of_another_protocol_are_not_merged_over_a_result(tmp_path, capsys):
    run = {"command": "python -m eval scenes", "rows": [], "num_inference_steps": 25}
    for seed, steps in ((0, 25), (8, 50)):
        values = run | {"first_seed": seed, "num_inference_steps": steps}
        (tmp_path / f"{seed}.json").write_text(json.dumps(values))
    (tmp_path / "merged.json").write_text("before")
    before = contents(tmp_path)
    files = [tmp_path / "0.json", tmp_path / "8.json"]
    assert evaluate("merge", *files, "--output", tmp_path / "merged.json") == 2
    assert "the same num_inference_steps" in capsys.readouterr().err
    assert contents(tmp_path) == before


# Distillation


@pytest.fixture
def finished(tmp_path):
    """The folder of a run with a checkpoint, as far as a refusal looks at it."""
    config = load_config(DISTILL, DistillConfig, [])
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
        (["--resume", "--set", "seed=1"], "has another configuration; .* in seed"),
        (["--resume", "--set", "avq.parents=1"], "unknown key avq.parents"),
        (["--resume", "--set", "samples.prompts=[]"], "prompts must hold at least one prompt"),
    ],
    ids=["not-resumed", "configuration", "key", "prompts"],
)
def test_a_run_that_cannot_go_on_stays_as_it_is(finished, arguments, message):
    before = contents(finished)
    options = ["--config", str(DISTILL), "--output", str(finished)]
    result = CliRunner().invoke(distill_app, [*options, *arguments])
    assert result.exit_code == 2
    assert re.search(message, result.stderr)
    assert contents(finished) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:50]), "is not the file that was saved"),
        (flip, "is not the file that was saved"),
        (swap, "is not the file that was saved"),
        (lambda path: path.unlink(), "is not the file that was saved"),
    ],
    ids=["truncated", "one-bit", "swapped", "missing"],
)
def test_a_damaged_checkpoint_is_named(finished, damage, message):
    """Catches tensors that are loaded as long as their names and shapes fit."""
    found = checkpoint.newest(finished)
    assert torch.equal(found.tensors("objective")["x"], torch.ones(3))
    path = found.path / "objective.safetensors"
    damage(path)
    before = contents(finished)
    expected = rf"{path} is damaged \(it {message}\); delete {found.path} to resume from"
    with pytest.raises(ValueError, match=expected):
        found.tensors("objective")
    assert contents(finished) == before


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"step": 2, "config": {}}'])
def test_a_damaged_description_of_a_checkpoint_is_named(finished, text):
    path = checkpoint.newest(finished).path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{path} is damaged \(.*; delete {path.parent} to"):
        checkpoint.newest(finished)


def test_a_checkpoint_with_nan_is_refused(tmp_path):
    config = load_config(DISTILL, DistillConfig, [])
    tensors = {"objective": {"a": torch.ones(2), "b": torch.tensor([0, torch.nan])}}
    checkpoint.save(tmp_path, 1, tensors, config=config, keep=1)
    with pytest.raises(ValueError, match=r"objective\.safetensors is damaged \(b holds NaN"):
        checkpoint.newest(tmp_path).tensors("objective")


def test_an_unknown_key_leaves_no_folder(tmp_path):
    values = yaml.safe_load(DISTILL.read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**values, "lerning_rate": 1}))
    arguments = ["--config", str(tmp_path / "config.yaml"), "--output", str(tmp_path / "run")]
    result = CliRunner().invoke(distill_app, arguments)
    assert result.exit_code == 2
    assert re.fullmatch(
        r"error: .*config\.yaml has the unknown key lerning_rate.*\n", result.stderr
    )
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
