"""`avq info`: the environment, for a bug report."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch
from platformdirs import user_cache_path
from torch.utils import collect_env

from avq_diffusers.attention.limits import VERIFIED, obstacles
from avq_diffusers.attention.self_check import is_verified
from avq_diffusers.attention.tensors import Tensors
from avq_diffusers.config import Spec
from avq_diffusers.hosts.core import device_name

PACKAGES = ("avq-diffusers", "torch", "triton", "diffusers", "transformers", "accelerate")


def print_info() -> None:
    """Print versions, device, backends and cache folders, one per line."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    lines = {
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "system": system,
        "device": _described(device),
        **{f"backend {name}": _state(name, device) for name in ("triton", "torch")},
        "verified": _verified(device),
    }
    cache = user_cache_path("avq-diffusers")
    for name, what in (("profiles", "*.json"), ("checks", "*")):
        lines[name] = f"{len([*(cache / name).glob(what)])} in {cache / name}"
    lines["routes"] = str(cache / "routes.json")
    if not (cache / "routes.json").exists():
        lines["routes"] += ", not written yet"
    width = max(map(len, lines))
    for name, text in lines.items():
        print(f"{name:{width}}  {text}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _described(device: torch.device) -> str:
    if device.type != "cuda":
        return f"PyTorch sees no GPU; {device_name(device)}"
    major, minor = torch.cuda.get_device_capability(device)
    total = torch.cuda.get_device_properties(device).total_memory / 2**30
    driver = collect_env.get_nvidia_driver_version(collect_env.run) or "unknown"
    return (
        f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}, "
        f"{total:.0f} GiB, CUDA {torch.version.cuda}, driver {driver}"
    )


def _state(backend: str, device: torch.device) -> str:
    """Whether a backend runs the default sizes in half precision, or why not."""
    tokens = torch.empty(1, 1, 1024, 64, dtype=torch.float16, device=device)
    reasons = obstacles(backend, Tensors.of(tokens, tokens, tokens), Spec())
    return f"cannot run: {'; '.join(reasons)}" if reasons else "runs"


def _verified(device: torch.device) -> str:
    cards = ", ".join(f"{card} with Triton {triton}" for card, triton in VERIFIED.items())
    if device.type != "cuda":
        return f"kernels on {cards}"
    if is_verified(device):
        return "yes"
    return f"no ({cards}): the first call of each kind is compared with PyTorch"
