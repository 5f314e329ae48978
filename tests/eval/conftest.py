"""Fixtures that several tests of `eval` share."""

from functools import partial

import pytest
import torch
from tiny import random_codebooks, two_level_unet
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from avq_diffusers import select_layers
from avq_diffusers.extras.linfusion import LinFusionProcessor, save_linfusion
from eval.methods import avq
from eval.quality import metrics
from eval.store.report import SCORER


@pytest.fixture(scope="session", autouse=True)
def short_calibration():
    """Two steps in place of 25: no test asks how good calibrated codebooks are."""
    short = partial(avq.calibrate, num_inference_steps=2, keys_per_layer=1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(avq, "calibrate", short)
        yield


@pytest.fixture(scope="session")
def scorer_folder(tmp_path_factory):
    """A scorer that has learnt nothing, 50 times as fast as that of mini-sd."""
    torch.manual_seed(0)
    few = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig.from_pretrained(SCORER)
    config.text_config.update(few)
    config.vision_config.update(few | {"patch_size": 32})
    folder = tmp_path_factory.mktemp("models") / "scorer"
    CLIPModel(config).save_pretrained(folder)
    CLIPTokenizer.from_pretrained(SCORER).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tiny_scorer(scorer_folder):
    return metrics.Scorer(scorer_folder)


@pytest.fixture(scope="module")
def scorer():
    """That of mini-sd, which sees what is in an image."""
    return metrics.Scorer(SCORER)


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    """A folder of M4P2C2 codebooks for levels 0 and 1, with changes of the projections."""
    unet = two_level_unet()
    generator = torch.manual_seed(3)
    changes = {
        layer.name: {
            name: 0.05 * torch.randn(parameter.shape, generator=generator)
            for name, parameter in layer.attn.named_parameters()
        }
        for layer in select_layers(unet, (0, 1))
    }
    folder = tmp_path_factory.mktemp("run") / "codebooks"
    random_codebooks(unet, projection_changes=changes, training={"steps": 5}).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def linfusion(tmp_path_factory):
    """A folder of LinFusion layers for level 1."""
    unet = two_level_unet()
    layers = {
        layer.name: LinFusionProcessor(layer.attn.query_dim).state_dict() | layer.attn.state_dict()
        for layer in select_layers(unet, (1,))
    }
    folder = tmp_path_factory.mktemp("run") / "linfusion"
    save_linfusion(unet, layers, folder, training={"steps": 5})
    return folder
