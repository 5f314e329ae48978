"""SD3's joint attention, with AVQ for the image.

Image keys are quantized, text keys are sinks. Image and text queries attend to both.
"""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from torch import Tensor, nn

from avq_diffusers.hosts.core import (
    ATTRIBUTE,
    AVQ_CALL,
    Host,
    Layer,
    LayerState,
    Other,
    Others,
    Tokens,
    Watch,
    as_attended,
    named_arguments,
    own_name,
)
from avq_diffusers.hosts.models.grids import READS_THE_GRID, TEXT, latent_grid


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
        query, key, value = _image_heads(attn, hidden_states)
        if encoder_hidden_states is None:
            return _project(attn, _merged(state.attend(query, key, value)))
        text_query, text_key, text_value = _text_heads(attn, encoder_hidden_states)
        query = _joined(query, text_query)
        attended = state.attend(query, key, value, sink_key=text_key, sink_value=text_value)
        image, text = (_merged(x) for x in attended.split([key.shape[2], text_key.shape[2]], dim=2))
        if not attn.context_pre_only:  # otherwise the block drops the text
            text = attn.to_add_out(text)
        return _project(attn, image), text


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
    """Normed queries, keys and values (B, H, N, D), in the dtype PyTorch would attend in."""
    heads = []
    for tokens, norm in projected:
        tokens = tokens.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
        heads.append(as_attended(tokens if norm is None else norm(tokens)))
    return heads


def _joined(image: Tensor, text: Tensor) -> Tensor:
    """(B, H, N + T, D) view of (B, N + T, H, D) memory."""
    return torch.cat([image.transpose(1, 2), text.transpose(1, 2)], dim=1).transpose(1, 2)


def _merged(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def _project(attn: Attention, image: Tensor) -> Tensor:
    return attn.to_out[1](attn.to_out[0](image))


class JointHost(Host):
    """The joint attention and the image-only attention of SD3's blocks."""

    kind = "transformer"

    def find(self, module: nn.Module) -> ModelMixin | None:
        model = next((x for x in module.modules() if isinstance(x, ModelMixin)), None)
        if model is None or not any(isinstance(x, JointTransformerBlock) for x in model.modules()):
            return None
        return model

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

    def attention_of(self, attn: Attention) -> Any:
        return attn.processor

    def give_avq(self, attn: Attention, state: LayerState) -> None:
        if type(attn.processor) is JointAttnProcessor2_0:
            attn.set_processor(_PROCESSOR)

    def restore(self, attn: Attention, own: LayerState) -> None:
        if isinstance(attn.processor, AVQJointProcessor):
            attn.set_processor(own.previous)

    def tidy(self, model: nn.Module) -> None:
        for attn in model.modules():
            if isinstance(attn, Attention) and isinstance(attn.processor, AVQJointProcessor):
                attn.set_processor(JointAttnProcessor2_0())

    def other_attention(self, layer: Layer) -> Other | None:
        processor = layer.attn.processor
        if isinstance(processor, AVQJointProcessor):
            return None
        return Other(type(processor).__name__, type(processor) is JointAttnProcessor2_0)

    def watch(self, layers: Sequence[Layer], others: Others) -> Watch:
        return _TransformerWatch(self, layers, others)


class _TransformerWatch(Watch):
    """The hooks of an SD3 transformer; its input is the latents."""

    @torch.compiler.disable(reason=READS_THE_GRID)
    def begin(self, caller: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = named_arguments(type(caller), args, kwargs)
        hidden_states = arguments["hidden_states"]
        grid = latent_grid(caller.config, arguments)
        num_text = TEXT(arguments, 0)[""]
        # "attn2" first: "attn" begins its name, too.
        names = [layer.name for layer in reversed(self.layers)]
        beside = {name: 0 if name.endswith("attn2") else num_text for name in names}
        self.enter(caller, Tokens(hidden_states, hidden_states.dtype, grid, beside))


JOINT = JointHost()
_PROCESSOR = AVQJointProcessor()
