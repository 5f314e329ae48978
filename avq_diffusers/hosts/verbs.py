"""The verbs for every model: switch AVQ on and off, and say what it does.

Every function takes a pipeline with a `unet` or a `transformer`, one of these, or a vision model of
transformers, compiled or not. A ControlNet is passed as itself. `remove_avq`, `avq_disabled` and
`summary` of a pipeline include its ControlNets.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from diffusers import DiffusionPipeline
from torch import Tensor, nn

from avq_diffusers.attention.api import check_backend
from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.config import AVQConfig
from avq_diffusers.hosts.codebooks import AVQCodebooks
from avq_diffusers.hosts.examples import as_examples
from avq_diffusers.hosts.host import (
    CHANGES,
    Host,
    Hosted,
    all_or_nothing,
    install,
    installed,
    uninstall,
)
from avq_diffusers.hosts.kept_profiles import KeptProfile
from avq_diffusers.hosts.layer_weights import LayerWeights
from avq_diffusers.hosts.layers import LayerSpec
from avq_diffusers.hosts.measurement import measure_error
from avq_diffusers.hosts.models import AnyModel, all_models_of, models_of, name_of, select_layers
from avq_diffusers.hosts.profile import (
    ErrorProfile,
    checked_tolerance,
    chosen_sizes,
    note_allocation,
)
from avq_diffusers.hosts.refinement import Schedule, check_schedules, planned_sizes, set_sizes
from avq_diffusers.hosts.report import Summary, report
from avq_diffusers.hosts.routing import check_route
from avq_diffusers.hosts.sources import (
    WITHOUT_CODEBOOKS,
    AVQSource,
    check_source,
    make_states,
    states_of_config,
)
from avq_diffusers.hosts.state import AttentionFunction, LayerState, disabled


def apply_avq(
    pipe: AnyModel,
    source: AVQSource | ErrorProfile | None = None,
    *,
    tolerance: float | None = None,
    prompt: str | Sequence[str] | None = None,
    pixel_values: Tensor | Sequence[Tensor] | None = None,
    backend: str = "auto",
    route: str | int = "fastest",
    **measurement: Any,
) -> AnyModel:
    """Run the self-attention of a model with AVQ.

    Codewords come from the keys of each call unless `source` is a codebook, so nothing is
    calibrated or stored. Applying AVQ again replaces the earlier one; if it fails, the model is
    left as it was.

    Tokens beside the image's grid are met exactly: keys of text (SD3, Flux, Flux2, Flux3,
    Qwen-Image, Z-Image) and of CLS and register tokens. Queries of text tokens use AVQ too.

    A call that AVQ cannot serve runs the layer's previous attention, and `summary` says why: calls
    with masks that do more than hide the padding of a text, merged or dropped tokens or reference
    images, calls of a block outside its model, and all calls while another tool acts on attention
    scores (perturbed-attention guidance, a replaced `scaled_dot_product_attention`, `with
    attention_backend(...)`). Compiled training runs exact attention with any mask. A layer keeps an
    attention processor that is none of diffusers' plain ones, such as StyleAligned's, whether it
    is set before or after; a warning names these layers.

    With a tolerance, layers get the fastest sizes, or exact attention, with which the model's
    output is within it. `measure_error` measures that first, on `prompt` or `pixel_values`. The
    profile is kept in the user's cache folder: the next time, this model, measured with the same
    further arguments, needs neither. With fewer tokens than were measured, the route `"fastest"`
    runs exact attention.

    Distilled codebooks may change projections. The changes are added in AVQ calls only, in the
    model's dtype; parameters are never written, so fine-tunes and LoRA act as in exact attention.
    In-place changes to codewords take effect while codebooks and model are on one device. A
    warning says when codebooks were made for a model of another name on the Hub.

    Pipelines that share a model, such as by `from_pipe`, share its AVQ. Models that diffusers
    builds from a UNet have none: `ControlNetModel.from_unet`, and AnimateDiff's UNet.
    `torch.export` takes models with AVQ, but not Flux, Flux2 and Flux3, whose grid is in the values
    of tensors.

    Args:
        pipe: a pipeline with a `unet` or a `transformer`, one of these, or a vision model of
            transformers (ViT, DeiT, DINOv2, DINOv3, DPT, CLIP, SigLIP and others of their kind,
            with any head).
        source: an `AVQConfig` of sizes and levels, `AVQCodebooks` of this model (UNets and vision
            models), or the `ErrorProfile` of an earlier measurement, which needs a tolerance. None
            is M64P16C8 at the finest level with self-attention, M128P32C8E1024 in transformers of
            diffusers.
        tolerance: the largest error of the model's output (noise, velocity, features), relative to
            that of exact attention, such as 0.02.
        prompt: one or several prompts to measure on; needs a pipeline. Four or more make the
            tolerance hold for others.
        pixel_values: images (B, C, H, W) to measure a vision model on, or several batches.
        backend: as for `avq_attention`.
        route: `"fastest"` runs exact attention where that is faster on this GPU for the number of
            tokens: from a table of the package, or measured at the first such call, in at most some
            3 s beside a progress bar, and kept in the user's cache folder. `"always"` runs AVQ. A
            number runs AVQ from that many tokens on.
        **measurement: further arguments of `measure_error`, such as `height=1024, width=1024`.

    Returns:
        `pipe`.

    Raises:
        TypeError: AVQ does not know the model, `source` or `tolerance` has another type, a
            tolerance lacks what it is measured on, or arguments of a measurement come without one.
        ValueError: codebooks, profile or configuration do not fit the model, backend or route are
            unknown, the UNet has LinFusion layers, the transformer runs in context parallel, or the
            tolerance is not above 0.
    """
    models = models_of(pipe)
    check_backend(backend)
    check_route(route)
    for hosted in models:
        hosted.host.refuse(hosted.model)
    host = models[0].host
    examples = as_examples(prompt, pixel_values, host)
    source = _resolved(pipe, host, source, tolerance, examples, measurement)
    profile = source if isinstance(source, ErrorProfile) else None
    if isinstance(source, AVQCodebooks):
        if not host.takes_codebooks:
            raise TypeError(
                f"a {host.kind} takes its codewords from the keys of each call: expected an "
                f"AVQConfig or nothing, but got AVQCodebooks."
            )
        _warn_of_another_model(pipe, source)
    chosen = source.config if isinstance(source, ErrorProfile) else source
    of_models = {
        hosted: make_states(
            hosted.host.layers(hosted.model),
            chosen or hosted.host.default_config(hosted.model),
            backend,
            route,
        )
        for hosted in models
    }
    named = _by_full_name(of_models)
    allocation = None if profile is None else profile.within(checked_tolerance(tolerance))
    sizes = {}
    if profile is not None and allocation is not None:
        sizes = chosen_sizes(named, profile, allocation)
    for hosted, states in of_models.items():
        own = {state: sizes[state] for state in states.values() if state in sizes}
        check_schedules(hosted.host, own)
    with all_or_nothing(models):
        install(of_models)
        for hosted, states in of_models.items():
            set_sizes(hosted, {state: sizes[state] for state in states.values() if state in sizes})
        if profile is not None and allocation is not None:
            note_allocation(named, profile, allocation)
    return pipe


def _resolved(
    pipe: DiffusionPipeline | nn.Module,
    host: Host,
    source: AVQSource | ErrorProfile | None,
    tolerance: float | None,
    examples: Any,
    measurement: Mapping[str, Any],
) -> AVQSource | ErrorProfile | None:
    """What `apply_avq` runs: a profile if there is a tolerance, else `source`."""
    given = [host.examples] * (examples is not None) + [*measurement]
    if tolerance is None and not isinstance(source, ErrorProfile):
        if given:
            raise TypeError(
                f"{', '.join(given)} belong to the measurement of a tolerance; pass "
                f"tolerance=0.02, or drop them."
            )
        check_source(source)
        return source
    checked_tolerance(tolerance)
    if isinstance(source, ErrorProfile):
        if given:
            raise TypeError(f"an ErrorProfile is measured already; drop {', '.join(given)}.")
        return source
    check_source(source)
    if isinstance(source, AVQCodebooks):
        raise ValueError(WITHOUT_CODEBOOKS)
    scheduler = getattr(pipe, "scheduler", None)
    kept = KeptProfile(models_of(pipe), scheduler, source, measurement)
    profile = kept.load(examples)
    if profile is None:
        if examples is None:
            raise TypeError(
                f"a tolerance needs {host.examples}=... to measure this model on once, or an "
                f"ErrorProfile."
            )
        profile = measure_error(pipe, examples, source, **measurement)
        kept.save(profile, examples)
    return profile


def remove_avq(pipe: AnyModel) -> AnyModel:
    """Undo `apply_avq`: put the same attention back, and leave nothing of AVQ.

    A processor that another tool has since set over AVQ stays. Without AVQ nothing happens.

    Args:
        pipe: as for `apply_avq`.

    Returns:
        `pipe`.

    Raises:
        TypeError: AVQ does not know the model.
    """
    uninstall(all_models_of(pipe))
    return pipe


@contextmanager
def avq_disabled(pipe: DiffusionPipeline | nn.Module) -> Iterator[None]:
    """Run exact attention inside the `with` block, in all threads that use these models.

    Blocks may be nested, and may overlap in threads: AVQ is back when the last one has ended. AVQ
    that `apply_avq` installs inside a block runs at once. Gradient checkpointing recomputes a layer
    as it ran; a checkpoint around a whole model recomputes it as it would run during backward.

    Args:
        pipe: as for `apply_avq`.

    Raises:
        TypeError: AVQ does not know the model.
    """
    states = [state for hosted in all_models_of(pipe) for state in hosted.states.values()]
    with disabled(states):
        yield


def set_num_refined(
    pipe: AnyModel,
    num_refined: int | str | Schedule | Mapping[str, int | str | Schedule],
    *,
    level: int | None = None,
    layer: str | None = None,
) -> AnyModel:
    """Change how many parents each query tile refines: quality against speed, without reloading.

    A UNet also takes schedules, which follow the timestep of each call. Threads that generate with
    one UNet each follow their own timestep, except in compiled code. `torch.compile(unet)` makes
    one graph for each part of a schedule; blocks compiled one by one make one for each number of
    parents (for more than 8, raise `torch._dynamo.config.recompile_limit`). With `fullgraph=True`,
    compile by `pipe.unet = torch.compile(pipe.unet, fullgraph=True)` before setting a schedule,
    which then acts in calls of the compiled UNet only. A CUDA graph keeps the number that it was
    captured with.

    Args:
        pipe: a pipeline or model with AVQ.
        num_refined: between 0 and the number of parents of every layer concerned, or `"exact"` for
            exact attention. Or a schedule in training timesteps, which fall from 1000 to 0:
            `{1000: "exact", 900: 16, 400: 8}` is exact from timestep 1000 down, refines 16 parents
            from 900 down and 8 from 400 down. The UNet then refuses samplers with other timesteps,
            such as EDM's and IPNDM. Or a plan: numbers or schedules by the name of a layer, or of a
            module for all its layers. Longer names win over shorter ones. Layers without an entry
            stay as they are.
        level: change only the layers of this UNet level.
        layer: change only the layer of this name, or the layers in this module, such as
            `"up_blocks.3"`.

    Returns:
        `pipe`.

    Raises:
        TypeError: AVQ does not know the model, or a number of parents or a timestep is not an int.
        ValueError: no AVQ layer matches, a plan's entry names none of the matching layers, a layer
            cannot refine that many parents, a schedule does not begin at timestep 1000, or a model
            without training timesteps is given one.
    """
    with CHANGES:  # no other thread takes the layers' AVQ off in between
        states = states_of(pipe)
        plan = planned_sizes(states, num_refined, level=level, layer=layer)
        for hosted in models_of(pipe):
            own = set(hosted.states.values())
            set_sizes(hosted, {state: sizes for state, sizes in plan.items() if state in own})
    return pipe


def summary(pipe: DiffusionPipeline | nn.Module) -> Summary:
    """Report whether each self-attention layer runs AVQ or exact attention, and why.

    Names of a ControlNet's layers begin with `controlnet.`.

    Args:
        pipe: as for `apply_avq`.

    Raises:
        TypeError: AVQ does not know the model.
    """
    return report(all_models_of(pipe))


def states_of(pipe: DiffusionPipeline | nn.Module) -> dict[LayerSpec, LayerState]:
    """The layers that AVQ was applied to, at least one, named as in `summary`.

    Raises:
        TypeError: `pipe` has no model that AVQ knows.
        ValueError: it has no AVQ layer.
    """
    states = _by_full_name({hosted: hosted.states for hosted in models_of(pipe)})
    if not states:
        kind = models_of(pipe)[0].host.kind
        raise ValueError(f"this {kind} has no AVQ layer; call apply_avq(pipe) first.")
    return states


def gather_codebooks(
    model: nn.Module,
    config: AVQConfig,
    codebooks: Mapping[str, Codebook] | None,
    *,
    projection_changes: Mapping[str, Mapping[str, Tensor]] | None = None,
    **facts: Any,
) -> AVQCodebooks:
    """Gather the codebooks of a model's layers, for `apply_avq`.

    With `config.key_norm`, `AVQCodebooks.key_norm(name)` is the LayerNorm of a layer's keys.

    Args:
        model: the UNet or vision model that they are for.
        config: sizes and levels.
        codebooks: one `Codebook` by the name of each layer of `select_layers(model,
            config.levels, config.exact)`; copied. None for own codewords, which need changes of
            projections.
        projection_changes: by the name of each layer of a UNet, what AVQ adds to its
            `to_q.weight`, `to_k.weight`, `to_v.weight`, `to_out.0.weight` and `to_out.0.bias`;
            copied to float32.
        **facts: `base_model`, `calibration` and `training`, kept in `config.json`.

    Raises:
        TypeError: `model` has no layer for AVQ.
        ValueError: names or shapes do not fit the model and `config`, an override matches none of
            its layers, a tensor holds NaN or infinity, or own codewords have stored ones, a key
            norm or no changes of projections.
    """
    layers = select_layers(model, config.levels, config.exact, config.overrides)
    return AVQCodebooks.for_layers(layers, config, codebooks, projection_changes, **facts)


def replace_attention(
    model: nn.Module, functions: Mapping[str, AttentionFunction], config: AVQConfig
) -> None:
    """Run layers by other functions in place of AVQ, until `remove_avq`.

    Calls that AVQ would not serve go to the layers' previous attention, as with AVQ.

    Args:
        model: as for `apply_avq`.
        functions: by the names of the layers of `config`. They take the arguments of
            `avq_attention` and return its output and a name. Keys of a layer pass the `key_norm` of
            its function, if it has one.
        config: layers, sizes and order.

    Raises:
        TypeError: `model` has no layer for AVQ.
        ValueError: the configuration does not fit the model.
    """
    (hosted,) = models_of(model)
    install({hosted: _states_with(hosted, functions, config)})


@contextmanager
def attention_replaced(
    model: nn.Module, functions: Mapping[str, AttentionFunction], config: AVQConfig
) -> Iterator[None]:
    """`replace_attention` inside the `with` block; then the model is as it was, AVQ included."""
    (hosted,) = models_of(model)
    with installed(hosted, _states_with(hosted, functions, config)):
        yield


def _states_with(
    hosted: Hosted, functions: Mapping[str, AttentionFunction], config: AVQConfig
) -> dict[Any, LayerState]:
    states = states_of_config(hosted.host.layers(hosted.model), config)
    for layer, state in states.items():
        function = state.function = functions[layer.name]
        state.weights = LayerWeights(key_norm=getattr(function, "key_norm", None))
    return states


def _by_full_name(
    of_models: Mapping[Hosted, Mapping[Any, LayerState]],
) -> dict[LayerSpec, LayerState]:
    return {
        replace(layer, name=hosted.prefix + layer.name): state
        for hosted, states in of_models.items()
        for layer, state in states.items()
    }


def _warn_of_another_model(pipe: DiffusionPipeline | nn.Module, codebooks: AVQCodebooks) -> None:
    """Compare names on the Hub: layers of other models may have the same shapes."""
    made_for, model = codebooks.config["base_model"], name_of(pipe)
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


def _is_hub_id(name: str | None) -> TypeGuard[str]:
    if name is None or name.count("/") != 1:
        return False
    return not (name.startswith(("/", ".", "~")) or Path(name).exists())
