"""UNets of real configurations with random weights: a step exact, by AVQ, and exact again."""

import psutil
import pytest
import torch
from diffusers import UNet2DConditionModel
from tiny import random_codebooks
from torch import nn

from avq_diffusers import AVQConfig, apply_avq, remove_avq, summary
from avq_diffusers.hosts.models.registry import select_layers
from eval.benchmarks.models import SD15, SDXL, SDXL_TEXT, added_conditions

LATENT_SIZE = 32
HEADROOM = 1.5  # memory of a step over that of the weights
SD21 = {
    "sample_size": 96,
    "cross_attention_dim": 1024,
    "attention_head_dim": (5, 10, 20, 20),
    "use_linear_projection": True,
    "upcast_attention": True,
}
SDXL_REFINER = {
    **SDXL_TEXT,
    "sample_size": 128,
    "block_out_channels": (384, 768, 1536, 1536),
    "down_block_types": (
        "DownBlock2D",
        "CrossAttnDownBlock2D",
        "CrossAttnDownBlock2D",
        "DownBlock2D",
    ),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": 4,
    "attention_head_dim": (6, 12, 24, 24),
    "cross_attention_dim": 1280,
    "projection_class_embeddings_input_dim": 2560,
}


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("config", "levels", "dtype"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.feature(name))
        for name, case in {
            "SD1.5 at full size": (SD15, (0, 1), torch.float32),
            "SD 2.1 at full size": (SD21, (0, 1), torch.float32),
            "SDXL base at full size": (SDXL, (1, 2), torch.bfloat16),
            "SDXL refiner at full size": (SDXL_REFINER, (1, 2), torch.bfloat16),
        }.items()
    ],
)
@torch.no_grad()
def test_one_step_at_full_size(config, levels, dtype, device):
    dtype = torch.float16 if device == "cuda" else dtype
    with torch.device("meta"):
        unet = UNet2DConditionModel(**config).eval()
    nn.Module.to(unet, dtype)  # diffusers' own `to` warns of modules to keep in float32
    needed = HEADROOM * dtype.itemsize * sum(x.numel() for x in unet.parameters())
    if device == "cpu" and needed > psutil.virtual_memory().available:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of memory")
    torch.manual_seed(0)
    unet.to_empty(device=device)
    for module in unet.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def normal(*shape):
        return torch.randn(shape, dtype=dtype, device=device)

    inputs = {
        "sample": normal(1, unet.config.in_channels, LATENT_SIZE, LATENT_SIZE),
        "timestep": torch.tensor(150, device=device),
        "encoder_hidden_states": normal(1, 77, unet.config.cross_attention_dim),
        **added_conditions(unet.config, 1, normal),
    }
    exact = unet(**inputs).sample
    codebooks = random_codebooks(unet, AVQConfig.parse("M16P4C4", levels=levels))
    apply_avq(unet, codebooks, route="always")
    output = unet(**inputs).sample
    assert output.isfinite().all()
    assert not torch.equal(output, exact)
    rows = [row for row in summary(unet).rows if row.name in codebooks.layer_specs]
    assert len(rows) == len(select_layers(unet, levels))
    assert all(set(row.calls) == {"AVQ"} for row in rows)
    assert torch.equal(remove_avq(unet)(**inputs).sample, exact)
