"""The tolerance of transformers: what is measured, what it chooses, and what then runs."""

import pytest
import torch
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.transformers import transformer_flux
from tiny_transformers import (
    CONFIG,
    draw,
    flux_pipe,
    predict,
    sd3_pipe,
    sd3_transformer,
    wan_transformer,
)

from avq_diffusers import (
    AVQConfig,
    ErrorProfile,
    apply_avq,
    measure_error,
    remove_avq,
    set_num_refined,
    summary,
)
from avq_diffusers.attention.api import avq_attention
from avq_diffusers.attention.orders import query_order
from avq_diffusers.dit.layers import transformer_layers
from avq_diffusers.plugin import error_measurement
from avq_diffusers.plugin.error_profile import MARGIN

PROMPT = "a red fox"
COARSE, MIDDLE, FINE = "M4P0C0", "M4P2C2", "M8P8C4E16"
SIZE = {"height": 32, "width": 48, "max_sequence_length": 8, "num_inference_steps": 2}
NUM_IMAGE = 96
PIPES = [pytest.param(sd3_pipe, id="sd3"), pytest.param(flux_pipe, id="flux")]


@pytest.fixture(autouse=True)
def short_ladder(monkeypatch):
    monkeypatch.setattr(error_measurement, "LADDER", (COARSE, FINE))


def measure(pipe, config=CONFIG, **arguments):
    return measure_error(pipe, [PROMPT], config, **SIZE | {"progress": False} | arguments)


def error_of(query, key, value, image, text):
    """By hand, of tensors (B, H, N, D) in which the image and the text are slices."""
    sizes = dict(num_parents=8, num_children=4, num_refined=8, exact_keys=16)
    has_text = key[:, :, text].shape[2] > 0
    order, tokens = query_order(8, 12), torch.arange(query.shape[2])
    avq = avq_attention(
        query,
        key[:, :, image],
        value[:, :, image],
        sink_key=key[:, :, text] if has_text else None,
        sink_value=value[:, :, text] if has_text else None,
        query_tile=16,
        query_order=torch.cat([tokens[image][order], tokens[text]]),
        key_order=order,
        backend="reference",
        **sizes,
    )
    logits = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    exact = logits.softmax(-1) @ value
    return float((avq - exact).norm() / exact.norm())


class TestMeasure:
    def test_errors_of_joint_attention(self):
        """Catches text that is left out, keys before their norm, and a mean over calls."""
        pipe, calls = sd3_pipe(), {}
        profile = measure(pipe)

        def see(attn, args, kwargs):
            def heads(x, projection, norm):
                x = projection(x).unflatten(-1, (2, -1)).transpose(1, 2)
                return x if norm is None else norm(x)

            norms = (attn.norm_q, attn.norm_k, None)
            projections = (attn.to_q, attn.to_k, attn.to_v)
            tokens = [
                heads(kwargs["hidden_states"], *x) for x in zip(projections, norms, strict=True)
            ]
            text = kwargs.get("encoder_hidden_states")
            if text is not None:
                norms = (attn.norm_added_q, attn.norm_added_k, None)
                projections = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
                added = [heads(text, *x) for x in zip(projections, norms, strict=True)]
                tokens = [torch.cat(pair, dim=2) for pair in zip(tokens, added, strict=True)]
                if attn.context_pre_only:  # the block drops the text
                    tokens[0] = tokens[0][:, :, :NUM_IMAGE]
            error = error_of(*tokens, slice(NUM_IMAGE), slice(NUM_IMAGE, None))
            calls.setdefault(attn, []).append(error)

        layers = transformer_layers(pipe.transformer)
        for layer in layers:
            layer.attn.register_forward_pre_hook(see, with_kwargs=True)
        with torch.no_grad():
            draw(pipe)
        assert [one.layer.name for one in profile.layers] == [layer.name for layer in layers]
        for layer, one in zip(layers, profile.layers, strict=True):
            assert len(calls[layer.attn]) == 2
            assert [*one.errors] == [1000]
            assert one.errors[1000][FINE] == pytest.approx(max(calls[layer.attn]), rel=1e-3)
            assert one.costs == {COARSE: 4 / 96, FINE: 56 / 96, MIDDLE: 8 / 96}

    def test_errors_on_the_dispatch(self, monkeypatch):
        """Flux has its text first."""
        pipe, calls = flux_pipe(), []
        profile, original = measure(pipe), transformer_flux.dispatch_attention_fn

        def record(query, key, value, **options):
            tokens = [x.transpose(1, 2) for x in (query, key, value)]
            num_text = query.shape[1] - NUM_IMAGE
            calls.append(error_of(*tokens, slice(num_text, None), slice(num_text)))
            return original(query, key, value, **options)

        monkeypatch.setattr(transformer_flux, "dispatch_attention_fn", record)
        with torch.no_grad():
            draw(pipe)
        assert len(calls) == 6
        for index, one in enumerate(profile.layers):
            assert one.errors[1000][FINE] == pytest.approx(max(calls[index::3]), rel=1e-3)

    @pytest.mark.parametrize("make", PIPES)
    def test_leaves_the_pipeline_as_it_was(self, make):
        """Catches states that stay after a failure, counts that are lost, and errors of a
        transformer that runs AVQ."""
        pipe = make()
        exact, processors = draw(pipe), pipe.transformer.attn_processors
        profile = measure(pipe)
        assert torch.equal(draw(pipe), exact)
        first = profile.layers[0].layer.name
        set_num_refined(apply_avq(pipe, CONFIG), 1, layer=first)
        avq, before = draw(pipe), summary(pipe)
        assert measure(pipe) == profile

        def fail(*args):
            raise KeyError

        with pytest.raises(KeyError):
            measure(pipe, callback_on_step_end=fail)
        assert summary(pipe) == before
        assert torch.equal(draw(pipe), avq)
        assert torch.equal(draw(remove_avq(pipe)), exact)
        assert pipe.transformer.attn_processors == processors
        modules = [*pipe.transformer.modules()]
        assert not [name for module in modules for name in vars(module) if name.startswith("_avq")]
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules)

    def test_a_layer_without_a_call_is_named(self):
        class Own(JointAttnProcessor2_0):
            pass

        pipe = sd3_pipe()
        pipe.transformer.transformer_blocks[1].attn.set_processor(Own())
        message = r"transformer_blocks\.1\.attn has no call that AVQ serves: Own"
        with (
            pytest.warns(UserWarning, match="layers that keep Own"),
            pytest.raises(RuntimeError, match=message),
        ):
            measure(pipe)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"parts": 2}, ValueError, "parts must be 1, but got 2"),
            ({"num_inference_steps": 0}, ValueError, "num_inference_steps must be at least 1"),
            ({"hight": 32}, TypeError, "takes no argument hight"),
            ({"config": AVQConfig(key_norm=True)}, ValueError, "drop key_norm"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, arguments, error, message):
        with pytest.raises(error, match=message):
            measure(sd3_pipe(), **arguments)

    def test_a_transformer_alone_takes_no_prompt(self):
        with pytest.raises(TypeError, match="expected a pipeline with a transformer, but got SD3"):
            measure(sd3_transformer())


