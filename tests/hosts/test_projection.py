"""Projections with their distilled changes: what acts on a projection acts on the change too."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from checks import check_on_and_off, differ, kinds, runs
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from peft import LoraConfig
from tiny import (
    LAYER,
    draw,
    predict,
    random_changes,
    random_codebooks,
    small_unet,
    tuned_codebooks,
)
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from avq_diffusers import AVQConfig, apply_avq, avq_disabled, remove_avq, select_layers
from avq_diffusers.hosts.codebooks import PROJECTION_PARAMETERS

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
    return apply_avq(unet, tuned_codebooks(unet, CONFIG))


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
    with ThreadPoolExecutor(4) as threads:
        for output in threads.map(lambda _: predict(unet, HEIGHT, WIDTH), range(20)):
            assert torch.equal(output, expected)


def test_compiled():
    """Catches a graph break where a plain layer has a hook."""
    unet = tuned_unet()
    blur_queries(unet)
    expected = predict(unet, HEIGHT, WIDTH)
    torch.compiler.reset()
    compiled = torch.compile(unet, backend="eager", fullgraph=True)
    torch.testing.assert_close(predict(compiled, HEIGHT, WIDTH), expected)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


class Doubled(nn.Linear):
    def forward(self, tokens):
        return 2 * super().forward(tokens)


class DoubledWeight(torch.Tensor):
    """As a quantized weight: what it stands for is known to products only."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs)
        return 2 * result.as_subclass(torch.Tensor) if function is F.linear else result


def test_one_product():
    """Catches a second product with the tokens, which costs a tenth of a compiled step."""
    counts = []
    for unet in (tuned_unet(), baked_unet()):
        with Products() as products:
            predict(unet)
        counts.append(products.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("kind", ["class", "weight"])
def test_a_layer_that_answers_calls_only(kind):
    """Catches weights that are read where a call of the layer computes something else."""
    unet, doubled = tuned_unet(), tuned_unet()
    layer = unet.get_submodule(LAYER).to_v
    if kind == "class":
        layer.__class__ = Doubled
    else:
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(DoubledWeight))
    with torch.no_grad():
        doubled.get_submodule(LAYER).to_v.weight *= 2
    torch.testing.assert_close(predict(unet), predict(doubled))


@pytest.mark.parametrize("name", PROJECTION_PARAMETERS)
def test_fine_tune(name):
    """Catches weights of the base model that run in place of those of its fine-tune."""
    unet = small_unet()
    tuned = tuned_codebooks(unet, CONFIG)
    exact, before = predict(unet), predict(apply_avq(unet, tuned))
    own = unet.get_submodule(LAYER).get_parameter(name)
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(9)) * own.std()
    with torch.no_grad():
        own += noise
    fine_tuned = predict(unet)
    with avq_disabled(unet):
        difference = (predict(unet) - exact).norm()
    assert (fine_tuned - before).norm() > 0.3 * difference > 1e-3 * exact.norm()
    tuned.projection_changes(LAYER)[name].add_(noise)
    torch.testing.assert_close(fine_tuned, predict(apply_avq(small_unet(), tuned)))


class TestApplied:
    """The UNet's own parameters stay what they are."""

    def test_on_and_off(self, pipe, codebooks):
        """Catches changes that do not run, any parameter that is written over, and a table on
        which a student and a calibrated model look the same."""
        before = copy.deepcopy(pipe.unet.state_dict())
        _, untuned = check_on_and_off(pipe, codebooks)
        tuned = tuned_codebooks(pipe.unet)
        _, avq = check_on_and_off(pipe, tuned)
        assert differ(avq, untuned)
        apply_avq(pipe, tuned)
        assert runs(pipe) == {"AVQ, tuned"}
        predict(pipe.unet)
        assert runs(pipe) == {"AVQ (torch backend), tuned"}
        now = pipe.unet.state_dict()
        assert list(now) == list(before)
        assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
        for layer in tuned.layer_specs:  # negative control: changes of zero change nothing
            for tensor in tuned.projection_changes(layer).values():
                tensor.zero_()
        assert torch.equal(draw(pipe), untuned)

    @pytest.mark.parametrize(
        ("dtype", "avq_first"),
        [(torch.float16, True), (torch.bfloat16, False), (torch.float64, True)],
    )
    def test_dtypes(self, dtype, avq_first):
        """Catches a cast that is missed, or made from an earlier cast: 16 bits and back."""
        unet = small_unet()
        config = AVQConfig(4, 2, 2, 16, levels=(0,), key_norm=True)
        tuned, weights = tuned_codebooks(unet, config), small_unet().state_dict()
        exact, expected = predict(unet), predict(apply_avq(unet, tuned))
        if not avq_first:
            remove_avq(unet)
        apply_avq(unet.to(dtype), tuned)
        transformer = unet.down_blocks[0].attentions[0]
        inputs = torch.ones(1, 16, 8, 8, dtype=dtype), torch.zeros(1, 5, 32, dtype=dtype)
        with torch.no_grad():
            assert transformer(*inputs).sample.dtype == dtype
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
        unet, config = small_unet().train(), AVQConfig(4, 2, 2, levels=(0,), key_norm=True)
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
