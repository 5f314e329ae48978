"""What every kind of model promises with AVQ: the contract of `avq_diffusers.hosts.core.host`."""

import copy
import inspect
import math
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from checks import are_same, calls, close, contents, differ, kinds
from diffusers.models.attention_dispatch import attention_backend
from hosts.kinds import KINDS, Kind
from tiny import random_codebooks
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from avq_diffusers import (
    AVQConfig,
    AVQProcessor,
    apply_avq,
    avq_disabled,
    measure_error,
    remove_avq,
    select_layers,
    set_num_refined,
    set_threshold,
    summary,
)
from avq_diffusers.attention.orders import query_order
from avq_diffusers.hosts.core import state
from avq_diffusers.hosts.core.installing import all_or_nothing
from avq_diffusers.hosts.measuring import exact_runs
from avq_diffusers.hosts.models.registry import find_model

COARSE = {"num_parents": 4, "num_children": 2, "num_refined": 2}
OTHER = {"num_parents": 2, "num_children": 2, "num_refined": 1}
EVERY_KEY = {"num_parents": 4, "num_children": 2, "threshold": 0}
OUTSIDE = "outside a call of the model"


def named(*names) -> list[Kind]:
    return [kind for kind in KINDS if kind.name in names]


# One kind of each adapter, for what does not depend on the kind.
ADAPTERS = named("SD1.5", "SD3", "Flux", "vit")
DIFFUSERS = [kind for kind in ADAPTERS if kind.part]


def for_kinds(kinds=KINDS, features=None):
    """Run a test for these kinds; for some of them it stands for a feature."""
    rows = []
    for kind in kinds:
        names = (kind.feature, (features or {}).get(kind.name))
        marks = [pytest.mark.feature(name) for name in names if name]
        rows.append(pytest.param(kind, id=kind.name, marks=marks))
    return pytest.mark.parametrize("kind", rows)


@pytest.fixture
def model(kind):
    """The kind's model; `remove_avq` leaves it as it was before the test."""
    model, _, before = kind.model, kind.exact, kind.contents
    yield model
    remove_avq(model).eval().zero_grad()
    is_same = are_same(contents(model), before)
    if not is_same:
        del vars(kind)["model"], vars(kind)["contents"]  # other tests get new ones
    assert is_same


def block_of(model, layer) -> nn.Module:
    """The module around a layer."""
    return model.get_submodule(layer.name.rpartition(".")[0])


def only(kind, model, layer) -> AVQConfig:
    """Coarse AVQ in one layer."""
    others = tuple(x.name for x in select_layers(model) if x.name != layer.name)
    return kind.config(**COARSE, exact=others)


def scheduled(kind):
    """Refined parents by timestep, where calls have one."""
    return {1000: 1, 500: 2} if kind.timestep else 1


def fail(*_) -> None:
    raise KeyError


def run_threads(*functions) -> None:
    """Run functions side by side; raise what one of them raised."""
    with ThreadPoolExecutor(len(functions)) as pool:
        for running in [pool.submit(function) for function in functions]:
            running.result()


@contextmanager
def hooked(model, before=None, after=None):
    """Hooks of all layers inside the `with` block."""
    with ExitStack() as stack:
        for layer in select_layers(model):
            if before is not None:
                stack.enter_context(layer.attn.register_forward_pre_hook(before, with_kwargs=True))
            if after is not None:
                stack.enter_context(layer.attn.register_forward_hook(after))
        yield


@contextmanager
def in_module(module, context):
    """Calls of a module run inside a context."""
    entered = []

    def before(*_):
        entered.append(context())
        entered[-1].__enter__()

    def after(*_):
        entered.pop().__exit__(None, None, None)

    with (
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after, always_call=True),
    ):
        yield


# What a class's row says


@pytest.fixture
def attended(monkeypatch):
    """The tensors that AVQ gets, and which of them to change."""
    found, changes, original = [], {}, state.attend

    def record(tensors, spec, backend):
        found.append(tensors)
        return original(tensors._replace(**changes), spec, backend)

    monkeypatch.setattr(state, "attend", record)
    return found, changes


def first_sinks(found) -> torch.Tensor:
    return next(tensors.sink_key for tensors in found if tensors.sink_key is not None)


