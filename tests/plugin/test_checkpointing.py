"""Gradient checkpointing: a recomputed layer runs as in its own call, whatever came since."""

import copy
import gc
import threading
from functools import partial

import pytest
import torch
from diffusers import ControlNetModel
from diffusers.models.attention_dispatch import attention_backend
from tiny import predict, random_codebooks, small_unet, tiny_unet
from torch.utils.checkpoint import checkpoint

from avq_diffusers.config import AVQConfig
from avq_diffusers.plugin.apply import apply_avq, avq_disabled, remove_avq
from avq_diffusers.plugin.checkpointing import _BlockInCall
from avq_diffusers.plugin.refinement import set_num_refined

CONFIG = AVQConfig(4, 2, 2, query_tile=16)


@pytest.fixture(params=[False, True], ids=["default", "reentrant"])
def checkpointing(request):
    """The argument of `enable_gradient_checkpointing`, whose default is not reentrant."""
    return partial(checkpoint, use_reentrant=True) if request.param else None


def loss(unet, height=16, width=16, timestep=10):
    generator = torch.Generator().manual_seed(height)
    sample = torch.randn(1, 4, height, width, generator=generator)
    return unet(sample, timestep, torch.ones(1, 5, 32)).sample.square().mean()


def two_sizes(unet):
    return loss(unet, 16, 24) + loss(unet, 24, 16)


def two_lengths(unet):
    return loss(unet, 16, 16) + loss(unet, 24, 16)


def preview_before_backward(unet):
    result = loss(unet, 16, 24)
    predict(unet, 24, 16)
    return result


def preview_in_another_thread(unet):
    result = loss(unet, 16, 24)
    thread = threading.Thread(target=predict, args=(unet, 24, 16))
    thread.start()
    thread.join()
    return result


def disabled_in_forward(unet):
    with avq_disabled(unet):
        return loss(unet)


def enabled_between(unet):
    return disabled_in_forward(unet) + loss(unet)


def another_backend(unet):
    with attention_backend("_native_math"):
        return loss(unet)


def schedule(unet):
    set_num_refined(unet, {1000: 0, 500: 2})
    return loss(unet, timestep=900) + loss(unet, timestep=100)


def another_number_of_parents(unet):
    result = loss(unet)
    set_num_refined(unet, 0)
    return result


CASES = [
    *(two_sizes, two_lengths, preview_before_backward, preview_in_another_thread),
    *(disabled_in_forward, enabled_between, another_backend, schedule),
    another_number_of_parents,
]


def gradients(unet, case):
    case(unet).backward()
    return torch.cat([x.grad.flatten() for x in unet.parameters() if x.grad is not None])


def with_avq(make=small_unet):
    unet = make().train()
    return apply_avq(unet, random_codebooks(unet, CONFIG))


@pytest.mark.feature("two forwards per backward")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_gradients_are_those_without_checkpointing(checkpointing, case):
    """Catches a grid, a number of parents or a switch that a later call changed."""
    expected = gradients(with_avq(), case)
    unet = with_avq()
    unet.enable_gradient_checkpointing(checkpointing)
    torch.testing.assert_close(gradients(unet, case), expected)


def test_the_cases_tell_calls_apart():
    """Negative control of the test above: sizes, switch and number change the gradients."""
    plain = gradients(with_avq(), loss)
    for case in (disabled_in_forward, schedule, partial(loss, height=24)):
        other = gradients(with_avq(), case)
        assert (other - plain).norm() > 1e-2 * plain.norm()


def test_backward_inside_a_disabled_block(checkpointing):
    """Catches a switch that is read again."""

    def gradients_of(unet):
        result = loss(unet)
        with avq_disabled(unet):
            return gradients(unet, lambda _: result)

    expected = gradients_of(with_avq())
    unet = with_avq()
    unet.enable_gradient_checkpointing(checkpointing)
    torch.testing.assert_close(gradients_of(unet), expected)


@pytest.mark.parametrize("order", ["before", "after", "again", "copy"])
def test_checkpointing_may_be_enabled_at_any_time(order):
    """Catches a checkpoint that keeps no call, because diffusers or a copy set it anew."""
    expected = gradients(with_avq(), two_sizes)
    unet = small_unet().train()
    if order in ("before", "again"):
        unet.enable_gradient_checkpointing()
    apply_avq(unet, random_codebooks(unet, CONFIG))
    predict(unet)
    if order != "before":
        unet.enable_gradient_checkpointing()
    if order == "copy":
        predict(unet)
        unet = copy.deepcopy(unet)
    torch.testing.assert_close(gradients(unet, two_sizes), expected)


def test_remove_gives_the_function_back():
    unet = with_avq()
    unet.enable_gradient_checkpointing()
    before = [getattr(x, "_gradient_checkpointing_func", None) for x in unet.modules()]
    loss(unet)
    remove_avq(unet)
    assert [getattr(x, "_gradient_checkpointing_func", None) for x in unet.modules()] == before


def test_several_blocks_of_a_transformer():
    """Catches the call of one block kept for another: SDXL's transformers have up to ten."""

    def make():
        return tiny_unet(
            block_out_channels=(16, 32),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=1,
            transformer_layers_per_block=2,
        )

    def case(unet):
        set_num_refined(unet, {1000: 0, 500: 2}, layer="down_blocks.0")
        first = loss(unet, 16, 24, timestep=900)
        set_num_refined(unet, 1, layer="up_blocks.1.attentions.0.transformer_blocks.1")
        return first + loss(unet, 24, 16, timestep=100)

    expected = gradients(with_avq(make), case)
    unet = with_avq(make)
    unet.enable_gradient_checkpointing()
    torch.testing.assert_close(gradients(unet, case), expected)


