"""The errors of a transformer's layers along the ladder of sizes."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from diffusers import DiffusionPipeline
from tqdm import tqdm

from avq_diffusers.config import AVQConfig
from avq_diffusers.dit.apply import by_full_name, install, make_states, present_states, uninstall
from avq_diffusers.plugin.error_measurement import check_measured, measuring
from avq_diffusers.plugin.error_profile import ErrorProfile
from avq_diffusers.plugin.probe import check_probe
from avq_diffusers.plugin.prompts import checked_prompts, run_prompts


@torch.no_grad()
def measure_error(
    pipe: DiffusionPipeline,
    prompts: Sequence[str],
    config: AVQConfig | None = None,
    *,
    num_inference_steps: int = 6,
    parts: int = 1,
    seed: int = 0,
    progress: bool = True,
    **pipe_arguments: Any,
) -> ErrorProfile:
    """`avq_diffusers.measure_error` of transformers.

    Raises:
        TypeError, ValueError, RuntimeError: as there.
    """
    prompts = checked_prompts(pipe, prompts, pipe_arguments, model="transformer")
    check_probe(num_inference_steps, parts)
    if parts > 1:
        raise ValueError(f"a transformer has no schedules, so parts must be 1, but got {parts}.")
    config = AVQConfig() if config is None else config
    check_measured(config)
    states = make_states(pipe, config, "auto", "always")
    earlier = present_states(pipe)
    bar = tqdm(desc="error", unit=" calls", disable=not progress)

    def see_call(*_: Any) -> None:
        bar.update()

    try:
        with bar, ExitStack() as hooks:
            for model, of_model in states.items():
                uninstall(model)
                install(model, of_model)
                hooks.enter_context(model.register_forward_pre_hook(see_call))
            profile = hooks.enter_context(
                measuring(by_full_name(pipe, states), config, progress=progress)
            )
            run_prompts(pipe, prompts, num_inference_steps, seed, pipe_arguments)
            return profile()
    finally:
        for model, of_model in earlier.items():
            uninstall(model)
            if of_model:
                install(model, of_model)
