"""FocalPolicy: foresight-aware visuomotor policy by consistency flow matching (arXiv 2605.15944)."""

from importlib import import_module

_HOME = {
    "ConditionalUnet1d": "network",
    "FocalPolicy": "module",
    "PolicyConfig": "policy",
    "PolicyNetwork": "policy",
    "RolloutPolicy": "rollout",
    "consistency_objective": "losses",
    "flow_times": "sampler",
    "foresight_composite_objective": "losses",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
