"""Projections with their distilled changes: what acts on a projection acts on the change too."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from checks import kinds
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from tiny import (
    LAYER,
    LORA,
    predict,
    random_changes,
    random_codebooks,
    traced_unet,
    tuned_codebooks,
)
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.utils import prune, weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from avq_diffusers import AVQConfig, apply_avq, remove_avq, select_layers

CONFIG = AVQConfig.parse("M4P2C2", query_tile=16, levels=(0,))
HEIGHT, WIDTH = 16, 24


def projections(unet, name):
    return [layer.attn.get_submodule(name) for layer in select_layers(unet, CONFIG.levels)]


def blur(module, inputs, output):
    """As smoothed energy guidance."""
    image = output.transpose(1, 2).unflatten(2, (HEIGHT, WIDTH))
    return F.avg_pool2d(image, 5, 1, 2, count_include_pad=False).flatten(2).transpose(1, 2)


def turn(module, inputs):
    return (inputs[0].roll(1, 1),)


def squash(module, inputs, output):
    return output.tanh()


def read_weight(module, inputs, output):
    return F.linear(inputs[0].flip(1), module.weight)


def patch(layer):
    layer.forward = lambda tokens: F.linear(tokens, layer.weight).tanh()


def hook_all_modules(layers):
    """Hooks of all modules of the process."""

    def double(layer, inputs):
        return (2 * inputs[0],) if layer in layers else None

    def smooth(layer, inputs, output):
        return blur(layer, inputs, output) if layer in layers else None

    return register_module_forward_pre_hook(double), register_module_forward_hook(smooth)


def each(change):
    return lambda layers: [change(layer) for layer in layers]


# What acts on the layers of one projection.
ACTIONS = {
    "blur queries": ("to_q", each(lambda layer: layer.register_forward_hook(blur))),
    "turn inputs": ("to_v", each(lambda layer: layer.register_forward_pre_hook(turn))),
    "squash outputs": ("to_out.0", each(lambda layer: layer.register_forward_hook(squash))),
    "read weights": ("to_v", each(lambda layer: layer.register_forward_hook(read_weight))),
    "patch forward": ("to_q", each(patch)),
    "hook all modules": ("to_q", hook_all_modules),
}


@contextmanager
def acting(unet, action):
    name, act = ACTIONS[action]
    handles = act(projections(unet, name))
    yield
    for handle in filter(None, handles):
        handle.remove()


def use_lora(unet):
    torch.manual_seed(3)
    unet.add_adapter(LORA)


def on_projections(change, *names):
    return lambda unet: [change(layer) for name in names for layer in projections(unet, name)]


CPU = torch.device("cpu")
GROUPS = {"onload_device": CPU, "offload_device": CPU, "offload_type": "leaf_level"}
CASTS = {"storage_dtype": torch.float64, "compute_dtype": torch.float32}
CHANGED_IN_CALLS = {
    "weight norm": on_projections(weight_norm, "to_q", "to_out.0"),
    "pruning": on_projections(lambda layer: prune.identity(layer, "weight"), "to_q"),
    "LoRA": use_lora,
    "offload": lambda unet: cpu_offload(unet, execution_device=CPU),
    "group offload": lambda unet: apply_group_offloading(unet, **GROUPS),
    "layerwise casting": lambda unet: apply_layerwise_casting(unet, **CASTS),
}


def tuned_unet():
    unet = traced_unet()
    return apply_avq(unet, tuned_codebooks(unet, CONFIG))


def baked_unet():
    """With the changes in its weights."""
    unet = traced_unet()
    for name, changes in random_changes(unet, CONFIG).items():
        for path, change in changes.items():
            unet.get_submodule(name).get_parameter(path).data += change
    return apply_avq(unet, random_codebooks(unet, CONFIG))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    ("prepare", "action"),
    [
        *((None, action) for action in ACTIONS),
        *((prepare, "blur queries") for prepare in CHANGED_IN_CALLS),
        *(("LoRA", action) for action in ("turn inputs", "squash outputs", "hook all modules")),
        ("offload", "hook all modules"),
    ],
)
def test_what_acts_on_projections(prepare, action):
    """Catches a hook or a patch that acts on the base model's part of a projection only, where
    its weight can be read and where it cannot."""
    tuned, baked = tuned_unet(), baked_unet()
    if prepare:
        CHANGED_IN_CALLS[prepare](tuned)
    if prepare == "LoRA":
        use_lora(baked)
    plain = predict(baked, HEIGHT, WIDTH)
    with acting(baked, action):
        expected = predict(baked, HEIGHT, WIDTH)
    assert (expected - plain).norm() > 1e-2 * plain.norm()
    with acting(tuned, action):
        found = predict(tuned, HEIGHT, WIDTH)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_backward_hooks_run():
    """Catches a product in place of a call of the layer, which such hooks never see."""
    unet, seen = tuned_unet(), []
    for layer in projections(unet, "to_q"):
        layer.register_full_backward_hook(lambda *_: seen.append(True))
    unet(torch.ones(1, 4, 16, 16), 10, torch.ones(1, 5, 32)).sample.sum().backward()
    assert len(seen) == len(projections(unet, "to_q"))


@pytest.mark.parametrize("has_lora", [False, True])
def test_threads(has_lora):
    """Catches the change added twice, where one thread reads what another has summed."""
    unet = tuned_unet()
    if has_lora:
        use_lora(unet)
    with acting(unet, "blur queries"), ThreadPoolExecutor(4) as threads:
        expected = predict(unet, HEIGHT, WIDTH)
        for output in threads.map(lambda _: predict(unet, HEIGHT, WIDTH), range(8)):
            assert torch.equal(output, expected)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def test_one_product():
    """Catches a second product with the tokens, which costs a tenth of a compiled step."""
    counts = []
    for unet in (tuned_unet(), baked_unet()):
        with Products() as products:
            predict(unet)
        counts.append(products.count)
    assert counts[0] == counts[1] > 0


class TestApplied:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_dtypes(self, dtype):
        """Catches a cast that is missed, or made from an earlier cast: 16 bits and back."""
        unet = traced_unet()
        config = AVQConfig.parse("M4P2C2", query_tile=16, levels=(0,), key_norm=True)
        tuned, weights = tuned_codebooks(unet, config), traced_unet().state_dict()
        exact, expected = predict(unet), predict(apply_avq(unet, tuned))
        unet.to(dtype)
        block = unet.down_blocks[0].attentions[0]
        inputs = torch.ones(1, 16, 8, 8, dtype=dtype), torch.zeros(1, 5, 32, dtype=dtype)
        with torch.no_grad():
            assert block(*inputs).sample.dtype == dtype
        assert kinds(unet) == {"AVQ"}
        unet.float().load_state_dict(weights)
        assert torch.equal(predict(unet), expected)
        assert torch.equal(predict(remove_avq(unet)), exact)
        assert {tensor.dtype for tensor in tuned.parameters()} == {torch.float32}


class TestTraining:
    def backward(self, unet, dtype=torch.float32):
        inputs = torch.ones(1, 4, 8, 8, dtype=dtype), 10, torch.ones(1, 5, 32, dtype=dtype)
        unet(*inputs).sample.square().mean().backward()

    @pytest.mark.feature("gradient checkpointing")
    @pytest.mark.parametrize("checkpointed", [False, True])
    def test_gradients(self, checkpointed):
        """Catches gradients cut at attention, and weights of the UNet that are not trained."""
        unet, config = (
            traced_unet().train(),
            AVQConfig.parse("M4P2C2", levels=(0,), key_norm=True),
        )
        if checkpointed:
            unet.enable_gradient_checkpointing()
        tuned = tuned_codebooks(unet, config).requires_grad_()
        self.backward(apply_avq(unet, tuned))
        changes = tuned.projection_changes(LAYER).values()
        own = unet.get_submodule(LAYER).parameters()
        for tensor in (*changes, *own, tuned.key_norm(LAYER).weight):
            assert tensor.grad.any()

    def test_inference_mode_then_training(self):
        """Catches copies made in inference mode, which autograd refuses later."""
        unet = tuned_unet().double()
        with torch.inference_mode():
            unet(torch.ones(1, 4, 8, 8).double(), 10, torch.ones(1, 5, 32).double())
        self.backward(unet, torch.float64)
        assert unet.conv_in.weight.grad.any()
