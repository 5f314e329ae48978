"""What a model is measured on: prompts for its pipeline, or images for a vision model."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModularPipeline
from torch import Tensor, nn

from avq_diffusers.config import check_int, check_text
from avq_diffusers.hosts.core.host import Host

# Arguments of the pipeline's call that `run_examples` sets.
RUN_ARGUMENTS = ("prompt", "generator", "output_type")


def checked_examples(
    pipe: DiffusionPipeline | nn.Module,
    host: Host,
    examples: Any,
    seed: int,
    arguments: Mapping[str, Any],
) -> list[Any]:
    """Check the arguments of `run_examples` and return the examples as a list."""
    check_int("seed", seed, 0)
    for name, value in arguments.items():
        if name in ("height", "width") and value is not None:
            check_int(name, value, 1)
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str):
                check_text(name, text)
    if not host.has_prompts:
        return _checked_images(examples)
    if isinstance(pipe, nn.Module):
        raise TypeError(f"expected the pipeline of a {host.kind}, but got {type(pipe).__name__}.")
    for name in RUN_ARGUMENTS:
        if name in arguments:
            raise TypeError(
                f"{', '.join(RUN_ARGUMENTS)} are set for each prompt and cannot be passed on to "
                f"the pipeline, but got {name}."
            )
    if isinstance(pipe, ModularPipeline):
        raise TypeError(
            f"{type(pipe).__name__} is modular and cannot run examples; measure a pipeline of "
            f"the same components, such as one of DiffusionPipeline.from_pretrained."
        )
    known = inspect.signature(pipe.__call__).parameters
    for name in arguments:
        # Some pipelines accept any name, for deprecated arguments; a wrapper's signature is opaque.
        if "prompt" in known and name not in known:
            raise TypeError(
                f"{type(pipe).__name__} takes no argument {name}, only {', '.join(known)}."
            )
    if not isinstance(examples, Iterable):
        raise TypeError(f"prompts must be a string or a sequence of strings, but got {examples!r}.")
    prompts = [examples] if isinstance(examples, str) else list(examples)
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise TypeError(f"prompts must be a sequence of strings, but got {prompt!r} in it.")
        if not prompt.strip():
            raise ValueError("prompts must not be empty, but one is.")
        check_text("prompt", prompt)
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, but got none.")
    return prompts


def _checked_images(pixel_values: Any) -> list[Tensor]:
    """Batches (B, C, H, W), all of one height and width."""
    if isinstance(pixel_values, str) or not isinstance(pixel_values, Iterable):
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


@torch.no_grad()
def run_examples(
    pipe: Any,
    host: Host,
    examples: Iterable[Any],
    num_inference_steps: int,
    seed: int,
    arguments: Mapping[str, Any],
) -> Iterator[Any]:
    """Run the examples in order: prompt i with seed `seed + i`, without decoding.

    Yields:
        What the pipeline or model returns, by example.
    """
    if not host.has_prompts:
        for batch in examples:
            yield pipe(pixel_values=batch, **arguments)
        return
    with _quiet(pipe):
        for index, prompt in enumerate(examples):
            yield pipe(
                prompt=prompt,  # not the first argument of every pipeline
                num_inference_steps=num_inference_steps,
                generator=torch.Generator().manual_seed(seed + index),
                output_type="latent",
                **arguments,
            )


@contextmanager
def _quiet(pipe: DiffusionPipeline) -> Iterator[None]:
    """Hide the pipeline's own progress bars, which would break up ours."""
    before = getattr(pipe, "_progress_bar_config", {})
    pipe.set_progress_bar_config(**{**before, "disable": True})
    try:
        yield
    finally:
        pipe.set_progress_bar_config(**before)


def as_examples(prompt: str | Sequence[str] | None, pixel_values: Any, host: Host) -> Any:
    """The examples among the arguments of `apply_avq`, or None."""
    other = pixel_values if host.has_prompts else prompt
    if other is not None:
        raise TypeError(f"a {host.kind} is measured on {host.examples}=...; pass that.")
    if not host.has_prompts:
        return pixel_values
    return [prompt] if isinstance(prompt, str) else prompt
