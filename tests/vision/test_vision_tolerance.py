"""The tolerance of vision models: what is measured, what it chooses, and what then runs."""

import pytest
import torch
from checks import differ
from tiny_vision import FAMILIES, WIDE, choosing, features, images, tiny_vision
from transformers import AttentionInterface, ViTConfig, ViTModel

from avq_diffusers.attention.api import avq_attention
from avq_diffusers.attention.orders import query_order
from avq_diffusers.config import AVQConfig
from avq_diffusers.plugin import error_measurement
from avq_diffusers.plugin.error_profile import ErrorProfile, LayerErrors
from avq_diffusers.plugin.layers import LayerSpec
from avq_diffusers.vision import (
    apply_avq,
    measure_error,
    remove_avq,
    select_layers,
    set_num_refined,
    summary,
)

CONFIG = AVQConfig(4, 2, 2, query_tile=16)
COARSE, MIDDLE, FINE = "M4P0C0", "M4P2C2", "M8P8C4E16"
ANY_SIZE = {"interpolate_pos_encoding": True}


@pytest.fixture(autouse=True)
def short_ladder(monkeypatch):
    monkeypatch.setattr(error_measurement, "LADDER", (COARSE, FINE))


def batches(height=64, width=64):
    return images(height, width), -2 * images(height, width)[:1]


def profile_of(model, *choices):
    """A profile whose tolerance 0.1 gives the layers these choices."""
    return ErrorProfile(
        CONFIG,
        tuple(
            LayerErrors(
                LayerSpec(**layer.stored),
                1,
                {sizes: 0.5 for sizes in (COARSE, FINE)},
                {1000: {sizes: 0.05 if sizes == chosen else 0.5 for sizes in (COARSE, FINE)}},
            )
            for layer, chosen in zip(select_layers(model), choices, strict=True)
        ),
    )


class TestMeasure:
    @pytest.mark.parametrize("family", ["deit", "dinov3", "siglip"])
    def test_errors_are_those_of_the_calls(self, family, monkeypatch):
        """Catches sinks that are left out of exact attention or of AVQ, queries of sinks that
        count, another scale, order or norm, and a mean over batches."""
        model, num_sinks, calls = tiny_vision(family), FAMILIES[family][1], {}
        size = {} if family == "dinov3" else ANY_SIZE
        profile = measure_error(model, batches(64, 128), CONFIG, **size)

        def record(module, query, key, value, mask, *, scaling=None, **arguments):
            logits = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5)
            exact = logits.softmax(-1) @ value
            sizes = dict(num_parents=8, num_children=4, num_refined=8, exact_keys=16)
            avq = avq_attention(
                *(x[:, :, num_sinks:] for x in (query, key, value)),
                sink_key=key[:, :, :num_sinks] if num_sinks else None,
                sink_value=value[:, :, :num_sinks] if num_sinks else None,
                query_tile=16,
                query_order=query_order(8, 16),
                backend="reference",
                **sizes,
            )
            patches = exact[:, :, num_sinks:]
            calls.setdefault(module, []).append(float((avq - patches).norm() / patches.norm()))
            return exact.transpose(1, 2), None

        monkeypatch.setitem(AttentionInterface._global_mapping, "record", record)
        model.set_attn_implementation("record")
        for batch in batches(64, 128):
            features(model, batch, **size)
        for layer, one in zip(select_layers(model), profile.layers, strict=True):
            assert (one.layer.name, one.layer.head_dim) == (layer.name, 16)
            assert len(calls[layer.attn]) == 2
            assert one.errors[1000][FINE] == pytest.approx(max(calls[layer.attn]), rel=1e-3)
            assert one.costs == {COARSE: 4 / 128, FINE: 56 / 128, MIDDLE: 8 / 128}

    def test_leaves_the_model_as_it_was(self):
        """Catches states that stay after a failure, counts that are lost, and errors of a model
        that runs AVQ."""
        model = tiny_vision()
        exact = features(model)
        profile = measure_error(model, images(), CONFIG)
        assert torch.equal(features(model), exact)
        set_num_refined(apply_avq(model, CONFIG), 1, layer="layers.0")
        avq, before = features(model), summary(model)
        assert measure_error(model, images(), CONFIG) == profile
        with pytest.raises(ValueError, match="channel dimension"):
            measure_error(model, [images(), images()[:, :2]], CONFIG)
        assert summary(model) == before
        assert torch.equal(features(model), avq)
        assert torch.equal(features(remove_avq(model)), exact)
        assert not [n for m in model.modules() for n in vars(m) if n.startswith("_avq")]

    def test_a_compiled_model_is_measured_eagerly(self):
        def fail(*_):
            raise AssertionError

        model = tiny_vision("dinov2")
        compiled = torch.compile(model, backend=fail)
        assert measure_error(compiled, images(), CONFIG) == measure_error(model, images(), CONFIG)

    def test_a_layer_without_a_call_is_named(self):
        model = choosing(lambda: ViTModel(ViTConfig(**WIDE, attention_probs_dropout_prob=0.5)))
        with pytest.raises(RuntimeError, match=r"layers\.0.* has no call that AVQ serves: dropout"):
            measure_error(model.train(), images(), CONFIG)

    def test_nan_names_the_layer(self):
        model = tiny_vision()
        with pytest.raises(ValueError, match=r"attention of layers\.0.* gives NaN or infinity"):
            measure_error(model, images() * torch.nan, CONFIG)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ((3,), TypeError, "pixel_values must be tensors, but got int"),
            (([3],), TypeError, "pixel_values must be tensors, but got int"),
            (([],), ValueError, "at least one batch"),
            ((torch.ones(3, 64, 64),), ValueError, r"must be batches .*got \(3, 64, 64\)"),
            (([images(), images(32)],), ValueError, "one height and width"),
            ((images(), AVQConfig(key_norm=True)), ValueError, "drop key_norm"),
            ((images(), "M64"), TypeError, "config must be an AVQConfig"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, arguments, error, message):
        with pytest.raises(error, match=message):
            measure_error(tiny_vision(), *arguments)


