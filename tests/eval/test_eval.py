"""Evaluation: metrics against closed forms, methods that undo themselves, results on disk."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import count

import numpy as np
import pytest
import torch
from eval_helpers import CALIBRATION, run_command, scenes_run, score, watched
from PIL import Image
from tiny import draw, own_codebooks, random_codebooks, small_unet, tiny_pipe, tiny_unet

from avq_diffusers import (
    AVQCodebooks,
    AVQConfig,
    apply_avq,
    remove_avq,
    select_layers,
    set_num_refined,
    summary,
)
from avq_diffusers.attention.diagnostics import (
    active_ratio,
    capture,
    commitment_loss,
    leaf_counts,
    quantization_error,
)
from avq_diffusers.attention.orders import query_order
from avq_diffusers.extras.linfusion import (
    LinFusionProcessor,
    load_linfusion,
    remove_linfusion,
    save_linfusion,
)
from avq_diffusers.mini import (
    MINI_CODEBOOKS,
    MINI_SD,
    SCORER,
    TEST_SEEDS,
    copy_agreement,
    corrupt,
    render,
    sample_scene,
)
from eval.codebooks import layer_errors, training
from eval.commands.options import command_line
from eval.methods import (
    Method,
    ValueProjectionProcessor,
    attention_method,
    load_methods,
    prepare_methods,
)
from eval.names import EXACT, NO_ATTENTION, TOME, method_cells
from eval.quality import compare, metrics, scene_rows, scene_runs, scenes
from eval.quality.frechet import fit_gaussian, frechet_distance, jackknife_error
from eval.quality.generation import Sampling, dilation, generate
from eval.quality.protocol import JACKKNIFE_BLOCKS
from eval.quality.samples import Sample, figures
from eval.store import report


@pytest.fixture(scope="module")
def scorer():
    return metrics.Scorer(SCORER)


def noise(count: int, side: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)


def flat(level: int, side: int = 16) -> np.ndarray:
    return np.full((1, side, side, 3), level, np.uint8)


def test_psnr_of_a_constant_error():
    """Fails for uint8 arithmetic that wraps, a peak of 1, or one mean over all images."""
    reference = np.concatenate([flat(10), flat(200)])
    images = np.concatenate([flat(7), flat(250)])
    expected = [20 * np.log10(255 / 3), 20 * np.log10(255 / 50)]
    assert metrics.psnr(images, reference) == pytest.approx(expected)
    assert np.isinf(metrics.psnr(reference, reference)).all()


def test_ssim_of_flat_images_and_of_equal_ones():
    """Without variance only the luminance term is left: (2ab + c) / (a² + b² + c)."""
    a, b, c = 50 / 255, 100 / 255, 0.01**2
    images, reference = np.concatenate([flat(50), flat(9)]), np.concatenate([flat(100), flat(9)])
    expected = [(2 * a * b + c) / (a * a + b * b + c), 1]
    assert metrics.ssim(images, reference) == pytest.approx(expected, abs=1e-5)
    assert metrics.ssim(noise(2), noise(2)) == pytest.approx([1, 1])
    assert (metrics.ssim(noise(2), noise(2, seed=1)) < 0.2).all()


def test_every_image_gives_features():
    """Fails for a lost last batch, and features in another order than their images."""
    batches = []

    def scorer(images):
        batches.append(len(images))
        return images[..., 0, 0].float()

    pixels = noise(600, side=1)
    features = metrics.image_features(scorer, pixels)
    assert batches == [256, 256, 88]
    assert np.array_equal(features, pixels[:, 0, 0])


def fid(scorer, reference: np.ndarray, images: np.ndarray) -> float:
    gaussians = [fit_gaussian(metrics.image_features(scorer, x)) for x in (reference, images)]
    return frechet_distance(*gaussians)


def test_the_scorer_sees_broken_copies_and_one_scale(scorer):
    """Fails where features are blind to copies, or another image size changes the protocol."""
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:8]]
    others = [sample_scene(seed) for seed in TEST_SEEDS[100:108]]
    real, reference = (np.stack([render(s) for s in group]) for group in (shown, others))
    broken = np.stack([corrupt(scene, seed) for seed, scene in enumerate(shown)])
    assert fid(scorer, reference, broken) > 1.3 * fid(scorer, reference, real)
    real = real[:4]
    doubled = real.repeat(2, 1).repeat(2, 2)
    cropped = doubled[:, 128:384, 128:384]
    features, *others = (scorer(metrics._to_bytes(x)) for x in (real, doubled, cropped))
    apart = torch.pdist(features).mean()
    resized, cut = ((other - features).norm(dim=1).median() / apart for other in others)
    assert resized < 0.2 < 0.5 < cut


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
    cosines = scorer.cosines(metrics._to_bytes(images), captions)
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
    pipe = tiny_pipe()
    prompts, seeds = ["a", "bb", "a", "a", "ccc"], [3, 4, 5, 3, 6]
    settings = Sampling(num_inference_steps=2, batch_size=1)
    reference = generate(pipe, prompts, seeds, settings).astype(int)
    assert reference.shape == (5, 128, 128, 3)
    assert np.array_equal(reference[0], reference[3])
    assert abs(reference[0] - reference[2]).max() > 20
    arguments = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(3)}
    expected = pipe("a", guidance_scale=7.5, output_type="np", **arguments).images[0]
    assert abs(reference[0] - 255 * expected).max() <= 0.5 + 1e-3
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
    pipe = tiny_pipe()
    pipe.register_to_config(_name_or_path=model)
    settings = Sampling(num_inference_steps=2, guidance_scale=given)
    (image,) = generate(pipe, ["a"], [3], settings).astype(int)
    arguments = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(3)}
    images = pipe("a", guidance_scale=guidance_scale, output_type="np", **arguments).images
    assert abs(image - 255 * images[0]).max() <= 0.5 + 1e-3


def test_standard_errors_are_of_an_unbiased_variance():
    """Catches a spread over n, one that is not divided by its root, and that of another FID."""
    features = torch.randn(60, 3, generator=torch.manual_seed(0))
    sample = Sample(features, torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0.0, 1.0]))
    reference = fit_gaussian(torch.eye(3))
    found = figures(sample, reference)
    assert found["fid_sem"] == jackknife_error(reference, features, JACKKNIFE_BLOCKS)
    assert found["clip_score_sem"] == pytest.approx(7**0.5 / 3**0.5)
    assert found["copy_agreement_sem"] == pytest.approx(0.5)


@pytest.mark.parametrize(("prompts", "seeds"), [([], []), (["a"], [1, 2])])
def test_generate_wants_one_seed_a_prompt(prompts, seeds):
    with pytest.raises(ValueError, match="expected as many seeds as prompts and at least one, but"):
        generate(tiny_pipe(), prompts, seeds, Sampling())


def prepare(pipe, *names, levels=(0,)):
    return prepare_methods(pipe, names, levels=levels, calibration_prompts=CALIBRATION)


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    """A folder of M4P2C2 codebooks for levels 0 and 1, with changes of the projections."""
    unet = tiny_unet()
    generator = torch.manual_seed(3)
    changes = {
        layer.name: {
            name: 0.05 * torch.randn(parameter.shape, generator=generator)
            for name, parameter in layer.attn.named_parameters()
        }
        for layer in select_layers(unet, (0, 1))
    }
    folder = tmp_path_factory.mktemp("run") / "codebooks"
    random_codebooks(unet, projection_changes=changes, training={"steps": 5}).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def linfusion(tmp_path_factory):
    """A folder of LinFusion layers for level 1."""
    unet = tiny_unet()
    layers = {
        layer.name: LinFusionProcessor(layer.attn.query_dim).state_dict() | layer.attn.state_dict()
        for layer in select_layers(unet, (1,))
    }
    folder = tmp_path_factory.mktemp("run") / "linfusion"
    save_linfusion(unet, layers, folder, training={"steps": 5})
    return folder


@pytest.mark.parametrize(
    "name", [EXACT, NO_ATTENTION, TOME, "M4P2C2", "M4P2C2/own", "DISTILLED", "LINFUSION"]
)
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_attention_method_puts_everything_back(name, fails, distilled, linfusion):
    """Fails for processors of another class or order, hooks that stay, or a missing finally."""
    pipe = tiny_pipe()
    exact = draw(pipe)
    before = pipe.unet.attn_processors
    folders = {"DISTILLED": str(distilled), "LINFUSION": str(linfusion)}
    (method,) = prepare(pipe, folders.get(name, name))
    inside = []
    with pytest.raises(KeyError) if fails else nullcontext(), attention_method(pipe, method):
        inside.append(draw(pipe))
        if fails:
            raise KeyError
    assert torch.equal(inside[0], exact) == (name == EXACT)
    after = pipe.unet.attn_processors
    assert all(after[name] is processor for name, processor in before.items())
    assert torch.equal(draw(pipe), exact)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("M4P2C2/own", AVQConfig(4, 2, 2)),
        ("M4P2C2E8@L01/own1", AVQConfig(4, 2, 2, levels=(0, 1), exact_keys=8, num_updates=1)),
        ("M4P1C2-up_blocks@P3/own", AVQConfig(4, 2, 3, exact=("up_blocks",))),
    ],
)
def test_own_codewords_are_those_of_apply_avq(name, config):
    """Fails for codebooks, another configuration, a suffix that is lost, or a faster route."""
    pipe = tiny_pipe()
    (method,) = prepare(pipe, name)
    assert (method.own, method.codebooks) == (config, None)
    with attention_method(pipe, method):
        drawn = draw(pipe)
    assert torch.equal(drawn, draw(apply_avq(pipe, config, route="always")))


def test_means_are_the_stored_codewords_with_mean_keys():
    pipe = tiny_pipe()
    (means,) = prepare(pipe, "M4P2C2/means")
    assert means.codebooks.avq_config == AVQConfig(4, 2, 2, codewords="means")
    assert (means.origin, means.facts()["config"]) == ("calibrated", "M4P2C2/means")
    drawn = []
    for method in (means, means.with_fields(codewords="stored")):
        with attention_method(pipe, method):
            drawn.append(draw(pipe))
    assert not torch.equal(*drawn)


def test_pooled_blocks_are_for_keys():
    with pytest.raises(ValueError, match="pooled@E64 can only be measured by keys"):
        prepare(tiny_pipe(), "pooled@E64")


def test_methods_change_their_levels_only(distilled):
    """Also fails where a GPU would run exact attention because it is faster there."""
    pipe = tiny_pipe()
    without, calibrated, loaded = prepare(pipe, NO_ATTENTION, "M4P2C2", str(distilled), levels=(1,))
    with attention_method(pipe, without):
        kinds = {layer.level: type(layer.attn.processor) for layer in select_layers(pipe.unet)}
        assert kinds.pop(1) is ValueProjectionProcessor
        assert ValueProjectionProcessor not in kinds.values()
    for method, levels in ((calibrated, {1}), (loaded, {0, 1})):
        with attention_method(pipe, method):
            assert {row.level for row in summary(pipe).rows if row.config} == levels
            chosen = select_layers(pipe.unet, tuple(levels))
            assert {layer.avq_state.route.route for layer in chosen} == {"always"}


@pytest.mark.parametrize("levels", [(0,), (0, 1), (0, 1, 2)])
def test_tome_merges_its_levels(levels):
    """Fails where ToMe stays at level 0 beside methods that change level 1 or 2 as well."""
    pipe = tiny_pipe()
    (method,) = prepare(pipe, TOME, levels=levels)
    tokens = {}

    def note(attn, arguments):
        tokens[by_module[attn]] = arguments[0].shape[1]

    by_module = {layer.attn: layer.level for layer in select_layers(pipe.unet)}
    hooks = [attn.register_forward_pre_hook(note) for attn in by_module]
    draw(pipe)
    whole = dict(tokens)
    with attention_method(pipe, method):
        draw(pipe)
    for hook in hooks:
        hook.remove()
    assert [level for level in range(4) if tokens[level] == whole[level] / 2] == list(levels)
    assert all(tokens[level] == whole[level] for level in range(len(levels), 4))


def test_tome_is_the_same_whatever_was_drawn_before():
    pipe = tiny_pipe()
    (method,) = prepare(pipe, TOME)
    settings = Sampling(num_inference_steps=2, size=128)
    with attention_method(pipe, method):
        first, second = (generate(pipe, ["a fox"], [0], settings) for _ in range(2))
    assert np.array_equal(first, second)


def test_tome_leaves_no_level_out():
    with pytest.raises(ValueError, match=r"from level 0 on, leaving none out, but got levels \(1,"):
        prepare(tiny_pipe(), TOME, levels=(1,))


def test_a_folder_is_its_codebooks_with_any_number_refined(distilled):
    """Fails where changes of projections are lost, or @P changes nothing or the codebooks."""
    pipe = tiny_pipe()
    methods = prepare(pipe, str(distilled), f"{distilled}@P4", f"{distilled}@P0")
    for method, num_refined in zip(methods, (2, 4, 0), strict=True):
        with attention_method(pipe, method):
            drawn = draw(pipe)
        apply_avq(pipe, AVQCodebooks.from_pretrained(distilled))
        set_num_refined(pipe, num_refined)
        assert torch.equal(drawn, draw(pipe))
        remove_avq(pipe)
        facts = method.facts()
        assert facts["config"] == f"M4P{num_refined}C2"
        assert facts["effective_codewords"] == 4 + 2 * num_refined
        assert facts["origin"] == "distilled"
        assert facts["levels"] == [0, 1]
    assert method_cells(methods[1].facts()) == [f"{distilled}@P4 (M4P4C2)", "12"]


def test_a_folder_of_own_codewords_says_so(tmp_path):
    """Fails where a distilled row with own codewords looks like one with mean keys."""
    pipe = tiny_pipe()
    tuned = own_codebooks(pipe.unet, training={"steps": 1})
    tuned.save_pretrained(tmp_path)
    (method,) = prepare(pipe, str(tmp_path))
    facts = method.facts()
    assert (facts["config"], facts["origin"]) == ("M4P2C2/own", "distilled")
    with attention_method(pipe, method):
        drawn = draw(pipe)
    apply_avq(pipe, tuned, route="always")
    assert torch.equal(drawn, draw(pipe))


def test_a_row_says_which_weights_a_folder_had(distilled, linfusion, tmp_path):
    """Fails where a folder that is trained again cannot be told from what it was."""
    folders = [shutil.copytree(path, tmp_path / path.name) for path in (distilled, linfusion)]

    def digests():
        names = [*map(str, folders), f"{folders[0]}@P0", "M4P2C2", EXACT]
        return [method.sha256 for method in load_methods(tiny_pipe(), names, levels=(0,))]

    before = digests()
    assert before == digests()
    assert before[0] == before[2] != before[1] != before[3] is before[4] is None
    config = folders[0] / "config.json"
    config.write_text(config.read_text() + "\n")
    after = digests()
    assert after[0] == after[2] != before[0]
    assert after[1] == before[1]


def test_a_digest_is_of_what_lies_in_the_folder(tmp_path, monkeypatch):
    """Catches a digest of the way to it, and one that a file of another name leaves as it was."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    before = report.folder_digest("a", "config.json")
    assert report.folder_digest(str(tmp_path / "b"), "config.json") == before
    (tmp_path / "b" / "x").write_text("1")
    one = report.folder_digest("b", "config.json")
    (tmp_path / "b" / "x").rename(tmp_path / "b" / "y")
    assert report.folder_digest("b", "config.json") != one
    (tmp_path / "b" / "unet").mkdir()
    (tmp_path / "b" / "unet" / "weights").write_text("1")
    before = report.folder_digest("b", "config.json")
    (tmp_path / "b" / "unet" / "weights").write_text("2")
    assert report.folder_digest("b", "config.json") != before


