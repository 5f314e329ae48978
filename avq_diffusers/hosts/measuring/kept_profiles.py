"""Profiles in the user's cache folder, so that each model is measured once."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch
from PIL import Image
from platformdirs import user_cache_path
from torch import Tensor, nn

from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.core import Hosted, LayerSpec, installed
from avq_diffusers.hosts.measuring.profile import ErrorProfile

# Numbers per partial checksum.
_CHUNK = 1 << 20
# What every module has; its tensors, children and hooks are read separately.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, range)


class KeptProfile:
    """The cached profiles of a pipeline.

    The key holds the arguments, the contents of modules, and the pipeline's config, public
    attributes and components; of a component without a config, such as a tokenizer, it holds the
    class. With arguments or configs that cannot be read, such as a callback, or with forward hooks,
    nothing is kept; a callback that changes nothing may say so with the attribute `only_watches`.

    Args:
        pipe: the pipeline or model.
        models: its models, with or without AVQ.
        config, arguments: as passed to the measurement.
    """

    def __init__(
        self,
        pipe: Any,
        models: Sequence[Hosted],
        config: AVQConfig | None,
        arguments: Mapping[str, Any],
    ) -> None:
        self.folder = user_cache_path("avq-diffusers") / "profiles"
        self.name: str | None = None
        given = {
            name: value
            for name, value in arguments.items()
            if name != "progress" and not getattr(value, "only_watches", False)
        }
        parts = {"": pipe} | ({} if isinstance(pipe, nn.Module) else _public(vars(pipe)))
        with suppress(_UnknownContentError), ExitStack() as stack:
            for hosted in models:
                stack.enter_context(installed(hosted, {}))
            contents = [(name, _of_part(part)) for name, part in sorted(parts.items())]
            ranks = [str(hosted.ranks) for hosted in models]
            self.name = _digest([repr(config), _device(pipe, models), ranks, given, contents])

    def load(self, layers: Sequence[LayerSpec], examples: Any = None) -> ErrorProfile | None:
        """The profile of these layers measured on these examples, or without examples the latest.

        None if no readable one exists; then it is measured again.
        """
        if self.name is None:
            return None
        with suppress(OSError, _UnknownContentError):
            measured_on = "*" if examples is None else _digest(examples)
            found = self.folder.glob(f"{self.name}-{measured_on}.json")
            for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True):
                with suppress(OSError, ValueError):
                    profile = ErrorProfile.load(path)
                    profile.check_layers(layers)
                    return profile
        return None

    def save(self, profile: ErrorProfile, examples: Any) -> None:
        """Cache a profile, unless the folder is not writable."""
        if self.name is None:
            return
        with suppress(OSError, _UnknownContentError):
            profile.save(self.folder / f"{self.name}-{_digest(examples)}.json")


class _UnknownContentError(ValueError):
    """The contents of an object cannot be read."""


def _device(pipe: Any, models: Sequence[Hosted]) -> str:
    """Where the pipeline runs, even if its weights wait elsewhere between calls."""
    device = getattr(pipe, "_execution_device", None)
    if device is None:
        device = next(models[0].model.parameters()).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if not name.startswith("_")}


def _of_part(part: Any) -> str:
    """Digest of a pipeline, of a component or of another of its attributes."""
    if isinstance(part, nn.Module):
        return _of_module(part)
    config = getattr(part, "config", None)
    if isinstance(config, Mapping):
        return _digest([type(part).__qualname__, _public(config)])
    return _of_setting(part)


@torch.no_grad()
def _of_module(root: nn.Module) -> str:
    """Digest of a module's weights and settings: adapters, their scales, FreeU and the like."""
    facts: list[Any] = []
    for name, module in root.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise _UnknownContentError
        facts += [name, type(module).__module__, type(module).__qualname__]
        for key, value in sorted(vars(module).items()):
            if key not in _OF_MODULES:
                facts += [key, _of_setting(value)]
        facts.append({**module._parameters, **module._buffers})
    return _digest(facts)


def _of_setting(value: Any) -> str:
    """Digest of an attribute; the class's name if it is no plain value."""
    try:
        return _digest(value)
    except _UnknownContentError:
        kind = value if hasattr(value, "__qualname__") else type(value)
        return f"{kind.__module__}.{kind.__qualname__}"


def _digest(value: Any) -> str:
    """Digest of contents."""
    state = hashlib.sha256(type(value).__qualname__.encode())
    for piece in _pieces(value):
        state.update(len(piece).to_bytes(8, "little") + piece)
    return state.hexdigest()[:24]


def _pieces(value: Any) -> list[bytes]:
    if isinstance(value, Tensor):
        return [_of_tensor(value).encode()]
    if isinstance(value, torch.Generator):
        return [str(value.device).encode(), value.get_state().numpy().tobytes()]
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return [repr((value.dtype, value.shape)).encode(), value.tobytes()]
    if isinstance(value, Image.Image):
        palette = _digest(value.getpalette())
        return [repr((value.mode, value.size, palette)).encode(), value.tobytes()]
    if isinstance(value, Mapping):
        return [_digest(x).encode() for pair in value.items() for x in pair]
    if isinstance(value, list | tuple):
        return [_digest(x).encode() for x in value]
    if isinstance(value, set | frozenset):
        return sorted(_digest(x).encode() for x in value)
    if isinstance(value, _PLAIN):
        return [repr(value).encode()]
    raise _UnknownContentError


@torch.no_grad()
def _of_tensor(tensor: Tensor) -> str:
    """Digest of a tensor by checksums over all its bytes, computed on its device."""
    if hasattr(tensor, "__tensor_flatten__"):  # quantized or sharded: tensors inside
        names, _ = tensor.__tensor_flatten__()
        return _digest([type(tensor).__qualname__, *(getattr(tensor, x) for x in names)])
    if tensor.is_meta or tensor.layout != torch.strided:
        raise _UnknownContentError
    values = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    values = values.contiguous().flatten()
    words = values.view({1: torch.uint8, 2: torch.int16}.get(values.itemsize, torch.int32))
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(1 << 62, (min(_CHUNK, len(words)),), generator=generator)
    factors = factors.to(words.device)
    sums = [(x.long() * factors[: len(x)]).sum() for x in words.split(_CHUNK)]
    checksums = torch.stack(sums).tolist() if len(words) else []
    return _digest([str(tensor.dtype), [*tensor.shape], checksums])
