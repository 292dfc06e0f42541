"""What a type checker tells a user of the packages."""

from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[1]
SCRIPT = """
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn, rand, tensor, zeros

from callbacks import EMA, Compile, ExpertLoad, PredictionWriter, Rollouts, SpikingReport
from datamodules import ExpertVideos, FederatedImages, GraphPrior, ImageClassification
from datamodules import NodeClassification, RobotDemonstrations, SpeechText
from datamodules.images import Images
from lightning_modules import AnnSnn, DynVPP, FedHPro, FocalPolicy, GraphPFN, ImageClassifier
from lightning_modules import LatentVideoAutoencoder, MoST, VideoDiffusion, VideoPolicy
from lightning_modules.ann_snn import SmallResNet, convert, linear_cka, measure_energy, simulate
from lightning_modules.dyn_vpp import VideoRolloutPolicy, group_advantages, hybrid_schedule
from lightning_modules.dyn_vpp import karras_sigmas, latent_reward, rollout
from lightning_modules.fedhpro.losses import hpcl_loss
from lightning_modules.fedhpro.strategies import FedAvg, build_strategy
from lightning_modules.focal_policy import PolicyConfig, PolicyNetwork, RolloutPolicy, flow_times
from lightning_modules.most.moe import route


def pairs() -> list[tuple[LightningModule, LightningDataModule]]:
    images, videos = ImageClassification(batch_size=50), ExpertVideos(tasks=["reach-v3"], episodes=2)
    return [
        (AnnSnn(time_steps=[1, 2, 4], conversion="channel"), images),
        (ImageClassifier("lightning_modules.ann_snn.networks.SmallResNet", {"classes": 10}), images),
        (FedHPro("HyperPrototypes", {"tau": 0.2}, variant="code"), FederatedImages(partition="shards")),
        (GraphPFN(recipe="pretrain"), GraphPrior(batch_size=4)),
        (GraphPFN.from_pretrained("tiny"), NodeClassification("karate", labels_per_class=2)),
        (FocalPolicy(widths=[64, 128], time_sampler="cfm"), RobotDemonstrations(episodes=4)),
        (LatentVideoAutoencoder(), videos),
        (VideoDiffusion(guidance=2.0), videos),
        (DynVPP("folder", group=4, stochastic=[0, 1]), videos),
        (VideoPolicy(horizon=8), RobotDemonstrations()),
        (MoST(tasks={"asr": 1.0}, mask="before_softmax"), SpeechText(batch_size=4)),
    ]


def watchers() -> list[Callback]:
    return [EMA(0.99), Compile(), ExpertLoad(), PredictionWriter(), Rollouts(4), SpikingReport((1, 2))]


def spikes(batch: Images) -> dict[str, float]:
    student = convert(SmallResNet(), [batch.image], mode="channel")
    out = simulate(student, batch.image, time_steps=4)
    similar = [linear_cka(x.flatten(1), x.flatten(1)).item() for x in out.features.values()]
    right = (out.logits.argmax(1) == batch.label).float().mean()
    return {"accuracy": right.item(), "nJ": measure_energy(student, batch.image, 4).snn, "cka": max(similar)}


def videos(x: Tensor) -> Tensor:
    def denoise(noisy: Tensor, sigma: float) -> Tensor:
        return noisy / (1 + sigma)

    sampled = rollout(denoise, x, [x], hybrid_schedule(karras_sigmas(3, 0.1, 10.0), kind="drift"))
    return group_advantages(latent_reward(sampled.latents, x[:, None]), baseline="batch").values


class Mine(FedAvg):
    def logits(self, network: nn.Module, images: Tensor) -> Tensor:
        return 2 * super().logits(network, images)


def act(policy: RolloutPolicy | VideoRolloutPolicy, state: Tensor) -> float:
    policy.reset()
    return float(policy.act({"state": state}).mean())


Trainer(callbacks=watchers()).fit(*pairs()[0])
policy = FocalPolicy.from_pretrained("folder")
if policy.network is not None:
    act(RolloutPolicy(policy.network, seed=1), zeros(2, 9))
act(VideoRolloutPolicy.from_pretrained("folder", tokens=[1, 2]), zeros(2, 9))
window: Tensor = PolicyNetwork(PolicyConfig(action_dim=2))({"state": zeros(1, 2, 9)}, zeros(1, 12, 2))
tau, r = flow_times(rand(3), rand(3), rand(3), rand(3), "v1")
loss = hpcl_loss(rand(4, 8), tensor([0, 1, 0, 1]), rand(2, 5, 8), variant="code")
load = route(rand(4, 8), rand(4, 8) > 0, top_k=2).load
spoken = MoST.from_pretrained("folder").speak(["one"])[0]
print(len(window), tau - r, loss.item(), load, len(spoken), build_strategy("FedProx", {"mu": 0.1}).sends)
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_strict_mypy_passes_a_user_script_and_finds_a_mistake(tmp_path, monkeypatch):
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)  # away from this repository's settings

    def check(script: str) -> list[str]:
        Path("script.py").write_text(script)
        # silent: what an installed package gets anyway, nothing is said about its own lines
        said, trouble, _ = api.run(["--strict", "--follow-imports", "silent", "--no-error-summary", "script.py"])
        return (said + trouble).splitlines()

    assert check(SCRIPT) == []
    (mistake,) = check(SCRIPT + "AnnSnn(conversion='chanel')\n")
    assert "AnnSnn" in mistake and "[arg-type]" in mistake