def test_a_folder_of_linfusion_layers_is_these_layers(linfusion):
    """Fails for layers of another level, or switches that leave or lose something, in any order."""
    pipe = tiny_pipe()
    expected = draw(load_linfusion(pipe, linfusion))
    remove_linfusion(pipe)
    exact = draw(pipe)
    assert (expected - exact).abs().max() > 1e-3
    layers, codebooks = prepare(pipe, str(linfusion), "M4", levels=(0,))
    assert layers.levels == (1,)
    assert torch.equal(draw(pipe), exact)
    for _ in range(2):
        with attention_method(pipe, layers):
            assert torch.equal(draw(pipe), expected)
        with attention_method(pipe, codebooks):
            assert not torch.equal(draw(pipe), expected)
        assert torch.equal(draw(pipe), exact)


def test_what_rows_say_of_their_methods(linfusion):
    methods = prepare(tiny_pipe(), EXACT, NO_ATTENTION, "M6", "M4P2C2@P3", str(linfusion))
    cells = [" | ".join(method_cells(method.facts())) for method in methods]
    expected = ["exact | -", "value-projection | -", "M6 | 6", "M4P2C2@P3 (M4P3C2) | 10"]
    assert cells == [*expected, f"{linfusion} (LinFusion) | -"]
    origins = [None, None, "calibrated", "calibrated", "distilled"]
    assert [method.origin for method in methods] == origins
    assert methods[-1].facts()["effective_codewords"] is None
    assert methods[-1].facts()["levels"] == [1]
    method, own = prepare(tiny_pipe(), "M4P2C2-up_blocks@P1", "M4P2C2-up_blocks@P1/own1")
    assert method.facts()["config"] == "M4P1C2, up_blocks exact"
    assert all("up_blocks" not in name for name in method.codebooks.layer_specs)
    assert own.facts() == {
        "method": own.name,
        "config": "M4P1C2/own1, up_blocks exact",
        "origin": "own",
        "sha256": None,
        "levels": [0],
        "effective_codewords": 6,
    }


