"""UNets of real configurations with random weights: one step, exact, by AVQ, and exact again."""

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from avq_diffusers import AVQCodebooks, AVQConfig, apply_avq, remove_avq, select_layers, summary
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.codebook.kmeans import fit_codebook
from eval.benchmarks.unet_configs import SD15, SD21, SDXL, SDXL_REFINER, added_conditions

CONFIG = AVQConfig.parse("M16P4C4")
LATENT_SIZE = 32
TIMESTEP = 150
TEXT_TOKENS = 77
HEADROOM = 1.5  # memory of a step over that of the weights


@dataclass(frozen=True)
class FullSize:
    """A model whose UNet is built as it is.

    Attributes:
        levels: at which AVQ runs.
        config: where it differs from the defaults of `UNet2DConditionModel`.
        dtype: on a CPU; on a GPU it is float16.
    """

    levels: tuple[int, ...]
    config: Mapping[str, Any]
    dtype: torch.dtype = torch.float32


MODELS = {
    "SD1.5": FullSize((0, 1), SD15),
    "SD 2.1": FullSize((0, 1), SD21),
    "SDXL base": FullSize((1, 2), SDXL, torch.bfloat16),
    "SDXL refiner": FullSize((1, 2), SDXL_REFINER, torch.bfloat16),
}


@torch.no_grad()
def run_full_size(name: str, device: torch.device) -> dict[str, Any]:
    """One step of a UNet of `MODELS` with random weights, exact, by AVQ, and exact again.

    Returns:
        for JSON: what ran in its layers by level, the difference AVQ made, and under `failed` what
        is not as it should be; under `not_run` why there was no step.
    """
    model = MODELS[name]
    dtype = torch.float16 if device.type == "cuda" else model.dtype
    with torch.device("meta"):
        unet = UNet2DConditionModel(**model.config).eval()
    nn.Module.to(unet, dtype)  # diffusers' own `to` warns of modules to keep in float32
    parameters = sum(x.numel() for x in unet.parameters())
    row: dict[str, Any] = {
        "model": name,
        "parameters": parameters,
        "dtype": str(dtype).removeprefix("torch."),
        "latent_size": LATENT_SIZE,
        "config": str(CONFIG),
    }
    needed, free = HEADROOM * parameters * dtype.itemsize, _free_memory(device)
    if needed > free:
        return row | {"not_run": f"needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free"}

    _randomize(unet.to_empty(device=device), model.levels)
    inputs = _inputs(unet, device, dtype)
    exact, codebooks = _exact_step(unet, inputs, model.levels)
    apply_avq(unet, codebooks, route="always")
    avq = unet(**inputs).sample
    report = [found for found in summary(unet).rows if found.name in codebooks.layer_specs]
    restored = torch.equal(remove_avq(unet)(**inputs).sample, exact)

    row["layers"] = [
        {
            "level": level,
            "tokens": next(x.num_tokens for x in report if x.level == level),
            "runs": dict(sorted(Counter(x.runs for x in report if x.level == level).items())),
        }
        for level in model.levels
    ]
    row["difference_from_exact"] = ((avq - exact).norm() / exact.norm()).item()
    checks = {
        "the output is not finite": bool(avq.isfinite().all()),
        "a layer did not run AVQ": all(set(x.calls) == {"AVQ"} for x in report),
        "AVQ changed nothing": row["difference_from_exact"] > 0,
        "the exact output did not come back": restored,
    }
    if failed := [text for text, holds in checks.items() if not holds]:
        row["failed"] = failed
    return row


def _randomize(unet: UNet2DConditionModel, levels: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for module in unet.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for layer in select_layers(unet, levels):  # untrained ones make attention an average
        layer.attn.to_q.weight.mul_(4)
        layer.attn.to_k.weight.mul_(4)


def _exact_step(
    unet: UNet2DConditionModel, inputs: Mapping[str, Any], levels: tuple[int, ...]
) -> tuple[Tensor, AVQCodebooks]:
    """The exact output, and codebooks of the step's own keys."""
    config = replace(CONFIG, levels=levels)
    codebooks: dict[str, Codebook] = {}

    def fit(layer: Any, module: nn.Module, inputs: tuple, key: Tensor) -> None:
        keys = key[0].float().unflatten(-1, (layer.num_heads, -1)).transpose(0, 1)
        codebooks[layer.name] = fit_codebook(
            keys, config.num_parents, config.num_children, num_iterations=4
        )

    with ExitStack() as hooks:
        for layer in select_layers(unet, levels):
            hooks.enter_context(layer.attn.to_k.register_forward_hook(partial(fit, layer)))
        exact = unet(**inputs).sample
    return exact, AVQCodebooks.from_codebooks(config, codebooks, unet)


def _inputs(unet: UNet2DConditionModel, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return {
        "sample": normal(1, unet.config.in_channels, LATENT_SIZE, LATENT_SIZE),
        "timestep": torch.full((), TIMESTEP, device=device),
        "encoder_hidden_states": normal(1, TEXT_TOKENS, unet.config.cross_attention_dim),
        **added_conditions(unet, 1, normal),
    }


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
