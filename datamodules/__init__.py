"""The data modules, one file per kind of data. Names are imported when first used."""

import lazy_loader

_NAMES = {  # file: names in it
    "federated": ["FederatedImages"],
    "graph_prior": ["GraphPrior"],
    "images": ["ImageClassification"],
    "nodes": ["NodeClassification"],
    "robots": ["RobotDemonstrations"],
    "speech": ["SpeechText"],
    "videos": ["ExpertVideos"],
}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs=_NAMES)
