"""AVQ beside what else diffusers users switch on: adapters, other pipelines, offload, patches."""

import pytest
import torch
from accelerate import cpu_offload
from diffusers import (
    ControlNetModel,
    MotionAdapter,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPAGPipeline,
    UNetMotionModel,
)
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import ImageProjection
from peft import LoraConfig
from tiny import draw, predict, random_codebooks, tiny_components, tiny_pipe, tiny_unet

from avq_diffusers.pipeline import (
    apply_avq,
    avq_disabled,
    remove_avq,
    set_num_refined,
    summary,
)
from avq_diffusers.processor import AVQProcessor


def differ(picture, other):
    return bool((picture - other).norm() > 1e-3 * other.norm())


def kinds(pipe):
    """Every kind of call that any layer has seen."""
    return {kind for row in summary(pipe).rows for kind in row.calls}


def check_on_and_off(pipe, codebooks, **arguments):
    """AVQ changes the picture, and nothing is left of it when it is off or removed."""
    exact = draw(pipe, **arguments)
    avq = draw(apply_avq(pipe, codebooks), **arguments)
    assert kinds(pipe) == {"AVQ"}
    assert differ(avq, exact)
    with avq_disabled(pipe):
        assert torch.equal(draw(pipe, **arguments), exact)
    assert torch.equal(draw(remove_avq(pipe), **arguments), exact)
    return exact, avq


class TestPipelines:
    def image(self, seed=5):
        return torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(seed))

    def test_img2img(self, codebooks):
        pipe = tiny_pipe(cls=StableDiffusionImg2ImgPipeline)
        check_on_and_off(pipe, codebooks, image=self.image(), strength=1.0)

    def test_inpaint(self, codebooks):
        pipe = tiny_pipe(cls=StableDiffusionInpaintPipeline)
        mask = torch.zeros(1, 1, 128, 128)
        mask[:, :, 32:96] = 1
        check_on_and_off(
            pipe, codebooks, image=self.image(), mask_image=mask, height=128, width=128
        )

    def test_shared_unet(self, pipe, codebooks):
        """Catches AVQ lost where `from_pipe` shares the UNet, or removed from one only."""
        apply_avq(pipe, codebooks)
        other = StableDiffusionImg2ImgPipeline.from_pipe(pipe)
        other.set_progress_bar_config(disable=True)
        avq = draw(other, image=self.image(), strength=1.0)
        assert kinds(other) == {"AVQ"}
        remove_avq(other)
        assert differ(draw(other, image=self.image(), strength=1.0), avq)
        assert kinds(pipe) == set()

    def test_controlnet(self, unet, codebooks):
        """Catches codebooks copied into the ControlNet, whose weights come from this UNet."""
        reference = ControlNetModel.from_unet(unet)
        controlnet = ControlNetModel.from_unet(apply_avq(unet, codebooks))
        assert controlnet.state_dict().keys() == reference.state_dict().keys()
        assert {type(p) for p in controlnet.attn_processors.values()} == {
            type(p) for p in reference.attn_processors.values()
        }
        remove_avq(unet)
        torch.nn.init.normal_(controlnet.controlnet_mid_block.weight)
        pipe = tiny_pipe(unet, StableDiffusionControlNetPipeline, controlnet=controlnet)
        exact, _ = check_on_and_off(pipe, codebooks, image=self.image(), height=128, width=128)
        assert differ(exact, draw(tiny_pipe(unet)))

    @pytest.mark.parametrize("layers", [["mid"], ["down_blocks.0"]])
    def test_pag(self, codebooks, layers):
        """Catches a processor that PAG's own cannot replace for a run and put back."""
        components = tiny_components()
        pipe = StableDiffusionPAGPipeline(
            **components, pag_applied_layers=layers, requires_safety_checker=False
        )
        pipe.set_progress_bar_config(disable=True)
        exact = draw(pipe, pag_scale=3.0)
        apply_avq(pipe, codebooks)
        before = pipe.unet.attn_processors
        avq = draw(pipe, pag_scale=3.0)
        assert differ(avq, exact)
        assert differ(avq, draw(pipe, pag_scale=0.0))
        assert pipe.unet.attn_processors == before
        assert torch.equal(draw(remove_avq(pipe), pag_scale=3.0), exact)

    def test_animatediff(self, unet, codebooks):
        """Catches temporal attention quantized, or codebooks carried over by `from_unet2d`."""
        adapter = MotionAdapter(
            block_out_channels=(16, 32, 64, 64),
            motion_num_attention_heads=2,
            motion_norm_num_groups=8,
        )
        inputs = (torch.randn(1, 4, 3, 8, 8), 10, torch.zeros(3, 5, 32))  # 3 frames
        with torch.no_grad():
            expected = UNetMotionModel.from_unet2d(unet, adapter)(*inputs).sample
            motion = UNetMotionModel.from_unet2d(apply_avq(unet, codebooks), adapter)
            assert torch.equal(motion(*inputs).sample, expected)
            apply_avq(motion, codebooks)
            assert differ(motion(*inputs).sample, expected)
        for name, processor in motion.attn_processors.items():
            if "motion_modules" in name:
                assert not isinstance(processor, AVQProcessor)


