"""AVQ in vision models of transformers: what runs, what is handed over, what stays untouched."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from checks import differ
from tiny_vision import (
    ANY_SIZE,
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
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.vit.modeling_vit import ViTAttention

from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts import state as layer_state
from avq_diffusers.hosts import vision
from avq_diffusers.hosts.codebooks import AVQCodebooks
from avq_diffusers.vision import (
    apply_avq,
    avq_disabled,
    gather_codebooks,
    remove_avq,
    select_layers,
    set_num_refined,
    summary,
)

EVERY_KEY = AVQConfig(8, 4, 8, query_tile=16, exact_keys=64)  # of 8 x 8 patches


def calls(model):
    return [row.calls for row in summary(model).rows]


@pytest.fixture
def seen(monkeypatch):
    """The arguments of every AVQ call, as dictionaries."""
    found = []

    def record(query, key, value, codebook, **options):
        found.append({"query": query, "key": key, "value": value, "codebook": codebook, **options})
        return original(query, key, value, codebook, **options)

    original = layer_state.attention_and_backend
    monkeypatch.setattr(layer_state, "attention_and_backend", record)
    return found


def test_a_text_tower_stays():
    """Catches an implementation that is set for both towers, where text loses its causal mask."""
    model, ids = tiny_clip(), torch.randint(3, 99, (1, 7))

    def both():
        found = model(input_ids=ids, pixel_values=images())
        return found.text_embeds, found.image_embeds

    with torch.no_grad():
        text, image = both()
        apply_avq(model, COARSE)
        assert [row.name for row in summary(model).rows] == [
            f"vision_model.encoder.layers.{i}.self_attn" for i in range(2)
        ]
        avq_text, avq_image = both()
    assert torch.equal(avq_text, text)
    assert differ(avq_image, image)
    assert model.config.text_config._attn_implementation == "sdpa"


def test_models_that_share_a_config_do_not_share_avq():
    config = ViTConfig(**WIDE)
    one, other = (choosing(lambda: ViTModel(config)) for _ in range(2))
    exact = features(one)
    apply_avq(one, COARSE)
    assert torch.equal(features(other), exact)
    apply_avq(other, EVERY_KEY)
    avq = features(one)
    assert differ(avq, exact)
    remove_avq(other)
    assert torch.equal(features(one), avq)
    assert torch.equal(features(other), exact)


def test_a_pickle_brings_the_function(monkeypatch):
    content = pickle.dumps(apply_avq(tiny_vision(), COARSE))
    monkeypatch.delitem(AttentionInterface._global_mapping, vision.NAME)
    features(pickle.loads(content))
    assert vision.NAME in ALL_ATTENTION_FUNCTIONS


def test_kernels_run_in_the_model():
    """Catches tokens behind CLS whose strides the kernels do not read."""
    model = choosing(lambda: ViTModel(ViTConfig(**WIDE | {"num_hidden_layers": 1})))
    pixels = images(32, 32)[:1]
    on_torch, on_kernels = (
        features(apply_avq(model, COARSE, backend=backend), pixels, **ANY_SIZE)
        for backend in ("torch", "triton")
    )
    assert summary(model).rows[0].runs == "AVQ (triton backend)"
    torch.testing.assert_close(on_kernels, on_torch, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("family", ["vit", "dinov3", "siglip"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(family, dtype):
    """DINOv3 rotates queries and keys in float32."""
    model = tiny_vision(family)
    exact = features(model)
    with torch.autocast("cpu", dtype):
        near = features(apply_avq(model, EVERY_KEY))
        assert features(model).dtype == near.dtype
    halved = features(model.to(dtype), images().to(dtype))
    assert halved.dtype == dtype
    assert calls(model) == [{"AVQ": 3}] * 2
    for found in (near, halved):
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
    apply_avq(model, AVQConfig(4, 2, 2, exact=("layers.1",)))
    assert torch.equal(features(model), expected)
    assert calls(model)[0] == {reason: 1}
    assert summary(model).rows[0].runs == f"exact: {reason}"


def test_keys_of_another_shape_are_handed_over():
    """A prefix of learned keys, such as PEFT's, is no key of the grid."""
    model, found = apply_avq(tiny_vision(), COARSE), []
    query, key, value = (torch.randn(2, 2, length, 16) for length in (65, 70, 70))
    attn = select_layers(model)[0].attn

    def ask(attn, args):
        found.append(vision.vision_attention(attn, query, key, value, None)[0])

    attn.register_forward_pre_hook(ask)
    features(model)
    expected = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(found[0], expected.transpose(1, 2))
    assert calls(model)[0] == {"keys of another shape": 1, "AVQ": 1}


def test_offloaded_weights():
    """Between calls they are on the meta device, which has no keys and no speed."""
    model = tiny_vision()
    avq = features(apply_avq(model, COARSE))
    remove_avq(model)
    cpu_offload(model)
    assert torch.equal(features(apply_avq(model, COARSE)), avq)
    assert calls(model) == [{"AVQ": 1}] * 2


class Bare(torch.nn.Module):
    """A layer outside the blocks of transformers."""

    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 32, 8, 8)
        config = ViTConfig(**WIDE)
        config._attn_implementation = "sdpa"
        self.attn = ViTAttention(config)

    def forward(self, pixels):
        return self.attn(self.patches(pixels).flatten(2).mT)


def test_a_layer_outside_a_block():
    model = choosing(Bare)
    exact = features(model)
    torch.testing.assert_close(features(apply_avq(model, EVERY_KEY)), exact, rtol=1e-4, atol=1e-5)
    assert calls(model) == [{"AVQ": 1}]
    assert differ(features(apply_avq(model, COARSE)), exact)


