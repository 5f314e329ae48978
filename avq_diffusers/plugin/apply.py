"""Switch AVQ on and off: `apply_avq`, `remove_avq`, `avq_disabled`.

Every function takes a pipeline with a `unet`, or the UNet itself, compiled or not. A ControlNet is
passed as itself. `remove_avq`, `avq_disabled` and `summary` of a pipeline include its ControlNets.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline
from torch import nn

from avq_diffusers.plugin.codebooks import AVQCodebooks
from avq_diffusers.plugin.error_profile import (
    WITHOUT_CODEBOOKS,
    ErrorProfile,
    checked_tolerance,
    measure_error,
    set_tolerance,
)
from avq_diffusers.plugin.layer_state import (
    AVQSource,
    check_source,
    default_source,
    disabled,
    states_of,
)
from avq_diffusers.plugin.layers import (
    PipelineOrUNet,
    models_of,
    select_layers,
    unet_of,
    unwrapped,
)
from avq_diffusers.plugin.processor import (
    AVQProcessor,
    custom_processor,
    install,
    remember_processor,
    uninstall,
)


def apply_avq(
    pipe: PipelineOrUNet,
    source: AVQSource | ErrorProfile | None = None,
    *,
    tolerance: float | None = None,
    prompt: str | Sequence[str] | None = None,
    backend: str = "auto",
    route: str | int = "fastest",
    **measurement: Any,
) -> PipelineOrUNet:
    """Run self-attention layers with AVQ.

    Without codebooks, the codewords are keys of each call: nothing is calibrated or stored.

    With a tolerance, each layer gets the cheapest sizes whose error is within it, or exact
    attention. `measure_error` measures that first, in some steps on `prompt`.

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
            M64P16C8 at the finest level with self-attention. Or the `ErrorProfile` of an earlier
            measurement, which needs a tolerance.
        tolerance: the largest relative error of a layer's attention, such as 0.1.
        prompt: one or several to measure on, which a tolerance without profile needs.
        backend: as for `avq_attention`.
        route: `"fastest"` runs exact attention if that is faster on this GPU for the number of
            tokens. It looks this up in a table of the package, or measures a new shape in about a
            second and keeps the result in the user's cache folder. `"always"` runs AVQ. A
            number runs AVQ from that many tokens on.
        **measurement: further arguments of `measure_error`, such as `height=1024, width=1024`.

    Returns:
        `pipe`.

    Raises:
        TypeError: `pipe` has no UNet, `source` or `tolerance` is something else, a tolerance lacks
            what it is measured on, or there are arguments of a measurement without one.
        ValueError: codebooks or profile belong to another model, backend or route are unknown, the
            UNet has LinFusion layers, or the tolerance is not above 0.
    """
    unet = unet_of(pipe)
    if tolerance is not None or isinstance(source, ErrorProfile):
        tolerance = checked_tolerance(tolerance)
        if not isinstance(source, ErrorProfile):
            source = _measured(pipe, source, prompt, measurement)
        elif prompt is not None or measurement:
            raise TypeError("an ErrorProfile is measured already; drop prompt and other arguments.")
        return _apply_within(pipe, source, tolerance, backend, route)
    if prompt is not None or measurement:
        raise TypeError(
            f"{', '.join(['prompt'] * (prompt is not None) + [*measurement])} belong to the "
            f"measurement of a tolerance; pass tolerance=0.1, or drop them."
        )
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


def _measured(
    pipe: DiffusionPipeline | nn.Module,
    source: AVQSource | None,
    prompt: str | Sequence[str] | None,
    measurement: dict[str, Any],
) -> ErrorProfile:
    check_source(source)
    if isinstance(source, AVQCodebooks):
        raise ValueError(WITHOUT_CODEBOOKS)
    if prompt is None:
        raise TypeError("a tolerance is measured on a prompt; pass prompt, or an ErrorProfile.")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    return measure_error(pipe, prompts, source, **measurement)


def _apply_within(
    pipe: PipelineOrUNet, profile: ErrorProfile, tolerance: float, backend: str, route: str | int
) -> PipelineOrUNet:
    config = profile.config
    profile.check_layers(select_layers(unet_of(pipe), config.levels, config.exact))
    apply_avq(pipe, config, backend=backend, route=route)
    set_tolerance(pipe, profile, tolerance)
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
    with disabled(states):
        yield
