"""`summary` of transformers."""

from diffusers import DiffusionPipeline
from torch import nn

from avq_diffusers.dit.apply import other_attention
from avq_diffusers.dit.layers import TransformerLayer, transformer_layers, transformers_of
from avq_diffusers.plugin.report import Summary, layer_report, runs_by_state


def transformer_summary(pipe: DiffusionPipeline | nn.Module) -> Summary:
    """Whether each layer runs AVQ or exact attention, and why.

    Raises:
        TypeError: AVQ does not know the transformer.
    """
    return Summary(
        tuple(
            layer_report(prefix + layer.name, layer, layer.avq_state, _runs(layer), {})
            for prefix, model in transformers_of(pipe).items()
            for layer in transformer_layers(model)
        )
    )


def _runs(layer: TransformerLayer) -> str:
    if layer.avq_state is None:
        return f"exact: {type(layer.attn.processor).__name__}"
    other = other_attention(layer)
    return runs_by_state(layer.avq_state) if other is None else f"custom: {other}"
