"""`AVQCodebooks`: the codebooks of all layers of a UNet, as one model.

Shapes: H heads, M0 parents, C children per parent, D head dim.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from avq_diffusers.codebook.codebook import Codebook, constraint_error
from avq_diffusers.codebook.tensor_files import (
    check_names,
    check_tensors,
    load_tensors,
    read_config,
    tensor_digest,
)
from avq_diffusers.config import AVQConfig
from avq_diffusers.files import atomic_save
from avq_diffusers.hosts.codebooks.stored import (
    CLASS_NAME,
    CONFIG_FILE,
    FORMAT_VERSION,
    PROJECTION_PARAMETERS,
    TENSOR_FILE,
    LayerCodebook,
    check_own_codewords,
    key_of,
    located,
)
from avq_diffusers.hosts.core import LayerSpec, LayerWeights, check_specs
from avq_diffusers.hosts.models import select_layers

HUB_ARGUMENTS = ("revision", "token", "cache_dir", "force_download", "local_files_only")
# Arguments of `ModelMixin.save_pretrained`; other values would change the file names.
SAVED_WITH = {
    "safe_serialization": True,
    "variant": None,
    "max_shard_size": "10GB",
    "use_flashpack": False,
}
# Above the rounding error of a float32 mean, far below anything visible in an image.
CONSTRAINT_TOLERANCE = 1e-3


class AVQCodebooks(ModelMixin, ConfigMixin):
    """The codebooks of one UNet, with `save_pretrained`, `from_pretrained` and `push_to_hub`.

    Built by `gather_codebooks`, `calibrate` and distillation. Distilled codebooks may also hold
    changes to the layers' projections: tuned minus base weights, so a fine-tune or LoRA of the
    base model keeps its own part. Distilled with own codewords, they hold only these changes. All
    tensors are float32 parameters without gradient. `.to(device)` moves them in place, also under
    a UNet that uses them; `.half()` and `.to(dtype)` leave them in float32.

    Args:
        avq: fields of the `AVQConfig`.
        layers: fields of one `LayerSpec` per layer.
        base_model: name of the model they were made for; informational.
        calibration: summary of the calibration; informational.
        training: summary of the distillation; informational.
        tuned: store projection changes for every layer.
        own_codewords: store no codebooks; codewords come from the keys of each call.
        sha256: digest of the tensor file beside config.json, set by `save_pretrained`.
        format_version: version of the file format.

    Raises:
        TypeError: `calibration` or `training` is not a mapping.
        ValueError: a field is unknown, or own codewords come with stored codewords, with a key norm
            or without projection changes.
    """

    _keep_in_fp32_modules: ClassVar = ["codebooks"]
    config: Any  # of `ConfigMixin`, which has no annotations

    @register_to_config
    def __init__(
        self,
        avq: Mapping[str, Any],
        layers: list[Mapping[str, Any]],
        base_model: str | None = None,
        calibration: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        tuned: bool = False,
        own_codewords: bool = False,
        sha256: str | None = None,
        format_version: int = FORMAT_VERSION,
    ) -> None:
        super().__init__()
        for name, summary in (("calibration", calibration), ("training", training)):
            if not isinstance(summary, Mapping | None):
                raise TypeError(f"{name} must be a mapping or None, but got {summary!r}.")
        # A file without `codewords` holds the paper's form.
        self.avq_config = AVQConfig.from_dict({"codewords": "stored", **avq})
        if own_codewords:
            check_own_codewords(self.avq_config, tuned)
        self.layer_specs = {spec["name"]: LayerSpec(**spec) for spec in layers}
        self.codebooks = nn.ModuleDict(
            {
                key_of(spec.name): LayerCodebook(
                    spec, self.layer_config(spec.name), tuned=tuned, own_codewords=own_codewords
                )
                for spec in self.layer_specs.values()
            }
        )

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        subfolder: str | None = None,
        dtype: torch.dtype = torch.float32,
        **hub_arguments: Any,
    ) -> "AVQCodebooks":
        """Load codebooks from a folder or from the Hub; reads safetensors files only.

        Args:
            pretrained_model_name_or_path: folder or Hub id.
            subfolder: folder inside it.
            dtype: accepted as in every diffusers model; parameters stay in float32.
            **hub_arguments: `revision`, `token`, `cache_dir`, `force_download` or
                `local_files_only` of `huggingface_hub.hf_hub_download`.

        Raises:
            TypeError: an argument is unknown.
            FileNotFoundError: the folder or one of its files does not exist.
            ValueError: a file is damaged, has an unknown format, or does not match its config.json.
        """
        for name in hub_arguments:
            if name not in HUB_ARGUMENTS:
                raise TypeError(
                    f"from_pretrained takes subfolder, dtype, {', '.join(HUB_ARGUMENTS)}, but got "
                    f"{name!r}."
                )
        place = str(pretrained_model_name_or_path)
        config_path = located(place, subfolder, CONFIG_FILE, hub_arguments)
        config = read_config(config_path, CLASS_NAME, FORMAT_VERSION)
        try:
            with torch.device("meta"):  # a damaged file may claim sizes that do not fit in memory
                codebooks = cls.from_config(config)
        except ValueError as error:
            raise ValueError(f"{config_path}: {error}") from error
        except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"{config_path} is not a config of {CLASS_NAME}: {error!r}."
            ) from error
        path = located(place, subfolder, TENSOR_FILE, hub_arguments)
        codebooks._load(path, config.get("sha256"))
        return codebooks

    def save_pretrained(
        self, save_directory: str | Path, is_main_process: bool = True, **arguments: Any
    ) -> None:
        """Save config and weights to a folder, like `ModelMixin.save_pretrained`.

        Existing codebooks stay until the new ones are complete. A process killed at any moment
        leaves the old ones, the new ones, or a folder that loading refuses for lack of config.json.

        Args:
            save_directory: created if missing.
            is_main_process: if False, nothing is written.
            **arguments: passed on to `ModelMixin.save_pretrained`, such as `push_to_hub`.

        Raises:
            ValueError: `save_directory` is empty, or the arguments ask for files that
                `from_pretrained` does not read.
            OSError: the folder cannot be created or written; the message says whether its previous
                content is intact.
        """
        for name, value in SAVED_WITH.items():
            if arguments.get(name, value) != value:
                raise ValueError(
                    f"codebooks are saved with {name}={value!r} only, but got {arguments[name]!r}."
                )
        if not is_main_process:
            return
        if not str(save_directory):
            raise ValueError("save_directory must name a folder, but got ''.")
        folder = Path(save_directory).expanduser()
        ConfigMixin.register_to_config(self, sha256=tensor_digest(self.state_dict()))
        with atomic_save(folder, CONFIG_FILE, "codebooks") as temporary:
            # The Hub repository is named after the folder.
            super().save_pretrained(str(temporary), **{"repo_id": folder.name, **arguments})

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
        return {key: changes[key_of(key)] for key in PROJECTION_PARAMETERS}

    def _layer(self, name: str) -> LayerCodebook:
        layer = self.codebooks[key_of(name)]
        assert isinstance(layer, LayerCodebook)
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

    def layer_weights(self, name: str) -> LayerWeights:
        """Everything AVQ needs for one layer, on any device."""
        return LayerWeights(self.codebook(name), self.key_norm(name), self.projection_changes(name))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AVQCodebooks":
        # Every move and cast goes through here; `_keep_in_fp32_modules` only makes `to` warn.
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)

    @torch.no_grad()
    def project(self) -> "AVQCodebooks":
        """Shift each parent's children in place so that they average to the parent."""
        for codebook in map(self.codebook, self.layer_specs):
            if codebook is not None and codebook.num_children:
                means = codebook.children.mean(2, keepdim=True)
                codebook.children.sub_(means - codebook.parents[:, :, None])
        return self

    def check_layers(self, layers: Sequence[LayerSpec]) -> None:
        """Refuse the layers of another model.

        Raises:
            ValueError: names or shapes differ.
        """
        check_specs("codebooks", self.layer_specs, layers, "its codebook has")


