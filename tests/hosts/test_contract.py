"""What every kind of model promises with AVQ: the contract of `avq_diffusers.hosts.host`."""

import copy
import inspect
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from checks import differ, kinds
from diffusers.models.attention_dispatch import attention_backend
from hosts.kinds import KINDS
from tiny import random_codebooks
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from avq_diffusers import (
    AVQConfig,
    apply_avq,
    avq_attention,
    avq_disabled,
    measure_error,
    remove_avq,
    select_layers,
    set_num_refined,
    summary,
)
from avq_diffusers.attention.orders import query_order
from avq_diffusers.hosts import measurement, state
from avq_diffusers.hosts.models import find_model

COARSE = {"num_parents": 4, "num_children": 2, "num_refined": 2}
OTHER = {"num_parents": 2, "num_children": 2, "num_refined": 1}
EVERY_KEY = {"num_parents": 4, "num_children": 2, "num_refined": 4, "exact_keys": 1000}
OUTSIDE = "outside a call of the model"
DIFFUSERS = [kind for kind in KINDS if kind.part]


def for_kinds(kinds=KINDS, features=None):
    """Run a test for these kinds; for some of them it stands for a feature."""
    rows = []
    for kind in kinds:
        names = (kind.feature, (features or {}).get(kind.name))
        marks = [pytest.mark.feature(name) for name in names if name]
        rows.append(pytest.param(kind, id=kind.name, marks=marks))
    return pytest.mark.parametrize("kind", rows)


def close(output, expected) -> bool:
    return bool((output - expected).norm() < 1e-5 * expected.norm())


def calls(model) -> list[dict[str, int]]:
    """Of the layers with AVQ."""
    return [row.calls for row in summary(model).rows if row.config]


def coarse(kind, **others):
    """A model with coarse AVQ."""
    return apply_avq(kind.make(), kind.config(**COARSE, **others))


def block_of(model, layer) -> nn.Module:
    """The module around a layer."""
    return model.get_submodule(layer.name.rpartition(".")[0])


def contents(model) -> dict:
    """The objects that modules hold, their processors and configs, and what hooks there are."""
    found = {}
    for path, module in model.named_modules():
        owners = (module, getattr(module, "processor", None), getattr(module, "config", None))
        for place, owner in enumerate(owners):
            for name, value in getattr(owner, "__dict__", {}).items():
                values = value.items() if isinstance(value, dict) else [("", value)]
                found |= {(path, place, name, key): one for key, one in values}
    return found


def are_same(found: dict, before: dict) -> bool:
    return found.keys() == before.keys() and all(found[key] is before[key] for key in before)


def fail(*_) -> None:
    raise KeyError


def run_threads(*functions) -> None:
    """Run functions side by side; raise what one of them raised."""
    with ThreadPoolExecutor(len(functions)) as pool:
        for running in [pool.submit(function) for function in functions]:
            running.result()


# What runs


@for_kinds()
def test_all_keys_exact_is_exact_attention(kind):
    """Catches tokens that are lost or in another place, another scale, order or projection."""
    model = kind.make()
    exact = kind.predict(model)
    assert apply_avq(model, kind.config(**EVERY_KEY)) is model
    assert close(kind.predict(model), exact)
    assert calls(model) == [{"AVQ": 1}] * len(select_layers(model))
    assert differ(kind.predict(apply_avq(model, kind.config(**COARSE))), exact)


@for_kinds([kind for kind in KINDS if kind.beside != (0, 0)])
def test_without_the_tokens_beside_it_is_not_exact(kind, monkeypatch):
    """The control of the test above: it sees whether the grid meets the tokens beside it."""
    model, original = kind.make(), state.attention_and_backend
    exact = kind.predict(model)

    def without(*tensors, **options):
        return original(*tensors, **options | {"sink_key": None, "sink_value": None})

    monkeypatch.setattr(state, "attention_and_backend", without)
    assert not close(kind.predict(apply_avq(model, kind.config(**EVERY_KEY))), exact)


