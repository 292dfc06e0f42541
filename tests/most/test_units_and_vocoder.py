import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_modules.most.discriminators import Discriminators
from lightning_modules.most.units import Units, deduplicate
from lightning_modules.most.vocoder import DurationPredictor, MelLoss, UnitVocoder, duration_errors


def test_units_are_the_nearest_centroids_and_k_means_finds_clusters():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(5, 8)) * 10
    frames = (centres[rng.integers(0, 5, 400)] + 0.1 * rng.normal(size=(400, 8))).astype(np.float32)
    units = Units(5, 8).fit(frames, seed=0)
    distance = np.linalg.norm(frames[:, None] - units.centroids.numpy(), axis=-1)
    assert np.array_equal(units(torch.from_numpy(frames)).numpy(), distance.argmin(1))
    assert distance.min(1).max() < 1.0
    with pytest.raises(ValueError, match="3 frames cannot make 5 units"):
        Units(5, 8).fit(frames[:3])


def test_unit_sets_are_known_by_their_hash(tmp_path):
    torch.manual_seed(0)
    units = Units(4, 3)
    units.centroids.normal_()
    units.save(tmp_path / "units.safetensors")
    loaded = Units.load(tmp_path / "units.safetensors")
    assert loaded.hash == units.hash
    vocoder = UnitVocoder(4, units.hash, width=16, embedding=8)
    vocoder.check(loaded.hash)
    loaded.centroids[0, 0] += 1
    with pytest.raises(ValueError, match="cannot speak") as error:
        vocoder.check(loaded.hash)
    assert "\n" not in str(error.value)
    tensors = load_file(tmp_path / "units.safetensors")
    save_file(tensors, tmp_path / "bad.safetensors", {"hash": "0" * 16})
    with pytest.raises(ValueError, match="states the hash"):
        Units.load(tmp_path / "bad.safetensors")


def test_deduplicate():
    runs, lengths = deduplicate(torch.tensor([3, 3, 1, 3, 3, 3]))
    assert (runs.tolist(), lengths.tolist()) == ([3, 1, 3], [2, 1, 3])
    assert torch.equal(runs.repeat_interleave(lengths), torch.tensor([3, 3, 1, 3, 3, 3]))


@pytest.mark.parametrize("size", [320, 640])
def test_vocoder_makes_as_many_samples_per_unit_as_asked(size):
    vocoder = UnitVocoder(7, samples_per_unit=size, width=32, embedding=8)
    assert vocoder(torch.zeros(2, 9, dtype=torch.int64)).shape == (2, 9 * size)
    spoken = vocoder.speak([torch.tensor([1, 2, 3]), torch.tensor([], dtype=torch.int64), torch.tensor([4])])
    assert [len(s) for s in spoken] == [3 * size, 0, size]
    with pytest.raises(ValueError, match="one frame per 960"):
        UnitVocoder(7, samples_per_unit=960)


def test_vocoder_learns_a_tone_per_unit():
    """Two units, two tones: after a few steps the spectrum of each is nearer to its own tone."""
    torch.manual_seed(0)
    vocoder, loss = UnitVocoder(2, width=32, embedding=8), MelLoss()
    optimizer = torch.optim.AdamW(vocoder.parameters(), 3e-3)
    time = torch.arange(4 * 640) / 16_000
    real = torch.stack([0.3 * torch.sin(2 * torch.pi * f * time) for f in (300.0, 2000.0)])
    units = torch.tensor([[0] * 4, [1] * 4])
    first = loss(vocoder(units), real).item()
    for _ in range(40):
        optimizer.zero_grad()
        loss(vocoder(units), real).backward()
        optimizer.step()
    made = vocoder(units).detach()
    assert loss(made, real) < 0.75 * first
    assert loss(made, real) < loss(made, real.flip(0))


def test_mel_loss_is_zero_for_equal_and_grows_with_the_level():
    loss = MelLoss()
    x = torch.randn(1, 3200)
    assert loss(x, x) == 0
    assert loss(x * 2, x).item() == pytest.approx(np.log(4), abs=1e-4)


