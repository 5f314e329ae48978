"""What the files of codebooks hold: their names and format, and the parameters of a layer.

Shapes: H heads, M0 parents, C children per parent, D head dim.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.core import LayerSpec

CONFIG_FILE = "config.json"
TENSOR_FILE = "diffusion_pytorch_model.safetensors"
CLASS_NAME = "AVQCodebooks"  # in config.json
FORMAT_VERSION = 2
# Projection parameters and their number of dimensions; the weights are square in every UNet.
PROJECTION_PARAMETERS = {
    "to_q.weight": 2,
    "to_k.weight": 2,
    "to_v.weight": 2,
    "to_out.0.weight": 2,
    "to_out.0.bias": 1,
}


def located(place: str, subfolder: str | None, file: str, hub_arguments: Mapping[str, Any]) -> Path:
    """A file of the folder or Hub id `place`."""
    name = os.path.expanduser(place)
    folder = Path(name)
    if place and folder.is_dir():
        path = folder / (subfolder or "") / file
        if not path.is_file():
            raise FileNotFoundError(f"codebooks: there is no file {path}.")
        return path
    if folder.is_absolute() or place.startswith(".") or len(folder.parts) > 2:
        raise FileNotFoundError(f"codebooks: there is no folder {name}.")
    from huggingface_hub import hf_hub_download  # half a second
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(hf_hub_download(place, file, subfolder=subfolder, **hub_arguments))
    except HFValidationError as error:
        raise ValueError(
            f"codebooks: expected a folder or a Hub id such as user/name, but got {place!r}."
        ) from error


class LayerCodebook(nn.Module):
    """The parameters of one layer: parents (H, M0, D), children (H, M0, C, D), norm and changes.

    With own codewords there are no parents and children. The attribute names are longer because
    `nn.Module` already has a method `children`.
    """

    def __init__(
        self, spec: LayerSpec, config: AVQConfig, *, tuned: bool, own_codewords: bool
    ) -> None:
        super().__init__()
        self.parent_codewords = self.child_codewords = None
        if not own_codewords:
            shape = (spec.num_heads, config.num_parents)
            self.parent_codewords = _zeros(*shape, spec.head_dim)
            self.child_codewords = _zeros(*shape, config.num_children, spec.head_dim)
        norm = nn.LayerNorm(spec.head_dim, dtype=torch.float32) if config.key_norm else None
        self.key_norm = norm
        width = spec.num_heads * spec.head_dim
        self.projection_changes = _no_changes(width) if tuned else None

    @property
    def codebook(self) -> Codebook | None:
        if self.parent_codewords is None or self.child_codewords is None:
            return None
        return Codebook(self.parent_codewords, self.child_codewords)


def check_own_codewords(config: AVQConfig, tuned: bool) -> None:
    for problem, is_met in (
        (f"codewords={config.codewords!r} needs codebooks", config.codewords != "means"),
        ("key_norm needs codebooks", config.key_norm),
        ("without codebooks there must be projection changes", not tuned),
    ):
        if is_met:
            raise ValueError(f"own codewords: {problem}.")


def _no_changes(width: int) -> nn.ParameterDict:
    return nn.ParameterDict(
        {key_of(name): _zeros(*(width,) * ndim) for name, ndim in PROJECTION_PARAMETERS.items()}
    )


def _zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=torch.float32), requires_grad=False)


def key_of(name: str) -> str:
    return name.replace(".", "__")
