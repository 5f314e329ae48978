"""Compiled models: one graph with AVQ, for all blocks of a kind."""

from itertools import chain

import pytest
import torch
from checks import differ, kinds
from hosts.kinds import KIND
from tiny import predict, small_unet, traced_unet, tuned_codebooks
from torch._dynamo.testing import CompileCounter

from avq_diffusers import AVQConfig, apply_avq, avq_disabled, remove_avq, select_layers

feature = pytest.mark.feature


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@feature("torch.compile of the UNet (one graph)")
@torch.no_grad()
def test_switching_a_compiled_unet():
    """Catches graph breaks, also by a projection's hook, AVQ lost in compiled code, changes that
    are cast there, and compiled code that does not notice AVQ coming, pausing and going."""
    unet = traced_unet().double()
    select_layers(unet)[0].attn.to_q.register_forward_hook(lambda layer, args, output: 2 * output)
    inputs = torch.ones(1, 4, 16, 16).double(), 10, torch.ones(1, 5, 32).double()
    codebooks, exact = (tuned_codebooks(unet, AVQConfig.parse("M4P2C2")), unet(*inputs).sample)
    avq = apply_avq(unet, codebooks)(*inputs).sample
    counter = CompileCounter()
    compiled = torch.compile(remove_avq(unet), backend=counter, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs).sample, exact)
    assert apply_avq(compiled, codebooks) is compiled
    for _ in range(2):
        output = compiled(*inputs).sample
        torch.testing.assert_close(output, avq)
        assert (output - exact).norm() > 100 * (output - avq).norm()
    assert counter.frame_count == 2
    assert kinds(unet) == set()  # compiled calls are not counted
    with avq_disabled(compiled):
        torch.testing.assert_close(compiled(*inputs).sample, exact)
    torch.testing.assert_close(compiled(*inputs).sample, avq)
    torch.testing.assert_close(remove_avq(compiled)(*inputs).sample, exact)


@feature("torch.compile of its blocks (one graph)")
def test_repeated_blocks():
    """Catches a guard per layer or per resolution: the recompile limit is near."""
    unet, sizes = small_unet(), ((16, 16), (24, 16), (16, 40), (24, 40))
    apply_avq(unet, tuned_codebooks(unet, AVQConfig.parse("M4P2C2")))
    expected, counter = [predict(unet, *size) for size in sizes], CompileCounter()
    unet.compile_repeated_blocks(backend=counter, fullgraph=True)
    for size, want in zip(sizes, expected, strict=True):
        torch.testing.assert_close(predict(unet, *size), want)
    assert counter.frame_count == 3  # as without AVQ


SMALL = {"query_tile": 16, "num_parents": 4, "num_children": 2}


@pytest.mark.parametrize(
    ("name", "layers", "num_graphs"),
    [
        # The last block drops the text.
        pytest.param("SD3", {}, 2, marks=feature("blocks of SD3 compiled one by one")),
        # As many as without AVQ: the first single block gets an image of other strides.
        pytest.param(
            *("Flux", {"num_single_layers": 3}, 3),
            marks=feature("repeated blocks of Flux compiled"),
        ),
        # They call PyTorch's attention; without AVQ, too, one graph serves one of the two.
        ("CogVideoX", {}, 2),
    ],
)
def test_blocks_of_transformers(name, layers, num_graphs):
    """Catches graph breaks, guards on a layer's number or state, an attention that compiled code
    does not see, and AVQ that compiled blocks miss when it comes or changes."""
    kind, counter = KIND[name], CompileCounter()
    model = kind.make(**layers)
    exact, coarse = kind.predict(model), kind.config(**SMALL, num_refined=2)
    expected = kind.predict(apply_avq(model, coarse))
    assert differ(expected, exact)
    remove_avq(model)
    lists = [part for part in model.children() if isinstance(part, torch.nn.ModuleList)]
    for block in chain(*lists):
        block.compile(backend=counter, fullgraph=True)
    apply_avq(model, coarse)
    for _ in range(2):
        torch.testing.assert_close(kind.predict(model), expected)
    assert counter.frame_count == num_graphs
    if name == "CogVideoX":  # the others read their options in the same place
        found = kind.predict(apply_avq(model, kind.config(**SMALL, threshold=0)))
        assert (found - exact).norm() < 1e-5 * exact.norm()
