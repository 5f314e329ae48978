"""Metrics against closed forms, and images generated for them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import two_level_pipe

from avq_diffusers.mini import MINI_SD
from distill.scenes import TEST_SEEDS, copy_agreement, render, sample_scene
from eval.quality import metrics
from eval.quality.frechet import JACKKNIFE_BLOCKS, fit_gaussian, frechet_distance, jackknife_error
from eval.quality.generation import Sampling, generate
from eval.quality.scenes import Measure


def noise(count: int, side: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)


def planes(images: np.ndarray) -> torch.Tensor:
    """The images (n, h, w, 3) as scorers take them."""
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def flat(level: int, side: int = 16) -> np.ndarray:
    return np.full((1, side, side, 3), level, np.uint8)


def test_psnr_of_a_constant_error():
    """Fails for uint8 arithmetic that wraps, a peak of 1, or one mean over all images."""
    reference = np.concatenate([flat(10), flat(200)])
    images = np.concatenate([flat(7), flat(250)])
    expected = [20 * np.log10(255 / 3), 20 * np.log10(255 / 50)]
    assert metrics.psnr(images, reference) == pytest.approx(expected)
    assert np.isinf(metrics.psnr(reference, reference)).all()


def test_the_scorer_shrinks_images_by_their_mean(scorer):
    """Catches pixels that are picked: of four columns, the two in the middle are white here. And
    a filter that is sharper than the bilinear one: beside an edge it would leave the range."""
    columns = torch.tensor([0, 255, 255, 0], dtype=torch.uint8).repeat(256)
    pixels = scorer._pixels(columns.expand(1, 3, 1024, 1024))
    assert pixels.shape == (1, 3, 256, 256)
    assert pixels[..., 2:-2].abs().max() < 0.5
    edge = torch.tensor([0, 255], dtype=torch.uint8).repeat_interleave(512)
    assert scorer._pixels(edge.expand(1, 3, 1024, 1024)).abs().max() < 1.001


def test_clip_scores_are_those_of_the_model_itself(scorer, monkeypatch):
    """Against CLIP's own forward: catches features before its last norm, which rank captions as
    well, pixels or captions that it was not trained on, and captions that lose step with their
    images, at batch borders too."""
    monkeypatch.setattr(metrics, "SCORER_BATCH", 2)
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:3]]
    images, captions = np.stack([render(scene) for scene in shown]), [x.caption for x in shown]
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1
    tokens = scorer.tokenizer(captions, padding="max_length", return_tensors="pt")
    with torch.no_grad():
        logits = scorer.model(pixel_values=pixels, **tokens).logits_per_image
    expected = 100 * (logits / scorer.model.logit_scale.exp()).diag()
    found = metrics.clip_scores(scorer, metrics.image_features(scorer, images), captions)
    cosines = scorer.cosines(planes(images), captions)
    for scores in (found, 100 * cosines.numpy()):
        assert scores == pytest.approx(expected.numpy(), abs=1e-2)


def test_copy_agreements_leave_out_scenes_without_copies():
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:20]]
    agreements = [copy_agreement(render(scene), scene) for scene in shown]
    expected = [agreement for agreement in agreements if agreement is not None]
    assert 0 < len(expected) < len(shown)
    found = metrics.copy_agreements(np.stack([render(scene) for scene in shown]), shown)
    assert found == pytest.approx(expected)


def test_generate_gives_the_same_image_whatever_the_batch_size():
    """Fails where noise is drawn per batch; rounding may move a value by one."""
    pipe = two_level_pipe()
    prompts, seeds = ["a", "bb", "a", "a", "ccc"], [3, 4, 5, 3, 6]
    settings = Sampling(num_inference_steps=2, batch_size=1)
    reference = generate(pipe, prompts, seeds, settings).astype(int)
    assert reference.shape == (5, 128, 128, 3)
    assert np.array_equal(reference[0], reference[3])
    assert abs(reference[0] - reference[2]).max() > 20
    for batch_size in (2, 3, 8):
        images = generate(pipe, prompts, seeds, replace(settings, batch_size=batch_size))
        assert images.dtype == np.uint8
        assert abs(images.astype(int) - reference).max() <= 1


@pytest.mark.parametrize(
    ("model", "given", "guidance_scale"),
    [(MINI_SD, None, 3.0), ("another", None, 7.5), ("another", 2.0, 2.0)],
)
def test_generate_guides_as_is_usual_for_the_model(model, given, guidance_scale):
    """Catches guidance that is always mini-sd's own, and one that is asked for in vain."""
    pipe = two_level_pipe()
    pipe.register_to_config(_name_or_path=model)
    settings = Sampling(num_inference_steps=2, guidance_scale=given)
    (image,) = generate(pipe, ["a"], [3], settings).astype(int)
    arguments = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(3)}
    images = pipe("a", guidance_scale=guidance_scale, output_type="np", **arguments).images
    assert abs(image - 255 * images[0]).max() <= 0.5 + 1e-3


class ThreeScores:
    """A scorer whose features are the first pixel of each image."""

    def __call__(self, images):
        return images[..., 0, 0].float()

    def text_cosines(self, features, captions):
        return torch.tensor([0.01, 0.02, 0.06])


def test_standard_errors_are_of_an_unbiased_variance():
    """Catches a spread over n, one that is not divided by its root, and that of another FID."""
    images, reference = noise(3), fit_gaussian(torch.eye(3))
    found, gaussian = Measure(ThreeScores(), [sample_scene(0)] * 3, reference)(images)
    features = ThreeScores()(planes(images))
    assert found["num_images"] == 3
    assert found["fid"] == frechet_distance(reference, gaussian)
    assert found["fid_sem"] == jackknife_error(reference, features, JACKKNIFE_BLOCKS)
    assert found["clip_score"] == pytest.approx(3)
    assert found["clip_score_sem"] == pytest.approx(7**0.5 / 3**0.5)


@pytest.mark.parametrize(("prompts", "seeds"), [([], []), (["a"], [1, 2])])
def test_generate_wants_one_seed_a_prompt(prompts, seeds):
    with pytest.raises(ValueError, match="expected as many seeds as prompts and at least one, but"):
        generate(two_level_pipe(), prompts, seeds, Sampling())


def test_the_tenth_percentile_is_one_of_the_images():
    """Catches the best tenth, the worst image, and what lies between two images."""
    decibels = np.random.default_rng(0).permutation([*np.arange(30.0, 49), np.inf])
    assert metrics.psnr_metrics(decibels) == {"psnr_median": 39.5, "psnr_p10": 31}
