import copy

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks.ema import EMA, ema_decay


class Line(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.seen = []

    def training_step(self, batch, batch_idx):
        return (self.layer(batch[0]) ** 2).mean()

    def validation_step(self, batch, batch_idx):
        self.seen.append(self.layer.weight.detach().clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Trace(Callback):
    def __init__(self):
        self.weights = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.weights.append(pl_module.layer.weight.detach().clone())


def data():
    return DataLoader(TensorDataset(torch.randn(32, 3, generator=torch.Generator().manual_seed(1))), batch_size=4)


def trainer(folder, *callbacks, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return Trainer(default_root_dir=folder, callbacks=list(callbacks), num_sanity_val_steps=0, **quiet, **options)


def test_average_against_the_recursion(tmp_path):
    ema, trace, model = EMA(decay=0.9, power=0.75), Trace(), Line()
    start = model.layer.weight.detach().clone()
    trainer(tmp_path, trace, ema, max_epochs=1).fit(model, data(), data())
    expected = start
    for step, weight in enumerate(trace.weights, start=1):
        d = min(0.9, 1 - (1 + step) ** -0.75)
        expected = d * expected + (1 - d) * weight
    torch.testing.assert_close(ema.average["layer.weight"], expected)
    torch.testing.assert_close(model.seen[-1], expected)  # validation ran with the average
    assert torch.equal(model.layer.weight, trace.weights[-1])  # and training goes on with the raw weights
    assert "frozen" not in ema.average


def test_accumulated_batches_count_once(tmp_path):
    ema = EMA(decay=0.5)
    trainer(tmp_path, ema, max_epochs=1, accumulate_grad_batches=4).fit(Line(), data())
    assert ema.updates == 2


def test_resume_and_test_use_the_stored_average(tmp_path):
    whole = EMA(decay=0.9)
    trainer(tmp_path, whole, max_epochs=2).fit(Line(), data())
    first, save = EMA(decay=0.9), ModelCheckpoint(dirpath=tmp_path, filename="half")
    trainer(tmp_path, first, save, max_epochs=1).fit(Line(), data())
    path = tmp_path / "half.ckpt"
    raw = torch.load(path, weights_only=True)["state_dict"]["layer.weight"]
    assert not torch.equal(raw, first.average["layer.weight"])

    second = EMA(decay=0.9)
    trainer(tmp_path, second, max_epochs=2).fit(Line(), data(), ckpt_path=path)
    assert second.updates == whole.updates
    assert torch.equal(second.average["layer.weight"], whole.average["layer.weight"])

    model, third = Line(), EMA(decay=0.9)
    trainer(tmp_path, third).validate(model, data(), ckpt_path=path, verbose=False)
    assert torch.equal(model.seen[-1], first.average["layer.weight"])
    assert torch.equal(model.layer.weight, raw)


def test_weights_that_are_frozen_or_unfrozen_on_the_way(tmp_path):
    class Staged(Line):
        def on_train_epoch_start(self):
            self.frozen.requires_grad_(self.current_epoch > 0)
            self.layer.bias.requires_grad_(self.current_epoch == 0)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + (self.frozen**2).sum()

    ema, model = EMA(decay=0.9), Staged()
    trainer(tmp_path, ema, max_epochs=2).fit(model, data(), data())
    expected, weight = torch.ones(2), torch.ones(2)
    for step in range(8):
        weight = weight - 0.1 * 2 * weight
        expected = weight if step == 0 else 0.9 * expected + 0.1 * weight
    torch.testing.assert_close(ema.average["frozen"], expected)
    torch.testing.assert_close(model.frozen.detach(), weight)


def test_decay_schedule():
    assert ema_decay(5, 0.99, None) == 0.99
    assert ema_decay(0, 0.99, None) == 0
    assert ema_decay(3, 0.99, None, start=3) == 0
    assert ema_decay(10, 0.999, 0.75) == pytest.approx(1 - 11**-0.75)
    assert ema_decay(10**9, 0.999, 0.75) == 0.999
    with pytest.raises(ValueError, match="outside"):
        EMA(decay=1.0)


def test_an_error_in_validation_leaves_the_raw_weights(tmp_path):
    class Fails(Line):
        def validation_step(self, batch, batch_idx):
            raise RuntimeError("here")

    model, trace = Fails(), Trace()
    with pytest.raises(RuntimeError, match="here"):
        trainer(tmp_path, trace, EMA(decay=0.9), max_epochs=1).fit(model, data(), data())
    assert torch.equal(model.layer.weight, trace.weights[-1])
    assert copy.deepcopy(model) is not None
