"""Pipelines with a transformer, and what users switch on beside AVQ."""

import pytest
import torch
from accelerate import cpu_offload
from checks import differ, kinds
from diffusers import (
    FluxControlNetModel,
    FluxImg2ImgPipeline,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusion3PAGPipeline,
)
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from peft import LoraConfig, get_peft_model
from tiny_transformers import (
    CONFIG,
    EXACT,
    choosy,
    draw,
    flux_pipe,
    flux_transformer,
    inputs,
    predict,
    sd3_pipe,
    sd3_transformer,
    tiny_vae,
    wan_transformer,
)

from avq_diffusers import apply_avq, avq_disabled, remove_avq, set_num_refined, summary

feature = pytest.mark.feature
PIPES = [
    pytest.param(sd3_pipe, id="sd3", marks=feature("SD3")),
    pytest.param(flux_pipe, id="flux", marks=feature("Flux")),
]
LORA = LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)


def check_close(pipe, **arguments):
    """With all keys exact the image is the exact one, and every call ran AVQ."""
    exact = draw(pipe, **arguments)
    close = draw(apply_avq(pipe, EXACT), **arguments)
    assert kinds(pipe) == {"AVQ"}
    assert (close - exact).norm() < 1e-4 * exact.norm()
    assert torch.equal(draw(remove_avq(pipe), **arguments), exact)
    return exact


@pytest.mark.parametrize("make", PIPES)
class TestPipelines:
    def test_on_and_off(self, make):
        pipe = make()
        exact = check_close(pipe)
        avq = draw(apply_avq(pipe, CONFIG))
        assert differ(avq, exact)
        assert torch.equal(draw(pipe), avq)
        with avq_disabled(pipe):
            assert torch.equal(draw(pipe), exact)
        set_num_refined(pipe, 0)
        assert differ(draw(pipe), avq)
        assert {row.config for row in summary(pipe).rows} == {"M4P0C2"}

    def test_saving_leaves_avq_out(self, make, tmp_path):
        pipe = make()
        exact = draw(pipe)
        apply_avq(pipe, CONFIG).save_pretrained(tmp_path)
        assert torch.equal(draw(make().from_pretrained(tmp_path)), exact)

    @feature("LoRA of transformers")
    def test_lora(self, make):
        pipe = make()
        plain = draw(pipe)
        pipe.transformer.add_adapter(LORA)
        assert differ(check_close(pipe), plain)

    @feature("offload of transformers")
    @pytest.mark.parametrize("offload_type", ["leaf_level", "block_level"])
    def test_group_offload(self, make, offload_type):
        pipe = make()
        pipe.transformer.enable_group_offload(
            onload_device=torch.device("cpu"),
            offload_device=torch.device("cpu"),
            offload_type=offload_type,
            num_blocks_per_group=1 if offload_type == "block_level" else None,
        )
        check_close(pipe)

    @feature("offload of transformers")
    def test_sequential_offload(self, make):
        """Between calls the weights are on the meta device, which has no route to learn."""
        pipe = make()
        cpu_offload(pipe.transformer)
        check_close(pipe)

    @feature("layerwise casting of transformers")
    def test_layerwise_casting(self, make):
        pipe = make()
        pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
        check_close(pipe)


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

    @feature("offload of transformers")
    @pytest.mark.parametrize("make", PIPES)
    @pytest.mark.parametrize(
        "offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"]
    )
    def test_offload(self, make, offload):
        """Catches an order on the device that a layer has left."""
        pipe = make()
        getattr(pipe, offload)()
        exact = draw(pipe)
        close = draw(apply_avq(pipe, EXACT, route="always"))
        assert kinds(pipe) == {"AVQ"}
        assert (close - exact).norm() < 1e-2 * exact.norm()


@feature("img2img of SD3")
def test_img2img():
    pipe = sd3_pipe(StableDiffusion3Img2ImgPipeline)
    check_close(pipe, image=torch.rand(1, 3, 32, 48), strength=1.0)


@feature("inpainting of SD3")
def test_inpainting():
    transformer = sd3_transformer(in_channels=16, out_channels=16)
    pipe = sd3_pipe(StableDiffusion3InpaintPipeline, transformer=transformer, vae=tiny_vae(16))
    mask = torch.zeros(1, 1, 32, 48)
    mask[..., :24] = 1
    check_close(pipe, image=torch.rand(1, 3, 32, 48), mask_image=mask, strength=1.0)


@feature("img2img of Flux")
def test_flux_img2img():
    check_close(flux_pipe(FluxImg2ImgPipeline), image=torch.rand(1, 3, 32, 48), strength=1.0)