def test_durations_are_learnt():
    torch.manual_seed(0)
    predictor = DurationPredictor(3, 16)
    units, count = torch.tensor([[0, 0, 0, 1, 2, 2, 0, 0, 0, 0], [1, 2, 2, 0, 0, 0, 0, 0, 0, 0]]), torch.tensor([9, 6])
    optimizer = torch.optim.AdamW(predictor.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        duration_errors(predictor, units, count).mean().backward()
        optimizer.step()
    assert duration_errors(predictor, units, count).mean() < 1e-2
    made = predictor.lengthen([torch.tensor([0, 1, 2, 0]), torch.tensor([1, 2, 0])])
    assert made[0].tolist() == units[0, :9].tolist()
    assert made[1].tolist() == units[1, :6].tolist()


@pytest.mark.parametrize("samples_per_unit", [320, 640])
def test_speech_does_not_depend_on_the_batch(samples_per_unit):
    torch.manual_seed(0)
    vocoder, predictor = UnitVocoder(5, samples_per_unit=samples_per_unit, width=32), DurationPredictor(5, 16)
    runs = [torch.randint(5, (n,)) for n in (7, 30, 2)]
    together = predictor.lengthen(runs)
    for own, alone in zip(together, (predictor.lengthen([x])[0] for x in runs), strict=True):
        assert torch.equal(own, alone)
    for own, alone in zip(vocoder.speak(runs), (vocoder.speak([x])[0] for x in runs), strict=True):
        assert len(own) == len(alone) > 0
        torch.testing.assert_close(own, alone, atol=1e-5, rtol=1e-4)


def small_discriminators() -> Discriminators:
    torch.manual_seed(0)
    return Discriminators(4, periods=(2, 3), scales=(1, 2)).double()


def test_one_backward_pass_moves_each_side_by_its_own_loss():
    """Gradients against those of HiFi-GAN's two separate losses, written out with the other side held fixed."""
    parts = small_discriminators()
    source = torch.randn(2, 800, dtype=torch.float64, requires_grad=True)
    real, made = torch.randn(2, 800, dtype=torch.float64), source.tanh()
    losses = parts(real, made)
    assert losses.generator == losses.features == 0
    (losses.discriminators + losses.generator + 2 * losses.features).backward()
    together = [p.grad for p in parts.parameters()]

    fixed = made.detach()
    own = sum((d(real)[-1] - 1).square().mean() + d(fixed)[-1].square().mean() for d in parts.parts)
    torch.testing.assert_close(losses.discriminators, own)
    for a, b in zip(together, torch.autograd.grad(own, list(parts.parameters())), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)
    made = source.tanh()
    fooling = sum((d(made)[-1] - 1).square().mean() for d in parts.parts)
    matching = sum(
        (a.detach() - b).abs().mean() for d in parts.parts for a, b in zip(d(real)[:-1], d(made)[:-1], strict=True)
    )
    torch.testing.assert_close(losses.fooled, fooling.detach())
    (wanted,) = torch.autograd.grad(fooling + 2 * matching, source)
    torch.testing.assert_close(source.grad, wanted, atol=1e-12, rtol=1e-9)


def test_discriminators_learn_to_tell_real_from_made():
    parts = small_discriminators().float()
    optimizer = torch.optim.AdamW(parts.parameters(), 2e-3)
    torch.manual_seed(1)
    time = torch.arange(800) / 16_000
    for _ in range(30):
        real = 0.3 * torch.sin(2 * torch.pi * 300 * time + torch.rand(4, 1) * 6)
        losses = parts(real, 0.3 * torch.randn(4, 800))
        optimizer.zero_grad()
        losses.discriminators.backward()
        optimizer.step()
    assert losses.discriminators < 1 < losses.fooled
    with pytest.raises(ValueError, match="multiple of 4"):
        Discriminators(6)


def test_discriminators_see_as_many_samples_as_their_papers_ones():
    """HiFi-GAN's layout: samples per row and per output of each part, and the parameters of the full size."""
    with torch.device("meta"):
        parts = Discriminators(32)
        layers = [part(torch.zeros(1, 8192)) for part in parts.parts]
    assert [tuple(outputs[0].shape[1:]) for outputs in layers[:5]] == [
        (32, math.ceil(math.ceil(8192 / p) / 3), p) for p in (2, 3, 5, 7, 11)
    ]
    assert [outputs[0].shape[1:] for outputs in layers[5:]] == [(128, 8192), (128, 4097), (128, 2049)]
    assert [len(outputs) for outputs in layers] == [6] * 5 + [8] * 3
