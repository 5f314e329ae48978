"""Run a pipeline over prompts to measure it, without images and progress bars."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline

# Arguments of the pipeline's call that `run_prompts` sets.
RUN_ARGUMENTS = ("prompt", "generator", "output_type")


def checked_prompts(
    pipe: DiffusionPipeline,
    prompts: Sequence[str],
    arguments: Mapping[str, Any],
    model: str = "unet",
) -> list[str]:
    """Check the prompts and `arguments` of `run_prompts`, and return the prompts as a list.

    Raises:
        TypeError: `pipe` is not a pipeline with such a model, `prompts` is not a sequence of
            strings, or an argument is one that `run_prompts` sets or that the pipeline does not
            take.
        ValueError: there is no prompt.
    """
    if getattr(pipe, model, None) is None:
        raise TypeError(f"expected a pipeline with a {model}, but got {type(pipe).__name__}.")
    for name in RUN_ARGUMENTS:
        if name in arguments:
            raise TypeError(
                f"{', '.join(RUN_ARGUMENTS)} are set for each prompt and cannot be passed on to "
                f"the pipeline, but got {name}."
            )
    known = inspect.signature(pipe.__call__).parameters
    for name in arguments:
        # Pipelines take any name for the sake of old ones. A wrapper's signature tells nothing.
        if "prompt" in known and name not in known:
            raise TypeError(
                f"{type(pipe).__name__} takes no argument {name}, only {', '.join(known)}."
            )
    if isinstance(prompts, str):
        raise TypeError("prompts must be a sequence of strings, but got one string.")
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be a sequence of strings, but got {prompts!r}.")
    prompts = list(prompts)
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise TypeError(f"prompts must be a sequence of strings, but got {prompt!r} in it.")
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, but got none.")
    return prompts


def run_prompts(
    pipe: DiffusionPipeline,
    prompts: Iterable[str],
    num_inference_steps: int,
    seed: int,
    arguments: Mapping[str, Any],
) -> None:
    """Denoise prompt after prompt, number i with seed `seed + i`, without decoding."""
    with quiet(pipe):
        for index, prompt in enumerate(prompts):
            pipe(
                prompt,
                num_inference_steps=num_inference_steps,
                generator=torch.Generator().manual_seed(seed + index),
                output_type="latent",
                **arguments,
            )


def lacks_memory(error: RuntimeError) -> bool:
    """Whether PyTorch ran out of memory; only on CUDA this has its own exception."""
    return any(text in str(error) for text in ("out of memory", "can't allocate memory"))


@contextmanager
def quiet(pipe: DiffusionPipeline) -> Iterator[None]:
    """Hide the pipeline's own progress bars: they would break up ours."""
    before = getattr(pipe, "_progress_bar_config", {})
    pipe.set_progress_bar_config(**{**before, "disable": True})
    try:
        yield
    finally:
        pipe.set_progress_bar_config(**before)
