"""The verbs for every model: switch AVQ on and off, and say what it does.

Every function takes a pipeline with a `unet` or a `transformer`, or one of these, compiled or not.
A ControlNet is passed as itself. `remove_avq`, `avq_disabled` and `summary` of a pipeline with a
UNet include its ControlNets.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from diffusers import DiffusionPipeline
from torch import nn

from avq_diffusers.config import AVQConfig
from avq_diffusers.dit import error_measurement as dit_errors
from avq_diffusers.dit.apply import (
    apply_to_transformers,
    remove_from_transformers,
    set_transformer_refinement,
    transformer_states,
)
from avq_diffusers.dit.layers import is_transformer
from avq_diffusers.dit.report import transformer_summary
from avq_diffusers.plugin import apply, error_measurement, refinement, report
from avq_diffusers.plugin.error_profile import ErrorProfile, resolve_source
from avq_diffusers.plugin.layer_state import AVQSource, disabled
from avq_diffusers.plugin.layers import PipelineOrUNet
from avq_diffusers.plugin.refinement import Schedule
from avq_diffusers.plugin.report import Summary


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

    In transformers, the image's tokens attend to each other with AVQ, and to the text's tokens
    exactly. The text's attention is exact. This serves SD3's joint attention, and on the attention
    dispatch of diffusers Flux, Flux2, Qwen-Image, Z-Image, Wan and LTX. There are no codebooks.

    With a tolerance, each layer gets the cheapest sizes whose error is within it, or exact
    attention. `measure_error` measures that first, in some steps on `prompt`. With fewer tokens
    than were measured, the route `"fastest"` runs exact attention.

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
        pipe: a pipeline with a `unet` or a `transformer`, or one of these.
        source: `AVQCodebooks` made for that UNet, or an `AVQConfig` of sizes and levels. None is
            M64P16C8 at the finest level with self-attention, or in all blocks of a transformer. Or
            the `ErrorProfile` of an earlier measurement, which needs a tolerance.
        tolerance: the largest relative error of a layer's attention, such as 0.1.
        prompt: one or several to measure on, which a tolerance without profile needs.
        backend: as for `avq_attention`.
        route: `"fastest"` runs exact attention if that is faster on this GPU for the number of
            tokens. It looks this up in a table of the package, or measures a new shape in the
            seconds that its kernels take to compile, and keeps the result in the user's cache
            folder. `"always"` runs AVQ. A number runs AVQ from that many tokens on.
        **measurement: further arguments of `measure_error`, such as `height=1024, width=1024`.

    Returns:
        `pipe`.

    Raises:
        TypeError: `pipe` has no UNet or transformer that AVQ knows, `source` or `tolerance` is
            something else, a tolerance lacks what it is measured on, or there are arguments of a
            measurement without one.
        ValueError: codebooks or profile belong to another model, backend or route are unknown, the
            UNet has LinFusion layers, the transformer runs in context parallel, or the tolerance is
            not above 0.
    """
    if not is_transformer(pipe):
        return apply.apply_avq(
            pipe,
            source,
            tolerance=tolerance,
            prompt=prompt,
            backend=backend,
            route=route,
            **measurement,
        )
    source = resolve_source(
        source,
        tolerance,
        [prompt] if isinstance(prompt, str) else prompt,
        measurement,
        name="prompt",
        what="a prompt",
        measure=partial(dit_errors.measure_error, pipe),
    )
    apply_to_transformers(pipe, source, backend, route, tolerance)
    return pipe


def measure_error(
    pipe: DiffusionPipeline,
    prompts: Sequence[str],
    config: AVQConfig | None = None,
    *,
    num_inference_steps: int = 6,
    parts: int | None = None,
    seed: int = 0,
    progress: bool = True,
    **pipe_arguments: Any,
) -> ErrorProfile:
    """Measure the error of AVQ with several sizes in every layer, while the pipeline runs exact.

    The error is |avq - exact| / |exact| of the attention of all heads before the output projection,
    the largest over the calls; in transformers that of the image's tokens. It holds for images of
    the size that was measured. Four prompts or more make it hold for others, too. AVQ need not be
    applied, and stays as it is.

    Args:
        pipe: a pipeline with a `unet` or a `transformer`.
        prompts: one or a handful, such as the pipeline will see; number i runs with seed
            `seed + i`.
        config: levels, exact layers, tiles and updates; its sizes join those that are measured.
            None is the finest level with self-attention, or all blocks of a transformer.
        num_inference_steps: denoising steps of each run.
        parts: how many equal parts of the training timesteps may get sizes of their own. A part
            without a denoising step takes the sizes of the part before. None is 3 for a UNet, and
            1 for a transformer, which has no other number.
        seed: of the noise.
        progress: show a progress bar.
        **pipe_arguments: further arguments of the pipeline's call, such as `height` or `image`.

    Returns:
        A profile for `apply_avq(pipe, profile, tolerance=0.1)`.

    Raises:
        TypeError: `pipe` is not a pipeline with a UNet or transformer, `prompts` is one string, an
            argument has the wrong type, or is prompt, generator or output_type.
        ValueError: there is no prompt, no step, no part or no layer, `config` has overrides, stored
            codewords, a key norm or tiled importance, attention has NaN or infinity, or there are
            several parts for a sampler without training timesteps, such as EDM's.
        RuntimeError: a layer did not run, as in a compiled UNet, or AVQ would serve none of its
            calls.
    """
    is_dit = is_transformer(pipe)
    measure = dit_errors.measure_error if is_dit else error_measurement.measure_error
    return measure(
        pipe,
        prompts,
        config,
        num_inference_steps=num_inference_steps,
        parts=(1 if is_dit else 3) if parts is None else parts,
        seed=seed,
        progress=progress,
        **pipe_arguments,
    )