@pytest.fixture
def drawn(monkeypatch):
    """Two scenes, whose images are drawn right at once."""
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    images = np.stack([render(scene, 256) for scene in shown])
    monkeypatch.setattr(scenes, "generate", lambda *positional, **options: images)
    return shown


@pytest.mark.parametrize(
    "fields",
    [{}, {"query_tile": 16, "query_order": "random"}, {"importance_tile": 2}, {"key_norm": True}],
)
def test_a_row_says_what_its_computation_has_of_its_own(scorer, drawn, tmp_path, fields):
    """Catches rows that do not tell another computation from the default one, and default ones
    that could no longer be merged with those of older files."""
    random_codebooks(tiny_unet(), AVQConfig(4, 2, 2, **fields)).save_pretrained(tmp_path)
    methods = [str(tmp_path), NO_ATTENTION]
    *_, row, other = score(tiny_pipe(), methods, drawn, scorer, Sampling(size=256))
    assert (row["config"], row.get("fields")) == ("M4P2C2", fields or None)
    assert "fields" not in other


def test_the_time_of_a_row_is_that_of_one_image(scorer, drawn, monkeypatch):
    """Catches the time of all images, and one with the scoring in it."""
    monkeypatch.setattr(scenes, "perf_counter", count(0, 6).__next__)
    *_, row = score(tiny_pipe(), [EXACT], drawn, scorer, Sampling(size=256))
    assert row["seconds_per_image"] == 3


def test_calibration_shares_no_noise_with_images(monkeypatch):
    """Catches calibration on the noise that the first images of a table start from."""
    pipe, seeds = tiny_pipe(), []
    latents = pipe.prepare_latents

    def watched(*arguments):
        seeds.extend(x.initial_seed() for x in arguments if isinstance(x, torch.Generator))
        return latents(*arguments)

    monkeypatch.setattr(pipe, "prepare_latents", watched)
    prepare(pipe, "M4P2C2")
    assert len(seeds) == len(CALIBRATION)
    assert min(seeds) > len(TEST_SEEDS)


def test_effective_codewords_are_the_mean_over_layers():
    """Five layers of 4 + 2 x 2 codewords, and five of 8 + 2 x 2."""
    unet = tiny_unet()
    config = AVQConfig(4, 2, 2, levels=(0, 1), overrides={"1": {"num_parents": 8}})
    facts = Method("x", (0, 1), random_codebooks(unet, config)).facts()
    assert facts["effective_codewords"] == 10
    assert facts["config"] == "M4P2C2, M8P2C2"


@pytest.mark.parametrize("tool", ["AVQ", "LinFusion"])
@pytest.mark.parametrize("name", [EXACT, NO_ATTENTION, "M4"])
def test_a_changed_pipeline_is_refused(name, tool, linfusion):
    """Fails for a method that takes the change away, or measures it as something else."""
    pipe = tiny_pipe()
    method = Method(name, (0,))
    if tool == "AVQ":
        apply_avq(pipe, random_codebooks(pipe.unet))
    else:
        load_linfusion(pipe, linfusion)
    changed = draw(pipe)
    message = rf"has {tool} already; call remove_{tool.lower()}\(pipe\) first"
    with pytest.raises(ValueError, match=message), attention_method(pipe, method):
        pass
    with pytest.raises(ValueError, match=message):
        prepare(pipe, name)
    assert torch.equal(draw(pipe), changed)


def test_value_projection_is_its_formula():
    """to_out(to_v(x)), whatever other tokens hold; attention to all would change token 0."""
    attn = select_layers(tiny_pipe().unet, (0,))[0].attn
    hidden_states = torch.randn(2, 9, attn.to_q.in_features, generator=torch.manual_seed(0))
    exact = attn(hidden_states)
    attn.set_processor(ValueProjectionProcessor())
    output = attn(hidden_states)
    weight = attn.to_out[0].weight @ attn.to_v.weight
    torch.testing.assert_close(output, hidden_states @ weight.T + attn.to_out[0].bias)
    assert not torch.allclose(output, exact, rtol=1e-2, atol=1e-2)


