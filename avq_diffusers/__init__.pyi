from .attention.api import avq_attention
from .config import AVQConfig
from .extras.scalecrafter.apply import scalecrafter
from .hosts.backend import register_backend
from .hosts.codebooks import AVQCodebooks, calibrate, gather_codebooks
from .hosts.measuring import ErrorProfile, measure_error
from .hosts.models import AVQProcessor, select_layers
from .hosts.pipeline import AVQStableDiffusionPipeline
from .hosts.verbs import (
    apply_avq,
    avq_disabled,
    remove_avq,
    set_num_refined,
    set_threshold,
    summary,
)

__all__ = [
    "AVQCodebooks",
    "AVQConfig",
    "AVQProcessor",
    "AVQStableDiffusionPipeline",
    "ErrorProfile",
    "apply_avq",
    "avq_attention",
    "avq_disabled",
    "calibrate",
    "gather_codebooks",
    "measure_error",
    "register_backend",
    "remove_avq",
    "scalecrafter",
    "select_layers",
    "set_num_refined",
    "set_threshold",
    "summary",
]
