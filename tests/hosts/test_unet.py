"""AVQ in a real tiny UNet: what a layer computes, what it hands over, and the processor itself."""

import copy
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from checks import kinds, runs
from diffusers import AutoencoderKL, VQModel
from diffusers.models.attention_processor import (
    AttnProcessor2_0,
    CustomDiffusionAttnProcessor2_0,
    SlicedAttnProcessor,
)
from tiny import (
    CONFIG,
    own_codebooks,
    predict,
    random_codebooks,
    sdxl_unet,
    tiny_pipe,
    tiny_unet,
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
    summary,
)
from avq_diffusers.attention.orders import query_order
from avq_diffusers.hosts.codebooks import PROJECTION_PARAMETERS, AVQCodebooks

LAYER = "up_blocks.2.attentions.1.transformer_blocks.0.attn1"  # at level 1
CROSS = LAYER[:-1] + "2"


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


def tokens(attn, count=64, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, count, attn.query_dim, generator=generator)


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
            (random_codebooks, CONFIG),
            (random_codebooks, AVQConfig(4, 2, 1, 8, query_order="random", levels=(0, 1))),
            (
                random_codebooks,
                AVQConfig(4, 2, 2, query_order="raster", levels=(1,), importance_tile=2),
            ),
            (random_codebooks, AVQConfig(3, 0, 0, levels=(1,))),
            (random_codebooks, AVQConfig(4, 2, 1, 8, levels=(1,), key_norm=True)),
            (own_config, AVQConfig(6, 3, 2, 16, levels=(1,), num_updates=1)),
            (own_config, AVQConfig(6, 3, 2, 16, levels=(1,), exact_keys=5)),
            *((represented_by_means, CONFIG), (tuned_codebooks, CONFIG), (own_codebooks, CONFIG)),
        ],
        ids=[
            *("plain", "random-order", "importance-tile", "flat", "key-norm"),
            *("own-codewords", "exact-keys", "by-means", "tuned", "own-and-tuned"),
        ],
    )
    def test_equals_the_operation(self, unet, make, config):
        """Catches any field of the configuration, or any tensor of the codebooks, left out."""
        source = make(unet, config)
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
            **config.sizes._asdict(),
            codewords=config.codewords,
            num_updates=config.num_updates,
            query_tile=config.query_tile,
            query_order=order,
            key_order=order,
            importance_tile=config.importance_tile,
        )
        expected = expected.transpose(1, 2).flatten(2)
        expected = F.linear(expected, weights["to_out.0.weight"], weights["to_out.0.bias"])
        assert torch.equal(output, expected)

    def test_every_field_matters(self, unet):
        """Negative control of the test above: each variation changes the output."""
        base = {"num_parents": 4, "num_children": 2, "num_refined": 1, "query_tile": 8}
        outputs = [
            predict(apply_avq(unet, make(unet, AVQConfig(**base | variation, levels=(1,)))), 16, 24)
            for make, variation in (
                *((random_codebooks, {}), (random_codebooks, {"num_refined": 2})),
                *((random_codebooks, {"query_tile": 16}), (random_codebooks, {"key_norm": True})),
                *((random_codebooks, {"query_order": "random"}), (own_config, {})),
                *((own_config, {"num_updates": 1}), (own_config, {"exact_keys": 5})),
            )
        ]
        for index, output in enumerate(outputs):
            assert not any(torch.equal(output, other) for other in outputs[:index])

    @pytest.mark.parametrize(("make", "level"), [(tiny_unet, 0), (sdxl_unet, 1)])
    def test_the_default_is_the_finest_level(self, make, level):
        """Catches a default that SDXL, whose finest level has no self-attention, refuses."""
        rows = summary(apply_avq(make())).rows
        assert {row.level for row in rows if row.config} == {level}
        assert {row.config for row in rows} == {"M64P16C8", ""}

    def test_what_follows_the_projection(self, unet, codebooks):
        """Catches the factor that ends diffusers' processors left out, or dropout."""
        attn = apply_avq(unet, codebooks).get_submodule(LAYER)
        _, output = seen_by_layer(unet)
        attn.rescale_output_factor = 2.0
        assert torch.equal(seen_by_layer(unet)[1], output / 2)
        attn.to_out[1] = torch.nn.Dropout(1.0).train()
        assert output.any()
        assert not seen_by_layer(unet)[1].any()

    @pytest.mark.parametrize(("height", "width"), [(16, 40), (40, 16), (65, 33), (9, 7), (1, 5)])
    def test_grids(self, unet, codebooks, height, width):
        """Catches square or even grids taken for granted, and height and width swapped."""
        predict(apply_avq(unet, codebooks), height, width)
        below = -(-height // 2), -(-width // 2)  # down-sampling rounds up
        seen = {row.level: row.num_tokens for row in summary(unet).rows if row.calls}
        assert seen == {0: height * width, 1: below[0] * below[1]}
        assert kinds(unet) == {"AVQ"}
        assert torch.equal(unet.get_submodule(LAYER)._avq.last_order, query_order(*below))

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
        weights = codebooks.layer_weights(LAYER)
        weights.move_to(torch.device("meta"), torch.float32)
        assert weights.codebook.parents.is_meta
        assert not key_norm or weights.key_norm.weight.is_meta
        weights.move_to(torch.device("cpu"), torch.float32)
        assert weights.codebook.parents is codebooks.codebook(LAYER).parents
        assert weights.key_norm is codebooks.key_norm(LAYER)


@pytest.mark.parametrize("kind", ["plain", "key norm", "tuned"])
def test_autocast(unet, kind):
    """Catches a norm that autocast runs in float32, so that keys differ from queries, and
    changes cast by what autocast makes of the tokens: they train in float32."""
    config = AVQConfig(4, 2, 2, query_tile=16, levels=(0, 1), key_norm=kind == "key norm")
    apply_avq(unet, (tuned_codebooks if kind == "tuned" else random_codebooks)(unet, config))
    expected = predict(unet)
    with torch.autocast("cpu", torch.bfloat16):
        output = predict(unet)
    assert kinds(unet) == {"AVQ"}
    assert not torch.equal(output.float(), expected)
    assert (output.float() - expected).norm() < 0.1 * expected.norm()
    if kind == "tuned":
        changes = unet.get_submodule(LAYER)._avq.weights.projection_changes
        assert changes["to_q.weight"].dtype == torch.float32


class TestHandingOver:
    """Calls that AVQ does not serve get the exact result, and their reason is counted."""

    MASK = torch.zeros(1, 1, 64).masked_fill(torch.arange(64) >= 40, -10000)

    @pytest.mark.parametrize(
        ("arguments", "attributes", "reason"),
        [
            ({"attention_mask": MASK}, {}, "attention mask"),
            ({"encoder_hidden_states": torch.ones(1, 7, 32)}, {}, "cross-attention"),
            ({}, {"norm_q": torch.nn.LayerNorm(16)}, "query or key norm"),
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
        apply_avq(unet, tuned_codebooks(unet, AVQConfig(4, 2, 2, levels=(1,), exact=others)))
        assert torch.equal(seen_by_layer(unet)[1], expected)
        assert kinds(unet) == {reason}

    def test_previous_processor_gets_every_argument(self, unet, codebooks):
        """Catches an argument that is lost, or takes the place of another."""
        attn, recorder = unet.get_submodule(CROSS), Recorder()
        attn.set_processor(recorder)
        unet.set_attn_processor(AVQProcessor(codebooks, unet=unet))
        text, mask = tokens(attn, 7)[..., :32], torch.zeros(2, 1, 7)
        optional = {"temb": "temb", "ip_adapter_masks": "masks", "ip_hidden_states": "states"}
        attn(tokens(attn), text, mask, **optional)
        attn(tokens(attn), (text, text), ip_adapter_masks="masks")  # as IP-Adapter's layers
        assert recorder.calls == [
            (text, mask, "temb", "masks", "states"),
            ((text, text), None, None, "masks", None),
        ]

    def test_previous_processor_gets_no_argument_that_it_does_not_take(self, unet, codebooks):
        unet.set_attn_processor(SlicedAttnProcessor(2))
        expected = predict(unet)
        apply_avq(unet, codebooks)
        with avq_disabled(unet):
            assert torch.equal(predict(unet), expected)


class TestOneInstanceOnAllLayers:
    """`unet.set_attn_processor(AVQProcessor(codebooks, unet=unet))`."""

    def test_equals_apply(self, unet, codebooks):
        """Catches an instance that runs AVQ where there is no codebook, and one that stays."""
        exact, before = predict(unet), unet.attn_processors
        expected = predict(apply_avq(unet, codebooks))
        unet.set_attn_processor(AVQProcessor(codebooks, unet=unet))
        assert len(set(unet.attn_processors.values())) == 1
        assert torch.equal(predict(unet), expected)
        assert kinds(unet) == {"AVQ"}
        # Not kept as the processor to hand over to.
        apply_avq(unet, codebooks)
        changed = {name for name, p in unet.attn_processors.items() if p is not before[name]}
        assert changed == {f"{name}.processor" for name in codebooks.layer_specs}
        unet.set_attn_processor(AVQProcessor(codebooks, unet=unet))
        assert torch.equal(predict(remove_avq(unet)), exact)
        assert unet.attn_processors == before

    def test_module_processors_stay_registered(self, unet, codebooks):
        """Catches an nn.Module processor that `unet.to()` no longer reaches."""

        class Module(torch.nn.Linear):
            def __call__(
                self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None
            ):
                return self.forward(hidden_states)

        processor = Module(32, 32)
        unet.get_submodule(CROSS).set_processor(processor)
        before = list(unet.state_dict())
        unet.set_attn_processor(AVQProcessor(codebooks, unet=unet))
        unet.to(torch.bfloat16)
        assert processor.weight.dtype == torch.bfloat16
        remove_avq(unet)
        assert list(unet.state_dict()) == before

    def test_a_processor_with_weights_stays(self, unet, codebooks):
        """Catches an assignment, which torch refuses where a module was registered."""
        attn = unet.get_submodule(LAYER)
        attn.set_processor(CustomDiffusionAttnProcessor2_0(train_kv=False, train_q_out=False))
        before = attn.processor
        apply_avq(unet, codebooks)
        assert remove_avq(unet).get_submodule(LAYER).processor is before

    @pytest.mark.parametrize("has_codebooks", [True, False])
    def test_a_stray_instance(self, unet, codebooks, has_codebooks):
        """Catches a silent exact run where the user asked for AVQ, and advice that leads nowhere:
        a processor of ours kept as the one to hand over to, which then calls itself."""
        expected = predict(unet)
        wanted = predict(apply_avq(copy.deepcopy(unet), codebooks))

        def stray():
            unet.set_attn_processor(AVQProcessor(codebooks if has_codebooks else None))

        stray()
        if has_codebooks:
            with pytest.raises(RuntimeError, match=r"not prepared for its AVQProcessor; use apply"):
                predict(unet)
        for is_one_instance in (False, True):
            stray()
            if is_one_instance:
                unet.set_attn_processor(AVQProcessor(codebooks, unet=unet))
            else:
                apply_avq(unet, codebooks)
            assert torch.equal(predict(unet), wanted)
            with avq_disabled(unet):
                assert torch.equal(predict(unet), expected)
        stray()
        assert torch.equal(predict(remove_avq(unet)), expected)


class TestOwnersLine:
    """`pipe.set_attn_processor(AVQProcessor(...))`, in the three forms that users meet."""

    @pytest.mark.parametrize("form", ["class", "from_pipe", "stock"])
    @pytest.mark.parametrize(
        "make", [random_codebooks, tuned_codebooks, own_config, lambda *_: None],
        ids=["codebooks", "tuned", "config", "default"],
    )  # fmt: skip
    def test_equals_apply(self, pipe, make, form):
        """Catches the literal line working on a subclass's own components only by luck."""
        unet, source = pipe.unet, make(pipe.unet, CONFIG)
        if make is own_config:
            source = replace(CONFIG, codewords="means")
        expected = predict(apply_avq(tiny_unet(), source, backend="reference"))
        before = {name: p for name, p in unet.attn_processors.items() if "attn2" in name}
        if form == "stock":
            unet.set_attn_processor(AVQProcessor(source, unet, backend="reference"))
        else:
            if form == "class":
                pipe = tiny_pipe(unet, AVQStableDiffusionPipeline)
            else:
                pipe = AVQStableDiffusionPipeline.from_pipe(pipe)
            pipe.set_attn_processor(AVQProcessor(source, backend="reference"))
            assert all(unet.attn_processors[name] is p for name, p in before.items())
        assert torch.equal(predict(unet), expected)
        tuned = ", tuned" if make is tuned_codebooks else ""
        assert runs(pipe) == {f"AVQ (reference backend){tuned}"}
        if form != "stock":
            processor = AttnProcessor2_0()
            pipe.set_attn_processor(processor)
            assert set(unet.attn_processors.values()) == {processor}


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


def test_save_pretrained(unet, tmp_path):
    """Catches a UNet that AVQ keeps from being saved, or that is saved with the changes."""
    expected, count = tiny_unet().state_dict(), unet.num_parameters()
    apply_avq(unet, tuned_codebooks(unet)).save_pretrained(tmp_path)
    assert unet.num_parameters() == count
    loaded, info = type(unet).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize(
    ("source", "arguments", "error", "message"),
    [
        ("M64P16C8", {}, TypeError, "expected AVQCodebooks, an AVQConfig or nothing, but got str."),
        (
            AVQConfig(codewords="stored"),
            {},
            ValueError,
            'codewords="stored" needs codebooks, which calibrate or gather_codebooks makes.',
        ),
        (AVQConfig(key_norm=True), {}, ValueError, "key_norm needs codebooks, which calibrate or "),
        (AVQConfig(levels=(7,)), {}, ValueError, "no self-attention at level 7"),
        (None, {"backend": "cuda"}, ValueError, "backend must be one of auto, triton, torch"),
        (None, {"route": "never"}, ValueError, "route must be fastest, always or a number"),
    ],
)
def test_refused(unet, source, arguments, error, message):
    """By both doors; an earlier AVQ stays."""
    apply_avq(unet, AVQConfig(4, 2, 2))
    for call in (lambda: apply_avq(unet, source, **arguments),
                 lambda: AVQProcessor(source, unet, **arguments)):  # fmt: skip
        with pytest.raises(error, match=re.escape(message)):
            call()
    assert {row.config for row in summary(unet).rows} == {"M4P2C2", ""}


@pytest.mark.parametrize("thing", [object(), None, "pipe"])
def test_no_unet(thing):
    for verb in (apply_avq, remove_avq, summary):
        with pytest.raises(TypeError, match="expected a pipeline with a unet or a transformer, or"):
            verb(thing)
    with pytest.raises(TypeError, match="expected a UNet, but got Linear"):
        AVQProcessor(unet=torch.nn.Linear(2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("make", [random_codebooks, tuned_codebooks])
def test_codebooks_follow_the_unet(unet, make):
    """Catches tensors left on the CPU when the UNet moves after AVQ was applied."""
    apply_avq(unet, make(unet), route="always").to("cuda")
    text = torch.zeros(1, 5, 32, device="cuda")
    output = unet(torch.zeros(1, 4, 16, 16, device="cuda"), 10, text).sample
    assert output.is_cuda
    assert kinds(unet) == {"AVQ"}
