"""What a spiking network is worth: accuracy against time steps, CKA, firing rates, noise, energy."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from callbacks.checks import require
from callbacks.figures import log_figure, log_table, new_figure
from callbacks.progress import progress
from datamodules.checks import check_least
from lightning_modules.ann_snn.conversion import SpikingNetwork, convert, simulate, teacher_features
from lightning_modules.ann_snn.energy import AC_NJ, MAC_NJ, measure_energy
from lightning_modules.ann_snn.losses import cka_from_hsic, hsic
from lightning_modules.ann_snn.module import AnnSnn
from lightning_modules.distributed import gather_batch, read_checkpoint

ANN, CLOSED = "ANN", "closed loop"
OPEN_LOOP = {  # the training-free conversions that the closed loop is compared with
    "open loop, per layer": {"mode": "layer", "percentile": 99.9},
    "open loop, per channel, half threshold": {"mode": "channel", "percentile": 99.0, "half_threshold": True},
}


class SpikingReport(Callback):
    """Compares the fine-tuned spiking network with its source and with training-free conversions.

    After a fit on the validation images, and in a test on the test images, one pass gives for the ANN, the open-loop
    conversions and the closed loop: accuracy at every T; and at the (largest) training T: CKA of each block with the
    ANN before and after fine-tuning (unbiased, mean over batches), and of the closed loop the firing rate of each layer
    (spikes per neuron and step), accuracy under noise on the pixels, and energy by a count of operations (nJ per
    image; `lightning_modules.ann_snn.energy`). A table is printed; `report_val.json` or `report_test.json` and four
    pictures go to the run folder; figures of a test are logged as `test/...`. Two tables are also CSV files there and
    tables in W&B, `val_accuracy` and `val_layers` or `test_...`: of each network at each T, and the operations, energy
    and firing rates layer by layer.

    Args:
        time_steps: T at which accuracy is counted, at least 1; the largest bounds the cost.
        noise: standard deviations of the noise, in units of the pixel range; empty leaves the curve out.
        chunk: steps simulated at once, at least 1; memory grows with it.
        others: checkpoints of `AnnSnn` that were trained at other T; each is a row more in the table, which then is the
            matrix of training T by test T.
    """

    def __init__(
        self,
        time_steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64),
        noise: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2),
        chunk: int = 16,
        others: list[str] | None = None,
    ) -> None:
        if not time_steps or min(time_steps) < 1:
            raise ValueError(f"time_steps {time_steps} must be at least 1")
        check_least(1, chunk=chunk)
        check_least(0, noise=min(noise, default=0))
        self.time_steps, self.noise, self.chunk = sorted(time_steps), list(noise), chunk
        self.others = others or []
        self.networks: dict[str, nn.Module] = {}
        self.sums: dict[str, Tensor] = {}  # summed over images, to be reduced over ranks
        self.terms: dict[str, Tensor] = {}  # HSIC of global batches, the same on every rank
        self.counted: dict[str, bool] = {}  # whether a layer's operations are accumulates

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse another method.

        Raises:
            ValueError: if it is not AnnSnn.
        """
        require(self, isinstance(pl_module, AnnSnn), "the method AnnSnn", pl_module)

    # ------------------------------------------------------------------------------------------ measuring

    @torch.no_grad()
    def start(self, trainer: Trainer, module: AnnSnn) -> None:
        """Convert the source anew for the comparison."""
        assert module.teacher is not None and module.student is not None
        source = module.build_source(with_weights=False)
        source.load_state_dict({k: _whole(v) for k, v in module.teacher.state_dict().items()})
        source.to(module.device)
        data: Any = trainer.datamodule
        self.networks = {ANN: module.teacher}
        settings = dict(OPEN_LOOP) | {"start": module._conversion_settings()}
        for name, options in settings.items() if hasattr(data, "calibration_dataloader") else ():
            n = module.hparams["calibration_batches"] if name == "start" else None
            images = (batch[0].to(module.device) for batch in islice(data.calibration_dataloader(), n))
            self.networks[name] = convert(source, images, warn=False, **options)
        for path in self.others:
            other = load_student(path)
            if other.input_shape != module.input_shape:
                raise ValueError(f"{path} is for images {other.input_shape}, not {module.input_shape}")
            name = f"{CLOSED}, trained at T = {', '.join(map(str, other.time_steps))}"
            name += f" ({path})" if name in self.networks else ""
            self.networks[name] = other.student.to(module.device)
        self.networks[CLOSED] = module.student
        self.sums, self.terms = {}, {}

    @torch.no_grad()
    def add(self, trainer: Trainer, module: AnnSnn, batch: Any) -> None:
        """Measure one batch."""
        assert module.student is not None
        image, label = batch[:2]
        t_train = max(module.time_steps)
        self._sum("images", torch.tensor([float(len(label))]))
        source = self.networks.get("start", module.student)
        assert isinstance(source, SpikingNetwork)
        logits, targets = teacher_features(self.networks[ANN], image, source.monitored)
        self._sum(f"correct/{ANN}", (logits.argmax(1) == label).sum()[None])
        targets = {k: gather_batch(v).flatten(1) for k, v in targets.items()}
        for name, network in self.networks.items():
            if not isinstance(network, SpikingNetwork):
                continue
            if name != "start":
                prefix = simulate(network, image, self.time_steps[-1], self.chunk).prefix_logits
                hits = prefix[[t - 1 for t in self.time_steps]].argmax(2) == label  # T b
                self._sum(f"correct/{name}", hits.sum(1))
            if name in ("start", CLOSED):
                rates = simulate(network, image, t_train, self.chunk).features
                rates = {k: gather_batch(v).flatten(1) for k, v in rates.items()}
                if len(next(iter(rates.values()))) >= 4:
                    # on the CPU, since hsic needs float64, which not every device has
                    pairs = [((rates[k] @ rates[k].T).cpu(), (targets[k] @ targets[k].T).cpu()) for k in rates]
                    self.terms[name] = self.terms.get(name, 0) + torch.stack([hsic(*pair) for pair in pairs])
        energy = measure_energy(module.student, image, t_train)
        self._sum("rates", torch.tensor(list(energy.firing_rates.values())) * len(label))
        self.layers = list(energy.firing_rates)
        self._sum("energy", torch.tensor([energy.ann, energy.snn]) * len(label))
        counts = [[layer.macs, layer.operations] for layer in energy.layers.values()]
        self._sum("operations", torch.tensor(counts) * len(label))
        self.counted = {name: layer.accumulates for name, layer in energy.layers.items()}
        if hasattr(trainer.datamodule, "add_noise") and hasattr(batch, "index"):
            for i, sigma in enumerate(self.noise):
                noisy = trainer.datamodule.add_noise(batch, sigma)
                hits = [self.networks[ANN](noisy).argmax(1) == label, module(noisy, t_train).argmax(1) == label]
                self._sum(f"noise/{i}", torch.stack(hits).sum(1))

    def _sum(self, key: str, value: Tensor) -> None:
        self.sums[key] = self.sums.get(key, 0) + value.detach().cpu().double()

    def finish(self, trainer: Trainer, module: AnnSnn) -> dict[str, Any]:
        """The report of all batches of all ranks."""
        reduce, device = trainer.strategy.reduce, module.device if trainer.world_size > 1 else torch.device("cpu")
        sums = {k: reduce(v.to(device), reduce_op="sum").cpu() for k, v in self.sums.items()}
        n = float(sums["images"])
        accuracy = {k.removeprefix("correct/"): (v / n).tolist() for k, v in sums.items() if k.startswith("correct/")}
        ann = accuracy.pop(ANN)[0]
        rates = dict(zip(self.layers, (sums["rates"] / n).tolist(), strict=True))
        energy_ann, energy_snn = (sums["energy"] / n).tolist()
        per_layer = zip(self.counted.items(), (sums["operations"] / n).tolist(), strict=True)
        synops = {name: {"macs": m, "synops": o, "accumulates": ac} for (name, ac), (m, o) in per_layer}
        noise = [(v / n).tolist() for k, v in sums.items() if k.startswith("noise/")]
        cka = {k: [float(cka_from_hsic(t)) for t in v] for k, v in self.terms.items()}
        assert module.student is not None
        report = {
            "images": int(n),
            "trained_at": module.time_steps,
            "time_steps": self.time_steps,
            "ann_accuracy": ann,
            "accuracy": accuracy,
            "relative_accuracy": {k: [x / ann for x in v] for k, v in accuracy.items()} if ann else {},
            "blocks": list(module.student.monitored),
            "cka": {"before" if k == "start" else "after": v for k, v in cka.items()},
            "firing_rate": rates,
            "operations": synops,
            "energy_nj": {"ann": energy_ann, "closed_loop": energy_snn, "at": max(module.time_steps)},
            "noise": {"sigma": self.noise, "ann": [x[0] for x in noise], "closed_loop": [x[1] for x in noise]},
        }
        self.networks, self.sums, self.terms = {}, {}, {}
        return report

    # -------------------------------------------------------------------------------------------- showing

    def show(self, trainer: Trainer, report: dict[str, Any], stage: str) -> None:
        """Print the table, write the JSON file, draw the pictures."""
        if not trainer.is_global_zero:
            return
        trainer.print(table(report, {"val": "validation", "test": "test"}[stage]))
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"report_{stage}.json").write_text(json.dumps(report, indent=1) + "\n")
        for name, draw in (
            ("accuracy", draw_accuracy),
            ("cka", draw_cka),
            ("firing_rate", draw_firing_rate),
            ("noise", draw_noise),
        ):
            figure = draw(report)
            if figure is not None:
                log_figure(trainer, f"{stage}_{name}", figure)
        log_table(trainer, f"{stage}_accuracy", accuracy_rows(report))
        log_table(trainer, f"{stage}_layers", layer_rows(report))

    # ----------------------------------------------------------------------------------------------- hooks

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report on the validation images."""
        loaders = trainer.val_dataloaders
        if loaders is None or trainer.fast_dev_run or trainer.limit_val_batches == 0:
            return
        assert isinstance(pl_module, AnnSnn)
        self.start(trainer, pl_module)
        limit = int(trainer.num_val_batches[0])
        with progress(trainer, "Report on the validation images", limit) as bar:
            for batch in islice(loaders, limit):
                self.add(trainer, pl_module, pl_module.transfer_batch_to_device(batch, pl_module.device, 0))
                bar.update()
        self.show(trainer, self.finish(trainer, pl_module), "val")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the comparison."""
        assert isinstance(pl_module, AnnSnn)
        self.start(trainer, pl_module)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Measure the batch."""
        assert isinstance(pl_module, AnnSnn)
        self.add(trainer, pl_module, batch)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report on the test images."""
        assert isinstance(pl_module, AnnSnn)
        report = self.finish(trainer, pl_module)
        figures: dict[str, float] = {}
        for name, values in report["accuracy"].items():
            key = name.replace(", ", "_").replace(" ", "_")
            figures |= {f"test/{key}_t{t}": x for t, x in zip(report["time_steps"], values, strict=True)}
        for when, values in report["cka"].items():
            figures |= {f"test/cka_{when}/{b}": x for b, x in zip(report["blocks"], values, strict=True)}
        figures |= {f"test/energy_nj/{k}": report["energy_nj"][k] for k in ("ann", "closed_loop")}
        pl_module.log_dict({k: torch.tensor(v) for k, v in figures.items()}, sync_dist=True)
        self.show(trainer, report, "test")


