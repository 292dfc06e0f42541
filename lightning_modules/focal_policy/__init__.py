"""FocalPolicy: foresight-aware visuomotor policy by consistency flow matching (arXiv 2605.15944)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # names: __init__.pyi
