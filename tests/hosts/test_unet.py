"""AVQ in a real tiny UNet: what a layer computes, what it hands over, and the processor itself."""

import copy
import re
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from checks import kinds, runs
from diffusers import (
    ModelMixin,
    StableDiffusionPAGPipeline,
    StableDiffusionSAGPipeline,
    UNet2DModel,
    VQModel,
)
from diffusers.models.attention_processor import AttnProcessor2_0
from tiny import (
    CONFIG,
    draw,
    own_codebooks,
    predict,
    random_codebooks,
    sdxl_pipe,
    sdxl_unet,
    tiny_pipe,
    tiny_unet,
    traced_sdxl_unet,
    traced_unet,
    tuned_codebooks,
)

from avq_diffusers import (
    AVQConfig,
    AVQProcessor,
    AVQStableDiffusionPipeline,
    apply_avq,
    avq_attention,
    avq_disabled,
    remove_avq,
    select_layers,
    summary,
)
from avq_diffusers.attention.orders import query_order
from avq_diffusers.hosts.codebooks import PROJECTION_PARAMETERS, AVQCodebooks
from avq_diffusers.hosts.models import unet as host

feature = pytest.mark.feature
LAYER = "up_blocks.2.attentions.1.transformer_blocks.0.attn1"  # at level 1
parse = AVQConfig.parse
PLAIN_SIZES = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 8,
}
ONLY_CONVOLUTIONS = {
    "block_out_channels": (16,),
    "down_block_types": ("DownBlock2D",),
    "mid_block_type": None,
    "up_block_types": ("UpBlock2D",),
}


def seen_by_layer(unet, *size):
    """The input and the output of `LAYER` in a call of the UNet."""
    seen = []
    hook = lambda attn, args, output: seen.append((args[0], output))  # noqa: E731
    with unet.get_submodule(LAYER).register_forward_hook(hook):
        predict(unet, *size)
    return seen[0]


def own_config(unet, config):
    return config


def represented_by_means(unet, config):
    codebooks = random_codebooks(unet, config)
    codebooks.avq_config = replace(codebooks.avq_config, codewords="means")
    return codebooks


