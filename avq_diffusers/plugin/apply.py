"""Switch AVQ on and off in UNets: `apply_avq`, `remove_avq`, `avq_disabled`.

Every function takes a pipeline with a `unet`, or the UNet itself, compiled or not. A ControlNet is
passed as itself. `remove_avq`, `avq_disabled` and `summary` of a pipeline include its ControlNets.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline
from torch import nn

from avq_diffusers.plugin.codebooks import AVQCodebooks
from avq_diffusers.plugin.error_measurement import measure_error
from avq_diffusers.plugin.error_profile import ErrorProfile, resolve_source, set_tolerance
from avq_diffusers.plugin.layer_state import (
    AVQSource,
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
    """`avq_diffusers.apply_avq` of UNets.

    Raises:
        TypeError, ValueError: as there.
    """
    unet = unet_of(pipe)
    source = resolve_source(
        source,
        tolerance,
        [prompt] if isinstance(prompt, str) else prompt,
        measurement,
        name="prompt",
        what="a prompt",
        measure=partial(measure_error, pipe),
    )
    if isinstance(source, ErrorProfile):
        assert tolerance is not None
        return _apply_within(pipe, source, tolerance, backend, route)
    source = default_source(unet) if source is None else source
    if isinstance(source, AVQCodebooks):
        _warn_of_another_model(pipe, source)
    processor = AVQProcessor()
    for layer in install(unet, source, backend, route):
        if custom_processor(layer.attn) is None:
            remember_processor(layer.attn, layer.attn.processor)
            layer.attn.set_processor(processor)
    return pipe


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
