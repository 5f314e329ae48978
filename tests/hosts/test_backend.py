"""AVQ by its name among diffusers' attention backends."""

import warnings

import pytest
import torch
from checks import are_same, calls, contents
from diffusers import MiniMaxMusic3RVQDepthDecoder, attention_backend
from tiny import predict as predict_unet
from tiny import two_level_unet
from tiny_transformers import (
    CONFIG,
    flux_transformer,
    inputs,
    predict,
    sd3_transformer,
    tiny_vae,
    wan_transformer,
)

from avq_diffusers import apply_avq, register_backend, remove_avq, summary


@pytest.fixture(autouse=True)
def registered():
    register_backend()


MODELS = {
    "dispatch": (flux_transformer, predict),
    "joint": (sd3_transformer, predict),
    "unet": (two_level_unet, predict_unet),
}


@pytest.mark.parametrize(("make", "predict"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("undo", ["native", None])
def test_the_name_is_apply_and_another_is_remove(make, predict, undo):
    """Catches AVQ in cross-attention too, and what stays of it."""

    def back(model):
        model.set_attention_backend(undo) if undo else model.reset_attention_backend()
        return model

    model = back(make())
    exact, before = predict(model), contents(model)
    model.set_attention_backend("AVQ")
    found = predict(model)
    assert not torch.equal(found, exact)
    assert torch.equal(found, predict(apply_avq(make())))
    assert torch.equal(predict(back(model)), exact)
    assert are_same(contents(model), before)


def test_a_model_with_avq_keeps_it():
    """Catches sizes of a tolerance that are lost, and an end of the block that takes them."""
    model = apply_avq(wan_transformer(), CONFIG)
    expected = predict(model)
    model.set_attention_backend("avq")
    with attention_backend("avq"):
        assert torch.equal(predict(model), expected)
    assert torch.equal(predict(model), expected)
    assert calls(model) == [{"AVQ": 3}] * 2


def test_an_unknown_name_changes_nothing():
    model = apply_avq(flux_transformer(), CONFIG)
    before = contents(model)
    with pytest.raises(ValueError, match="must be one of"):
        model.set_attention_backend("avc")
    assert are_same(contents(model), before)


def test_a_layer_alone_is_refused():
    """Catches a layer that runs exact attention under AVQ's name."""
    with pytest.raises(ValueError, match="must be one of"):
        flux_transformer().transformer_blocks[0].attn.set_attention_backend("avq")


class TestContext:
    def test_serves_the_models_called_inside(self):
        """Catches a first call without AVQ, cross-attention that runs as the layer before it, and
        AVQ that stays after the block, or does not come back after an inner one."""
        models = wan_transformer(), wan_transformer(num_layers=1)
        exact, before = [predict(model) for model in models], [contents(model) for model in models]
        expected = [predict(apply_avq(model)) for model in models]
        for model in models:
            remove_avq(model)

        def found():
            return [predict(model) for model in models]

        with attention_backend("avq"):
            assert all(map(torch.equal, found(), expected))
            assert [row.calls for row in summary(models[0]).rows] == [{"AVQ": 1}] * 2
            with attention_backend("native"):
                assert all(map(torch.equal, found(), exact))
            assert all(map(torch.equal, found(), expected))
        assert all(map(torch.equal, found(), exact))
        assert all(map(are_same, map(contents, models), before))

    @pytest.mark.parametrize("in_place", [False, pytest.param(True, marks=pytest.mark.long)])
    def test_serves_compiled_models(self, in_place):
        """Their call is not the model's: it is a wrapper's, or in the compiler."""
        torch.compiler.reset()
        model = sd3_transformer(num_layers=1, dual_attention_layers=())
        grid = 40, 40  # more tokens than the default has columns
        exact, expected = predict(model, *grid), predict(apply_avq(model), *grid)
        remove_avq(model)
        called = torch.compile(model, backend="eager")
        if in_place:
            called = model
            model.compile(backend="eager")
        arguments = inputs(model, *grid)

        @torch.no_grad()
        def found():
            return called(**arguments).sample

        assert torch.allclose(found(), exact, atol=1e-5)
        with attention_backend("avq"):
            assert torch.allclose(found(), expected, atol=1e-5)
        assert not torch.allclose(exact, expected, atol=1e-5)


def test_models_that_avq_does_not_know():
    """Catches one that runs exact attention in silence, and an autoencoder that stops an image."""
    model = MiniMaxMusic3RVQDepthDecoder(16, 1, 2, 16, 8)
    said = "AVQ does not know the attention of MiniMaxMusic3RVQDepthDecoder"
    with pytest.raises(TypeError, match=said):
        model.set_attention_backend("avq")
    tokens = torch.ones(1, 4, 16)
    with attention_backend("avq"), pytest.warns(UserWarning, match=f"{said}.* It runs exact"):
        found = model(tokens)
    assert torch.equal(found, model(tokens))
    vae, image = tiny_vae(), torch.ones(1, 3, 16, 16)
    with attention_backend("avq"), warnings.catch_warnings():
        warnings.simplefilter("error")
        vae(image)
