"""GraphPFN: in-context prediction on graphs. Names are imported when first used."""

import lazy_loader

_NAMES = {  # file: names in it
    "module": ["GraphPFN"],
}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs=_NAMES)
