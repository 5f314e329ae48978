"""The models that AVQ serves, each by a real pipeline around a tiny UNet of its topology."""

import pytest
import torch
from diffusers import (
    LatentConsistencyModelPipeline,
    LCMScheduler,
    StableDiffusionInpaintPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from test_ecosystem import check_on_and_off
from tiny import (
    draw,
    random_codebooks,
    sd2_unet,
    sdxl_unet,
    tiny_components,
    tiny_pipe,
    tiny_unet,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from avq_diffusers.config import AVQConfig
from avq_diffusers.plugin.apply import apply_avq

feature = pytest.mark.feature

SDXL_CONFIG = AVQConfig(num_parents=4, num_children=2, num_refined=2, query_tile=16, levels=(1, 2))


def image(size=128):
    return torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(5))


def refiner_unet():
    """SDXL refiner's topology: four levels, attention at 1 and 2, four transformer blocks each."""
    return tiny_unet(
        block_out_channels=(16, 32, 64, 64),
        down_block_types=(
            "DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D",
        ),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=4,
        attention_head_dim=(2, 4, 8, 8),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=72,  # 5 time ids of 8, and the text
    )  # fmt: skip


def text_encoder(cls, config, width):
    torch.manual_seed(width)
    return cls(CLIPTextConfig(**config | {"hidden_size": width, "projection_dim": 32})).eval()


def base_pipe():
    """SDXL's own pipeline: the states of both text encoders lie side by side."""
    components = tiny_components(sdxl_unet())
    config = components["text_encoder"].config.to_dict()
    components["text_encoder"] = text_encoder(CLIPTextModel, config, 16)
    components["text_encoder_2"] = text_encoder(CLIPTextModelWithProjection, config, 16)
    return sdxl_pipe(StableDiffusionXLPipeline, components)


def refiner_pipe():
    """The refiner knows the second text encoder only."""
    components = tiny_components(refiner_unet())
    config = components["text_encoder"].config.to_dict()
    components["text_encoder_2"] = text_encoder(CLIPTextModelWithProjection, config, 32)
    components |= {"text_encoder": None, "requires_aesthetics_score": True}
    return sdxl_pipe(StableDiffusionXLImg2ImgPipeline, components)


def sdxl_pipe(cls, components):
    del components["safety_checker"]
    pipe = cls(**components, tokenizer_2=components["tokenizer"], add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@feature("SD1.5")
def test_sd15(pipe, codebooks):
    check_on_and_off(pipe, codebooks)


class TestFineTunes:
    """Codebooks of SD1.5 fit what has its layers, whatever else was added."""

    @feature("inpainting model (9 channels)")
    def test_inpainting(self, codebooks):
        pipe = tiny_pipe(tiny_unet(in_channels=9), StableDiffusionInpaintPipeline)
        mask = torch.zeros(1, 1, 128, 128)
        mask[:, :, 32:96] = 1
        check_on_and_off(pipe, codebooks, image=image(), mask_image=mask, height=128, width=128)

    @feature("InstructPix2Pix")
    def test_instruct_pix2pix(self, codebooks):
        """Catches two parts of a batch taken for granted: its guidance has three."""
        pipe = tiny_pipe(tiny_unet(in_channels=8), StableDiffusionInstructPix2PixPipeline)
        check_on_and_off(pipe, codebooks, image=image())

    @feature("LCM")
    def test_lcm(self, codebooks):
        pipe = tiny_pipe(tiny_unet(time_cond_proj_dim=16), LatentConsistencyModelPipeline)
        pipe.scheduler = LCMScheduler.from_config(pipe.scheduler.config)
        check_on_and_off(pipe, codebooks)


@feature("SD 2.x")
def test_sd2():
    """Catches one head count for all levels, and projections that are not convolutions."""
    pipe = tiny_pipe(sd2_unet())
    pipe.scheduler.register_to_config(prediction_type="v_prediction")
    check_on_and_off(pipe, random_codebooks(pipe.unet))


@feature("SDXL base")
def test_sdxl_base():
    """Catches all but the first of several transformer blocks left out, or a level 0 needed."""
    pipe = base_pipe()
    codebooks = random_codebooks(pipe.unet, SDXL_CONFIG)
    assert len(codebooks.layer_specs) == 5 * 2 + 6 * 3
    _, avq = check_on_and_off(pipe, codebooks)
    apply_avq(pipe, codebooks)
    assert not torch.equal(draw(pipe, original_size=(64, 64)), avq)


@feature("SDXL refiner")
def test_sdxl_refiner():
    """Catches levels counted from the first block with attention."""
    pipe = refiner_pipe()
    codebooks = random_codebooks(pipe.unet, SDXL_CONFIG)
    assert len(codebooks.layer_specs) == 2 * 5 * 4
    check_on_and_off(pipe, codebooks, image=image(), strength=1.0)