class TestLoRA:
    @pytest.fixture
    def config(self):
        return LoraConfig(
            r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False
        )

    def test_is_seen(self, pipe, codebooks, config):
        """Catches raw weights read instead of projections called."""
        plain = draw(apply_avq(pipe, codebooks))
        pipe.unet.add_adapter(config)
        adapted = draw(pipe)
        assert differ(adapted, plain)
        assert kinds(pipe) == {"AVQ"}
        assert torch.equal(draw(apply_avq(pipe, codebooks)), adapted)
        assert torch.equal(draw(pipe, cross_attention_kwargs={"scale": 0.0}), plain)
        assert differ(draw(pipe, cross_attention_kwargs={"scale": 0.5}), adapted)

    def test_fuse(self, pipe, codebooks, config):
        """Catches an adapter that AVQ loses when it is fused or taken out again."""
        plain = draw(apply_avq(pipe, codebooks))
        pipe.unet.add_adapter(config)
        adapted = draw(pipe)
        with pytest.raises(AssertionError):  # the tolerance below tells them apart
            torch.testing.assert_close(plain, adapted, rtol=1e-2, atol=1e-2)
        pipe.fuse_lora()
        torch.testing.assert_close(draw(pipe), adapted, rtol=1e-2, atol=1e-2)
        pipe.unfuse_lora()
        torch.testing.assert_close(draw(pipe), adapted, rtol=1e-2, atol=1e-2)

    def test_remove(self, pipe, codebooks, config):
        """Catches AVQ that only lets go of the modules it was applied to."""
        exact = draw(pipe)
        apply_avq(pipe, codebooks)
        pipe.unet.add_adapter(config)
        draw(pipe)
        remove_avq(pipe)
        pipe.unload_lora_weights()
        assert torch.equal(draw(pipe), exact)


