"""AVQ beside what else diffusers users switch on: adapters, other pipelines, offload, patches.

The marker `feature` names the feature of `eval/results/features.md` that a test stands for.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import diffusers
import pytest
import tomesd
import torch
from accelerate import cpu_offload
from checks import check_on_and_off, differ, kinds, runs
from diffusers import (
    AnimateDiffPipeline,
    BitsAndBytesConfig,
    ControlNetModel,
    DDPMScheduler,
    StableDiffusionAdapterPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPAGPipeline,
    StableDiffusionPipeline,
    StableDiffusionUpscalePipeline,
    T2IAdapter,
    TorchAoConfig,
    UNet2DConditionModel,
    UNetMotionModel,
)
from diffusers.models import modeling_utils
from diffusers.models.attention_processor import (
    IPAdapterAttnProcessor2_0,
    XFormersAttnProcessor,
)
from diffusers.models.embeddings import ImageProjection
from diffusers.pipelines import pipeline_utils
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers
from diffusers.utils import hub_utils
from huggingface_hub import ModelCard
from peft import get_peft_model_state_dict
from tiny import (
    CONFIG,
    LORA,
    draw,
    let_answer_calls_only,
    motion_adapter,
    predict,
    quiet,
    random_codebooks,
    random_image,
    small_unet,
    tiny_components,
    tiny_pipe,
    tiny_unet,
    tuned_codebooks,
)

from avq_diffusers.config import AVQConfig
from avq_diffusers.extras.scalecrafter.apply import scalecrafter
from avq_diffusers.plugin.apply import apply_avq, avq_disabled, remove_avq
from avq_diffusers.plugin.calibration import calibrate
from avq_diffusers.plugin.codebooks import AVQCodebooks
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
        assert len(own.layer_specs) == 4  # of the two levels, down blocks only
        with pytest.raises(ValueError, match=r"another model: up_blocks.* \(6 unexpected in all\)"):
            apply_avq(controlnet, codebooks)
        apply_avq(controlnet, own)
        assert differ(draw(pipe, **arguments), exact)
        rows = [row for row in summary(controlnet).rows if row.config]
        assert [row.calls for row in rows] == [{"AVQ": 2}] * 4
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
        unet = small_unet()
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


@feature("several pipelines and threads")
def test_threads(pipe, codebooks):
    """Catches state that pipelines share: grid, codebooks, switches."""
    other = tiny_pipe(cls=StableDiffusionImg2ImgPipeline)
    apply_avq(pipe, codebooks)
    apply_avq(other, random_codebooks(other.unet, AVQConfig(6, 0, 0, levels=(0,)), seed=1))
    image = torch.rand(1, 3, 64, 192, generator=torch.Generator().manual_seed(5))
    runs = [
        lambda: draw(pipe, num_inference_steps=4),
        lambda: draw(other, image=image, strength=1.0, num_inference_steps=4),
    ]
    alone = [run() for run in runs]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            together = list(threads.map(lambda run: run(), runs))
            assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))
    assert kinds(pipe) == kinds(other) == {"AVQ"}


@feature("several pipelines and threads")
def test_threads_of_one_unet(codebooks):
    """Catches a grid that is another thread's: as many tokens in another order, or too many."""
    unet = apply_avq(tiny_unet(), codebooks)
    layer = select_layers(unet, (0,))[0]

    @torch.no_grad()
    def output(height, width):
        generator = torch.Generator().manual_seed(height)
        sample = torch.randn(1, 4, height, width, generator=generator)
        return unet(sample, 5, torch.ones(1, 5, 32)).sample

    alone = output(16, 32)
    for size in ((32, 16), (16, 16)):
        with ThreadPoolExecutor(1) as thread:
            seen = []

            def draw_elsewhere(*_, size=size, thread=thread, seen=seen):
                if not seen:
                    seen.append(size)
                    thread.submit(output, *size).result()

            handle = layer.attn.register_forward_pre_hook(draw_elsewhere)
            assert torch.equal(output(16, 32), alone)
            handle.remove()
            assert seen == [size]


