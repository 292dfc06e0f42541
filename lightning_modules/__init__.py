"""The methods, one room each. Names are imported when first used, so one method never loads another's libraries."""

import lazy_loader

_NAMES = {  # file: names in it
    "ann_snn": ["AnnSnn", "ImageClassifier"],
    "dyn_vpp": ["DynVPP", "LatentVideoAutoencoder", "VideoDiffusion", "VideoPolicy"],
    "fedhpro": ["FedHPro"],
    "focal_policy": ["FocalPolicy"],
    "graph_pfn": ["GraphPFN"],
    "most": ["MoST"],
}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs=_NAMES)
