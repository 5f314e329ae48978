"""`AVQProcessor` on a real tiny UNet: what it computes, what it hands over, and how it compiles."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload
from cases import stored_attention
from diffusers import AutoencoderKL, VQModel
from diffusers.models.attention_processor import AttnProcessor2_0, SlicedAttnProcessor
from tiny import (
    CONFIG,
    let_answer_calls_only,
    predict,
    random_codebooks,
    small_unet,
    tiny_unet,
    tuned_codebooks,
)
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from avq_diffusers.attention.orders import query_order
from avq_diffusers.config import AVQConfig
from avq_diffusers.plugin.apply import apply_avq, avq_disabled, remove_avq
from avq_diffusers.plugin.codebooks import PROJECTION_PARAMETERS
from avq_diffusers.plugin.layer_weights import LayerWeights
from avq_diffusers.plugin.processor import AVQProcessor, remember_processor
from avq_diffusers.plugin.report import summary

LAYER = "up_blocks.2.attentions.1.transformer_blocks.0.attn1"


class Recorder(AttnProcessor2_0):
    """A foreign processor that notes what it gets; the last two names are IP-Adapter's."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __call__(
        self,
        attn,
        hidden_states,
        encoder_hidden_states=None,
        attention_mask=None,
        temb=None,
        ip_adapter_masks=None,
        ip_hidden_states=None,
    ):
        self.calls.append(
            (encoder_hidden_states, attention_mask, temb, ip_adapter_masks, ip_hidden_states)
        )
        if isinstance(encoder_hidden_states, tuple):
            encoder_hidden_states = encoder_hidden_states[0]
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, temb)


@pytest.fixture
def attn(unet, codebooks):
    """A level-1 self-attention with AVQ that has seen an 8 x 8 grid."""
    apply_avq(unet, codebooks)
    predict(unet, 16, 16)
    return unet.get_submodule(LAYER)


def tokens(attn, count=64, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, count, attn.query_dim, generator=generator)


def calls(unet):
    """Calls so far by kind, over all layers."""
    total = {}
    for row in summary(unet).rows:
        for kind, count in row.calls.items():
            total[kind] = total.get(kind, 0) + count
    return total


