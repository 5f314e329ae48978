"""AVQ in diffusers' pipelines, each around a tiny UNet of its model's topology.

The marker `feature` names the feature of `eval/results/features.md` that a test stands for.
"""

from contextlib import nullcontext
from itertools import count
from types import MappingProxyType

import diffusers
import pytest
import torch
from checks import check_on_and_off, differ, kinds, runs
from diffusers import (
    AnimateDiffPipeline,
    ControlNetModel,
    DDPMScheduler,
    DiffusionPipeline,
    LatentConsistencyModelPipeline,
    LCMScheduler,
    StableDiffusionAdapterPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionPAGPipeline,
    StableDiffusionPipeline,
    StableDiffusionUpscalePipeline,
    StableDiffusionXLImg2ImgPipeline,
    T2IAdapter,
    UNetMotionModel,
)
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers
from tiny import (
    CONFIG,
    LAYER,
    draw,
    motion_adapter,
    quiet,
    random_codebooks,
    random_image,
    sd2_unet,
    sdxl_pipe,
    sdxl_text_encoder,
    small_unet,
    tiny_components,
    tiny_pipe,
    tiny_unet,
)
from transformers import CLIPTextModelWithProjection

from avq_diffusers import (
    AVQConfig,
    AVQProcessor,
    AVQStableDiffusionPipeline,
    apply_avq,
    avq_disabled,
    calibrate,
    measure_error,
    remove_avq,
    select_layers,
    set_num_refined,
    summary,
)
from avq_diffusers.extras.scalecrafter.apply import scalecrafter

feature = pytest.mark.feature

SDXL_CONFIG = AVQConfig(num_parents=4, num_children=2, num_refined=2, query_tile=16, levels=(1, 2))


def refiner_unet():
    """SDXL refiner's topology: four levels, attention at 1 and 2, four transformer blocks each."""
    return tiny_unet(
        block_out_channels=(16, 32, 64, 64),
        down_block_types=(
            "DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D",
        ),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=2,
        transformer_layers_per_block=4,
        attention_head_dim=(2, 4, 8, 8),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=72,  # 5 time ids of 8, and the text
    )  # fmt: skip


class TestText2Image:
    @feature("SD1.5")
    @feature("text to image")
    def test_sd15(self, pipe, codebooks):
        _, avq = check_on_and_off(pipe, codebooks)
        assert torch.equal(draw(apply_avq(tiny_pipe(), codebooks)), avq)

    @feature("SD 2.x")
    def test_sd2(self):
        """Catches one head count for all levels, and projections that are not convolutions."""
        pipe = tiny_pipe(sd2_unet())
        pipe.scheduler.register_to_config(prediction_type="v_prediction")
        check_on_and_off(pipe, random_codebooks(pipe.unet))

    @feature("SDXL base")
    def test_sdxl_base(self):
        """Catches all but the first of several transformer blocks left out, or level 0 needed."""
        pipe = sdxl_pipe()
        codebooks = random_codebooks(pipe.unet, SDXL_CONFIG)
        assert len(codebooks.layer_specs) == 5 * 2 + 6 * 3
        _, avq = check_on_and_off(pipe, codebooks)
        apply_avq(pipe, codebooks)
        assert not torch.equal(draw(pipe, original_size=(64, 64)), avq)

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

    @feature("LCM")
    def test_lcm(self, codebooks):
        pipe = tiny_pipe(tiny_unet(time_cond_proj_dim=16), LatentConsistencyModelPipeline)
        pipe.scheduler = LCMScheduler.from_config(pipe.scheduler.config)
        check_on_and_off(pipe, codebooks)

    @feature("batches")
    @pytest.mark.parametrize("guidance_scale", [1.0, 7.5])
    def test_batches(self, pipe, codebooks, guidance_scale):
        """Catches images of a batch that see each other's keys, with and without guidance."""
        apply_avq(pipe, codebooks)
        arguments = {"num_inference_steps": 1, "height": 64, "width": 64, "output_type": "latent"}
        arguments["guidance_scale"] = guidance_scale
        generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
        batch = pipe(["a fox", "a hen"], generator=generators, **arguments).images
        for index, prompt in enumerate(["a fox", "a hen"]):
            generator = torch.Generator().manual_seed(3 + index)
            alone = pipe(prompt, generator=generator, **arguments).images
            torch.testing.assert_close(batch[index : index + 1], alone, rtol=1e-4, atol=1e-4)

    @feature("save_pretrained")
    def test_saves_as_a_stock_pipeline(self, codebooks, tmp_path):
        """Catches a saved folder that only opens where this package is installed."""
        pipe = tiny_pipe(cls=AVQStableDiffusionPipeline)
        exact = draw(pipe)
        pipe.set_attn_processor(AVQProcessor(codebooks))
        avq = draw(pipe)
        pipe.save_pretrained(tmp_path)
        stock = quiet(DiffusionPipeline.from_pretrained(tmp_path))
        assert type(stock) is StableDiffusionPipeline
        torch.testing.assert_close(draw(stock), exact, rtol=1e-4, atol=1e-4)
        loaded = quiet(AVQStableDiffusionPipeline.from_pretrained(tmp_path))
        assert isinstance(loaded, AVQStableDiffusionPipeline)
        loaded.set_attn_processor(AVQProcessor(codebooks))
        torch.testing.assert_close(draw(loaded), avq, rtol=1e-4, atol=1e-4)


