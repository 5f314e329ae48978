"""UNets that attend to image and text at once: DeepFloyd IF, Kandinsky 2.

Their attention sits directly in the UNet blocks, without a spatial transformer; text keys come
before image keys.
"""

from collections.abc import Sequence
from typing import Any

from diffusers import ModelMixin
from diffusers.models.attention_processor import Attention
from torch import nn

from avq_diffusers.hosts.dispatch import DispatchHost, TransformerWatch
from avq_diffusers.hosts.host import Host, Others, Watch
from avq_diffusers.hosts.layers import Layer, own_name
from avq_diffusers.hosts.state import REST, Tokens
from avq_diffusers.hosts.unet import level_of


class AddedHost(DispatchHost):
    """Joint attention to image and text in the blocks of a UNet."""

    kind = "UNet"
    usual_sizes = Host.usual_sizes  # the UNet defaults

    def find(self, module: nn.Module) -> ModelMixin | None:
        model = next((x for x in module.modules() if isinstance(x, ModelMixin)), None)
        return model if model is not None and self.layers(model) else None

    def layers(self, model: nn.Module) -> list[Layer]:
        found = []
        for path, block in model.named_modules():
            for place, attn in enumerate(getattr(block, "attentions", ())):
                if isinstance(attn, Attention) and attn.added_kv_proj_dim is not None:
                    name = own_name(f"{path}.attentions.{place}")
                    shape = attn.heads, attn.inner_dim // attn.heads
                    layer = Layer(
                        name, level_of(model, name), *shape, attn, block, attn.group_norm, None
                    )
                    found.append(layer)
        return found

    def watch(self, layers: Sequence[Layer], others: Others) -> Watch:
        return _BlockWatch(self, layers, others)


class _BlockWatch(TransformerWatch):
    """The hooks of a block; the block's input is the grid."""

    def begin(self, caller: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        grid, dtype = hidden_states.shape[-2:], self.layers[0].anchor.weight.dtype
        self.enter(caller, Tokens(hidden_states, dtype, grid, {"": REST}, beside_first=True))


ADDED = AddedHost()