class TestLoRA:
    @pytest.fixture(params=[False, True], ids=["untuned", "tuned"])
    def codebooks(self, unet, request):
        return tuned_codebooks(unet) if request.param else random_codebooks(unet)

    @feature("LoRA (load/fuse/unfuse)")
    def test_is_seen(self, pipe, codebooks):
        """Catches raw weights read instead of projections called."""
        plain = draw(apply_avq(pipe, codebooks))
        pipe.unet.add_adapter(LORA)
        adapted = draw(pipe)
        assert differ(adapted, plain)
        assert kinds(pipe) == {"AVQ"}
        assert torch.equal(draw(apply_avq(pipe, codebooks)), adapted)
        hooked = apply_avq(tiny_pipe(), codebooks)
        let_answer_calls_only(hooked.unet)  # as a layer with a LoRA does
        assert torch.equal(draw(pipe, cross_attention_kwargs={"scale": 0.0}), draw(hooked))
        torch.testing.assert_close(draw(hooked), plain, rtol=1e-3, atol=1e-3)
        assert differ(draw(pipe, cross_attention_kwargs={"scale": 0.5}), adapted)

    @feature("LoRA (load/fuse/unfuse)")
    def test_fuse(self, pipe, codebooks):
        """Catches an adapter that AVQ loses when it is fused or taken out again."""
        plain = draw(apply_avq(pipe, codebooks))
        pipe.unet.add_adapter(LORA)
        adapted = draw(pipe)
        with pytest.raises(AssertionError):  # the tolerance below tells them apart
            torch.testing.assert_close(plain, adapted, rtol=1e-2, atol=1e-2)
        pipe.fuse_lora()
        torch.testing.assert_close(draw(pipe), adapted, rtol=1e-2, atol=1e-2)
        assert kinds(pipe) == {"AVQ"}
        pipe.unfuse_lora()
        torch.testing.assert_close(draw(pipe), adapted, rtol=1e-2, atol=1e-2)

    @feature("LoRA (load/fuse/unfuse)")
    @pytest.mark.parametrize("avq_first", [True, False])
    def test_fuse_for_good(self, pipe, codebooks, avq_first):
        """Catches weights of the base model in place of those that a LoRA was fused into."""
        pipe.unet.add_adapter(LORA)
        adapted = draw(apply_avq(pipe, codebooks))
        if not avq_first:
            remove_avq(pipe)
        pipe.fuse_lora()
        pipe.unload_lora_weights()
        if not avq_first:
            apply_avq(pipe, codebooks)
        torch.testing.assert_close(draw(pipe), adapted, rtol=1e-2, atol=1e-2)
        plain = draw(apply_avq(tiny_pipe(), codebooks))
        with pytest.raises(AssertionError):  # the tolerance tells them apart
            torch.testing.assert_close(plain, adapted, rtol=1e-2, atol=1e-2)

    @feature("LoRA (load/fuse/unfuse)")
    def test_remove(self, pipe, codebooks):
        """Catches AVQ that only lets go of the modules it was applied to."""
        exact = draw(pipe)
        apply_avq(pipe, codebooks)
        pipe.unet.add_adapter(LORA)
        draw(pipe)
        remove_avq(pipe)
        pipe.unload_lora_weights()
        assert torch.equal(draw(pipe), exact)

    @feature("LoRA hot-swap")
    def test_hot_swap(self, pipe, codebooks, tmp_path):
        """Catches AVQ that keeps the weights of the LoRA it met first."""
        for seed in (1, 2):
            source = tiny_unet()
            torch.manual_seed(seed)
            source.add_adapter(LORA)
            StableDiffusionPipeline.save_lora_weights(
                tmp_path / str(seed), unet_lora_layers=get_peft_model_state_dict(source)
            )
        plain = draw(apply_avq(pipe, codebooks))
        pipe.load_lora_weights(tmp_path / "1", adapter_name="default_0")
        first = draw(pipe)
        pipe.load_lora_weights(tmp_path / "2", adapter_name="default_0", hotswap=True)
        second = draw(pipe)
        assert differ(first, plain)
        assert differ(second, first)
        assert kinds(pipe) == {"AVQ"}
        expected = tiny_pipe()
        expected.load_lora_weights(tmp_path / "2")
        assert torch.equal(second, draw(apply_avq(expected, codebooks)))
        pipe.unload_lora_weights()
        assert torch.equal(draw(pipe), plain)


