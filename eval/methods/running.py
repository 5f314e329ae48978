"""Ways to run a model's self-attention with something else, and back."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from avq_diffusers import AVQConfig, select_layers

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin, UNet2DConditionModel

    from avq_diffusers.hosts import AttentionFunction


def network_of(pipe: "DiffusionPipeline") -> "ModelMixin":
    """The UNet or transformer of a pipeline."""
    return pipe.components.get("unet") or pipe.components["transformer"]


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