@for_kinds()
def test_the_order_is_that_of_the_grid(kind, monkeypatch):
    """Catches height and width in each other's place, and other tokens in the grid."""
    model, found, original = coarse(kind), [], state.attention_and_backend

    def record(query, key, value, codebook, **options):
        found.append(options["key_order"])
        assert key.shape[2] == len(found[-1])
        return original(query, key, value, codebook, **options)

    monkeypatch.setattr(state, "attention_and_backend", record)
    for height, width in kind.sizes:
        found.clear()
        kind.predict(model, (height, width))
        expected = query_order(height, width, frames=kind.frames)
        assert any(torch.equal(order, expected) for order in found)
        assert summary(model).rows[0].num_tokens == kind.frames * height * width


@for_kinds()
def test_autocast(kind):
    model = kind.make()
    exact = kind.predict(model)
    with torch.autocast("cpu", torch.bfloat16):
        lower = kind.predict(model)
        near = kind.predict(apply_avq(model, kind.config(**EVERY_KEY)))
    assert kinds(model) == {"AVQ"}
    assert near.dtype == lower.dtype
    assert (near.float() - exact).norm() < 2 * (lower.float() - exact).norm()


@for_kinds()
def test_stored_codewords(kind):
    """Catches own codewords in place of stored ones, and codebooks that are dropped in silence."""
    model = kind.make()
    stored = random_codebooks(model, kind.config(**COARSE))
    exact = kind.predict(model)
    if not kind.takes_codebooks:
        with pytest.raises(TypeError, match="codewords from the keys of each call: expected"):
            apply_avq(model, stored)
        assert torch.equal(kind.predict(model), exact)
        return
    found = kind.predict(apply_avq(model, stored))
    assert kinds(model) == {"AVQ"}
    assert differ(found, exact)
    assert differ(found, kind.predict(coarse(kind)))


# On and off


@for_kinds()
def test_undo(kind):
    """Catches what stays on modules, processors and configs, and other objects in their place."""
    model = kind.make()
    exact, before = kind.predict(model), contents(model)
    names = {path: {*vars(module)} for path, module in model.named_modules()}
    apply_avq(apply_avq(model), kind.config(**COARSE))
    kind.predict(model)
    assert not are_same(contents(model), before)
    added = [{*vars(module)} - names[path] for path, module in model.named_modules()]
    assert {name for new in added for name in new} == {"_avq"}  # one on any module
    assert remove_avq(remove_avq(model)) is model
    assert are_same(contents(model), before)
    assert torch.equal(kind.predict(model), exact)


@for_kinds()
def test_off(kind):
    """Disabled, or for a grid of fewer tokens than the route."""
    model = kind.make()
    exact = kind.predict(model)
    avq = kind.predict(apply_avq(model, kind.config(**COARSE)))
    with avq_disabled(model):
        with avq_disabled(model):
            assert torch.equal(kind.predict(model), exact)
        assert torch.equal(kind.predict(model), exact)
    assert calls(model) == [{"AVQ": 1, "disabled": 2}] * len(calls(model))
    assert torch.equal(kind.predict(model), avq)
    apply_avq(model, kind.config(**COARSE), route=10**6)
    assert torch.equal(kind.predict(model), exact)
    assert calls(model) == [{"few tokens": 1}] * len(calls(model))


@for_kinds()
def test_refinement(kind):
    """Catches a plan that reaches other layers, and `exact` that still runs AVQ."""
    model = kind.make()
    exact = kind.predict(model)
    avq = kind.predict(apply_avq(model, kind.config(**COARSE)))
    first, *others = [row.name for row in summary(model).rows if row.config]
    assert set_num_refined(model, {first: 4}) is model
    configs = [row.config for row in summary(model).rows if row.config]
    assert configs == ["M4P4C2", *["M4P2C2"] * len(others)]
    assert not torch.equal(kind.predict(model), avq)
    set_num_refined(model, "exact")
    assert torch.equal(kind.predict(model), exact)
    with pytest.raises(ValueError, match="num_refined must be between 0 and 4 in "):
        set_num_refined(model, 5)
    with pytest.raises(ValueError, match="has no AVQ layer"):
        set_num_refined(remove_avq(model), 1)


