"""Evaluation: metrics against closed forms, methods that undo themselves, results on disk."""

import json
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from tiny import draw, tiny_pipe

from avq_diffusers import AVQConfig, Codebook, apply_avq, calibrate, remove_avq, select_layers
from avq_diffusers.mini import SCORER, TEST_SEEDS, corrupt, render, sample_scene
from eval import bench, compare, metrics, report, scenes
from eval.methods import EXACT, NO_ATTENTION, ValueProjectionProcessor, attention_method
from eval.pictures import generate

CALIBRATION = ["a"]


@pytest.fixture(scope="module")
def scorer():
    return metrics.Scorer(SCORER)


def noise(count: int, side: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)


def flat(level: int, side: int = 16) -> np.ndarray:
    return np.full((1, side, side, 3), level, np.uint8)


def test_psnr_of_a_constant_error():
    """Fails for uint8 arithmetic that wraps, a peak of 1, or one mean over all pictures."""
    reference = np.concatenate([flat(10), flat(200)])
    images = np.concatenate([flat(7), flat(250)])
    expected = [20 * np.log10(255 / 3), 20 * np.log10(255 / 50)]
    assert metrics.psnr(images, reference) == pytest.approx(expected)
    assert np.isinf(metrics.psnr(reference, reference)).all()


def test_ssim_of_flat_pictures_and_of_equal_ones():
    """Without variance only the luminance term is left: (2ab + c) / (a² + b² + c)."""
    a, b, c = 50 / 255, 100 / 255, 0.01**2
    images, reference = np.concatenate([flat(50), flat(9)]), np.concatenate([flat(100), flat(9)])
    expected = [(2 * a * b + c) / (a * a + b * b + c), 1]
    assert metrics.ssim(images, reference) == pytest.approx(expected, abs=1e-5)
    assert metrics.ssim(noise(2), noise(2)) == pytest.approx([1, 1])
    assert (metrics.ssim(noise(2), noise(2, seed=1)) < 0.2).all()


class GivenFeatures:
    """Stands in for the scorer: the picture's first two bytes number its row of the table."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = torch.from_numpy(table)
        self.num_features = table.shape[1]
        self.model = SimpleNamespace(device=torch.device("cpu"))
        self.batches: list[int] = []

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(images))
        assert images.shape[1:] == (3, 1, 1)
        low, high = images[:, 0, 0, 0].long(), images[:, 1, 0, 0].long()
        return self.table[low + 256 * high]


def numbered(first: int, last: int) -> np.ndarray:
    number = np.arange(first, last)
    pixels = np.stack([number % 256, number // 256, 0 * number], 1)
    return pixels.astype(np.uint8)[:, None, None]


def standard_sample(count: int, width: int, seed: int) -> np.ndarray:
    """Features whose sample mean is exactly 0 and sample covariance exactly the identity."""
    sample = np.random.default_rng(seed).normal(size=(count, width))
    sample -= sample.mean(0)
    return sample @ np.linalg.inv(np.linalg.cholesky(np.cov(sample.T))).T


def test_fid_of_two_gaussians():
    """|m - n|² + Σ (s - t)² for diagonal covariances; fails for a lost last batch as well."""
    mean, other_mean = np.array([1.0, -2, 0]), np.array([0.5, 1, 4])
    scale, other_scale = np.array([1.0, 2, 0.5]), np.array([3.0, 0.25, 0.5])
    real = mean + scale * standard_sample(600, 3, seed=0)
    generated = other_mean + other_scale * standard_sample(300, 3, seed=1)
    scorer = GivenFeatures(np.concatenate([real, generated]))
    expected = ((mean - other_mean) ** 2).sum() + ((scale - other_scale) ** 2).sum()
    assert metrics.fid(scorer, numbered(0, 600), numbered(600, 900)) == pytest.approx(expected)
    assert scorer.batches == [256, 256, 88, 256, 44]


def test_fid_of_correlated_features():
    """Against scipy's matrix root; fails where only variances or no cross term are compared."""
    generator = np.random.default_rng(0)
    real = standard_sample(300, 4, seed=2) @ generator.normal(size=(4, 4))
    generated = standard_sample(300, 4, seed=3) @ generator.normal(size=(4, 4)) + 1
    first, second = np.cov(real.T), np.cov(generated.T)
    root = sqrtm(first @ second).real
    expected = 4 + np.trace(first + second - 2 * root)
    scorer = GivenFeatures(np.concatenate([real, generated]))
    assert metrics.fid(scorer, numbered(0, 300), numbered(300, 600)) == pytest.approx(expected)


