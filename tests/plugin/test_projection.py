"""Projections with their distilled changes: what acts on a projection acts on the change too."""

import threading

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from peft import LoraConfig
from tiny import predict, random_changes, random_codebooks, small_unet
from torch.nn.utils import parametrizations, prune, weight_norm

from avq_diffusers.config import AVQConfig
from avq_diffusers.plugin.apply import apply_avq
from avq_diffusers.plugin.layers import select_layers

CONFIG = AVQConfig(4, 2, 2, query_tile=16, levels=(0,))
HEIGHT, WIDTH = 16, 24


def projections(unet, name):
    return [layer.attn.get_submodule(name) for layer in select_layers(unet, CONFIG.levels)]


def blur_queries(unet):
    """Smoothed energy guidance."""

    def blur(module, inputs, output):
        image = output.transpose(1, 2).unflatten(2, (HEIGHT, WIDTH))
        return F.avg_pool2d(image, 5, 1, 2, count_include_pad=False).flatten(2).transpose(1, 2)

    for layer in projections(unet, "to_q"):
        layer.register_forward_hook(blur)


def scale_keys(unet):
    for layer in projections(unet, "to_k"):
        layer.register_forward_hook(lambda module, inputs, output: 2 * output)


def turn_inputs(unet):
    for layer in projections(unet, "to_v"):
        layer.register_forward_pre_hook(lambda module, inputs: (inputs[0].roll(1, 1),))


def squash_outputs(unet):
    for layer in projections(unet, "to_out.0"):
        layer.register_forward_hook(lambda module, inputs, output: output.tanh())


def read_weights(unet):
    for layer in projections(unet, "to_v"):
        layer.register_forward_hook(
            lambda module, inputs, output: F.linear(inputs[0].flip(1), module.weight)
        )


def patch_forward(unet):
    for layer in projections(unet, "to_q"):
        layer.forward = lambda tokens, layer=layer: F.linear(tokens, layer.weight).tanh()


ACTIONS = [blur_queries, scale_keys, turn_inputs, squash_outputs, read_weights, patch_forward]


def as_it_is(unet):
    pass


def use_weight_norm(unet):
    for name in ("to_q", "to_out.0"):
        for layer in projections(unet, name):
            weight_norm(layer)


def use_parametrizations(unet):
    for layer in projections(unet, "to_q"):
        parametrizations.weight_norm(layer)


def use_pruning(unet):
    for layer in projections(unet, "to_q"):
        prune.identity(layer, "weight")


def use_lora(unet):
    torch.manual_seed(3)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    unet.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))


def use_offload(unet):
    cpu_offload(unet, execution_device=torch.device("cpu"))


def use_group_offload(unet):
    apply_group_offloading(
        unet,
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
    )


def use_layerwise_casting(unet):
    apply_layerwise_casting(unet, storage_dtype=torch.float64, compute_dtype=torch.float32)


CHANGED_IN_CALLS = [use_weight_norm, use_parametrizations, use_pruning, use_lora, use_offload]
CHANGED_IN_CALLS += [use_group_offload, use_layerwise_casting]


def tuned_unet():
    unet = small_unet()
    changes = random_changes(unet, CONFIG)
    return apply_avq(unet, random_codebooks(unet, CONFIG, projection_changes=changes))


def baked_unet():
    """With the changes in its weights."""
    unet = small_unet()
    for name, changes in random_changes(unet, CONFIG).items():
        for path, change in changes.items():
            unet.get_submodule(name).get_parameter(path).data += change
    return apply_avq(unet, random_codebooks(unet, CONFIG))


def check(prepare, act):
    tuned, baked = tuned_unet(), baked_unet()
    prepare(tuned)
    if prepare is use_lora:
        prepare(baked)
    plain = predict(baked, HEIGHT, WIDTH)
    act(tuned)
    act(baked)
    expected = predict(baked, HEIGHT, WIDTH)
    assert (expected - plain).norm() > 1e-2 * plain.norm()
    torch.testing.assert_close(predict(tuned, HEIGHT, WIDTH), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("act", ACTIONS, ids=lambda act: act.__name__)
def test_plain_layers(act):
    """Catches a hook or a patch that acts on the base model's part of a projection only."""
    check(as_it_is, act)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("prepare", CHANGED_IN_CALLS, ids=lambda prepare: prepare.__name__)
@pytest.mark.parametrize("act", [blur_queries, turn_inputs, squash_outputs])
def test_layers_that_must_be_called(prepare, act):
    """Catches the same where the weight cannot be read."""
    check(prepare, act)


def test_nothing_stays_behind():
    """Catches weights or hooks of a call that outlive it, also when the call fails."""
    unet = tuned_unet()
    use_lora(unet)
    layers = projections(unet, "to_q")
    before = [parameter.clone() for parameter in unet.parameters()]
    blur_queries(unet)
    predict(unet, HEIGHT, WIDTH)
    with pytest.raises(RuntimeError, match="unflatten"):
        predict(unet, 8, 8)
    assert [len(layer._forward_hooks) for layer in layers] == [1] * len(layers)
    assert all(map(torch.equal, unet.parameters(), before))


def test_backward_hooks_run():
    """Catches a product in place of a call of the layer, which such hooks never see."""
    unet, seen = tuned_unet(), []
    for layer in projections(unet, "to_q"):
        layer.register_full_backward_hook(lambda *_: seen.append(True))
    unet(torch.ones(1, 4, 16, 16), 10, torch.ones(1, 5, 32)).sample.sum().backward()
    assert len(seen) == len(projections(unet, "to_q"))


@pytest.mark.parametrize("prepare", [as_it_is, use_lora])
def test_threads(prepare):
    """Catches the change added twice, where one thread reads what another has summed."""
    unet = tuned_unet()
    prepare(unet)
    blur_queries(unet)
    expected = predict(unet, HEIGHT, WIDTH)
    outputs = []

    def generate():
        outputs.extend(predict(unet, HEIGHT, WIDTH) for _ in range(5))

    threads = [threading.Thread(target=generate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 20
    assert all(torch.equal(output, expected) for output in outputs)


def test_compiled():
    """Catches a graph break where a plain layer has a hook."""
    unet = tuned_unet()
    blur_queries(unet)
    expected = predict(unet, HEIGHT, WIDTH)
    torch.compiler.reset()
    compiled = torch.compile(unet, backend="eager", fullgraph=True)
    torch.testing.assert_close(predict(compiled, HEIGHT, WIDTH), expected)
