"""AVQ in vision models of transformers: what runs, what is handed over, what stays untouched."""

import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from checks import calls, differ, kinds
from tiny import random_codebooks
from tiny_vision import (
    COARSE,
    FAMILIES,
    SIZES,
    WIDE,
    choosing,
    features,
    images,
    tiny_clip,
    tiny_vision,
)
from transformers import (
    AttentionInterface,
    BertConfig,
    BertModel,
    SamVisionConfig,
    SamVisionModel,
    SwinConfig,
    SwinModel,
    ViTConfig,
    ViTModel,
    XCLIPVisionConfig,
    XCLIPVisionModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.vit import modeling_vit

from avq_diffusers import apply_avq, remove_avq, select_layers, summary
from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.codebooks import AVQCodebooks
from avq_diffusers.hosts.core import state as layer_state
from avq_diffusers.hosts.models import vision

EVERY_KEY = AVQConfig.parse("M8C4T0", query_tile=16)


def test_a_text_tower_stays():
    """Catches an implementation that is set for both towers, where text loses its causal mask."""
    model, ids = tiny_clip(), torch.randint(3, 99, (1, 7))
    text = model(input_ids=ids, pixel_values=images()).text_embeds
    apply_avq(model, COARSE)
    names = [f"vision_model.encoder.layers.{i}.self_attn" for i in range(2)]
    assert [row.name for row in summary(model).rows] == names
    assert torch.equal(model(input_ids=ids, pixel_values=images()).text_embeds, text)
    assert model.config.text_config._attn_implementation == "sdpa"


def test_a_pickle_brings_the_function(monkeypatch):
    content = pickle.dumps(apply_avq(tiny_vision(), COARSE))
    monkeypatch.delitem(AttentionInterface._global_mapping, vision.NAME)
    features(pickle.loads(content))
    assert vision.NAME in ALL_ATTENTION_FUNCTIONS


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_on_a_gpu(family):
    """In bfloat16: features of a tiny DPT are below the range of float16."""
    model = tiny_vision(family).to("cuda")
    exact = features(model, images().cuda())
    apply_avq(model.bfloat16(), EVERY_KEY, route="always")
    found = features(model, images().cuda().bfloat16())
    assert {row.runs for row in summary(model).rows} == {"AVQ (triton backend)"}
    assert (found.float() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(("family", "dtype"), [("vit", torch.bfloat16), ("dinov3", torch.float16)])
def test_half_precision(family, dtype):
    """DINOv3 rotates queries and keys in float32."""
    model = tiny_vision(family)
    exact = features(model)
    found = features(apply_avq(model.to(dtype), EVERY_KEY), images().to(dtype))
    assert found.dtype == dtype
    assert calls(model) == [{"AVQ": 1}] * 2
    assert (found.float() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"is_causal": True}, "causal attention"),
        ({"output_attentions": True}, "attention weights"),
        ({"sliding_window": 3}, "sliding_window"),
    ],
)
def test_calls_that_are_handed_over(arguments, reason):
    """Catches an argument that is lost on the way, and AVQ where it does not hold."""
    model = tiny_vision()
    attn = select_layers(model)[0].attn
    attn.register_forward_pre_hook(lambda _, x, y: (x, y | arguments), with_kwargs=True)
    expected = features(model)
    apply_avq(model, AVQConfig.parse("M4P2C2", exact=("layers.1",)))
    assert torch.equal(features(model), expected)
    assert calls(model)[0] == {reason: 1}
    assert [row.runs for row in summary(model).rows] == [
        f"exact: {reason}",
        "exact: layer not chosen",
    ]


def test_keys_of_another_shape_are_handed_over():
    """A prefix of learned keys, such as PEFT's, is no key of the grid."""
    model = apply_avq(tiny_vision(), COARSE)
    query, key, value = (torch.randn(2, 2, length, 16) for length in (65, 70, 70))
    expected = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)

    def ask(attn, args):
        found, _ = vision.vision_attention(attn, query, key, value, None)
        torch.testing.assert_close(found, expected)

    select_layers(model)[0].attn.register_forward_pre_hook(ask)
    features(model)
    assert calls(model)[0] == {"keys of another shape": 1, "AVQ": 1}


class Bare(torch.nn.Module):
    """A layer outside the blocks of transformers."""

    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 32, 8, 8)
        self.attn = ViTModel(ViTConfig(**WIDE)).layers[0].attention

    def forward(self, pixels):
        return self.attn(self.patches(pixels).flatten(2).mT)


def test_a_layer_outside_a_block():
    model = choosing(Bare)
    exact = features(model)
    torch.testing.assert_close(features(apply_avq(model, EVERY_KEY)), exact, rtol=1e-4, atol=1e-5)
    assert calls(model) == [{"AVQ": 1}]
    assert differ(features(apply_avq(model, COARSE)), exact)
    assert torch.equal(model.forward(images())[0], exact)  # without the hooks around a call