def load_student(path: str) -> Any:
    """The `AnnSnn` of a checkpoint, in evaluation mode.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a checkpoint of `AnnSnn`.
    """
    stored = read_checkpoint(Path(path))
    if "input_shape" not in stored or "time_steps" not in stored.get("hyper_parameters", {}):
        raise ValueError(f"{path} is not a checkpoint of AnnSnn")
    return AnnSnn.load_from_checkpoint(path, map_location="cpu", weights_only=True, weights=None).eval()


def _whole(x: Tensor) -> Tensor:
    """The tensor itself, gathered if it is sharded."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def table(report: dict[str, Any], what: str) -> str:
    """Accuracy in per cent by T, one row per network."""
    trained = ", ".join(map(str, report["trained_at"]))
    rows = {f"ANN {100 * report['ann_accuracy']:.2f} %": ["" for _ in report["time_steps"]]}
    for name, values in report["accuracy"].items():
        rows[name + (f" (trained at T = {trained})" if name == CLOSED else "")] = [f"{100 * x:.2f}" for x in values]
    width = max(map(len, rows))
    head = f"Accuracy in % on {report['images']} {what} images"
    lines = [head, f"{'T':>{width}}" + "".join(f"{t:>8}" for t in report["time_steps"])]
    lines += [f"{name:<{width}}" + "".join(f"{x:>8}" for x in cells) for name, cells in rows.items()]
    return "\n".join(lines)


def accuracy_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Network, T (none for the ANN), accuracy in [0, 1] and the same over the ANN's."""
    ann = report["ann_accuracy"]
    points = [("ANN", None, ann)]
    points += [
        (name, t, x)
        for name, values in report["accuracy"].items()
        for t, x in zip(report["time_steps"], values, strict=True)
    ]
    return [{"network": n, "time_steps": t, "accuracy": x, "relative": x / ann if ann else None} for n, t, x in points]