class TestOutput:
    @pytest.mark.parametrize(
        "config",
        [
            CONFIG,
            AVQConfig(4, 2, 1, query_tile=8, query_order="random", levels=(0, 1)),
            AVQConfig(4, 2, 2, query_order="raster", levels=(1,), importance_tile=2),
            AVQConfig(3, 0, 0, levels=(1,)),
            AVQConfig(4, 2, 1, query_tile=8, levels=(1,), key_norm=True),
        ],
        ids=["plain", "random-order", "importance-tile", "flat", "key-norm"],
    )
    def test_equals_the_operation(self, unet, config):
        """Catches any field of the configuration, or the output projection, left out."""
        codebooks = random_codebooks(unet, config)
        apply_avq(unet, codebooks)
        predict(unet, 16, 24)
        attn = unet.get_submodule(LAYER)
        hidden_states = tokens(attn, 8 * 12)
        with torch.no_grad():
            query, key, value = (
                projection(hidden_states).view(2, 96, 2, 16).transpose(1, 2)
                for projection in (attn.to_q, attn.to_k, attn.to_v)
            )
            if config.key_norm:
                torch.nn.init.normal_(codebooks.key_norm(LAYER).weight)
                key = codebooks.key_norm(LAYER)(key)
            expected = stored_attention(
                query,
                key,
                value,
                codebooks.codebook(LAYER),
                num_refined=config.num_refined,
                codewords="stored",
                query_tile=config.query_tile,
                query_order=query_order(8, 12, config.query_order),
                importance_tile=config.importance_tile,
            )
            expected = attn.to_out[0](expected.transpose(1, 2).reshape(2, 96, 32))
            assert torch.equal(attn(hidden_states), expected)

    def test_every_field_matters(self, unet):
        """Negative control of the test above: each variation changes the output."""
        base = {"num_parents": 4, "num_children": 2, "num_refined": 1, "query_tile": 8}
        variations = ({}, {"num_refined": 2}, {"query_tile": 16}, {"query_order": "random"},
                      {"key_norm": True})  # fmt: skip
        outputs = []
        for variation in variations:
            config = AVQConfig(**base | variation, levels=(1,))
            outputs.append(predict(apply_avq(unet, random_codebooks(unet, config)), 16, 24))
        for index, output in enumerate(outputs):
            assert not any(torch.equal(output, other) for other in outputs[:index])

    def test_real_head_dims(self):
        """Catches head dims that only work as powers of two: SD1.5 has 40 and 80."""
        unet = tiny_unet(block_out_channels=(80, 160, 160, 160), norm_num_groups=16)
        exact = predict(unet)
        apply_avq(unet, random_codebooks(unet))
        assert not torch.equal(predict(unet), exact)
        assert {row.head_dim for row in summary(unet).rows if row.calls} == {40, 80}

    def test_rescale_output_factor(self, attn):
        """Catches the factor that ends every diffusers processor left out."""
        hidden_states = tokens(attn)
        with torch.no_grad():
            output = attn(hidden_states)
            attn.rescale_output_factor = 2.0
            assert torch.equal(attn(hidden_states), output / 2)

    def test_dropout(self, attn):
        """Catches the second output module left out, which only training shows."""
        attn.to_out[1] = torch.nn.Dropout(1.0)
        with torch.no_grad():
            assert attn.eval()(tokens(attn)).any()
            assert not attn.train()(tokens(attn)).any()

    @pytest.mark.parametrize(("height", "width"), [(16, 40), (65, 33), (9, 7), (1, 5)])
    def test_grids(self, unet, codebooks, height, width):
        """Catches square or even grids taken for granted: down-sampling rounds up."""
        apply_avq(unet, codebooks)
        predict(unet, height, width)
        seen = {row.level: row.num_tokens for row in summary(unet).rows if row.calls}
        assert seen == {0: height * width, 1: -(-height // 2) * -(-width // 2)}
        assert calls(unet) == {"AVQ": 6}

    def test_orientation_of_the_grid(self, unet, codebooks):
        """Catches height and width swapped: both grids have as many tokens."""
        apply_avq(unet, codebooks)
        predict(unet, 8, 32)
        state = unet.get_submodule(LAYER)._avq
        assert torch.equal(state.call.get().query_order, query_order(4, 16))
        predict(unet, 32, 8)
        assert torch.equal(state.call.get().query_order, query_order(16, 4))

    def test_codebooks_stay_live(self, unet):
        """Catches copies: training changes tensors in place under a UNet that uses them."""
        codebooks = tuned_codebooks(unet)
        outputs = [predict(apply_avq(unet, codebooks))]
        for tensor in (
            codebooks.codebook(LAYER).children,
            codebooks.projection_changes(LAYER)["to_v.weight"],
        ):
            tensor.mul_(2)
            outputs.append(predict(unet))
            assert not torch.equal(*outputs[-2:])

    @pytest.mark.parametrize("key_norm", [False, True])
    def test_codebooks_are_live_again(self, unet, key_norm):
        """Catches a copy that is kept where the codebooks have come to the UNet's device."""
        codebooks = random_codebooks(unet, AVQConfig(4, 2, 2, levels=(1,), key_norm=key_norm))
        apply_avq(unet, codebooks)
        weights = unet.get_submodule(LAYER)._avq.weights
        weights.move_to(torch.device("meta"), torch.float32)
        assert weights.codebook.parents.is_meta
        assert not key_norm or weights.key_norm.weight.is_meta
        weights.move_to(torch.device("cpu"), torch.float32)
        assert weights.codebook.parents is codebooks.codebook(LAYER).parents
        assert weights.key_norm is codebooks.key_norm(LAYER)


class TestDtypes:
    @pytest.mark.parametrize(
        ("dtype", "key_norm"),
        [(torch.float16, False), (torch.bfloat16, True), (torch.float64, False)],
    )
    def test_unet_dtype(self, unet, dtype, key_norm):
        """Catches float32 codewords that meet half-precision keys, or codewords cast with them."""
        codebooks = random_codebooks(unet, AVQConfig(4, 2, 2, levels=(1,), key_norm=key_norm))
        apply_avq(unet.to(dtype), codebooks)
        attn = unet.get_submodule(LAYER)
        transformer = unet.get_submodule(LAYER.split(".transformer_blocks")[0])
        with torch.no_grad():
            sample = torch.randn(1, attn.query_dim, 8, 8).to(dtype)
            output = transformer(sample, torch.zeros(1, 5, 32, dtype=dtype)).sample
        assert output.dtype == dtype
        assert attn._avq.calls == {"AVQ": 1}
        assert codebooks.codebook(LAYER).parents.dtype == torch.float32

    @pytest.mark.parametrize("kind", ["plain", "key norm", "tuned"])
    def test_autocast(self, unet, kind):
        """Catches a norm that autocast runs in float32, so that keys differ from queries, and
        changes cast by what autocast makes of the tokens: they train in float32."""
        config = AVQConfig(4, 2, 2, query_tile=16, levels=(0, 1), key_norm=kind == "key norm")
        codebooks = (tuned_codebooks if kind == "tuned" else random_codebooks)(unet, config)
        apply_avq(unet, codebooks)
        expected = predict(unet)
        with torch.autocast("cpu", torch.bfloat16):
            output = predict(unet)
        assert calls(unet) == {"AVQ": 12}
        assert not torch.equal(output.float(), expected)
        assert (output.float() - expected).norm() < 0.1 * expected.norm()
        if kind == "tuned":
            changes = unet.get_submodule(LAYER)._avq.weights.projection_changes
            assert changes["to_q.weight"].dtype == torch.float32


class TestHandingOver:
    """Calls that AVQ does not serve get the exact result, and their reason is counted."""

    def exact(self, attn, *args, **kwargs):
        return AttnProcessor2_0()(attn, *args, **kwargs)

    @torch.no_grad()
    def check(self, attn, reason, *args, **kwargs):
        attn._avq.calls.clear()
        assert torch.equal(attn(*args, **kwargs), self.exact(attn, *args, **kwargs))
        assert attn._avq.calls == {reason: 1}

    def test_control(self, attn):
        """The comparison that follows fails where AVQ serves the call."""
        with pytest.raises(AssertionError):
            self.check(attn, "AVQ", tokens(attn))

    def test_attention_mask(self, attn):
        mask = torch.zeros(2, 1, 64)
        mask[:, :, 40:] = -10000
        self.check(attn, "attention mask", tokens(attn), attention_mask=mask)

    @pytest.mark.parametrize("count", [32, 65])
    def test_merged_tokens(self, attn, count):
        """Catches an order of the wrong length used, or an exception, where ToMe is active."""
        self.check(attn, "tokens are not the grid", tokens(attn, count))

    def test_unknown_grid(self, unet, codebooks):
        """Catches a layer that is called outside its Transformer2DModel."""
        attn = apply_avq(unet, codebooks).get_submodule(LAYER)
        self.check(attn, "tokens are not the grid", tokens(attn))

    def test_encoder_states(self, attn):
        self.check(attn, "cross-attention", tokens(attn), tokens(attn, 7, seed=1))

    @pytest.mark.parametrize("name", ["norm_q", "norm_k"])
    def test_query_or_key_norm(self, attn, name):
        setattr(attn, name, torch.nn.LayerNorm(16))
        self.check(attn, "query or key norm", tokens(attn))

    def test_residual_connection(self, attn):
        attn.residual_connection = True
        self.check(attn, "residual connection", tokens(attn))

    def test_previous_processor_gets_every_argument(self, attn):
        """Catches an argument that is lost, or takes the place of another."""
        recorder = Recorder()
        remember_processor(attn, recorder)
        text, mask = tokens(attn, 7, seed=1), torch.zeros(2, 1, 7)
        optional = {"temb": "temb", "ip_adapter_masks": "masks", "ip_hidden_states": "states"}
        attn(tokens(attn), text, mask, **optional)
        assert recorder.calls == [(text, mask, "temb", "masks", "states")]

    def test_previous_processor_gets_no_argument_that_it_does_not_take(self, unet, codebooks):
        unet.set_attn_processor(SlicedAttnProcessor(2))
        expected = predict(unet)
        apply_avq(unet, codebooks)
        with avq_disabled(unet):
            assert torch.equal(predict(unet), expected)


class Products(TorchDispatchMode):
    """The shapes of the results of matrix products."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.shapes.append(tuple(result.shape))
        return result


class Doubled(nn.Linear):
    def forward(self, tokens):
        return 2 * super().forward(tokens)


class DoubledWeight(torch.Tensor):
    """As a quantized weight: what it stands for is known to products only."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs)
        return 2 * result.as_subclass(torch.Tensor) if function is F.linear else result


class TestProjectionChanges:
    """They are added in the calls that AVQ serves, and only there."""

    @pytest.fixture
    def tuned(self, unet):
        return tuned_codebooks(unet)

    def test_equals_the_operation(self, unet, tuned):
        """Catches one of the five tensors left out, exchanged or applied to another layer."""
        apply_avq(unet, tuned)
        predict(unet, 16, 24)
        attn = unet.get_submodule(LAYER)
        changes = tuned.projection_changes(LAYER)
        weights = {name: attn.get_parameter(name) + change for name, change in changes.items()}
        hidden_states = tokens(attn, 8 * 12)
        with torch.no_grad():
            query, key, value = (
                F.linear(hidden_states, weights[name]).view(2, 96, 2, 16).transpose(1, 2)
                for name in ("to_q.weight", "to_k.weight", "to_v.weight")
            )
            expected = stored_attention(
                query,
                key,
                value,
                tuned.codebook(LAYER),
                num_refined=CONFIG.num_refined,
                codewords="stored",
                query_tile=CONFIG.query_tile,
                query_order=query_order(8, 12, CONFIG.query_order),
            )
            expected = F.linear(
                expected.transpose(1, 2).reshape(2, 96, 32),
                weights["to_out.0.weight"],
                weights["to_out.0.bias"],
            )
            torch.testing.assert_close(attn(hidden_states), expected)

    @pytest.mark.parametrize("name", PROJECTION_PARAMETERS)
    def test_fine_tune(self, unet, tuned, name):
        """Catches weights of the base model that run in place of those of its fine-tune."""
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
        torch.testing.assert_close(fine_tuned, predict(apply_avq(tiny_unet(), tuned)))

    def test_handed_over_calls_are_of_the_base_model(self, unet, tuned):
        """Catches exact attention with changes that were trained for AVQ."""
        mask = torch.zeros(2, 1, 64)
        mask[:, :, 40:] = -10000
        attn = tiny_unet().get_submodule(LAYER)
        with torch.no_grad():
            expected = attn(tokens(attn), attention_mask=mask), attn(tokens(attn, 65))
            attn = apply_avq(unet, tuned).get_submodule(LAYER)
            predict(unet)
            assert torch.equal(attn(tokens(attn), attention_mask=mask), expected[0])
            assert torch.equal(attn(tokens(attn, 65)), expected[1])

    @pytest.mark.parametrize(
        ("dtype", "avq_first"),
        [(torch.float16, True), (torch.bfloat16, False), (torch.float64, True)],
    )
    def test_unet_dtype(self, unet, tuned, dtype, avq_first):
        """Catches a cast that is missed, or made from an earlier cast: 16 bits and back."""
        expected = predict(apply_avq(unet, tuned))
        if not avq_first:
            remove_avq(unet)
        unet.to(dtype)
        apply_avq(unet, tuned)
        attn = unet.get_submodule(LAYER)
        transformer = unet.get_submodule(LAYER.split(".transformer_blocks")[0])
        with torch.no_grad():
            sample = torch.randn(1, attn.query_dim, 8, 8).to(dtype)
            assert transformer(sample, torch.zeros(1, 5, 32, dtype=dtype)).sample.dtype == dtype
        assert attn._avq.calls == {"AVQ": 1}
        unet.float().load_state_dict(tiny_unet().state_dict())
        assert torch.equal(predict(unet), expected)
        assert tuned.projection_changes(LAYER)["to_q.weight"].dtype == torch.float32

    @pytest.mark.parametrize("avq_first", [True, False])
    def test_offload(self, unet, tuned, avq_first):
        """Catches changes that are moved to the meta device, or weights that are read from it."""
        plain = predict(apply_avq(unet, tuned))
        expected = predict(let_answer_calls_only(apply_avq(tiny_unet(), tuned)))
        torch.testing.assert_close(expected, plain)
        if not avq_first:
            remove_avq(unet)
        cpu_offload(unet, execution_device=torch.device("cpu"))
        if not avq_first:
            apply_avq(unet, tuned)
        assert unet.get_submodule(LAYER).to_q.weight.is_meta
        assert torch.equal(predict(unet), expected)

    def test_one_product(self, unet, tuned):
        """Catches a second product with the tokens, which costs a tenth of a compiled step."""
        attn = apply_avq(unet, tuned).get_submodule(LAYER)
        predict(unet)
        shape = (2 * 64, 32)
        with torch.no_grad(), Products() as products:
            attn(tokens(attn))
        assert products.shapes.count(shape) == 4

    @pytest.mark.parametrize("kind", ["class", "weight"])
    def test_a_layer_that_answers_calls_only(self, unet, tuned, kind):
        """Catches weights that are read where a call of the layer computes something else."""
        layer = apply_avq(unet, tuned).get_submodule(LAYER).to_v
        if kind == "class":
            layer.__class__ = Doubled
        else:
            layer.weight = nn.Parameter(layer.weight.detach().as_subclass(DoubledWeight))
        doubled = apply_avq(tiny_unet(), tuned)
        with torch.no_grad():
            doubled.get_submodule(LAYER).to_v.weight *= 2
        torch.testing.assert_close(predict(unet), predict(doubled))

    def test_gradients(self, unet, tuned):
        """Catches weights of the UNet that tuned codebooks keep from being trained."""
        apply_avq(unet, tuned.requires_grad_()).train()
        unet(torch.ones(1, 4, 8, 8), 10, torch.ones(1, 5, 32)).sample.square().mean().backward()
        for tensor in tuned.projection_changes(LAYER).values():
            assert tensor.grad.any()
        for parameter in unet.get_submodule(LAYER).parameters():
            assert parameter.grad.any()

    def test_inference_mode_then_training(self, unet, tuned):
        """Catches copies made in inference mode, which autograd refuses later."""
        apply_avq(unet, tuned).double()
        inputs = torch.ones(1, 4, 8, 8).double(), 10, torch.ones(1, 5, 32).double()
        with torch.inference_mode():
            unet(*inputs)
        unet(*inputs).sample.sum().backward()
        assert unet.conv_in.weight.grad.any()


class TestOneInstanceOnAllLayers:
    """`unet.set_attn_processor(AVQProcessor(codebooks, unet=unet))`."""

    def test_equals_apply(self, unet, codebooks):
        """Catches an instance that runs AVQ where there is no codebook, or nowhere."""
        expected = predict(apply_avq(unet, codebooks))
        unet.set_attn_processor(AVQProcessor(codebooks, unet=unet))
        assert len(set(unet.attn_processors.values())) == 1
        assert torch.equal(predict(unet), expected)
        assert calls(unet) == {"AVQ": 6}

    def test_foreign_processors_keep_their_calls(self, unet, codebooks):
        """Catches IP-Adapter destroyed: its layers get tuples of states, and masks by name."""
        recorder = Recorder()
        cross = unet.get_submodule(LAYER[:-1] + "2")
        cross.set_processor(recorder)
        unet.set_attn_processor(AVQProcessor(codebooks, unet=unet))
        text, image = tokens(attn=cross, count=5)[..., :32], tokens(cross, 4)[..., :32]
        hidden_states = tokens(cross)
        cross(hidden_states, (text, image), ip_adapter_masks="masks")
        assert recorder.calls == [((text, image), None, None, "masks", None)]

    def test_module_processors_stay_registered(self, unet, codebooks):
        """Catches an nn.Module processor that `unet.to()` no longer reaches."""

        class Module(torch.nn.Linear):
            def __call__(
                self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None
            ):
                return self.forward(hidden_states)

        processor = Module(32, 32)
        unet.get_submodule(LAYER[:-1] + "2").set_processor(processor)
        before = list(unet.state_dict())
        unet.set_attn_processor(AVQProcessor(codebooks, unet=unet))
        unet.to(torch.bfloat16)
        assert processor.weight.dtype == torch.bfloat16
        remove_avq(unet)
        assert list(unet.state_dict()) == before

    def test_remove(self, unet, codebooks):
        """Catches processors that stay behind on the layers without codebooks."""
        expected, before = predict(unet), unet.attn_processors
        unet.set_attn_processor(AVQProcessor(codebooks, unet=unet))
        remove_avq(unet)
        assert unet.attn_processors == before
        assert torch.equal(predict(unet), expected)

    def test_apply_afterwards(self, unet, codebooks):
        """Catches the all-layers instance kept as the processor to hand over to."""
        before = unet.attn_processors
        unet.set_attn_processor(AVQProcessor(codebooks, unet=unet))
        apply_avq(unet, codebooks)
        changed = {name for name, p in unet.attn_processors.items() if p is not before[name]}
        assert changed == {f"{name}.processor" for name in codebooks.layer_specs}

    def test_other_unet(self, unet, codebooks):
        """Catches a silent exact run where the user asked for AVQ."""
        unet.set_attn_processor(AVQProcessor(codebooks))
        with pytest.raises(RuntimeError, match=r"not prepared for its AVQProcessor; use apply_avq"):
            predict(unet)

    def test_codebooks_that_do_not_fit_leave_the_earlier_ones(self, unet, codebooks, monkeypatch):
        """Catches AVQ that is gone, or on half of the layers, when the GPU's memory runs out."""
        before = predict(apply_avq(unet, codebooks))
        moves = iter([None, None])
        monkeypatch.setattr(LayerWeights, "move_to", lambda *_: next(moves))
        with pytest.raises(StopIteration):
            apply_avq(unet, random_codebooks(unet, seed=1))
        monkeypatch.undo()
        assert torch.equal(predict(unet), before)

    @pytest.mark.parametrize("stray", ["codebooks", "none"])
    def test_a_stray_instance_is_replaced(self, unet, codebooks, stray):
        """Catches advice of the error above that leads nowhere: a processor of ours kept as the one
        to hand over to, which then calls itself."""
        expected = predict(unet)
        other = copy.deepcopy(unet)
        wanted = predict(apply_avq(other, codebooks))

        def strayed():
            unet.set_attn_processor(AVQProcessor(codebooks if stray == "codebooks" else None))

        strayed()
        assert torch.equal(predict(apply_avq(unet, codebooks)), wanted)
        with avq_disabled(unet):
            assert torch.equal(predict(unet), expected)
        strayed()
        unet.set_attn_processor(AVQProcessor(codebooks, unet=unet))
        assert torch.equal(predict(unet), wanted)
        with avq_disabled(unet):
            assert torch.equal(predict(unet), expected)
        strayed()
        assert torch.equal(predict(remove_avq(unet)), expected)

    def test_wrong_arguments(self, unet):
        with pytest.raises(TypeError, match="expected AVQCodebooks, an AVQConfig or nothing"):
            AVQProcessor("my-codebooks", unet=unet)


class TestWithoutState:
    def test_is_the_exact_processor(self, unet):
        """Catches a zero-argument instance, as IP-Adapter makes them, that loses an argument."""
        mask = torch.tensor([[1, 1, 1, 0, 0]])
        plain, masked = predict(unet), predict(unet, encoder_attention_mask=mask)
        assert not torch.equal(plain, masked)
        unet.set_attn_processor(AVQProcessor())
        assert torch.equal(predict(unet), plain)
        assert torch.equal(predict(unet, encoder_attention_mask=mask), masked)
        assert isinstance(AVQProcessor(), AttnProcessor2_0)

    @pytest.mark.parametrize(
        ("model", "options", "channels"),
        [
            (AutoencoderKL, {"block_out_channels": (8,), "norm_num_groups": 4}, 4),
            (VQModel, {"block_out_channels": (32,), "norm_type": "spatial"}, 3),
        ],
    )
    def test_vae_attention(self, model, options, channels):
        """Catches 4-dimensional inputs, group norm and residual lost on the way, and `temb`, which
        the spatial norm reads."""
        vae = model(**options).eval()
        latents = torch.randn(1, channels, 6, 5)
        with torch.no_grad():
            expected = vae.decode(latents).sample
            vae.decoder.mid_block.attentions[0].set_processor(AVQProcessor())
            assert torch.equal(vae.decode(latents).sample, expected)


class TestCopies:
    def test_deepcopy(self, unet):
        """Catches state found by id, and hooks or tensors that are still the original's."""
        codebooks = tuned_codebooks(unet)
        apply_avq(unet, codebooks)
        expected = predict(unet)
        twin = copy.deepcopy(unet)
        remove_avq(unet)
        for tensor in codebooks.parameters():
            tensor.zero_()
        assert torch.equal(predict(twin), expected)
        assert calls(twin) == {"AVQ": 12}
        remove_avq(twin)
        assert torch.equal(predict(twin), predict(unet))
        for module in (*twin.modules(), *unet.modules()):
            assert not module._forward_pre_hooks
            assert not [name for name in vars(module) if name.startswith("_avq")]

    def test_save_pretrained(self, unet, tmp_path):
        """Catches a UNet that AVQ keeps from being saved, or that is saved with the changes."""
        expected = tiny_unet().state_dict()
        apply_avq(unet, tuned_codebooks(unet)).save_pretrained(tmp_path)
        loaded, info = type(unet).from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, expected[name])

    def test_state_dict_is_unchanged(self, unet, codebooks):
        """Catches codewords or processors registered on the UNet, which pollute checkpoints."""
        before = list(unet.state_dict())
        apply_avq(unet, codebooks)
        assert list(unet.state_dict()) == before
        assert unet.num_parameters() == tiny_unet().num_parameters()


class TestTraining:
    def gradients(self, unet, codebooks):
        sample = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
        unet.train()(sample, 10, torch.ones(1, 5, 32)).sample.square().mean().backward()
        attn = unet.get_submodule(LAYER)
        weights = [attn.to_q.weight, attn.to_k.weight, attn.to_v.weight]
        return [x.grad for x in (*weights, codebooks.key_norm(LAYER).weight)]

    @pytest.mark.feature("gradient checkpointing")
    def test_gradients(self, unet):
        """Catches gradients cut at attention, and a checkpoint's second forward that differs."""
        config = AVQConfig(4, 2, 2, levels=(1,), key_norm=True)
        codebooks = random_codebooks(unet, config)
        plain = self.gradients(apply_avq(unet, codebooks), codebooks)
        for gradient in plain:
            assert gradient.any()
        checked, codebooks = tiny_unet(), random_codebooks(unet, config)
        checked.enable_gradient_checkpointing()
        recomputed = self.gradients(apply_avq(checked, codebooks), codebooks)
        assert calls(checked) == {"AVQ": 6}
        torch.testing.assert_close(recomputed, plain)


class TestCompile:
    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    @pytest.mark.feature("torch.compile of the UNet (one graph)")
    @pytest.mark.long
    def test_whole_unet(self, unet, codebooks):
        """Catches graph breaks, and AVQ lost in the compiled code."""
        exact = predict(unet)
        apply_avq(unet, codebooks)
        expected = predict(unet)
        counter = CompileCounter()
        compiled = torch.compile(unet, backend=counter, fullgraph=True)
        output = predict(compiled)
        torch.testing.assert_close(output, expected)
        assert (output - exact).norm() > 100 * (output - expected).norm()
        assert counter.frame_count == 1
        assert calls(unet) == {"AVQ": 6}  # compiled calls are not counted

    @pytest.mark.parametrize(
        "dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.float64]
    )
    def test_tuned(self, dtype):
        """Catches graph breaks, also where changes are cast in the compiled code."""
        unet, config = small_unet(), AVQConfig(4, 2, 2)
        tuned = tuned_codebooks(unet, config)
        inputs = torch.ones(1, 4, 16, 16, dtype=dtype), 10, torch.ones(1, 5, 32, dtype=dtype)

        @torch.no_grad()
        def output(model):
            return model(*inputs).sample

        untuned = output(apply_avq(unet, random_codebooks(unet, config)).to(dtype))
        expected = output(apply_avq(unet, tuned))
        fresh = apply_avq(small_unet(), tuned).to(dtype)
        counter = CompileCounter()
        compiled = torch.compile(fresh, backend=counter, fullgraph=True)
        for _ in range(3):
            torch.testing.assert_close(output(compiled), expected)
        assert (expected - untuned).norm() > 1e-2 * untuned.norm()
        assert counter.frame_count == 1

    @pytest.mark.gpu
    @pytest.mark.parametrize("tuned", [False, True])
    def test_moved_after_apply(self, tuned):
        """Catches codebooks that the compiled code moves: its second call is another graph."""
        unet, config = small_unet(), AVQConfig(4, 2, 2)
        codebooks = (tuned_codebooks if tuned else random_codebooks)(unet, config)
        apply_avq(unet, codebooks, route="always")
        unet.to("cuda")
        inputs = torch.ones(1, 4, 16, 16), torch.tensor(10), torch.ones(1, 5, 32)
        inputs = [tensor.cuda() for tensor in inputs]
        counter = CompileCounter()
        compiled = torch.compile(unet, backend=counter, fullgraph=True)
        with torch.no_grad():
            first, second = compiled(*inputs).sample, compiled(*inputs).sample
            torch.testing.assert_close(first, second)
            torch.testing.assert_close(first, unet(*inputs).sample)
        assert counter.frame_count == 1

    @pytest.mark.parametrize(
        "dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.float64]
    )
    def test_export(self, dtype):
        """Catches fake tensors that stay in the layers, where nothing was in its place before."""
        unet, config = small_unet(), AVQConfig(4, 2, 2)
        apply_avq(unet, tuned_codebooks(unet, config)).to(dtype)
        ones = partial(torch.ones, dtype=dtype)
        inputs = ones(1, 4, 16, 16), torch.tensor(10), ones(1, 5, 32)
        with torch.no_grad():
            exported = torch.export.export(unet, inputs).module()
            expected = unet(*inputs).sample
            torch.testing.assert_close(exported(*inputs).sample, expected)

    @pytest.mark.long
    @pytest.mark.feature("torch.compile of the UNet (one graph)")
    @pytest.mark.parametrize("tuned", [False, True])
    def test_switching_a_compiled_unet(self, tuned):
        """Catches compiled code that does not notice AVQ coming, pausing and going."""
        unet, config = small_unet(), AVQConfig(4, 2, 2)
        codebooks = (tuned_codebooks if tuned else random_codebooks)(unet, config)
        exact = predict(unet)
        compiled = torch.compile(unet, backend="eager", fullgraph=True)
        torch.testing.assert_close(predict(compiled), exact)
        assert apply_avq(compiled, codebooks) is compiled
        avq = predict(compiled)
        assert (avq - exact).norm() > 1e-3 * exact.norm()
        with avq_disabled(compiled):
            torch.testing.assert_close(predict(compiled), exact)
        torch.testing.assert_close(predict(compiled), avq)
        remove_avq(compiled)
        torch.testing.assert_close(predict(compiled), exact)

    @pytest.mark.feature("torch.compile of its blocks (one graph)")
    @pytest.mark.parametrize("tuned", [pytest.param(False, marks=pytest.mark.long), True])
    def test_repeated_blocks(self, unet, tuned):
        """Catches a guard per layer or per resolution: the recompile limit is near."""

        def count_graphs(model):
            torch.compiler.reset()
            counter = CompileCounter()
            model.compile_repeated_blocks(backend=counter, fullgraph=True)
            outputs = [predict(model, *size) for size in ((16, 16), (24, 16), (16, 40))]
            return counter.frame_count, outputs

        baseline, exact = count_graphs(unet)
        codebooks = (tuned_codebooks if tuned else random_codebooks)(unet)
        model = apply_avq(tiny_unet(), codebooks)
        expected = [predict(model, *size) for size in ((16, 16), (24, 16), (16, 40))]
        graphs, outputs = count_graphs(model)
        assert graphs == baseline
        for got, want, plain in zip(outputs, expected, exact, strict=True):
            torch.testing.assert_close(got, want)
            assert (got - plain).norm() > 1e-3 * plain.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("tuned", [False, True])
def test_codebooks_follow_the_unet(unet, tuned):
    """Catches tensors left on the CPU when the UNet moves after AVQ was applied."""
    codebooks = (tuned_codebooks if tuned else random_codebooks)(unet)
    apply_avq(unet, codebooks, route="always").to("cuda")
    text = torch.zeros(1, 5, 32, device="cuda")
    output = unet(torch.zeros(1, 4, 16, 16, device="cuda"), 10, text).sample
    assert output.is_cuda
    assert calls(unet) == {"AVQ": 6}
