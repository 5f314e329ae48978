from .avq_codebooks import AVQCodebooks
from .calibration import calibrate
from .stored import PROJECTION_PARAMETERS, StoredCodebooks

__all__ = ["PROJECTION_PARAMETERS", "AVQCodebooks", "StoredCodebooks", "calibrate"]
