"""Calibration: what is sampled, what is fitted, what is reported, and that the pipeline is left."""

from functools import partial

import pytest
import torch
from cases import OPTIONS, unchecked_call
from tiny import CONFIG, LAYER, draw, random_codebooks, two_level_pipe
from tiny_transformers import sd3_pipe

from avq_diffusers import AVQConfig, apply_avq, avq_disabled, calibrate, select_layers, summary
from avq_diffusers.attention.diagnostics import capture
from avq_diffusers.attention.orders import query_order
from avq_diffusers.hosts.codebooks.calibration import _LayerSample
from avq_diffusers.hosts.core.layers import LayerSpec

PROMPTS = ["a red fox", "two blue hearts"]
STEPS = 2


def fit(pipe, config=CONFIG, prompts=PROMPTS, **arguments):
    defaults = {"num_inference_steps": STEPS, "keys_per_layer": 2048, "progress": False}
    return calibrate(pipe, prompts, config, **defaults | arguments)


def figures(codebooks) -> dict[str, dict[str, float]]:
    return codebooks.config["calibration"]["layers"]


def equal(first, second) -> bool:
    second = second.state_dict()
    return all(torch.equal(value, second[name]) for name, value in first.state_dict().items())


def projected(pipe, layers, *names):
    """Queries or keys (B, H, N, D) of layers in every call from now on, by layer name."""
    calls = {layer.name: [] for layer in layers}

    def see(layer, projection, args, output):
        heads = output.detach().unflatten(-1, (layer.num_heads, -1))
        calls[layer.name].append(heads.transpose(1, 2))

    for layer in layers:
        for name in names:
            layer.attn.get_submodule(name).register_forward_hook(partial(see, layer))
    return calls


@pytest.fixture
def pipe():
    return two_level_pipe()


@pytest.fixture(scope="module")
def calibrated():
    return fit(two_level_pipe())


class TestSample:
    def stream(self, capacity: int, seed: int = 0, batch: int = 2, tokens: int = 50):
        """A sample of 1000 keys in 10 calls that hold their own number."""
        sample = _LayerSample(LayerSpec("layer", 0, 1, 1), capacity, 0, seed)
        sizes = []
        for first in range(0, 1000, batch * tokens):
            key = torch.arange(first, first + batch * tokens).float().view(batch, 1, tokens, 1)
            sample.attend(*unchecked_call(key, key, key, **OPTIONS), "auto")
            sizes.append(len(sample.flat_keys))
        return sample.keys.flatten().long(), sizes

    def test_is_uniform_over_calls_batch_and_tokens(self):
        """Fails for the first keys, the last keys, halving at each call, and priorities that fall
        out of step with keys."""
        numbers, sizes = self.stream(capacity=5000)  # a short stream is kept whole
        assert torch.equal(numbers.sort().values, torch.arange(1000))
        numbers, sizes = self.stream(capacity=130)
        assert sizes == [100] + [130] * 9
        assert len(numbers.unique()) == 130
        counts = torch.zeros(1000)
        draws = 200
        for seed in range(draws):
            numbers, _ = self.stream(capacity=130, seed=seed)
            counts[numbers] += 1
        share = 0.13
        for size in (100, 50, 10):  # a call, an image of a call, neighbours
            cells = counts.view(-1, size).sum(1)
            expected = draws * size * share
            deviation = (draws * size * share * (1 - share)) ** 0.5
            assert (cells - expected).abs().max() < 5 * deviation
        assert (counts > 0).all()

    def test_every_timestep_of_every_prompt(self, pipe):
        """Fails where only some calls, or one half of the guided batch, are seen: the codeword of
        all keys is their mean."""
        layers = select_layers(pipe.unet, (0,))
        calls = projected(pipe, layers, "to_k")
        codebooks = fit(pipe, AVQConfig.parse("M1"), keys_per_layer=10**6)
        for layer in layers:
            keys = torch.cat(calls[layer.name]).transpose(0, 1).flatten(1, 2)
            assert keys.shape[1] == len(PROMPTS) * STEPS * 2 * 256
            (parents,) = codebooks.codebook(layer.name).parents.unbind(1)
            torch.testing.assert_close(parents, keys.mean(1), rtol=1e-4, atol=1e-5)


