"""AdamW, and its state as tensors named after the parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def make_optimizer(module: nn.Module, config: Any) -> torch.optim.AdamW:
    """Create AdamW for the trainable parameters of a module on its final device."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trained,
        lr=config.learning_rate,
        betas=config.adam_betas,
        weight_decay=config.weight_decay,
        fused=trained[0].is_cuda,
    )


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer state, as `exp_avg/NAME` for the parameter NAME of `module`."""
    return {
        f"{kind}/{name}": value
        for name, parameter in module.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Restore what `optimizer_tensors` returned. Settings such as the learning rate stay."""
    parameters = dict(module.named_parameters())
    is_fused = optimizer.param_groups[0]["fused"]
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        parameter = parameters[name]
        if kind == "step":
            restored = value.to(parameter.device if is_fused else "cpu")
        else:
            # The fused update needs the parameter's memory layout.
            restored = torch.empty_like(parameter.detach()).copy_(value)
        optimizer.state[parameter][kind] = restored
