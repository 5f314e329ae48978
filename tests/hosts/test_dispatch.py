"""AVQ as a backend of diffusers' attention dispatch."""

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.transformers import transformer_flux
from diffusers.models.transformers.transformer_flux import (
    FluxIPAdapterAttnProcessor,
)
from tiny_transformers import (
    CONFIG,
    EXACT,
    flux2_transformer,
    flux_transformer,
    hunyuan_transformer,
    inputs,
    ltx_transformer,
    position_ids,
    predict,
    qwen_transformer,
    sd3_transformer,
    wan_transformer,
    z_transformer,
)

from avq_diffusers import (
    apply_avq,
    avq_attention,
    avq_disabled,
    remove_avq,
    summary,
)
from avq_diffusers.attention.orders import query_order
from avq_diffusers.hosts.dispatch import AVQ_BACKEND, _present
from avq_diffusers.hosts.grids import family_of

feature = pytest.mark.feature
OPTIONS = {"num_parents": 4, "num_children": 2, "num_refined": 2, "query_tile": 16}
families = pytest.mark.parametrize(
    "make",
    [
        pytest.param(flux_transformer, marks=feature("Flux")),
        pytest.param(flux2_transformer, marks=feature("Flux2")),
        pytest.param(qwen_transformer, marks=feature("Qwen-Image")),
        pytest.param(z_transformer, marks=feature("Z-Image")),
        pytest.param(wan_transformer, marks=feature("Wan")),
        pytest.param(ltx_transformer, marks=feature("LTX")),
    ],
)


def calls(model) -> list[dict[str, int]]:
    return [row.calls for row in summary(model).rows]


def kinds(model) -> set[str]:
    return {kind for row in summary(model).rows for kind in row.calls}


@pytest.fixture
def dispatched(monkeypatch):
    """What the layers ask of the dispatch, with what it answers."""
    found = []

    def record(query, key, value, **options):
        output = original(query, key, value, **options)
        found.append((query, key, value, output))
        return output

    original = _AttentionBackendRegistry._backends.get(AVQ_BACKEND)
    if original is None:
        apply_avq(flux_transformer())
        original = _AttentionBackendRegistry._backends[AVQ_BACKEND]
    monkeypatch.setitem(_AttentionBackendRegistry._backends, AVQ_BACKEND, record)
    return found


@families
class TestFamilies:
    def test_the_operation(self, make, dispatched):
        """Catches an order of another grid, other sinks, and sizes that are not passed on."""
        text_first, frames = make in (flux_transformer, flux2_transformer, qwen_transformer), 1
        if make in (wan_transformer, ltx_transformer):
            frames = 3
        predict(apply_avq(make(), CONFIG), 6, 10)
        assert dispatched
        num_image = frames * 60
        for *qkv, output in dispatched:
            query, key, value = (x.transpose(1, 2) for x in qkv)
            num_text = query.shape[2] - num_image
            image = slice(num_text, None) if text_first else slice(num_image)
            text = slice(num_text) if text_first else slice(num_image, None)
            order = query_order(6, 10, frames=frames)
            tokens = torch.arange(query.shape[2])
            expected = avq_attention(
                query,
                key[:, :, image],
                value[:, :, image],
                sink_key=key[:, :, text] if num_text else None,
                sink_value=value[:, :, text] if num_text else None,
                query_order=torch.cat([tokens[image][order], tokens[text]]),
                key_order=order,
                **OPTIONS,
            )
            assert torch.equal(output, expected.transpose(1, 2))


def test_layers_have_the_names_of_their_blocks():
    names = [row.name for row in summary(z_transformer()).rows]
    assert names == ["noise_refiner.0.attention", "layers.0.attention", "layers.1.attention"]
    assert [row.name for row in summary(wan_transformer()).rows] == [
        "blocks.0.attn1",
        "blocks.1.attn1",
    ]


