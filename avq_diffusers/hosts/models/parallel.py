"""Diffusers' context and tensor parallelism: which ranks share a transformer, and how."""

from typing import Any

import torch
from torch import nn

from avq_diffusers.attention.limits import faults
from avq_diffusers.attention.self_check import is_verified
from avq_diffusers.hosts.core import Ranks, is_recorded

RING = "ring attention"


def ranks_of(model: nn.Module) -> Ranks | None:
    """The ranks that run a transformer together; None if it runs in one process."""
    config = getattr(model, "_parallel_config", None)
    if config is None:
        return None
    context, tensor = config.context_parallel_config, config.tensor_parallel_config
    if tensor is not None:
        mesh = tensor._mesh
        return Ranks(mesh.get_group(), mesh.size(), "tensor parallelism", has_shards=False)
    degree, group = context.ulysses_degree, context._flattened_mesh.get_group()
    if is_ulysses(config):
        return Ranks(group, degree, "Ulysses", has_shards=True)
    return Ranks(group, context.ring_degree * degree, RING, has_shards=True)


def is_ulysses(config: Any) -> bool:
    """Whether a call's tokens are exchanged for heads, so that each rank has the whole sequence."""
    context = None if config is None else config.context_parallel_config
    return context is not None and context.ring_degree == 1


def share_verdict(ranks: Ranks, device: torch.device) -> None:
    """On a GPU of an unverified kind, learn whether the first rank found its kernels wrong."""
    if is_verified(device) or is_recorded(device):
        return
    fault = ranks.agree(lambda: faults.get((device,)))
    if fault is not None:
        faults[(device,)] = fault
