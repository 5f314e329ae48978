"""The verbs for every model: switch AVQ on and off, and report what it does.

Every function takes a pipeline with a `unet` or a `transformer`, one of these models, or a vision
model of transformers, compiled or not. A ControlNet is passed by itself; `remove_avq`,
`avq_disabled` and `summary` of a pipeline include its ControlNets.
"""

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from diffusers import DiffusionPipeline
from torch import Tensor, nn

from avq_diffusers.attention.api import check_backend
from avq_diffusers.config import AVQConfig, check_tolerance
from avq_diffusers.hosts.codebooks import AVQCodebooks
from avq_diffusers.hosts.core import (
    CHANGES,
    CONFIG_FIELDS,
    AttentionFunction,
    AVQSource,
    Host,
    Hosted,
    LayerSpec,
    LayerState,
    LayerWeights,
    Plan,
    Schedule,
    agreed,
    all_or_nothing,
    as_examples,
    check_known,
    check_route,
    disabled,
    install,
    installed,
    make_states,
    planned_specs,
    resolved_source,
    set_specs,
    states_of_config,
    uninstall,
)
from avq_diffusers.hosts.measuring import (
    ErrorProfile,
    KeptProfile,
    measure_error,
    output_errors,
)
from avq_diffusers.hosts.models import AnyModel, all_models_of, models_of, name_of
from avq_diffusers.hosts.report import Summary, report

# How many times its limit a part of the denoising with a kept plan may be off, for one example.
MOST_OFF = 2.0