@for_kinds()
def test_schedules(kind):
    model, schedule = kind.make(), {1000: "exact", 500: 4}
    before = contents(model)
    apply_avq(model, kind.config(**COARSE))
    if not kind.has_timesteps:
        with pytest.raises(ValueError, match="no schedules by timestep, but got one"):
            set_num_refined(model, schedule)
        return
    exact, late = (
        kind.predict(set_num_refined(model, count), timestep=timestep)
        for count, timestep in (("exact", 600), (4, 400))
    )
    set_num_refined(model, schedule)
    assert torch.equal(kind.predict(model, timestep=600), exact)
    assert torch.equal(kind.predict(model, timestep=400), late)
    assert are_same(contents(remove_avq(model)), before)


@contextmanager
def recorded(modules):
    """The arguments and outputs of modules in calls inside the `with` block."""
    found = {}

    def keep(module, args, kwargs, output):
        found[module] = args, kwargs, output

    hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in modules]
    yield found
    for hook in hooks:
        hook.remove()


def tensors(output) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [x for x in (output.values() if isinstance(output, dict) else output) if x is not None]


@for_kinds()
def test_by_hand(kind):
    """Catches AVQ, on an earlier call's grid or another thread's, in a layer, block or encoder that
    is called by hand."""
    model = kind.make()
    layers = select_layers(model)
    parts = {
        module
        for layer in layers
        for module in layer.caller.modules()
        if layer.attn in module.modules() and module is not layer.caller
    }
    with recorded(x for x in parts if not isinstance(x, nn.ModuleList)) as found:
        exact = kind.predict(model)

    @torch.no_grad()
    def check():
        for part, (args, kwargs, expected) in found.items():
            assert all(map(torch.equal, tensors(part(*args, **kwargs)), tensors(expected)))

    def check_elsewhere(*_):
        hook.remove()
        run_threads(check)

    apply_avq(model, kind.config(**COARSE))
    check()
    assert kinds(model) == {OUTSIDE}
    avq = kind.predict(model)
    assert differ(avq, exact)
    check()
    hook = layers[0].attn.register_forward_pre_hook(check_elsewhere)
    assert torch.equal(kind.predict(model), avq)
    with avq_disabled(model):
        check()
    set_num_refined(model, "exact")
    check()
    apply_avq(model, kind.config(**COARSE))
    with layers[-1].attn.register_forward_pre_hook(fail), pytest.raises(KeyError):
        kind.predict(model)
    check()
    assert {*kinds(model)} == {"AVQ", OUTSIDE}
    assert kinds(remove_avq(model)) == set()


@for_kinds()
def test_a_failed_apply_leaves_the_model_as_it_was(kind, monkeypatch):
    """Catches an earlier AVQ that is lost, and one half of a later."""
    model, host = kind.make(), find_model(kind.make()).host
    exact, before = kind.predict(model), contents(model)
    original, given = type(host).give_avq, []

    def give_once(self, attn, state):
        given.append(attn)
        if len(given) == 2:
            raise KeyError
        original(self, attn, state)

    def refuse():
        for error, arguments in (
            (ValueError, {"source": kind.config(**COARSE, exact=("nothing",))}),
            (ValueError, {"source": kind.config(**COARSE, levels=(7,))}),
            (ValueError, {"source": kind.config(**COARSE, overrides={"x": {"num_refined": 1}})}),
            (ValueError, {"source": kind.config(**COARSE, key_norm=True)}),
            (ValueError, {"backend": "fast"}),
            (ValueError, {"route": "fast"}),
            (TypeError, {"source": "M4P2C2"}),
        ):
            with pytest.raises(error):
                apply_avq(model, **{"source": kind.config(**OTHER), **arguments})
        given.clear()
        with monkeypatch.context() as patch:
            patch.setattr(type(host), "give_avq", give_once)
            with pytest.raises(KeyError):
                apply_avq(model, kind.config(**OTHER))

    refuse()
    assert are_same(contents(model), before)
    assert torch.equal(kind.predict(model), exact)
    avq = kind.predict(apply_avq(model, kind.config(**COARSE)))
    rows = summary(model)
    refuse()
    assert summary(model) == rows
    assert torch.equal(kind.predict(model), avq)
    assert are_same(contents(remove_avq(model)), before)


