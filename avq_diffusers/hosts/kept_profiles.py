"""Profiles in the user's cache folder, so that each model is measured once."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from platformdirs import user_cache_path
from torch import Tensor

from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.host import Hosted
from avq_diffusers.hosts.layers import ATTRIBUTE
from avq_diffusers.hosts.profile import ErrorProfile

# This many numbers per parameter tell two trainings apart.
_SAMPLED = 16


class KeptProfile:
    """The cached profiles of a pipeline.

    Args:
        models: the pipeline's models.
        scheduler: the pipeline's scheduler, if it has one.
        config, arguments: as passed to the measurement.
    """

    def __init__(
        self,
        models: Sequence[Hosted],
        scheduler: Any,
        config: AVQConfig | None,
        arguments: Mapping[str, Any],
    ) -> None:
        settings = getattr(scheduler, "config", {})
        settings = {name: settings[name] for name in sorted(settings) if name[0] != "_"}
        facts: list[Any] = [repr(config), type(scheduler).__name__, repr(settings)]
        for name, value in sorted(arguments.items()):
            if name != "progress" and not callable(value):
                facts += [name, _digest(value)]
        for hosted in models:
            facts += [type(hosted.model).__name__, *_sampled(hosted.model.named_parameters())]
        self.name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
        self.folder = user_cache_path("avq-diffusers") / "profiles"

    def load(self, examples: Any = None) -> ErrorProfile | None:
        """The profile measured on these examples, or without examples the model's latest one.

        None if no readable one exists; then it is measured again.
        """
        measured_on = "*" if examples is None else _digest(examples)
        found = self.folder.glob(f"{self.name}-{measured_on}.json")
        try:
            return ErrorProfile.load(max(found, key=_modified))
        except (OSError, ValueError):
            return None

    def save(self, profile: ErrorProfile, examples: Any) -> None:
        """Cache a profile, unless the folder is not writable."""
        path = self.folder / f"{self.name}-{_digest(examples)}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / "profiles.lock"):
                profile.save(path)
        except OSError:
            return


def _modified(path: Path) -> int:
    return path.stat().st_mtime_ns


def _sampled(parameters: Iterable[tuple[str, Tensor]]) -> list[Any]:
    """Names, types, devices and some values of a model's parameters.

    Parameters that are not loaded, or quantized by another library, contribute no values.
    """
    found: list[Any] = []
    for name, parameter in parameters:
        if ATTRIBUTE in name.split("."):
            continue  # belongs to codebooks
        values, device = parameter.detach(), parameter.device
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        found += [name, str(values.dtype), [*values.shape], where]
        if not values.is_meta and type(values) is Tensor:
            stride = max(1, values.numel() // _SAMPLED)
            found.append(_digest(values.flatten()[::stride][:_SAMPLED]))
    return found


def _digest(value: Any) -> str:
    """Digest of numbers, strings, tensors and lists of them; other objects by their text."""
    state = hashlib.sha256()
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, Tensor):
            state.update(repr((one.dtype, one.shape)).encode())
            one = one.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        state.update(one if isinstance(one, bytes) else repr(one).encode())
    return state.hexdigest()[:16]