def apply_avq(
    pipe: AnyModel,
    source: AVQSource | ErrorProfile | str | None = None,
    *,
    tolerance: float | None = None,
    prompt: str | Sequence[str] | None = None,
    pixel_values: Tensor | Sequence[Tensor] | None = None,
    backend: str = "auto",
    route: str | int = "fastest",
    **options: Any,
) -> AnyModel:
    """Run the self-attention of a model with AVQ.

    ```python
    apply_avq(pipe)
    image = pipe("a castle at sunset", height=1024, width=1024).images[0]
    apply_avq(pipe, threshold=5e-4)  # faster and coarser
    apply_avq(pipe, tolerance=0.02, prompt="a castle")  # within 2 % of exact attention
    remove_avq(pipe)
    ```

    Applying AVQ again replaces the earlier one; on failure, the model is left unchanged. Unless
    `source` is a codebook, codewords come from the keys of each call, so nothing is calibrated or
    stored.

    Args:
        pipe: a pipeline with a `unet` or a `transformer`, one of these models, or a vision model of
            transformers (ViT, DeiT, DINOv2, DINOv3, DPT, CLIP, SigLIP and similar, with any head).

        What to run:
        source: an `AVQConfig` or its string, such as `"M64C8T1e-4"`, `AVQCodebooks` of this model
            (UNets and vision models), or the `ErrorProfile` of an earlier measurement, which needs
            a tolerance. None is M64C8T1e-4: 64 parents of 8 children, threshold 1e-4, at levels 0
            and 1 of a UNet and in all layers of other models.
        **options: fields of `AVQConfig`, such as `threshold=1e-3` or `levels=(0,)`, which replace
            those of `source`. With a tolerance also further arguments of `measure_error`, such as
            `height=1024, width=1024`.

        To bound the model's error instead:
        tolerance: the largest error of the model's output (noise, velocity, features), relative to
            exact attention's: above 0 and at most 0.5, such as 0.02 for 2 %. Layers get the fastest
            options, or exact attention, that keep the error within it; in the first third of the
            denoising within a tenth of it, in the second within half, because early errors change
            the image more. `measure_error` first measures the model, and the profile is kept in the
            user's cache folder; later calls with the same model and measurement arguments need no
            prompt and no images. With fewer tokens than were measured, the route `"fastest"` runs
            exact attention.
        prompt: one or more prompts to measure on; needs a pipeline. With several, the tolerance
            also holds on most other prompts.
        pixel_values: images (B, C, H, W) to measure a vision model on, or several batches.

        Rarely set:
        route: `"fastest"` runs exact attention where it is faster on this device at this number of
            tokens, by a measurement at the first such call or when that is compiled, which takes at
            most about 3 s with a progress bar and is kept in the user's cache folder. With a
            threshold, this depends on the columns that a layer shows in its first 16 calls, of
            which the first runs AVQ, so that a seed repeats its image only after these; in code
            compiled before, on 192. `"always"` runs AVQ. A number runs AVQ from that many tokens
            on.
        backend: as in `avq_attention`.

    Returns:
        `pipe`.

    Raises:
        TypeError: AVQ does not know the model, `source` or `tolerance` has the wrong type, an
            argument is unknown, a tolerance lacks examples to measure on, or measurement arguments
            come without a tolerance.
        ValueError: codebooks, profile or configuration do not fit the model, backend or route is
            unknown, the UNet has LinFusion layers, or the tolerance is not above 0 and at most 0.5.

    **Which tokens.** Tokens beside the image's grid are attended to exactly: text keys (SD3, Flux,
    Flux2, Flux3, Qwen-Image, Z-Image), CLS and register tokens. Text queries use AVQ too.

    **Which calls.** Calls that AVQ cannot serve run the layer's previous attention, and `summary`
    says why: calls with masks that do more than hide a text's padding, with merged or dropped
    tokens or reference images, calls of a block outside its model, and all calls while another tool
    acts on attention scores (perturbed-attention guidance, a replaced
    `scaled_dot_product_attention`, `with attention_backend(...)`). Compiled training runs exact
    attention with any mask. A layer keeps any attention processor other than diffusers' plain ones,
    such as StyleAligned's, whether it is set before or after; a warning names these layers.

    **Several processes.** In transformers that several processes run together by Ulysses context
    parallelism or tensor parallelism, each runs AVQ on its heads, and the first one decides for
    all. Ring attention runs exact.

    **Codebooks.** Distilled codebooks may change projections. The changes are added in AVQ calls
    only, in the model's dtype; parameters are never written, so fine-tunes and LoRA work as with
    exact attention. In-place changes to codewords take effect as in `Codebook` while codebooks and
    model are on the same device. A warning says if the codebooks were made for a Hub model of
    another name.

    **Shared and exported models.** Pipelines that share a model, for instance through `from_pipe`,
    share its AVQ. Models that diffusers builds from a UNet start without AVQ:
    `ControlNetModel.from_unet`, and AnimateDiff's UNet. `torch.export` takes models with AVQ,
    except Flux, Flux2 and Flux3, whose grid is in tensor values.
    """
    models = models_of(pipe)
    check_backend(backend)
    check_route(route)
    for hosted in models:
        hosted.host.refuse(hosted.model)
    host = models[0].host
    examples = as_examples(prompt, pixel_values, host)
    config_fields = {name: options.pop(name) for name in CONFIG_FIELDS & options.keys()}
    _check_options(pipe, host, options)
    given = [host.examples] * (examples is not None) + [*options]
    profile: ErrorProfile | None = None
    if isinstance(source, ErrorProfile):
        if config_fields or given:
            names = ", ".join([*config_fields, *given])
            raise TypeError(f"an ErrorProfile is already measured; drop {names}.")
        profile, source = source, source.config
    source = resolved_source(source, config_fields, host.default_config(models[0].model))
    if isinstance(source, AVQCodebooks):
        _check_codebooks(pipe, host, source, tolerance)
    states_by_model = {
        hosted: make_states(hosted.host.layers(hosted.model), source, backend, route)
        for hosted in models
    }
    named = _by_full_name(states_by_model)
    allocation = None
    if tolerance is not None or profile is not None:
        tolerance = check_tolerance(tolerance)
        if profile is None:
            assert isinstance(source, AVQConfig)
            profile = _measured(pipe, [*named], source, tolerance, examples, options)
        profile.check_layers([*named])
        allocation = profile.within(tolerance)
    elif given:
        raise TypeError(
            f"{', '.join(given)} only serve to measure for a tolerance; pass tolerance=0.02, or "
            f"drop them."
        )
    with all_or_nothing(models):
        install(states_by_model)
        if allocation is not None:
            specs = {state: allocation.schedule(layer.name) for layer, state in named.items()}
            for hosted in models:
                set_specs(hosted, specs)
            for layer, state in named.items():
                state.note_allocation(allocation, allocation.num_tokens[layer.name])
    return pipe


def _check_options(
    pipe: DiffusionPipeline | nn.Module, host: Host, options: Mapping[str, Any]
) -> None:
    """Refuse options that neither `measure_error` nor the call that it measures takes."""
    run = inspect.signature(pipe.__call__ if host.has_prompts else pipe.forward).parameters
    not_options = {"pipe", "examples", "config", "progress_name"}
    measuring = inspect.signature(measure_error).parameters.keys() - not_options
    known = {*inspect.signature(apply_avq).parameters, *CONFIG_FIELDS, *run, *measuring}
    # A wrapper's signature is opaque, and some models accept any name.
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in run.values())
    check_known("apply_avq", options, known, is_open=is_open)