class TestOutput:
    @pytest.mark.parametrize(
        ("make", "config"),
        [
            (random_codebooks, parse("M4P1C2", query_tile=8, query_order="random")),
            (random_codebooks, parse("M4P2C2", query_order="raster")),
            (random_codebooks, parse("M3", key_norm=True)),
            (own_config, parse("M6P2C3", query_tile=16)),
            (own_config, parse("M6C3T0.01", query_tile=16)),
            *((represented_by_means, CONFIG), (tuned_codebooks, CONFIG), (own_codebooks, CONFIG)),
        ],
        ids=[
            *("order", "raster", "flat-and-key-norm", "own-codewords", "threshold"),
            *("by-means", "tuned", "own-and-tuned"),
        ],
    )
    def test_equals_the_operation(self, unet, make, config):
        """Catches any field of the configuration, or any tensor of the codebooks, left out."""
        source = make(unet, replace(config, levels=(0, 1)))
        apply_avq(unet, source)
        changes, codebook, norm = {}, None, torch.nn.Identity()
        if isinstance(source, AVQCodebooks):
            config, codebook = source.avq_config, source.codebook(LAYER)
            changes = source.projection_changes(LAYER) or {}
        if config.key_norm:
            norm = source.key_norm(LAYER)
            torch.nn.init.normal_(norm.weight)
        hidden_states, output = seen_by_layer(unet, 16, 24)
        attn = unet.get_submodule(LAYER)
        weights = {
            name: attn.get_parameter(name) + changes.get(name, 0) for name in PROJECTION_PARAMETERS
        }
        query, key, value = (
            F.linear(hidden_states, weights[f"to_{name}.weight"])
            .unflatten(-1, (2, 16))
            .transpose(1, 2)
            for name in "qkv"
        )
        order = query_order(8, 12, config.query_order)
        expected = avq_attention(
            query,
            norm(key),
            value,
            codebook,
            **asdict(config.spec),
            query_order=order,
            key_order=order,
        )
        expected = expected.transpose(1, 2).flatten(2)
        expected = F.linear(expected, weights["to_out.0.weight"], weights["to_out.0.bias"])
        assert torch.equal(output, expected)

    @pytest.mark.parametrize(("make", "levels"), [(tiny_unet, {0, 1}), (sdxl_unet, {1})])
    def test_the_default_is_the_finest_levels(self, make, levels):
        """Catches a default that SDXL, whose finest level has no self-attention, refuses."""
        for arguments in ((), ("M64C8T1e-4",), (AVQConfig(),)):
            rows = summary(apply_avq(make(), *arguments)).rows
            assert {row.level for row in rows if row.config} == levels
            assert {row.config for row in rows} == {"M64C8T1e-4", ""}

    def test_what_follows_the_projection(self, unet, codebooks):
        """Catches the factor that ends diffusers' processors left out, or dropout."""
        attn = apply_avq(unet, codebooks).get_submodule(LAYER)
        _, output = seen_by_layer(unet)
        attn.rescale_output_factor = 2.0
        assert torch.equal(seen_by_layer(unet)[1], output / 2)
        attn.to_out[1] = torch.nn.Dropout(1.0).train()
        assert output.any()
        assert not seen_by_layer(unet)[1].any()

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

    def test_codebooks_are_live_again(self, unet):
        """Catches a copy that is kept where the codebooks have come to the UNet's device."""
        codebooks = random_codebooks(unet, parse("M4P2C2", levels=(1,), key_norm=True))
        weights = codebooks.layer_weights(LAYER)
        weights.move_to(torch.device("meta"), torch.float32)
        assert weights.codebook.parents.is_meta
        assert weights.key_norm.weight.is_meta
        weights.move_to(torch.device("cpu"), torch.float32)
        assert weights.codebook.parents is codebooks.codebook(LAYER).parents
        assert weights.key_norm is codebooks.key_norm(LAYER)


def test_autocast(unet):
    """Catches a norm that autocast runs in float32, so that keys differ from queries, and
    changes cast by what autocast makes of the tokens: they train in float32."""
    apply_avq(unet, tuned_codebooks(unet, replace(CONFIG, key_norm=True)))
    expected = predict(unet)
    with torch.autocast("cpu", torch.bfloat16):
        output = predict(unet)
    assert kinds(unet) == {"AVQ"}
    assert not torch.equal(output.float(), expected)
    assert (output.float() - expected).norm() < 0.1 * expected.norm()
    changes = unet.get_submodule(LAYER)._avq.weights.projection_changes
    assert changes["to_q.weight"].dtype == torch.float32


class TestHandingOver:
    """Calls that AVQ does not serve get the exact result, and their reason is counted."""

    @pytest.mark.parametrize(
        ("arguments", "attributes", "reason"),
        [
            ({"encoder_hidden_states": torch.ones(1, 7, 32)}, {}, "cross-attention"),
            ({}, {"norm_k": torch.nn.LayerNorm(16)}, "query or key norm"),
            ({}, {"residual_connection": True}, "residual connection"),
        ],
    )
    def test_exact(self, unet, arguments, attributes, reason):
        """Changes of the projections were trained for AVQ, so exact attention has none."""
        attn = unet.get_submodule(LAYER)
        vars(attn).update(attributes)
        attn.register_forward_pre_hook(
            lambda attn, args, kwargs: (args, kwargs | arguments), with_kwargs=True
        )
        _, expected = seen_by_layer(unet)
        others = ("down_blocks", "up_blocks.2.attentions.0")
        apply_avq(unet, tuned_codebooks(unet, parse("M4P2C2", levels=(1,), exact=others)))
        assert torch.equal(seen_by_layer(unet)[1], expected)
        assert kinds(unet) == {reason}