def test_dropout_is_handed_over_in_training():
    model = choosing(lambda: ViTModel(ViTConfig(**WIDE, attention_probs_dropout_prob=0.5)))
    apply_avq(model, COARSE).train()
    torch.manual_seed(3)
    found = features(model)
    torch.manual_seed(3)
    assert calls(model) == [{"dropout": 1}] * 2
    assert torch.equal(features(remove_avq(model)), found)


@pytest.mark.parametrize("family", ["dpt", "siglip"])
def test_attention_weights_come_from_the_models_own_function(family):
    """DPT and SigLIP do not tell the function that weights are wanted."""
    model = tiny_vision(family)
    model.set_attn_implementation("eager")
    expected = model(images(), output_attentions=True).attentions
    apply_avq(model, COARSE)
    found = model(images(), output_attentions=True).attentions
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert calls(model) == [{"attention weights": 1}] * len(found)


def test_another_attention_function(monkeypatch):
    """Catches AVQ in the place of a function that acts on scores, whether it has a name of its own,
    looks like transformers' or stands for it, and a function that is kept from an earlier call."""

    @functools.wraps(modeling_vit.eager_attention_forward)
    def own(module, query, *_, **__):
        return torch.zeros_like(query).transpose(1, 2), None

    model = tiny_vision()
    exact = features(model)
    avq = features(apply_avq(model, COARSE))
    for implementation, place, name in (
        ("own", AttentionInterface._global_mapping, "own"),
        ("sdpa", AttentionInterface._global_mapping, "sdpa"),
        ("eager", vars(modeling_vit), "eager_attention_forward"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(place, name, own)
            model.set_attn_implementation(implementation)
            found = features(model)
            assert calls(model)[0].popitem() == ("another attention function", 1)
            assert torch.equal(features(remove_avq(model)), found)
            assert differ(found, exact)
            model.set_attn_implementation("sdpa")
        assert torch.equal(features(apply_avq(model, COARSE)), avq)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_exported_program_with_a_mask(implementation):
    """Catches AVQ that drops a mask, and exact attention without a word."""
    model, size = apply_avq(tiny_vision(), COARSE), (images(),)
    model.set_attn_implementation(implementation)
    padding = {"attention_mask": torch.arange(65).expand(2, -1) < 60}
    mask = padding if implementation == "sdpa" else {}  # transformers makes one for eager attention
    with pytest.warns(UserWarning, match="runs exact attention instead of AVQ: attention mask"):
        program = torch.export.export(model, size, mask).module()
    expected = features(remove_avq(model), **mask)
    torch.testing.assert_close(program(*size, **mask)[0], expected)


def test_a_token_behind_the_grid():
    """X-CLIP's message: catches one patch too few, and the message in its place."""
    sizes = {"mit_hidden_size": 32, "mit_intermediate_size": 32, "mit_num_attention_heads": 2}
    model = choosing(lambda: XCLIPVisionModel(XCLIPVisionConfig(**WIDE, num_frames=2, **sizes)))
    exact = features(model)
    assert torch.equal(features(apply_avq(model, COARSE)), exact)
    assert kinds(model) == {"tokens are not the grid"}


def test_a_key_norm(tmp_path, monkeypatch):
    """Catches keys of sinks or patches that are not normalized, and norms that are not stored."""
    config = AVQConfig.parse("M4P2C2", query_tile=16, codewords="stored", key_norm=True)
    codebooks, keys = random_codebooks(tiny_vision(), config), []
    with torch.no_grad():
        for name in codebooks.layer_specs:
            codebooks.key_norm(name).weight.zero_()
            codebooks.key_norm(name).bias.fill_(9)
    codebooks.save_pretrained(tmp_path)
    model = apply_avq(tiny_vision(), AVQCodebooks.from_pretrained(tmp_path))
    original = layer_state.attend

    def see(tensors, spec, backend):
        keys.append(torch.cat([tensors.sink_key, tensors.key], dim=2))
        return original(tensors, spec, backend)

    monkeypatch.setattr(layer_state, "attend", see)
    features(model)
    assert all(torch.equal(x, torch.full((2, 2, 65, 16), 9.0)) for x in keys)
    assert len(keys) == 2


@pytest.mark.parametrize(
    "model",
    [
        SwinModel(SwinConfig(embed_dim=16, depths=[1], num_heads=[2], image_size=32)),
        SamVisionModel(SamVisionConfig(**SIZES, output_channels=8, mlp_dim=32)),
        BertModel(BertConfig(**{**WIDE, "vocab_size": 9})),
        torch.nn.Linear(2, 2),
    ],
    ids=lambda model: type(model).__name__,
)
def test_models_without_such_layers_are_refused(model):
    with pytest.raises(TypeError, match=f"know the attention of {type(model).__name__}; it knows"):
        apply_avq(model)