class TestApply:
    @pytest.mark.parametrize("make", PIPES)
    def test_runs_the_cheapest_that_holds(self, make, tmp_path):
        """Catches sizes that do not reach the layers, and another choice next time."""
        pipe, other = make(), make()
        exact = draw(pipe)
        profile = measure(pipe)
        tolerance = sorted(one.errors[1000][FINE] for one in profile.layers)[1] / MARGIN * 1.001
        plan = profile.within(tolerance)
        assert len({str(parts[1000]) for parts in plan.values()}) > 1
        profile.save(tmp_path / "profile.json")
        loaded = ErrorProfile.load(tmp_path / "profile.json")
        assert apply_avq(pipe, loaded, tolerance=tolerance) is pipe
        rows = summary(pipe).rows
        assert [row.config for row in rows] == [str(plan[row.name][1000]) for row in rows]
        assert [row.error for row in rows] == [plan[row.name][1000].error for row in rows]
        found = draw(pipe)
        apply_avq(other, CONFIG, tolerance=tolerance, prompt=PROMPT, progress=False, **SIZE)
        assert torch.equal(draw(other), found)
        assert summary(other) == summary(pipe)
        set_num_refined(pipe, 1)
        assert "error" not in str(summary(pipe))
        apply_avq(pipe, profile, tolerance=1e-9)
        assert {row.config for row in summary(pipe).rows} == {"exact"}
        assert torch.equal(draw(pipe), exact)

    def test_two_transformers(self):
        """Catches layers of the second that take the names of the first's."""

        class Pipe:
            transformer, transformer_2 = wan_transformer(), wan_transformer()
            set_progress_bar_config = staticmethod(lambda **_: None)

            def __call__(self, prompt, num_inference_steps, generator, output_type):
                predict(self.transformer)
                predict(self.transformer_2, hidden_states=torch.ones(2, 4, 3, 16, 24))

        pipe = Pipe()
        profile = measure_error(pipe, [PROMPT], CONFIG, progress=False)
        errors = {one.layer.name: one.errors[1000][FINE] for one in profile.layers}
        assert [row.name for row in summary(pipe).rows] == [*errors]
        tolerance = errors["blocks.0.attn1"] / MARGIN * 1.001
        apply_avq(pipe, profile, tolerance=tolerance)
        rows = summary(pipe).rows
        assert rows[0].error == errors["blocks.0.attn1"] != errors["transformer_2.blocks.0.attn1"]
        plan = profile.within(tolerance)
        assert [row.config for row in rows] == [str(plan[row.name][1000]) for row in rows]

    def test_another_model(self):
        """Catches a profile that is applied to what it does not describe."""
        pipe = apply_avq(sd3_pipe(), CONFIG)
        avq = draw(pipe)
        with pytest.raises(ValueError, match="error profile of another model"):
            apply_avq(pipe, measure(flux_pipe()), tolerance=0.1)
        with pytest.raises(TypeError, match=r"tolerance must be a number .* got None"):
            apply_avq(pipe, measure(sd3_pipe()))
        assert torch.equal(draw(pipe), avq)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"tolerance": 0.1}, "a tolerance is measured on a prompt; pass prompt"),
            ({"prompt": PROMPT}, "prompt belong to the measurement of a tolerance"),
            ({"seed": 1}, "seed belong to the measurement of a tolerance"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, arguments, message):
        with pytest.raises(TypeError, match=message):
            apply_avq(sd3_transformer(), **arguments)
