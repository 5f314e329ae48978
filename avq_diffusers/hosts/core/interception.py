"""Detects other tools that intercept exact attention to act on its scores."""

import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch.overrides import _get_current_function_mode_stack

SCALED_DOT_PRODUCT_ATTENTION = F.scaled_dot_product_attention


def score_interception() -> str | None:
    """What acts on the scores of all attention and would bypass AVQ; None if nothing does."""
    for mode in _get_current_function_mode_stack():
        # PyTorch's own modes only set the device of new tensors, or trace the call.
        if not type(mode).__module__.startswith(("torch._", "torch.fx.", "torch.utils.")):
            return f"{type(mode).__name__} is active"
    if F.scaled_dot_product_attention is not SCALED_DOT_PRODUCT_ATTENTION:
        return "scaled_dot_product_attention is replaced"
    return None


def active_backend() -> AttentionBackendName:
    """The exact diffusers backend of layers that set none themselves, at this moment."""
    return _AttentionBackendRegistry._active_backend


def backend_interception(usual: AttentionBackendName | None) -> str | None:
    """The backend of an open `with attention_backend(...)`; None if it is the usual one.

    Args:
        usual: the backend active before; None for models outside diffusers.
    """
    backend = active_backend()
    if usual is None or backend in (usual, AttentionBackendName.NATIVE):
        return None
    return f"attention backend {backend.value}"
