from .attention.api import avq_attention
from .config import AVQConfig
from .extras.scalecrafter.apply import scalecrafter
from .plugin.calibration import calibrate
from .plugin.codebooks import AVQCodebooks
from .plugin.elastic import CaptureProfile, measure_capture
from .plugin.error_profile import ErrorProfile
from .plugin.layers import select_layers
from .plugin.pipeline import AVQStableDiffusionPipeline
from .plugin.processor import AVQProcessor
from .plugin.sensitivity import measure_sensitivity
from .verbs import apply_avq, avq_disabled, measure_error, remove_avq, set_num_refined, summary

__all__ = [
    "AVQCodebooks",
    "AVQConfig",
    "AVQProcessor",
    "AVQStableDiffusionPipeline",
    "CaptureProfile",
    "ErrorProfile",
    "apply_avq",
    "avq_attention",
    "avq_disabled",
    "calibrate",
    "measure_capture",
    "measure_error",
    "measure_sensitivity",
    "remove_avq",
    "scalecrafter",
    "select_layers",
    "set_num_refined",
    "summary",
]