def test_fid_is_zero_for_one_set_and_does_not_see_the_order():
    scorer = GivenFeatures(np.random.default_rng(0).normal(size=(1000, 5)))
    real, generated = numbered(0, 500), numbered(500, 1000)
    shuffled = generated[np.random.default_rng(1).permutation(500)]
    assert metrics.fid(scorer, real, real[::-1].copy()) == pytest.approx(0, abs=1e-6)
    distance = metrics.fid(scorer, real, generated)
    assert distance > 1e-3
    assert metrics.fid(scorer, real, shuffled) == pytest.approx(distance, rel=1e-9)
    assert metrics.fid(scorer, generated, real) == pytest.approx(distance, rel=1e-9)


def test_the_scorer_sees_broken_copies_and_one_scale(scorer):
    """Fails where features are blind to copies, or another picture size changes the protocol."""
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:24]]
    others = [sample_scene(seed) for seed in TEST_SEEDS[100:124]]
    real, reference = (np.stack([render(s) for s in group]) for group in (shown, others))
    broken = np.stack([corrupt(scene, seed) for seed, scene in enumerate(shown)])
    distance = metrics.fid(scorer, reference, real)
    assert metrics.fid(scorer, reference, broken) > 1.3 * distance
    doubled = real.repeat(2, 1).repeat(2, 2)
    cropped = doubled[:, 128:384, 128:384]
    features, *others = (scorer(metrics._to_bytes(x)) for x in (real, doubled, cropped))
    apart = torch.pdist(features).mean()
    resized, cut = ((other - features).norm(dim=1).median() / apart for other in others)
    assert resized < 0.2 < 0.5 < cut


def test_clip_scores_rank_the_right_caption_first(scorer, monkeypatch):
    """Fails for captions that lose step with their pictures, at batch borders too."""
    shown = [sample_scene(seed) for seed in TEST_SEEDS[200:210]]
    images = np.stack([render(scene) for scene in shown])
    captions = [scene.caption for scene in shown]
    right = metrics.clip_scores(scorer, images, captions)
    wrong = metrics.clip_scores(scorer, images, captions[1:] + captions[:1])
    assert right.shape == (10,)
    assert (right > wrong + 20).all()
    assert (right <= 100).all()
    monkeypatch.setattr(metrics, "SCORER_BATCH", 4)
    assert metrics.clip_scores(scorer, images, captions) == pytest.approx(right, abs=1e-2)


def test_copy_agreements_leave_out_scenes_without_copies():
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:40]]
    with_copies = [
        scene
        for scene in shown
        if scene.background.kind != "plain"
        or any(group.texture == "patterned" and group.count > 1 for group in scene.groups)
    ]
    assert 0 < len(with_copies) < len(shown)
    real = metrics.copy_agreements(np.stack([render(scene) for scene in shown]), shown)
    broken = metrics.copy_agreements(
        np.stack([corrupt(scene, seed) for seed, scene in enumerate(shown)]), shown
    )
    assert len(real) == len(broken) == len(with_copies)
    assert real == pytest.approx(1, abs=1e-3)
    assert abs(broken.mean()) < 0.15


def test_generate_gives_the_same_picture_whatever_the_batch_size():
    """Fails where noise is drawn per batch; rounding may move a value by one."""
    pipe = tiny_pipe()
    prompts, seeds = ["a", "bb", "a", "a", "ccc"], [3, 4, 5, 3, 6]
    arguments = {"num_inference_steps": 2}
    reference = generate(pipe, prompts, seeds, batch_size=1, **arguments).astype(int)
    assert reference.shape == (5, 128, 128, 3)
    assert np.array_equal(reference[0], reference[3])
    assert abs(reference[0] - reference[2]).max() > 20
    for batch_size in (2, 3, 8):
        pictures = generate(pipe, prompts, seeds, batch_size=batch_size, **arguments)
        assert pictures.dtype == np.uint8
        assert abs(pictures.astype(int) - reference).max() <= 1


@pytest.mark.parametrize(("prompts", "seeds"), [([], []), (["a"], [1, 2])])
def test_generate_wants_one_seed_a_prompt(prompts, seeds):
    with pytest.raises(ValueError, match="expected as many seeds as prompts and at least one, but"):
        generate(tiny_pipe(), prompts, seeds)


