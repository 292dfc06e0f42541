"""MoST: a speech-text language model with modality-aware experts (arXiv:2601.10272)."""

from importlib import import_module

_HOME = {
    "MoST": "module",
    "make_modality_aware": "moe",
    "load_language_model": "language_model",
    "upcycle": "language_model",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
