"""FocalPolicy: foresight-aware visuomotor policy by consistency flow matching (arXiv 2605.15944)."""

import lazy_loader

_NAMES = {  # file: names in it
    "losses": ["consistency_objective", "foresight_composite_objective"],
    "module": ["FocalPolicy"],
    "network": ["ConditionalUnet1d"],
    "policy": ["PolicyConfig", "PolicyNetwork"],
    "rollout": ["RolloutPolicy"],
    "sampler": ["flow_times"],
}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs=_NAMES)
