from .calibration import calibrate
from .stored import PROJECTION_PARAMETERS, AVQCodebooks

__all__ = [
    "PROJECTION_PARAMETERS",
    "AVQCodebooks",
    "calibrate",
]
