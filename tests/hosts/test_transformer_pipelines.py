"""Pipelines with a transformer, and what users switch on beside AVQ."""

import inspect
from functools import partial
from types import SimpleNamespace

import diffusers
import pytest
import torch
from accelerate import cpu_offload
from checks import calls, differ, kinds
from diffusers import (
    CogVideoXDDIMScheduler,
    FasterCacheConfig,
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    FluxControlNetModel,
    FluxImg2ImgPipeline,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SanaTransformer2DModel,
    SD3ControlNetModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusion3PAGPipeline,
    TaylorSeerCacheConfig,
)
from diffusers.models.attention_processor import (
    JointAttnProcessor2_0,
    SD3IPAdapterJointAttnProcessor2_0,
)
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from tiny import active, quiet
from tiny_transformers import (
    CONFIG,
    EXACT,
    FLUX3,
    choosy,
    draw,
    flux_pipe,
    flux_transformer,
    inputs,
    padding,
    predict,
    sd3_pipe,
    sd3_transformer,
    tiny_transformer,
    tiny_vae,
)

from avq_diffusers import AVQConfig, apply_avq, remove_avq, summary
from avq_diffusers.cli.codebooks import codeword_source
from avq_diffusers.cli.request import ModelRequest
from avq_diffusers.hosts.models.registry import find_model

feature = pytest.mark.feature


def case(name, *values):
    """That stands for a feature."""
    return pytest.param(*values, id=name, marks=feature(name))


PIPES = [case("SD3", sd3_pipe), case("Flux", flux_pipe)]
IMAGE = {"image": torch.rand(1, 3, 32, 48), "strength": 1.0}
LEFT_HALF = (torch.arange(48) < 24).float().expand(1, 1, 32, -1)
OFFLOAD = "offload of transformers"
NUM_STEPS = 3  # with a cache
LORA = LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)


@pytest.mark.parametrize("make", [sd3_pipe, flux_pipe])
def test_default_sizes(make):
    """Catches another default in commands."""
    pipe, sizes = make(), "M64C8T1e-4"
    request = ModelRequest("model", exact=("transformer_blocks.0",))
    config = codeword_source(pipe, request)
    assert (str(config), config.exact) == (sizes, ("transformer_blocks.0",))
    assert {row.config for row in summary(apply_avq(pipe)).rows} == {sizes}


def check_avq(pipe, **arguments):
    """With all keys exact the image is the exact one, with fewer another, and removal undoes it."""
    exact = draw(pipe, **arguments)
    close = draw(apply_avq(pipe, EXACT), **arguments)
    assert kinds(pipe) == {"AVQ"}
    assert (close - exact).norm() < 1e-4 * exact.norm()
    assert differ(draw(apply_avq(pipe, CONFIG), **arguments), exact)
    assert torch.equal(draw(remove_avq(pipe), **arguments), exact)
    return exact


def group_offload(level):
    device, count = torch.device("cpu"), {"num_blocks_per_group": 1} if "block" in level else {}
    return lambda model: model.enable_group_offload(device, device, level, **count)


def active_controlnet(cls, config):
    torch.manual_seed(1)
    return active(choosy(cls.from_config(config)))


@pytest.mark.parametrize("make", PIPES)
class TestPipelines:
    def test_batches_and_files(self, make, tmp_path):
        """Saved without AVQ."""
        pipe = make()
        check_avq(pipe, num_images_per_prompt=2, guidance_scale=1.0)
        exact = draw(pipe)
        apply_avq(pipe, CONFIG).save_pretrained(tmp_path)
        assert torch.equal(draw(type(pipe).from_pretrained(tmp_path)), exact)

    def test_timesteps(self, make):
        """The training timesteps that AVQ reads are those of the scheduler."""
        pipe, read = make(), []
        timesteps = find_model(pipe.transformer).timesteps
        with pipe.transformer.register_forward_pre_hook(
            lambda _, args, kwargs: read.append(timesteps.read(args, kwargs)), with_kwargs=True
        ):
            draw(pipe, num_inference_steps=5)
        assert len(set(read)) == 5
        assert read == pytest.approx(pipe.scheduler.timesteps.tolist(), abs=0.006)

    @feature("LoRA of transformers (load/fuse/unload)")
    def test_lora(self, make, tmp_path):
        """One that comes and goes while AVQ is on."""
        pipe, source = make(), make().transformer
        source.add_adapter(LORA)
        pipe.save_lora_weights(tmp_path, get_peft_model_state_dict(source))
        plain = draw(apply_avq(pipe, CONFIG))
        pipe.load_lora_weights(tmp_path)
        adapted = draw(pipe)
        assert differ(adapted, plain)
        check_avq(remove_avq(pipe))
        apply_avq(pipe, CONFIG)
        for change, expected in (
            (pipe.fuse_lora, adapted),
            (pipe.unfuse_lora, adapted),
            (pipe.unload_lora_weights, plain),
        ):
            change()
            assert (draw(pipe) - expected).norm() < 1e-4 * expected.norm()
            assert kinds(pipe) == {"AVQ"}


