"""How models run AVQ: one contract for UNets, transformers and vision models."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
