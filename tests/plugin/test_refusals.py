"""Wrong arguments and files that used to pass, or to end in another library's message."""

import re
import warnings

import pytest
import torch
from tiny import CONFIG, LAYER, random_codebooks

from avq_diffusers import AVQCodebooks, apply_avq, calibrate, measure_capture, measure_sensitivity

RUN = {"num_inference_steps": 2, "progress": False}


class TestMeasuring:
    @pytest.mark.parametrize("measure", [calibrate, measure_capture, measure_sensitivity])
    def test_misspelt_argument(self, pipe, codebooks, measure):
        """Pipelines take any name, and generate at their own size."""
        if measure is not calibrate:
            apply_avq(pipe, codebooks)
        match = r"^StableDiffusionPipeline takes no argument hieght"
        with pytest.raises(TypeError, match=match):
            measure(pipe, ["a fox"], hieght=64, **RUN)

    def test_calibration_of_a_broken_model(self, pipe):
        """It stops at the first layer that gives NaN, in the first prompt."""
        prompts = []
        encode = pipe.encode_prompt
        pipe.encode_prompt = lambda prompt, *a, **k: (
            prompts.append(prompt) or encode(prompt, *a, **k)
        )
        with torch.no_grad():
            pipe.unet.get_submodule(LAYER).to_k.weight[0, 0] = torch.nan
        with pytest.raises(ValueError, match=f"^the keys of {re.escape(LAYER)} hold NaN or infin"):
            calibrate(pipe, ["a fox", "a hen"], CONFIG, **RUN)
        assert prompts == ["a fox"]


class TestPaths:
    def test_home(self, codebooks, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        codebooks.save_pretrained("~/mine")
        assert (tmp_path / "mine" / "config.json").is_file()
        loaded = AVQCodebooks.from_pretrained("~/mine")
        assert loaded.layer_specs == codebooks.layer_specs
        with pytest.raises(FileNotFoundError, match=f"there is no folder {tmp_path}/other"):
            AVQCodebooks.from_pretrained("~/other")

    @pytest.mark.parametrize("name", ["", "a b", "x/", "user/na me", "user/..", "-x", "a" * 200])
    def test_bad_hub_id(self, name):
        with pytest.raises((ValueError, FileNotFoundError), match=r"^codebooks: ") as caught:
            AVQCodebooks.from_pretrained(name)
        assert str(caught.value).count(". ") == 0

    @pytest.mark.parametrize("folder", ["", "."])
    def test_saving_into_the_working_directory(self, codebooks, folder, tmp_path, monkeypatch):
        """An empty name is an argument that went missing; a dot is meant."""
        monkeypatch.chdir(tmp_path)
        if folder == ".":
            codebooks.save_pretrained(folder)
            return
        with pytest.raises(ValueError, match=r"^save_directory must name a folder, but got ''"):
            codebooks.save_pretrained(folder)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["F7", "F4", "F8_E8M0", "C64", "BOOL"])
def test_tensors_of_an_unknown_dtype(codebooks, tmp_path, dtype):
    codebooks.save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(b'"F32"', f'"{dtype}"'.encode())
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        AVQCodebooks.from_pretrained(tmp_path)
    assert len(str(caught.value).removeprefix(str(path))) < 200


class TestOtherModels:
    """Shapes are equal; only names tell models apart."""

    @pytest.mark.parametrize(
        ("made_for", "model", "warns"),
        [
            (
                "runwayml/stable-diffusion-v1-5",
                "stable-diffusion-v1-5/stable-diffusion-v1-5",
                False,
            ),
            ("runwayml/stable-diffusion-v1-5", "stabilityai/stable-diffusion-2-1", True),
            ("runwayml/stable-diffusion-v1-5", None, False),
            (None, "stabilityai/stable-diffusion-2-1", False),
            ("my-folder", "stabilityai/stable-diffusion-2-1", False),
        ],
    )
    def test_names(self, pipe, made_for, model, warns):
        codebooks = random_codebooks(pipe.unet, base_model=made_for)
        pipe.register_to_config(_name_or_path=model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            apply_avq(pipe, codebooks)
        said = [str(x.message) for x in caught if "codebooks were made for" in str(x.message)]
        assert len(said) == warns
        assert not warns or (made_for in said[0] and model in said[0])