def _check_codebooks(
    pipe: DiffusionPipeline | nn.Module,
    host: Host,
    codebooks: AVQCodebooks,
    tolerance: float | None,
) -> None:
    """Refuse codebooks where there can be none; warn if the Hub names are of another model."""
    if tolerance is not None:
        raise ValueError(
            "a tolerance chooses sizes for codewords from the keys of each call; apply it without "
            "codebooks."
        )
    if not host.takes_codebooks:
        raise TypeError(
            f"a {host.kind} takes its codewords from the keys of each call: expected an AVQConfig "
            f"or nothing, but got AVQCodebooks."
        )
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


def _measured(
    pipe: DiffusionPipeline | nn.Module,
    layers: Sequence[LayerSpec],
    config: AVQConfig,
    tolerance: float,
    examples: Any,
    measurement: Mapping[str, Any],
) -> ErrorProfile:
    """The kept profile of a model, or a new one if there is none that holds."""
    models = models_of(pipe)
    kept = KeptProfile(pipe, models, config, measurement)
    profile = agreed(models[0].ranks, lambda: kept.load(layers, examples))
    if profile is not None and (
        examples is None or _still_holds(pipe, profile, tolerance, examples, measurement)
    ):
        return profile
    if examples is None:
        host = models[0].host
        raise TypeError(
            f"a tolerance needs {host.examples}=... to measure this model on once, or an "
            f"ErrorProfile."
        )
    name = f"measuring layers for a tolerance of {100 * tolerance:g} %"
    profile = measure_error(pipe, examples, config, progress_name=name, **measurement)
    kept.save(profile, examples)
    return profile


def _still_holds(
    pipe: DiffusionPipeline | nn.Module,
    profile: ErrorProfile,
    tolerance: float,
    examples: Any,
    measurement: Mapping[str, Any],
) -> bool:
    """Whether a kept profile fits the tolerance in a measured run of the first example."""
    name = f"checking the kept profile for a tolerance of {100 * tolerance:g} %"
    run = {**measurement, "parts": len(profile.parts), "progress_name": name}
    one = examples if isinstance(examples, Tensor) else [*examples][:1]
    choices = profile.within(tolerance).choices
    ((errors,),) = output_errors(pipe, one, [choices], profile.config, **run)
    limits = profile.limits(tolerance)
    worst = max(errors, key=lambda start: errors[start] / limits[start])
    if errors[worst] <= MOST_OFF * limits[worst]:
        return True
    warnings.warn(
        f"the kept measurement no longer holds: the output is off by {100 * errors[worst]:.2g} % "
        f"where a tolerance of {100 * tolerance:g} % allows {100 * limits[worst]:.2g} %, so the "
        f"model is measured again.",
        stacklevel=4,
    )
    return False


def remove_avq(pipe: AnyModel) -> AnyModel:
    """Undo `apply_avq`: put the original attention back and leave no trace of AVQ.

    A processor that another tool has since set over AVQ stays. Does nothing without AVQ.

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

    Blocks may nest, and may overlap across threads: AVQ is back when the last one ends. AVQ that
    `apply_avq` installs inside a block runs at once. Gradient checkpointing recomputes a layer as
    it ran; a checkpoint around a whole model recomputes it as it would run during backward.

    Args:
        pipe: as for `apply_avq`.

    Raises:
        TypeError: AVQ does not know the model.
    """
    states = [
        state for hosted in _prepared(all_models_of(pipe)) for state in hosted.states.values()
    ]
    with disabled(states):
        yield