class TestImage2Image:
    @feature("img2img")
    def test_img2img(self, codebooks):
        pipe = tiny_pipe(cls=StableDiffusionImg2ImgPipeline)
        check_on_and_off(pipe, codebooks, image=random_image(128), strength=1.0)

    @pytest.mark.parametrize(
        "channels",
        [
            pytest.param(4, marks=feature("inpainting")),
            pytest.param(9, marks=feature("inpainting model (9 channels)")),
        ],
    )
    def test_inpainting(self, codebooks, channels):
        pipe = tiny_pipe(tiny_unet(in_channels=channels), StableDiffusionInpaintPipeline)
        arguments = {"image": random_image(128), "height": 128, "width": 128}
        mask = torch.zeros(1, 1, 128, 128)
        mask[:, :, 32:96] = 1
        check_on_and_off(pipe, codebooks, mask_image=mask, **arguments)

    @feature("InstructPix2Pix")
    def test_instruct_pix2pix(self, codebooks):
        """Catches two parts of a batch taken for granted: its guidance has three."""
        pipe = tiny_pipe(tiny_unet(in_channels=8), StableDiffusionInstructPix2PixPipeline)
        check_on_and_off(pipe, codebooks, image=random_image(128))

    @feature("upscaling")
    def test_upscale(self):
        """Catches the extra channels and noise level of the upscaler's UNet lost on the way."""
        components = tiny_components(tiny_unet(in_channels=7, num_class_embeds=1000))
        components["vae"].register_to_config(scaling_factor=0.08333)
        pipe = StableDiffusionUpscalePipeline(**components, low_res_scheduler=DDPMScheduler())
        check_on_and_off(quiet(pipe), random_codebooks(pipe.unet), image=random_image(16))

    @feature("SDXL refiner")
    def test_sdxl_refiner(self):
        """Catches levels counted from the first block with attention."""
        pipe = sdxl_pipe(
            refiner_unet(),
            StableDiffusionXLImg2ImgPipeline,
            text_encoder=None,  # the refiner knows the second one only
            text_encoder_2=sdxl_text_encoder(CLIPTextModelWithProjection, 32),
            requires_aesthetics_score=True,
        )
        codebooks = random_codebooks(pipe.unet, SDXL_CONFIG)
        assert len(codebooks.layer_specs) == 2 * 5 * 4
        check_on_and_off(pipe, codebooks, image=random_image(128), strength=1.0)

    @feature("T2I-Adapter")
    def test_t2i_adapter(self, codebooks):
        """Catches features of the adapter that no longer reach the UNet."""
        torch.manual_seed(4)
        adapter = T2IAdapter(channels=[16, 32, 64, 64], num_res_blocks=1, downscale_factor=8)
        pipe = tiny_pipe(cls=StableDiffusionAdapterPipeline, adapter=adapter.eval())
        _, avq = check_on_and_off(pipe, codebooks, image=random_image(128))
        apply_avq(pipe, codebooks)
        assert differ(draw(pipe, image=random_image(128), adapter_conditioning_scale=0.0), avq)


