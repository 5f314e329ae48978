"""Switch AVQ on and off: `apply_avq`, `remove_avq`, `avq_disabled`.

Every function takes a pipeline with a `unet`, or the UNet itself, compiled or not. A ControlNet is
passed as itself. `remove_avq`, `avq_disabled` and `summary` of a pipeline include its ControlNets.
"""

import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diffusers import DiffusionPipeline
from torch import nn

from avq_diffusers.plugin.codebooks import AVQCodebooks
from avq_diffusers.plugin.layer_state import (
    AVQSource,
    LayerState,
    check_source,
    default_source,
    states_of,
)
from avq_diffusers.plugin.layers import PipelineOrUNet, models_of, unet_of, unwrapped
from avq_diffusers.plugin.processor import (
    AVQProcessor,
    custom_processor,
    install,
    remember_processor,
    uninstall,
)

_DISABLING = threading.Lock()


def apply_avq(
    pipe: PipelineOrUNet,
    source: AVQSource | None = None,
    *,
    backend: str = "auto",
    route: str = "fastest",
) -> PipelineOrUNet:
    """Run self-attention layers with AVQ.

    Without codebooks, the codewords are keys of each call: nothing is calibrated or stored.

    An earlier AVQ is removed first. The processors of all other layers stay. The present processor
    of a chosen layer serves the calls that AVQ does not: those with attention masks or merged
    tokens, and all while another tool acts on attention scores, such as perturbed-attention
    guidance, a replaced `scaled_dot_product_attention` or an attention backend of diffusers. A
    layer keeps a processor that is none of diffusers' plain ones, such as StyleAligned's, whether
    it is set before or after; a warning names these layers. While codebooks and UNet are on one
    device, in-place changes to the codewords take effect.

    In AVQ calls, changes that distillation made to the projections are added to the layer's own, in
    the UNet's dtype. The UNet's parameters are not written: fine-tunes of the base model and LoRA,
    fused or not, act as in exact attention. Hooks of a projection act on its change too.

    Fine-tunes have layers of the same shapes as their base model, and so have other models: a
    warning says when the names of both models on the Hub are known and differ.

    Pipelines that share the UNet, such as by `from_pipe`, share its AVQ. Models that diffusers
    builds from the UNet have none: `ControlNetModel.from_unet`, and AnimateDiff's UNet, even by
    `from_pipe`.

    Args:
        pipe: a pipeline with a `unet`, or the UNet.
        source: `AVQCodebooks` made for that UNet, or an `AVQConfig` of sizes and levels. None is
            M64P16C8 at the finest level with self-attention.
        backend: as for `avq_attention`.
        route: `"fastest"` runs exact attention if that is faster on this GPU for the number of
            tokens. It looks this up in a table of the package, or measures a new shape in about a
            second and keeps the result in the user's cache folder. `"always"` runs AVQ.

    Returns:
        `pipe`.

    Raises:
        TypeError: `pipe` has no UNet, or `source` is something else.
        ValueError: the codebooks belong to another model, backend or route are unknown, or the
            UNet has LinFusion layers.
    """
    unet = unet_of(pipe)
    check_source(source)
    source = default_source(unet) if source is None else source
    if isinstance(source, AVQCodebooks):
        _warn_of_another_model(pipe, source)
    processor = AVQProcessor()
    for layer in install(unet, source, backend, route):
        if custom_processor(layer.attn) is None:
            remember_processor(layer.attn, layer.attn.processor)
            layer.attn.set_processor(processor)
    return pipe


def _warn_of_another_model(pipe: DiffusionPipeline | nn.Module, codebooks: AVQCodebooks) -> None:
    """Compare names on the Hub: layers of other models may have the same shapes."""
    config = unwrapped(pipe).config if isinstance(pipe, nn.Module) else pipe.config
    made_for, model = codebooks.config["base_model"], config.get("_name_or_path")
    if (
        _is_hub_id(made_for)
        and _is_hub_id(model)
        and made_for.split("/")[1].lower() != model.split("/")[1].lower()
    ):
        warnings.warn(
            f"the codebooks were made for {made_for}, but the model is {model}; they fit it only "
            f"if it is a fine-tune of that model.",
            stacklevel=3,
        )


def _is_hub_id(name: str | None) -> bool:
    if name is None or name.count("/") != 1:
        return False
    return not (name.startswith(("/", ".", "~")) or Path(name).exists())


def remove_avq(pipe: PipelineOrUNet) -> PipelineOrUNet:
    """Undo `apply_avq`: put the same processor objects back, and leave nothing of AVQ.

    A processor that another tool has since set over AVQ stays. Without AVQ nothing happens.

    Raises:
        TypeError: `pipe` has no UNet.
    """
    for model in models_of(pipe).values():
        uninstall(model)
    return pipe


@contextmanager
def avq_disabled(pipe: DiffusionPipeline | nn.Module) -> Iterator[None]:
    """Run exact attention inside the `with` block, in all threads that use these models.

    Blocks may be nested, and may overlap in threads: AVQ is back when the last one has ended. AVQ
    that `apply_avq` installs inside a block runs at once. Gradient checkpointing recomputes a layer
    as it ran; a checkpoint around a whole UNet recomputes it as it would run during backward.

    Raises:
        TypeError: `pipe` has no UNet.
    """
    states = [state for model in models_of(pipe).values() for state in states_of(model).values()]
    _disable(states, 1)
    try:
        yield
    finally:
        _disable(states, -1)


def _disable(states: Iterable[LayerState], change: int) -> None:
    """Open or close a block of `avq_disabled`."""
    with _DISABLING:
        for state in states:
            state.num_disabling += change
            state.enabled = state.num_disabling == 0
