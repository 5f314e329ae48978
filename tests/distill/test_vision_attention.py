"""Attentions that vision models train with: baselines and learned codebooks."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from tiny_training import CONFIGS
from tiny_vision import FAMILIES, WIDE
from transformers import AutoModel, DINOv3ViTConfig, SwinConfig, SwinModel, ViTConfig, ViTModel

from avq_diffusers import select_layers
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.config import Spec
from distill.config_file import load_config
from distill.stored import StoredAttention, start_codebooks
from distill.vision.attention import keys_of_images, observe, remove_attention, set_attention
from distill.vision.baselines import BASELINES, Grid, Linformer, Performer
from distill.vision.config import VisionConfig, parse_attention

GRID = Grid(prefix=1, height=9, width=10)
FILE = CONFIGS / "vision" / "scenes_classification.yaml"
SETTINGS = replace(load_config(FILE, VisionConfig, []).codebooks, start_images=2, keys_per_layer=64)


def tensors(grid=GRID, *, head_dim=16, scale=1.0):
    """Queries of the patches; keys and values of all tokens."""
    torch.manual_seed(0)
    tokens = grid.prefix + grid.num_patches
    query, key, value = scale * torch.randn(3, 2, 2, tokens, head_dim)
    return query[:, :, grid.prefix :], key, value


def run(attention, query, key, value, spec=None, **orders):
    prefix = key.shape[2] - query.shape[2]
    sinks = {"sink_key": key[:, :, :prefix], "sink_value": value[:, :, :prefix]} if prefix else {}
    patches = key[:, :, prefix:], value[:, :, prefix:]
    call = Tensors.of(query, *patches, **sinks, scale=0.25, **orders)
    return attention(call, spec or Spec(), "auto")[0]


def exact(query, key, value, mask=None):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.25)


def in_window(shift):
    return lambda a, b, length: (a + shift) // 7 == (b + shift) // 7


def in_neighbourhood(a, b, length):
    start = min(max(a - 2, 0), length - 5)
    return start <= b < start + 5


@pytest.mark.parametrize(
    ("name", "layer", "sees"),
    [
        ("swin", 0, in_window(0)),
        ("swin", 1, in_window(3)),
        ("swin", 2, in_window(0)),
        ("neighbourhood", 0, in_neighbourhood),
    ],
)
def test_windows_and_neighbourhoods_are_masked_attention(name, layer, sees):
    """Catches boxes of another place, a shift in the wrong layers, and a lost CLS."""
    query, key, value = tensors()
    mask = torch.ones(90, 91, dtype=torch.bool)  # patches x tokens; all see CLS
    for i, j in product(range(90), repeat=2):
        places = zip(divmod(i, 10), divmod(j, 10), (9, 10), strict=True)
        mask[i, 1 + j] = all(sees(*place) for place in places)
    assert 0.1 < mask.float().mean() < 0.7
    found = run(BASELINES[name](GRID, layer, 16, 0), query, key, value)
    torch.testing.assert_close(found, exact(query, key, value, mask))


def test_performer_approaches_softmax_with_more_features():
    query, key, value = tensors(scale=0.6)
    expected = exact(query, key, value)
    errors = []
    for features in (16, 256, 4096):
        output = run(Performer(GRID, 16, features, seed=0), query, key, value)
        errors.append(float((output - expected).norm() / expected.norm()))
    assert errors[2] < errors[1] / 2 < errors[0] / 4
    assert errors[2] < 0.2
    large = run(Performer(GRID, 16, 256, seed=0), 100 * query, 100 * key, value)
    assert large.isfinite().all()


def test_linformer_starts_as_means_of_neighbours():
    # As many projected keys as patches: every mean is one patch.
    for grid in (GRID, Grid(0, 9, 10)):
        query, key, value = tensors(grid)
        got = run(Linformer(grid, 90), query, key, value)
        torch.testing.assert_close(got, exact(query, key, value))
    means = Linformer(GRID, 8).key_projection.sum(dim=1)
    torch.testing.assert_close(means, torch.ones(8))


def vit():
    torch.manual_seed(0)
    return ViTModel(ViTConfig(**WIDE)).eval()


@pytest.mark.parametrize("family", ["vit", "dinov2 with registers", "siglip", "dpt"])
def test_models_of_every_kind_are_observed_and_left_as_they_were(family):
    """Catches queries, keys or values of another layer, and what an observation leaves."""
    torch.manual_seed(0)
    make, prefix = FAMILIES[family]
    model = make().train()
    layers, images = select_layers(model), torch.randn(2, 3, 64, 64)
    configs = [layer.attn.config for layer in layers]
    calls, grid = observe(model, images)
    assert grid == Grid(prefix, 8, 8)
    assert [*calls] == [layer.name for layer in layers]
    for call in calls.values():
        assert call.key.shape[2] == len(call.query_order) == 64
    assert all(a.attn.config is b for a, b in zip(layers, configs, strict=True))
    assert model.training


def test_replacing_leaves_the_keys_and_is_undone():
    """Catches an observation of the replaced attention, and weights that stay in the model."""
    model, images = vit(), torch.randn(2, 3, 64, 64)
    before, names = model(images).last_hidden_state, model.state_dict().keys()
    calls, _ = observe(model, images)
    set_attention(model, parse_attention("performer"), SETTINGS, images, seed=0)
    replaced = model(images).last_hidden_state
    assert not torch.allclose(replaced, before, atol=1e-3)
    name = next(iter(calls))
    assert torch.equal(observe(model, images)[0][name].key, calls[name].key)
    assert torch.equal(model(images).last_hidden_state, replaced)
    remove_attention(model)
    assert torch.equal(model(images).last_hidden_state, before)
    assert model.state_dict().keys() == names


def test_other_numbers_of_tokens_and_other_models_are_refused():
    model, images = vit(), torch.randn(1, 3, 64, 64)
    set_attention(model, parse_attention("swin"), SETTINGS, images, seed=0)
    with pytest.raises(ValueError, match=r"prepared for 1 \+ 8 x 8 tokens, but got 37"):
        model(torch.randn(1, 3, 48, 48), interpolate_pos_encoding=True)
    swin = SwinModel(SwinConfig(image_size=64, embed_dim=8, depths=[1], num_heads=[1]))
    with pytest.raises(TypeError, match="AVQ does not know the attention of SwinModel"):
        observe(swin, images)
    weights = {"output_attentions": True, "attn_implementation": "eager"}  # which AVQ does not have
    model = ViTModel(ViTConfig(**WIDE, **weights))
    with pytest.raises(ValueError, match=r"layers\.0.* of ViTModel does not attend to the patches"):
        observe(model, images)


@pytest.mark.parametrize("attention", ["swin", "M8P8C4", "M8P8C4/own"])
def test_dropout_of_attention_is_refused(attention):
    """Its layers would run exact attention in training."""
    for make, name in (
        (ViTConfig, "attention_probs_dropout_prob"),
        (DINOv3ViTConfig, "attention_dropout"),
    ):
        model = AutoModel.from_config(make(**WIDE, **{name: 0.5}))
        with pytest.raises(ValueError, match=f"set {name} of the model's config to 0"):
            set_attention(model, parse_attention(attention), SETTINGS, torch.empty(0), seed=0)


def stored(name="M8P2C4", **settings):
    query, key, value = tensors()
    settings = replace(SETTINGS, **settings)
    config = parse_attention(name, key_norm=settings.key_norm).avq
    layer = StoredAttention(2, 16, config, settings)
    keys = key[:, :, 1:].movedim(1, 0).flatten(1, 2)
    layer.start(keys, keys_per_step=2 * 90.0, seed=0)
    attend = partial(run, layer, spec=config.spec, query_order=torch.arange(90))
    return attend, layer, query, key, value


def test_training_is_inference_with_all_parents_refined():
    """Catches a centre that the sinks do not share, and sinks that are quantized."""
    attend, layer, query, key, value = stored("M8P8C4")
    key, query = key + 3, 2 * query
    trained = attend(query, key, value)
    layer.eval()
    torch.testing.assert_close(attend(query, key, value), trained)
    layer.train()
    seen = []
    layer.quantizer.register_forward_hook(lambda module, keys, leaves: seen.append(keys[0]))
    attend(query, torch.cat([100 * key[:, :, :1], key[:, :, 1:]], dim=2), value)
    assert torch.equal(seen[0], key[:, :, 1:])


def test_the_key_norm_starts_near_no_change():
    _, layer, _, key, _ = stored(key_norm=True)
    stretched = key * torch.linspace(0.2, 3, 16) + torch.linspace(-1, 2, 16)
    layer.start_key_norm(stretched[:, :, 1:].movedim(1, 0).flatten(1, 2))
    changed = (layer.key_norm(stretched) - stretched).norm() / stretched.norm()
    plain = (F.layer_norm(stretched, (16,)) - stretched).norm() / stretched.norm()
    assert changed < 0.5 * plain


def test_codebooks_start_from_keys_of_exact_attention():
    model, images = vit(), torch.randn(2, 3, 64, 64)
    layers = set_attention(model, parse_attention("M8P8C4"), SETTINGS, images, seed=0)
    sizes = {"num_images": 2, "images_per_step": 4, "keys_per_layer": 64}
    start_codebooks(layers, keys_of_images(model, images), seed=0, **sizes)
    calls, _ = observe(model, images)
    for name, call in calls.items():
        layer = layers[name]
        error = layer.quantizer(call.key.float()).commitment()
        assert error < 0.7 * call.key.var()
        assert float(layer.quantizer.ema_counts[0, :, 0].sum()) == pytest.approx(4 * 64)


def test_names():
    for name in ("M64P16", "swim", "M8P2C4/mean", "M8P2C4/own2", "M8P9C4"):
        with pytest.raises(ValueError, match=r"configuration|attention must be|num_refined"):
            parse_attention(name)
    assert parse_attention("exact") == parse_attention("exact", key_norm=True)
    assert parse_attention("M8P2C4/own").own
    assert not parse_attention("M8P2C4/means").own
    assert parse_attention("M8P2C4", key_norm=True).avq.key_norm
    assert not parse_attention("M8P2C4/own", key_norm=True).avq.key_norm
    assert parse_attention("M8").avq.codewords == "stored"
