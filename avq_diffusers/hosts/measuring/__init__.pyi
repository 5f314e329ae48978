from .allocation import Allocation
from .kept_profiles import KeptProfile
from .measurement import measure_error, output_errors
from .profile import (
    SHOWN_TOLERANCES,
    ErrorProfile,
    checked_tolerance,
    chosen_specs,
    note_allocation,
)

__all__ = [
    "SHOWN_TOLERANCES",
    "Allocation",
    "ErrorProfile",
    "KeptProfile",
    "checked_tolerance",
    "chosen_specs",
    "measure_error",
    "note_allocation",
    "output_errors",
]