@pytest.mark.parametrize("method", [EXACT, NO_ATTENTION, "M4P2C2", "M4"])
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_attention_method_puts_everything_back(method, fails):
    """Fails for processors of another class or order, hooks that stay, or a missing finally."""
    pipe = tiny_pipe()
    exact = draw(pipe)
    before = pipe.unet.attn_processors
    inside = []
    with (
        pytest.raises(KeyError) if fails else nullcontext(),
        attention_method(pipe, method, levels=(0,), calibration_prompts=CALIBRATION),
    ):
        inside.append(draw(pipe))
        if fails:
            raise KeyError
    assert torch.equal(inside[0], exact) == (method == EXACT)
    after = pipe.unet.attn_processors
    assert all(after[name] is processor for name, processor in before.items())
    assert torch.equal(draw(pipe), exact)


def test_methods_change_their_levels_only():
    pipe = tiny_pipe()
    with attention_method(pipe, NO_ATTENTION, levels=(1,)):
        kinds = {layer.level: type(layer.attn.processor) for layer in select_layers(pipe.unet)}
        assert kinds.pop(1) is ValueProjectionProcessor
        assert ValueProjectionProcessor not in kinds.values()
    with attention_method(pipe, "M4P2C2", levels=(1,), calibration_prompts=CALIBRATION):
        assert {
            layer.level for layer in select_layers(pipe.unet) if hasattr(layer.attn, "_avq")
        } == {1}


def test_exact_is_exact_where_the_pipeline_has_avq():
    pipe = tiny_pipe()
    exact = draw(pipe)
    codebooks = calibrate(pipe, ["a"], AVQConfig(4, 2, 0), num_inference_steps=1, progress=False)
    apply_avq(pipe, codebooks)
    with_avq = draw(pipe)
    with attention_method(pipe, EXACT):
        assert torch.equal(draw(pipe), exact)
    assert torch.equal(draw(pipe), with_avq)
    remove_avq(pipe)


def test_an_unknown_method_is_refused():
    with (
        pytest.raises(ValueError, match="expected a configuration such as M64P16C8"),
        attention_method(tiny_pipe(), "nothing"),
    ):
        pass


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
    rows, pictures = compare.compare(
        pipe, methods, prompts, seeds, calibration_prompts=CALIBRATION, num_inference_steps=2
    )
    assert list(pictures) == [EXACT, *methods]
    expected = generate(pipe, ["a", "bb", "a", "bb"], [0, 0, 1, 1], num_inference_steps=2)
    assert np.array_equal(pictures[EXACT], expected)
    for row, method in zip(rows, methods, strict=True):
        assert row["method"] == method
        values = metrics.psnr(pictures[method], expected)
        assert row["psnr"] == pytest.approx(values.tolist())
        assert row["psnr_median"] == pytest.approx(np.median(values))
        assert row["psnr_p10"] == pytest.approx(np.percentile(values, 10))
        assert row["ssim_median"] == pytest.approx(np.median(row["ssim"]))
    table = compare.compare_table(rows).splitlines()
    assert [line.split("|")[1].strip() for line in table] == ["method", "---", *methods]
    compare.compare_sheet(tmp_path / "sheet.png", pictures, prompts)
    assert (tmp_path / "sheet.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("methods", "levels", "message"),
    [
        (["M4P2C2", "nothing"], (0,), "expected a configuration such as M64P16C8 or M256, but got"),
        (["M4P5C2"], (0,), "num_refined must be at most num_parents"),
        (["M4"], (7,), "no self-attention at level 7"),
    ],
)
def test_mistakes_are_found_before_the_first_picture(methods, levels, message):
    """A misspelt third method must not cost the pictures of the first two."""
    pipe = tiny_pipe()
    runs = []
    pipe.unet.register_forward_pre_hook(lambda *_: runs.append(1))
    shown = [sample_scene(0)]
    arguments = {"levels": levels, "calibration_prompts": CALIBRATION}
    with pytest.raises(ValueError, match=message):
        compare.compare(pipe, methods, ["a"], range(1), **arguments)
    with pytest.raises(ValueError, match=message):
        list(scenes.score_methods(pipe, methods, shown, shown, None, **arguments))
    assert not runs