def test_compare_measures_against_exact_at_equal_prompts_and_seeds(tmp_path):
    """Fails for a pairing of prompts and seeds that differs between methods, or from its order."""
    pipe = tiny_pipe()
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


def test_the_tenth_percentile_is_one_of_the_images():
    """Catches the best tenth, the worst image, and what lies between two images."""
    decibels = np.random.default_rng(0).permutation([*np.arange(30.0, 49), np.inf])
    assert compare.psnr_metrics(decibels) == {"psnr_median": 39.5, "psnr_p10": 31}


def test_compare_shows_what_scalecrafter_does():
    """Fails where both rows are drawn with it, or both without, or where methods are compared to
    the row without it."""
    pipe = tiny_pipe()
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


def test_compare_refuses_sizes_before_the_work():
    """Catches a size without settings that is found after the calibration."""
    pipe = tiny_pipe()
    pipe.unet.register_forward_pre_hook(lambda *_: pytest.fail("something was drawn"))
    settings = Sampling(size=192, is_dilated=True)
    with pytest.raises(ValueError, match="there are ScaleCrafter settings for 256 x 256"):
        compare.compare(pipe, ["M4"], ["a"], range(1), settings, calibration_prompts=CALIBRATION)


def test_compare_of_identical_images_is_null_in_json(tmp_path):
    """JSON has no Infinity; its median, too, is one of numbers that are not there."""
    rows, _ = compare.compare(
        tiny_pipe(),
        [EXACT],
        ["a"],
        range(3),
        Sampling(num_inference_steps=1),
        calibration_prompts=CALIBRATION,
    )
    report.save_json(tmp_path / "rows.json", command="", device="cpu", rows=rows)
    text = (tmp_path / "rows.json").read_text()
    (row,) = json.loads(text, parse_constant=lambda name: pytest.fail(name))["rows"]
    assert row["psnr"] == [None] * 3
    assert row["psnr_median"] is row["psnr_p10"] is None
    assert row["ssim_median"] == pytest.approx(1)
    assert "| inf |" in compare.compare_table(rows)


@pytest.mark.parametrize(
    ("methods", "levels", "message"),
    [
        (["M4P2C2", "M4P2C2@Px"], (0,), r"methods must be exact, .*M4P2C2@Px"),
        (["M4P2C2", "M4P2C2@P5"], (0,), "num_refined must be at most num_parents"),
        (["M4P2C2", "DISTILLED@P5"], (0,), "num_refined must be between 0 and 4"),
        (["M4P2C2", "OTHER"], (0,), "codebooks of another model"),
        (["M4P2C2", "EMPTY"], (0,), "there is no file"),
        (["M4P2C2", "nothing"], (0,), "expected a configuration such as M64P16C8 or M256, but got"),
        (["M4P2C2", "runs/x/codebooks"], (0,), "methods: there is no folder runs/x/codebooks"),
        (["M4P2C2", "./codebooks@P8"], (0,), r"methods: there is no folder \./codebooks\."),
        (["M4P2C2", "LINFUSION@P2"], (0,), "LinFusion layers refine no parents, but got .*@P2'"),
        (["M4P2C2", "LINFUSION/none"], (0,), "methods: there is no folder .*none"),
        (["M4P2C2", "BROKEN"], (0,), "is not a complete safetensors file"),
        (["M4P5C2"], (0,), "num_refined must be at most num_parents"),
        (["M4"], (7,), "no self-attention at level 7"),
        (["M4P2C2", "M4P2C2-up_blocks.7"], (0,), "exact must name layers of this UNet"),
    ],
)
def test_mistakes_are_found_before_the_first_image(
    methods, levels, message, distilled, linfusion, tmp_path
):
    """A misspelt third method must not cost the images of the first two."""
    pipe = tiny_pipe()
    before = pipe.unet.attn_processors
    other = tiny_unet(attention_head_dim=4)
    random_codebooks(other).save_pretrained(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    shutil.copytree(linfusion, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"")
    folders = {name: tmp_path / name.lower() for name in ("OTHER", "EMPTY", "BROKEN")}
    folders |= {"DISTILLED": distilled, "LINFUSION": linfusion}
    for name, folder in folders.items():
        methods = [method.replace(name, str(folder)) for method in methods]
    runs = []
    pipe.unet.register_forward_pre_hook(lambda *_: runs.append(1))
    shown = [sample_scene(0)]
    arguments = {"levels": levels, "calibration_prompts": CALIBRATION}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        compare.compare(pipe, methods, ["a"], range(1), Sampling(), **arguments)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        score(pipe, methods, shown, None, Sampling(size=256), levels=levels)
    assert not runs
    assert pipe.unet.attn_processors == before


def test_folders_may_have_any_name(distilled, tmp_path, monkeypatch):
    """Catches a number of refined parents that is read off a path, and a configuration that is
    calibrated although a folder of its name was meant."""
    pipe = tiny_pipe()
    for name in ("a@P2", "M4P2C2", "M4P2C2-seed1"):
        shutil.copytree(distilled, tmp_path / name)
    (method,) = prepare(pipe, f"{tmp_path}/a@P2")
    assert method.num_refined is None
    (method,) = prepare(pipe, f"{tmp_path}/a@P2@P1")
    assert method.num_refined == 1
    monkeypatch.chdir(tmp_path)
    for name in ("M4P2C2", "M4P2C2@P1", "M4P2C2-seed1"):
        source = name.removesuffix("@P1")
        message = f"methods: {source} is a configuration, but also a folder here; write ./{source} "
        with pytest.raises(ValueError, match=message):
            prepare(pipe, name)
        (method,) = prepare(pipe, f"./{name}")
        assert method.sha256 is not None


def test_the_command_that_is_kept(monkeypatch):
    """Catches arguments that a shell would take apart, and the folder where results went once."""
    for output in (["--output", "a b"], ["--output=a"]):
        monkeypatch.setattr(sys, "argv", ["eval", "x", *output, "--methods", "m 1,exact"])
        assert command_line() == "python -m eval x --methods 'm 1,exact'"


@pytest.mark.long
def test_scenes_of_a_compiled_unet(scorer, monkeypatch):
    """Catches a UNet that is not compiled, or code of one method that serves the next."""
    pipe = tiny_pipe(small_unet())
    compile_unet = partial(torch.nn.Module.compile, pipe.unet, backend="eager")
    monkeypatch.setattr(pipe.unet, "compile", compile_unet, raising=False)
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    methods = [EXACT, "M4P2C2"]

    settings = Sampling(num_inference_steps=2, size=128)
    plain = score(pipe, methods, shown, scorer, settings)

    torch._dynamo.utils.counters.clear()
    settings = replace(settings, is_compiled=True, batch_size=1)
    rows = score(pipe, methods, shown, scorer, settings)

    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= len(methods)
    for row, expected in zip(rows, plain, strict=True):
        for name in ("fid", "clip_score", "copy_agreement"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-3), row["method"]
    with pytest.raises(ValueError, match="2 images are not a multiple of 64"):
        score(pipe, methods, shown, scorer, replace(settings, batch_size=64))


def test_merged_runs_are_means_with_standard_errors_over_runs():
    """The standard error of 1, 2, 6 is sqrt(7 / 3); fails for that of the images."""
    runs = [scenes_run(0, 1, clip_score=80.0), scenes_run(1, 2), scenes_run(2, 6, clip_score=100.0)]
    (row,) = scene_runs.merge_runs(runs)
    assert row["method"] == "M4"
    assert row["num_runs"] == 3
    assert (row["fid"], row["clip_score"], row["copy_agreement"]) == (3, 90, 0.5)
    assert row["fid_sem"] == pytest.approx((7 / 3) ** 0.5)
    assert row["clip_score_sem"] == pytest.approx(10 / 3**0.5)
    assert row["copy_agreement_sem"] == 0
    assert "| 3.000 ± 1.528 | - | 90.00 ± 5.77 |" in scene_rows.scenes_table([row])


def test_rows_without_a_figure_are_merged_without_it():
    """Few scenes may hold no copies; catches a traceback at their difference."""
    rows = [scenes_run(0, method=name)["rows"][0] for name in (EXACT, "M4")]
    rows[1]["copy_agreement"] = None
    merged = scene_runs.merge_runs([scenes_run(seed) | {"rows": rows} for seed in (0, 1)])
    assert merged[1]["copy_agreement"] is merged[1]["copy_agreement_less_exact"] is None
    assert merged[1]["fid_less_exact"] == 0


def test_merged_rows_have_their_differences_to_exact_attention():
    """FID is 3, 5, 4 above that of the same run: the noise, 10 to 30, cancels. Catches errors of
    the means in place of the differences, and exact attention of another run of the seed."""

    def run(seed, exact, method, fid):
        rows = [
            scenes_run(seed, x, method=name)["rows"][0]
            for name, x in ((EXACT, exact), (method, fid))
        ]
        rows += [
            scenes_run(seed, 0.0, method=x)["rows"][0] for x in (scene_rows.REAL, scene_rows.BROKEN)
        ]
        return scenes_run(seed) | {"rows": rows}

    runs = [run(0, 10, "M4", 13), run(1, 20, "M4", 25), run(2, 99, "M5", 0), run(2, 30, "M4", 34)]
    rows = {row["method"]: row for row in scene_runs.merge_runs(runs)}
    assert rows["M4"]["fid_less_exact"] == pytest.approx(4)
    assert rows["M4"]["fid_less_exact_sem"] == pytest.approx(1 / 3**0.5)
    assert rows["M4"]["clip_score_less_exact"] == rows["M4"]["copy_agreement_less_exact_sem"] == 0
    for name in (EXACT, scene_rows.REAL, scene_rows.BROKEN):
        assert rows[name]["fid_less_exact"] is None
    (line,) = scene_rows.differences_table(list(rows.values())).splitlines()[2:]
    assert line == "| M4 | - | - | +4.000 ± 0.577 | +0.000 ± 0.000 | +0.0000 ± 0.0000 |"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([], r"expected results of scenes with different seeds, but got seeds \[0\]"),
        ([scenes_run(0)], r"different seeds, but got seeds \[0, 0\]"),
        ([{"rows": []}], r"different seeds, but got seeds \[0, None\]"),
        ([scenes_run(1, method="M5")], "must have the same methods and images"),
        ([scenes_run(1, num_images=2)], "must have the same methods and images"),
        ([scenes_run(1, dtype="double")], "and the same num_inference_steps, dtype"),
        ([scenes_run(1) | {"size": 512}], "and the same .*size, scalecrafter"),
        ([scenes_run(1) | {"scalecrafter": True}], "and the same .*size, scalecrafter"),
        ([{**scenes_run(1), "rows": []}], "must have the same methods and images"),
        (
            [scenes_run(seed) | {"model": model} for seed, model in ((1, "a"), (2, "b"))],
            "and the same .*, model, model_sha256, scorer, scorer_sha256, guidance_scale",
        ),
        ([scenes_run(n) | {"scorer": str(n)} for n in (1, 2)], "and the same .*scorer"),
        ([scenes_run(n) | {"guidance_scale": n} for n in (1, 2)], "and the same .*guidance_scale"),
    ],
)
def test_runs_of_another_protocol_are_not_merged(other, message):
    with pytest.raises(ValueError, match=message):
        scene_runs.merge_runs([scenes_run(0), *other])


