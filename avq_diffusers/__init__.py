"""Adaptive vector-quantized (AVQ) attention for diffusers.

Training and evaluation also use the packages `avq_diffusers.codebook`, `avq_diffusers.attention`
and `avq_diffusers.extras`.
"""

import lazy_loader

# Names load on first use, so that `avq --help` does not import torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__docformat__ = "google"
