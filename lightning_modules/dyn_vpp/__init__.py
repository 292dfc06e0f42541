"""Dyn-VPP: post-training a video diffusion predictor with a verifiable reward on its dynamics (arXiv 2603.19370).

The pure functions live in `sampler`, `rewards`, `objective`, `networks`, `video_model` and `metrics`; the three stages
in `autoencoder`, `diffusion` and `module`. Names are imported when first used, so that the sampler does not load
diffusers.
"""

from importlib import import_module

_HOME = {
    "ActionDecoder": "networks",
    "ActionEncoder": "networks",
    "DynVPP": "module",
    "LatentVideoAutoencoder": "autoencoder",
    "VideoDiffusion": "diffusion",
    "VideoFormer": "networks",
    "VideoModel": "video_model",
    "context_noise": "sampler",
    "first_step_features": "networks",
    "group_advantages": "objective",
    "hybrid_schedule": "sampler",
    "karras_sigmas": "sampler",
    "latent_reward": "rewards",
    "micro_batches": "objective",
    "policy_loss": "objective",
    "predict_clean": "networks",
    "rollout": "sampler",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