@for_kinds()
def test_every_class(kind, model, attended):
    """Catches tokens that are lost or in another place, height and width in each other's place,
    another scale or projection, an identity that does not see whether the grid meets the tokens
    beside it, and a grid that begins with a text: another image leaves the first sinks alone."""
    found, changes = attended
    apply_avq(model, kind.config(**EVERY_KEY))
    for size in reversed(kind.sizes):
        found.clear()
        output = kind.predict(model, size)
        expected = query_order(*size, frames=kind.frames)
        assert any(torch.equal(tensors.key_order, expected) for tensors in found)
        assert all(tensors.key.shape[2] == len(tensors.key_order) for tensors in found)
        assert summary(model).rows[0].num_tokens == len(expected)
    assert close(output, kind.exact)
    assert calls(model) == [{"AVQ": 2}] * len(select_layers(model))
    if kind.has_text:
        sinks = [first_sinks(found)]
        found.clear()
        image = kind.inputs(model, *size)[kind.image]
        other = [x + 1 for x in image] if isinstance(image, list) else image + 1
        assert differ(kind.predict(model, **{kind.image: other}), output)
        assert torch.equal(first_sinks(found), *sinks)
    # Negative controls: fewer columns, and no tokens beside the grid.
    if not kind.has_others:
        assert differ(kind.predict(apply_avq(model, kind.config(**COARSE))), kind.exact)
    else:
        changes |= {"sink_key": None, "sink_value": None}
        assert not close(kind.predict(model), kind.exact)
    assert remove_avq(remove_avq(model)) is model
    assert torch.equal(kind.predict(model), kind.exact)


@for_kinds()
def test_timestep(kind):
    """Catches an argument that is not the training timestep: a fraction, or what remains."""
    timesteps = find_model(kind.model).timesteps
    assert (timesteps is None) == (kind.timestep is None)
    if kind.timestep:
        values = [1000, 400, 127, 0]
        told = [kind.timestep(value) for value in values]
        assert [timesteps.read((), arguments) for arguments in told] == values
        (name,) = told[0]
        table = torch.cat([arguments[name][:1] for arguments in told])  # as pipelines have it
        views = [{name: entry.expand(2)} for entry in table]
        assert [timesteps.read((), arguments) for arguments in views] == values


@for_kinds([kind for kind in KINDS if kind.padding])
def test_padding(kind, model):
    """Catches calls that run exact, and hidden tokens that take part."""
    exact = kind.predict(model, **kind.padding)
    assert differ(exact, kind.exact)
    assert close(kind.predict(apply_avq(model, kind.config(**EVERY_KEY)), **kind.padding), exact)
    assert kinds(model) == {"AVQ"}


def tokens_of(attn, args, kwargs):
    """A layer's arguments by name, and how many tokens there are in them and in their text."""
    named = inspect.signature(attn.forward).bind(*args, **kwargs).arguments
    named |= named.pop("kwargs", {})
    text = named.get("encoder_hidden_states")
    return named, named["hidden_states"].shape[1], 0 if text is None else text.shape[1]


def shortened(value, lengths):
    """Tensors without the last of their tokens, where they are as long as a key of `lengths`."""
    if isinstance(value, torch.Tensor):
        has_channels = value.ndim > 2 and value.dtype != torch.bool
        for axis, length in enumerate(value.shape[:-1] if has_channels else value.shape):
            if length in lengths:
                return value.narrow(axis, 0, lengths[length])
    if isinstance(value, dict):
        return {name: shortened(x, lengths) for name, x in value.items()}
    return tuple(shortened(x, lengths) for x in value) if isinstance(value, tuple) else value