def test_padded_image_tokens_are_sinks():
    """Z-Image pads the image to multiples of 32."""
    model = z_transformer()
    exact = predict(model, 6, 10)
    apply_avq(model, EXACT)
    assert (predict(model, 6, 10) - exact).norm() < 1e-5 * exact.norm()
    assert {row.num_tokens for row in summary(model).rows} == {60}


def test_another_model_and_the_default_are_untouched():
    model, other = flux_transformer(), flux_transformer()
    exact, default = predict(other), _AttentionBackendRegistry._active_backend
    apply_avq(model, CONFIG)
    predict(model)
    assert _AttentionBackendRegistry._active_backend is default
    assert "avq" not in {x.value for x in AttentionBackendName}
    assert torch.equal(predict(other), exact)
    assert kinds(model) == {"AVQ"}


class TestHandedOver:
    """Calls that go to the previous backend, and are counted."""

    def check(self, model, reason, **overrides):
        exact = predict(model, **overrides)
        apply_avq(model, CONFIG)
        assert torch.equal(predict(model, **overrides), exact)
        assert kinds(model) == {reason}

    def test_masks(self):
        model = hunyuan_transformer()
        self.check(model, "attention mask")

    def test_z_images_of_several_sizes(self):
        images = [torch.randn(4, 1, 16, 24), torch.randn(4, 1, 24, 16)]
        model = apply_avq(z_transformer(), CONFIG)
        with torch.no_grad():
            model(**inputs(model) | {"x": images}, return_dict=False)
        assert kinds(model) == {"several images"}

    def test_positions_that_are_no_grid(self):
        self.check(flux_transformer(), "no grid", img_ids=torch.zeros(96, 3))

    def test_video_coordinates_without_sizes(self):
        model = apply_avq(ltx_transformer(), CONFIG)
        arguments = inputs(model) | dict.fromkeys(("num_frames", "height", "width"))
        with torch.no_grad():
            model(**arguments, video_coords=torch.rand(2, 3, 288))
        assert kinds(model) == {"no grid"}

    @pytest.mark.parametrize("config", [{}, {"patch_size": (1, 2, 2)}])
    def test_latents_of_another_form(self, config):
        family = family_of(("hidden_states", "encoder_hidden_states", "timestep"))
        assert family.read(config, {"hidden_states": torch.ones(2, 4, 16, 24)}) == "no grid"

    @pytest.mark.parametrize(
        ("keys", "options", "reason"),
        [
            (lambda x: x, {"is_causal": True}, "causal, grouped or dropped keys"),
            (lambda x: x, {"dropout_p": 0.5}, "causal, grouped or dropped keys"),
            (lambda x: x[:, :, :1], {"enable_gqa": True}, "causal, grouped or dropped keys"),
            (lambda x: torch.cat([x, x], dim=1), {}, "other keys than queries"),
            (lambda x: x, {"attn_mask": torch.ones(120, 120).bool()}, "attention mask"),
        ],
    )
    def test_other_attention(self, keys, options, reason, monkeypatch):
        """What a processor of another tool may ask for."""

        def ask(query, key, value, *, backend, **rest):
            return attention_dispatch.dispatch_attention_fn(
                query, keys(key), keys(value), backend=backend, **options
            )

        model = apply_avq(flux_transformer(), CONFIG)
        monkeypatch.setattr(transformer_flux, "dispatch_attention_fn", ask)
        predict(model)
        assert kinds(model) == {reason}


