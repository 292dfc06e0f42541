"""The methods, one room each. Names are imported when first used, so one method never loads another's libraries."""

from importlib import import_module

_HOME = {
    "AnnSnn": "ann_snn",
    "ImageClassifier": "ann_snn",
    "FedHPro": "fedhpro",
    "GraphPFN": "graph_pfn",
    "FocalPolicy": "focal_policy",
    "DynVPP": "dyn_vpp",
    "LatentVideoAutoencoder": "dyn_vpp",
    "VideoDiffusion": "dyn_vpp",
    "VideoPolicy": "dyn_vpp",
    "MoST": "most",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
