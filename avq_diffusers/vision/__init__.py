"""AVQ in the vision models of transformers: the verbs of pipelines, for models.

from avq_diffusers.vision import apply_avq, summary

apply_avq(model)
"""

from avq_diffusers.vision.apply import (
    apply_avq,
    avq_disabled,
    remove_avq,
    set_num_refined,
    summary,
)
from avq_diffusers.vision.error_measurement import measure_error
from avq_diffusers.vision.layers import gather_codebooks, select_layers

__all__ = [
    "apply_avq",
    "avq_disabled",
    "gather_codebooks",
    "measure_error",
    "remove_avq",
    "select_layers",
    "set_num_refined",
    "summary",
]
