"""AVQ without codebooks: codewords from the keys of each call."""

import re

import pytest
import torch
from checks import differ, kinds
from tiny import CONFIG as STORED
from tiny import draw, predict, random_codebooks, sdxl_pipe, small_unet, tiny_pipe, tiny_unet

from avq_diffusers import (
    AVQConfig,
    AVQProcessor,
    AVQStableDiffusionPipeline,
    apply_avq,
    avq_attention,
    avq_disabled,
    measure_capture,
    measure_sensitivity,
    remove_avq,
    scalecrafter,
    select_layers,
    set_num_refined,
    summary,
)
from avq_diffusers.attention.orders import query_order

CONFIG = AVQConfig(4, 2, 2, query_tile=16, levels=(0, 1))


def test_a_layer_computes_the_operation_on_its_own_keys():
    """Catches codewords of another call, tiles in raster order, or sizes that are not passed on."""
    unet = apply_avq(tiny_unet(), AVQConfig(6, 3, 2, query_tile=16, levels=(1,), num_updates=1))
    layer = select_layers(unet, (1,))[0]
    seen = {}
    hooks = [
        layer.attn.register_forward_pre_hook(lambda attn, args: seen.update(tokens=args[0])),
        layer.attn.register_forward_hook(lambda attn, args, output: seen.update(output=output)),
    ]
    predict(unet, 12, 20)
    for hook in hooks:
        hook.remove()
    attn = layer.attn
    query, key, value = (
        projection(seen["tokens"]).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
        for projection in (attn.to_q, attn.to_k, attn.to_v)
    )
    options = {"num_parents": 6, "num_children": 3, "num_refined": 2, "query_tile": 16}
    attended = avq_attention(
        query, key, value, num_updates=1, query_order=query_order(6, 10), **options
    )
    expected = attn.to_out[0](attended.transpose(1, 2).flatten(2))
    assert torch.equal(seen["output"], expected)
    assert not torch.equal(
        avq_attention(query, key, value, query_order=query_order(6, 10), **options), attended
    )


def test_as_many_parents_as_tokens_is_exact_attention():
    """Catches any loss between the projections and the output."""
    unet = tiny_unet()
    exact = predict(unet)
    apply_avq(unet, AVQConfig(256, 0, 0, levels=(0, 1)))
    assert (predict(unet) - exact).norm() < 1e-5 * exact.norm()
    apply_avq(unet, AVQConfig(16, 0, 0, levels=(0, 1)))
    assert differ(predict(unet), exact)


def test_as_many_exact_keys_as_tokens_is_exact_attention():
    """Catches exact keys that do not reach the layers, or not by their overrides."""
    unet = tiny_unet()
    exact = predict(unet)
    overrides = {"1": {"exact_keys": 256}}
    apply_avq(unet, AVQConfig(4, 2, 2, query_tile=16, levels=(1,), overrides=overrides))
    assert (predict(unet) - exact).norm() < 1e-5 * exact.norm()
    assert {row.config for row in summary(unet).rows} == {"M4P2C2E256", ""}
    apply_avq(unet, AVQConfig(4, 2, 2, query_tile=16, levels=(1,)))
    assert differ(predict(unet), exact)


def test_it_is_undone_and_switched_off():
    pipe = tiny_pipe()
    exact = draw(pipe)
    avq = draw(apply_avq(pipe, CONFIG))
    assert differ(avq, exact)
    assert kinds(pipe) == {"AVQ"}
    with avq_disabled(pipe):
        assert torch.equal(draw(pipe), exact)
    assert torch.equal(draw(pipe), avq)
    assert torch.equal(draw(remove_avq(pipe)), exact)


@pytest.mark.parametrize(("pipe", "level"), [(tiny_pipe, 0), (sdxl_pipe, 1)])
def test_the_default_is_the_finest_level(pipe, level):
    """Catches a default that SDXL, whose finest level has no self-attention, refuses."""
    rows = summary(apply_avq(pipe())).rows
    assert {row.level for row in rows if row.config} == {level}
    assert {row.config for row in rows} == {"M64P16C8", ""}


@pytest.mark.parametrize("processor", [AVQProcessor(), AVQProcessor(CONFIG)])
def test_the_owners_line(processor):
    pipe = tiny_pipe(cls=AVQStableDiffusionPipeline)
    pipe.set_attn_processor(processor)
    expected = draw(apply_avq(tiny_pipe(), processor.source))
    assert torch.equal(draw(pipe), expected)
    assert kinds(pipe) == {"AVQ"}


def test_a_processor_prepares_a_unet():
    unet = tiny_unet()
    unet.set_attn_processor(AVQProcessor(CONFIG, unet=unet))
    assert torch.equal(predict(unet), predict(apply_avq(tiny_unet(), CONFIG)))


def test_what_measures_and_tunes_it():
    """Catches tools that look for a codebook."""
    pipe = apply_avq(tiny_pipe(), CONFIG)
    avq = draw(pipe)
    profile = measure_capture(pipe, ["a fox"], num_inference_steps=2, parts=1, progress=False)
    assert draw(set_num_refined(pipe, profile.at_least(1.0))).shape == avq.shape
    assert differ(draw(set_num_refined(pipe, 0)), avq)
    assert differ(draw(set_num_refined(pipe, {1000: 4, 500: 1})), avq)
    errors = measure_sensitivity(pipe, ["a fox"], num_inference_steps=1, progress=False)
    assert len(errors) == 6
    assert min(errors.values()) > 0
    with scalecrafter(pipe, 256, 256):
        assert draw(pipe, height=256, width=256).isfinite().all()


def test_compiles_to_one_graph():
    unet = apply_avq(small_unet(), AVQConfig(4, 2, 2, query_tile=16))
    expected = predict(unet)
    compiled = torch.compile(unet, backend="aot_eager", fullgraph=True)
    assert (predict(compiled) - expected).norm() < 1e-5 * expected.norm()


def test_gradients_reach_the_projections():
    unet = apply_avq(tiny_unet(), CONFIG).train()
    sample, context = torch.randn(1, 4, 16, 16), torch.randn(1, 7, 32)
    unet(sample, 10, context).sample.square().sum().backward()
    for layer in select_layers(unet, (0, 1)):
        assert layer.attn.to_k.weight.grad.norm() > 0


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("M64P16C8", TypeError, "expected AVQCodebooks, an AVQConfig or nothing, but got str."),
        (
            AVQConfig(codewords="stored"),
            ValueError,
            'codewords="stored" needs codebooks, which calibrate(pipe, prompts, config) makes.',
        ),
        (
            AVQConfig(key_norm=True),
            ValueError,
            "key_norm needs codebooks, which calibrate(pipe, prompts, config) makes.",
        ),
        (AVQConfig(levels=(7,)), ValueError, "no self-attention at level 7"),
    ],
)
def test_refused(source, error, message):
    unet = tiny_unet()
    with pytest.raises(error, match=re.escape(message)):
        apply_avq(unet, source)
    assert not any(row.config for row in summary(unet).rows)


def test_codebooks_may_be_represented_by_means():
    """Catches a loaded form that is not the saved one, and means that change nothing."""
    unet = tiny_unet()
    codebooks = random_codebooks(unet)
    stored = predict(apply_avq(unet, codebooks))
    codebooks.avq_config = AVQConfig(**vars(STORED) | {"codewords": "means"})
    assert differ(predict(apply_avq(unet, codebooks)), stored)
