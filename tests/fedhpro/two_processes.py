"""Runs of test_distributed.py, in as many processes as the environment says."""

import os
from pathlib import Path

import torch

from lightning_modules.distributed import FSDP2Strategy
from tests.fedhpro import toys

DDP = {
    "fedhpro": ("HyperPrototypes", {}, {}),
    "one client": ("HyperPrototypes", {}, {"clients": 1}),  # the second rank has nothing to train
    "fpl": ("FPL", {}, {"clients": 5, "participation": 0.6}),
    "together": ("HyperPrototypes", {"clients_together": 2}, {"clients": 5, "partition": "even"}),
    "moon": ("Moon", {}, {"clients": 5, "participation": 0.6}),
    "fedtgp": ("FedTGP", {}, {"clients": 3}),
    "head re-training": ("HeadRetraining", {}, {"clients": 3}),
    "batchnorm": (
        "FedAvg",
        {"network": "ResNet10", "network_args": {"in_channels": 1, "width": 4}},
        {"train_size": 100},
    ),
}
SMOOTH = {"network": "tests.fedhpro.toys.SmoothCNN", "network_args": {}, "local_batch_size": 8}
FSDP2 = {
    "sharded fedhpro": ("HyperPrototypes", {**SMOOTH, "network": "tests.fedhpro.toys.WholeCNN"}, {"clients": 3}),
    "sharded by blocks": ("HyperPrototypes", SMOOTH, {"clients": 2, "train_size": 60}),
    "sharded fedtgp": ("FedTGP", SMOOTH, {"clients": 3}),
    "sharded fpl": ("FPL", SMOOTH, {"clients": 3}),
}


def run(folder: str) -> None:
    """Every run, with its checkpoint in `folder`."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    for name, (strategy, options, data) in {**DDP, **FSDP2}.items():
        model = toys.module(strategy, build=name in DDP, **options)
        how = "auto" if world == 1 else "ddp" if name in DDP else FSDP2Strategy()
        trainer = toys.trainer(3, devices=world, strategy=how, default_root_dir=folder)
        trainer.fit(model, toys.data(**data))
        result = trainer.test(model, toys.data(**data), verbose=False)[0]
        trainer.save_checkpoint(Path(folder) / f"{name} {world}.ckpt")
        if trainer.is_global_zero:
            logged = {k: float(v) for k, v in trainer.logged_metrics.items()} | result
            torch.save(logged, Path(folder) / f"{name} {world}.logged")
