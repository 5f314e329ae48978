"""Switch AVQ on and off in vision models of transformers, and report what their layers run."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from avq_diffusers.attention.api import check_backend
from avq_diffusers.config import AVQConfig
from avq_diffusers.plugin.error_profile import (
    ErrorProfile,
    resolve_source,
    set_constant_sizes,
)
from avq_diffusers.plugin.layer_state import (
    AVQSource,
    LayerState,
    disabled,
    refuse_without_codebooks,
)
from avq_diffusers.plugin.refinement import planned_sizes
from avq_diffusers.plugin.report import Summary, layer_report, runs_by_state
from avq_diffusers.plugin.routing import check_route
from avq_diffusers.vision.error_measurement import measure_error
from avq_diffusers.vision.install import install, uninstall
from avq_diffusers.vision.layers import select_layers, states_of

Model = TypeVar("Model", bound=nn.Module)


def apply_avq(
    model: Model,
    source: AVQSource | ErrorProfile | None = None,
    *,
    tolerance: float | None = None,
    pixel_values: Tensor | Iterable[Tensor] | None = None,
    backend: str = "auto",
    route: str | int = "fastest",
    **model_arguments: Any,
) -> Model:
    """Run the self-attention of a vision model with AVQ.

    Without codebooks, the codewords are keys of each call: nothing is calibrated or stored. Patches
    are tokens of the grid that the model's patch projection makes, at any size of images. CLS,
    distillation and register tokens are met as themselves, and meet all tokens.

    With a tolerance, each layer gets the cheapest sizes whose error is within it, or exact
    attention. `measure_error` measures that first, on some images. With fewer tokens than were
    measured, the route `"fastest"` runs exact attention.

    An earlier AVQ is removed first. The model's own attention, such as SDPA, serves the calls that
    AVQ does not: those with masks, dropout or attention weights asked for, and of tokens that are
    not the grid. It is the one that `model.set_attn_implementation` sets, before or later.

    Models that share a config do not share AVQ. Text towers stay as they are.

    Compiled ViT and DeiT of transformers 5.17 give their attention a mask, and so stay exact.

    Args:
        model: ViT, DeiT, DINOv2, DINOv3, DPT, CLIP, SigLIP or others of their kind, with any head;
            or a module that holds one, such as a compiled model.
        source: an `AVQConfig`, whose `levels` have no meaning here, or `AVQCodebooks` of
            `gather_codebooks`. None is M64P16C8 in all layers. Or the `ErrorProfile` of an earlier
            measurement, which needs a tolerance.
        tolerance: the largest relative error of a layer's attention, such as 0.1.
        pixel_values: images to measure on, which a tolerance without profile needs: a batch
            (B, C, H, W), or several.
        backend: as for `avq_attention`.
        route: `"fastest"` runs exact attention where that is faster on this GPU, `"always"` runs
            AVQ, a number runs AVQ from that many patches on.
        **model_arguments: further arguments of the model's call on these images, such as
            `interpolate_pos_encoding=True`.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a module, `source` or `tolerance` is something else, a tolerance
            lacks what it is measured on, or there are arguments of a measurement without one.
        ValueError: the model has no layer for AVQ, codebooks or profile belong to another model, a
            configuration needs codebooks, backend or route are unknown, or the tolerance is not
            above 0.
        RuntimeError: AVQ serves no call of a layer that is measured.
    """
    check_backend(backend)
    check_route(route)
    source = resolve_source(
        source,
        tolerance,
        pixel_values,
        model_arguments,
        name="pixel_values",
        what="images",
        measure=partial(measure_error, model),
    )
    profile = source if isinstance(source, ErrorProfile) else None
    source = AVQConfig() if source is None else source
    if isinstance(source, ErrorProfile):
        source = source.config
    refuse_without_codebooks(source, "gather_codebooks(model, config, codebooks)")
    config = source if isinstance(source, AVQConfig) else source.avq_config
    layers = select_layers(model, config.exact, config.overrides)
    if not isinstance(source, AVQConfig):
        source.check_layers(layers)
    states = {layer: LayerState(layer, source, backend, route) for layer in layers}
    if profile is not None:
        set_constant_sizes(states, profile, tolerance)
    uninstall(model)
    install(states)
    return model


def remove_avq(model: Model) -> Model:
    """Undo `apply_avq`: put the same configs back, and leave nothing of AVQ.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a vision model, but got {type(model).__name__}.")
    uninstall(model)
    return model


@contextmanager
def avq_disabled(model: nn.Module) -> Iterator[None]:
    """Run the model's own attention inside the `with` block, in all threads that use the model.

    Blocks may be nested, and may overlap in threads: AVQ is back when the last one has ended.

    Raises:
        TypeError, ValueError: `model` is no vision model.
    """
    with disabled(states_of(model).values()):
        yield


def set_num_refined(
    model: Model,
    num_refined: int | str | Mapping[str, int | str],
    *,
    layer: str | None = None,
) -> Model:
    """Change how many parents each query tile refines: quality against speed, without reloading.

    Args:
        model: with AVQ.
        num_refined: between 0 and the number of parents of every layer concerned; `"exact"` is
            exact attention. Or a plan: numbers by the name of a layer, or of a module for all its
            layers. Longer names win over shorter ones. Layers without an entry stay as they are.
        layer: change only the layer of this name, or the layers in this module.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a module, or a number of parents is not an int.
        ValueError: no AVQ layer matches, a plan's entry names none of the matching layers, a layer
            cannot refine that many parents, or the numbers change with a timestep.
    """
    states = states_of(model)
    if not states:
        raise ValueError("this model has no AVQ layer; call apply_avq(model) first.")
    schedules = planned_sizes(states, num_refined, level=None, layer=layer)
    if any(len(schedule) > 1 for schedule in schedules.values()):
        raise ValueError("vision models have no timesteps, but num_refined changes with them.")
    for state, schedule in schedules.items():
        (sizes,) = schedule.values()
        state.set_sizes(sizes)
    return model


def summary(model: nn.Module) -> Summary:
    """Report whether each self-attention layer runs AVQ or exact attention, and why.

    Layers that AVQ can never serve, such as those of a text tower, are not listed.

    Raises:
        TypeError: `model` is not a module.
        ValueError: it has no layer for AVQ.
    """
    rows = []
    for layer in select_layers(model):
        state = layer.avq_state
        if state is None:
            runs = f"exact: {layer.attn.config._attn_implementation}"
        else:
            runs = runs_by_state(state)
        rows.append(layer_report(layer.name, layer, state, runs, {}))
    return Summary(tuple(rows))
