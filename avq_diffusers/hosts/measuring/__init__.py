"""The dial: what AVQ does to a model's output, and how much of it each layer may do."""

from avq_diffusers.hosts.measuring.allocation import Allocation
from avq_diffusers.hosts.measuring.kept_profiles import KeptProfile
from avq_diffusers.hosts.measuring.measurement import measure_error, output_errors
from avq_diffusers.hosts.measuring.profile import SHOWN_TOLERANCES, ErrorProfile
