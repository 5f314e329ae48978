"""SD3's joint attention, with AVQ for the image.

Image keys are quantized, text keys are sinks. Image and text queries attend to both.
"""

from typing import Any

import torch
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from torch import Tensor, nn

from avq_diffusers.hosts.core import (
    ATTRIBUTE,
    AVQ_CALL,
    Layer,
    LayerState,
    as_attended,
    own_name,
)
from avq_diffusers.hosts.models.dispatch import TransformerWatch
from avq_diffusers.hosts.models.processors import ProcessorHost


class AVQJointProcessor(JointAttnProcessor2_0):
    """Joint attention: AVQ in the layers that `apply_avq` chose, exact elsewhere."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend with the image (B, N, channels) and, if given, the text (B, T, channels).

        Returns:
            The image's output, or the outputs of image and text.
        """
        state: LayerState | None = getattr(attn, ATTRIBUTE, None)
        if state is None:
            return super().__call__(attn, hidden_states, encoder_hidden_states)
        reason = state.exact_because(hidden_states.shape[1], hidden_states)
        state.count(reason or AVQ_CALL)
        if reason is not None:
            return super().__call__(attn, hidden_states, encoder_hidden_states)
        query, key, value = _heads(attn, hidden_states, "to_{}", "norm_{}")
        if encoder_hidden_states is None:
            return _project(attn, _merged(state.attend(query, key, value)))
        text_query, text_key, text_value = _heads(
            attn, encoder_hidden_states, "add_{}_proj", "norm_added_{}"
        )
        query = _joined(query, text_query)
        attended = state.attend(query, key, value, sink_key=text_key, sink_value=text_value)
        image, text = (_merged(x) for x in attended.split([key.shape[2], text_key.shape[2]], dim=2))
        if not attn.context_pre_only:  # otherwise the block drops the text
            text = attn.to_add_out(text)
        return _project(attn, image), text


def _heads(attn: Attention, hidden_states: Tensor, projection: str, norm: str) -> list[Tensor]:
    """Normed queries, keys and values (B, H, N, D), in the dtype PyTorch would attend in."""
    heads = []
    for name in "qkv":
        tokens = getattr(attn, projection.format(name))(hidden_states)
        tokens = tokens.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
        own_norm = getattr(attn, norm.format(name), None)  # values have none
        heads.append(as_attended(tokens if own_norm is None else own_norm(tokens)))
    return heads


def _joined(image: Tensor, text: Tensor) -> Tensor:
    """(B, H, N + T, D) view of (B, N + T, H, D) memory."""
    return torch.cat([image.transpose(1, 2), text.transpose(1, 2)], dim=1).transpose(1, 2)


def _merged(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def _project(attn: Attention, image: Tensor) -> Tensor:
    return attn.to_out[1](attn.to_out[0](image))


class JointHost(ProcessorHost):
    """The joint attention and the image-only attention of SD3's blocks."""

    kind = "transformer"
    watch = TransformerWatch
    ours = AVQJointProcessor()
    usual = JointAttnProcessor2_0

    def layers(self, model: nn.Module) -> list[Layer]:
        joint = {
            attn
            for block in model.modules()
            if isinstance(block, JointTransformerBlock)
            for attn in (block.attn, block.attn2)
        }
        return [
            Layer(own_name(path), 0, x.heads, x.inner_dim // x.heads, x, model, model, model)
            for path, x in model.named_modules()
            if x in joint
        ]

    def is_plain(self, processor: Any) -> bool:
        return type(processor) is JointAttnProcessor2_0


JOINT = JointHost()