class TestPreviousBackend:
    def test_it_serves_other_calls_and_comes_back(self):
        model = flux_transformer()
        for layer in model.attn_processors.values():
            layer._attention_backend = AttentionBackendName._NATIVE_MATH
        exact = predict(model)
        apply_avq(model, CONFIG)
        with avq_disabled(model):
            assert torch.equal(predict(model), exact)
        remove_avq(model)
        assert {x._attention_backend for x in model.attn_processors.values()} == {
            AttentionBackendName._NATIVE_MATH
        }

    def test_one_set_afterwards_is_said(self):
        model = flux_transformer()
        exact = predict(model)
        apply_avq(model, CONFIG)
        for layer in model.attn_processors.values():
            layer._attention_backend = AttentionBackendName.NATIVE
        with pytest.warns(UserWarning, match="keep attention backend native: transformer_blocks.0"):
            assert torch.equal(predict(model), exact)
        assert {row.runs for row in summary(model).rows} == {
            "exact: replaced by attention backend native"
        }
        remove_avq(model)
        assert {x._attention_backend for x in model.attn_processors.values()} == {
            AttentionBackendName.NATIVE
        }

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

    def test_one_processor_on_all_layers(self):
        """Catches AVQ that stays on a processor which two layers share."""
        model = wan_transformer()
        processor = model.blocks[0].attn1.processor
        model.set_attn_processor(processor)
        exact = predict(model)
        apply_avq(model, EXACT)
        close = predict(model)
        assert (close - exact).norm() < 1e-5 * exact.norm()
        assert kinds(model) == {"AVQ"}
        remove_avq(model)
        assert "_attention_backend" not in vars(processor)


def test_a_layer_that_fails_leaves_nothing(monkeypatch):
    """Catches the state of a failed call in the next call of another model."""
    model = apply_avq(flux_transformer(), CONFIG)

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model.transformer_blocks[0].attn.to_out[0], "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        predict(model)
    assert _present.get() is None


def test_context_parallel_is_refused():
    class Parallel:
        context_parallel_config = object()

    model = flux_transformer()
    model._parallel_config = Parallel()
    with pytest.raises(ValueError, match="AVQ does not run in context parallel"):
        apply_avq(model)
    assert not model._forward_pre_hooks


def test_position_ids_are_read_once_per_change(monkeypatch):
    """Catches a wait for the device in every step, and a grid of earlier contents."""
    from avq_diffusers.hosts import grids

    reads, original = [], grids._grid_of_ids
    monkeypatch.setattr(grids, "_grid_of_ids", lambda ids: reads.append(1) or original(ids))
    model = apply_avq(flux_transformer(), CONFIG)
    ids = position_ids(8, 12)
    for _ in range(3):
        predict(model, img_ids=ids)
    assert len(reads) == 1
    ids.copy_(position_ids(12, 8))
    predict(model, img_ids=ids)
    assert len(reads) == 2
    with torch.inference_mode():  # whose tensors do not tell of changes
        ids = position_ids(8, 12)
        predict(model, img_ids=ids)
        predict(model, img_ids=ids.copy_(position_ids(12, 8)))
    assert len(reads) == 4


@feature("first-block cache of Flux")
def test_first_block_cache():
    """Catches a state that waits for a block which the cache skips."""
    model = apply_avq(flux_transformer(), CONFIG)
    model.enable_cache(FirstBlockCacheConfig(threshold=1e9))
    with model.cache_context("cond"):
        for _ in range(3):
            predict(model)
    assert calls(model) == [{"AVQ": 3}, {"AVQ": 1}, {"AVQ": 1}]
    model.disable_cache()


@feature("fused projections of Flux")
def test_fused_projections():
    model = apply_avq(flux_transformer(), CONFIG)
    avq = predict(model)
    model.fuse_qkv_projections()
    assert (predict(model) - avq).norm() < 1e-5 * avq.norm()
    assert kinds(model) == {"AVQ"}


@feature("repeated blocks of Flux compiled")
def test_repeated_blocks_compile():
    """Catches graph breaks, and guards that hold for one layer only."""
    model = apply_avq(flux_transformer(num_single_layers=3), CONFIG)
    eager, graphs = predict(model), []

    def backend(graph, example):
        graphs.append(graph)
        return graph

    model.compile_repeated_blocks(backend=backend, fullgraph=True)
    assert torch.allclose(predict(model), eager, atol=1e-5)
    # As many as without AVQ: the first single block gets an image of other strides.
    assert len(graphs) == 3


def test_sd3_is_not_dispatched():
    assert not hasattr(sd3_transformer().transformer_blocks[0].attn.processor, "_attention_backend")