class TestIPAdapter:
    """Layers of cross-attention hold IP-Adapter's processors and get (text, image) states."""

    def load(self, pipe):
        generator = torch.Generator().manual_seed(6)
        cross = [attn for attn in pipe.unet.modules() if getattr(attn, "is_cross_attention", 0)]
        # Diffusers numbers the layers down, up, mid, with every self-attention in between.
        names = [n for n in pipe.unet.attn_processors if n.endswith("attn2.processor")]
        weights = {}
        for index, name in enumerate(names):
            width = pipe.unet.get_submodule(name.removesuffix(".processor")).inner_dim
            for part in ("to_k_ip", "to_v_ip"):
                weights[f"{2 * index + 1}.{part}.weight"] = torch.randn(
                    width, 32, generator=generator
                )
        assert len(cross) == len(names)
        projection = ImageProjection(24, 32, num_image_text_embeds=4).state_dict()
        projection["image_embeds.weight"] = torch.randn(
            projection["image_embeds.weight"].shape, generator=generator
        )
        image_proj = {
            "proj.weight": projection["image_embeds.weight"],
            "proj.bias": torch.zeros_like(projection["image_embeds.bias"]),
            "norm.weight": torch.ones_like(projection["norm.weight"]),
            "norm.bias": torch.zeros_like(projection["norm.bias"]),
        }
        pipe.unet._load_ip_adapter_weights([{"image_proj": image_proj, "ip_adapter": weights}])

    def draw(self, pipe):
        image = torch.randn(1, 1, 24, generator=torch.Generator().manual_seed(7))
        embeds = torch.cat([torch.zeros_like(image), image])
        return draw(pipe, ip_adapter_image_embeds=[embeds])

    def test_loaded_before(self, pipe, codebooks):
        """Catches IP-Adapter's processors replaced: the image would have no effect."""
        self.load(pipe)
        exact = self.draw(pipe)
        avq = self.draw(apply_avq(pipe, codebooks))
        assert differ(avq, exact)
        with avq_disabled(pipe):
            assert torch.equal(self.draw(pipe), exact)
        pipe.set_ip_adapter_scale(0.3)
        assert differ(self.draw(pipe), avq)
        pipe.set_ip_adapter_scale(1.0)
        assert torch.equal(self.draw(pipe), avq)
        assert torch.equal(self.draw(remove_avq(pipe)), exact)

    def test_loaded_afterwards(self, pipe, codebooks):
        """Catches codebooks lost when IP-Adapter rebuilds processors as `type(p)()`."""
        apply_avq(pipe, codebooks)
        without_adapter = draw(pipe)
        self.load(pipe)
        avq = self.draw(pipe)
        assert kinds(pipe) == {"AVQ"}
        expected = tiny_pipe()
        self.load(expected)
        exact = self.draw(expected)
        assert torch.equal(avq, self.draw(apply_avq(expected, codebooks)))
        pipe.unload_ip_adapter()
        assert torch.equal(draw(pipe), without_adapter)
        self.load(pipe)
        assert torch.equal(self.draw(remove_avq(pipe)), exact)

    def test_one_instance_on_all_layers(self, pipe, codebooks):
        """Catches tuple states and masks that AVQProcessor does not pass on."""
        self.load(pipe)
        avq = self.draw(apply_avq(pipe, codebooks))
        pipe.unet.set_attn_processor(AVQProcessor(codebooks, unet=pipe.unet))
        assert torch.equal(self.draw(pipe), avq)
        remove_avq(pipe)
        processors = [p for n, p in pipe.unet.attn_processors.items() if "attn2" in n]
        assert {type(p) for p in processors} == {IPAdapterAttnProcessor2_0}