@feature("textual inversion")
def test_textual_inversion(pipe, codebooks):
    generator = torch.Generator().manual_seed(8)
    vectors = {"<fox>": 3 * torch.randn(2, 32, generator=generator)}
    pipe.load_textual_inversion(vectors, token="<fox>")
    _, avq = check_on_and_off(pipe, codebooks, negative_prompt="<fox>")
    apply_avq(pipe, codebooks)
    pipe.unload_textual_inversion()
    assert differ(draw(pipe, negative_prompt="<fox>"), avq)


@feature("IP-Adapter")
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

    def test_unloaded_from_one_instance(self, pipe, codebooks):
        """Catches an adapter that goes on running, on text tokens, and comes back with removal."""
        exact = draw(pipe)
        avq = draw(apply_avq(pipe, codebooks))
        remove_avq(pipe)
        self.load(pipe)
        pipe.unet.set_attn_processor(AVQProcessor(codebooks, unet=pipe.unet))
        pipe.unload_ip_adapter()
        assert torch.equal(draw(pipe), avq)
        assert torch.equal(draw(remove_avq(pipe)), exact)


class TestOtherTools:
    @pytest.mark.parametrize(
        "processor",
        [
            pytest.param("Sliced", marks=feature("attention slicing (replaces AVQ: reported)")),
            pytest.param("XFormers", marks=feature("xFormers (replaces AVQ: reported)")),
        ],
    )
    def test_replaced_processors(self, pipe, codebooks, processor):
        """Catches AVQ that is silently gone: both tools replace every processor."""
        avq = draw(apply_avq(pipe, codebooks))
        if processor == "Sliced":
            pipe.enable_attention_slicing()
            assert differ(draw(pipe), avq)
        else:  # `enable_xformers_...` needs a GPU
            pipe.unet.set_attn_processor(XFormersAttnProcessor())
        assert runs(pipe) == {f"exact: replaced by {processor}AttnProcessor"}
        if processor == "XFormers":  # cannot serve what AVQ hands over here
            pipe.unet.set_default_attn_processor()
        torch.testing.assert_close(draw(apply_avq(pipe, codebooks)), avq, rtol=1e-4, atol=1e-4)
        assert kinds(pipe) == {"AVQ"}

    def test_fused_projections(self, pipe, codebooks):
        """Catches AVQ that does not come back, or reads the fused projection left behind."""
        avq = draw(apply_avq(pipe, codebooks))
        pipe.fuse_qkv_projections(vae=False)
        assert runs(pipe) == {"exact: replaced by FusedAttnProcessor2_0"}
        draw(pipe)
        pipe.unfuse_qkv_projections(vae=False)
        assert torch.equal(draw(pipe), avq)

    def test_removed_while_projections_are_fused(self, pipe, codebooks):
        """Catches a processor of AVQ that comes back with the projections and calls itself."""
        exact = draw(pipe)
        avq = draw(apply_avq(pipe, codebooks))
        pipe.fuse_qkv_projections(vae=False)
        remove_avq(pipe)
        pipe.unfuse_qkv_projections(vae=False)
        assert torch.equal(draw(pipe), exact)
        assert torch.equal(draw(apply_avq(pipe, codebooks)), avq)
        with avq_disabled(pipe):
            assert torch.equal(draw(pipe), exact)

    @feature("FreeU")
    def test_freeu(self, pipe, codebooks):
        plain = draw(apply_avq(pipe, codebooks))
        remove_avq(pipe)
        pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
        _, avq = check_on_and_off(pipe, codebooks)
        assert differ(avq, plain)

    @feature("callbacks")
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

    @feature("ToMe (merged layers run exact)")
    def test_tomesd(self, pipe, codebooks):
        """Catches AVQ lost with ToMe's patched blocks, or left out where nothing is merged."""
        exact = draw(pipe)
        tomesd.apply_patch(pipe, ratio=0.5, use_rand=False)
        merged = draw(pipe)
        avq = draw(apply_avq(pipe, codebooks))
        assert {(row.level, *row.calls) for row in summary(pipe).rows if row.config} == {
            (0, "tokens are not the grid"),  # ToMe merges at the highest resolution
            (1, "AVQ"),
        }
        assert differ(avq, merged)
        assert torch.equal(draw(remove_avq(pipe)), merged)
        tomesd.remove_patch(pipe)
        assert torch.equal(draw(pipe), exact)
        check_on_and_off(pipe, codebooks)

    @feature("DeepCache")
    def test_deepcache(self, pipe, codebooks):
        """Catches AVQ that runs in skipped blocks, or breaks what is cached between steps."""
        deepcache = pytest.importorskip("DeepCache")
        plain = draw(pipe, num_inference_steps=4)
        helper = deepcache.DeepCacheSDHelper(pipe=pipe)
        helper.set_params(cache_interval=2)
        helper.enable()
        exact = draw(pipe, num_inference_steps=4)
        assert differ(exact, plain)
        avq = draw(apply_avq(pipe, codebooks), num_inference_steps=4)
        assert differ(avq, exact)
        assert kinds(pipe) == {"AVQ"}
        assert summary(pipe).rows[1].calls["AVQ"] == 2  # every other step
        helper.disable()
        assert torch.equal(draw(remove_avq(pipe), num_inference_steps=4), plain)

    @feature("group offload")
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

    @feature("sequential offload")
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

    @feature("layerwise casting")
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

    @feature("torchao int8 weights")
    def test_torchao(self, unet, codebooks, tmp_path):
        """Catches weights read where a quantized tensor has no such operator, or dtype."""
        torchao = pytest.importorskip("torchao.quantization")
        unet.save_pretrained(tmp_path)
        config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
        quantized = UNet2DConditionModel.from_pretrained(
            tmp_path, quantization_config=config, torch_dtype=torch.float32
        )
        weight = quantized.get_submodule(next(iter(codebooks.layer_specs))).to_q.weight
        assert isinstance(weight, torchao.Int8Tensor)
        exact, avq = check_on_and_off(quantized, codebooks, predict)
        full = predict(apply_avq(unet, codebooks))
        assert 0 < (avq - full).norm() < 0.5 * (avq - exact).norm()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder in place of the Hub: uploads are copied to it, and downloads read from it."""
    root = tmp_path / "hub"

    def create_repo(repo_id, **_):
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"someone/{repo_id}")

    def upload_folder(*, repo_id, folder_path, **_):
        shutil.copytree(folder_path, root / repo_id)

    for module in (hub_utils, modeling_utils, pipeline_utils):
        monkeypatch.setattr(module, "create_repo", create_repo)
        monkeypatch.setattr(
            module, "load_or_create_model_card", lambda *_, **__: ModelCard("---\n---\n")
        )
    monkeypatch.setattr(hub_utils, "upload_folder", upload_folder)
    monkeypatch.setattr(
        "avq_diffusers.plugin.codebooks.hf_hub_download",
        lambda repo, file, **_: str(root / repo / file),
    )
    return root / "someone"


@feature("push_to_hub")
def test_push_to_hub(pipe, codebooks, hub, tmp_path):
    """Catches anything that is uploaded and not needed, or needed and not uploaded."""
    avq = draw(apply_avq(pipe, codebooks))
    pipe.push_to_hub("someone/pipe")
    codebooks.push_to_hub("someone/codebooks")
    codebooks.save_pretrained(tmp_path / "saved", push_to_hub=True)
    files = {"README.md", "config.json", "diffusion_pytorch_model.safetensors"}
    for repo in ("codebooks", "saved"):
        assert {path.name for path in (hub / repo).iterdir()} == files
    uploaded = [path for path in (hub / "pipe").rglob("*") if path.is_file()]
    assert not any(b"avq" in path.read_bytes().lower() for path in uploaded)
    loaded = quiet(StableDiffusionPipeline.from_pretrained(hub / "pipe"))
    apply_avq(loaded, AVQCodebooks.from_pretrained("someone/codebooks"))
    torch.testing.assert_close(draw(loaded), avq, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
class TestOnAGPU:
    @feature("text to image")
    def test_image(self, pipe, codebooks):
        """Catches kernels that are not what runs, and anything that stays behind."""
        check_on_and_off(pipe.to("cuda"), codebooks)
        draw(apply_avq(pipe, codebooks, route="always"))
        assert runs(pipe) == {"AVQ (triton backend)"}

    @pytest.mark.parametrize(
        "offload",
        [
            pytest.param("enable_model_cpu_offload", marks=feature("model offload")),
            pytest.param("enable_sequential_cpu_offload", marks=feature("sequential offload")),
        ],
    )
    @pytest.mark.parametrize("avq_first", [True, False])
    def test_offload(self, pipe, codebooks, offload, avq_first):
        """Catches codewords or orders left behind when weights come to the GPU and go again."""
        if avq_first:
            apply_avq(pipe, codebooks, route="always")
        getattr(pipe, offload)()
        if avq_first:
            draw(pipe)
            assert kinds(pipe) == {"AVQ"}
            remove_avq(pipe)
        check_on_and_off(pipe, codebooks)

    @feature("group offload")
    def test_group_offload(self, pipe, codebooks):
        pipe.to("cuda")
        pipe.unet.enable_group_offload(
            onload_device=torch.device("cuda"),
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
            use_stream=True,
        )
        check_on_and_off(pipe, codebooks)

    @feature("xFormers (replaces AVQ: reported)")
    def test_xformers(self, pipe, codebooks):
        pytest.importorskip("xformers")
        pipe.to("cuda", torch.float16).enable_xformers_memory_efficient_attention()
        check_on_and_off(pipe, codebooks)
        apply_avq(pipe, codebooks, route="always")
        pipe.enable_xformers_memory_efficient_attention()
        assert runs(pipe) == {"exact: replaced by XFormersAttnProcessor"}

    @feature("bitsandbytes int8 weights")
    def test_bitsandbytes(self, unet, codebooks, tmp_path):
        bitsandbytes = pytest.importorskip("bitsandbytes")
        unet.save_pretrained(tmp_path)
        quantized = UNet2DConditionModel.from_pretrained(
            tmp_path,
            quantization_config=BitsAndBytesConfig(load_in_8bit=True),
            torch_dtype=torch.float16,
        )
        projection = quantized.get_submodule(next(iter(codebooks.layer_specs))).to_q
        assert isinstance(projection, bitsandbytes.nn.Linear8bitLt)
        sample = torch.randn(1, 4, 16, 16, device="cuda", dtype=torch.float16)
        text = torch.randn(1, 5, 32, device="cuda", dtype=torch.float16)
        with torch.no_grad():
            check_on_and_off(quantized, codebooks, lambda unet: unet(sample, 10, text).sample)

    @pytest.mark.parametrize(
        "method",
        [
            pytest.param("compile", marks=feature("torch.compile of the UNet (inductor)")),
            pytest.param(
                "compile_repeated_blocks", marks=feature("torch.compile of its blocks (inductor)")
            ),
        ],
    )
    def test_compile(self, pipe, codebooks, method):
        pipe.to("cuda")
        exact, avq = draw(pipe), draw(apply_avq(pipe, codebooks, route="always"))
        getattr(pipe.unet, method)(fullgraph=True)
        compiled = draw(pipe)
        assert (compiled - avq).norm() < 0.1 * (avq - exact).norm()

    @feature("CUDA graphs")
    @torch.no_grad()
    def test_cuda_graph(self, unet, codebooks):
        """Catches an order, a table or a timing that is made anew on the host in every call."""
        apply_avq(unet, codebooks, route="always").to("cuda")
        sample, other = torch.randn(2, 1, 4, 16, 16, device="cuda")
        timestep = torch.full((), 10, device="cuda")
        text = torch.zeros(1, 5, 32, device="cuda")
        expected = [unet(x, timestep, text).sample for x in (other, sample)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = unet(sample, timestep, text).sample
        for x, want in zip((sample.clone(), other), reversed(expected), strict=True):
            sample.copy_(x)
            graph.replay()
            torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-4)
