"""AVQ in diffusers' other pipelines, with its schedulers and guidance.

The marker `feature` names the feature of `eval/results/features.md` that a test stands for.
"""

from functools import partial

import diffusers
import pytest
import torch
from checks import check_on_and_off, differ, kinds
from diffusers import (
    AnimateDiffPipeline,
    ControlNetModel,
    DDPMScheduler,
    StableDiffusionAdapterPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPAGPipeline,
    StableDiffusionUpscalePipeline,
    T2IAdapter,
    UNetMotionModel,
)
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers
from tiny import (
    CONFIG,
    draw,
    motion_adapter,
    quiet,
    random_codebooks,
    random_image,
    small_unet,
    tiny_components,
    tiny_pipe,
    tiny_unet,
)

from avq_diffusers.config import AVQConfig
from avq_diffusers.extras.scalecrafter.apply import scalecrafter
from avq_diffusers.plugin.apply import apply_avq, avq_disabled, remove_avq
from avq_diffusers.plugin.calibration import calibrate
from avq_diffusers.plugin.elastic import measure_capture
from avq_diffusers.plugin.layers import select_layers
from avq_diffusers.plugin.processor import AVQProcessor
from avq_diffusers.plugin.refinement import set_num_refined
from avq_diffusers.plugin.report import summary
from avq_diffusers.plugin.sensitivity import measure_sensitivity

feature = pytest.mark.feature

# Those that `KarrasDiffusionSchedulers` leaves out and that sample Stable Diffusion as well.
OTHER_SCHEDULERS = (
    "DDIMParallelScheduler",
    "DDPMParallelScheduler",
    "EDMDPMSolverMultistepScheduler",
    "IPNDMScheduler",
    "LCMScheduler",
    "SASolverScheduler",
    "TCDScheduler",
)
SCHEDULER_OPTIONS = {
    "PNDMScheduler": {"skip_prk_steps": True},  # as SD1.5; two steps are too few without
    "DPMSolverSDEScheduler": {"noise_sampler_seed": 0},  # its noise is not the generator's
}


# They call the UNet with numbers that are no training timesteps.
OTHER_TIMESTEPS = ("EDMDPMSolverMultistepScheduler", "EDMEulerScheduler", "IPNDMScheduler")
SCHEDULERS = (*(scheduler.name for scheduler in KarrasDiffusionSchedulers), *OTHER_SCHEDULERS)


