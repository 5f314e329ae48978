"""Models of diffusers whose layers get an attention processor of ours in place of a plain one."""

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

from diffusers.models.attention_processor import Attention, AttentionProcessor
from torch import nn

from avq_diffusers.hosts.core import Host, Layer, LayerState, Other


class Previous(NamedTuple):
    """The processor of a layer before AVQ, which serves the calls that AVQ does not.

    Attributes:
        is_plain: whether its self-attention is exact attention.
    """

    processor: AttentionProcessor
    is_plain: bool


class ProcessorHost(Host):
    """Replaces plain attention processors, and keeps all others.

    Attributes:
        ours: the processor of layers with AVQ, one for all.
        usual: the class of diffusers' default processor.
    """

    ours: ClassVar[Any]
    usual: ClassVar[type]

    @abstractmethod
    def is_plain(self, processor: Any) -> bool:
        """Whether a processor's self-attention is exact attention, which AVQ can take over."""

    def attention_of(self, attn: Attention) -> Previous:
        return Previous(attn.processor, self.is_plain(attn.processor))

    def give_avq(self, attn: Attention, state: LayerState) -> None:
        if self.is_plain(attn.processor):
            attn.set_processor(self.ours)

    def restore(self, attn: Attention, state: LayerState) -> None:
        if isinstance(attn.processor, type(self.ours)):
            attn.set_processor(state.previous.processor)

    def reinstate(self, attn: Attention, state: LayerState, ours: Previous) -> None:
        attn.set_processor(ours.processor)

    def tidy(self, model: nn.Module) -> None:
        for attn in model.modules():
            if isinstance(attn, Attention) and isinstance(attn.processor, type(self.ours)):
                attn.set_processor(self.usual())

    def other_attention(self, layer: Layer) -> Other | None:
        processor, state = layer.attn.processor, layer.avq_state
        if isinstance(processor, type(self.ours)):
            if state is None or state.previous.is_plain:
                return None
            processor = state.previous.processor
        return Other(type(processor).__name__, self.is_plain(processor))
