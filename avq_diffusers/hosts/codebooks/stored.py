"""`StoredCodebooks`: what the files of codebooks hold, read without diffusers.

Shapes: H heads, M0 parents, C children per parent, D head dim.
"""

import inspect
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from avq_diffusers.codebook.codebook import Codebook, constraint_error
from avq_diffusers.codebook.tensor_files import load_tensors
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
# Above the rounding error of a float32 mean, far below anything visible in an image.
CONSTRAINT_TOLERANCE = 1e-3

AnyCodebooks = TypeVar("AnyCodebooks", bound="StoredCodebooks")


class StoredCodebooks(nn.Module):
    """The codebooks of one UNet as its files hold them; `AVQCodebooks` adds diffusers' methods.

    Args:
        avq: fields of the `AVQConfig`.
        layers: fields of one `LayerSpec` per layer.
        base_model, calibration, training, tuned, own_codewords: as in `AVQCodebooks`.

    Raises:
        TypeError, ValueError: as in `AVQCodebooks`.
    """

    def __init__(
        self,
        avq: Mapping[str, Any],
        layers: list[Mapping[str, Any]],
        base_model: str | None = None,
        calibration: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        tuned: bool = False,
        own_codewords: bool = False,
    ) -> None:
        super().__init__()
        for name, summary in (("calibration", calibration), ("training", training)):
            if not isinstance(summary, Mapping | None):
                raise TypeError(f"{name} must be a mapping or None, but got {summary!r}.")
        self.base_model = base_model
        self.measured = calibration or training or {}
        # A file without `codewords` holds the paper's form.
        self.avq_config = AVQConfig.from_dict({"codewords": "stored", **avq})
        self.own_codewords = own_codewords
        if own_codewords:
            _check_own_codewords(self.avq_config, tuned)
        self.layer_specs = {spec["name"]: LayerSpec(**spec) for spec in layers}
        self.codebooks = nn.ModuleDict(
            {
                _key(spec.name): _LayerCodebook(
                    spec, self.layer_config(spec.name), tuned=tuned, own_codewords=own_codewords
                )
                for spec in self.layer_specs.values()
            }
        )

    @classmethod
    def from_pretrained(
        cls: type[AnyCodebooks],
        pretrained_model_name_or_path: str | Path,
        *,
        subfolder: str | None = None,
        **hub_arguments: Any,
    ) -> AnyCodebooks:
        """Read codebooks from a folder or from the Hub.

        Args:
            pretrained_model_name_or_path, subfolder, **hub_arguments: as in
                `AVQCodebooks.from_pretrained`.

        Raises:
            FileNotFoundError, ValueError: as in `AVQCodebooks.from_pretrained`.
        """
        place = str(pretrained_model_name_or_path)
        config_path = _located(place, subfolder, CONFIG_FILE, hub_arguments)
        try:
            config = json.loads(config_path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{config_path} is not a JSON file: {error}.") from error
        try:
            with torch.device("meta"):  # a damaged file may claim sizes that do not fit in memory
                codebooks = cls._of_config(config)
        except ValueError as error:
            raise ValueError(f"{config_path}: {error}") from error
        except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"{config_path} is not a config of {CLASS_NAME}: {error!r}."
            ) from error
        path = _located(place, subfolder, TENSOR_FILE, hub_arguments)
        codebooks._load(path, config.get("sha256"))
        return codebooks

    @classmethod
    def _of_config(cls: type[AnyCodebooks], config: Mapping[str, Any]) -> AnyCodebooks:
        check_config(config)
        known = inspect.signature(cls).parameters
        return cls(**{name: value for name, value in config.items() if name in known})

    def layer_config(self, name: str) -> AVQConfig:
        """The `AVQConfig` of one layer, its overrides resolved."""
        return self.avq_config.for_layer(name, self.layer_specs[name].level)

    def codebook(self, name: str) -> Codebook | None:
        """One layer's `Codebook`, or None; its tensors are the parameters themselves."""
        return self._layer(name).codebook

    def key_norm(self, name: str) -> nn.LayerNorm | None:
        """The norm of one layer's keys, if `AVQConfig.key_norm` is set."""
        return self._layer(name).key_norm

    def projection_changes(self, name: str) -> dict[str, Tensor] | None:
        """What AVQ adds to one layer's projections, or None; its tensors are the parameters."""
        changes = self._layer(name).projection_changes
        if changes is None:
            return None
        return {key: changes[_key(key)] for key in PROJECTION_PARAMETERS}

    def _layer(self, name: str) -> "_LayerCodebook":
        layer = self.codebooks[_key(name)]
        assert isinstance(layer, _LayerCodebook)
        return layer

    def _load(self, path: Path, sha256: str | None) -> None:
        loaded = load_tensors(path, self.state_dict(), sha256)
        # `to_empty` instead would import SymPy for seconds.
        copies = {name: tensor.to(torch.float32, copy=True) for name, tensor in loaded.items()}
        self.load_state_dict(copies, assign=True)
        codebooks = map(self.codebook, self.layer_specs)
        errors = [constraint_error(codebook).max() for codebook in codebooks if codebook]
        error = max(errors, default=0)
        if error > CONSTRAINT_TOLERANCE:
            warnings.warn(
                f"{path}: children do not average to their parent: off by up to {error:.2g} of "
                f"their usual distance from it; AVQCodebooks.project() shifts them.",
                stacklevel=4,
            )


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a config.json that is not one of codebooks.

    Raises:
        ValueError: it belongs to another class or has an unknown format version.
    """
    class_name = config.get("_class_name", CLASS_NAME)
    if class_name != CLASS_NAME:
        raise ValueError(f"expected the config of {CLASS_NAME}, but got one of {class_name}.")
    version = config.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"codebooks of format version {FORMAT_VERSION} are supported, but got version "
            f"{version}."
        )


def _located(
    place: str, subfolder: str | None, file: str, hub_arguments: Mapping[str, Any]
) -> Path:
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


class _LayerCodebook(nn.Module):
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


def _check_own_codewords(config: AVQConfig, tuned: bool) -> None:
    for problem, is_met in (
        (f"codewords={config.codewords!r} needs codebooks", config.codewords != "means"),
        ("key_norm needs codebooks", config.key_norm),
        ("without codebooks there must be projection changes", not tuned),
    ):
        if is_met:
            raise ValueError(f"own codewords: {problem}.")


def _no_changes(width: int) -> nn.ParameterDict:
    return nn.ParameterDict(
        {_key(name): _zeros(*(width,) * ndim) for name, ndim in PROJECTION_PARAMETERS.items()}
    )


def _zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=torch.float32), requires_grad=False)


def _key(name: str) -> str:
    return name.replace(".", "__")
