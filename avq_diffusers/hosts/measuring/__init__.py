"""The dial: what AVQ does to a model's output, and how much of it each layer may do."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
