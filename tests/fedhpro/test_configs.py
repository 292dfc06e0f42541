"""The shipped configs build what they say."""

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule

import configs
from lightning_modules import FedHPro
from lightning_modules.fedhpro.strategies import FedAvg


@pytest.mark.parametrize("name", [n for n in configs.names() if n.startswith("fedhpro/")])
def test_config_builds(name):
    content = yaml.safe_load(configs.find(name).read_text())
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(FedHPro, "model")
    parser.add_subclass_arguments(LightningDataModule, "data")
    made = parser.instantiate_classes(parser.parse_object({k: content[k] for k in ("model", "data")}))
    assert isinstance(made.model.strategy, FedAvg)
    assert content["trainer"]["log_every_n_steps"] == 1, "a step is a round"
    made.model.configure_model()
    assert len(list(made.model.network.parameters())) > 0