class TestApply:
    def test_runs_the_cheapest_that_holds(self):
        """Catches sizes that do not reach the layers, and another choice next time."""
        model, other = tiny_vision(), tiny_vision()
        profile = measure_error(model, batches(), CONFIG)
        first, second = (one.errors[1000] for one in profile.layers)
        assert first[COARSE] > first[MIDDLE] > first[FINE]
        tolerance = min(first[COARSE], second[COARSE]) * 0.999
        plan = profile.within(tolerance)
        assert apply_avq(model, profile, tolerance=tolerance) is model
        rows = summary(model).rows
        assert [row.config for row in rows] == [str(plan[row.name][1000]) for row in rows]
        assert [row.error for row in rows] == [plan[row.name][1000].error for row in rows]
        apply_avq(other, CONFIG, tolerance=tolerance, pixel_values=batches())
        assert torch.equal(features(other), features(model))
        assert summary(other) == summary(model)

    def test_layers_run_what_was_chosen(self):
        model = tiny_vision()
        exact = features(model)
        parsed = [AVQConfig.parse(x, query_tile=16) for x in (COARSE, FINE)]
        coarse, fine = (features(apply_avq(model, config)) for config in parsed)
        for chosen, expected in ((COARSE, coarse), (FINE, fine), ("exact", exact)):
            apply_avq(model, profile_of(model, chosen, chosen), tolerance=0.1)
            assert torch.equal(features(model), expected)
        apply_avq(model, profile_of(model, "exact", FINE), tolerance=0.1)
        assert differ(features(model), fine)
        assert [row.calls for row in summary(model).rows] == [{"scheduled": 1}, {"AVQ": 1}]
        assert [row.error for row in summary(model).rows] == [0, 0.05]
        set_num_refined(model, 1)
        assert "error" not in str(summary(model))
        assert torch.equal(features(remove_avq(model)), exact)

    def test_sizes_that_cost_as_much_as_exact_are_left_out(self, monkeypatch):
        monkeypatch.setattr(error_measurement, "LADDER", ("M8P8C8E64",))
        model = tiny_vision()
        exact = features(model)
        apply_avq(model, AVQConfig(64, 0, 0), tolerance=9, pixel_values=images())
        assert {row.config for row in summary(model).rows} == {"exact"}
        assert torch.equal(features(model), exact)

    def test_profiles(self, tmp_path):
        """Catches a profile that is applied to what it does not describe."""
        model = tiny_vision()
        profile = measure_error(model, images(), CONFIG)
        profile.save(tmp_path / "profile.json")
        assert ErrorProfile.load(tmp_path / "profile.json") == profile
        avq = features(apply_avq(model, CONFIG))
        one = choosing(lambda: ViTModel(ViTConfig(**WIDE | {"num_hidden_layers": 1})))
        narrow = choosing(lambda: ViTModel(ViTConfig(**WIDE | {"num_attention_heads": 4})))
        for other in (one, narrow):
            with pytest.raises(ValueError, match="error profile of another model"):
                apply_avq(model, measure_error(other, images(), CONFIG), tolerance=0.1)
        layer = LayerErrors(profile.layers[0].layer, 1, {}, {1000: {}, 500: {}})
        parts = ErrorProfile(CONFIG, (layer, profile.layers[1]))
        with pytest.raises(ValueError, match="its errors change with timesteps"):
            apply_avq(model, parts, tolerance=0.1)
        assert torch.equal(features(model), avq)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"pixel_values": images()}, TypeError, "pixel_values belong to the measurement"),
            (ANY_SIZE, TypeError, "interpolate_pos_encoding belong to the measurement"),
            ({"tolerance": 0.1}, TypeError, "is measured on images; pass pixel_values"),
            ({"tolerance": 0, "pixel_values": images()}, ValueError, "must be above 0"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, arguments, error, message):
        with pytest.raises(error, match=message):
            apply_avq(tiny_vision(), **arguments)
