"""FedHPro, federated learning with hyper-prototypes (ICML 2026, arXiv 2605.13475), and its baselines."""

import lazy_loader

_NAMES = {  # file: names in it
    "module": ["FedHPro"],
}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs=_NAMES)