# Handed over


def tokens_of(attn, args, kwargs):
    """A layer's arguments by name, and how many tokens there are in them and in their text."""
    named = inspect.signature(attn.forward).bind(*args, **kwargs).arguments
    named |= named.pop("kwargs", {})
    text = named.get("encoder_hidden_states")
    return named, named["hidden_states"].shape[1], 0 if text is None else text.shape[1]


@for_kinds([kind for kind in KINDS if kind.mask])
def test_masks(kind):
    model = kind.make()
    exact = kind.predict(model)

    def mask(attn, args, kwargs):
        named, num_image, num_text = tokens_of(attn, args, kwargs)
        return (), named | kind.mask(num_image + num_text)

    for layer in select_layers(model):
        layer.attn.register_forward_pre_hook(mask, with_kwargs=True)
    masked = kind.predict(model)
    assert differ(masked, exact)
    assert torch.equal(kind.predict(apply_avq(model, kind.config(**COARSE))), masked)
    assert calls(model) == [{"attention mask": 1}] * len(calls(model))


def shortened(value, lengths):
    """Tensors without the last of their tokens, where they are as long as a key of `lengths`."""
    if isinstance(value, torch.Tensor):
        for axis, length in enumerate(value.shape[:2]):
            if length in lengths:
                return value.narrow(axis, 0, lengths[length])
    return tuple(shortened(x, lengths) for x in value) if isinstance(value, tuple) else value


@for_kinds()
def test_dropped_tokens(kind):
    """As many as the text has are 24, or 32 with Z-Image's padding."""
    model, config = kind.make(), kind.config(**COARSE, levels=kind.levels[:1])
    exact, count = kind.predict(model), 0
    num_grid = kind.frames * kind.sizes[0][0] * kind.sizes[0][1]

    def before(attn, args, kwargs):
        named, num_tokens, num_text = tokens_of(attn, args, kwargs)
        lengths = {x: x - count for x in (num_grid, num_tokens, num_tokens + num_text)}
        return (), {name: shortened(value, lengths) for name, value in named.items()}

    def after(attn, args, output):
        image, *rest = output if isinstance(output, tuple) else (output,)
        image = F.pad(image, (0, 0, 0, count))
        return (image, *rest) if isinstance(output, tuple) else image

    for layer in select_layers(model, config.levels):
        layer.attn.register_forward_pre_hook(before, with_kwargs=True)
        layer.attn.register_forward_hook(after)
    for count in (1, 5, 20, 24, 32):
        expected = kind.predict(remove_avq(model))
        assert differ(expected, exact)
        assert torch.equal(kind.predict(apply_avq(model, config)), expected), count
        assert kinds(model) == {"tokens are not the grid"}


@for_kinds([kind for kind in KINDS if kind.references])
def test_references(kind):
    for name, reference in kind.references.items():
        arguments, model = reference(), kind.make()
        exact = kind.predict(model, **arguments)
        apply_avq(model, kind.config(**COARSE))
        assert torch.equal(kind.predict(model, **arguments), exact), name
        assert kinds(model) < {"several images", "no grid"}, name
        kind.predict(model)
        assert "AVQ" in kinds(model), name


class Flipped(TorchFunctionMode):
    """Acts on exact attention."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        return output.flip(-1) if func is F.scaled_dot_product_attention else output


@contextmanager
def flipped():
    """The same, by another function in the place of PyTorch's."""
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = lambda *x, **y: original(*x, **y).flip(-1)
    yield
    F.scaled_dot_product_attention = original


def in_module(module, context):
    """Enter a context before the forward of a module, and leave it after."""
    entered = []

    def before(*_):
        entered.append(context())
        entered[-1].__enter__()

    def after(*_):
        entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