@pytest.mark.parametrize("make", PIPES)
def test_batches_and_no_guidance(make):
    check_close(make(), num_images_per_prompt=2, guidance_scale=1.0)


@feature("skip-layer guidance of SD3")
def test_skip_layer_guidance():
    pipe = sd3_pipe()
    guided = check_close(
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
    """Weights of an IP-Adapter, and embeddings for it."""
    generator = torch.Generator().manual_seed(3)
    layers = {}
    for i in range(len(transformer.attn_processors)):
        layer = SD3IPAdapterJointAttnProcessor2_0(128, 128, 64, 16)
        layers |= {f"{i}.{name}": x for name, x in layer.state_dict().items()}
    layers = {name: torch.randn(x.shape, generator=generator) / 8 for name, x in layers.items()}
    return layers


@feature("IP-Adapter of SD3 (kept)")
@pytest.mark.parametrize("avq_first", [True, False])
def test_ip_adapter_keeps_its_layers(avq_first):
    model = sd3_transformer()
    exact = predict(model)
    if avq_first:
        avq = predict(apply_avq(model, CONFIG))
    processors = model._convert_ip_adapter_attn_to_diffusers(ip_adapter(model))
    embeddings = {
        "ip_hidden_states": torch.randn(2, 4, 128),
        "temb": torch.randn(2, 16),
    }
    before = model.attn_processors
    model.set_attn_processor(dict(processors))
    if avq_first:
        with pytest.warns(UserWarning, match="keep SD3IPAdapterJointAttnProcessor2_0: trans"):
            guided = predict(model, joint_attention_kwargs=dict(embeddings))
    else:
        with pytest.warns(UserWarning, match="keep SD3IPAdapterJointAttnProcessor2_0: trans"):
            apply_avq(model, CONFIG)
        guided = predict(model, joint_attention_kwargs=dict(embeddings))
    assert differ(guided, exact)
    name = "SD3IPAdapterJointAttnProcessor2_0"
    assert [row.runs for row in summary(model).rows] == [f"custom: {name}"] * 5
    assert [row.calls[name] for row in summary(model).rows] == [1] * 5
    if avq_first:
        model.set_attn_processor(before)
        assert torch.equal(predict(model), avq)
    else:
        assert list(remove_avq(model).attn_processors.values()) == list(processors.values())


@feature("ControlNet of SD3")
def test_controlnet():
    from diffusers import SD3ControlNetModel

    torch.manual_seed(1)
    config = dict(sd3_transformer().config) | {"num_layers": 2, "dual_attention_layers": ()}
    controlnet = SD3ControlNetModel.from_config(config).eval()
    for name, weight in controlnet.named_parameters():
        if "controlnet_blocks" in name:
            torch.nn.init.normal_(weight, std=0.1)
    pipe = sd3_pipe(StableDiffusion3ControlNetPipeline, controlnet=controlnet)
    check_close(pipe, control_image=torch.rand(1, 3, 32, 48))


@feature("ControlNet of Flux")
def test_flux_controlnet():
    torch.manual_seed(1)
    controlnet = choosy(FluxControlNetModel.from_config(flux_transformer().config))
    for name, weight in controlnet.named_parameters():
        if name.startswith("controlnet_"):
            torch.nn.init.normal_(weight, std=0.1)
    model = flux_transformer()
    arguments = inputs(model)

    def run():
        residuals, single = controlnet(
            **arguments, controlnet_cond=torch.ones(2, 96, 4), return_dict=False
        )
        return predict(
            model,
            controlnet_block_samples=residuals,
            controlnet_single_block_samples=single,
        )

    with torch.no_grad():
        exact = run()
        apply_avq(model, EXACT)
        apply_avq(controlnet, EXACT)
        close = run()
    assert differ(exact, predict(model))
    assert (close - exact).norm() < 1e-5 * exact.norm()
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


def test_two_transformers():
    """Wan 2.2 has one for each half of the steps."""

    class Pipe:
        transformer, transformer_2 = wan_transformer(), wan_transformer()

    pipe = apply_avq(Pipe(), CONFIG)
    predict(pipe.transformer_2)
    assert [(row.name, row.calls) for row in summary(pipe).rows] == [
        ("blocks.0.attn1", {}),
        ("blocks.1.attn1", {}),
        ("transformer_2.blocks.0.attn1", {"AVQ": 1}),
        ("transformer_2.blocks.1.attn1", {"AVQ": 1}),
    ]
    with avq_disabled(pipe):
        predict(pipe.transformer_2)
    remove_avq(pipe)
    assert not any(row.config for row in summary(pipe).rows)


def test_neither_unet_nor_transformer():
    class Pipe:
        pass

    with pytest.raises(TypeError, match="expected a pipeline with a unet"):
        apply_avq(Pipe())
