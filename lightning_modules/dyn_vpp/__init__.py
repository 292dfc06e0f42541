"""Dyn-VPP: post-training a video diffusion predictor with a verifiable reward on its dynamics (arXiv 2603.19370).

The pure functions live in `sampler`, `rewards`, `objective`, `networks`, `video_model`, `action_model`, `lora` and
`metrics`; the three stages in `autoencoder`, `diffusion` and `module`, the policy in `policy`. Names are imported when
first used, so that the sampler does not load diffusers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # names: __init__.pyi
