"""Models by name, as the `avq` command loads them: single files, and what it refuses."""

import pickle
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from diffusers import (
    DDPMScheduler,
    IFPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from safetensors.torch import load_file, save_file
from tiny import draw, sdxl_pipe, tiny_pipe, tiny_unet
from tiny_transformers import save_tiny_mini_sd3

from avq_diffusers import mini
from avq_diffusers.cli.images import training_size
from avq_diffusers.cli.loading import _single_file_class, load_pipeline
from avq_diffusers.mini.loading import usual_guidance

LDM_NAME = "model.diffusion_model.input_blocks.0.0.weight"
SDXL_NAME = "conditioner.embedders.0.transformer.text_model.final_layer_norm.bias"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([LDM_NAME], StableDiffusionPipeline),
        ([LDM_NAME, SDXL_NAME], StableDiffusionXLPipeline),
    ],
)
def test_a_single_file_is_told_from_its_weights(tmp_path, monkeypatch, names, expected):
    """Diffusers converts it, with a configuration of the Hub; that may not be in the cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    path = tmp_path / "fine-tune.safetensors"
    save_file({name: torch.zeros(320, 4, 3, 3) for name in names}, path)
    assert _single_file_class(str(path)) is expected
    with pytest.raises(ValueError, match=r"fine-tune.safetensors: its configuration .* go online"):
        load_pipeline(str(path), "cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.ckpt", r"could not be loaded: weights are only read from \.safetensors files"),
        ("cut.safetensors", "could not be loaded: .*header"),
        ("lora.safetensors", "could not be loaded: it is not a complete Stable Diffusion model"),
    ],
)
def test_other_files_are_refused(tmp_path, name, message):
    """A pickle is not opened, an adapter not taken for a model."""
    path = tmp_path / name
    save_file({"lora_unet_conv_in.lora_up.weight": torch.zeros(1)}, path)
    if name != "lora.safetensors":
        path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=message):
        load_pipeline(str(path), "cpu")


def test_a_folder_of_half_precision_files(tmp_path):
    """Catches names such as model.fp16.safetensors, by which many models are shared, not found."""
    pipe = tiny_pipe()
    pipe.save_pretrained(tmp_path, variant="fp16")
    assert torch.equal(draw(load_pipeline(str(tmp_path), "cpu")), draw(pipe))
    (tmp_path / "unet" / "diffusion_pytorch_model.fp16.safetensors").unlink()
    with pytest.raises(ValueError, match="could not be loaded") as error:
        load_pipeline(str(tmp_path), "cpu")
    assert "fp16" not in str(error.value)


def test_a_truncated_file_is_named(model, tmp_path):
    """transformers, unlike diffusers, lets the error of safetensors through."""
    shutil.copytree(model, tmp_path / "cut")
    weights = tmp_path / "cut" / "text_encoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"--model {tmp_path}/cut could not be loaded: "):
        load_pipeline(str(tmp_path / "cut"), "cpu")


def test_nothing_of_a_model_is_unpickled(model, tmp_path):
    """Catches a loader that takes weights in pickles, which may run anything."""
    marker = tmp_path / "was-unpickled"

    class Payload:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    unet = shutil.copytree(model, tmp_path / "model") / "unet"
    (unet / "diffusion_pytorch_model.safetensors").unlink()
    content = pickle.dumps({"conv_in.weight": Payload()})
    (unet / "diffusion_pytorch_model.bin").write_bytes(content)
    with pytest.raises(ValueError, match="could not be loaded"):
        load_pipeline(str(unet.parent), "cpu")
    assert not marker.exists()


def pipeline_of_pixels():
    parts = dict.fromkeys(
        ("tokenizer", "text_encoder", "safety_checker", "feature_extractor", "watermarker")
    )
    return IFPipeline(
        **parts, unet=tiny_unet(), scheduler=DDPMScheduler(), requires_safety_checker=False
    )


def refiner():
    pipe = sdxl_pipe(cls=StableDiffusionXLImg2ImgPipeline)
    pipe.register_modules(text_encoder=None, tokenizer=None)
    return pipe


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tiny_pipe(tiny_unet(sample_size=[16, 16])),
            "must have one training size, but its UNet has sample",
        ),
        (pipeline_of_pixels, "has no VAE, unlike Stable Diffusion"),
        (refiner, "has no text_encoder, like SDXL's refiner; name a model"),
        (
            lambda: tiny_pipe(tiny_unet(in_channels=9), StableDiffusionInpaintPipeline),
            "its UNet takes 9 channels, and latents have 4",
        ),
    ],
    ids=["two sizes", "pixels", "refiner", "image needed"],
)
def test_other_models_are_refused(tmp_path, make, message):
    """Catches a traceback at the first step, after minutes of calibration."""
    make().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_pipeline(str(tmp_path), "cpu")


def test_mini_sd3_by_its_name_shares_the_parts_of_mini_sd(tmp_path, monkeypatch):
    """Fails for a name that is taken for one of the Hub, and for an encoder loaded twice."""
    save_tiny_mini_sd3(tmp_path)
    monkeypatch.setattr(mini, "MINI_SD3", str(tmp_path))
    pipe = load_pipeline(mini.model_path("mini-sd3"), "cpu")
    assert type(pipe) is StableDiffusion3Pipeline
    assert pipe.text_encoder is pipe.text_encoder_2
    assert pipe.text_encoder_3 is None
    stored = load_file(Path(mini.MINI_SD) / "vae" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(
        pipe.vae.state_dict()["decoder.conv_out.weight"], stored["decoder.conv_out.weight"].float()
    )
    assert training_size(pipe) == 64
    assert usual_guidance(pipe) == mini.MINI_GUIDANCE_SCALE


def test_a_list_is_no_model(tmp_path):
    (tmp_path / "model_index.json").write_text("[]")
    with pytest.raises(ValueError, match="could not be loaded"):
        load_pipeline(str(tmp_path), "cpu")
