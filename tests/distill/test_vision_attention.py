"""Attention that vision models train with: learned codebooks."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tiny_vision import WIDE, tiny_vision
from transformers import AutoModel, DINOv3ViTConfig, SwinConfig, SwinModel, ViTConfig, ViTModel

from avq_diffusers import AVQConfig, select_layers
from avq_diffusers.attention.tensors import Tensors
from distill.stored import StoredAttention, start_codebooks
from distill.vision.attention import keys_of_images, remove_attention, set_attention
from distill.vision.config import parse_attention


def tensors():
    """Queries of 90 patches; keys and values of CLS and the patches."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 91, 16)
    return query[:, :, 1:], key, value


def run(attention, query, key, value, spec):
    sinks = {"sink_key": key[:, :, :1], "sink_value": value[:, :, :1]}
    order = torch.arange(90)
    call = Tensors.of(query, key[:, :, 1:], value[:, :, 1:], **sinks, scale=0.25, query_order=order)
    return attention(call, spec, "auto")[0]


@pytest.mark.parametrize("family", ["vit", "dinov2 with registers", "siglip", "dpt"])
def test_models_of_every_kind_are_observed_and_left_as_they_were(family):
    """Catches keys of CLS or registers, of another image or layer, and what an observation
    leaves."""
    torch.manual_seed(0)
    model = tiny_vision(family).train()
    layers, images = select_layers(model), torch.randn(2, 3, 64, 64)
    configs = [layer.attn.config for layer in layers]
    first, second = keys_of_images(model, images)
    assert [*first] == [layer.name for layer in layers]
    for name, keys in first.items():
        assert keys.shape[1] == 64
        assert not torch.equal(keys, second[name])
    assert all(a.attn.config is b for a, b in zip(layers, configs, strict=True))
    assert model.training


def test_other_models_are_refused():
    images = torch.randn(1, 3, 64, 64)
    swin = SwinModel(SwinConfig(image_size=64, embed_dim=8, depths=[1], num_heads=[1]))
    with pytest.raises(TypeError, match="AVQ does not know the attention of SwinModel"):
        next(keys_of_images(swin, images))
    weights = {"output_attentions": True, "attn_implementation": "eager"}  # which AVQ does not have
    model = ViTModel(ViTConfig(**WIDE, **weights))
    with pytest.raises(ValueError, match=r"layers\.0.* of ViTModel does not attend to the patches"):
        next(keys_of_images(model, images))


@pytest.mark.parametrize("attention", ["M8P8C4/stored", "M8P8C4"])
def test_dropout_of_attention_is_refused(attention):
    """Its layers would run exact attention in training."""
    avq = parse_attention(attention)
    for make, name in (
        (ViTConfig, "attention_probs_dropout_prob"),
        (DINOv3ViTConfig, "attention_dropout"),
    ):
        model = AutoModel.from_config(make(**WIDE, **{name: 0.5}))
        with pytest.raises(ValueError, match=f"set {name} of the model's config to 0"):
            set_attention(model, avq, diveq=False)


def stored(name="M8P2C4/stored", *, key_norm=False):
    query, key, value = tensors()
    config = parse_attention(name, key_norm=key_norm)
    layer = StoredAttention(2, 16, config, diveq=False)
    keys = key[:, :, 1:].movedim(1, 0).flatten(1, 2)
    layer.start(keys, keys_per_step=2 * 90.0, seed=0)
    attend = partial(run, layer, spec=config.spec)
    return attend, layer, query, key, value


def test_training_is_inference_with_all_parents_refined():
    """Catches a centre that the sinks do not share, sinks that are quantized, and gradients that
    are not straight-through."""
    attend, layer, query, key, value = stored("M8P8C4/stored")
    key, query = key + 3, 2 * query
    tokens = [x.requires_grad_() for x in (query, key, value)]
    grad = torch.randn_like(query)
    found = []
    for is_training in (True, False):
        output = attend(*tokens)
        found.append((output, *torch.autograd.grad(output, tokens, grad)))
        layer.train(not is_training)
    torch.testing.assert_close(*found)
    query, key, value = (x.detach() for x in tokens)
    seen = []
    layer.quantizer.register_forward_hook(lambda module, keys, leaves: seen.append(keys[0]))
    attend(query, torch.cat([100 * key[:, :, :1], key[:, :, 1:]], dim=2), value)
    assert torch.equal(seen[0], key[:, :, 1:])
    attend, layer, *tokens = stored("M8P2C4/stored")
    trained = attend(*tokens)
    layer.eval()
    assert not torch.allclose(attend(*tokens), trained, rtol=1e-2)


def test_the_key_norm_starts_near_no_change():
    _, layer, _, key, _ = stored(key_norm=True)
    stretched = key * torch.linspace(0.2, 3, 16) + torch.linspace(-1, 2, 16)
    layer.start_key_norm(stretched[:, :, 1:].movedim(1, 0).flatten(1, 2))
    changed = (layer.key_norm(stretched) - stretched).norm() / stretched.norm()
    plain = (F.layer_norm(stretched, (16,)) - stretched).norm() / stretched.norm()
    assert changed < 0.5 * plain


def test_codebooks_start_from_keys_of_exact_attention_and_are_removed():
    """Catches an observation of the replaced attention, and weights that stay in the model."""
    model, images = tiny_vision(), torch.randn(2, 3, 64, 64)
    before, names = model(images).last_hidden_state, model.state_dict().keys()
    first, _ = keys_of_images(model, images)
    layers = set_attention(model, AVQConfig.parse("M8P2C4/stored"), diveq=False)
    sizes = {"num_images": 2, "images_per_step": 4, "keys_per_layer": 64}
    start_codebooks(layers, keys_of_images(model, images), seed=0, **sizes)
    replaced = model(images).last_hidden_state
    assert not torch.allclose(replaced, before, atol=1e-3)
    for name, keys in next(keys_of_images(model, images)).items():
        assert torch.equal(keys, first[name])
        layer = layers[name]
        error = layer.quantizer(keys[None].float()).commitment()
        assert error < 0.7 * keys.var()
        assert float(layer.quantizer.ema_counts[0, :, 0].sum()) == pytest.approx(4 * 64)
    assert torch.equal(model(images).last_hidden_state, replaced)
    remove_attention(model)
    assert torch.equal(model(images).last_hidden_state, before)
    assert model.state_dict().keys() == names


def test_names():
    for name in ("M64P16", "swim", "M8P2C4/means", "M8P2C4/own", "M8P9C4"):
        with pytest.raises(ValueError, match=r"configuration|attention must be|num_refined"):
            parse_attention(name)
    assert parse_attention("exact", key_norm=True) is None
    assert parse_attention("M8P2C4").means
    assert parse_attention("M8P2C4/stored", key_norm=True).key_norm
    assert not parse_attention("M8P2C4", key_norm=True).key_norm
    assert parse_attention("M8/stored").codewords == "stored"