class TestPipelines:
    @feature("img2img")
    def test_img2img(self, codebooks):
        pipe = tiny_pipe(cls=StableDiffusionImg2ImgPipeline)
        check_on_and_off(pipe, codebooks, image=random_image(128), strength=1.0)

    @feature("inpainting")
    def test_inpaint(self, codebooks):
        pipe = tiny_pipe(cls=StableDiffusionInpaintPipeline)
        mask = torch.zeros(1, 1, 128, 128)
        mask[:, :, 32:96] = 1
        check_on_and_off(
            pipe, codebooks, image=random_image(128), mask_image=mask, height=128, width=128
        )

    @feature("upscaling")
    def test_upscale(self):
        """Catches the extra channels and noise level of the upscaler's UNet lost on the way."""
        components = tiny_components(tiny_unet(in_channels=7, num_class_embeds=1000))
        components["vae"].register_to_config(scaling_factor=0.08333)
        pipe = StableDiffusionUpscalePipeline(**components, low_res_scheduler=DDPMScheduler())
        pipe.set_progress_bar_config(disable=True)
        check_on_and_off(pipe, random_codebooks(pipe.unet), image=random_image(16))

    @feature("from_pipe")
    def test_shared_unet(self, pipe, codebooks):
        """Catches AVQ lost where `from_pipe` shares the UNet, or removed from one only."""
        apply_avq(pipe, codebooks)
        other = quiet(StableDiffusionImg2ImgPipeline.from_pipe(pipe))
        avq = draw(other, image=random_image(128), strength=1.0)
        assert kinds(other) == {"AVQ"}
        remove_avq(other)
        assert differ(draw(other, image=random_image(128), strength=1.0), avq)
        assert kinds(pipe) == set()

    @feature("ControlNet")
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
        exact, _ = check_on_and_off(pipe, codebooks, image=random_image(128), height=128, width=128)
        assert differ(exact, draw(tiny_pipe(unet)))

    @feature("AVQ inside the ControlNet")
    def test_inside_the_controlnet(self, unet, codebooks):
        """Catches AVQ that needs up blocks, and calibration that watches the UNet instead."""
        controlnet = ControlNetModel.from_unet(unet)
        for block in (*controlnet.controlnet_down_blocks, controlnet.controlnet_mid_block):
            torch.nn.init.normal_(block.weight, std=0.1)  # zero before training: without effect
        pipe = tiny_pipe(unet, StableDiffusionControlNetPipeline, controlnet=controlnet)
        arguments = {"image": random_image(128), "height": 128, "width": 128}
        exact = draw(pipe, **arguments)
        options = {"image": random_image(128), "num_inference_steps": 1, "progress": False}
        options["model"] = controlnet
        own = calibrate(pipe, ["a hen"], CONFIG, **options)
        assert len(own.layer_specs) == 2  # of the two levels, down blocks only
        with pytest.raises(ValueError, match=r"another model: up_blocks.* \(4 unexpected in all\)"):
            apply_avq(controlnet, codebooks)
        apply_avq(controlnet, own)
        assert differ(draw(pipe, **arguments), exact)
        rows = [row for row in summary(controlnet).rows if row.config]
        assert [row.calls for row in rows] == [{"AVQ": 2}] * 2
        assert kinds(pipe.unet) == set()
        names = [row.name for row in summary(pipe).rows if row.config]
        assert names == [f"controlnet.{row.name}" for row in rows]
        for disabled in (controlnet, pipe):
            with avq_disabled(disabled):
                assert torch.equal(draw(pipe, **arguments), exact)
        again = calibrate(pipe, ["a hen"], CONFIG, **options)  # of exact keys, AVQ being on
        for name in own.layer_specs:
            assert torch.equal(again.codebook(name).children, own.codebook(name).children)
        remove_avq(controlnet)
        assert torch.equal(draw(pipe, **arguments), exact)

    def test_pipelines_of_several_controlnets(self, unet, codebooks):
        """Catches AVQ that stays on in a ControlNet, also while the UNet is calibrated."""
        controlnets = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            controlnets.append(ControlNetModel.from_unet(unet))
            torch.nn.init.normal_(controlnets[-1].controlnet_mid_block.weight)
        pipe = tiny_pipe(unet, StableDiffusionControlNetPipeline, controlnet=controlnets)
        arguments = {"image": [random_image(128)] * 2, "height": 128, "width": 128}
        exact = draw(pipe, **arguments)
        options = {"image": [random_image(128)] * 2, "num_inference_steps": 1, "progress": False}
        before = calibrate(pipe, ["a hen"], CONFIG, **options)
        for controlnet in controlnets:
            apply_avq(controlnet, random_codebooks(controlnet, CONFIG))
        assert differ(draw(pipe, **arguments), exact)
        assert {row.name[:17] for row in summary(pipe).rows if row.config} == {
            "controlnet.nets.0",
            "controlnet.nets.1",
        }
        after = calibrate(pipe, ["a hen"], CONFIG, **options)
        for name in before.layer_specs:
            assert torch.equal(before.codebook(name).children, after.codebook(name).children)
        assert torch.equal(draw(remove_avq(pipe), **arguments), exact)

    @feature("T2I-Adapter")
    def test_t2i_adapter(self, codebooks):
        """Catches features of the adapter that no longer reach the UNet."""
        torch.manual_seed(4)
        adapter = T2IAdapter(channels=[16, 32, 64, 64], num_res_blocks=1, downscale_factor=8)
        pipe = tiny_pipe(cls=StableDiffusionAdapterPipeline, adapter=adapter.eval())
        _, avq = check_on_and_off(pipe, codebooks, image=random_image(128))
        apply_avq(pipe, codebooks)
        assert differ(draw(pipe, image=random_image(128), adapter_conditioning_scale=0.0), avq)

    @feature("PAG")
    @pytest.mark.filterwarnings("ignore:AVQ does not run")
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

    @feature("AnimateDiff")
    def test_animatediff(self, unet, codebooks):
        """Catches temporal attention quantized, or codebooks carried over by `from_unet2d`."""
        adapter = motion_adapter()
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

    def animatediff_pipe(self):
        adapter = motion_adapter()
        components = tiny_components()
        del components["safety_checker"], components["feature_extractor"]
        pipe = AnimateDiffPipeline(**components, motion_adapter=adapter)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    @feature("AnimateDiff")
    def test_animatediff_pipeline(self, codebooks):
        """Catches frames that are taken for tokens, or for one image."""

        def draw_video(pipe):
            return pipe(
                "a red fox", num_frames=2, height=64, width=64, num_inference_steps=2,
                output_type="latent", generator=torch.Generator().manual_seed(0),
            ).frames  # fmt: skip

        _, avq = check_on_and_off(self.animatediff_pipe(), codebooks, draw_video)
        assert differ(avq[:, :, 0], avq[:, :, 1])

    @feature("AnimateDiff")
    def test_animatediff_measured(self):
        """Catches hooks that miss what its UNet passes by keyword."""
        pipe = self.animatediff_pipe()
        run = {"num_inference_steps": 1, "progress": False, "num_frames": 2}
        run |= {"height": 64, "width": 96}
        codebooks = calibrate(pipe, ["a red fox"], CONFIG, **run)
        found = codebooks.config["calibration"]["layers"]
        assert found.keys() == codebooks.layer_specs.keys()
        apply_avq(pipe, codebooks)
        assert measure_capture(pipe, ["a red fox"], **run).curves.keys() == found.keys()
        assert measure_sensitivity(pipe, ["a red fox"], **run).keys() == found.keys()