@for_kinds([kind for kind in KINDS if kind.counts_others])
def test_dropped_tokens(kind, model):
    """As many as a text beside the grid has are 24, or 32 with Z-Image's padding."""
    config = kind.config(**COARSE, levels=kind.levels[:1])
    num_grid = kind.frames * kind.sizes[0][0] * kind.sizes[0][1]
    chosen = {layer.attn for layer in select_layers(model, config.levels)}

    def before(attn, args, kwargs):
        if attn not in chosen:
            return args, kwargs
        named, num_tokens, num_text = tokens_of(attn, args, kwargs)
        lengths = {x: x - count for x in (num_grid, num_tokens, num_tokens + num_text)}
        return (), {name: shortened(value, lengths) for name, value in named.items()}

    def after(attn, args, output):
        if attn not in chosen:
            return output
        image, *rest = output if isinstance(output, tuple) else (output,)
        image = F.pad(image, (0, 0) * (image.ndim - 2) + (0, count))
        return (image, *rest) if isinstance(output, tuple) else image

    with hooked(model, before, after):
        apply_avq(model, config)
        for count in (1, 24, 32) if kind in (*ADAPTERS, *named("ZImage")) else (1,):
            found = kind.predict(model)
            assert kinds(model) == {"tokens are not the grid"}, count
        expected = kind.predict(remove_avq(model))
        assert torch.equal(found, expected)
        assert differ(expected, kind.exact)


@for_kinds([kind for kind in KINDS if kind.references])
def test_references(kind, model):
    for name, reference in kind.references.items():
        arguments = reference()
        exact = kind.predict(remove_avq(model), **arguments)
        apply_avq(model, kind.config(**COARSE))
        assert torch.equal(kind.predict(model, **arguments), exact), name
        assert kinds(model) < {"several images", "no grid"}, name
        kind.predict(model)
        assert "AVQ" in kinds(model), name


# On and off


@for_kinds(ADAPTERS)
def test_on_and_off(kind, model):
    """Catches a switch that is late or stays, and a second attribute of ours on a module."""
    before = contents(model)
    names = {path: {*vars(module)} for path, module in model.named_modules()}
    assert apply_avq(model, kind.config(**COARSE)) is model
    added = [{*vars(module)} - names[path] for path, module in model.named_modules()]
    assert {name for new in added for name in new} == {"_avq"}
    assert not are_same(contents(model), before)
    avq = kind.predict(model)
    with avq_disabled(model):
        with avq_disabled(model):
            assert torch.equal(kind.predict(model), kind.exact)
        assert torch.equal(kind.predict(model), kind.exact)
    assert calls(model) == [{"AVQ": 1, "disabled": 2}] * len(calls(model))
    assert torch.equal(kind.predict(model), avq)
    assert set_num_refined(model, "exact") is model
    assert torch.equal(kind.predict(model), kind.exact)
    assert calls(model) == [{"scheduled": 1}] * len(calls(model))  # since sizes were set


@for_kinds([*ADAPTERS, *named("Wan")])
def test_threshold(kind, model):
    """Catches a threshold lost on its way to the operation, and columns that are not told."""
    num_parents = COARSE["num_parents"]
    apply_avq(model, kind.config(**COARSE))
    found, totals = [], []
    for threshold in (math.inf, 0.01, 0):
        found.append(kind.predict(set_threshold(model, threshold)))
        shown = [row.columns for row in summary(model).rows]
        totals.append(sum(map(sum, shown)))
    assert totals == sorted(totals)
    assert totals[0] == num_parents * len(shown) < totals[-1]
    assert all(keys > 0 for _, keys in shown)
    assert differ(found[0], kind.exact)
    assert close(found[-1], kind.exact)


@for_kinds(ADAPTERS)
def test_autocast(kind, model):
    with torch.autocast("cpu", torch.bfloat16):
        lower = kind.predict(model)
        near = kind.predict(apply_avq(model, kind.config(**EVERY_KEY)))
    assert kinds(model) == {"AVQ"}
    assert near.dtype == lower.dtype
    assert (near.float() - kind.exact).norm() < 2 * (lower.float() - kind.exact).norm()


@for_kinds([*ADAPTERS, *named("Kandinsky 2", "Chroma", "MiniMaxH3")])
def test_meta_device(kind):
    """Where a model without AVQ tells shapes, so does one with it."""
    inputs = kind.inputs(kind.model, *kind.sizes[0])
    inputs = tree_map_only(torch.Tensor, lambda x: x.to("meta"), inputs)
    model = kind.make().to("meta")
    expected = kind.output(model(**inputs)).shape
    apply_avq(model, kind.config(**COARSE))
    assert kind.output(model(**inputs)).shape == expected
    assert kind.output(apply_avq(kind.make(), kind.config(**COARSE)).to("meta")(**inputs)).is_meta