class TestRun:
    def test_same_seed_same_codebooks_other_seed_others(self, calibrated):
        """Fails where noise, sample or k-means read the global generator, or ignore the seed."""
        torch.manual_seed(123)
        assert equal(calibrated, fit(two_level_pipe()))
        assert not equal(calibrated, fit(two_level_pipe(), seed=1))

    def test_prompt_i_runs_with_seed_plus_i(self, pipe):
        """Fails where the noise ignores the seed, or every prompt gets the same noise."""
        inputs = []
        pipe.unet.register_forward_pre_hook(lambda _, args: inputs.append(args[0][:1]))
        fit(pipe, seed=5)
        calibrated_on = inputs[0], inputs[STEPS]
        for index, first in enumerate(calibrated_on):
            inputs.clear()
            draw(pipe, seed=5 + index, num_inference_steps=STEPS)
            assert torch.equal(inputs[0], first)

    def test_the_pipeline_is_left_as_it_was(self, pipe):
        """Fails for a hook, a processor, a setting or random state that stays or is lost."""
        pipe.set_progress_bar_config(disable=False, desc="mine")
        apply_avq(pipe, random_codebooks(pipe.unet))

        def state():
            modules = pipe.unet.modules()
            hooks = [(len(x._forward_hooks), len(x._forward_pre_hooks)) for x in modules]
            return hooks, dict(pipe._progress_bar_config), pipe.unet.attn_processors

        latents, before, generator = draw(pipe), state(), torch.random.get_rng_state()
        with pytest.raises(ValueError, match="divisible by 8"):
            fit(pipe, height=100, width=100)
        assert torch.equal(torch.random.get_rng_state(), generator)
        assert state() == before
        assert torch.equal(draw(pipe), latents)
        assert summary(pipe).rows[0].runs.startswith("AVQ")

    def test_keys_come_from_exact_attention(self, pipe, calibrated):
        """Fails where calibration of a pipeline with AVQ sees AVQ's keys, or switches AVQ on."""
        exact = draw(pipe)
        apply_avq(pipe, random_codebooks(pipe.unet))
        assert not torch.equal(draw(pipe), exact)  # else its keys would be the exact ones anyway
        assert equal(fit(pipe), calibrated)
        with avq_disabled(pipe):
            assert torch.equal(draw(pipe), exact)

    def test_a_broken_model(self, pipe):
        """It stops at the first layer that gives NaN, in the first prompt."""
        runs = []
        pipe.unet.register_forward_pre_hook(lambda *_: runs.append(1))
        pipe.unet.get_submodule(LAYER).to_k.weight.data[0, 0] = torch.nan
        with pytest.raises(ValueError, match=f"^the keys of {LAYER} hold NaN or infinity"):
            fit(pipe)
        assert len(runs) == 1


class TestReport:
    def test_covers_every_layer(self, calibrated):
        names = [layer.name for layer in select_layers(two_level_pipe().unet, CONFIG.levels)]
        assert list(figures(calibrated)) == names
        for measured in figures(calibrated).values():
            assert set(measured) == {"quantization_error", "active_ratio", "capture"}
            assert 0 < measured["quantization_error"] < 1
            assert 0 < measured["active_ratio"] <= 1
            assert 0 < measured["capture"] < 1
        kept = calibrated.config["calibration"]
        assert (kept["num_prompts"], kept["num_inference_steps"], kept["seed"]) == (2, STEPS, 0)
        assert kept["keys_per_layer"] == 2048

    def test_capture_is_that_of_the_layer_on_the_grid_that_ran(self, pipe):
        """Fails for the transposed grid, another call than the middle one of the first prompt, the
        unguided half of the batch, the default order, and without overrides."""
        overrides = {"1": {"num_refined": 1}}
        config = AVQConfig.parse("M8P3C2", query_tile=8, levels=(0, 1), overrides=overrides)
        layers = select_layers(pipe.unet, config.levels)
        calls = projected(pipe, layers, "to_q", "to_k")
        codebooks = fit(pipe, config, height=64, width=192)
        for layer in layers:
            query, key = (x[-1:].float() for x in calls[layer.name][STEPS // 2 * 2 :][:2])
            sides = (8 >> layer.level, 24 >> layer.level)
            options = {"codewords": "stored", "query_tile": 8}
            of_order = partial(
                capture, query, key, codebooks.codebook(layer.name), (3, 1)[layer.level], **options
            )
            captured = [
                of_order(query_order=query_order(*grid)).mean().item()
                for grid in (sides, sides[::-1])
            ]
            assert captured[0] != pytest.approx(captured[1], rel=1e-6)
            assert figures(codebooks)[layer.name]["capture"] == pytest.approx(captured[0], rel=1e-6)


def test_sizes():
    """Fails for overrides that are not resolved, children of a flat configuration, or a capture
    without a fixed number of parents to refine."""
    config = AVQConfig.parse("M8", levels=(0, 1), overrides={"1": {"num_parents": 6}})
    by_error = fit(two_level_pipe(), config.changed(threshold=0.1, codewords="means"))
    assert not any("capture" in measured for measured in figures(by_error).values())
    codebooks = fit(two_level_pipe(), config)
    for name, spec in codebooks.layer_specs.items():
        codebook = codebooks.codebook(name)
        assert (codebook.num_parents, codebook.children.shape[2]) == ((8, 6)[spec.level], 0)
    assert all(measured["capture"] == 0 for measured in figures(codebooks).values())


def test_transformers_are_refused():
    with pytest.raises(TypeError, match="has no codebooks: it takes codewords from its own keys"):
        fit(sd3_pipe())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"config": AVQConfig(key_norm=True)}, ValueError, "key_norm changes the model and needs "),
        (
            {"config": AVQConfig.parse("M4P2C2", overrides={"7": {"num_parents": 8}})},
            ValueError,
            r"overrides must have levels or names .*, but got '7'; .* at level 0",
        ),
        ({"keys_per_layer": 3}, ValueError, "must be at least num_parents = 4, but got 3"),
        ({"keys_per_layer": -1}, ValueError, "keys_per_layer must be at least 1, but got -1"),
        ({"keys_per_layer": 128.0}, TypeError, "keys_per_layer must be an int, but got 128.0"),
    ],
)
def test_refused_before_the_pipeline_runs(pipe, arguments, error, message):
    """`test_measurement.py` has what `measure_error` refuses as well."""
    pipe.unet.register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    with pytest.raises(error, match=message):
        fit(pipe, **arguments)
