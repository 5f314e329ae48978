"""Ways to run a model's self-attention with something else, and back."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from avq_diffusers import AVQConfig, apply_avq, remove_avq, select_layers, set_num_refined
from avq_diffusers.mini import is_mini_sd3

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin, UNet2DConditionModel

    from avq_diffusers.hosts import AttentionFunction


def load_pipeline(
    model: str, device: torch.device, dtype: str = "float32", **options: Any
) -> "DiffusionPipeline":
    """Load a pipeline by folder or Hub id, without its own progress bars.

    Args:
        model: the folder or Hub id; mini-sd3's folder gets the parts that it shares with mini-sd.
        device: where it goes.
        dtype: name of the weights' dtype.
        options: other arguments of `from_pretrained`.

    Raises:
        OSError: there is no such model.
    """
    from diffusers import DiffusionPipeline

    from avq_diffusers.mini.loading import load_mini_sd3

    load = load_mini_sd3 if is_mini_sd3(model) else DiffusionPipeline.from_pretrained
    pipe = load(model, dtype=getattr(torch, dtype), **options).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def network_of(pipe: "DiffusionPipeline") -> "ModelMixin":
    """The UNet or transformer of a pipeline."""
    return pipe.components.get("unet") or pipe.components["transformer"]


@contextmanager
def avq_in(
    model: Any, source: Any, *, num_refined: int | None = None, **options: Any
) -> Iterator[None]:
    """Run AVQ in a pipeline or model inside the `with` block, also where exact is faster.

    Args:
        model: as in `apply_avq`.
        source: what `apply_avq` takes: a configuration, codebooks or a profile.
        num_refined: parents refined per query tile, instead of the source's own number.
        options: its other arguments.
    """
    apply_avq(model, source, route="always", **options)
    try:
        if num_refined is not None:
            set_num_refined(model, num_refined)
        yield
    finally:
        remove_avq(model)


def all_layers_by(
    pipe: "DiffusionPipeline", attend: "AttentionFunction", levels: tuple[int, ...]
) -> AbstractContextManager[None]:
    """Run all layers at these levels with a function in place of AVQ."""
    from avq_diffusers.hosts import attention_replaced

    network = network_of(pipe)
    names = [layer.name for layer in select_layers(network, levels)]
    return attention_replaced(network, dict.fromkeys(names, attend), AVQConfig(levels=levels))


@contextmanager
def layers_run_by(unet: "UNet2DConditionModel", processors: Mapping[str, Any]) -> Iterator[None]:
    """Run layers of a UNet with these processors, then restore the previous ones."""
    with ExitStack() as stack:
        for layer in select_layers(unet):
            if layer.name in processors:
                stack.callback(layer.attn.set_processor, layer.attn.processor)
                layer.attn.set_processor(processors[layer.name])
        yield
