"""AVQ in diffusers' pipelines, each around a tiny UNet of its model's topology.

The marker `feature` names the feature of `eval/results/features.md` that a test stands for.
"""

from dataclasses import replace

import diffusers
import pytest
import torch
from checks import check_on_and_off, differ, draw_once, kinds, runs
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers
from tiny import (
    CONFIG,
    LAYER,
    active,
    adapter_pipe,
    draw,
    motion_adapter,
    quiet,
    random_codebooks,
    random_image,
    sd2_unet,
    sdxl_pipe,
    sdxl_text_encoder,
    tiny_components,
    tiny_pipe,
    tiny_unet,
    traced_unet,
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

feature = pytest.mark.feature


def sd2_pipe():
    pipe = tiny_pipe(sd2_unet())
    pipe.scheduler.register_to_config(prediction_type="v_prediction")
    return pipe


def lcm_pipe():
    pipe = tiny_pipe(tiny_unet(time_cond_proj_dim=16), diffusers.LatentConsistencyModelPipeline)
    pipe.scheduler = diffusers.LCMScheduler.from_config(pipe.scheduler.config)
    return pipe


def upscaler():
    components = tiny_components(tiny_unet(in_channels=7, num_class_embeds=1000))
    components["vae"].register_to_config(scaling_factor=0.08333)
    components["low_res_scheduler"] = diffusers.DDPMScheduler()
    return quiet(diffusers.StableDiffusionUpscalePipeline(**components))


def refiner():
    """Four levels, attention at 1 and 2, two transformer blocks each."""
    down, up = ["DownBlock2D"] * 4, ["UpBlock2D"] * 4
    down[1:3], up[1:3] = ["CrossAttnDownBlock2D"] * 2, ["CrossAttnUpBlock2D"] * 2
    unet = tiny_unet(
        down_block_types=down,
        up_block_types=up,
        transformer_layers_per_block=2,
        attention_head_dim=(2, 4, 8, 8),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=72,  # 5 time ids of 8, and the text
    )
    return sdxl_pipe(
        unet,
        diffusers.StableDiffusionXLImg2ImgPipeline,
        text_encoder=None,  # the refiner knows the second one only
        text_encoder_2=sdxl_text_encoder(CLIPTextModelWithProjection, 32),
        requires_aesthetics_score=True,
    )


def of(cls, **unet):
    return lambda: tiny_pipe(tiny_unet(**unet), cls)


def case(make, *marks, others=(), **arguments):
    """A pipeline, arguments of its call, and others that change what it draws."""
    return pytest.param(make, arguments, dict(others), marks=marks)


IMAGE = {"image": random_image(128)}
MASKED = IMAGE | {"mask_image": torch.ones(1, 1, 128, 128).tril(), "height": 128, "width": 128}
HEN, NOBODY = "a blue hen", {"negative_prompt": None}
PIX2PIX = of(diffusers.StableDiffusionInstructPix2PixPipeline, in_channels=8)
PIPELINES = [
    case(tiny_pipe, feature("SD1.5"), feature("text to image")),
    case(sd2_pipe, feature("SD 2.x")),
    case(sdxl_pipe, feature("SDXL base"), others={"original_size": (64, 64)}),
    case(tiny_pipe, feature("negative prompts"), negative_prompt=HEN, others=NOBODY),
    case(tiny_pipe, feature("no guidance"), guidance_scale=1.0),
    case(lcm_pipe, feature("LCM")),
    case(of(diffusers.StableDiffusionImg2ImgPipeline), feature("img2img"), strength=1.0, **IMAGE),
    case(of(diffusers.StableDiffusionInpaintPipeline), feature("inpainting"), **MASKED),
    case(
        of(diffusers.StableDiffusionInpaintPipeline, in_channels=9),
        feature("inpainting model (9 channels)"),
        **MASKED,
    ),
    case(PIX2PIX, feature("InstructPix2Pix"), **IMAGE),  # its guidance has three parts of a batch
    case(upscaler, feature("upscaling"), image=random_image(16)),
    case(refiner, feature("SDXL refiner"), strength=1.0, **IMAGE),
    case(
        *(adapter_pipe, feature("T2I-Adapter")), others={"adapter_conditioning_scale": 0.0}, **IMAGE
    ),
]


@pytest.mark.parametrize(("make", "arguments", "others"), PIPELINES)
def test_on_and_off(make, arguments, others):
    """Catches a number of parts of a batch taken for granted, levels counted from the first block
    with attention, and inputs of the UNet that get lost on the way."""
    pipe = make()
    levels = (1, 2) if pipe.unet.config.addition_embed_type else (0, 1)
    codebooks = random_codebooks(pipe.unet, replace(CONFIG, levels=levels))
    arguments = arguments | {"num_inference_steps": 1}
    _, avq = check_on_and_off(pipe, codebooks, **arguments)
    if others:
        assert differ(draw(apply_avq(pipe, codebooks), **arguments | others), avq)


@feature("batches")
def test_batches(pipe, codebooks):
    """Catches images of a batch that see each other's keys."""
    apply_avq(pipe, codebooks)
    arguments = {"num_inference_steps": 1, "height": 64, "width": 64, "output_type": "latent"}
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    batch = pipe(["a fox", "a hen"], generator=generators, **arguments).images
    for index, prompt in enumerate(["a fox", "a hen"]):
        generator = torch.Generator().manual_seed(3 + index)
        alone = pipe(prompt, generator=generator, **arguments).images
        torch.testing.assert_close(batch[index : index + 1], alone, rtol=1e-4, atol=1e-4)


@feature("save_pretrained")
def test_saves_as_a_stock_pipeline(codebooks, tmp_path):
    """Catches a saved folder that only opens where this package is installed."""
    pipe = tiny_pipe(cls=AVQStableDiffusionPipeline)
    exact = draw(pipe)
    pipe.set_attn_processor(AVQProcessor(codebooks))
    avq = draw(pipe)
    pipe.save_pretrained(tmp_path)
    stock = quiet(diffusers.DiffusionPipeline.from_pretrained(tmp_path))
    assert type(stock) is diffusers.StableDiffusionPipeline
    torch.testing.assert_close(draw(stock), exact, rtol=1e-4, atol=1e-4)
    loaded = quiet(AVQStableDiffusionPipeline.from_pretrained(tmp_path))
    loaded.set_attn_processor(AVQProcessor(codebooks))
    torch.testing.assert_close(draw(loaded), avq, rtol=1e-4, atol=1e-4)


@feature("from_pipe")
def test_shared_unet(pipe, codebooks):
    """Catches AVQ lost where `from_pipe` shares the UNet, or removed from one only."""
    apply_avq(pipe, codebooks)
    other = quiet(diffusers.StableDiffusionImg2ImgPipeline.from_pipe(pipe))
    avq = draw(other, image=random_image(128), strength=1.0)
    assert kinds(other) == {"AVQ"}
    remove_avq(other)
    assert differ(draw(other, image=random_image(128), strength=1.0), avq)
    assert kinds(pipe) == set()


def controlnets(unet, number):
    """ControlNets with an effect; before training they have none."""
    found = []
    for seed in range(number):
        torch.manual_seed(seed)
        found.append(active(diffusers.ControlNetModel.from_unet(unet)))
    return found


CONTROLNET = diffusers.StableDiffusionControlNetPipeline
RUN = IMAGE | {"height": 128, "width": 128}
FIT = IMAGE | {"num_inference_steps": 1, "progress": False}


@feature("ControlNet")
def test_controlnet_from_a_unet_with_avq(unet, codebooks):
    """Catches codebooks copied into the ControlNet, whose weights come from this UNet."""
    (reference,), (net,) = controlnets(unet, 1), controlnets(apply_avq(unet, codebooks), 1)
    assert net.state_dict().keys() == reference.state_dict().keys()
    assert {type(p) for p in net.attn_processors.values()} == {AttnProcessor2_0}
    pipe = tiny_pipe(remove_avq(unet), CONTROLNET, controlnet=net)
    exact, _ = check_on_and_off(pipe, codebooks, **RUN)
    assert differ(exact, draw_once(tiny_pipe(unet)))


@feature("AVQ inside the ControlNet")
def test_avq_inside_controlnets(unet, codebooks):
    """Catches AVQ that needs up blocks, and calibration that watches the UNet instead, or with AVQ
    on in a ControlNet."""
    nets = controlnets(unet, 2)
    images = {"image": [random_image(128)] * 2}
    pipe = tiny_pipe(unet, CONTROLNET, controlnet=nets)
    exact = draw(pipe, **RUN | images)
    own = calibrate(pipe, ["a hen"], CONFIG, model=nets[0], **FIT | images)
    assert len(own.layer_specs) == 2  # of the two levels, down blocks only
    with pytest.raises(ValueError, match=r"another model: up_blocks.* \(4 unexpected in all\)"):
        apply_avq(nets[0], codebooks)
    for net in nets:
        apply_avq(net, own)
    assert differ(draw(pipe, **RUN | images), exact)
    rows = [row for row in summary(pipe).rows if row.config]
    assert [row.calls for row in rows] == [{"AVQ": 2}] * 4
    prefixes = {row.name.split(".down_blocks")[0] for row in rows}
    assert prefixes == {"controlnet.nets.0", "controlnet.nets.1"}
    with avq_disabled(pipe):
        assert torch.equal(draw(pipe, **RUN | images), exact)
    again = calibrate(pipe, ["a hen"], CONFIG, model=nets[0], **FIT | images)  # of exact keys
    assert all(map(torch.equal, own.parameters(), again.parameters()))
    pipe.controlnet = nets[0]
    assert {row.name.split(".")[0] for row in summary(pipe).rows if row.config} == {"controlnet"}
    pipe.controlnet = diffusers.MultiControlNetModel(nets)
    assert torch.equal(draw(remove_avq(pipe), **RUN | images), exact)


@feature("PAG")
@pytest.mark.filterwarnings("ignore:AVQ does not run")
def test_pag(codebooks):
    """Catches a processor that PAG's own cannot replace for a run and put back."""
    pipe = tiny_pipe(cls=diffusers.StableDiffusionPAGPipeline, pag_applied_layers=["down_blocks.0"])
    exact = draw(pipe, pag_scale=3.0)
    before = apply_avq(pipe, codebooks).unet.attn_processors
    avq = draw(pipe, pag_scale=3.0)
    assert differ(avq, exact)
    assert differ(avq, draw(pipe, pag_scale=0.0))
    assert pipe.unet.attn_processors == before
    assert torch.equal(draw(remove_avq(pipe), pag_scale=3.0), exact)


@feature("AnimateDiff")
def test_animatediff(codebooks):
    """Catches frames taken for tokens or for one image, and hooks that miss what its UNet passes
    by keyword."""
    components = tiny_components()
    del components["safety_checker"], components["feature_extractor"]
    pipe = quiet(diffusers.AnimateDiffPipeline(**components, motion_adapter=motion_adapter()))
    run = {"num_frames": 2, "height": 64, "width": 96}

    def draw_video(pipe):
        generator = torch.Generator().manual_seed(0)
        options = {"num_inference_steps": 2, "output_type": "latent", "generator": generator}
        return pipe("a red fox", **run, **options).frames

    _, avq = check_on_and_off(pipe, codebooks, draw_video)
    assert differ(avq[:, :, 0], avq[:, :, 1])
    run |= {"num_inference_steps": 1, "progress": False}
    profile = measure_error(pipe, ["a red fox"], AVQConfig.parse("M4C2T1e-4", levels=(0,)), **run)
    assert {one.num_tokens for one in profile.layers} == {8 * 12}


# Those that `KarrasDiffusionSchedulers` leaves out and that sample Stable Diffusion as well.
OTHER_SCHEDULERS = (
    *("DDIMParallelScheduler", "DDPMParallelScheduler", "EDMDPMSolverMultistepScheduler"),
    *("IPNDMScheduler", "LCMScheduler", "SASolverScheduler", "TCDScheduler"),
)
SCHEDULERS = (*(scheduler.name for scheduler in KarrasDiffusionSchedulers), *OTHER_SCHEDULERS)
SCHEDULER = tiny_components()["scheduler"].config
SCHEDULER_OPTIONS = {
    "PNDMScheduler": {"skip_prk_steps": True},  # as SD1.5; two steps are too few without
    "DPMSolverSDEScheduler": {"noise_sampler_seed": 0},  # its noise is not the generator's
}
# They call the UNet with numbers that are no training timesteps.
OTHER_TIMESTEPS = ("EDMDPMSolverMultistepScheduler", "EDMEulerScheduler", "IPNDMScheduler")


@pytest.fixture(scope="module")
def scheduled_pipe():
    return tiny_pipe(traced_unet())


@feature("every scheduler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of diffusers' use of NumPy
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler(scheduled_pipe, name):
    """Catches AVQ that counts on a number of UNet calls or on timesteps of one scheduler."""
    if name == "DPMSolverSDEScheduler":
        pytest.importorskip("torchsde")
    pipe, size = scheduled_pipe, {"height": 64, "width": 64}
    cls = getattr(diffusers, name)
    pipe.scheduler = cls.from_config(SCHEDULER, **SCHEDULER_OPTIONS.get(name, {}))
    set_num_refined(apply_avq(pipe, AVQConfig.parse("M4P2C2", query_tile=16)), {1000: 0, 500: 4})
    if name in OTHER_TIMESTEPS:  # refused each time, also in inference mode
        for mode in (torch.no_grad, torch.no_grad, torch.inference_mode):
            with mode(), pytest.raises(ValueError, match="timesteps fall from 1000 to 0, but got"):
                draw(pipe, **size)
        return
    seen, layer = [], select_layers(pipe.unet)[0]

    def see(*_):
        seen.append(layer.avq_state.spec.get().num_refined)

    with layer.attn.register_forward_pre_hook(see):
        draw(pipe, **size)
    assert (seen[0], seen[-1]) == (0, 4)
    assert kinds(pipe) == {"AVQ"}


def test_summary(pipe, codebooks):
    """Catches a report of intentions instead of what ran, and a column shifted against its
    header."""
    apply_avq(pipe, codebooks)
    rows = {row.name: row for row in summary(pipe).rows}
    assert len(rows) == 7
    assert (rows[LAYER].num_tokens, rows[LAYER].calls) == (None, {})
    draw(pipe, width=192)
    with avq_disabled(pipe):
        draw(pipe, num_inference_steps=1)
        assert runs(pipe) == {"exact: disabled"}
    report = summary(pipe)
    rows = {row.name: row for row in report.rows}
    row = rows[LAYER]
    assert (row.level, row.num_heads, row.head_dim, row.config) == (0, 2, 8, "M4P2C2/stored")
    assert row.calls == {"AVQ": 2, "disabled": 1}
    other = rows["mid_block.attentions.0.transformer_blocks.0.attn1"]
    assert (other.level, other.config, other.runs) == (3, "", "exact: level 3 not chosen")
    header, first, *rest = str(report).splitlines()
    assert len(rest) == 6
    names = ["layer", "level", "heads", "config", "runs", "columns", "tokens", "calls"]
    assert header.split() == names
    calls = "AVQ: 2, disabled: 1"
    short = LAYER.removesuffix(".transformer_blocks.0.attn1")  # what all layers share
    cells = [short, "0", "2x8", "M4P2C2/stored", "AVQ (torch backend)", "8", "256", calls]
    assert first.split() == " ".join(cells).split()
    assert first.index("M4P2C2/stored") == header.index("config")
    assert report.cells()[1] == cells
    without = summary(remove_avq(pipe)).rows
    assert {row.runs for row in without} == {"exact: AttnProcessor2_0"}
