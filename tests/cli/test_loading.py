"""Models by name, as the `avq` command loads them: single files, and what it refuses."""

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
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from safetensors.torch import load_file, save_file
from single_file import save_single_file
from tiny import draw, sdxl_pipe, tiny_pipe, tiny_unet
from tiny_mini_sd3 import save_tiny_mini_sd3

from avq_diffusers import mini
from avq_diffusers.cli.images import training_size
from avq_diffusers.cli.loading import _single_file_class, load_pipeline
from avq_diffusers.mini.loading import usual_guidance

SD15 = "stable-diffusion-v1-5/stable-diffusion-v1-5"


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("single") / "fine-tune.safetensors"
    save_single_file(tiny_pipe(), path)
    return str(path)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The Hub's cache on a machine without network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub" / f"models--{SD15.replace('/', '--')}"


def test_a_single_file_is_the_model_that_it_was_made_of(file, hub):
    """Fails where a weight is not the file's, or the configuration not that of its family."""
    pipe = tiny_pipe()
    pipe.save_pretrained(hub / "snapshots" / "main")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("main")
    for weights in hub.rglob("*.safetensors"):
        weights.unlink()
    loaded = load_pipeline(file, "cpu")
    assert type(loaded) is type(pipe)
    assert loaded.unet.dtype == torch.float32
    torch.testing.assert_close(draw(loaded), draw(pipe), rtol=0, atol=0)


def test_a_single_file_without_its_configuration_says_what_to_do(file, hub):
    with pytest.raises(ValueError, match=r"fine-tune.safetensors: its configuration .* go online"):
        load_pipeline(file, "cpu")


def test_sdxl_is_told_from_its_weights(file, tmp_path):
    weights = load_file(file)
    weights["conditioner.embedders.0.transformer.text_model.final_layer_norm.bias"] = torch.zeros(1)
    save_file(weights, tmp_path / "xl.safetensors")
    assert _single_file_class(tmp_path / "xl.safetensors") is StableDiffusionXLPipeline


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.ckpt", r"could not be loaded: weights are read from \.safetensors files only"),
        ("cut.safetensors", "could not be loaded: .*header"),
        ("lora.safetensors", "could not be loaded: it is not a complete Stable Diffusion model"),
    ],
)
def test_other_files_are_refused(file, tmp_path, name, message):
    """A pickle is not opened, an adapter not taken for a model."""
    path = tmp_path / name
    if name == "lora.safetensors":
        save_file({"lora_unet_conv_in.lora_up.weight": torch.zeros(1)}, path)
    else:
        shutil.copy(file, path)
        with path.open("r+b") as cut:
            cut.truncate(1000)
    with pytest.raises(ValueError, match=message):
        load_pipeline(str(path), "cpu")


def test_a_folder_of_half_precision_files(tmp_path):
    """Catches names such as model.fp16.safetensors, by which many models are shared, not found."""
    pipe = tiny_pipe()
    pipe.save_pretrained(tmp_path, variant="fp16")
    assert torch.equal(draw(load_pipeline(str(tmp_path), "cpu")), draw(pipe))


def test_a_folder_without_weights_is_not_said_to_lack_half_precision_files(tmp_path):
    tiny_pipe().save_pretrained(tmp_path)
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ValueError, match="could not be loaded") as error:
        load_pipeline(str(tmp_path), "cpu")
    assert "fp16" not in str(error.value)


def pipeline_of_pixels():
    parts = dict.fromkeys(
        ("tokenizer", "text_encoder", "safety_checker", "feature_extractor", "watermarker")
    )
    return IFPipeline(
        **parts, unet=tiny_unet(), scheduler=DDPMScheduler(), requires_safety_checker=False
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tiny_pipe(tiny_unet(sample_size=[16, 16])),
            "must have one training size, but its UNet has sample",
        ),
        (
            lambda: tiny_pipe(tiny_unet(sample_size=None)),
            "must have one training size, but its UNet has sample",
        ),
        (pipeline_of_pixels, "has no VAE, as Stable Diffusion has"),
        (
            lambda: tiny_pipe(tiny_unet(in_channels=9), StableDiffusionInpaintPipeline),
            "its UNet takes 9 channels, and latents have 4",
        ),
    ],
    ids=["two sizes", "no size", "pixels", "image needed"],
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


def test_a_refiner_is_refused(tmp_path):
    """Catches diffusers' words about the time embedding of SDXL's refiner."""
    pipe = sdxl_pipe(cls=StableDiffusionXLImg2ImgPipeline)
    pipe.register_modules(text_encoder=None, tokenizer=None)
    pipe.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no text_encoder, like SDXL's refiner; name a model"):
        load_pipeline(str(tmp_path), "cpu")


def test_a_list_is_no_model(tmp_path):
    (tmp_path / "model_index.json").write_text("[]")
    with pytest.raises(ValueError, match="could not be loaded"):
        load_pipeline(str(tmp_path), "cpu")