@for_kinds(ADAPTERS)
def test_stored_codewords(kind, model):
    """Catches own codewords in place of stored ones, and codebooks that are dropped in silence."""
    stored = random_codebooks(model, kind.config(**COARSE))
    if kind.part == "transformer":
        with pytest.raises(TypeError, match="codewords from the keys of each call: expected"):
            apply_avq(model, stored)
        return
    found = kind.predict(apply_avq(model, stored))
    assert kinds(model) == {"AVQ"}
    assert differ(found, kind.exact)
    assert differ(found, kind.predict(apply_avq(model, kind.config(**COARSE))))


@for_kinds(ADAPTERS)
def test_refinement(kind, model):
    """Catches a plan that reaches other layers, a schedule of a model without timesteps, and sizes
    that change after a call has begun."""
    avq = kind.predict(apply_avq(model, kind.config(**COARSE)))
    first, *others = [row.name for row in summary(model).rows if row.config]
    set_num_refined(model, {first: 4})
    configs = [row.config for row in summary(model).rows if row.config]
    assert configs == ["M4P4C2", *["M4P2C2"] * len(others)]
    assert not torch.equal(kind.predict(model), avq)
    schedule = {1000: "exact", 500: 4}
    if kind.timestep:
        exact = kind.predict(set_num_refined(model, "exact"), **kind.timestep(600))
        late = kind.predict(set_num_refined(model, 4), **kind.timestep(400))
        set_num_refined(model, schedule)
        for _ in range(2):
            assert torch.equal(kind.predict(model, **kind.timestep(400)), late)
            assert torch.equal(kind.predict(model, **kind.timestep(600)), exact)
    else:
        with pytest.raises(ValueError, match="no schedules by timestep, but got one"):
            set_num_refined(model, schedule)
    with pytest.raises(ValueError, match="has no AVQ layer"):
        set_num_refined(remove_avq(model), 1)


@contextmanager
def recorded(modules):
    """The arguments and outputs of modules in calls inside the `with` block."""
    found = {}

    def keep(module, args, kwargs, output):
        found[module] = args, kwargs, output

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_hook(keep, with_kwargs=True))
        yield found


def tensors(output) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [x for x in (output.values() if isinstance(output, dict) else output) if x is not None]


@for_kinds([*ADAPTERS, *named("ControlNet", "Kandinsky 2", "Wan", "ZImage", "clip", "dpt")])
def test_by_hand(kind, model):
    """Catches AVQ, on an earlier call's grid or another thread's, in a layer, block or encoder that
    is called by hand."""
    layers = select_layers(model)
    parts = {
        module
        for layer in layers
        for module in layer.caller.modules()
        if layer.attn in module.modules() and module is not layer.caller
    }
    with recorded(x for x in parts if not isinstance(x, nn.ModuleList)) as found:
        kind.predict(model)

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
    hook = layers[0].attn.register_forward_pre_hook(check_elsewhere)
    assert differ(kind.predict(model), kind.exact)
    with layers[-1].attn.register_forward_pre_hook(fail), pytest.raises(KeyError):
        kind.predict(model)
    check()
    assert {*kinds(model)} == {"AVQ", OUTSIDE}


def interrupt(*_) -> None:
    raise KeyboardInterrupt


@for_kinds()
def test_interrupted(kind, model):
    """Catches AVQ that stays on in the process after Ctrl-C inside a layer: PyTorch runs no hooks
    after a module then."""
    num_tokens = kind.frames * kind.sizes[0][0] * kind.sizes[0][1]
    heads = torch.randn(3, 1, 2, num_tokens, 16, generator=torch.Generator().manual_seed(0))
    expected = F.scaled_dot_product_attention(*heads)
    avq = kind.predict(apply_avq(model, kind.config(**COARSE)))
    layer = select_layers(model)[-1].attn
    inner = next(x for x in layer.modules() if isinstance(x, nn.Linear))
    with inner.register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
        kind.predict(model)
    assert torch.equal(F.scaled_dot_product_attention(*heads), expected)
    assert torch.equal(kind.predict(model), avq)
    assert kinds(model) == {"AVQ"}


