"""Stored codebooks of a model: calibrate, save, load."""

from avq_diffusers.hosts.codebooks.avq_codebooks import AVQCodebooks, gather_codebooks
from avq_diffusers.hosts.codebooks.calibration import calibrate
from avq_diffusers.hosts.codebooks.stored import PROJECTION_PARAMETERS
