"""AVQ as a backend of diffusers' attention dispatch."""

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from checks import calls, differ, kinds
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.transformers import transformer_flux
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from hosts.kinds import KIND
from tiny_transformers import (
    CONFIG,
    EXACT,
    choosy,
    flux_transformer,
    position_ids,
    predict,
    wan_transformer,
)

from avq_diffusers import apply_avq, avq_disabled, remove_avq, select_layers, set_threshold, summary
from avq_diffusers.hosts.models import grids

feature = pytest.mark.feature


def backends(model) -> set[AttentionBackendName]:
    return {x._attention_backend for x in model.attn_processors.values()}


def set_backend(model, backend: AttentionBackendName) -> None:
    for processor in model.attn_processors.values():
        processor._attention_backend = backend


def test_steps_with_kept_keys_of_the_text():
    """Qwen-Image 2.1, whose first step attends part by part."""
    qwen = pytest.importorskip("diffusers.models.transformers.transformer_qwenimage21")
    sizes = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "context_in_dim": 32}
    sizes |= {"num_attention_heads": 2, "attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)}
    torch.manual_seed(0)
    model = choosy(qwen.QwenImage21Transformer2DModel(**sizes))
    text, image = torch.randn(2, 24, 32), torch.randn(2, 96, 4)
    kept = {
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 8, 12)]] * 2,
        "img_mask": (torch.arange(48) >= 24).expand(2, -1),
        "kv_cache": qwen.QwenImage21KVCache(2),
        "encoder_hidden_states_mask": torch.arange(24) < torch.tensor([24, 10])[:, None],
    }
    with torch.no_grad():
        first = model(image, text, **kept, kv_cache_mode="extract").sample
        exact = model(image, text, **kept, kv_cache_mode="cached").sample
        apply_avq(model, EXACT)
        assert torch.equal(model(image, text, **kept, kv_cache_mode="extract").sample, first)
        close = model(image, text, **kept, kv_cache_mode="cached").sample
        assert summary(model).rows[0].calls["AVQ"] == 1
        coarse = apply_avq(model, CONFIG)(image, text, **kept, kv_cache_mode="cached").sample
    assert (close - exact).norm() < 1e-5 * exact.norm()
    assert differ(coarse, exact)


class TestHandedOver:
    """Calls that go to the previous backend, and are counted."""

    @pytest.mark.parametrize(
        ("config", "latents"),
        [({}, (16, 24)), ({"patch_size": (1, 2, 2)}, (16, 24)), ({"patch_size": 2}, (16,))],
    )
    def test_latents_of_another_form(self, config, latents):
        hidden_states = torch.ones(2, 4, *latents)
        assert grids.latent_grid(config, {"hidden_states": hidden_states}) == "no grid"

    @pytest.mark.parametrize(
        ("num_heads", "options"),
        [(2, {"is_causal": True}), (2, {"dropout_p": 0.5}), (1, {"enable_gqa": True})],
    )
    def test_other_attention(self, num_heads, options, monkeypatch):
        """What a processor of another tool may ask for."""

        def ask(query, key, value, *, backend, **rest):
            return attention_dispatch.dispatch_attention_fn(
                query, key[:, :, :num_heads], value[:, :, :num_heads], backend=backend, **options
            )

        model = apply_avq(flux_transformer(), CONFIG)
        monkeypatch.setattr(transformer_flux, "dispatch_attention_fn", ask)
        predict(model)
        assert kinds(model) == {"causal, grouped or dropped keys"}


class TestProcessors:
    def test_their_backend_comes_back(self):
        """And one that is set afterwards stays, and is said."""
        model, own = flux_transformer(), AttentionBackendName._NATIVE_MATH
        default = _AttentionBackendRegistry._active_backend
        set_backend(model, own)
        exact = predict(model)
        apply_avq(model, CONFIG)
        with avq_disabled(model):
            assert torch.equal(predict(model), exact)
        assert backends(remove_avq(model)) == {own}
        set_backend(model, AttentionBackendName.NATIVE)
        native = predict(model)
        set_backend(model, own)
        apply_avq(model, CONFIG)
        set_backend(model, AttentionBackendName.NATIVE)
        with pytest.warns(UserWarning, match="keep attention backend native: transformer_blocks.0"):
            assert torch.equal(predict(model), native)
        runs = {row.runs for row in summary(model).rows}
        assert runs == {"exact: replaced by attention backend native"}
        assert backends(remove_avq(model)) == {AttentionBackendName.NATIVE}
        assert _AttentionBackendRegistry._active_backend is default
        assert "avq" not in {x.value for x in AttentionBackendName}

    @feature("IP-Adapter of Flux")
    def test_an_ip_adapter_runs_beside_avq(self):
        """Catches a report of its keys' attention in place of the layer's own."""
        model = flux_transformer()
        torch.manual_seed(3)
        processor = FluxIPAdapterAttnProcessor(128, 32)
        model.transformer_blocks[0].attn.set_processor(processor)
        embeddings = {"ip_hidden_states": [torch.randn(2, 4, 32)]}
        exact = predict(model, joint_attention_kwargs=embeddings)
        close = predict(apply_avq(model, EXACT), joint_attention_kwargs=embeddings)
        assert (close - exact).norm() < 1e-5 * exact.norm()
        assert calls(model)[0] == {"AVQ": 1, "other keys than queries": 1}
        assert {row.runs for row in summary(model).rows} == {"AVQ (torch backend)"}

    def test_one_on_all_layers(self):
        """Catches AVQ that stays on a processor which two layers share."""
        model = wan_transformer()
        processor = model.blocks[0].attn1.processor
        model.set_attn_processor(processor)
        exact = predict(model)
        close = predict(apply_avq(model, EXACT))
        assert (close - exact).norm() < 1e-5 * exact.norm()
        assert kinds(model) == {"AVQ"}
        remove_avq(model)
        assert "_attention_backend" not in vars(processor)