@torch.no_grad()
def gather_codebooks(
    model: nn.Module,
    config: AVQConfig,
    codebooks: Mapping[str, Codebook] | None,
    *,
    projection_changes: Mapping[str, Mapping[str, Tensor]] | None = None,
    **facts: Any,
) -> AVQCodebooks:
    """Gather the codebooks of a model's layers, for `apply_avq`.

    With `config.key_norm`, `AVQCodebooks.key_norm(name)` is the LayerNorm of a layer's keys.

    Args:
        model: the UNet or vision model that they are for.
        config: sizes and levels.
        codebooks: layer name -> `Codebook`, for every layer of `select_layers(model,
            config.levels, config.exact)`; copied. None for own codewords, which need
            `projection_changes`.
        projection_changes: layer name -> what AVQ adds to a UNet layer's `to_q.weight`,
            `to_k.weight`, `to_v.weight`, `to_out.0.weight` and `to_out.0.bias`; copied to float32.
        **facts: `base_model`, `calibration` and `training`, kept in `config.json`.

    Raises:
        TypeError: `model` has no layer for AVQ.
        ValueError: names or shapes do not fit the model and `config`, an override matches none of
            its layers, a tensor holds NaN or infinity, or own codewords come with stored codewords,
            with a key norm or without projection changes.
    """
    layers = select_layers(model, config.levels, config.exact, config.overrides)
    if codebooks is not None:
        check_names("codebooks", codebooks, [layer.name for layer in layers])
    # By keyword: diffusers' `from_config` drops positional arguments.
    built = AVQCodebooks(
        avq=asdict(config),
        layers=[layer.stored for layer in layers],
        tuned=projection_changes is not None,
        own_codewords=codebooks is None,
        **facts,
    )
    for name, codebook in (codebooks or {}).items():
        _copy(f"codebook of {name}", vars(codebook), vars(built.codebook(name)))
    if projection_changes is not None:
        check_names("projection_changes", projection_changes, built.layer_specs)
        for name, tensors in projection_changes.items():
            _copy(f"projection_changes of {name}", tensors, built.projection_changes(name))
    return built


def _copy(subject: str, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    check_tensors(subject, source, target)
    for name, tensor in source.items():
        target[name].copy_(tensor)