class TestSharing:
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

    @feature("several pipelines and threads")
    def test_one_set_of_codebooks_for_two_pipelines(self, pipe, codebooks):
        """Catches state on a class or on the codebooks: each pipeline has its own settings."""
        first = draw(apply_avq(pipe, codebooks))
        second = set_num_refined(apply_avq(tiny_pipe(), codebooks), 0)
        third = apply_avq(tiny_pipe(), random_codebooks(pipe.unet, seed=1))
        assert differ(draw(second), first)
        assert differ(draw(third), first)
        assert torch.equal(draw(pipe), first)
        coarse = draw(second)
        remove_avq(pipe)
        assert torch.equal(draw(second), coarse)


def controlnets(unet, number):
    """ControlNets with an effect; before training they have none."""
    found = []
    for seed in range(number):
        torch.manual_seed(seed)
        found.append(ControlNetModel.from_unet(unet))
        for block in (*found[-1].controlnet_down_blocks, found[-1].controlnet_mid_block):
            torch.nn.init.normal_(block.weight, std=0.1)
    return found


class TestControlNet:
    RUN = MappingProxyType({"image": random_image(128), "height": 128, "width": 128})
    FIT = MappingProxyType(
        {"image": random_image(128), "num_inference_steps": 1, "progress": False}
    )

    def equal(self, codebooks, others):
        for name in codebooks.layer_specs:
            children = codebooks.codebook(name).children
            assert torch.equal(children, others.codebook(name).children)

    @feature("ControlNet")
    def test_from_a_unet_with_avq(self, unet, codebooks):
        """Catches codebooks copied into the ControlNet, whose weights come from this UNet."""
        (reference,) = controlnets(unet, 1)
        (controlnet,) = controlnets(apply_avq(unet, codebooks), 1)
        assert controlnet.state_dict().keys() == reference.state_dict().keys()
        assert {type(p) for p in controlnet.attn_processors.values()} == {
            type(p) for p in reference.attn_processors.values()
        }
        remove_avq(unet)
        pipe = tiny_pipe(unet, StableDiffusionControlNetPipeline, controlnet=controlnet)
        exact, _ = check_on_and_off(pipe, codebooks, **self.RUN)
        assert differ(exact, draw(tiny_pipe(unet)))

    @feature("AVQ inside the ControlNet")
    def test_inside_the_controlnet(self, unet, codebooks):
        """Catches AVQ that needs up blocks, and calibration that watches the UNet instead."""
        (controlnet,) = controlnets(unet, 1)
        pipe = tiny_pipe(unet, StableDiffusionControlNetPipeline, controlnet=controlnet)
        exact = draw(pipe, **self.RUN)
        own = calibrate(pipe, ["a hen"], CONFIG, model=controlnet, **self.FIT)
        assert len(own.layer_specs) == 2  # of the two levels, down blocks only
        with pytest.raises(ValueError, match=r"another model: up_blocks.* \(4 unexpected in all\)"):
            apply_avq(controlnet, codebooks)
        apply_avq(controlnet, own)
        assert differ(draw(pipe, **self.RUN), exact)
        rows = [row for row in summary(controlnet).rows if row.config]
        assert [row.calls for row in rows] == [{"AVQ": 2}] * 2
        assert kinds(pipe.unet) == set()
        names = [row.name for row in summary(pipe).rows if row.config]
        assert names == [f"controlnet.{row.name}" for row in rows]
        for disabled in (controlnet, pipe):
            with avq_disabled(disabled):
                assert torch.equal(draw(pipe, **self.RUN), exact)
        # Of exact keys, AVQ being on.
        self.equal(own, calibrate(pipe, ["a hen"], CONFIG, model=controlnet, **self.FIT))
        remove_avq(controlnet)
        assert torch.equal(draw(pipe, **self.RUN), exact)

    def test_several(self, unet):
        """Catches AVQ that stays on in a ControlNet, also while the UNet is calibrated."""
        nets, images = controlnets(unet, 2), {"image": [random_image(128)] * 2}
        pipe = tiny_pipe(unet, StableDiffusionControlNetPipeline, controlnet=nets)
        exact = draw(pipe, **self.RUN | images)
        before = calibrate(pipe, ["a hen"], CONFIG, **self.FIT | images)
        for controlnet in nets:
            apply_avq(controlnet, random_codebooks(controlnet, CONFIG))
        assert differ(draw(pipe, **self.RUN | images), exact)
        assert {row.name[:17] for row in summary(pipe).rows if row.config} == {
            "controlnet.nets.0",
            "controlnet.nets.1",
        }
        self.equal(before, calibrate(pipe, ["a hen"], CONFIG, **self.FIT | images))
        assert torch.equal(draw(remove_avq(pipe), **self.RUN | images), exact)


