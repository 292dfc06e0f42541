"""Dyn-VPP: post-training a video diffusion predictor with a verifiable reward on its dynamics (arXiv 2603.19370).

The pure functions live in `sampler`, `rewards`, `objective`, `networks`, `video_model`, `action_model`, `lora` and
`metrics`; the three stages in `autoencoder`, `diffusion` and `module`, the policy in `policy`. Names are imported when
first used, so that the sampler does not load diffusers.
"""

import lazy_loader

_NAMES = {  # file: names in it
    "action_model": ["ActionModel", "VideoRolloutPolicy"],
    "autoencoder": ["LatentVideoAutoencoder"],
    "diffusion": ["VideoDiffusion"],
    "module": ["DynVPP"],
    "networks": ["ActionDecoder", "ActionEncoder", "VideoFormer", "first_step_features", "predict_clean"],
    "objective": ["group_advantages", "micro_batches", "policy_loss"],
    "policy": ["VideoPolicy"],
    "rewards": ["latent_reward"],
    "sampler": ["context_noise", "hybrid_schedule", "karras_sigmas", "rollout"],
    "video_model": ["VideoModel"],
}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs=_NAMES)
