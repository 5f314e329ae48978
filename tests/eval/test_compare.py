"""Likeness to exact attention: `python -m eval compare`, of a UNet and of a tiny mini-sd3."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers.models.attention_processor import JointAttnProcessor2_0
from eval_helpers import CALIBRATION, run_command
from tiny import three_level_pipe
from tiny_transformers import save_tiny_mini_sd3

from avq_diffusers.mini.loading import load_mini_sd3, usual_guidance
from eval.methods.prepared import attention_method, load_methods
from eval.methods.registry import EXACT, NO_ATTENTION
from eval.quality import compare, metrics
from eval.quality.generation import Sampling, dilation_config, generate


def test_compare_measures_against_exact_at_equal_prompts_and_seeds(tmp_path):
    """Fails for a pairing of prompts and seeds that differs between methods, or from its order."""
    pipe = three_level_pipe()
    prompts, seeds, methods = ["a", "bb"], range(2), ("M4P2C2", NO_ATTENTION)
    settings = Sampling(num_inference_steps=2)
    rows, images = compare.compare(
        pipe, methods, prompts, seeds, settings, calibration_prompts=CALIBRATION
    )
    assert list(images) == [EXACT, *methods]
    expected = generate(pipe, ["a", "bb", "a", "bb"], [0, 0, 1, 1], settings)
    assert np.array_equal(images[EXACT], expected)
    for row, method in zip(rows, methods, strict=True):
        assert row["method"] == method
        values = metrics.psnr(images[method], expected)
        assert row["psnr"] == pytest.approx(values.tolist())
        assert row["psnr_median"] == pytest.approx(np.median(values))
        assert row["psnr_p10"] == min(values)
        assert row["ssim"] == pytest.approx(metrics.ssim(images[method], expected).tolist())
        assert row["ssim_median"] == pytest.approx(np.median(row["ssim"]))
    table = compare.compare_table(rows).splitlines()
    assert [line.split("|")[1].strip() for line in table] == ["method", "---", *methods]
    assert [line.split("|")[2].strip() for line in table[2:]] == ["8", "-"]
    compare.compare_sheet(tmp_path / "sheet.png", images, prompts)
    assert (tmp_path / "sheet.png").stat().st_size > 1000


def test_compare_shows_what_scalecrafter_does():
    """Fails where both rows are drawn with it, or both without, or where methods are compared to
    the row without it."""
    pipe = three_level_pipe()
    settings = Sampling(num_inference_steps=2, size=256, is_dilated=True)
    (row,), images = compare.compare(
        pipe, [NO_ATTENTION], ["a"], range(1), settings, calibration_prompts=CALIBRATION
    )
    assert list(images) == [compare.UNDILATED, EXACT, NO_ATTENTION]
    for name in ("psnr", "ssim"):
        figures = getattr(metrics, name)(images[NO_ATTENTION], images[EXACT])
        assert row[name] == pytest.approx(figures.tolist())
    plain = generate(pipe, ["a"], [0], replace(settings, is_dilated=False))
    assert np.array_equal(images[compare.UNDILATED], plain)
    assert not np.array_equal(images[EXACT], plain)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mini") / "mini-sd3"
    save_tiny_mini_sd3(path)
    return path


@pytest.fixture(scope="module")
def pipe(folder):
    return load_mini_sd3(folder)


def test_its_guidance_is_that_of_mini_sd(pipe):
    """Fails for the 7 of SD3's pipeline, which its training has not seen."""
    assert usual_guidance(pipe) == 3


@torch.no_grad()
def test_the_negative_control_sees_the_text_and_no_other_token_of_the_image(pipe):
    block = pipe.transformer.transformer_blocks[0]
    latents, text, pooled = torch.randn(1, 4, 6, 8), torch.randn(1, 3, 384), torch.randn(1, 384)
    other_latents, other_text = latents.clone(), text.clone()
    other_latents[..., 2:4, :2] += 1  # token 4 of 12
    other_text[:, 1] += 1
    (control,) = load_methods(pipe, ["value-projection"], levels=(0,))

    def calls(latents, text):
        """Input and output of both attentions of the first block."""
        found = []
        hooks = [
            attn.register_forward_hook(
                lambda _, args, kwargs, output: found.append((kwargs["hidden_states"], output)),
                with_kwargs=True,
            )
            for attn in (block.attn, block.attn2)
        ]
        with attention_method(pipe, control):
            pipe.transformer(latents, text, pooled, torch.tensor([500]))
        for hook in hooks:
            hook.remove()
        return found

    (_, (image, words)), (alone, of_image) = calls(latents, text)
    changed_image, changed_words = calls(other_latents, text)[0][1]
    same = [i for i in range(12) if torch.equal(image[:, i], changed_image[:, i])]
    assert same == [i for i in range(12) if i != 4]
    assert not torch.equal(words, changed_words)  # the text still reads the image
    assert not torch.equal(image, calls(latents, other_text)[0][1][0])
    torch.testing.assert_close(of_image, block.attn2.to_out[0](block.attn2.to_v(alone)))


def test_methods_change_every_layer_and_restore(pipe):
    def processors():
        return list(pipe.transformer.attn_processors.values())

    before = processors()
    assert {type(x) for x in before} == {JointAttnProcessor2_0}
    for method in load_methods(pipe, ["value-projection", "M4P2C2/own"], levels=(0,)):
        with attention_method(pipe, method):
            assert JointAttnProcessor2_0 not in {type(x) for x in processors()}
    assert all(one is other for one, other in zip(processors(), before, strict=True))


def test_compare_on_a_transformer(folder, tmp_path, monkeypatch):
    """Fails for methods that leave the images as they are, and a file of mini-sd's name."""
    options = ["--model", folder, "--prompts", 1, "--seeds", 1, "--steps", 2, "--size", 64]
    options += ["--methods", "value-projection,M4P2C2/own", "--output", tmp_path]
    run_command(monkeypatch, "compare", *options)
    document = json.loads((tmp_path / "compare_mini_sd3_64.json").read_text())
    control, own = document["rows"]
    assert 10 < control["psnr_median"] < own["psnr_median"] < 100
    assert (own["config"], own["origin"]) == ("M4P2C2/own", "own")
    assert (tmp_path / "compare_mini_sd3_64.webp").is_file()


@pytest.mark.parametrize("name", ["M4P2C2", "tome", "M4P2C2/means"])
def test_methods_that_a_transformer_does_not_have(pipe, name):
    message = (
        "methods for images by a transformer are exact, .*, pisa@.15, M64C8T1e-4, M64P16C8/own, but"
    )
    with pytest.raises(ValueError, match=message):
        load_methods(pipe, [name], levels=(0,))


def test_scalecrafter_is_refused(pipe):
    with pytest.raises(ValueError, match="ScaleCrafter dilates a UNet's convolutions, but"):
        dilation_config(pipe, Sampling(size=128, is_dilated=True))