def remove_avq(pipe: PipelineOrUNet) -> PipelineOrUNet:
    """Undo `apply_avq`: put the same processor objects back, and leave nothing of AVQ.

    A processor that another tool has since set over AVQ stays. Without AVQ nothing happens.

    Args:
        pipe: as for `apply_avq`.

    Returns:
        `pipe`.

    Raises:
        TypeError: `pipe` has no UNet or transformer.
    """
    if not is_transformer(pipe):
        return apply.remove_avq(pipe)
    remove_from_transformers(pipe)
    return pipe


@contextmanager
def avq_disabled(pipe: DiffusionPipeline | nn.Module) -> Iterator[None]:
    """Run exact attention inside the `with` block, in all threads that use these models.

    Blocks may be nested, and may overlap in threads: AVQ is back when the last one has ended. AVQ
    that `apply_avq` installs inside a block runs at once. Gradient checkpointing recomputes a layer
    as it ran; a checkpoint around a whole UNet recomputes it as it would run during backward.

    Args:
        pipe: as for `apply_avq`.

    Raises:
        TypeError: `pipe` has no UNet or transformer.
    """
    with (
        disabled(transformer_states(pipe).values())
        if is_transformer(pipe)
        else apply.avq_disabled(pipe)
    ):
        yield


def set_num_refined(
    pipe: PipelineOrUNet,
    num_refined: int | str | Schedule | Mapping[str, int | str | Schedule],
    *,
    level: int | None = None,
    layer: str | None = None,
) -> PipelineOrUNet:
    """Change how many parents each query tile refines: quality against speed, without reloading.

    A schedule switches by the timestep of each UNet call. In eager code, threads that generate with
    one UNet each follow their own timestep. Compiled code does not.

    `torch.compile(unet)` makes one graph for each part of a schedule. Blocks that are compiled one
    by one make one for each number of parents. For more than 8, raise
    `torch._dynamo.config.recompile_limit`. If the UNet must compile without a graph break
    (`fullgraph=True`), compile it by `pipe.unet = torch.compile(pipe.unet, fullgraph=True)` before
    setting a schedule. The schedule then acts in calls of the compiled UNet, not of the one inside.
    A CUDA graph keeps the number of parents that it was captured with. Gradient checkpointing
    recomputes a layer with the number that it ran with. Transformers have no schedules.

    Args:
        pipe: a pipeline, UNet or transformer with AVQ.
        num_refined: between 0 and the number of parents of every layer concerned. Or a schedule in
            training timesteps, which fall from 1000 to 0: `{1000: 8, 400: 16}` refines 8 parents
            from timestep 1000 down and 16 from 400 down. The UNet then refuses samplers with other
            timesteps, such as EDM's and IPNDM. `"exact"` in place of a number is exact attention:
            `{1000: "exact", 900: 16, 100: "exact"}` for the first and last steps. Or a plan, such
            as `CaptureProfile.at_least` makes: numbers or schedules by the name of a layer, or of a
            module for all its layers. Longer names win over shorter ones. Layers without an entry
            stay as they are; an entry without a layer is refused.
        level: change only the layers of this UNet level.
        layer: change only the layer of this name, or the layers in this module, such as
            `"up_blocks.3"`.

    Returns:
        `pipe`.

    Raises:
        TypeError: `pipe` has no UNet or transformer, or a number of parents or a timestep is not an
            int.
        ValueError: no AVQ layer matches, a plan's entry names none of the matching layers, a layer
            cannot refine that many parents, a schedule does not begin at timestep 1000, or a
            transformer is given one.
    """
    if not is_transformer(pipe):
        return refinement.set_num_refined(pipe, num_refined, level=level, layer=layer)
    set_transformer_refinement(pipe, num_refined, level, layer)
    return pipe


def summary(pipe: DiffusionPipeline | nn.Module) -> Summary:
    """Report whether each self-attention layer runs AVQ or exact attention, and why.

    The names of a ControlNet's layers begin with `controlnet.`.

    Args:
        pipe: as for `apply_avq`.

    Raises:
        TypeError: `pipe` has no UNet or transformer that AVQ knows.
    """
    return transformer_summary(pipe) if is_transformer(pipe) else report.summary(pipe)
