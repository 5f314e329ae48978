"""The accelerator of a training run."""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DynamoBackend


def make_accelerator(config: Any, *, mixed_precision: str = "no", **options: Any) -> Accelerator:
    """Create the accelerator of a run, which itself compiles what `config.compile` asks for.

    Args:
        config: the run's configuration.
        mixed_precision, options: arguments of `Accelerator`.

    Raises:
        ValueError: the device does not support compilation, or the launcher asks for it.
    """
    # The objective reduces the codebook statistics, once per step.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    accelerator = Accelerator(mixed_precision=mixed_precision, kwargs_handlers=[ddp], **options)
    if config.compile and accelerator.device.type != "cuda":  # see `Objective.compile_unets`
        raise ValueError("compile: true needs a CUDA GPU; set compile to false.")
    backend = accelerator.state.dynamo_plugin.backend
    if backend != DynamoBackend.NO:
        raise ValueError(
            f"the setting compile decides what is compiled; launch with --dynamo_backend no "
            f"instead of {backend.value.lower()}."
        )
    return accelerator