@for_kinds()
@pytest.mark.parametrize(
    ("where", "context", "reason"),
    [
        ("model", Flipped, "Flipped is active"),
        ("block", Flipped, "Flipped is active"),
        ("layer", flipped, "scaled_dot_product_attention is replaced"),
    ],
)
def test_intercepted_scores(kind, where, context, reason):
    """Catches AVQ where another tool counts on exact attention, also from inside a block on."""
    model = kind.make()
    exact, layers = kind.predict(model), select_layers(model)
    last = layers[1]
    inside = {"model": model, "block": block_of(model, last), "layer": last.attn}[where]
    in_module(inside, context)
    expected = kind.predict(model)
    assert differ(expected, exact)
    assert close(kind.predict(apply_avq(model, kind.config(**EVERY_KEY))), expected)
    assert calls(model)[1] == {reason: 1}
    assert kinds(model) == ({reason} if where == "model" else {reason, "AVQ"})


@for_kinds(DIFFUSERS)
@pytest.mark.parametrize("where", ["model", "block"])
def test_backends_of_diffusers(kind, where):
    model = kind.make()
    inside = model if where == "model" else block_of(model, select_layers(model)[-1])
    in_module(inside, partial(attention_backend, "_native_math"))
    exact = kind.predict(model)
    assert close(kind.predict(apply_avq(model, kind.config(**EVERY_KEY))), exact)
    assert calls(model)[-1] == {"attention backend _native_math": 1}


@for_kinds(DIFFUSERS, features={"SD3": "other processors of SD3 (kept)"})
def test_other_processors(kind):
    """A processor on the dispatch of diffusers carries AVQ; others keep their layers."""
    model = kind.make()
    layer = select_layers(model)[0]
    own = layer.attn.processor
    foreign = type("Foreign", (type(own),), {})()
    layer.attn.set_processor(foreign)
    exact, before = kind.predict(model), contents(model)
    carries = hasattr(own, "_attention_backend")
    said = nullcontext() if carries else pytest.warns(UserWarning, match="keep Foreign: [^,]*$")
    with said:
        apply_avq(model, kind.config(**EVERY_KEY))
    assert close(kind.predict(model), exact)
    assert calls(model)[0] == ({"AVQ": 1} if carries else {"Foreign": 1})
    assert are_same(contents(remove_avq(model)), before)
    # After AVQ:
    layer.attn.set_processor(own)
    apply_avq(model, kind.config(**EVERY_KEY))
    kind.predict(model)
    layer.attn.set_processor(foreign)
    with pytest.warns(UserWarning, match="keep Foreign: [^,]*$"):
        assert close(kind.predict(model), exact)
    assert calls(model)[0] == {"AVQ": 1, "Foreign": 1}
    assert next(row.runs for row in summary(model).rows if row.config) == "custom: Foreign"
    assert are_same(contents(remove_avq(model)), before)


# Gradients, compilers, copies, threads


def gradient(kind, model):
    """Of the sum over two sizes; backward of the first comes after the second."""
    model.train().zero_grad()
    torch.manual_seed(0)  # DINOv3 changes positions at random
    sum(kind.call(model, size).square().mean() for size in kind.sizes).backward()
    parameters = [*model.parameters()]
    return torch.cat([(0 * x if x.grad is None else x.grad).flatten() for x in parameters])


def enable_checkpointing(model):
    if hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    else:
        model.gradient_checkpointing_enable()


@for_kinds(
    features={"SD3": "gradient checkpointing of SD3", "Flux": "gradient checkpointing of Flux"}
)
def test_checkpoints_recompute_the_call(kind):
    """Catches a block that is recomputed on the grid of a later call."""
    model = coarse(kind)
    expected, once = gradient(kind, model), calls(model)
    assert differ(gradient(kind, remove_avq(model)), expected)
    enable_checkpointing(model)
    before = contents(model)
    found = gradient(kind, apply_avq(model, kind.config(**COARSE)))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert all(x["AVQ"] > y["AVQ"] for x, y in zip(calls(model), once, strict=True))
    assert are_same(contents(remove_avq(model)), before)