@feature("PAG")
@pytest.mark.filterwarnings("ignore:AVQ does not run")
@pytest.mark.parametrize("layers", [["mid"], ["down_blocks.0"]])
def test_pag(codebooks, layers):
    """Catches a processor that PAG's own cannot replace for a run and put back."""
    pipe = tiny_pipe(cls=StableDiffusionPAGPipeline, pag_applied_layers=layers)
    exact = draw(pipe, pag_scale=3.0)
    before = apply_avq(pipe, codebooks).unet.attn_processors
    avq = draw(pipe, pag_scale=3.0)
    assert differ(avq, exact)
    assert differ(avq, draw(pipe, pag_scale=0.0))
    assert pipe.unet.attn_processors == before
    assert torch.equal(draw(remove_avq(pipe), pag_scale=3.0), exact)


@feature("AnimateDiff")
class TestAnimateDiff:
    @pytest.fixture
    def video_pipe(self):
        components = tiny_components()
        del components["safety_checker"], components["feature_extractor"]
        return quiet(AnimateDiffPipeline(**components, motion_adapter=motion_adapter()))

    def test_from_a_unet_with_avq(self, unet, codebooks):
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

    def test_pipeline(self, codebooks, video_pipe):
        """Catches frames that are taken for tokens, or for one image."""

        def draw_video(pipe):
            return pipe(
                "a red fox", num_frames=2, height=64, width=64, num_inference_steps=2,
                output_type="latent", generator=torch.Generator().manual_seed(0),
            ).frames  # fmt: skip

        _, avq = check_on_and_off(video_pipe, codebooks, draw_video)
        assert differ(avq[:, :, 0], avq[:, :, 1])

    def test_measured(self, video_pipe):
        """Catches hooks that miss what its UNet passes by keyword."""
        run = {"num_inference_steps": 1, "progress": False, "num_frames": 2}
        run |= {"height": 64, "width": 96}
        codebooks = calibrate(video_pipe, ["a red fox"], CONFIG, **run)
        found = codebooks.config["calibration"]["layers"]
        assert found.keys() == codebooks.layer_specs.keys()
        profile = measure_error(video_pipe, ["a red fox"], AVQConfig(4, 2, 2), **run)
        assert {one.num_tokens for one in profile.layers} == {8 * 12}


# Those that `KarrasDiffusionSchedulers` leaves out and that sample Stable Diffusion as well.
OTHER_SCHEDULERS = (
    *("DDIMParallelScheduler", "DDPMParallelScheduler", "EDMDPMSolverMultistepScheduler"),
    *("IPNDMScheduler", "LCMScheduler", "SASolverScheduler", "TCDScheduler"),
)
SCHEDULERS = (*(scheduler.name for scheduler in KarrasDiffusionSchedulers), *OTHER_SCHEDULERS)
SCHEDULER_OPTIONS = {
    "PNDMScheduler": {"skip_prk_steps": True},  # as SD1.5; two steps are too few without
    "DPMSolverSDEScheduler": {"noise_sampler_seed": 0},  # its noise is not the generator's
}
# They call the UNet with numbers that are no training timesteps.
OTHER_TIMESTEPS = ("EDMDPMSolverMultistepScheduler", "EDMEulerScheduler", "IPNDMScheduler")


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
        layer = select_layers(unet)[0]
        layer.attn.register_forward_pre_hook(
            lambda *_: seen.append(layer.avq_state.sizes.get().num_refined)
        )
        draw(set_num_refined(pipe, {1000: 0, 500: 4}), height=64, width=64)
        assert (seen[0], seen[-1]) == (0, 4)

    def check_refused(self, pipe):
        """What needs timesteps says so, each time and in inference mode, and nothing else does."""
        sizes = {"height": 64, "width": 64}
        refused = pytest.raises(ValueError, match=r"timesteps fall from 1000 to 0, but got one wi")
        with scalecrafter(pipe, 256, 256), refused:
            draw(pipe, height=256, width=256)
        draw(pipe, **sizes)
        set_num_refined(pipe, {1000: 0, 500: 4})
        for mode in (torch.no_grad, torch.no_grad, torch.inference_mode):
            with mode(), refused:
                draw(pipe, **sizes)


