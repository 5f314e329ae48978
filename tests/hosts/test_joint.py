"""SD3's joint attention: keys of the image by AVQ, those of the text as sinks."""

from types import SimpleNamespace

import pytest
import torch
from checks import differ
from diffusers import SD3ControlNetModel
from diffusers.models.attention_processor import JointAttnProcessor2_0
from tiny_transformers import CONFIG, EXACT, choosy, inputs, predict, sd3_transformer

from avq_diffusers import (
    AVQConfig,
    apply_avq,
    avq_attention,
    remove_avq,
    set_num_refined,
    summary,
)
from avq_diffusers.attention.orders import query_order

OPTIONS = {"num_parents": 4, "num_children": 2, "num_refined": 2, "query_tile": 16}


def calls(model) -> list[dict[str, int]]:
    return [row.calls for row in summary(model).rows]


def seen_in(attn, model):
    """The inputs of a layer and its output, in a call of its model."""
    seen = {}

    def keep(attn, args, kwargs, output):
        seen.update(kwargs, output=output)

    hook = attn.register_forward_hook(keep, with_kwargs=True)
    predict(model, 6, 10)
    hook.remove()
    return seen


def heads(attn, tokens, *names):
    """Queries, keys and values of a stream, with its norms."""
    query, key, value = (
        getattr(attn, name)(tokens).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
        for name in names
    )
    is_text = names[0] == "add_q_proj"
    norm_q, norm_k = (
        (attn.norm_added_q, attn.norm_added_k) if is_text else (attn.norm_q, attn.norm_k)
    )
    return (norm_q(query), norm_k(key), value) if norm_q else (query, key, value)


@pytest.mark.feature("SD3")
@pytest.mark.parametrize("qk_norm", ["rms_norm", None])
class TestLayers:
    """Each kind of layer, computed by hand from what goes in."""

    @pytest.fixture
    def model(self, qk_norm):
        return apply_avq(sd3_transformer(qk_norm=qk_norm), CONFIG)

    @pytest.mark.parametrize("block", [0, 2], ids=["first", "last"])
    def test_joint_attention(self, model, block):
        """Catches text among the codewords, norms of the other stream and tiles in raster order."""
        attn = model.transformer_blocks[block].attn
        seen = seen_in(attn, model)
        image = heads(attn, seen["hidden_states"], "to_q", "to_k", "to_v")
        text = heads(attn, seen["encoder_hidden_states"], "add_q_proj", "add_k_proj", "add_v_proj")
        query, key, value = image
        order = key_order = query_order(6, 10)
        if not attn.context_pre_only:
            query = torch.cat([query, text[0]], dim=2)
            order = torch.cat([order, torch.arange(60, query.shape[2])])
        attended = avq_attention(
            query,
            key,
            value,
            sink_key=text[1],
            sink_value=text[2],
            query_order=order,
            key_order=key_order,
            **OPTIONS,
        ).transpose(1, 2)
        expected = attn.to_out[0](attended[:, :60].flatten(2))
        assert torch.equal(seen["output"][0], expected)
        if not attn.context_pre_only:
            expected = attn.to_add_out(attended[:, 60:].flatten(2))
            assert torch.equal(seen["output"][1], expected)

    def test_image_attention(self, model):
        attn = model.transformer_blocks[1].attn2
        seen = seen_in(attn, model)
        image = heads(attn, seen["hidden_states"], "to_q", "to_k", "to_v")
        attended = avq_attention(*image, query_order=query_order(6, 10), **OPTIONS)
        assert torch.equal(seen["output"], attn.to_out[0](attended.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (8, 9), (12, 4)])
def test_any_grid_and_batch(size):
    """Catches an order of another grid, and fewer tokens than parents."""
    model = sd3_transformer()
    exact = predict(model, *size, batch=1)
    apply_avq(model, EXACT)
    assert (predict(model, *size, batch=1) - exact).norm() < 1e-5 * exact.norm()
    assert {row.num_tokens for row in summary(model).rows} == {size[0] * size[1]}


def test_refinement_and_exact_layers():
    """Catches changes that do not reach the layers."""
    model = sd3_transformer()
    exact = predict(model)
    apply_avq(model, AVQConfig(4, 2, 2, query_tile=16, exact=("transformer_blocks.0",)))
    coarse = predict(model)
    assert [bool(row.config) for row in summary(model).rows] == [False] * 2 + [True] * 3
    set_num_refined(model, {"transformer_blocks.1": 0, "transformer_blocks.2": 4})
    assert [row.config for row in summary(model).rows][2:] == ["M4P0C2", "M4P0C2", "M4P4C2"]
    assert differ(predict(model), coarse)
    set_num_refined(model, "exact")
    assert torch.equal(predict(model), exact)


def test_bfloat16():
    model = sd3_transformer().to(torch.bfloat16)
    arguments = {name: x.bfloat16() for name, x in inputs(model).items()}
    exact = predict(model, **arguments)
    close = predict(apply_avq(model, EXACT), **arguments)
    assert close.dtype == torch.bfloat16
    assert (close - exact).norm() < 2e-2 * exact.norm()


@pytest.mark.feature("skip-layer guidance of SD3")
def test_skipped_layers_and_another_batch():
    """Catches a state of the last batch, and of blocks that do not run."""
    model = sd3_transformer()
    exact = predict(model, batch=1, skip_layers=[1])
    apply_avq(model, EXACT)
    predict(model)
    close = predict(model, batch=1, skip_layers=[1])
    assert (close - exact).norm() < 1e-5 * exact.norm()
    assert calls(model) == [{"AVQ": count} for count in (2, 2, 1, 1, 2)]