TINY = {"num_parents": 4, "num_children": 2, "num_refined": 2, "query_tile": 16}


class OneTransformer(ModelMixin):
    """The least that AVQ takes for a UNet."""

    def __init__(self):
        super().__init__()
        self.down_blocks = traced_unet().down_blocks

    def forward(self, *inputs):
        return self.down_blocks[0].attentions[0](*inputs, return_dict=False)[0]


INPUTS = torch.linspace(-2, 2, 16 * 256).view(1, 16, 16, 16).sin(), torch.ones(1, 5, 32)


def waits():
    """Whether a hook on all modules is left."""
    return bool(torch.nn.modules.module._global_forward_pre_hooks)


class TestSetOnAStockUNet:
    """`unet.set_attn_processor(AVQProcessor(...))`, and no other line."""

    @pytest.fixture(autouse=True)
    def alone(self):
        """Processors of other tests may still wait, and compiled frames be at their limit."""
        host._awaiting.clear()
        host._stop_waiting()
        torch._dynamo.reset()

    @pytest.mark.parametrize(
        ("processor", "source"),
        [
            (lambda: AVQProcessor(route="always", **TINY), AVQConfig(levels=(0, 1), **TINY)),
            (lambda: AVQProcessor("M4P2C2", route="always", levels=(1,), query_tile=16),
             AVQConfig(levels=(1,), **TINY)),
            (lambda: AVQProcessor(AVQConfig(**TINY), route="always"), AVQConfig(**TINY)),
        ],
    )  # fmt: skip
    def test_equals_apply(self, unet, processor, source):
        """Catches a first call that runs exact, in part or as a whole, and a lasting hook."""
        exact, before = predict(unet), {n: type(p) for n, p in unet.attn_processors.items()}
        expected = predict(apply_avq(copy.deepcopy(unet), source, route="always"))
        unet.set_attn_processor(processor())
        assert torch.equal(predict(unet), expected)
        assert not torch.equal(expected, exact)
        assert not waits()
        assert {row.level for row in summary(unet).rows if row.config} == {*source.levels}
        with avq_disabled(unet):
            assert torch.equal(predict(unet), exact)
        assert torch.equal(predict(remove_avq(unet)), exact)
        assert {n: type(p) for n, p in unet.attn_processors.items()} == before

    @feature("set_attn_processor(AVQProcessor()) on a stock pipeline")
    def test_of_a_pipeline(self):
        """Level 0 of SDXL has no self-attention; its pipeline calls the UNet with more inputs."""
        pipe, one = sdxl_pipe(traced_sdxl_unet()), {"num_inference_steps": 1}
        exact = draw(pipe, **one)
        source = AVQConfig(levels=(1,), **TINY)
        expected = draw(apply_avq(sdxl_pipe(traced_sdxl_unet()), source, route="always"), **one)
        assert not torch.equal(expected, exact)
        pipe.unet.set_attn_processor(AVQProcessor(route="always", **TINY))
        assert torch.equal(draw(pipe, **one), expected)
        assert not waits()
        assert {row.level for row in summary(pipe).rows if row.config} == {1}
        assert torch.equal(draw(remove_avq(pipe), **one), exact)

    @pytest.mark.parametrize("is_wrapped", [True, False])
    def test_compiled(self, is_wrapped):
        """Catches compiled code that begins without AVQ."""
        model, other = OneTransformer().eval(), OneTransformer().eval()
        expected = apply_avq(other, AVQConfig(**TINY), route="always")(*INPUTS)
        model.down_blocks[0].attentions[0].transformer_blocks[0].attn1.set_processor(
            AVQProcessor(route="always", **TINY)
        )
        if is_wrapped:
            model = torch.compile(model, backend="eager")
        else:
            model.compile(backend="eager")
        assert torch.equal(model(*INPUTS), expected)
        assert not waits()

    def test_default(self, unet):
        """Levels 0 and 1; what reports and switches does not wait for a call."""
        unet.set_attn_processor(AVQProcessor())
        assert {row.level for row in summary(unet).rows if row.config == "M64C8T1e-4"} == {0, 1}
        assert not waits()

    @pytest.mark.parametrize("has_codebooks", [True, False])
    def test_replaced_before_the_first_call(self, unet, codebooks, has_codebooks):
        """Catches a processor of ours kept as the one to hand over to, which then calls itself."""
        expected = predict(unet)
        wanted = predict(apply_avq(copy.deepcopy(unet), codebooks))
        for follow, output in (
            (lambda: apply_avq(unet, codebooks), wanted),
            (lambda: unet.set_attn_processor(AVQProcessor(codebooks)), wanted),
            (lambda: remove_avq(unet), expected),
        ):
            unet.set_attn_processor(AVQProcessor(codebooks if has_codebooks else None))
            follow()
            assert torch.equal(predict(unet), output)
            with avq_disabled(unet):
                assert torch.equal(predict(unet), expected)

    def test_over_earlier_avq(self, unet):
        """Catches an earlier configuration that stays, on a UNet prepared in any way."""
        source = AVQConfig(levels=(0, 1), **TINY)
        expected = predict(apply_avq(copy.deepcopy(unet), source, route="always"))
        for prepare in (
            lambda: apply_avq(unet, "M8P4C2"),
            lambda: unet.set_attn_processor(AVQProcessor("M8P4C2")) or predict(unet),
        ):
            prepare()
            unet.set_attn_processor(AVQProcessor(source, route="always"))
            assert torch.equal(predict(unet), expected)

    def test_some_layers(self, unet):
        """Catches AVQ in layers that were given another processor."""
        chosen = "down_blocks.0.attentions.0.transformer_blocks.0.attn1"
        unet.set_attn_processor({
            name: AVQProcessor(**TINY) if name.startswith(chosen) else AttnProcessor2_0()
            for name in unet.attn_processors
        })  # fmt: skip
        assert [row.name for row in summary(unet).rows if row.config] == [chosen]

    def test_copies(self, unet):
        """Catches a copy, made before or after the first call, that loses AVQ or keeps the hook."""
        source = AVQConfig(levels=(0, 1), **TINY)
        expected = predict(apply_avq(copy.deepcopy(unet), source, route="always"))
        unet.set_attn_processor(AVQProcessor(source, route="always"))
        early = copy.deepcopy(unet)
        assert torch.equal(predict(unet), expected)
        assert torch.equal(predict(early), expected)
        assert torch.equal(predict(copy.deepcopy(unet)), expected)
        assert not waits()

    @pytest.mark.parametrize(
        ("cls", "guidance", "options"),
        [
            (StableDiffusionPAGPipeline, "pag_scale", {"pag_applied_layers": "mid"}),
            (StableDiffusionSAGPipeline, "sag_scale", {}),
        ],
    )
    def test_put_back_by_pipelines(self, cls, guidance, options):
        """Catches a second image refused, prepared again, or other than with `apply_avq`."""
        pipe, other = (tiny_pipe(cls=cls, **options) for _ in range(2))
        apply_avq(other, AVQConfig(levels=(0, 1), **TINY), route="always")
        pipe.unet.set_attn_processor(AVQProcessor(route="always", **TINY))
        for scale in (3.0, 3.0, 0.0):
            images = [draw(x, **{guidance: scale}) for x in (pipe, other)]
            assert torch.equal(*images)
        counts = [[row.calls.get("AVQ") for row in summary(x).rows] for x in (pipe, other)]
        assert counts[0] == counts[1]

    @pytest.mark.filterwarnings("ignore:AVQ does not run")
    def test_put_back_by_hand(self, unet):
        """Catches the processor refused in layers without AVQ, also in a copy, and one that is
        taken for that of the UNet's AVQ after AVQ was removed or applied from another."""
        processor = AVQProcessor(route="always", **TINY)
        unet.set_attn_processor(processor)
        expected = predict(unet)
        unet.set_attn_processor(AttnProcessor2_0())
        assert not torch.equal(predict(unet), expected)
        unet.set_attn_processor(processor)
        for target in (unet, copy.deepcopy(unet)):
            assert torch.equal(predict(target), expected)
            assert {row.calls.get("AVQ") for row in summary(target).rows if row.config} == {2}

        for change in (
            lambda: remove_avq(unet),
            lambda: apply_avq(unet, "M8P4C2"),
            lambda: unet.set_attn_processor(AVQProcessor("M8P4C2")) or predict(unet),
        ):
            change()
            unet.set_attn_processor(processor)
            with pytest.raises(RuntimeError, match="set a new one on each UNet"):
                predict(unet)

    def test_unused_processors_leave_nothing(self):
        processor = AVQProcessor()
        assert waits()
        del processor
        torch.nn.Identity()(1)
        assert not waits()

    def test_other_models_compile_while_a_processor_waits(self):
        """Catches a hook that breaks the graphs of every model."""
        processor = AVQProcessor()
        other = apply_avq(OneTransformer().eval(), AVQConfig(**TINY), route="always")
        expected = other(*INPUTS)
        other.compile(backend="eager", fullgraph=True)
        assert torch.equal(other(*INPUTS), expected)
        assert waits()
        del processor

    def test_rebuilt_processors_of_prepared_layers_keep_their_avq(self, unet):
        """Catches the default in place of the layers' own sizes, as IP-Adapter makes processors."""
        apply_avq(unet, AVQConfig(**TINY), route="always")
        unet.set_attn_processor({n: type(p)() for n, p in unet.attn_processors.items()})
        expected = predict(apply_avq(tiny_unet(), AVQConfig(**TINY), route="always"))
        assert torch.equal(predict(unet), expected)
        assert not waits()

    def test_refused(self, unet):
        """Catches exact attention without a word where a processor cannot prepare a model."""
        processor = AVQProcessor(**TINY)
        unet.set_attn_processor(processor)
        predict(unet)
        other = tiny_unet()
        other.set_attn_processor(processor)
        with pytest.raises(RuntimeError, match="set a new one on each UNet"):
            predict(other)
        with pytest.raises(TypeError, match="takes no argument num_parent; did you mean num_p"):
            AVQProcessor(num_parent=4)
        names = iter(range(9, 99))
        other.set_attn_processor(
            {name: AVQProcessor(num_parents=next(names), num_refined=2)
             for name in other.attn_processors}
        )  # fmt: skip
        with pytest.raises(ValueError, match="a UNet takes one AVQProcessor, but its layers carry"):
            predict(other)
        crossed = tiny_unet()
        crossed.get_submodule(LAYER[:-1] + "2").set_processor(AVQProcessor())
        with pytest.raises(TypeError, match="serves self-attention in the spatial transformers"):
            predict(crossed)