def layer_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Per layer with weights and image: MACs of the ANN, operations and energy in nJ; per neuron layer: firing rate."""
    rows: list[dict[str, Any]] = []
    for name, count in report["operations"].items():
        energy = count["synops"] * (AC_NJ if count["accumulates"] else MAC_NJ)
        row = {"macs": count["macs"], "operations": count["synops"], "energy_nj": energy, "firing_rate": None}
        rows.append({"layer": name} | row)
    nothing = {"macs": None, "operations": None, "energy_nj": None}
    return rows + [{"layer": name} | nothing | {"firing_rate": x} for name, x in report["firing_rate"].items()]


def draw_accuracy(report: dict[str, Any]) -> Any:
    """Accuracy against T, for every network."""
    figure = new_figure()
    axes = figure.subplots()
    axes.axhline(100 * report["ann_accuracy"], color="black", linestyle="--", label="ANN")
    for name, values in report["accuracy"].items():
        axes.plot(report["time_steps"], [100 * x for x in values], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(report["time_steps"], [str(t) for t in report["time_steps"]])
    axes.set_xlabel("time steps T")
    axes.set_ylabel("accuracy in %")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def draw_cka(report: dict[str, Any]) -> Any:
    """CKA of every block with the ANN, before and after fine-tuning."""
    if not report["cka"]:
        return None
    figure = new_figure(max(5.0, 0.5 * len(report["blocks"]) + 2))
    axes = figure.subplots()
    _bars(axes, report["blocks"], report["cka"])
    axes.set_ylim(0, 1.02)
    axes.set_ylabel(f"CKA with the ANN at T = {max(report['trained_at'])}")
    figure.legend(title="fine-tuning", loc="outside lower center", ncols=2)
    return figure


def draw_firing_rate(report: dict[str, Any]) -> Any:
    """Spikes per neuron and step, layer by layer."""
    figure = new_figure(max(5.0, 0.4 * len(report["firing_rate"]) + 2))
    axes = figure.subplots()
    _bars(axes, list(report["firing_rate"]), {"closed loop": list(report["firing_rate"].values())})
    axes.set_ylabel(f"spikes per neuron and step at T = {max(report['trained_at'])}")
    return figure


def draw_noise(report: dict[str, Any]) -> Any:
    """Accuracy under noise on the pixels."""
    noise = report["noise"]
    if not noise["ann"]:
        return None
    figure = new_figure()
    axes = figure.subplots()
    axes.plot(noise["sigma"], [100 * x for x in noise["ann"]], "k--o", label="ANN")
    axes.plot(noise["sigma"], [100 * x for x in noise["closed_loop"]], marker="o", label="closed loop")
    axes.set_xlabel("standard deviation of the noise, pixels in [0, 1]")
    axes.set_ylabel("accuracy in %")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _bars(axes: Any, names: list[str], groups: dict[str, list[float]]) -> None:
    x, width = np.arange(len(names)), 0.8 / len(groups)
    for i, (label, values) in enumerate(groups.items()):
        axes.bar(x + (i - (len(groups) - 1) / 2) * width, values, width, label=label)
    axes.set_xticks(x, names, rotation=45, ha="right")
    axes.grid(alpha=0.3, axis="y")