def mag_cache(pipe):
    steps = {"retention_ratio": 0.2, "num_inference_steps": NUM_STEPS, "max_skip_steps": 1}
    return MagCacheConfig(threshold=1.0, mag_ratios=[1.0] * NUM_STEPS, **steps)


def taylorseer(pipe, **options):
    every_other = {"cache_interval": 2, "disable_cache_before_step": 2}
    return TaylorSeerCacheConfig(taylor_factors_dtype=torch.float32, **every_other, **options)


def broadcast(pipe):
    return PyramidAttentionBroadcastConfig(2, current_timestep_callback=lambda: 500)


def faster_cache(pipe):
    return FasterCacheConfig(
        spatial_attention_timestep_skip_range=(-1, 999),
        is_guidance_distilled=True,
        attention_weight_callback=lambda module: 0.3,
        current_timestep_callback=lambda: pipe.current_timestep,
    )


@pytest.mark.parametrize(
    "cache",
    [
        case("FirstBlockCache", lambda pipe: FirstBlockCacheConfig(threshold=1e9)),
        case("MagCache", mag_cache),
        case("TaylorSeer", taylorseer),
        case("TaylorSeer", partial(taylorseer, use_lite_mode=True)),
        case("PyramidAttentionBroadcast", broadcast),
        case("FasterCache", faster_cache),
    ],
)
def test_caches(cache):
    """Catches AVQ that waits for a layer or block which the cache skips, and another result where
    the cache comes after AVQ."""
    pipe = flux_pipe(transformer=flux_transformer(in_channels=16, num_single_layers=1))
    steps = {"num_inference_steps": NUM_STEPS}
    plain, config = draw(pipe, **steps), cache(pipe)
    if not FLUX3 and isinstance(config, (FirstBlockCacheConfig, TaylorSeerCacheConfig)):
        pytest.skip("needs diffusers 0.42, whose Flux names the context of a cache")
    pipe.transformer.enable_cache(config)
    exact = check_avq(pipe, **steps)
    assert not torch.equal(exact, plain)
    avq = draw(apply_avq(pipe, CONFIG), **steps)
    found = calls(pipe)
    assert found[-1]["AVQ"] < NUM_STEPS
    pipe.transformer.disable_cache()
    apply_avq(pipe, CONFIG)
    pipe.transformer.enable_cache(config)
    assert torch.equal(draw(pipe, **steps), avq)
    assert calls(pipe) == found
    assert torch.equal(draw(remove_avq(pipe), **steps), exact)
    pipe.transformer.disable_cache()
    assert torch.equal(draw(pipe, **steps), plain)


@pytest.mark.parametrize(
    ("make", "prepare"),
    [
        case(OFFLOAD, sd3_pipe, group_offload("leaf_level")),
        case(OFFLOAD, flux_pipe, group_offload("block_level")),
        case(OFFLOAD, sd3_pipe, cpu_offload),  # to the meta device, which has no route to learn
        case(
            "layerwise casting of transformers",
            flux_pipe,
            lambda model: model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),
        ),
    ],
)
def test_beside(make, prepare):
    pipe = make()
    prepare(pipe.transformer)
    check_avq(pipe)


@pytest.mark.gpu
class TestOnGPU:
    @pytest.mark.parametrize("make", PIPES)
    def test_kernels(self, make):
        """Catches kernels that are not what runs, and sinks that they miss."""
        pipe = make().to("cuda", torch.bfloat16)
        exact = draw(pipe).float()
        close = draw(apply_avq(pipe, EXACT, route="always")).float()
        assert {row.runs for row in summary(pipe).rows} == {"AVQ (triton backend)"}
        assert (close - exact).norm() < 5e-2 * exact.norm()
        coarse = draw(apply_avq(pipe, CONFIG, route="always")).float()
        assert (coarse - exact).norm() > (close - exact).norm()

    @feature(OFFLOAD)
    @pytest.mark.parametrize("make", PIPES)
    @pytest.mark.parametrize("offload", ["model", "sequential"])
    def test_offload(self, make, offload):
        """Catches an order on the device that a layer has left."""
        pipe = make()
        getattr(pipe, f"enable_{offload}_cpu_offload")()
        exact = draw(pipe)
        close = draw(apply_avq(pipe, EXACT, route="always"))
        assert kinds(pipe) == {"AVQ"}
        assert (close - exact).norm() < 1e-2 * exact.norm()


