"""What a callback refuses: options out of range, and runs that it cannot accompany."""

from types import SimpleNamespace

import pytest
from lightning.pytorch import LightningDataModule, LightningModule

import callbacks
from callbacks import EMA, ExpertLoad, GraphEvaluation, MetricsCsv, Rollouts, SpeechSamples, SpikingReport, VideoGrid
from lightning_modules import FedHPro, FocalPolicy, GraphPFN, MoST, VideoDiffusion


class Other(LightningModule): ...


class Data(LightningDataModule): ...


RUNS = {  # callback: what it needs, a method that fits, whether it asks for more than some data module
    "Compile": ("Other names no block_types", None, False),
    "ExpertLoad": ("needs the method MoST, and found Other", MoST, False),
    "FederatedPictures": ("needs the method FedHPro, and found Other", FedHPro, True),
    "GraphEvaluation": ("needs the method GraphPFN, and found Other", GraphPFN, True),
    "Rollouts": ("needs a policy such as FocalPolicy or VideoPolicy, and found Other", FocalPolicy, True),
    "SpeechSamples": ("needs the method MoST, and found Other", MoST, False),
    "SpikingReport": ("needs the method AnnSnn, and found Other", None, False),
    "VideoGrid": ("needs the method VideoDiffusion or DynVPP, and found Other", VideoDiffusion, False),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_it_cannot_accompany(name):
    message, method, asks_more = RUNS[name]
    callback = getattr(callbacks, name)()
    with pytest.raises(ValueError) as refused:
        callback.setup(SimpleNamespace(datamodule=None), Other(), "fit")
    assert message in str(refused.value) and "\n" not in str(refused.value)
    if method is None:
        return
    assert f"callbacks.{name} needs" in str(refused.value)
    for data, found in ((None, "found nothing"), (Data(), "found Data")):
        if data is None or asks_more:
            with pytest.raises(ValueError, match=f"callbacks.{name} needs .* and {found}: remove it"):
                callback.setup(SimpleNamespace(datamodule=data), method(), "fit")
        else:
            callback.setup(SimpleNamespace(datamodule=data), method(), "fit")


@pytest.mark.parametrize(
    ("callback", "options", "message"),
    [
        (EMA, {"decay": 2}, "decay 2 is outside"),
        (EMA, {"decay": -0.1}, "decay -0.1 is outside"),
        (EMA, {"decay": float("nan")}, "decay nan is outside"),
        (EMA, {"power": 0}, "power 0 must be above 0"),
        (EMA, {"inverse_gamma": -1}, "inverse_gamma -1 must be above 0"),
        (EMA, {"start": -1}, "start -1 must be at least 0"),
        (ExpertLoad, {"batches": 0}, "batches 0 must be at least 1"),
        (GraphEvaluation, {"graphs": -1}, "graphs -1 must be at least 0"),
        (MetricsCsv, {"flush_logs_every_n_steps": 0}, "flush_logs_every_n_steps 0 must be at least 1"),
        (Rollouts, {"episodes": 0}, "episodes 0 must be at least 1"),
        (Rollouts, {"max_steps": 0}, "max_steps 0 must be at least 1"),
        (Rollouts, {"picture": -1}, "picture -1 must be at least 0"),
        (Rollouts, {"latency_calls": -1}, "latency_calls -1 must be at least 0"),
        (SpeechSamples, {"count": 0}, "count 0 must be at least 1"),
        (SpeechSamples, {"recordings": -1}, "recordings -1 must be at least 0"),
        (SpikingReport, {"time_steps": (0, 1)}, "must be at least 1"),
        (SpikingReport, {"noise": (0.1, -0.1)}, "noise -0.1 must be at least 0"),
        (SpikingReport, {"chunk": 0}, "chunk 0 must be at least 1"),
        (VideoGrid, {"clips": 0}, "clips 0 must be at least 1"),
    ],
)
def test_an_option_out_of_range(callback, options, message):
    with pytest.raises(ValueError) as refused:
        callback(**options)
    assert message in str(refused.value) and "\n" not in str(refused.value)
