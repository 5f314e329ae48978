from .layers import Layer, LayerSpec
from .measurement import output_errors
from .models import AnyModel, has_unet, select_layers, unet_of, unwrapped
from .profile import Allocation
from .stored_codebooks import PROJECTION_PARAMETERS
from .timesteps import (
    NUM_TRAIN_TIMESTEPS,
    Timesteps,
    at_timestep,
    sampling_weights,
    step_weight,
)
from .verbs import attention_replaced, gather_codebooks, replace_attention

__all__ = [
    "NUM_TRAIN_TIMESTEPS",
    "PROJECTION_PARAMETERS",
    "Allocation",
    "AnyModel",
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
    "step_weight",
    "unet_of",
    "unwrapped",
]
