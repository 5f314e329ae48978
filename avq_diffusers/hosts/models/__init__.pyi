from .grids import FAMILIES
from .registry import (
    AnyModel,
    all_models_of,
    has_unet,
    main_model,
    models_of,
    name_of,
    select_layers,
    unet_of,
    unwrapped,
)
from .unet import UNET, AVQProcessor, prepare

__all__ = [
    "FAMILIES",
    "UNET",
    "AVQProcessor",
    "AnyModel",
    "all_models_of",
    "has_unet",
    "main_model",
    "models_of",
    "name_of",
    "prepare",
    "select_layers",
    "unet_of",
    "unwrapped",
]
