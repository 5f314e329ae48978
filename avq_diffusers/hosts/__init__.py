"""How models run AVQ: one contract for UNets, transformers and vision models."""

from avq_diffusers.hosts.core import AttentionFunction, LayerSpec, at_timestep
from avq_diffusers.hosts.measuring import Allocation, output_errors
from avq_diffusers.hosts.models import FAMILIES, has_unet, select_layers
from avq_diffusers.hosts.verbs import attention_replaced, replace_attention