@pytest.mark.parametrize(("first", "second"), [(0, 4), (4, 0), (9, 5)])
def test_runs_that_share_noise_are_not_merged(first, second):
    """Catches seeds that only differ; ranges that touch are merged."""
    runs = [scenes_run(seed, num_images=5) for seed in (first, second)]
    low = min(first, second)
    message = f"the seeds {low} to {low + 4} and {low + 4} to {low + 8}"
    with pytest.raises(ValueError, match=message):
        scene_runs.merge_runs(runs)
    (row,) = scene_runs.merge_runs([runs[0], scenes_run(first + 5, num_images=5)])
    assert row["num_runs"] == 2


def test_runs_of_one_seed_are_joined():
    """Catches a row counted twice or under another level, and one that a seed lacks."""

    def run(seed, **fids):
        rows = []
        for name, fid in fids.items():
            method, _, level = name.partition("_")
            (row,) = scenes_run(seed, fid, method=method)["rows"]
            rows.append(row | {"levels": [int(level)]})
        return scenes_run(seed) | {"rows": rows}

    runs = [
        run(0, exact_0=1.0, M4_0=2.0),
        run(0, exact_1=5.0, M4_1=3.0),
        run(1, exact_1=3.0, M4_1=5.0, M4_0=4.0, M9_0=1.0),
    ]
    rows = scene_runs.merge_runs(runs)
    found = [(*scene_rows.row_key(row), row["fid"], row["num_runs"]) for row in rows]
    assert found == [("exact", (), 2, 2), ("M4", (0,), 3, 2), ("M4", (1,), 4, 2)]
    changed = run(1, M4_0=4.0)
    changed["rows"][0]["sha256"] = "another folder"
    with pytest.raises(ValueError, match="the same methods and images"):
        scene_runs.merge_runs([*runs, changed])


def test_runs_of_older_files_are_merged():
    """Catches a file that does not say its model refused beside one that does."""
    (row,) = scene_runs.merge_runs([scenes_run(0), scenes_run(1) | {"model": "a", "scorer": "b"}])
    assert row["num_runs"] == 2


PROJECTIONS = ("to_q.weight", "to_k.weight")
LAYERS_OF_BOTH_LEVELS = [layer.name for layer in select_layers(tiny_unet(), (0, 1))]


def relative(errors, expected) -> float:
    """Sum of squared differences over sum of squares, of lists of tensors."""
    pairs = list(zip(errors, expected, strict=True))
    return float(
        sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)
    )


