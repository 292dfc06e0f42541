"""MoST: a speech-text language model with modality-aware experts (arXiv:2601.10272)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # names: __init__.pyi
