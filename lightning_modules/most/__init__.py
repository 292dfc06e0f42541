"""MoST: a speech-text language model with modality-aware experts (arXiv:2601.10272)."""

import lazy_loader

_NAMES = {  # file: names in it
    "language_model": ["load_language_model", "upcycle"],
    "module": ["MoST"],
    "moe": ["make_modality_aware"],
}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs=_NAMES)
