"""What one self-attention layer needs to run AVQ, and what it did so far."""

from collections import Counter
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from avq_diffusers.attention.orders import query_order
from avq_diffusers.plugin.codebooks import AVQCodebooks
from avq_diffusers.plugin.layers import SelfAttentionLayer, select_layers, unet_of
from avq_diffusers.plugin.per_thread import PerThread
from avq_diffusers.plugin.routing import LayerRoute, Workload, next_power_of_two


class LayerState:
    """The AVQ of one layer.

    Attributes:
        config: sizes and tiles of this layer.
        weights: codebook, key norm and projection changes.
        route: from how many tokens on AVQ runs.
        refined: the number of refined parents.
        order: the query order (N,) of the grid, None before the first call.
        enabled: False inside `avq_disabled`.
        calls: how many calls of each kind there were so far, by "AVQ" or the reason for exact
            attention. Calls in compiled code are not counted.
        last_call: the kind of the last one.
        last_backend: that ran the last AVQ call.
    """

    def __init__(
        self, layer: SelfAttentionLayer, codebooks: AVQCodebooks, backend: str, route: str
    ) -> None:
        self.config = codebooks.layer_config(layer.name)
        self.weights = codebooks.layer_weights(layer.name)
        self.route = LayerRoute(route)
        self.backend = backend
        self.num_heads = layer.num_heads
        self.refined = PerThread(self.config.num_refined)
        self.order: PerThread[Tensor | None] = PerThread(None)
        self.enabled = True
        self.num_disabling = 0  # open blocks of `avq_disabled`
        self.calls: Counter[str] = Counter()
        self.last_call: str | None = None
        self.last_backend: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy never sees the end of a block of `avq_disabled` that is open here.
        return {**self.__dict__, "enabled": True, "num_disabling": 0}

    @property
    def query_order(self) -> Tensor | None:
        """The order for the grid of this thread's image."""
        return self.order.get()

    @property
    def num_refined(self) -> int:
        """The refined parents per query tile at this thread's timestep."""
        return self.refined.get()

    def see_grid(self, hidden_states: Tensor, dtype: torch.dtype) -> None:
        """Prepare for the tokens of `hidden_states` (B, C, h, w), on its device.

        `dtype` is the UNet's own; autocast does not change it.
        """
        height, width = hidden_states.shape[-2:]
        device = hidden_states.device
        # A tensor, not (h, w): torch.compile would guard every block on the two integers.
        self.order.set(query_order(height, width, self.config.query_order, device))
        self.weights.move_to(device, dtype)
        if not torch.compiler.is_compiling():
            self.route.learn(self.workload(hidden_states), device, measure=True)

    def is_on_grid(self, hidden_states: Tensor) -> bool:
        """Whether the tokens (B, N, channels) are those of the grid, none of them merged."""
        order = self.query_order
        return order is not None and hidden_states.shape[1] == order.shape[0]

    def workload(self, hidden_states: Tensor) -> Workload:
        """What decides between AVQ and exact attention, for this batch and dtype."""
        codebook, device = self.weights.codebook, hidden_states.device.type
        is_autocast = torch.is_autocast_enabled(device)
        return Workload(
            batch_heads=next_power_of_two(hidden_states.shape[0] * self.num_heads),
            head_dim=codebook.head_dim,
            num_parents=codebook.num_parents,
            num_refined=self.num_refined,
            num_children=codebook.num_children,
            query_tile=self.config.query_tile,
            dtype=torch.get_autocast_dtype(device) if is_autocast else hidden_states.dtype,
        )

    def count(self, call: str) -> None:
        self.calls[call] += 1
        self.last_call = call


def states_of(pipe: DiffusionPipeline | nn.Module) -> dict[SelfAttentionLayer, LayerState]:
    """The layers that AVQ was applied to."""
    return {layer: layer.avq_state for layer in select_layers(unet_of(pipe)) if layer.avq_state}


def applied_states(pipe: DiffusionPipeline | nn.Module) -> dict[SelfAttentionLayer, LayerState]:
    """`states_of`, at least one.

    Raises:
        TypeError: `pipe` has no UNet.
        ValueError: it has no AVQ layer.
    """
    states = states_of(pipe)
    if not states:
        raise ValueError("this UNet has no AVQ layer; call apply_avq(pipe, codebooks) first.")
    return states