def test_errors_by_hand(distilled):
    """Fails for timesteps that are averaged and not pooled, a teacher that is not exact, forced
    errors of the student's own input, keys without the projection's change, or P that stays."""
    pipe = tiny_pipe()
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    methods = layer_errors.elastic(prepare(pipe, str(distilled)), (0, 3, 9))
    assert [method.num_refined for method in methods] == [0, 3]
    with pytest.raises(ValueError, match="refines at most 4 parents, but --refined asks for 8, 9"):
        layer_errors.elastic(prepare(pipe, str(distilled)), (8, 9))
    rows = layer_errors.measure_errors(pipe, methods, shown, num_timesteps=2)

    batches = list(layer_errors.noised_scenes(pipe, shown, 2))
    codebooks = AVQCodebooks.from_pretrained(distilled)
    teacher = [watched(pipe, inputs) for inputs in batches]
    for row, num_refined in zip(rows, (0, 3), strict=True):
        apply_avq(pipe, codebooks)
        set_num_refined(pipe, num_refined)
        student = [watched(pipe, inputs) for inputs in batches]
        outputs, expected = [x for x, _ in student], [x for x, _ in teacher]
        assert row["output_error"] == pytest.approx(relative(outputs, expected) ** 0.5, rel=1e-4)
        at = [relative([x], [y]) ** 0.5 for x, y in zip(outputs, expected, strict=True)]
        assert row["output_error_at"] == pytest.approx({"250": at[0], "750": at[1]}, rel=1e-4)
        assert list(row["layers"]) == LAYERS_OF_BOTH_LEVELS
        for index, layer in enumerate(select_layers(pipe.unet, (0, 1))):
            figures = row["layers"][layer.name]
            expected = [calls[layer.name][1] for _, calls in teacher]
            own = [calls[layer.name] for _, calls in student]
            value = relative([output for _, output in own], expected)
            assert figures["feature_relative_mse"] == pytest.approx(value, rel=1e-4)
            mse = torch.stack([x for _, x in own]).sub(torch.stack(expected)).square().mean()
            assert figures["feature_mse"] == pytest.approx(float(mse), rel=1e-4)
            # The first layer has no errors before it, the last one all.
            forced = figures["forced_relative_mse"]
            assert (forced == pytest.approx(value, rel=1e-4)) == (index == 0)
            changes = codebooks.projection_changes(layer.name)
            query, key = (
                (torch.stack([x for x, _ in own]) @ (weight + changes[name]).T)
                .unflatten(-1, (layer.num_heads, -1))
                .transpose(2, 3)
                for name, weight in layer.attn.state_dict().items()
                if name in PROJECTIONS
            )
            keys = key.flatten(0, 1)
            error = quantization_error(
                keys, codebooks.codebook(layer.name), codewords="stored"
            ).mean()
            assert figures["quantization_error"] == pytest.approx(float(error), rel=1e-4)
            counts = leaf_counts(keys, codebooks.codebook(layer.name))
            assert figures["active_ratio"] == pytest.approx(float(active_ratio(counts).mean()))
            side = 16 >> layer.level
            captured = capture(
                query[:, 0],  # of the first image of both timesteps
                key[:, 0],
                codebooks.codebook(layer.name),
                num_refined,
                codewords="stored",
                query_tile=16,
                query_order=query_order(side, side),
            )
            assert figures["capture"] == pytest.approx(float(captured.mean()), rel=1e-4)
        for name in ("feature_relative_mse", "forced_relative_mse", "capture"):
            layers = [figures[name] for figures in row["layers"].values()]
            assert row[name] == pytest.approx(np.mean(layers))
        remove_avq(pipe)


@torch.no_grad()
def test_noised_scenes_are_what_the_model_sees_in_training():
    """Catches latents or pixels of another scale, one noise for all steps, and others' captions."""
    pipe = tiny_pipe()
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    pixels = np.stack([render(scene, 128) for scene in shown]).transpose(0, 3, 1, 2) / 255
    pixels = torch.from_numpy(2 * pixels - 1).float()
    clean = pipe.vae.encode(pixels).latent_dist.mode() * pipe.vae.config.scaling_factor
    text_states = [pipe.encode_prompt(x.caption, "cpu", 1, False)[0] for x in shown]
    batches = list(layer_errors.noised_scenes(pipe, shown, 2))
    for index, (latents, steps, states) in enumerate(batches):
        step = (250, 750)[index]
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(index))
        share = pipe.scheduler.alphas_cumprod[step]
        torch.testing.assert_close(latents, share.sqrt() * clean + (1 - share).sqrt() * noise)
        assert steps.tolist() == [step, step]
        torch.testing.assert_close(states, torch.cat(text_states))


def test_codebook_figures_are_of_keys_after_their_norm():
    pipe, rows = tiny_pipe(), []
    codebooks = random_codebooks(pipe.unet, AVQConfig(4, 2, 2, key_norm=True))
    for weight in (1.0, 0.0):  # 0 makes all keys one
        for name in codebooks.layer_specs:
            torch.nn.init.constant_(codebooks.key_norm(name).weight, weight)
        method = Method("m", (0,), codebooks)
        scene = sample_scene(TEST_SEEDS[0])
        rows += layer_errors.measure_errors(pipe, [method], [scene], num_timesteps=1)
    assert rows[0]["perplexity"] > 1.01
    assert rows[1]["perplexity"] == pytest.approx(1)


def test_forced_errors_are_those_of_a_layer_alone(distilled):
    """Where AVQ replaces one layer only, forced and own input are one, in every layer."""
    pipe = tiny_pipe()
    shown = [sample_scene(TEST_SEEDS[0])]
    (method,) = prepare(pipe, f"{distilled}@P3")
    (row,) = layer_errors.measure_errors(pipe, [method], shown, num_timesteps=1)
    (inputs,) = layer_errors.noised_scenes(pipe, shown, 1)
    _, teacher = watched(pipe, inputs)
    for name in LAYERS_OF_BOTH_LEVELS[1::4]:
        exact = {
            layer.name: layer.attn.processor
            for layer in select_layers(pipe.unet, (0, 1))
            if layer.name != name
        }
        with attention_method(pipe, method):
            for layer in select_layers(pipe.unet, (0, 1)):
                if layer.name in exact:
                    layer.attn.set_processor(exact[layer.name])
            _, alone = watched(pipe, inputs)
        expected = relative([alone[name][1]], [teacher[name][1]])
        forced = row["layers"][name]["forced_relative_mse"]
        assert forced == pytest.approx(expected, rel=1e-3)


def test_errors_are_those_of_layers_that_are_not_exact():
    """Fails where layers that stay exact get figures, or where a row does not name them."""
    pipe = tiny_pipe()
    names = [layer.name for layer in select_layers(pipe.unet, (0, 1))]
    config = AVQConfig(4, 2, 2, query_tile=16, levels=(0, 1), exact=("up_blocks",))
    method = Method("x", (0, 1), random_codebooks(pipe.unet, config))
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    (row,) = layer_errors.measure_errors(pipe, [method], shown, num_timesteps=1)
    assert list(row["layers"]) == [name for name in names if not name.startswith("up_blocks.")]
    assert row["config"] == "M4P2C2, up_blocks exact"


