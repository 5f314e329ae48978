"""The errors of a vision model's layers along the ladder of sizes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from avq_diffusers.config import AVQConfig
from avq_diffusers.plugin.error_measurement import check_measured, measuring
from avq_diffusers.plugin.error_profile import ErrorProfile
from avq_diffusers.plugin.layer_state import LayerState
from avq_diffusers.vision.install import install, uninstall
from avq_diffusers.vision.layers import select_layers, states_of


@torch.no_grad()
def measure_error(
    model: nn.Module,
    pixel_values: Tensor | Iterable[Tensor],
    config: AVQConfig | None = None,
    *,
    progress: bool = True,
    **model_arguments: Any,
) -> ErrorProfile:
    """Measure the error of AVQ with several sizes in every layer, while the model runs exact.

    The error is |avq - exact| / |exact| of the attention of all patches and heads before the output
    projection, the largest over the batches. It holds for images of the size that was measured. AVQ
    need not be applied, and stays as it is.

    Args:
        model: a vision model, as for `apply_avq`.
        pixel_values: a batch (B, C, H, W) as the model takes it, or several of one height and
            width.
        config: exact layers, tiles and updates; its sizes join those that are measured.
        progress: show progress bars.
        **model_arguments: further arguments of the model's call, such as
            `interpolate_pos_encoding=True`.

    Returns:
        A profile for `apply_avq(model, profile, tolerance=0.1)`.

    Raises:
        TypeError: `model` is not a module, `pixel_values` holds something else than tensors, or
            `config` is no `AVQConfig`.
        ValueError: there is no batch, a batch has another shape or size, the model has no layer for
            AVQ, `config` has overrides, stored codewords, a key norm or tiled importance, or
            attention has NaN or infinity.
        RuntimeError: AVQ would serve no call of a layer, as with masks.
    """
    batches = _batches(pixel_values)
    config = AVQConfig() if config is None else config
    check_measured(config)
    layers = select_layers(model, config.exact)
    earlier = states_of(model)
    states = {layer: LayerState(layer, config, "auto", "always") for layer in layers}
    uninstall(model)
    try:
        install(states)
        with measuring(states, config, progress=progress) as profile:
            for batch in tqdm(batches, "error", disable=not progress):
                model(pixel_values=batch, **model_arguments)
            return profile()
    finally:
        uninstall(model)
        install(earlier)


def _batches(pixel_values: Tensor | Iterable[Tensor]) -> list[Tensor]:
    if not isinstance(pixel_values, Iterable):
        raise TypeError(f"pixel_values must be tensors, but got {type(pixel_values).__name__}.")
    batches = [pixel_values] if isinstance(pixel_values, Tensor) else list(pixel_values)
    if not batches:
        raise ValueError("pixel_values must hold at least one batch, but got none.")
    for batch in batches:
        if not isinstance(batch, Tensor):
            raise TypeError(f"pixel_values must be tensors, but got {type(batch).__name__}.")
        if batch.ndim != 4 or batch.shape[2:] != batches[0].shape[2:]:
            raise ValueError(
                f"pixel_values must be batches (B, C, H, W) of one height and width, but got "
                f"{tuple(batch.shape)}."
            )
    return batches