def test_scenes_rows(scorer, monkeypatch):
    """Ceiling, floor and methods, with `generate` replaced by a painter that always draws right."""
    shown = [sample_scene(seed) for seed in TEST_SEEDS[:24]]
    others = [sample_scene(seed) for seed in TEST_SEEDS[100:124]]
    by_caption = {scene.caption: render(scene) for scene in shown}

    def paint(pipe, prompts, seeds, **options):
        assert list(seeds) == list(range(24))
        return np.stack([by_caption[prompt] for prompt in prompts])

    monkeypatch.setattr(scenes, "generate", paint)
    rows = list(
        scenes.score_methods(
            tiny_pipe(), [NO_ATTENTION], shown, others, scorer, calibration_prompts=CALIBRATION
        )
    )
    real, broken, painted = rows
    assert [row["method"] for row in rows] == [scenes.REAL, scenes.BROKEN, NO_ATTENTION]
    assert {**painted, "method": scenes.REAL} == pytest.approx(real)
    assert broken["fid"] > 1.3 * real["fid"]
    assert real["copy_agreement"] > 0.99
    assert abs(broken["copy_agreement"]) < 0.2
    assert real["clip_score"] > 80
    assert 0 < real["clip_score_sem"] < 2
    assert real["num_pictures"] == 24
    table = scenes.scenes_table(rows).splitlines()
    assert len(table) == 5
    assert f"| {real['fid']:.3f} |" in table[2]


def test_save_json_carries_its_environment(tmp_path):
    path = tmp_path / "new" / "result.json"
    report.save_json(path, command="python -m eval x", device="cpu", rows=[{"a": 1}])
    document = json.loads(path.read_text())
    assert document["command"] == "python -m eval x"
    assert document["rows"] == [{"a": 1}]
    assert document["environment"]["torch"] == torch.__version__
    assert {"date", "commit", "device", "python", "diffusers"} <= set(document["environment"])
    assert "CPU" in document["environment"]["device"]
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_save_json_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    """Fails where the target is opened before the content is written."""
    path = tmp_path / "result.json"
    report.save_json(path, command="first", device="cpu")
    before = path.read_bytes()
    with pytest.raises(TypeError, match="not JSON serializable"):
        report.save_json(path, command="second", device="cpu", rows=[object()])
    assert path.read_bytes() == before

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr("pathlib.Path.write_text", full_disk)
    with pytest.raises(OSError, match="no space left"):
        report.save_json(path, command="third", device="cpu")
    assert path.read_bytes() == before


def test_bench_inputs_have_the_layout_of_the_projections():
    """Fails for keys in the order of the codewords they are drawn from, heads first."""
    config = AVQConfig(4, 2, 2)
    query, key, value, codebook = bench.attention_inputs(2, 3, 50, 8, config)
    for tensor in (query, key, value):
        assert tensor.shape == (2, 3, 50, 8)
        assert tensor.transpose(1, 2).is_contiguous()
    assert isinstance(codebook, Codebook)
    torch.testing.assert_close(codebook.children.mean(2), codebook.parents)
    again = bench.attention_inputs(2, 3, 50, 8, config)
    assert all(torch.equal(a, b) for a, b in zip((query, key, value), again[:3], strict=True))
    assert not bench.attention_inputs(1, 2, 20, 8, AVQConfig(4, 0, 0))[3].num_children


def test_bench_attention_rows():
    """Fails for a ratio upside down, or exact attention timed beyond its limit."""
    timings = bench.bench_attention(
        [64, 90],  # a square grid, and a row
        config=AVQConfig(4, 2, 2, 16),
        device=torch.device("cpu"),
        dtype=torch.float32,
        batch=1,
        num_heads=1,
        head_dim=8,
        rounds=1,
        max_exact_tokens=64,
    )
    small, large = bench.attention_rows(timings)
    assert (small["num_tokens"], large["num_tokens"]) == (64, 90)
    assert 0 < small["exact_ms"] < small["avq_ms"] < 1000
    assert small["ratio"] == pytest.approx(small["exact_ms"] / small["avq_ms"])
    assert large["exact_ms"] is None
    assert large["ratio"] is None
    assert bench.attention_table(timings).splitlines()[-1].startswith("| 90 | - | ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("compare --methods nothing", "methods must be exact, value-projection or configurations"),
        ("bench attention --dtype int3", "--dtype must be one of float32, float16, bfloat16"),
        ("scenes --levels zero", "--levels must be numbers such as 0 or 0,1, but got 'zero'"),
        ("bench attention --device abacus", "--device abacus cannot be used"),
    ],
    ids=lambda value: value.split()[0],
)
def test_the_command_ends_mistakes_with_code_2(tmp_path, monkeypatch, capsys, arguments, message):
    from eval import __main__ as command

    argv = ["eval", *arguments.split(), "--output", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as exit_:
        command.main()
    assert exit_.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("eval: ")
    assert message in last
    assert not (tmp_path / "results").exists()


def test_python_m_eval_is_the_command():
    command = [sys.executable, "-m", "eval", "bench", "attention", "--config", "M4P5C2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    message = "eval: num_refined must be at most num_parents, but got 5 > 4."
    assert done.stderr.strip().splitlines()[-1] == message