@for_kinds(ADAPTERS)
def test_a_failed_apply_leaves_the_model_as_it_was(kind, model, monkeypatch):
    """Catches an earlier AVQ that is lost, and one half of a later."""
    host, before, given = type(find_model(model).host), contents(model), []
    original = host.give_avq

    def give_once(self, attn, state):
        given.append(attn)
        if len(given) == 2:
            raise KeyError
        original(self, attn, state)

    def change_and_fail():
        with all_or_nothing([find_model(model)]):
            set_num_refined(apply_avq(model, kind.config(**OTHER)), scheduled(kind))
            raise KeyError

    def refuse():
        for error, arguments in (
            (ValueError, {"source": kind.config(**COARSE, exact=("nothing",))}),
            (ValueError, {"source": kind.config(**COARSE, levels=(7,))}),
            (ValueError, {"source": kind.config(**COARSE, overrides={"x": {"num_refined": 1}})}),
            (ValueError, {"source": kind.config(**COARSE, key_norm=True)}),
            (ValueError, {"route": "fast"}),
        ):
            with pytest.raises(error):
                apply_avq(model, **{"source": kind.config(**OTHER), **arguments})
        given.clear()
        with monkeypatch.context() as patch:
            patch.setattr(host, "give_avq", give_once)
            with pytest.raises(KeyError):
                apply_avq(model, kind.config(**OTHER))
        with pytest.raises(KeyError):
            change_and_fail()

    refuse()
    assert are_same(contents(model), before)
    avq = kind.predict(apply_avq(model, kind.config(**COARSE)))
    rows, layers = summary(model), [layer.name for layer in select_layers(model)]
    refuse()
    for plan in ({layers[0]: 1, layers[1]: 9}, {layers[0]: 1, "nothing": 1}, {1000: 1, 500: 1.5}):
        with pytest.raises((TypeError, ValueError)):
            set_num_refined(model, plan)
    assert summary(model) == rows
    assert torch.equal(kind.predict(model), avq)


@for_kinds(named("SD3", "Flux", "QwenImage", "Wan", "LTXVideo"))
def test_the_processor_of_unets_is_refused(kind):
    """Catches an error far from its cause, in the call and in the verbs."""
    model, message = kind.make(), "AVQProcessor only serves UNets.*call apply_avq"
    model.set_attn_processor(AVQProcessor())
    for use in (kind.predict, apply_avq, remove_avq, summary):
        with pytest.raises(TypeError, match=message):
            use(model)


# Handed over


@for_kinds(named("SD1.5", "Flux", "LTXVideo", "vit"))
def test_masks(kind, model):
    def mask(attn, args, kwargs):
        named, num_image, num_text = tokens_of(attn, args, kwargs)
        return (), named | kind.mask(num_image + num_text)

    with hooked(model, mask):
        masked = kind.predict(model)
        assert differ(masked, kind.exact)
        assert torch.equal(kind.predict(apply_avq(model, kind.config(**COARSE))), masked)
    assert calls(model) == [{"attention mask": 1}] * len(calls(model))


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


INTERCEPTIONS = {
    "a mode around the model": ("model", Flipped, "Flipped is active"),
    "a mode around a block": ("block", Flipped, "Flipped is active"),
    "another function": ("layer", flipped, "scaled_dot_product_attention is replaced"),
}
BACKEND = (partial(attention_backend, "_native_math"), "attention backend _native_math")


@for_kinds([*ADAPTERS, *named("AuraFlow")])
def test_intercepted_scores(kind, model):
    """Catches AVQ where another tool counts on exact attention, also from inside a block on."""
    layer = select_layers(model)[1]
    places = {"model": model, "block": block_of(model, layer), "layer": layer.attn}
    backends = [(where, *BACKEND) for where in ("model", "block")] if kind.part else []
    for where, context, reason in [*INTERCEPTIONS.values(), *backends]:
        with in_module(places[where], context):
            expected = kind.predict(remove_avq(model))
            assert differ(expected, kind.exact) == (context is not BACKEND[0])
            apply_avq(model, only(kind, model, layer))
            assert torch.equal(kind.predict(model), expected)
            assert calls(model) == [{reason: 1}]
            apply_avq(model, kind.config(**EVERY_KEY))
            assert close(kind.predict(model), expected)
            assert kinds(model) == ({reason} if where == "model" else {reason, "AVQ"})


