"""`AVQJointProcessor`: SD3's joint attention, its image by AVQ.

Keys of the image are quantized, keys of the text are sinks. Queries of image and text attend to
both.
"""

from typing import Any

import torch
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from torch import Tensor

from avq_diffusers.plugin.layer_state import AVQ_CALL, LayerState


class AVQJointProcessor(JointAttnProcessor2_0):
    """Joint attention with AVQ in the layers that `apply_avq` chose, elsewhere exact."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend with the image (B, N, channels) and the text (B, T, channels), if there is one.

        Returns:
            The image's output, or those of image and text.
        """
        state: LayerState | None = getattr(attn, "_avq", None)
        if state is None:
            return super().__call__(attn, hidden_states, encoder_hidden_states)
        reason = _exact_because(state, hidden_states)
        if not torch.compiler.is_compiling():
            state.count(AVQ_CALL if reason is None else reason)
        if reason is not None:
            return super().__call__(attn, hidden_states, encoder_hidden_states)
        query, key, value = _image_heads(attn, hidden_states)
        if encoder_hidden_states is None:
            return _project(attn, state.attend(query, key, value))
        text_query, text_key, text_value = _text_heads(attn, encoder_hidden_states)
        if not attn.context_pre_only:  # else the block drops the text
            query = _joined(query, text_query)
        attended = state.attend(query, key, value, sink_key=text_key, sink_value=text_value)
        if attn.context_pre_only:
            return _project(attn, attended), encoder_hidden_states
        image, text = attended.split([key.shape[2], text_key.shape[2]], dim=2)
        return _project(attn, image), attn.to_add_out(_merged(text))


def _exact_because(state: LayerState, hidden_states: Tensor) -> str | None:
    """Why this call runs exact attention; None if it runs AVQ."""
    switched_off = state.present_call().exact_because
    if switched_off is not None:
        return switched_off
    if not state.is_on_grid(hidden_states):
        return "tokens are not the grid"
    return state.routed_because(hidden_states.shape[1], hidden_states)


def _image_heads(attn: Attention, hidden_states: Tensor) -> list[Tensor]:
    return _heads(
        attn,
        (attn.to_q(hidden_states), attn.norm_q),
        (attn.to_k(hidden_states), attn.norm_k),
        (attn.to_v(hidden_states), None),
    )


def _text_heads(attn: Attention, hidden_states: Tensor) -> list[Tensor]:
    return _heads(
        attn,
        (attn.add_q_proj(hidden_states), attn.norm_added_q),
        (attn.add_k_proj(hidden_states), attn.norm_added_k),
        (attn.add_v_proj(hidden_states), None),
    )


def _heads(attn: Attention, *projected: tuple[Tensor, Any]) -> list[Tensor]:
    """Queries, keys and values (B, H, N, D), normed, in the dtype in which PyTorch would attend."""
    heads = []
    for tokens, norm in projected:
        tokens = tokens.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
        heads.append(as_attended(tokens if norm is None else norm(tokens)))
    return heads


def as_attended(tokens: Tensor) -> Tensor:
    """Convert to the dtype that autocast gives to attention."""
    device = tokens.device.type
    if not torch.is_autocast_enabled(device):
        return tokens
    return tokens.to(torch.get_autocast_dtype(device))


def _joined(image: Tensor, text: Tensor) -> Tensor:
    """(B, H, N + T, D) view of (B, N + T, H, D) memory."""
    return torch.cat([image.transpose(1, 2), text.transpose(1, 2)], dim=1).transpose(1, 2)


def _merged(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def _project(attn: Attention, image: Tensor) -> Tensor:
    return attn.to_out[1](attn.to_out[0](_merged(image)))
