from .codebooks import PROJECTION_PARAMETERS
from .core import (
    NUM_TRAIN_TIMESTEPS,
    AttentionFunction,
    Layer,
    LayerSpec,
    Timesteps,
    at_timestep,
    sampling_weights,
)
from .measuring import Allocation, output_errors
from .models import FAMILIES, AnyModel, has_unet, select_layers, unet_of, unwrapped
from .verbs import attention_replaced, gather_codebooks, replace_attention

__all__ = [
    "FAMILIES",
    "NUM_TRAIN_TIMESTEPS",
    "PROJECTION_PARAMETERS",
    "Allocation",
    "AnyModel",
    "AttentionFunction",
    "Layer",
    "LayerSpec",
    "Timesteps",
    "at_timestep",
    "attention_replaced",
    "gather_codebooks",
    "has_unet",
    "output_errors",
    "replace_attention",
    "sampling_weights",
    "select_layers",
    "unet_of",
    "unwrapped",
]
