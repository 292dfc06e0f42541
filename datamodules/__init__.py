"""The data modules, one file per kind of data. Names are imported when first used."""

from importlib import import_module

_HOME = {
    "ImageClassification": "images",
    "FederatedImages": "federated",
    "GraphPrior": "graph_prior",
    "NodeClassification": "nodes",
    "RobotDemonstrations": "robots",
    "ExpertVideos": "videos",
    "SpeechText": "speech",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