class TestOtherTools:
    def test_attention_slicing(self, pipe, codebooks):
        """Catches AVQ that is silently gone: slicing replaces every processor."""
        avq = draw(apply_avq(pipe, codebooks))
        pipe.enable_attention_slicing()
        replaced = {row.runs for row in summary(pipe).rows if row.config}
        assert replaced == {"exact: replaced by SlicedAttnProcessor"}
        assert differ(draw(pipe), avq)
        torch.testing.assert_close(draw(apply_avq(pipe, codebooks)), avq, rtol=1e-4, atol=1e-4)
        assert kinds(pipe) == {"AVQ"}

    def test_fused_projections(self, pipe, codebooks):
        """Catches AVQ that does not come back, or reads the fused projection left behind."""
        avq = draw(apply_avq(pipe, codebooks))
        pipe.fuse_qkv_projections(vae=False)
        replaced = {row.runs for row in summary(pipe).rows if row.config}
        assert replaced == {"exact: replaced by FusedAttnProcessor2_0"}
        draw(pipe)
        pipe.unfuse_qkv_projections(vae=False)
        assert torch.equal(draw(pipe), avq)

    def test_freeu(self, pipe, codebooks):
        plain = draw(apply_avq(pipe, codebooks))
        remove_avq(pipe)
        pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
        _, avq = check_on_and_off(pipe, codebooks)
        assert differ(avq, plain)

    def test_callback(self, pipe, codebooks):
        """Catches a setting that is only read when AVQ is applied."""
        avq = draw(apply_avq(pipe, codebooks))
        coarse = draw(set_num_refined(pipe, 0))
        set_num_refined(pipe, 2)

        def refine_less(pipe, step, timestep, tensors):
            set_num_refined(pipe, 0)
            return tensors

        mixed = draw(pipe, callback_on_step_end=refine_less)
        assert not torch.equal(mixed, avq)
        assert differ(mixed, coarse)

    def test_token_merging(self, pipe, codebooks):
        """Catches a crash or a wrong order where a tool like tomesd drops half the tokens."""

        def merge(attn, args):
            return (args[0][:, ::2], *args[1:])

        def unmerge(attn, args, output):
            return output.repeat_interleave(2, dim=1)

        for name, module in pipe.unet.named_modules():
            if name.endswith("attn1"):
                module.register_forward_pre_hook(merge)
                module.register_forward_hook(unmerge)
        exact = draw(pipe)
        assert torch.equal(draw(apply_avq(pipe, codebooks)), exact)
        assert kinds(pipe) == {"tokens are not the grid"}

    @pytest.mark.parametrize("offload_type", ["leaf_level", "block_level"])
    def test_group_offload(self, codebooks, offload_type):
        unet = apply_avq(tiny_unet(), codebooks)
        expected = predict(unet)
        unet.enable_group_offload(
            onload_device=torch.device("cpu"),
            offload_device=torch.device("cpu"),
            offload_type=offload_type,
            num_blocks_per_group=1 if offload_type == "block_level" else None,
        )
        assert torch.equal(predict(unet), expected)
        assert torch.equal(predict(apply_avq(unet, codebooks)), expected)

    @pytest.mark.parametrize("avq_first", [True, False])
    def test_sequential_offload(self, unet, codebooks, avq_first):
        """Catches codewords moved to the meta device, where weights lie between calls."""
        expected = predict(apply_avq(unet, codebooks))
        if not avq_first:
            remove_avq(unet)
        cpu_offload(unet, execution_device=torch.device("cpu"))
        if not avq_first:
            apply_avq(unet, codebooks)
        assert next(unet.parameters()).is_meta
        assert torch.equal(predict(unet), expected)
        assert summary(unet).rows[0].runs == "AVQ (torch backend)"

    def test_layerwise_casting(self, unet, codebooks):
        """Catches raw weights, which are stored in eight bits, or codewords cast with them."""
        codeword = next(iter(codebooks.parameters())).clone()
        apply_avq(unet, codebooks)
        expected = predict(unet)
        unet.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
        )
        assert (predict(unet) - expected).norm() < 0.2 * expected.norm()
        assert torch.equal(next(iter(codebooks.parameters())), codeword)

    def test_channels_last(self, pipe, codebooks):
        avq = draw(apply_avq(pipe, codebooks))
        pipe.unet.to(memory_format=torch.channels_last)
        torch.testing.assert_close(draw(pipe), avq, rtol=1e-3, atol=1e-3)

    def test_inference_mode_then_training(self, unet, codebooks):
        """Catches tensors cached in inference mode, which autograd refuses later."""
        apply_avq(unet, random_codebooks(unet))
        with torch.inference_mode():
            predict(unet)
        sample = torch.zeros(1, 4, 16, 16, requires_grad=True)
        unet(sample, 10, torch.zeros(1, 5, 32)).sample.sum().backward()
        assert sample.grad.isfinite().all()