def test_errors_of_own_codewords_by_hand():
    """Fails for figures of stored codewords, keys of all steps or images together, another order,
    or layers that stay exact; elastic numbers and other fields apply to own codewords too."""
    pipe = tiny_pipe()
    config = AVQConfig(6, 2, 2, query_tile=16, exact=("up_blocks",), num_updates=1)
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    own = Method("x", (0,), own=replace(config, query_order="raster"))
    _, three = layer_errors.elastic([own.with_fields(query_order="gilbert")], (1, 3))
    (row,) = layer_errors.measure_errors(pipe, [three], shown, num_timesteps=2)
    assert (row["config"], row["is_flat"]) == ("M6P3C2/own1, up_blocks exact", False)
    (layer, *_), names = zip(*[(x, x.name) for x in select_layers(pipe.unet, (0,))], strict=True)
    assert list(row["layers"]) == [name for name in names if not name.startswith("up_blocks.")]

    batches = list(layer_errors.noised_scenes(pipe, shown, 2))
    apply_avq(pipe, replace(config, num_refined=3), route="always")
    options = {"num_parents": 6, "num_children": 2, "num_updates": 1, "query_tile": 16}
    options["query_order"] = query_order(16, 16)
    found = {"capture": [], "quantization_error": [], "active_ratio": [], "commitment_loss": []}
    for inputs in batches:
        _, calls = watched(pipe, inputs)
        query, key = (
            project(calls[layer.name][0]).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
            for project in (layer.attn.to_q, layer.attn.to_k)
        )
        found["capture"].append(capture(query[:1], key[:1], None, 3, **options).mean())
        found["quantization_error"].append(quantization_error(key, None, **options).mean())
        found["commitment_loss"].append(commitment_loss(key, None, **options).mean())
        for image in key.split(1):
            ratio = active_ratio(leaf_counts(image, None, **options))
            found["active_ratio"].append(ratio.mean())
    for name, values in found.items():
        expected = float(torch.stack(values).mean())
        assert row["layers"][layer.name][name] == pytest.approx(expected, rel=1e-4)


def test_errors_of_methods_without_codebooks(linfusion):
    """Exact has none, the controls have; all figures of codebooks are missing."""
    pipe = tiny_pipe()
    names = [EXACT, NO_ATTENTION, "M4", str(linfusion)]
    methods = layer_errors.elastic(prepare(pipe, *names), (0, 1))
    assert [method.name for method in methods] == names
    shown = [sample_scene(TEST_SEEDS[0])]
    exact, control, flat_vq, linear = layer_errors.measure_errors(
        pipe, methods, shown, num_timesteps=1
    )
    for name in ("output_error", "feature_mse", "feature_relative_mse", "forced_relative_mse"):
        assert exact[name] == 0 < flat_vq[name] < control[name]
        assert linear[name] > 0
    assert exact["quantization_error"] is control["capture"] is linear["active_ratio"] is None
    assert linear["layers"].keys() == {x.name for x in select_layers(pipe.unet, (1,))}
    table = layer_errors.errors_table([exact, control, flat_vq, linear]).splitlines()
    assert table[2] == "| exact | - | 0 | 0 | 0 | 0 | - | - | - |"
    assert table[5].startswith(f"| {linfusion} (LinFusion) | - | ")


def test_error_panels_have_a_line_for_each_codebook():
    """Fails for a flat codebook that is joined to a two-level one, or points out of order."""

    def row(method, config, effective, origin):
        figures = dict.fromkeys([*layer_errors.PLOTTED, "capture", "num_refined"], 1 / effective)
        facts = {"method": method, "config": config, "origin": origin}
        facts["is_flat"] = config in ("M9", "M4")
        return {**facts, "effective_codewords": effective, **figures}

    rows = [
        row("M8P4C2", "M8P4C2", 16, "calibrated"),
        row("M8P4C2", "M8P0C2", 8, "calibrated"),
        row("run", "M8P4C2", 16, "distilled"),
        row("M9", "M9", 9, "calibrated"),
        row("M4", "M4", 4, "calibrated"),
        {"method": EXACT, "effective_codewords": None},
    ]
    panel = layer_errors.error_panels(rows)[0][0]
    lines = {line.label: (line.x, line.y) for line in panel.lines}
    assert lines == {
        "M8P4C2, calibrated": ([8, 16], [1 / 8, 1 / 16]),
        "run, distilled": ([16], [1 / 16]),
        "flat VQ, calibrated": ([4, 9], [1 / 4, 1 / 9]),
    }


def write_log(folder, lines, end=""):
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return folder


def test_training_curves_are_means_over_equal_parts(tmp_path):
    """Fails for figures by layer in either form, a preview line of its own, or a cut last line."""
    lines = [
        {"step": 1, "samples": 4, "loss": 8.0, "quantization_error": {"a.b": 0.5, "c": 0.1}},
        {"step": 2, "samples": 8, "loss": 4.0, "quantization_error/a.b": 0.3},
        {"step": 2, "capture": {"a.b": 0.9}},
        {"step": 3, "samples": 12, "loss": 1.0, "note": "text", "final": True},
    ]
    steps = training.read_run(write_log(tmp_path / "run", lines, end='{"step": 4, "lo'))
    assert training.thin(steps, 2) == {
        "step": [1.5, 3],
        "samples": [6, 12],
        "loss": [6, 1],
        "quantization_error/a.b": [0.4, None],
        "quantization_error/c": [0.1, None],
        "capture/a.b": [0.9, None],
    }
    assert training.thin(steps, 100)["loss"] == [8, 4, 1]


def test_training_panels():
    """Layers lie faint behind their mean; runs without a count of samples are shown over steps."""
    first = {"step": [1, 2], "samples": [10, 20], "loss": [3, 1], "active_ratio/a": [0.2, 0.4]}
    first["active_ratio/b"] = [0.4, None]
    second = {"step": [5], "samples": [6], "loss": [2]}
    (loss,), (ratio,) = training.training_rows({"one": first, "two": second})
    assert (loss.title, ratio.title) == ("loss", "active ratio")
    lines = [(line.label, line.x, line.y) for line in loss.lines]
    assert lines == [("one", [10, 20], [3, 1]), ("two", [6], [2])]
    assert [x.y for x in ratio.lines] == [[pytest.approx(0.3), None]]
    assert [x.y for x in ratio.faint] == [[0.2, 0.4], [0.4, None]]
    del second["samples"]
    (loss,), _ = training.training_rows({"one": first, "two": second})
    assert [line.x for line in loss.lines] == [[1, 2], [5]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is missing, or holds no step yet"),
        ("", "holds no step yet"),
        ('{"step": 1}\n[1]\n', "line 2 of .* is not a JSON object with a step"),
        ('{"step": 1}\n{"loss": 1}\n', "line 2 of .* is not a JSON object with a step"),
        ("nonsense\n", "line 1 of .* is not a JSON object with a step"),
    ],
)
def test_a_bad_log_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        training.read_run(tmp_path)