def test_dropout_is_handed_over_in_training():
    model = choosing(lambda: ViTModel(ViTConfig(**WIDE, attention_probs_dropout_prob=0.5)))
    apply_avq(model, COARSE).train()
    torch.manual_seed(3)
    found = features(model)
    torch.manual_seed(3)
    assert torch.equal(features(remove_avq(model)), found)
    apply_avq(model.eval(), COARSE)
    features(model)
    features(model.train())
    assert calls(model) == [{"AVQ": 1, "dropout": 1}] * 2


@pytest.mark.parametrize("family", ["vit", "dpt", "siglip"])
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


def test_the_models_implementation_may_change_under_avq(monkeypatch):
    """Catches a previous function that is kept from when AVQ was applied."""
    model, names = apply_avq(tiny_vision(), COARSE), []

    def own(module, query, key, value, mask, **arguments):
        names.append(type(module).__name__)
        return torch.zeros_like(query).transpose(1, 2), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "own", own)
    model.set_attn_implementation("own")
    features(model)
    assert calls(model) == [{"AVQ": 1}] * 2
    with avq_disabled(model):
        features(model)
    assert names == ["ViTAttention"] * 2
    remove_avq(model)
    assert model.config._attn_implementation == "own"


def test_a_route_of_tokens():
    model = apply_avq(tiny_vision(), COARSE, route=33)
    features(model)
    features(model, images(32, 64), **ANY_SIZE)
    assert calls(model) == [{"AVQ": 1, "few tokens": 1}] * 2


def test_refined_parents_are_set(seen):
    """Catches a plan that reaches other layers, and `exact` that still runs AVQ."""
    model = apply_avq(tiny_vision(), COARSE)
    assert set_num_refined(model, {"layers": 1, "layers.1": 4}) is model
    features(model)
    assert [call["num_refined"] for call in seen] == [1, 4]
    assert [row.config for row in summary(model).rows] == ["M4P1C2", "M4P4C2"]
    set_num_refined(model, "exact", layer="layers.0")
    features(model)
    assert calls(model) == [{"AVQ": 1, "scheduled": 1}, {"AVQ": 2}]
    with pytest.raises(ValueError, match=r"must be between 0 and 4 in layers\.0"):
        set_num_refined(model, 5)
    with pytest.raises(ValueError, match="a vision model has no schedules by timestep"):
        set_num_refined(model, {1000: 1, 500: 2})
    with pytest.raises(ValueError, match="this vision model has no AVQ layer; call apply_avq"):
        set_num_refined(remove_avq(model), 1)


def test_some_layers_stay_exact():
    config = AVQConfig(4, 2, 2, exact=("layers.0",), overrides={"layers.1": {"num_refined": 1}})
    model = apply_avq(tiny_vision(), config)
    features(model)
    first, second = summary(model).rows
    assert (first.runs, first.config) == ("exact: sdpa", "")
    assert (second.runs, second.config) == ("AVQ (torch backend)", "M4P1C2")
    with pytest.raises(ValueError, match="but got 'attn'; one of them is layers"):
        apply_avq(model, AVQConfig(exact=("attn",)))
    features(model)  # what was refused changed nothing
    assert calls(model)[1] == {"AVQ": 2}


def random_codebooks(model, config):
    generator = torch.Generator().manual_seed(5)
    parents = torch.randn(2, config.num_parents, 16, generator=generator)
    offsets = 0.5 * torch.randn(2, config.num_parents, 1, 16, generator=generator)
    children = parents[:, :, None] + torch.cat([offsets, -offsets], dim=2)
    return gather_codebooks(
        model, config, {layer.name: Codebook(parents, children) for layer in select_layers(model)}
    )


def test_the_papers_form(tmp_path, seen):
    """Catches own codewords in place of stored ones, and keys that are not normalized."""
    config = AVQConfig(4, 2, 2, query_tile=16, codewords="stored", key_norm=True)
    model = tiny_vision()
    codebooks = random_codebooks(model, config)
    with torch.no_grad():
        for layer in select_layers(model):
            codebooks.key_norm(layer.name).bias.fill_(9)
    found = features(apply_avq(model, codebooks))
    for call, layer in zip(seen, select_layers(model), strict=True):
        assert call["codewords"] == "stored"
        stored = codebooks.codebook(layer.name).parents
        assert call["codebook"].parents.data_ptr() == stored.data_ptr()
        for keys in (call["key"], call["sink_key"]):
            torch.testing.assert_close(keys.mean(-1), torch.full(keys.shape[:-1], 9.0))
    codebooks.save_pretrained(tmp_path)
    loaded = AVQCodebooks.from_pretrained(tmp_path)
    assert torch.equal(features(apply_avq(tiny_vision(), loaded)), found)
    other = choosing(lambda: ViTModel(ViTConfig(**WIDE | {"num_hidden_layers": 1})))
    with pytest.raises(ValueError, match="codebooks of another model"):
        apply_avq(other, loaded)
    select_layers(model)[0].anchor._is_replica = True
    with pytest.raises(NotImplementedError, match=r"nn\.DataParallel runs one layer on several"):
        features(model)


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


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((5,), TypeError, "or a model, but got int."),
        ((None, "M64"), TypeError, "expected AVQCodebooks, an AVQConfig or nothing"),
        ((None, AVQConfig(codewords="stored")), ValueError, "needs codebooks, which"),
        ((None, AVQConfig(key_norm=True)), ValueError, "needs codebooks, which"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, error, message):
    model, *rest = arguments
    with pytest.raises(error, match=message):
        apply_avq(tiny_vision() if model is None else model, *rest)


def test_nothing_is_removed_from_what_is_no_model():
    with pytest.raises(TypeError, match="or a model, but got str"):
        remove_avq("vit")