def out_of_sight(own):
    """A processor of another tool that computes the same with a function of its own."""

    class Foreign(type(own)):
        def __call__(self, *args, **kwargs):
            with torch._C.DisableTorchFunction():  # AVQ's mode, too
                return super().__call__(*args, **kwargs)

    return Foreign()


def default(model):
    model.set_default_attn_processor()


def sliced(model):
    model.set_attention_slice(1)


def foreign(model):
    for layer in select_layers(model):
        layer.attn.set_processor(out_of_sight(layer.attn.processor))


class TestProcessorsThatDoNotCallTorch:
    """Where AVQ takes the place of PyTorch's attention, a layer that does not call it runs without
    AVQ: the summary and one warning say so."""

    @pytest.mark.parametrize("avq_first", [False, True])
    @pytest.mark.parametrize(
        ("name", "change", "said"),
        [
            ("Kandinsky 2", default, "AttnAddedKVProcessor"),
            ("Kandinsky 2", sliced, "SlicedAttnAddedKVProcessor"),
            ("PixArt", default, "AttnProcessor"),
            ("PixArt", foreign, "Foreign"),
            ("Kandinsky 2", foreign, "Foreign"),
        ],
    )
    def test_they_are_reported(self, name, change, said, avq_first):
        kind = KIND[name]
        model, exact, told = kind.make(), kind.exact, f"the layers that keep {said}: "
        coarse = kind.config(num_parents=4, num_children=2, num_refined=2)
        if avq_first:
            avq = kind.predict(apply_avq(model, coarse, route="always"))
            assert differ(avq, exact)
            change(model)
        else:
            change(model)
            is_known = change is not foreign
            with pytest.warns(UserWarning, match=told) if is_known else nullcontext():
                apply_avq(model, coarse, route="always")
        is_new = avq_first or change is foreign
        with pytest.warns(UserWarning, match=told) if is_new else nullcontext():
            assert not differ(kind.predict(model), exact)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kind.predict(model)
        assert calls(model) == [{"AVQ": 1, said: 2} if avq_first else {said: 2}] * len(calls(model))
        expected = f"custom: {said}" if change is foreign else f"exact: replaced by {said}"
        assert {row.runs for row in summary(model).rows} == {expected}

    def test_one_that_calls_it_at_times(self):
        """Catches a report that stays after AVQ has come back."""
        kind = KIND["PixArt"]
        model = apply_avq(kind.make(), kind.config(), route="always")
        foreign(model)
        with pytest.warns(UserWarning, match="keep Foreign"):
            kind.predict(model)
        for layer in select_layers(model):
            layer.attn.set_processor(AttnProcessor2_0())
        kind.predict(model)
        assert calls(model) == [{"Foreign": 1, "AVQ": 1}] * len(calls(model))
        assert {row.runs for row in summary(model).rows} == {"AVQ (torch backend)"}


@pytest.mark.parametrize("avq_first", [True, False])
def test_another_tool_replaces_forward(avq_first):
    """Catches AVQ that stays, and AVQ that goes with that tool, such as a cache or offloading."""
    kind = KIND["PixArt"]
    model = kind.make()
    exact = kind.predict(model)
    avq = kind.predict(apply_avq(model, kind.config(), route="always"))
    if not avq_first:
        remove_avq(model)
    layers = [layer.attn for layer in select_layers(model)]
    before = {attn: attn.forward for attn in layers}
    for attn in layers:
        attn.forward = partial(attn.forward)
    if not avq_first:
        apply_avq(model, kind.config(), route="always")
    for _ in range(2):
        assert torch.equal(kind.predict(model), avq)
        set_threshold(model, kind.config().threshold)
    for attn in layers:
        attn.forward = before[attn]
    assert torch.equal(kind.predict(model), avq)
    assert torch.equal(kind.predict(remove_avq(model)), exact)


def test_position_ids_are_read_once_per_change(monkeypatch):
    """Catches a wait for the device in every step, and a grid of earlier contents."""
    reads, original = [], grids._grid_of_ids
    monkeypatch.setattr(grids, "_grid_of_ids", lambda *x: reads.append(1) or original(*x))
    model = apply_avq(flux_transformer(), CONFIG)
    for is_inference, counts in ((False, (1, 1, 2)), (True, (3, 4, 5))):
        with torch.inference_mode(is_inference):  # whose tensors do not tell of changes
            ids = position_ids(8, 12)
            for new, count in zip((ids, ids, position_ids(12, 8)), counts, strict=True):
                if new is not ids:
                    ids.copy_(new)
                predict(model, img_ids=ids)
                assert len(reads) == count


@feature("fused projections of Flux")
def test_fused_projections():
    model = apply_avq(flux_transformer(), CONFIG)
    avq = predict(model)
    model.fuse_qkv_projections()
    assert (predict(model) - avq).norm() < 1e-5 * avq.norm()
    assert kinds(model) == {"AVQ"}
