"""What other tools do to attention, before and after AVQ is applied: AVQ leaves it to them."""

import warnings
from dataclasses import replace

import pytest
import torch
from checks import close, differ, kinds
from diffusers import LayerSkipConfig, SkipLayerGuidance, StableDiffusionXLAutoBlocks
from diffusers.models.attention_processor import (
    Attention,
    AttnProcessor,
    AttnProcessor2_0,
    CustomDiffusionAttnProcessor,
    FusedAttnProcessor2_0,
    SlicedAttnProcessor,
    XFormersAttnProcessor,
)
from peft import LoraConfig
from tiny import (
    LAYER,
    predict,
    random_codebooks,
    sdxl_pipe,
    sdxl_unet,
    tiny_unet,
    traced_unet,
    tuned_codebooks,
    two_level_unet,
)

from avq_diffusers import (
    AVQConfig,
    AVQProcessor,
    apply_avq,
    avq_disabled,
    gather_codebooks,
    remove_avq,
    select_layers,
    summary,
)

feature = pytest.mark.feature


class Shared(AttnProcessor2_0):
    """As StyleAligned: every image attends to the tokens of the first one as well."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *args, gain=1.0, **kwargs):
        first = hidden_states[:1].expand_as(hidden_states)
        both = torch.cat([hidden_states, first], dim=1)
        return gain * super().__call__(attn, hidden_states, both, *args, **kwargs)


EVERY_KEY = {"num_parents": 4, "num_children": 2, "threshold": 0}
LEVEL_0 = "up_blocks.3.attentions.1.transformer_blocks.0.attn1"
LEVEL_1 = "up_blocks.2.attentions.1.transformer_blocks.0.attn1"
CUSTOM = (LEVEL_1, LEVEL_0)
LEVEL_0_ONLY = AVQConfig.parse("M4P2C2", query_tile=16, levels=(0,))


def share(unet):
    """Give two layers with codebooks a processor of their own; return them by layer."""
    processors = {name: Shared() for name in CUSTOM}
    for name, processor in processors.items():
        unet.get_submodule(name).set_processor(processor)
    return processors


def without(codebooks, unet, *names):
    """The codebooks of all other layers."""
    config = replace(codebooks.avq_config, exact=names)
    kept = {name: codebooks.codebook(name) for name in codebooks.layer_specs if name not in names}
    return gather_codebooks(unet, config, kept)


@feature("processors that share tokens (kept)")
class TestCustomProcessors:
    """A layer with a processor that changes what attention means keeps it."""

    SAID = f"AVQ does not run in the layers that keep Shared: {', '.join(CUSTOM)}"

    def test_keep_their_layer(self, unet, codebooks):
        """All other layers run AVQ; the first apply or call that finds them warns, no later one."""
        other = tiny_unet()
        share(other)
        expected = predict(apply_avq(other, without(codebooks, other, *CUSTOM)), batch=2)
        processors = share(unet)
        with pytest.warns(UserWarning, match=self.SAID):
            apply_avq(unet, codebooks)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(predict(unet, batch=2), expected)
        more = predict(unet, batch=2, cross_attention_kwargs={"gain": 2.0})
        assert not torch.equal(more, expected)
        rows = {row.name: row for row in summary(unet).rows if row.config}
        for name, row in rows.items():
            assert {*row.calls} == {"Shared" if name in CUSTOM else "AVQ"}
            assert (row.runs == "custom: Shared") == (name in CUSTOM)
        for name in CUSTOM:  # a tool that makes the processors of all layers anew
            unet.get_submodule(name).set_processor(AVQProcessor())
        assert torch.equal(predict(unet, batch=2), expected)
        assert {x.runs for x in summary(unet).rows if x.name in CUSTOM} == {"custom: Shared"}
        remove_avq(unet)
        for name, processor in processors.items():
            assert unet.get_submodule(name).processor is processor

    @pytest.mark.parametrize(
        "processor",
        [
            AttnProcessor(),
            AttnProcessor2_0(),
            SlicedAttnProcessor(2),
            FusedAttnProcessor2_0(),
            XFormersAttnProcessor(),
            CustomDiffusionAttnProcessor(train_kv=False, train_q_out=False),
        ],
        ids=lambda processor: type(processor).__name__,
    )
    def test_plain_processors_are_served(self, processor):
        """What they compute is exact attention, so AVQ takes their layer."""
        unet = traced_unet()
        codebooks, attn = random_codebooks(unet, LEVEL_0_ONLY), unet.get_submodule(LAYER)
        if isinstance(processor, FusedAttnProcessor2_0):
            attn.fuse_projections()
        attn.set_processor(processor)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            apply_avq(unet, codebooks)
            predict(unet)
        assert kinds(unet) == {"AVQ"}
        if not isinstance(processor, XFormersAttnProcessor):
            with avq_disabled(unet):
                assert not differ(predict(unet), predict(traced_unet()))
        remove_avq(unet)
        assert attn.processor is processor

    def test_trained_custom_diffusion_is_kept(self, unet, codebooks):
        """It projects queries by weights of its own."""
        processor = CustomDiffusionAttnProcessor(False, True, hidden_size=16)
        unet.get_submodule(LEVEL_0).set_processor(processor)
        with pytest.warns(UserWarning, match="layers that keep CustomDiffusionAttnProcessor"):
            apply_avq(unet, codebooks)


def use_lora(unet):
    unet.add_adapter(LoraConfig(target_modules=["to_qkv"], init_lora_weights=False))


def blur(unet):
    """Change the weights of fused projections, and not those that were fused."""
    for name, weight in unet.named_parameters():
        if name.endswith("to_qkv.weight"):
            weight.data += weight.std() * torch.randn_like(weight)


class TestFusedProjections:
    """They are what the UNet computes with, whatever the projections hold that were fused."""

    @pytest.mark.parametrize("change", [blur, use_lora])
    @pytest.mark.parametrize("avq_first", [False, True])
    def test_they_changed(self, change, avq_first):
        unet, every_key = two_level_unet(), AVQConfig(**EVERY_KEY, query_tile=16, levels=(0, 1))
        unet.fuse_qkv_projections()
        before = predict(unet)
        if avq_first:
            apply_avq(unet, every_key, route="always")
        change(unet)
        output = predict(unet if avq_first else apply_avq(unet, every_key, route="always"))
        assert kinds(unet) == {"AVQ"}
        assert close(output, predict(remove_avq(unet)))
        assert differ(output, before)

    def test_changes_by_distillation_are_added(self):
        codebooks = tuned_codebooks(tiny_unet())
        fused = tiny_unet()
        fused.fuse_qkv_projections()
        output = predict(apply_avq(fused, codebooks, route="always"))
        assert kinds(fused) == {"AVQ"}
        assert close(output, predict(apply_avq(tiny_unet(), codebooks, route="always")))

    def test_compiled(self):
        unet = traced_unet()
        unet.fuse_qkv_projections()
        blur(unet)
        exact = predict(unet)
        torch.compiler.reset()
        for layer in select_layers(apply_avq(unet, AVQConfig(**EVERY_KEY), route="always")):
            layer.caller.compile(backend="eager", fullgraph=True)
        assert close(predict(unet), exact)
        assert kinds(unet) == set()  # compiled calls are not counted


def heat(unet):
    """Change the scale of attention scores, as tools for sizes beyond those of training do."""
    for attn in unet.modules():
        if isinstance(attn, Attention) and not attn.is_cross_attention:
            attn.scale *= 3


class TestScale:
    """AVQ follows `attn.scale` where the processor that it replaced does."""

    @pytest.mark.parametrize(
        ("processor", "follows", "avq_first"),
        [
            (AttnProcessor(), True, False),
            (AttnProcessor(), True, True),
            (SlicedAttnProcessor(1), True, True),
            (CustomDiffusionAttnProcessor(train_kv=False, train_q_out=False), True, True),
            (AttnProcessor2_0(), False, False),
            (FusedAttnProcessor2_0(), False, True),
        ],
        ids=lambda value: str(value) if isinstance(value, bool) else type(value).__name__,
    )
    def test_it_changed(self, processor, follows, avq_first):
        unet = traced_unet()
        if isinstance(processor, FusedAttnProcessor2_0):
            unet.fuse_qkv_projections()
        unet.set_attn_processor(processor)
        before, every_key = predict(unet), AVQConfig(**EVERY_KEY, query_tile=16)
        if avq_first:
            apply_avq(unet, every_key, route="always")
        heat(unet)
        output = predict(unet if avq_first else apply_avq(unet, every_key, route="always"))
        assert kinds(unet) == {"AVQ"}
        assert close(output, predict(remove_avq(unet)))
        assert differ(output, before) == follows

    def test_with_xformers(self, unet):
        """Its processor reads the scale, but does not run on a CPU."""
        unet.set_attn_processor(XFormersAttnProcessor())
        apply_avq(unet, AVQConfig(**EVERY_KEY), route="always")
        hidden_states, attn = torch.randn(1, 256, 16), unet.get_submodule(LEVEL_0)
        seen = []
        attn._avq.attend = lambda query, key, value, scale: seen.append(scale) or query
        attn._avq.exact_because = lambda *_: None
        heat(unet)
        attn(hidden_states)
        assert seen == [attn.scale]


class TestInterception:
    """What acts on attention scores acts on all layers: those of AVQ run exact meanwhile."""

    def test_default_device_is_no_interception(self, unet, codebooks):
        """It is a function mode as well, and only says where new tensors go."""
        apply_avq(unet, codebooks)
        with torch.device("cpu"):
            predict(unet)
        assert kinds(unet) == {"AVQ"}

    @pytest.mark.parametrize("on_the_class", [True, False])
    def test_replaced_scores(self, unet, codebooks, monkeypatch, on_the_class):
        """As maps of the eager processor are recorded."""
        attn = unet.get_submodule(LEVEL_0)
        attn.set_processor(AttnProcessor())
        seen = []

        def scores(self, query, key, mask=None):
            seen.append(query.shape)
            return original(self, query, key, mask)

        original = type(attn).get_attention_scores
        apply_avq(unet, codebooks)
        if on_the_class:
            monkeypatch.setattr(type(attn), "get_attention_scores", scores)
        else:
            attn.get_attention_scores = scores.__get__(attn)
        predict(unet)
        assert len(seen) == 1
        assert attn._avq.calls == {"get_attention_scores is replaced": 1}


@feature("guiders of modular pipelines")
class TestModularGuiders:
    """They hook blocks for one of the calls of a step, after AVQ was applied."""

    FQNS = ("down_blocks.1.attentions.0", "down_blocks.2.attentions.0", "up_blocks.0.attentions.1")

    def guider(self):
        what = {"skip_attention": True, "skip_attention_scores": False, "skip_ff": False}
        skips = [LayerSkipConfig([0], f"{name}.transformer_blocks", **what) for name in self.FQNS]
        part = {"skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
        return SkipLayerGuidance(skip_layer_config=skips, **part)

    def predictions(self, codebooks, inputs=()):
        """Inputs and outputs of the UNet in each call, those of `inputs` if any, and the UNet."""
        pipe = sdxl_pipe(sdxl_unet(transformer_layers_per_block=1))
        modular = StableDiffusionXLAutoBlocks().init_pipeline()
        modular.update_components(
            **{name: part for name, part in pipe.components.items() if part is not None},
            force_zeros_for_empty_prompt=True,
            requires_aesthetics_score=False,
            guider=self.guider(),
        )
        modular.set_progress_bar_config(disable=True)
        apply_avq(modular, codebooks, route="always")
        seen, outputs = [], []

        def pre_forward(unet, args, kwargs):
            seen.append(inputs[len(seen)] if inputs else (args, kwargs))
            return seen[-1]

        pipe.unet.register_forward_pre_hook(pre_forward, with_kwargs=True)
        pipe.unet.register_forward_hook(lambda unet, args, output: outputs.append(output[0]))
        # Guiders begin after the first step and end before the last.
        options = {"num_inference_steps": 3, "height": 128, "width": 128, "output_type": "latent"}
        modular(prompt="a red fox", generator=torch.Generator().manual_seed(0), **options)
        return seen, outputs, pipe.unet

    def test_calls_that_it_changes(self):
        """They predict what they predict with AVQ on the other layers only."""
        unet = sdxl_unet(transformer_layers_per_block=1)
        codebooks = random_codebooks(unet, AVQConfig.parse("M4P2C2", query_tile=16, levels=(1, 2)))
        names = [f"{name}.transformer_blocks.0.attn1" for name in self.FQNS]
        inputs, outputs, unet = self.predictions(codebooks)
        others = without(codebooks, unet, *names)
        _, expected, _ = self.predictions(others, inputs)
        equal = [torch.equal(*pair) for pair in zip(outputs, expected, strict=True)]
        # Without the hooks these layers run AVQ.
        assert 1 <= sum(equal) <= len(equal) / 2
        rows = {row.name: row for row in summary(unet).rows}
        for name in names:
            assert rows[name].calls == {"AVQ": len(equal) - sum(equal)}
        for name in rows.keys() - set(names):
            assert rows[name].calls == {"AVQ": len(equal)}
