"""FedHPro, federated learning with hyper-prototypes (ICML 2026, arXiv 2605.13475), and its baselines."""

from importlib import import_module

_HOME = {"FedHPro": "module"}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
