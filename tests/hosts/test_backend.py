"""AVQ by its name among diffusers' attention backends."""

import pytest
import torch
from checks import are_same, calls, contents
from diffusers import MiniMaxMusic3RVQDepthDecoder, attention_backend
from tiny import predict as predict_unet
from tiny import two_level_unet
from tiny_transformers import (
    CONFIG,
    flux_transformer,
    predict,
    sd3_transformer,
    wan_transformer,
)

from avq_diffusers import apply_avq, register_backend


@pytest.fixture(autouse=True)
def registered():
    register_backend()


@pytest.mark.parametrize(
    ("make", "predict", "undo"),
    [
        (flux_transformer, predict, "native"),
        (flux_transformer, predict, None),
        (sd3_transformer, predict, None),
        (two_level_unet, predict_unet, "native"),
    ],
)
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
    """Catches sizes of a tolerance that are lost."""
    model = apply_avq(wan_transformer(), CONFIG)
    expected = predict(model)
    model.set_attention_backend("avq")
    assert torch.equal(predict(model), expected)
    assert calls(model) == [{"AVQ": 2}] * 2


def test_an_unknown_name_changes_nothing():
    model = apply_avq(flux_transformer(), CONFIG)
    before = contents(model)
    with pytest.raises(ValueError, match="must be one of"):
        model.set_attention_backend("avc")
    assert are_same(contents(model), before)


def test_a_context_is_refused():
    """Catches a block that runs exact attention under AVQ's name."""
    with pytest.raises(ValueError, match="avq"):
        attention_backend("avq").__enter__()


def test_a_model_that_avq_does_not_know():
    """Catches one that runs exact attention in silence."""
    model = MiniMaxMusic3RVQDepthDecoder(16, 1, 2, 16, 8)
    said = "AVQ does not know the attention of MiniMaxMusic3RVQDepthDecoder"
    with pytest.raises(TypeError, match=said):
        model.set_attention_backend("avq")