def set_threshold(
    pipe: AnyModel,
    threshold: float | str | Schedule | Plan,
    *,
    level: int | None = None,
    layer: str | None = None,
) -> AnyModel:
    """Change the threshold, at once: a smaller one is closer to exact attention, and slower.

    It takes the place of `num_refined` where that was set.

    Diffusion models also take schedules, which follow the timestep of each call. Threads that share
    a model each follow their own timestep, except in compiled code. `torch.compile` makes one graph
    per part of a schedule; blocks compiled one by one make one per threshold (for more than 8,
    raise `torch._dynamo.config.recompile_limit`). With `fullgraph=True`, call
    `pipe.unet = torch.compile(pipe.unet, fullgraph=True)` before setting a schedule, which other
    compiled code of the UNet does not follow. A CUDA graph keeps what it was captured with.

    Args:
        pipe: a pipeline or model with AVQ.
        threshold: the attention's error that a further column must fix to be shown, at least 0, or
            `"exact"` for exact attention. Or a schedule in training timesteps, which fall from 1000
            to 0: `{1000: "exact", 900: 1e-4, 400: 1e-3}` is exact from timestep 1000 down, with
            threshold 1e-4 from 900 down and 1e-3 from 400 down. With flow matching, timesteps are
            mostly 1000 times the noise level; in bfloat16 they are off by up to 5. Samplers with
            other timesteps, such as EDM's and IPNDM, are refused if they take several steps. Or a
            plan: numbers or schedules by the name of a layer, or of a module for all its layers.
            Longer names take precedence. Layers without an entry stay unchanged.
        level: change only the layers at this UNet level.
        layer: change only the layer of this name, or the layers in this module, such as
            `"up_blocks.3"`.

    Returns:
        `pipe`.

    Raises:
        TypeError: AVQ does not know the model, a threshold is not a number or a timestep not an
            int.
        ValueError: no AVQ layer matches, an entry of a plan names none of the matching layers, a
            threshold is negative, a layer has stored codewords, a schedule does not begin at
            timestep 1000, or the model's calls do not tell the training timestep.
    """
    return _set(pipe, "threshold", threshold, level, layer)


def set_num_refined(
    pipe: AnyModel,
    num_refined: int | str | Schedule | Plan,
    *,
    level: int | None = None,
    layer: str | None = None,
) -> AnyModel:
    """Refine a fixed number of parents per query tile, in place of a threshold: the paper's form.

    Args:
        pipe: a pipeline or model with AVQ.
        num_refined: between 0 and the number of parents of every affected layer, or `"exact"`, or a
            schedule or plan of these, as in `set_threshold`.
        level, layer: as in `set_threshold`.

    Returns:
        `pipe`.

    Raises:
        TypeError: AVQ does not know the model, or a number of parents or a timestep is not an int.
        ValueError: as in `set_threshold`, or a layer cannot refine that many parents.
    """
    return _set(pipe, "num_refined", num_refined, level, layer)


def _set(
    pipe: AnyModel,
    option: str,
    value: float | str | Schedule | Plan,
    level: int | None,
    layer: str | None,
) -> AnyModel:
    with CHANGES:  # no other thread removes the layers' AVQ in between
        plan = planned_specs(states_of(pipe), option, value, level=level, layer=layer)
        for hosted in models_of(pipe):
            set_specs(hosted, plan)
    return pipe


def summary(pipe: DiffusionPipeline | nn.Module) -> Summary:
    """Report whether each self-attention layer runs AVQ or exact attention, and why.

    Compiled code reports nothing: what it runs may differ from what calls outside it ran.
    Names of a ControlNet's layers begin with `controlnet.`.

    Args:
        pipe: as for `apply_avq`.

    Raises:
        TypeError: AVQ does not know the model.
    """
    return report(_prepared(all_models_of(pipe)))


def _prepared(models: list[Hosted]) -> list[Hosted]:
    """These models, with the AVQ that was set on their layers by hand."""
    for hosted in models:
        hosted.host.prepare(hosted.model)
    return models


def states_of(pipe: DiffusionPipeline | nn.Module) -> dict[LayerSpec, LayerState]:
    """The layers that AVQ was applied to, named as in `summary`."""
    models = _prepared(models_of(pipe))
    states = _by_full_name({hosted: hosted.states for hosted in models})
    if not states:
        kind = models_of(pipe)[0].host.kind
        raise ValueError(f"this {kind} has no AVQ layer; call apply_avq(pipe) first.")
    return states


def replace_attention(
    model: nn.Module, functions: Mapping[str, AttentionFunction], config: AVQConfig
) -> None:
    """Run layers with other functions in place of AVQ, until `remove_avq`.

    Calls that AVQ would not serve go to the layers' previous attention, as with AVQ.

    Args:
        model: as in `apply_avq`.
        functions: layer name -> function, for the layers of `config`. A function takes the
            arguments of `avq_attention` and returns the output and a name; if it has a `key_norm`,
            that is applied to the layer's keys.
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
    """`replace_attention` inside the `with` block; afterwards the model is restored, AVQ too."""
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
    states_by_model: Mapping[Hosted, Mapping[Any, LayerState]],
) -> dict[LayerSpec, LayerState]:
    return {
        replace(layer, name=hosted.prefix + layer.name): state
        for hosted, states in states_by_model.items()
        for layer, state in states.items()
    }
