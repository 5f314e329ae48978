"""The models that AVQ serves, each by a real pipeline around a tiny UNet of its topology."""

import pytest
import torch
from checks import check_on_and_off
from diffusers import (
    LatentConsistencyModelPipeline,
    LCMScheduler,
    StableDiffusionInpaintPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionXLImg2ImgPipeline,
)
from tiny import (
    draw,
    random_codebooks,
    random_image,
    sd2_unet,
    sdxl_pipe,
    sdxl_text_encoder,
    tiny_pipe,
    tiny_unet,
)
from transformers import CLIPTextModelWithProjection

from avq_diffusers.config import AVQConfig
from avq_diffusers.plugin.apply import apply_avq

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
        check_on_and_off(
            pipe, codebooks, image=random_image(128), mask_image=mask, height=128, width=128
        )

    @feature("InstructPix2Pix")
    def test_instruct_pix2pix(self, codebooks):
        """Catches two parts of a batch taken for granted: its guidance has three."""
        pipe = tiny_pipe(tiny_unet(in_channels=8), StableDiffusionInstructPix2PixPipeline)
        check_on_and_off(pipe, codebooks, image=random_image(128))

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
    pipe = sdxl_pipe()
    codebooks = random_codebooks(pipe.unet, SDXL_CONFIG)
    assert len(codebooks.layer_specs) == 5 * 2 + 6 * 3
    _, avq = check_on_and_off(pipe, codebooks)
    apply_avq(pipe, codebooks)
    assert not torch.equal(draw(pipe, original_size=(64, 64)), avq)


@feature("SDXL refiner")
def test_sdxl_refiner():
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