def test_controlnet():
    """Catches calls kept in the UNet only."""

    def case(controlnet):
        total = 0
        for height, width in ((16, 24), (24, 16)):
            image = torch.ones(1, 3, 2 * height, 2 * width)
            sample = torch.randn(1, 4, height, width, generator=torch.Generator().manual_seed(0))
            outputs = controlnet(sample, 10, torch.ones(1, 5, 32), image, return_dict=False)
            # The convolutions that end a new ControlNet are zero.
            total += sum(x.square().mean() for x in (*outputs[0], outputs[1]))
        return total

    def make():
        controlnet = ControlNetModel.from_unet(
            small_unet(), conditioning_embedding_out_channels=(8, 8)
        )
        for module in (*controlnet.controlnet_down_blocks, controlnet.controlnet_mid_block):
            torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(0))
        return controlnet

    torch.manual_seed(0)
    controlnet = with_avq(make)
    expected = gradients(copy.deepcopy(controlnet), case)
    controlnet.enable_gradient_checkpointing()
    torch.testing.assert_close(gradients(controlnet, case), expected)


def test_threads():
    """Catches a call of one thread kept for, or left to, another."""
    sizes = [(16, 24), (24, 16), (8, 48), (48, 8)]
    expected = [gradients(with_avq(), partial(loss, height=h, width=w)) for h, w in sizes]
    unet = with_avq()
    unet.enable_gradient_checkpointing()
    inputs = [x for x in unet.parameters() if x.requires_grad]
    barrier, results = threading.Barrier(len(sizes)), {}

    def train(height, width):
        for _ in range(3):
            result = loss(unet, height, width)
            barrier.wait()
            got = torch.autograd.grad(result, inputs, allow_unused=True)
            results.setdefault((height, width), []).append(
                torch.cat([x.flatten() for x in got if x is not None])
            )

    threads = [threading.Thread(target=train, args=size) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for size, wanted in zip(sizes, expected, strict=True):
        for got in results[size]:
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_the_unet(use_reentrant):
    """Such a checkpoint runs the UNet's hooks again, so it needs no help."""

    def case(unet, call=lambda function, *args: function(*args)):
        set_num_refined(unet, {1000: 0, 500: 2})

        def output(sample, timestep):
            return unet(sample, timestep, torch.ones(1, 5, 32)).sample

        total = 0
        for height, width, timestep in ((16, 24, 900), (24, 16, 100)):
            sample = torch.randn(1, 4, height, width, generator=torch.Generator().manual_seed(0))
            total += call(output, sample.requires_grad_(), timestep).square().mean()
        return total

    expected = gradients(with_avq(), case)
    checkpointed = partial(case, call=partial(checkpoint, use_reentrant=use_reentrant))
    torch.testing.assert_close(gradients(with_avq(), checkpointed), expected)


@pytest.mark.parametrize("path", ["", ".attn1"], ids=["block", "layer"])
def test_other_checkpoints_of_blocks_are_refused(path):
    """Catches a recomputation with the last call, where the checkpoint does not keep the call."""
    unet = with_avq()
    module = unet.get_submodule(f"down_blocks.0.attentions.0.transformer_blocks.0{path}")
    module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    result = loss(unet)
    with pytest.raises(RuntimeError, match="use the model's own gradient checkpointing"):
        result.backward()


@pytest.mark.parametrize("change", [remove_avq, lambda unet: with_avq(lambda: unet)])
def test_backward_after_avq_has_changed_is_refused(change):
    """Catches a layer that is recomputed without AVQ, or with other codebooks."""
    unet = with_avq()
    unet.enable_gradient_checkpointing()
    result = loss(unet)
    change(unet)
    with pytest.raises(RuntimeError, match="has lost the AVQ that it ran with; run backward first"):
        result.backward()


def test_calls_do_not_pile_up():
    """Catches calls that are kept after their backward, or without one."""
    unet = with_avq()
    unet.enable_gradient_checkpointing()
    for height in (8, 12, 16, 20):
        loss(unet, height).backward()
    loss(unet)
    gc.collect()
    kept = sum(type(x) is _BlockInCall for x in gc.get_objects())
    assert kept == 0


class TestCompile:
    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    @pytest.mark.parametrize(
        "case",
        [
            two_sizes,
            *(pytest.param(x, marks=pytest.mark.long) for x in (enabled_between, schedule)),
        ],
    )
    def test_compiled_blocks(self, checkpointing, case):
        """Catches compiled code that reads the last call."""
        expected = gradients(with_avq(), case)
        unet = with_avq()
        unet.enable_gradient_checkpointing(checkpointing)
        unet.compile_repeated_blocks(backend="eager", fullgraph=True)
        torch.testing.assert_close(gradients(unet, case), expected)

    @pytest.mark.long
    def test_compiled_unet(self):
        """Catches a checkpoint that cannot be traced."""
        expected = gradients(with_avq(), two_sizes)
        unet = with_avq()
        unet.enable_gradient_checkpointing()
        loss(unet)
        unet.compile(backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(gradients(unet, two_sizes), expected)