class TestSampling:
    @feature("every scheduler")
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of diffusers' use of NumPy
    @pytest.mark.parametrize("name", SCHEDULERS)
    def test_scheduler(self, name):
        """Catches AVQ that counts on a number of UNet calls or on timesteps of one scheduler."""
        if name == "DPMSolverSDEScheduler":
            pytest.importorskip("torchsde")
        # ScaleCrafter, which is refused here, dilates below level 0.
        unet = tiny_unet() if name in OTHER_TIMESTEPS else small_unet()
        pipe = tiny_pipe(unet)
        cls = getattr(diffusers, name)
        pipe.scheduler = cls.from_config(pipe.scheduler.config, **SCHEDULER_OPTIONS.get(name, {}))
        codebooks = random_codebooks(unet, AVQConfig(4, 2, 2, query_tile=16))
        check_on_and_off(pipe, codebooks, height=64, width=64)
        apply_avq(pipe, codebooks, route="always")
        if name in OTHER_TIMESTEPS:
            self.check_refused(pipe)
            return
        seen = []
        attn = select_layers(unet)[0].attn
        attn.register_forward_pre_hook(lambda *_: seen.append(attn._avq.num_refined))
        draw(set_num_refined(pipe, {1000: 0, 500: 4}), height=64, width=64)
        assert (seen[0], seen[-1]) == (0, 4)

    def check_refused(self, pipe):
        """What needs timesteps says so, each time and in inference mode, and nothing else does."""
        sizes = {"height": 64, "width": 64}
        refused = pytest.raises(ValueError, match=r"timesteps fall from 1000 to 0, but got one wi")
        one = partial(measure_capture, pipe, ["a fox"], num_inference_steps=2, progress=False)
        set_num_refined(pipe, one(parts=1, **sizes).at_least(0.5))
        draw(pipe, **sizes)
        with refused:
            one(parts=2, **sizes)
        with scalecrafter(pipe, 256, 256), refused:
            draw(pipe, height=256, width=256)
        set_num_refined(pipe, {1000: 0, 500: 4})
        for mode in (torch.no_grad, torch.no_grad, torch.inference_mode):
            with mode(), refused:
                draw(pipe, **sizes)

    @feature("negative prompts")
    def test_negative_prompt(self, pipe, codebooks):
        plain = draw(apply_avq(pipe, codebooks))
        remove_avq(pipe)
        _, avq = check_on_and_off(pipe, codebooks, negative_prompt="a blue hen")
        assert differ(avq, plain)

    @feature("no guidance")
    def test_without_guidance(self, pipe, codebooks):
        """Catches two halves of a batch taken for granted."""
        check_on_and_off(pipe, codebooks, guidance_scale=1.0)
