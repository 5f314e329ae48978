"""Gradient checkpointing of UNets: a recomputed layer runs as in its own call, whatever came since.

That it recomputes the grid of its call, and refuses other checkpoints, the contract holds.
"""

import copy
from functools import partial

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from tiny import predict, random_codebooks, traced_unet
from torch.utils.checkpoint import checkpoint

from avq_diffusers import AVQConfig, apply_avq, avq_disabled, remove_avq, set_num_refined

CONFIG = AVQConfig.parse("M4P2C2", query_tile=16)


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


def disabled_in_forward(unet):
    with avq_disabled(unet):
        return loss(unet)


def enabled_between(unet):
    return disabled_in_forward(unet) + loss(unet)


def disabled_in_backward(unet):
    result = loss(unet)
    with avq_disabled(unet):
        result.backward()
    return loss(unet)


def another_backend(unet):
    with attention_backend("_native_math"):
        return loss(unet)


def schedule(unet):
    set_num_refined(unet, {1000: 0, 500: 2})
    return loss(unet, timestep=900) + loss(unet, timestep=100)


def gradients(unet, case):
    case(unet).backward()
    return torch.cat([x.grad.flatten() for x in unet.parameters() if x.grad is not None])


def with_avq(unet=None):
    unet = traced_unet().train() if unet is None else unet
    return apply_avq(unet, random_codebooks(unet, CONFIG))


def checkpointed(function=None):
    unet = with_avq()
    unet.enable_gradient_checkpointing(function)
    return unet


@pytest.mark.feature("two forwards per backward")
@pytest.mark.parametrize(
    "case", [two_sizes, enabled_between, disabled_in_backward, another_backend, schedule]
)
def test_gradients_are_those_without_checkpointing(checkpointing, case):
    """Catches a grid, a number of parents or a switch that a later call changed."""
    unet = checkpointed(checkpointing)
    torch.testing.assert_close(gradients(unet, case), gradients(with_avq(), case))


def test_the_cases_tell_calls_apart():
    """Negative control of the test above: sizes, switch and number change the gradients."""
    plain = gradients(with_avq(), loss)
    for case in (disabled_in_forward, schedule, partial(loss, height=24)):
        other = gradients(with_avq(), case)
        assert (other - plain).norm() > 1e-2 * plain.norm()


@pytest.mark.parametrize("order", ["again", "copy"])
def test_checkpointing_may_be_enabled_at_any_time(order):
    """Catches a checkpoint that keeps no call, because diffusers or a copy set it anew."""
    unet = checkpointed()
    predict(unet)
    unet.enable_gradient_checkpointing()
    if order == "copy":
        predict(unet)
        unet = copy.deepcopy(unet)
    torch.testing.assert_close(gradients(unet, two_sizes), gradients(with_avq(), two_sizes))


def test_a_checkpoint_around_the_unet():
    """Such a checkpoint runs the UNet's hooks again, so it needs no help."""
    around = partial(checkpoint, with_avq(), use_reentrant=False)
    found = gradients(around.args[0], lambda _: two_sizes(around))
    torch.testing.assert_close(found, gradients(with_avq(), two_sizes))


@pytest.mark.parametrize("change", [remove_avq, with_avq])
def test_backward_after_avq_has_changed_is_refused(change):
    """Catches a layer that is recomputed without AVQ, or with other codebooks."""
    unet = checkpointed()
    result = loss(unet)
    change(unet)
    with pytest.raises(RuntimeError, match="no longer has the AVQ that it ran with; run backward"):
        result.backward()


def test_compiled_blocks():
    """Catches compiled code that reads the last call."""
    torch.compiler.reset()
    unet = checkpointed()
    unet.compile_repeated_blocks(backend="eager", fullgraph=True)
    torch.testing.assert_close(gradients(unet, two_sizes), gradients(with_avq(), two_sizes))
