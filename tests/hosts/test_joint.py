"""SD3's joint attention: keys of the image by AVQ, those of the text as sinks."""

from types import SimpleNamespace

import pytest
import torch
from checks import differ
from diffusers import SanaTransformer2DModel
from diffusers.models.attention_processor import JointAttnProcessor2_0
from tiny_transformers import CONFIG, predict, sd3_transformer

from avq_diffusers import AVQConfig, apply_avq, remove_avq


@pytest.mark.feature("fused projections of SD3 (replace AVQ: reported)")
def test_fused_afterwards():
    model = sd3_transformer(qk_norm=None, dual_attention_layers=())
    exact = predict(model)
    avq = predict(apply_avq(model, CONFIG))
    model.fuse_qkv_projections()
    with pytest.warns(UserWarning, match="FusedJointAttnProcessor2_0"):
        fused = predict(model)
    assert not differ(fused, exact)
    model.unfuse_qkv_projections()
    assert torch.equal(predict(model), avq)


def test_its_processor_elsewhere():
    """Catches AVQ in a layer that is to stay exact, and a processor that removal leaves.

    An unloaded IP-Adapter leaves new processors of the same class.
    """
    model = sd3_transformer()
    exact = predict(model)
    apply_avq(model, AVQConfig.parse("M4P2C2", query_tile=16, exact=("transformer_blocks.0",)))
    avq = predict(model)
    for processor in (model.transformer_blocks[1].attn.processor, None):
        rebuilt = {name: type(x)() for name, x in model.attn_processors.items()}
        model.set_attn_processor(processor or rebuilt)
        assert torch.equal(predict(model), avq)
    assert torch.equal(predict(remove_avq(model)), exact)
    assert {type(x) for x in model.attn_processors.values()} == {JointAttnProcessor2_0}


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


def test_other_models_are_refused():
    other = SanaTransformer2DModel(num_layers=1, sample_size=4)
    for second in (other, torch.nn.ReLU()):
        pipe = SimpleNamespace(transformer=sd3_transformer(), transformer_2=second)
        with pytest.raises(TypeError, match=f"not know the attention of {type(second).__name__}"):
            apply_avq(pipe)
