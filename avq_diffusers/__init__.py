"""Adaptive vector-quantized (AVQ) attention for diffusers."""

from avq_diffusers.calibrate import calibrate
from avq_diffusers.codebook import Codebook, assign, fit_codebook
from avq_diffusers.config import AVQConfig
from avq_diffusers.diagnostics import (
    active_ratio,
    capture,
    commitment_loss,
    constraint_error,
    leaf_counts,
    quantization_error,
)
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
from avq_diffusers.sheet import picture_sheet
from avq_diffusers.weights import AVQCodebooks, select_layers

__all__ = [
    "AVQCodebooks",
    "AVQConfig",
    "AVQProcessor",
    "AVQStableDiffusionPipeline",
    "Codebook",
    "LinFusionProcessor",
    "active_ratio",
    "apply_avq",
    "assign",
    "avq_attention",
    "avq_disabled",
    "batch_statistics",
    "calibrate",
    "capture",
    "commitment_loss",
    "constraint_error",
    "derive_codebook",
    "ema_decay",
    "ema_update",
    "fit_codebook",
    "leaf_counts",
    "load_linfusion",
    "picture_sheet",
    "quantization_error",
    "query_order",
    "reassign_dead",
    "remove_avq",
    "remove_linfusion",
    "save_linfusion",
    "select_layers",
    "set_num_refined",
    "summary",
]
