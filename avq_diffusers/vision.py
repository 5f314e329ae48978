"""Aliases of the verbs, for programs that imported them from here before they served all models."""

from avq_diffusers.hosts.measuring import measure_error
from avq_diffusers.hosts.models import select_layers
from avq_diffusers.hosts.verbs import (
    apply_avq,
    avq_disabled,
    gather_codebooks,
    remove_avq,
    set_num_refined,
    summary,
)

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