@for_kinds()
def test_a_foreign_checkpoint_is_refused(kind):
    model = coarse(kind)
    block = block_of(model, select_layers(model)[0])
    forward = block.forward

    def checkpointed(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = checkpointed
    with pytest.raises(RuntimeError, match="use the model's own gradient checkpointing, which"):
        gradient(kind, model)
    exact = gradient(kind, remove_avq(model))
    del block.forward
    assert torch.allclose(gradient(kind, model), exact, rtol=1e-4, atol=1e-6)


@for_kinds(
    [kind for kind in KINDS if kind.compiled],
    features={"Flux": "torch.compile of transformers (one graph)"},
)
@pytest.mark.parametrize("regional", [False, True], ids=["whole", "blocks"])
def test_compiled(kind, regional):
    """Catches graph breaks, and compiled code that misses AVQ going."""
    model = kind.compiled()
    exact, config = kind.predict(model), AVQConfig(**COARSE, query_tile=16)
    avq = kind.predict(apply_avq(model, config))
    torch.compiler.reset()
    called = model
    if regional:
        for block in {block_of(model, layer) for layer in select_layers(model)}:
            # Transformers' own variable of what is captured breaks the graph of a block.
            block.compile(backend="eager", fullgraph=kind.part is not None)
    else:
        called = torch.compile(model, backend="eager", fullgraph=True)
    inputs = kind.inputs(model, *kind.sizes[0])
    with torch.no_grad():
        assert torch.allclose(kind.output(called(**inputs)), avq, atol=1e-5)
        remove_avq(called)
        assert torch.allclose(kind.output(called(**inputs)), exact, atol=1e-5)
    assert differ(avq, exact)


@for_kinds()
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_has_its_own_avq(kind, how):
    """Catches states that are shared with the copy, and hooks that set those of the original."""
    model, same = coarse(kind), coarse(kind)
    avq = kind.predict(same)
    if how == "pickle" and not kind.pickles:
        with pytest.raises(ValueError, match="'avq' is not a valid AttentionBackendName"):
            pickle.loads(pickle.dumps(model))
        return
    copied = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    exact = kind.predict(remove_avq(model))
    assert differ(exact, avq)
    assert torch.equal(kind.predict(copied), avq)
    assert calls(copied) == calls(same)
    assert torch.equal(kind.predict(remove_avq(copied)), exact)


@for_kinds(features=dict.fromkeys(("SD3", "Flux"), "transformers in several threads"))
def test_threads_have_their_own_grids(kind):
    """The order of the other thread would go unnoticed where both have as many tokens."""
    model, meeting = coarse(kind), threading.Barrier(2, timeout=30)
    expected = [kind.predict(model, size) for size in kind.sizes]

    def meet(*_):
        meeting.wait()

    for layer in select_layers(model):
        layer.attn.register_forward_pre_hook(meet)

    def run(size, one):
        for _ in range(2):
            assert torch.equal(kind.predict(model, size), one)

    run_threads(*(partial(run, *pair) for pair in zip(kind.sizes, expected, strict=True)))


@for_kinds()
def test_threads_that_switch(kind):
    """Catches hooks that stay, and layers of two installations."""
    model, interval = kind.make(), sys.getswitchinterval()
    exact, before = kind.predict(model), contents(model)
    avq = kind.predict(apply_avq(model, kind.config(**COARSE)))
    other = kind.config(**OTHER)

    def switch():
        for _ in range(3):
            apply_avq(model, other)
            remove_avq(model)

    def refine():
        for _ in range(6):
            with suppress(ValueError):  # there is no AVQ at this moment
                set_num_refined(model, {1000: 1, 500: 2} if kind.has_timesteps else 1)

    sys.setswitchinterval(1e-6)
    try:
        run_threads(switch, switch, refine)
    finally:
        sys.setswitchinterval(interval)
    assert torch.equal(kind.predict(apply_avq(model, kind.config(**COARSE))), avq)
    remove_avq(model)
    assert are_same(contents(model), before)
    assert torch.equal(kind.predict(model), exact)


@for_kinds()
def test_models_that_share_a_layer_or_block(kind):
    """AVQ of one model never acts in a forward of another that has a part of it."""
    name = select_layers(kind.make())[0].name
    for path in (name, name.rpartition(".")[0]):
        model, other = kind.make(), kind.make()
        other.set_submodule(path, model.get_submodule(path))
        exact = kind.predict(other)
        avq = kind.predict(apply_avq(model, kind.config(**COARSE)))
        assert differ(avq, exact)
        assert torch.equal(kind.predict(other), exact)
        assert torch.equal(kind.predict(model), avq)


@for_kinds([kind for kind in KINDS if kind.calls_from_inside])
def test_models_that_share_what_begins_calls_share_avq(kind):
    """As pipelines that share a UNet do; undone, both are exact."""
    model, other = kind.make(), kind.make()
    caller = select_layers(model)[0].caller
    (path,) = (path for path, module in model.named_modules() if module is caller)
    other.set_submodule(path, caller)
    exact = kind.predict(other)
    apply_avq(model, kind.config(**COARSE))
    assert differ(kind.predict(other), exact)
    remove_avq(model)
    assert torch.equal(kind.predict(other), exact)


# Measurement


class Recorder(TorchFunctionMode):
    """Keeps the tensors and scale of exact attention."""

    def __init__(self, found):
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            self.found.append([given[x] for x in ("query", "key", "value")] + [given.get("scale")])
        return func(*args, **(kwargs or {}))


def error_by_hand(kind, query, key, value, scale, size) -> float:
    """Of M8P8C4E16 in a layer with these tensors (B, H, N, D)."""
    num_tokens = kind.frames * size[0] * size[1]
    num_beside = key.shape[2] - num_tokens
    before = 0 if kind.beside is None else kind.beside[0]
    grid, after = [*range(before, before + num_tokens)], before + num_tokens
    beside = [*range(before), *range(after, key.shape[2])]
    queries = query if kind.part else query[:, :, grid]  # of vision's sinks are exact
    order = query_order(*size, frames=kind.frames)
    query_positions = torch.tensor(grid)[order].tolist() + beside if kind.part else order.tolist()
    avq = avq_attention(
        queries,
        key[:, :, grid],
        value[:, :, grid],
        sink_key=key[:, :, beside] if num_beside else None,
        sink_value=value[:, :, beside] if num_beside else None,
        query_tile=16,
        query_order=torch.tensor(query_positions),
        key_order=order,
        scale=scale,
        backend="reference",
        **asdict(AVQConfig.parse("M8P8C4E16").sizes),
    )
    logits = queries @ key.mT * (scale or query.shape[-1] ** -0.5)
    exact = logits.softmax(-1) @ value
    return float((avq - exact).norm() / exact.norm())


@for_kinds()
def test_measurement(kind, monkeypatch):
    """Catches tokens that are left out, another scale or order, keys before their norm, a mean over
    calls, and an AVQ that is lost."""
    monkeypatch.setattr(measurement, "LADDER", ("M8P8C4E16",))
    model, found = kind.make(), []

    class Pipe:
        set_progress_bar_config = staticmethod(lambda **_: None)

        def __call__(self, prompt, num_inference_steps, generator, output_type):
            for _ in range(num_inference_steps):
                kind.predict(model)

    def measure():
        config, pipe = kind.config(**COARSE), Pipe()
        if kind.part is None:
            inputs = kind.inputs(model, *kind.sizes[0])
            batches = [inputs.pop("pixel_values")] * 2
            return measure_error(model, batches, config, progress=False, **inputs)
        setattr(pipe, kind.part, model)
        steps = {"num_inference_steps": 2, "parts": 1}
        return measure_error(pipe, ["a fox"], config, progress=False, **steps)

    exact, before = kind.predict(model), contents(model)
    profile = measure()
    assert are_same(contents(model), before)
    assert [one.layer.name for one in profile.layers] == [x.name for x in select_layers(model)]
    copied = kind.make()
    in_module(select_layers(copied)[0].attn, partial(Recorder, found))
    kind.predict(copied)
    expected = max(error_by_hand(kind, *call, kind.sizes[0]) for call in found)
    assert profile.layers[0].errors[1000]["M8P8C4E16"] == pytest.approx(expected, rel=1e-3)
    assert expected > 0

    avq = kind.predict(apply_avq(model, kind.config(**COARSE)))
    rows = summary(model)
    assert measure() == profile
    with select_layers(model)[-1].attn.register_forward_pre_hook(fail), pytest.raises(KeyError):
        measure()
    assert summary(model) == rows
    assert torch.equal(kind.predict(model), avq)
    assert torch.equal(kind.predict(remove_avq(model)), exact)
    assert are_same(contents(model), before)