class TestOutOfMemory:
    """In mid-generation: the pipeline draws the same images afterwards, with AVQ and without."""

    @pytest.mark.parametrize("call", [1, 9, 17])  # of 24: six layers, four steps
    def test_at_any_layer(self, pipe, codebooks, call):
        """Catches what a call leaves half-done: a schedule's step, an order of queries."""
        exact = draw(pipe)
        apply_avq(pipe, codebooks)
        set_num_refined(pipe, {1000: 1, 501: 4})
        avq = draw(pipe)

        def run_out(*_):
            if next(calls) == call:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        for mode in (avq_disabled(pipe), nullcontext()):
            calls = count(1)
            layers = [pipe.unet.get_submodule(name) for name in codebooks.layer_specs]
            handles = [layer.to_out[0].register_forward_hook(run_out) for layer in layers]
            with pytest.raises(torch.OutOfMemoryError), mode:
                draw(pipe, num_inference_steps=4)
            for handle in handles:
                handle.remove()
        assert torch.equal(draw(pipe), avq)
        assert torch.equal(draw(remove_avq(pipe)), exact)

    @pytest.mark.gpu
    def test_of_a_gpu(self, pipe, codebooks):
        pipe.to("cuda")
        exact = draw(pipe)
        apply_avq(pipe, codebooks, route="always")
        avq = draw(pipe)
        torch.cuda.empty_cache()
        size = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**27) / size)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                draw(pipe, height=2048, width=2048)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.equal(draw(pipe), avq)
        assert torch.equal(draw(remove_avq(pipe)), exact)


class TestSummary:
    def test_rows(self, pipe, codebooks):
        """Catches a summary that reports intentions instead of what ran."""
        apply_avq(pipe, codebooks)
        rows = {row.name: row for row in summary(pipe).rows}
        assert len(rows) == 10
        assert (rows[LAYER].num_tokens, rows[LAYER].calls) == (None, {})
        draw(pipe, width=192)
        with avq_disabled(pipe):
            draw(pipe, num_inference_steps=1)
            assert runs(pipe) == {"exact: disabled"}
        rows = {row.name: row for row in summary(pipe).rows}
        row = rows[LAYER]
        assert (row.level, row.num_heads, row.head_dim, row.config) == (0, 2, 8, "M4P2C2")
        assert row.runs == "AVQ (torch backend)"
        assert row.calls == {"AVQ": 2, "disabled": 1}
        assert row.num_tokens == 256
        other = rows["mid_block.attentions.0.transformer_blocks.0.attn1"]
        assert (other.level, other.config, other.runs) == (3, "", "exact: AttnProcessor2_0")

    def test_table(self, pipe, codebooks):
        """Catches a column shifted against its header."""
        draw(apply_avq(pipe, codebooks))
        report = summary(pipe)
        header, first, *rest = str(report).splitlines()
        assert len(rest) == 9
        assert header.split() == ["layer", "level", "heads", "config", "runs", "tokens", "calls"]
        cells = [LAYER, "0", "2x8", "M4P2C2", "AVQ (torch backend)", "256", "AVQ: 2"]
        assert first.split() == " ".join(cells).split()
        assert first.index("M4P2C2") == header.index("config")
        assert report.cells()[1] == cells


def test_overlapping_disabled_blocks(pipe, codebooks):
    """Two threads that share a UNet: catches AVQ that is back early, and one that stays off."""
    apply_avq(pipe, codebooks)
    first, second = avq_disabled(pipe), avq_disabled(pipe)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert runs(pipe) == {"exact: disabled"}
    second.__exit__(None, None, None)
    assert runs(pipe) == {"AVQ"}