def failed_command(monkeypatch, capsys, *arguments):
    """Exit code and last line of errors of a command that ends with a sentence."""
    from eval import __main__ as command

    monkeypatch.setattr(sys, "argv", ["eval", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        command.main()
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("eval: ")
    return exit_.value.code, last


def test_the_training_command_writes_curves_and_plot(tmp_path, monkeypatch):
    steps = [{"step": n, "samples": 2 * n, "loss": 1 / n} for n in range(1, 9)]
    runs = [str(write_log(tmp_path / name, steps)) for name in ("a", "b")]
    arguments = ["--name", "curves", "--points", 4, "--output", tmp_path]
    run_command(monkeypatch, "training", "--runs", ",".join(runs), *arguments)
    document = json.loads((tmp_path / "curves.json").read_text())
    assert list(document["runs"]) == runs
    assert document["runs"][runs[0]]["step"] == [1.5, 3.5, 5.5, 7.5]
    assert Image.open(tmp_path / "curves.png").size[0] > 300


def test_the_merge_command(tmp_path, monkeypatch, capsys):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    commands = [f"python -m eval scenes --first-seed {seed}" for seed in (1, 3)]
    for file, command, fid in zip(files, commands, (1, 3), strict=True):
        run = scenes_run(seed=fid, fid=fid) | {"model": "mini-sd"}
        run["rows"] += [{**run["rows"][0], "method": "M5"}] * (fid == 3)
        report.save_json(file, command=command, device="cpu", **run)
    run_command(monkeypatch, "merge", *files, "--output", tmp_path / "both.json")
    shown = capsys.readouterr().out
    assert "| M4 | - | - | 2.000 ± 1.000 |" in shown
    assert "Left out, as not every seed has it: M5, levels []" in shown
    document = json.loads((tmp_path / "both.json").read_text())
    assert [run["command"] for run in document["runs"]] == commands
    assert not any("rows" in run for run in document["runs"])
    assert document["rows"][0]["fid"] == 2
    assert (document["model"], document["dtype"]) == ("mini-sd", "half")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "x.json is not a result of python -m eval"),
        ({"command": "python -m eval table a"}, "but these are of table"),
        ({"command": "python -m eval scenes"}, "x.json is not a complete result .*'rows'"),
        ({"command": "python -m eval scenes", "rows": [1]}, "x.json is not a complete result"),
        (
            {"command": "python -m eval scenes", "rows": [], "num_images": 1},
            "x.json is not a complete result .*'first_seed'",
        ),
    ],
)
def test_the_merge_command_names_a_file_that_does_not_fit(
    tmp_path, monkeypatch, capsys, content, message
):
    """Catches a traceback, and a sentence that does not say which file it is."""
    (tmp_path / "x.json").write_text(json.dumps(content))
    code, last = failed_command(
        monkeypatch, capsys, "merge", tmp_path / "x.json", "--output", tmp_path / "y.json"
    )
    assert code == 2
    assert re.search(message, last)
    assert not (tmp_path / "y.json").exists()


def test_errors_at_twice_the_size(model, tmp_path, monkeypatch, distilled):
    """Against a pass by hand; catches images of the usual size, and convolutions as they were."""
    pipe = tiny_pipe()
    places = ["--methods", distilled, "--model", model, "--output", tmp_path]
    options = ["--images", 2, "--timesteps", 1, "--refined", 2, "--size", 256, "--scalecrafter"]
    run_command(monkeypatch, "errors", *places, *options)
    document = json.loads((tmp_path / "errors_levels0_256_scalecrafter.json").read_text())
    assert (document["size"], document["scalecrafter"]) == (256, True)
    (row,) = document["rows"]

    shown = [sample_scene(seed) for seed in TEST_SEEDS[:2]]
    ((latents, step, text_states),) = layer_errors.noised_scenes(pipe, shown, 1, 256)
    assert latents.shape[-2:] == (32, 32)
    (method,) = prepare(pipe, f"{distilled}@P2")
    found = []
    for dilates in (True, False):
        with dilation(pipe, Sampling(size=256, is_dilated=dilates)), torch.no_grad():
            expected = pipe.unet(latents, step, text_states).sample
            with attention_method(pipe, method):
                output = pipe.unet(latents, step, text_states).sample
        found.append(float((output - expected).norm() / expected.norm()))
    assert row["output_error"] == pytest.approx(found[0], rel=1e-4)
    assert row["output_error"] != pytest.approx(found[1], rel=1e-2)


def test_nothing_but_json_is_written(tmp_path):
    """Infinity and NaN become null at any depth, other numbers stay."""
    rows = [{"a": float("inf"), "b": (1.5, float("nan")), "c": [-float("inf"), None, 2]}]
    report.save_json(tmp_path / "x.json", command="", device="cpu", rows=rows)
    text = (tmp_path / "x.json").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(name))["rows"]
    assert found == [{"a": None, "b": [1.5, None], "c": [None, None, 2]}]


def test_save_json_carries_its_environment(tmp_path):
    path = tmp_path / "new" / "result.json"
    report.save_json(path, command="python -m eval x", device="cpu", rows=[{"a": 1}])
    document = json.loads(path.read_text())
    assert document["command"] == "python -m eval x"
    assert document["rows"] == [{"a": 1}]
    assert document["environment"]["torch"] == version("torch")
    assert {"date", "commit", "device", "python", "diffusers"} <= set(document["environment"])
    assert "CPU" in document["environment"]["device"]
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_a_result_says_whether_its_commit_is_the_code_that_ran(tmp_path, monkeypatch):
    """Catches changed code that passes for its commit, and results that change it."""
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    monkeypatch.setattr(report, "__file__", str(tmp_path / "eval" / "store" / "report.py"))
    (tmp_path / "eval").mkdir()

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True)

    def commit():
        return report.environment("cpu")["commit"]

    assert commit() == "unknown"
    for name in ("report.py", "result.json"):
        (tmp_path / "eval" / name).write_text("1")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
        git(*arguments)
    (tmp_path / "eval" / "result.json").write_text("2")
    head = commit()
    assert re.fullmatch("[0-9a-f]{40}", head)
    (tmp_path / "eval" / "report.py").write_text("2")
    assert commit() == f"{head}+changes"
    monkeypatch.setenv("GIT_COMMIT", "a copy's")
    assert commit() == "a copy's"


def test_save_json_keeps_the_old_file_when_it_fails(tmp_path):
    """Fails where the target is opened before the content is written."""
    path = tmp_path / "result.json"
    report.save_json(path, command="first", device="cpu")
    before = path.read_bytes()
    with pytest.raises(TypeError, match="not JSON serializable"):
        report.save_json(path, command="second", device="cpu", rows=[object()])
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "compare --methods nothing",
            "methods must be exact, value-projection, tome, fa2, cudnn, limit, linfusion, folders",
        ),
        ("bench attention --dtype int3", "--dtype must be one of float32, float16, bfloat16"),
        ("scenes --levels zero", "--levels must be numbers such as 0 or 0,1, but got 'zero'"),
        ("errors --methods exact,tome", "but layers of tome see merged tokens"),
        ("bench attention --device abacus", "--device abacus cannot be used"),
        ("analyse heads tails", "analyses are heads, layers, utilisation, order, importance, but"),
        ("analyse layers --methods exact", "needs methods with codewords, but got 'exact'"),
        (
            f"analyse layers order --methods {MINI_CODEBOOKS}@P0",
            "the analysis order needs methods that refine parents, but got",
        ),
        ("errors --size 500", "eval: --size must be a multiple of 64, but got 500."),
        ("compare --size 0", "eval: --size must be a multiple of 64, but got 0."),
        ("compare --size 100", "eval: --size must be a multiple of 64, but got 100."),
    ],
)
def test_the_command_ends_mistakes_with_code_2(tmp_path, monkeypatch, capsys, arguments, message):
    code, last = failed_command(
        monkeypatch, capsys, *arguments.split(), "--output", tmp_path / "results"
    )
    assert code == 2
    assert message in last
    assert not (tmp_path / "results").exists()


@pytest.mark.long
def test_python_m_eval_is_the_command():
    command = [sys.executable, "-m", "eval", "bench", "attention", "--config", "M4P5C2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    message = "eval: num_refined must be at most num_parents, but got 5 > 4."
    assert done.stderr.strip().splitlines()[-1] == message