@for_kinds(ADAPTERS)
def test_sizes_far_beyond_the_tokens(kind, model):
    """Catches memory and time for codewords that are no key's."""
    sizes = {"num_parents": 1024, "num_refined": 1024, "num_children": 1024}
    apply_avq(model, kind.config(**sizes), route="always")
    assert torch.equal(kind.predict(model), kind.exact)
    assert kinds(model) == {"over 16 codewords for each token"}


class Around:
    """A processor around that of a layer."""

    def __init__(self, processor):
        self.processor = processor

    def __call__(self, attn, *args, **kwargs):
        return self.processor(attn, *args, **kwargs)


@for_kinds(DIFFUSERS, features={"SD3": "other processors of SD3 (kept)"})
@pytest.mark.filterwarnings("ignore:AVQ does not run in the layers that keep Around")
def test_other_processors(kind, model):
    """A processor on the dispatch of diffusers carries AVQ; others keep their layers."""
    layer = select_layers(model)[0]
    own, config = layer.attn.processor, only(kind, model, layer)
    foreign = type("Foreign", (type(own),), {})()
    carries = hasattr(own, "_attention_backend")
    avq = kind.predict(apply_avq(model, config))
    layer.attn.set_processor(foreign)  # after AVQ
    with pytest.warns(UserWarning, match="keep Foreign: [^,]*$"):
        assert torch.equal(kind.predict(model), kind.exact)
    assert calls(model) == [{"AVQ": 1, "Foreign": 1}]
    assert next(row.runs for row in summary(model).rows if row.config) == "custom: Foreign"
    before = contents(remove_avq(model))
    said = nullcontext() if carries else pytest.warns(UserWarning, match="keep Foreign: [^,]*$")
    with said:
        apply_avq(model, config)
    assert torch.equal(kind.predict(model), avq if carries else kind.exact)
    assert calls(model) == [{"AVQ": 1} if carries else {"Foreign": 1}]
    assert are_same(contents(remove_avq(model)), before)
    layer.attn.set_processor(own)
    layer.attn.processor = Around(apply_avq(model, config) and layer.attn.processor)
    assert torch.equal(kind.predict(model), avq)
    assert torch.equal(kind.predict(remove_avq(model)), kind.exact)
    layer.attn.processor = own


# Gradients, compilers, copies, threads


def gradient(kind, model):
    """Of the sum over two sizes; backward of the first comes after the second."""
    model.train().zero_grad()
    sum(kind.call(model, size).square().mean() for size in kind.sizes).backward()
    parameters = [*model.parameters()]
    return torch.cat([(0 * x if x.grad is None else x.grad).flatten() for x in parameters])


def without_gradient(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.grad is None}


@for_kinds(
    [*ADAPTERS, *named("CogVideoX", "clip")],
    features={"SD3": "gradient checkpointing of SD3", "Flux": "gradient checkpointing of Flux"},
)
def test_checkpoints_recompute_the_call(kind):
    """Catches a block that is recomputed on the grid of a later call, and parameters that AVQ cuts
    off."""
    model = apply_avq(kind.make(), kind.config(**COARSE))
    expected, once, without = gradient(kind, model), calls(model), without_gradient(model)
    assert differ(gradient(kind, remove_avq(model)), expected)
    assert without_gradient(model) == without  # else DistributedDataParallel waits for them
    is_of_diffusers = hasattr(model, "enable_gradient_checkpointing")
    name = "enable_gradient_checkpointing" if is_of_diffusers else "gradient_checkpointing_enable"
    getattr(model, name)()
    before = contents(model)
    found = gradient(kind, apply_avq(model, kind.config(**COARSE)))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert all(x["AVQ"] > y["AVQ"] for x, y in zip(calls(model), once, strict=True))
    assert are_same(contents(remove_avq(model)), before)