def inpainting_pipe():
    transformer = sd3_transformer(in_channels=16, out_channels=16)
    return sd3_pipe(StableDiffusion3InpaintPipeline, transformer=transformer, vae=tiny_vae(16))


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        case("img2img of SD3", lambda: sd3_pipe(StableDiffusion3Img2ImgPipeline), IMAGE),
        case("inpainting of SD3", inpainting_pipe, IMAGE | {"mask_image": LEFT_HALF}),
        case("img2img of Flux", lambda: flux_pipe(FluxImg2ImgPipeline), IMAGE),
    ],
)
def test_images(make, arguments):
    check_avq(make(), **arguments)


@feature("skip-layer guidance of SD3")
def test_skip_layer_guidance():
    pipe = sd3_pipe()
    guided = check_avq(
        pipe,
        skip_guidance_layers=[1],
        skip_layer_guidance_start=0.0,
        skip_layer_guidance_stop=1.0,
        num_inference_steps=3,
    )
    assert differ(guided, draw(pipe, num_inference_steps=3))


@feature("PAG of SD3 (runs exact)")
def test_pag():
    """PAG puts its processors on its layers while an image is generated."""
    transformer = sd3_transformer(dual_attention_layers=())  # its processors fail in the others
    pipe = sd3_pipe(
        StableDiffusion3PAGPipeline, transformer=transformer, pag_applied_layers=["blocks.1"]
    )
    arguments = {"pag_scale": 3.0, "guidance_scale": 1.0}
    exact = draw(pipe, **arguments)
    apply_avq(pipe, EXACT)
    with pytest.warns(UserWarning, match=r"keep PAGJoint\w+: transformer_blocks.1.attn\."):
        close = draw(pipe, **arguments)
    assert (close - exact).norm() < 1e-4 * exact.norm()
    assert kinds(pipe) == {"AVQ", "PAGJointAttnProcessor2_0"}
    assert torch.equal(draw(remove_avq(pipe), **arguments), exact)


def ip_adapter(transformer):
    """Weights of an IP-Adapter."""
    generator = torch.Generator().manual_seed(3)
    layers = {}
    for i in range(len(transformer.attn_processors)):
        layer = SD3IPAdapterJointAttnProcessor2_0(128, 128, 64, 16)
        layers |= {f"{i}.{name}": x for name, x in layer.state_dict().items()}
    return {name: torch.randn(x.shape, generator=generator) / 8 for name, x in layers.items()}


@feature("IP-Adapter of SD3 (kept)")
def test_ip_adapter_keeps_its_layers():
    """Loaded after AVQ, or before."""
    model, name = sd3_transformer(), "SD3IPAdapterJointAttnProcessor2_0"
    exact = predict(model)
    avq = predict(apply_avq(model, CONFIG))
    before = model.attn_processors
    own = model._convert_ip_adapter_attn_to_diffusers(ip_adapter(model))
    embeddings = {"ip_hidden_states": torch.randn(2, 4, 128), "temb": torch.randn(2, 16)}
    model.set_attn_processor(dict(own))
    with pytest.warns(UserWarning, match=f"keep {name}: trans"):
        guided = predict(model, joint_attention_kwargs=embeddings)
    assert differ(guided, exact)
    assert [row.runs for row in summary(model).rows] == [f"custom: {name}"] * 5
    assert [row.calls[name] for row in summary(model).rows] == [1] * 5
    model.set_attn_processor(before)
    assert torch.equal(predict(model), avq)
    remove_avq(model).set_attn_processor(dict(own))
    assert torch.equal(predict(model, joint_attention_kwargs=embeddings), guided)
    with pytest.warns(UserWarning, match=f"keep {name}: trans"):
        apply_avq(model, CONFIG)
    assert torch.equal(predict(model, joint_attention_kwargs=embeddings), guided)
    assert kinds(model) == {name}
    assert remove_avq(model).attn_processors == own


@feature("fused projections of SD3 (replace AVQ: reported)")
def test_fused_projections_of_sd3():
    model = sd3_transformer(qk_norm=None, dual_attention_layers=())
    exact = predict(model)
    avq = predict(apply_avq(model, CONFIG))
    model.fuse_qkv_projections()
    with pytest.warns(UserWarning, match="FusedJointAttnProcessor2_0"):
        fused = predict(model)
    assert not differ(fused, exact)
    model.unfuse_qkv_projections()
    assert torch.equal(predict(model), avq)