@pytest.mark.parametrize("make", [tuned_codebooks, own_config])
def test_the_owners_line(pipe, make):
    """`pipe.set_attn_processor(AVQProcessor(...))`, of a pipeline made either way."""
    unet = pipe.unet
    source = make(unet, replace(CONFIG, codewords="means"))
    expected = predict(apply_avq(tiny_unet(), source, backend="reference"))
    before = {name: p for name, p in unet.attn_processors.items() if "attn2" in name}
    if make is own_config:
        pipe = AVQStableDiffusionPipeline.from_pipe(pipe)
    else:
        pipe = tiny_pipe(unet, AVQStableDiffusionPipeline)
    ours = AVQProcessor(source, backend="reference")
    pipe.set_attn_processor(ours)
    assert not waits()  # for a first call, with a hook on every module, while `ours` is kept
    assert all(unet.attn_processors[name] is p for name, p in before.items())
    assert torch.equal(predict(unet), expected)
    tuned = ", tuned" if make is tuned_codebooks else ""
    assert runs(pipe) == {f"AVQ (reference backend){tuned}"}
    processor = AttnProcessor2_0()
    pipe.set_attn_processor(processor)
    assert set(unet.attn_processors.values()) == {processor}


def test_vae_attention_is_refused():
    vae = VQModel(block_out_channels=(32,)).eval()
    vae.decoder.mid_block.attentions[0].set_processor(AVQProcessor())
    with pytest.raises(RuntimeError, match="prepares the first UNet that is called with it"):
        vae.decode(torch.randn(1, 3, 6, 5))


