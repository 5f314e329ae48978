"""A full disk and a damaged checkpoint are refused, and what was there stays as it was."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny import random_codebooks, tiny_unet
from tiny_training import RUN_CONFIG

from avq_diffusers import AVQConfig
from avq_diffusers.cli.output import save_image
from distill.checkpointing import checkpoint
from distill.config import DistillConfig
from distill.config_file import load_config


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_full_disk_leaves_the_old_files(codebooks, tmp_path):
    """Catches a cut image, and a config of new codebooks beside the weights of old ones."""
    image = Image.effect_noise((256, 256), 50)
    save_image(image, tmp_path / "avq.png")
    codebooks.save_pretrained(tmp_path / "kept")
    before = contents(tmp_path)
    new = random_codebooks(tiny_unet(), AVQConfig.parse("M16P2C4", levels=(0, 1)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=r"avq\.png could not be written \(.*large"):
            save_image(image.rotate(90), tmp_path / "avq.png")
        with pytest.raises(OSError, match=r"codebooks could not be written to .*kept .*intact\."):
            new.save_pretrained(tmp_path / "kept")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(tmp_path) == before


@pytest.fixture
def finished(tmp_path):
    """The folder of a run with a checkpoint, as far as a refusal looks at it."""
    config = load_config(RUN_CONFIG, DistillConfig, [])
    states = {"objective": 1.0, "optimizer": 2.0}
    tensors = {name: {"x": torch.full((3,), x)} for name, x in states.items()}
    checkpoint.save(tmp_path / "run", 2, tensors, config=config, keep=1, schedule={"last_epoch": 2})
    (tmp_path / "run" / "log.jsonl").write_text('{"step": 2}\n')
    return tmp_path / "run"


def swap(path: Path) -> None:
    shutil.copy(path.with_name("optimizer.safetensors"), path)


def at_another_step(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": 1}))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("objective.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x")),
        ("objective.safetensors", swap),
        ("objective.safetensors", Path.unlink),
        ("run.json", at_another_step),
        ("digests.json", lambda path: path.write_text("[1]")),
    ],
    ids=["one-byte", "swapped", "missing", "another-step", "digests"],
)
def test_a_damaged_checkpoint_is_named(finished, file, damage):
    """Catches tensors that are loaded as long as their names and shapes fit, and a run that goes on
    from another step, with other codebooks and no word about it."""
    found = checkpoint.newest(finished)
    assert found.step == 2
    assert torch.equal(found.tensors("objective")["x"], torch.ones(3))
    damage(found.path / file)
    before = contents(finished)
    message = f"{found.path} does not hold the files that were saved; delete it to resume from the"
    with pytest.raises(ValueError, match=message):
        checkpoint.newest(finished)
    assert contents(finished) == before


def test_a_checkpoint_with_nan_is_refused(tmp_path):
    config = load_config(RUN_CONFIG, DistillConfig, [])
    tensors = {"objective": {"a": torch.ones(2), "b": torch.tensor([0, torch.nan])}}
    checkpoint.save(tmp_path, 1, tensors, config=config, keep=1)
    with pytest.raises(ValueError, match=r"^b of .*objective\.safetensors holds NaN"):
        checkpoint.newest(tmp_path).tensors("objective")
