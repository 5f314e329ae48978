"""Replace a vision model's attention by name, and observe its keys.

Shapes: B batch, H heads, N tokens of a grid in raster order, T tokens before them, such as CLS,
S sampled keys, D head dim.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from avq_diffusers import AVQConfig, remove_avq, select_layers
from avq_diffusers.attention.tensors import Attended, Tensors
from avq_diffusers.config import Spec
from avq_diffusers.hosts import attention_replaced
from distill.attention import CHILD, attend_exactly
from distill.stored import StoredAttention, learn_attention

DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")


def set_attention(
    model: PreTrainedModel, avq: AVQConfig | None, *, diveq: bool
) -> dict[str, StoredAttention]:
    """Replace the self-attention of all layers; the model's weights stay unchanged.

    Args:
        model: a model with exact attention.
        avq: its configuration; None is exact attention and changes nothing.
        diveq: as in `learn_attention`, which says what is returned.

    Raises:
        TypeError: the model has no attention layer that can be replaced.
        ValueError: the attention has dropout, which would make the layers run exact attention.
    """
    if avq is None:
        return {}
    layers = select_layers(model)
    for name in DROPOUTS:
        if getattr(layers[0].attn.config, name, 0):
            raise ValueError(
                f"attention with dropout cannot be replaced; set {name} of the model's config to 0."
            )
    return learn_attention(model, avq, diveq=diveq)


def remove_attention(model: PreTrainedModel) -> None:
    """Undo `set_attention`; the model's weights stay unchanged."""
    remove_avq(model)
    for layer in select_layers(model):
        if hasattr(layer.attn, CHILD):
            delattr(layer.attn, CHILD)


@torch.no_grad()
def keys_of_images(model: PreTrainedModel, images: Tensor) -> Iterator[dict[str, Tensor]]:
    """The patches' keys (H, n, D) under exact attention, for each image (3, S, S), by layer.

    Attention is that of `model` again when the last keys have been taken.

    Raises:
        TypeError: the model has no layer for AVQ.
        ValueError: a layer does not attend to the patches.
    """
    keys: dict[str, Tensor] = {}

    def record(name: str, tensors: Tensors, spec: Spec, backend: str) -> Attended:
        keys[name] = tensors.key[0]
        return attend_exactly(tensors, spec, backend)

    functions = {layer.name: partial(record, layer.name) for layer in select_layers(model)}
    was_training = model.training
    model.eval()
    try:
        with attention_replaced(model, functions, AVQConfig()):
            for image in images.split(1):
                model(pixel_values=image)
                if idle := functions.keys() - keys.keys():
                    raise ValueError(
                        f"{min(idle)} of {type(model).__name__} does not attend to the patches."
                    )
                yield {**keys}
    finally:
        model.train(was_training)