@pytest.mark.parametrize(
    ("source", "arguments", "error", "message"),
    [
        (8, {}, TypeError, "expected AVQCodebooks, an AVQConfig, a string such as 'M64C8T1e-4' or"),
        ("M64P", {}, ValueError, "a configuration such as M64C8T1e-4, M64P16C8 or M256, but got"),
        (None, {"level": 1}, TypeError, "takes no argument level; did you mean levels?"),
        (
            AVQConfig(codewords="stored", num_refined=16),
            {},
            ValueError,
            'codewords="stored" needs codebooks, which calibrate or gather_codebooks makes.',
        ),
        (AVQConfig(key_norm=True), {}, ValueError, "key_norm needs codebooks, which calibrate or "),
        (None, {"backend": "cuda"}, ValueError, "backend must be one of auto, triton, torch"),
    ],
)
def test_refused(unet, source, arguments, error, message):
    """An earlier AVQ stays."""
    apply_avq(unet, AVQConfig.parse("M4P2C2"))
    with pytest.raises(error, match=re.escape(message)):
        apply_avq(unet, source, **arguments)
    assert {row.config for row in summary(unet).rows} == {"M4P2C2", ""}


def test_codebooks_that_do_not_fit_are_refused(unet, codebooks):
    """An earlier AVQ stays."""
    expected = predict(apply_avq(unet, codebooks))
    infinite = random_codebooks(unet)
    infinite.codebook(LAYER).children[0, 0, 0] = torch.inf
    for source, message in (
        (random_codebooks(tiny_unet(attention_head_dim=4)), "another model: .* has 2 heads of dim"),
        (infinite, "children .*finite"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_avq(unet, source)
    with pytest.raises(TypeError, match=r"have a configuration of their own; drop levels\."):
        apply_avq(unet, codebooks, levels=(0,))
    assert torch.equal(predict(unet), expected)


@pytest.mark.parametrize(
    "make",
    [lambda: UNet2DModel(**PLAIN_SIZES), lambda: tiny_unet(**ONLY_CONVOLUTIONS)],
    ids=["UNet2DModel", "convolutions"],
)
def test_no_spatial_transformers(make):
    unet = make()
    said = f"spatial transformers, but this {type(unet).__name__} has none."
    with pytest.raises(ValueError, match=said):
        apply_avq(unet)
    with pytest.raises(ValueError, match="at level 0, and none that AVQ serves"):
        select_layers(unet, (0,))
    assert not summary(remove_avq(unet)).rows


@pytest.mark.parametrize("make", [tiny_unet, sdxl_unet])
def test_diffusers_default_processors(make):
    """Catches a refusal by diffusers that does not say what to do."""
    unet = apply_avq(make())
    with pytest.raises(ValueError, match=r"call remove_avq\(pipe\) first"):
        unet.set_default_attn_processor()
    remove_avq(unet).set_default_attn_processor()


@pytest.mark.parametrize("thing", [object(), None, "pipe"])
def test_no_unet(thing):
    for verb in (apply_avq, remove_avq, summary):
        with pytest.raises(TypeError, match="expected a pipeline with a unet or a transformer, or"):
            verb(thing)
