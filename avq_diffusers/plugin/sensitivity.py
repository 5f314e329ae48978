"""How much AVQ in each layer alone changes the predicted noise, to choose layers to keep exact."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from tqdm import tqdm

from avq_diffusers.config import check_int
from avq_diffusers.plugin.apply import avq_disabled
from avq_diffusers.plugin.layer_state import applied_states
from avq_diffusers.plugin.layers import unet_of
from avq_diffusers.plugin.prompts import checked_prompts, run_prompts


@torch.no_grad()
def measure_sensitivity(
    pipe: DiffusionPipeline,
    prompts: Sequence[str],
    *,
    num_inference_steps: int = 8,
    seed: int = 0,
    progress: bool = True,
    **pipe_arguments: Any,
) -> dict[str, float]:
    """Measure the error of the predicted noise when AVQ runs in one layer alone.

    The pipeline runs exact attention. At each step the UNet runs again on the same inputs, once for
    every AVQ layer. `AVQConfig.exact` is for layers whose error stands out. A layer whose route is
    exact on this GPU has no error; to measure it, apply AVQ with `route="always"`.

    Args:
        pipe: a Stable Diffusion pipeline with AVQ; left as it was.
        prompts: one or a handful; number i runs with seed `seed + i`.
        num_inference_steps: denoising steps of each run.
        seed: of the noise.
        progress: show a progress bar.
        **pipe_arguments: further arguments of the pipeline's call, such as `height` or `image`.

    Returns:
        By layer name, |s - t| / |t| over all steps and prompts. Here s is the UNet's output with
        AVQ in that layer, and t its output without.

    Raises:
        TypeError: `pipe` is not a pipeline with a UNet, `prompts` is one string, the number of
            steps is not an int, or an argument is prompt, generator or output_type.
        ValueError: there is no prompt, no step or no AVQ.
        RuntimeError: the pipeline did not call its UNet, as img2img of low strength with few steps.
    """
    prompts = checked_prompts(pipe, prompts, pipe_arguments)
    check_int("num_inference_steps", num_inference_steps, 1)
    states = applied_states(pipe)
    errors = dict.fromkeys((layer.name for layer in states), 0.0)
    expected = 0.0
    # Of the UNet calls under way, the pipeline's first. Flattened, because the UNet empties the
    # list with a T2I-Adapter's features.
    inputs: list[tuple[list[Any], TreeSpec]] = []

    def keep_inputs(unet: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(tree_flatten((args, kwargs)))

    def compare(
        unet: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        nonlocal expected
        if len(inputs) == 1:
            exact = output[0].float()
            expected += float(exact.square().sum())
            for layer, state in states.items():
                args, kwargs = tree_unflatten(*inputs[0])
                state.enabled = True
                try:
                    changed = unet(*args, **kwargs)[0].float()
                finally:
                    state.enabled = False
                errors[layer.name] += float((changed - exact).square().sum())
            bar.update()
        inputs.pop()

    unet = unet_of(pipe)
    bar = tqdm(total=len(prompts) * num_inference_steps, desc="sensitivity", disable=not progress)
    with (
        bar,
        avq_disabled(pipe),
        unet.register_forward_pre_hook(keep_inputs, with_kwargs=True),
        unet.register_forward_hook(compare, with_kwargs=True),
    ):
        run_prompts(pipe, prompts, num_inference_steps, seed, pipe_arguments)
    if expected == 0:
        raise RuntimeError(
            f"the UNet did not run in {num_inference_steps} steps; take more, or for img2img a "
            "larger strength."
        )
    return {name: (error / expected) ** 0.5 for name, error in errors.items()}