class TestOtherProcessors:
    @pytest.mark.feature("fused projections of SD3 (replace AVQ: reported)")
    def test_fused_afterwards(self):
        model = sd3_transformer(qk_norm=None, dual_attention_layers=())
        exact = predict(model)
        avq = predict(apply_avq(model, CONFIG))
        model.fuse_qkv_projections()
        with pytest.warns(UserWarning, match="FusedJointAttnProcessor2_0"):
            fused = predict(model)
        assert not differ(fused, exact)
        model.unfuse_qkv_projections()
        assert torch.equal(predict(model), avq)

    def test_set_on_other_layers(self):
        """Catches AVQ in a layer that is to stay exact, and a processor that removal leaves."""
        model = sd3_transformer()
        exact = predict(model)
        apply_avq(model, AVQConfig(4, 2, 2, query_tile=16, exact=("transformer_blocks.0",)))
        avq = predict(model)
        model.set_attn_processor(model.transformer_blocks[1].attn.processor)
        assert torch.equal(predict(model), avq)
        assert torch.equal(predict(remove_avq(model)), exact)
        assert {type(x) for x in model.attn_processors.values()} == {JointAttnProcessor2_0}

    def test_a_rebuilt_processor_still_runs(self):
        """As an unloaded IP-Adapter leaves it."""
        model = apply_avq(sd3_transformer(), CONFIG)
        avq = predict(model)
        rebuilt = {name: type(x)() for name, x in model.attn_processors.items()}
        model.set_attn_processor(rebuilt)
        assert torch.equal(predict(model), avq)


@pytest.mark.feature("blocks of SD3 compiled one by one")
def test_blocks_compile_one_by_one():
    """Catches guards on a layer's number or state: one graph serves blocks of one kind."""
    model = sd3_transformer(num_layers=4, dual_attention_layers=())
    eager = predict(apply_avq(model, CONFIG))
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph

    for block in model.transformer_blocks:
        block.compile(backend=backend, fullgraph=True)
    assert torch.allclose(predict(model), eager, atol=1e-5)
    assert len(graphs) == 2  # the last block drops the text
    predict(model)
    assert len(graphs) == 2


@pytest.mark.feature("ControlNet of SD3")
class TestControlNet:
    @pytest.fixture
    def controlnet(self):
        torch.manual_seed(1)
        config = dict(sd3_transformer().config) | {"num_layers": 2, "dual_attention_layers": ()}
        del config["qk_norm"]
        controlnet = SD3ControlNetModel.from_config(config)
        for name, weight in controlnet.named_parameters():  # zero, so that training starts gently
            if "controlnet_blocks" in name:
                torch.nn.init.normal_(weight, std=0.1)
        return choosy(controlnet)

    def control(self, controlnet, **overrides):
        arguments = inputs(sd3_transformer()) | overrides
        image = torch.ones_like(arguments["hidden_states"])
        with torch.no_grad():
            return controlnet(**arguments, controlnet_cond=image, return_dict=False)[0]

    def test_its_residuals_arrive(self, controlnet):
        model = sd3_transformer()
        residuals = self.control(controlnet)
        exact = predict(model, block_controlnet_hidden_states=residuals)
        assert differ(exact, predict(model))
        apply_avq(model, EXACT)
        close = predict(model, block_controlnet_hidden_states=residuals)
        assert (close - exact).norm() < 1e-5 * exact.norm()

    def test_it_runs_avq_itself(self, controlnet):
        exact = self.control(controlnet)
        for residual, expected in zip(
            self.control(apply_avq(controlnet, EXACT)), exact, strict=True
        ):
            assert (residual - expected).norm() < 1e-5 * expected.norm()
        assert calls(controlnet) == [{"AVQ": 1}] * 2


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"levels": (0, 1)}, "no self-attention at level 1, only at levels 0"),
            ({"exact": ("up_blocks",)}, "exact must name layers of this model at .*, but got 'up_"),
            ({"exact": ("transformer_blocks",)}, "exact leaves no layer"),
            ({"overrides": {"x": {"num_refined": 1}}}, "overrides must have levels or names of"),
            ({"codewords": "stored"}, 'codewords="stored" needs codebooks'),
            ({"key_norm": True}, "key_norm needs codebooks"),
        ],
    )
    def test_configurations(self, config, message):
        model = sd3_transformer()
        with pytest.raises(ValueError, match=message):
            apply_avq(model, AVQConfig(**config))
        assert not model._forward_pre_hooks

    def test_other_modules(self):
        pipe = SimpleNamespace(transformer=sd3_transformer(), transformer_2=torch.nn.ReLU())
        with pytest.raises(TypeError, match="AVQ does not know the attention of ReLU"):
            apply_avq(pipe)

    def test_unknown_transformers(self):
        from diffusers import PixArtTransformer2DModel

        model = PixArtTransformer2DModel(2, 8, num_layers=1, cross_attention_dim=16)
        with pytest.raises(TypeError, match="does not know the attention of PixArtTransformer2D"):
            apply_avq(model)


def test_a_number_of_tokens_routes():
    model = apply_avq(sd3_transformer(), CONFIG, route=100)
    predict(model, 8, 12)
    predict(model, 10, 10)
    assert calls(model) == [{"few tokens": 1, "AVQ": 1}] * 5
