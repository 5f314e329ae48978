"""Models that tests of hosts share: one that a test has changed gives way to a new one."""

import pytest
import torch
from checks import are_same, contents
from diffusers import StableDiffusionPipeline
from tiny import quiet, tiny_components, tiny_encoders, tiny_unet
from torch import nn

from avq_diffusers import remove_avq

SHARED: dict[str, dict[str, tuple[nn.Module, dict, torch.Tensor]]] = {}


def weights(model: nn.Module) -> torch.Tensor:
    """What tells whether weights are those that they were; empty if they have gone elsewhere."""
    tensors = [*model.parameters()]
    if any((x.device.type, x.dtype) != ("cpu", torch.float32) for x in tensors):
        return torch.empty(0)
    with torch.no_grad():
        return torch.stack(torch._foreach_norm(tensors))


def lend(name: str, make, restore=lambda model: None):
    """Yield models by name to one test."""
    if name not in SHARED:
        SHARED[name] = {key: (x, contents(x), weights(x)) for key, x in make().items()}
    lent = SHARED.pop(name)
    yield {key: model for key, (model, *_) in lent.items()}
    for model, before, old in lent.values():
        restore(model)
        model.eval().zero_grad()
        if not are_same(contents(model), before) or not torch.equal(weights(model), old):
            return
    SHARED[name] = lent


@pytest.fixture
def unet():
    for models in lend("unet", lambda: {"unet": tiny_unet()}, remove_avq):
        yield models["unet"]


@pytest.fixture
def pipe(unet):
    for encoders in lend("encoders", tiny_encoders):
        components = tiny_components(unet, encoders)
        yield quiet(StableDiffusionPipeline(**components, requires_safety_checker=False))
