"""The methods, one room each. Names are imported when first used, so one method never loads another's libraries."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # names: __init__.pyi