def test_the_processor_of_sd3_elsewhere():
    """Catches AVQ in a layer that is to stay exact, and a processor that removal leaves.

    An unloaded IP-Adapter leaves new processors of the same class.
    """
    model = sd3_transformer()
    exact = predict(model)
    apply_avq(model, AVQConfig.parse("M4P2C2", query_tile=16, exact=("transformer_blocks.0",)))
    avq = predict(model)
    for processor in (model.transformer_blocks[1].attn.processor, None):
        rebuilt = {name: type(x)() for name, x in model.attn_processors.items()}
        model.set_attn_processor(processor or rebuilt)
        assert torch.equal(predict(model), avq)
    assert torch.equal(predict(remove_avq(model)), exact)
    assert {type(x) for x in model.attn_processors.values()} == {JointAttnProcessor2_0}


@feature("ControlNet of SD3")
def test_controlnet():
    """With AVQ in the ControlNet too."""
    config = dict(sd3_transformer().config) | {"num_layers": 2, "dual_attention_layers": ()}
    controlnet = active_controlnet(SD3ControlNetModel, config)
    pipe = sd3_pipe(StableDiffusion3ControlNetPipeline, controlnet=controlnet)
    image = {"control_image": torch.rand(1, 3, 32, 48)}
    exact = check_avq(pipe, **image)
    assert differ(exact, draw(pipe, **image, controlnet_conditioning_scale=0.0))
    apply_avq(controlnet, EXACT)
    both = draw(apply_avq(pipe, EXACT), **image)
    assert (both - exact).norm() < 1e-4 * exact.norm()
    assert kinds(controlnet) == {"AVQ"}


@feature("ControlNet of Flux")
def test_flux_controlnet():
    model = flux_transformer()
    controlnet = active_controlnet(FluxControlNetModel, model.config)
    arguments = inputs(model)

    @torch.no_grad()
    def run():
        condition = {"controlnet_cond": torch.ones(2, 96, 4), "return_dict": False}
        residuals, single = controlnet(**arguments, **condition)
        names = ("controlnet_block_samples", "controlnet_single_block_samples")
        return predict(model, **dict(zip(names, (residuals, single), strict=True)))

    exact = run()
    apply_avq(model, EXACT)
    apply_avq(controlnet, EXACT)
    assert differ(exact, predict(model))
    assert (run() - exact).norm() < 1e-5 * exact.norm()
    assert kinds(controlnet) == {"AVQ"}


@feature("PEFT model of a transformer")
def test_peft_model():
    model = sd3_transformer()
    wrapped = get_peft_model(model, LORA)
    exact = predict(model)
    apply_avq(wrapped, EXACT)
    assert (predict(model) - exact).norm() < 1e-5 * exact.norm()
    assert summary(wrapped).rows[0].name == "transformer_blocks.0.attn"
    remove_avq(wrapped)
    assert torch.equal(predict(model), exact)


TEXT, SEEN = torch.randn(1, 24, 32), {"prompt_attention_mask": padding()[1:].long()}
NEGATIVE = {"negative_prompt_embeds": TEXT, "negative_prompt_attention_mask": padding()[:1].long()}
POOLED = {"pooled_prompt_embeds": torch.ones(1, 64)}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("CogVideoX", {"num_frames": 9, "negative_prompt_embeds": TEXT}),
        ("Mochi", {"num_frames": 13, **SEEN, **NEGATIVE}),
        ("HunyuanVideo", {"num_frames": 9, **SEEN, **POOLED}),
    ],
)
def test_calls_of_video_pipelines(name, arguments):
    """Catches masks, batches and sizes that only the tests' own calls of models have."""
    cls = getattr(diffusers, f"{name}Pipeline")
    scheduler = CogVideoXDDIMScheduler if "Cog" in name else FlowMatchEulerDiscreteScheduler
    parts = dict.fromkeys(inspect.signature(cls).parameters)
    parts |= {
        "transformer": tiny_transformer(f"{name}Transformer3DModel"),
        "scheduler": scheduler(),
    }
    pipe = quiet(cls(**parts))
    arguments = arguments | {"prompt_embeds": TEXT, "height": 128, "width": 192}

    def run():
        common = {"num_inference_steps": 2, "output_type": "latent"}
        return pipe(**arguments, **common, generator=torch.Generator().manual_seed(0)).frames

    exact = run()
    apply_avq(pipe, EXACT)
    assert (run() - exact).norm() < 1e-5 * exact.norm()
    assert kinds(pipe) == {"AVQ"}


def test_other_models_are_refused():
    sizes = dict.fromkeys(("num_attention_heads", "num_cross_attention_heads", "num_layers"), 1)
    widths = dict.fromkeys(("cross_attention_dim", "caption_channels", "attention_head_dim"), 8)
    widths["cross_attention_head_dim"] = 8
    other = SanaTransformer2DModel(**sizes, **widths, sample_size=4)
    for second in (other, torch.nn.ReLU()):
        pipe = SimpleNamespace(transformer=sd3_transformer(), transformer_2=second)
        with pytest.raises(TypeError, match=f"not know the attention of {type(second).__name__}"):
            apply_avq(pipe)