@for_kinds(ADAPTERS)
def test_a_foreign_checkpoint_is_refused(kind, model):
    block = block_of(model, select_layers(model)[0])
    forward = block.forward

    def checkpointed(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = checkpointed
    apply_avq(model, kind.config(**COARSE))
    with pytest.raises(RuntimeError, match="use the model's own gradient checkpointing, which"):
        gradient(kind, model)
    exact = gradient(kind, remove_avq(model))
    del block.forward
    assert torch.allclose(gradient(kind, model), exact, rtol=1e-4, atol=1e-6)


@for_kinds(
    named("Flux", "dinov2 with registers"),
    features={"Flux": "torch.compile of transformers (one graph)"},
)
def test_compiled(kind):
    """Catches graph breaks, and compiled code that misses AVQ going."""
    model = kind.small()
    exact, config = kind.predict(model), AVQConfig(**COARSE, query_tile=16)
    avq = kind.predict(apply_avq(model, config))
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    inputs = kind.inputs(model, *kind.sizes[0])
    assert differ(avq, exact)
    with torch.no_grad():
        assert torch.allclose(kind.output(compiled(**inputs)), avq, atol=1e-5)
        assert torch.allclose(kind.output(remove_avq(compiled)(**inputs)), exact, atol=1e-5)


@for_kinds([*ADAPTERS, *named("clip")])
@torch.no_grad()
def test_export(kind):
    """Catches exact attention in the program, a grid that is guessed, and fake tensors that stay in
    a layer which has not run before."""
    model = (kind.small or kind.make)()  # exporting leaves traces
    exact, inputs = kind.predict(model), kind.inputs(model, *kind.sizes[0])
    apply_avq(model, AVQConfig(**COARSE, query_tile=16))
    if not kind.exports:
        with pytest.raises(NotImplementedError, match="to export exact attention"):
            torch.export.export(model, (), inputs)
    program = torch.export.export(model if kind.exports else remove_avq(model), (), inputs)
    expected = kind.predict(model)
    assert differ(expected, exact) == kind.exports
    assert close(kind.output(program.module()(**inputs)), expected)
    if kind.exports and kind.timestep:
        set_num_refined(model, scheduled(kind))
        with pytest.raises(NotImplementedError, match="cannot follow a schedule"):
            torch.export.export(model, (), inputs, strict=False)


@for_kinds([*ADAPTERS, *named("PixArt")])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_its_own_avq(kind, model, how):
    """Catches states that are shared with the copy, and hooks that set those of the original."""
    apply_avq(model, kind.config(**COARSE))
    if how is not copy.deepcopy and not kind.pickles:
        with pytest.raises(ValueError, match="'avq_layer' is not a valid"):
            how(model)
        return
    copied = how(model)
    avq = kind.predict(model)
    assert torch.equal(kind.predict(remove_avq(model)), kind.exact)
    assert torch.equal(kind.predict(copied), avq)
    assert calls(copied) == [{"AVQ": 1}] * len(calls(copied))
    assert torch.equal(kind.predict(remove_avq(copied)), kind.exact)


@for_kinds(
    ADAPTERS,
    features={
        "SD1.5": "several pipelines and threads",
        **dict.fromkeys(("SD3", "Flux"), "transformers in several threads"),
    },
)
def test_threads_have_their_own_grids(kind, model):
    """The order of the other thread would go unnoticed where both have as many tokens."""
    apply_avq(model, kind.config(**COARSE))
    meeting = threading.Barrier(2, timeout=30)
    expected = [kind.predict(model, size) for size in kind.sizes]

    def run(size, one):
        for _ in range(2):
            assert torch.equal(kind.predict(model, size), one)

    def meet(*_):
        meeting.wait()

    with hooked(model, meet):
        run_threads(*(partial(run, *pair) for pair in zip(kind.sizes, expected, strict=True)))


@for_kinds(ADAPTERS)
def test_threads_that_switch(kind, model):
    """Catches hooks that stay, and layers of two installations."""
    interval = sys.getswitchinterval()
    avq = kind.predict(apply_avq(model, kind.config(**COARSE)))

    def switch():
        for _ in range(5):
            apply_avq(model, kind.config(**OTHER))
            remove_avq(model)

    sys.setswitchinterval(1e-6)
    try:
        run_threads(switch, switch, switch)
    finally:
        sys.setswitchinterval(interval)
    assert torch.equal(kind.predict(apply_avq(model, kind.config(**COARSE))), avq)
    assert torch.equal(kind.predict(remove_avq(model)), kind.exact)


@for_kinds(ADAPTERS)
def test_a_thread_waits_for_the_others_change(kind, model):
    """Catches sizes, and hooks of a schedule, for layers whose AVQ another thread has taken off."""
    name = select_layers(apply_avq(model, kind.config(**COARSE)))[0].name
    remover, waits = threading.Thread(target=remove_avq, args=[model]), []

    class Plan(dict):
        """While it is read, another thread removes AVQ."""

        def __iter__(self):
            if not waits:
                remover.start()
                remover.join(timeout=0.2)
                waits.append(remover.is_alive())
            return super().__iter__()

    set_num_refined(model, Plan({name: scheduled(kind)}))
    remover.join()
    assert waits == [True]
    assert not calls(model)


@for_kinds(ADAPTERS)
def test_models_that_share_a_layer_or_block(kind, model):
    """AVQ of one model never acts in a forward of another that has a part of it; a part that begins
    calls brings its AVQ along, as the UNet of two pipelines does."""
    layer, other = select_layers(model)[0], kind.make()
    for path in (layer.name, layer.name.rpartition(".")[0]):
        other.set_submodule(path, model.get_submodule(path))
        avq = kind.predict(apply_avq(model, kind.config(**COARSE)))
        assert torch.equal(kind.predict(other), kind.exact)
        assert torch.equal(kind.predict(model), avq)
    if layer.caller is not model:
        (path,) = (path for path, module in model.named_modules() if module is layer.caller)
        other.set_submodule(path, layer.caller)
        assert differ(kind.predict(other), kind.exact)
        remove_avq(model)
        assert torch.equal(kind.predict(other), kind.exact)
    else:  # its AVQ goes with that of the other model
        apply_avq(other, kind.config(**COARSE))
        remove_avq(model)
        kind.predict(other)
        ran = {row.name: row.calls for row in summary(other).rows if row.name != layer.name}
        assert ran == {name: {"AVQ": 1} for name in ran}
        assert torch.equal(kind.predict(remove_avq(other)), kind.exact)


# Measurement


@for_kinds(ADAPTERS)
def test_measurement(kind, model, monkeypatch):
    """Catches tokens that are left out, another scale or order, keys before their norm, the error
    of another output, and an AVQ that is lost."""
    coarsest = {"num_parents": 4, "num_children": 2, "threshold": 1e15}
    monkeypatch.setattr(exact_runs, "THRESHOLDS", (1.0, 1e5, coarsest["threshold"]))
    monkeypatch.setattr(exact_runs, "MOST_REPEATED", 24)

    class Pipe:
        set_progress_bar_config = staticmethod(lambda **_: None)

        def __call__(self, prompt, num_inference_steps, generator, output_type):
            for _ in range(num_inference_steps):
                kind.predict(model)

    def measure():
        config, pipe = kind.config(**coarsest), Pipe()
        if kind.part is None:
            inputs = kind.inputs(model, *kind.sizes[0])
            batches = [inputs.pop("pixel_values")] * 2
            return measure_error(model, batches, config, progress=False, **inputs)
        setattr(pipe, kind.part, model)
        steps = {"num_inference_steps": 2, "parts": 1}
        return measure_error(pipe, ["a fox"], config, progress=False, **steps)

    before, layers = contents(model), select_layers(model)
    profile = measure()
    assert are_same(contents(model), before)
    assert [one.layer.name for one in profile.layers] == [x.name for x in layers]
    others = tuple(x.name for x in layers[1:])
    alone = kind.config(**coarsest, exact=others)
    found = kind.predict(apply_avq(model, alone, route="always"))
    expected = float((found - kind.exact).norm() / kind.exact.norm())
    assert profile.layers[0].parts[1000].effects[-1] == pytest.approx(expected, rel=1e-2)
    assert expected > 0

    avq = kind.predict(apply_avq(model, kind.config(**COARSE)))
    rows = summary(model)
    assert measure() == profile
    with layers[-1].attn.register_forward_pre_hook(fail), pytest.raises(KeyError):
        measure()
    assert summary(model) == rows
    assert torch.equal(kind.predict(model), avq)
