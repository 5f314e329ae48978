"""The adapters, one per kind of model, and which of them serves a model."""

from avq_diffusers.hosts.models.grids import FAMILIES
from avq_diffusers.hosts.models.registry import (
    AnyModel,
    all_models_of,
    has_unet,
    models_of,
    name_of,
    select_layers,
    unet_of,
)
from avq_diffusers.hosts.models.unet import AVQProcessor
