"""Adaptive vector-quantized (AVQ) attention for diffusers."""

from avq_diffusers.calibrate import calibrate
from avq_diffusers.codebook import Codebook, assign, assign_leaves, fit_codebook
from avq_diffusers.config import AVQConfig
from avq_diffusers.diagnostics import (
    active_ratio,
    attention_mass,
    capture,
    capture_curve,
    captured_share,
    commitment_loss,
    constraint_error,
    leaf_counts,
    perplexity,
    quantization_error,
    refined_parents,
)
from avq_diffusers.elastic import CaptureProfile, measure_capture
from avq_diffusers.ema import (
    batch_statistics,
    derive_codebook,
    ema_decay,
    ema_update,
    reassign_dead,
)
from avq_diffusers.linfusion import (
    LinFusionProcessor,
    load_linfusion,
    remove_linfusion,
    save_linfusion,
)
from avq_diffusers.ops import avq_attention
from avq_diffusers.pipeline import (
    AVQStableDiffusionPipeline,
    apply_avq,
    avq_disabled,
    remove_avq,
    set_num_refined,
    summary,
)
from avq_diffusers.processor import AVQProcessor
from avq_diffusers.query_order import query_order
from avq_diffusers.scalecrafter import (
    ScaleCrafterConfig,
    apply_scalecrafter,
    remove_scalecrafter,
    scalecrafter,
)
from avq_diffusers.sensitivity import measure_sensitivity
from avq_diffusers.sheet import picture_sheet
from avq_diffusers.unets import select_layers
from avq_diffusers.weights import AVQCodebooks

__docformat__ = "google"
__all__ = [
    "AVQCodebooks",
    "AVQConfig",
    "AVQProcessor",
    "AVQStableDiffusionPipeline",
    "CaptureProfile",
    "Codebook",
    "LinFusionProcessor",
    "ScaleCrafterConfig",
    "active_ratio",
    "apply_avq",
    "apply_scalecrafter",
    "assign",
    "assign_leaves",
    "attention_mass",
    "avq_attention",
    "avq_disabled",
    "batch_statistics",
    "calibrate",
    "capture",
    "capture_curve",
    "captured_share",
    "commitment_loss",
    "constraint_error",
    "derive_codebook",
    "ema_decay",
    "ema_update",
    "fit_codebook",
    "leaf_counts",
    "load_linfusion",
    "measure_capture",
    "measure_sensitivity",
    "perplexity",
    "picture_sheet",
    "quantization_error",
    "query_order",
    "reassign_dead",
    "refined_parents",
    "remove_avq",
    "remove_linfusion",
    "remove_scalecrafter",
    "save_linfusion",
    "scalecrafter",
    "select_layers",
    "set_num_refined",
    "summary",
]
