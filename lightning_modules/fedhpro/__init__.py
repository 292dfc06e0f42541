"""FedHPro, federated learning with hyper-prototypes (ICML 2026, arXiv 2605.13475), and its baselines."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # names: __init__.pyi
