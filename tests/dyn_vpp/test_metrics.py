import math

import pytest
import torch
import torch.nn.functional as F

from lightning_modules.dyn_vpp.metrics import (
    PerceptualDistance,
    centroid_error,
    colour_centroid,
    flow_error,
    group_diversity,
    high_frequency_energy,
    lucas_kanade,
    psnr,
    ssim,
)


def texture(h, w, dx=0.0, dy=0.0, seed=0):
    """A smooth random picture moved by (dx, dy) pixels, exactly: a sum of plane waves."""
    g = torch.Generator().manual_seed(seed)
    fx, fy, phase = (torch.rand(30, generator=g) for _ in range(3))
    y, x = torch.meshgrid(torch.arange(h).float(), torch.arange(w).float(), indexing="ij")
    waves = torch.sin(
        1.6 * ((fx[:, None, None] - 0.5) * (x - dx) + (fy[:, None, None] - 0.5) * (y - dy))
        + 6.28 * phase[:, None, None]
    )
    return (0.5 + 0.5 * waves.mean(0) * 2.5).clamp(0, 1).expand(3, -1, -1)


def test_psnr_is_its_formula_and_keeps_axes():
    target = torch.rand(2, 3, 3, 16, 16)
    prediction = (target + 0.1 * torch.randn(target.shape)).clamp(0, 1)
    expected = -10 * (prediction - target).square().mean((-3, -2, -1)).log10()
    torch.testing.assert_close(psnr(prediction, target), expected)
    assert psnr(target, target).isinf().all()


def test_ssim_of_equal_and_of_blurred_pictures():
    target = torch.rand(2, 3, 3, 16, 16)
    torch.testing.assert_close(ssim(target, target), torch.ones(2, 3))
    blurred = F.avg_pool2d(target.flatten(0, 1), 3, 1, 1).unflatten(0, (2, 3))
    assert (ssim(blurred, target) < 0.8).all()


@pytest.mark.parametrize("dx, dy", [(0, 0), (0.6, -0.4), (2, 1), (-5, 4)])
def test_flow_of_a_moved_picture(dx, dy):
    first, second = texture(48, 64), texture(48, 64, dx, dy)
    flow = lucas_kanade(first[None], second[None])[0, :, 8:-8, 8:-8]
    assert (flow[0] - dx).abs().mean() < 0.1 and (flow[1] - dy).abs().mean() < 0.1


def test_flow_is_zero_without_texture_and_at_odd_sizes():
    assert lucas_kanade(torch.full((1, 3, 33, 31), 0.5), torch.full((1, 3, 33, 31), 0.5)).abs().max() == 0


def test_flow_error_measures_wrong_motion():
    right = torch.stack([texture(48, 48, k) for k in range(3)])[None]
    wrong = torch.stack([texture(48, 48, -k) for k in range(3)])[None]
    still = right[:, :1].expand_as(right)
    assert flow_error(right, right).shape == (1, 2) and flow_error(right, right).max() == 0
    assert flow_error(still, right).mean().item() == pytest.approx(1, abs=0.2)
    assert flow_error(wrong, right).mean().item() == pytest.approx(2, abs=0.4)


def test_high_frequency_energy_splits_waves():
    x = torch.arange(32).float()
    slow = torch.sin(2 * math.pi * 4 * x / 32).expand(1, 4, 32, 32)  # a quarter of the Nyquist frequency
    fast = torch.sin(2 * math.pi * 12 * x / 32).expand(1, 4, 32, 32)
    assert high_frequency_energy(slow).item() == pytest.approx(0, abs=1e-6)
    assert high_frequency_energy(fast).item() == pytest.approx(0.5, abs=1e-4)  # mean square of a sine
    noise = torch.randn(3, 5, 4, 32, 32)
    blurred = F.avg_pool2d(noise.flatten(0, 1), 3, 1, 1).unflatten(0, (3, 5))
    assert (high_frequency_energy(blurred) < 0.2 * high_frequency_energy(noise)).all()
    assert high_frequency_energy(noise).shape == (3, 5)


@pytest.mark.parametrize("g", [2, 3, 4, 5])
def test_diversity_is_the_mean_over_pairs(g):
    latents = torch.randn(2, g, 3, 4, 2, 2)
    pairs = [(latents[:, i] - latents[:, j]).abs().mean((2, 3, 4)) for i in range(g) for j in range(i)]
    torch.testing.assert_close(group_diversity(latents), sum(pairs) / len(pairs))


def test_centroid_finds_a_shaded_object_by_its_colour():
    frames = torch.full((2, 3, 20, 30), 0.5)
    red = torch.tensor([0.9, 0.2, 0.1])
    for k, (row, column, shade) in enumerate([(4, 6, 1.0), (12, 20, 0.4)]):
        frames[k, :, row : row + 3, column : column + 5] = shade * red[:, None, None]
    centre = colour_centroid(frames, red.tolist())
    torch.testing.assert_close(centre, torch.tensor([[8.0, 5.0], [22.0, 13.0]]), atol=0.05, rtol=0)
    error = centroid_error(frames, torch.tensor([[8.0, 5.0], [19.0, 9.0]]), red.tolist())
    torch.testing.assert_close(error, torch.tensor([0.0, 5.0]), atol=0.1, rtol=0)
    assert centroid_error(torch.full((3, 20, 30), 0.5), torch.zeros(2), red.tolist()).isnan()


@pytest.mark.parametrize("task", ["button-press-topdown-v3", "door-open-v3", "drawer-open-v3"])
def test_the_arms_place_by_colour_is_that_of_the_simulators_geometry(task):
    """Each pixel of a ray-cast picture comes from one geometry: the red links of the arm are where the colour is."""
    pytest.importorskip("metaworld")
    from datamodules.metaworld import Observation, Rays, Simulator

    red, spec = [0.43, 0.08, 0.08], Observation(state="none", image=64)
    simulator = Simulator(task, spec)
    simulator.reset(5)
    model = simulator.env.model
    rays = Rays(model, simulator.env.data, spec.camera, spec.position, spec.image)
    links = [g for g in range(model.ngeom) if model.body(model.geom_bodyid[g]).name.startswith("right_")]
    red_links = [g for g in links if rays.colours[g][0] > 2 * rays.colours[g][1:].max() > 0]
    for _ in range(5):
        seen = torch.from_numpy(simulator.observe()["image"]).permute(2, 0, 1) / 255
        geometry = torch.from_numpy(rays.cast()[1]).view(64, 64).flip(0, 1)  # this camera hangs upside down
        rows, columns = torch.where(torch.isin(geometry, torch.tensor(red_links, dtype=geometry.dtype)))
        true = torch.stack([columns.double().mean(), rows.double().mean()])
        assert torch.linalg.vector_norm(colour_centroid(seen, red) - true) < 0.2  # pixels
        for _ in range(8):
            simulator.step(simulator.expert())


def test_perceptual_distance_is_torchmetrics_pair_by_pair(monkeypatch):
    """On an untrained AlexNet, as its weights are not here: what is checked is range, order and rows."""
    import torchvision
    from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

    untrained = torchvision.models.alexnet(weights=None)
    monkeypatch.setattr(torchvision.models, "alexnet", lambda **_: untrained)
    first, second = torch.rand(2, 5, 3, 64, 64).unbind()
    found = PerceptualDistance("alex", rows=2)(2 * first - 1, 2 * second - 1)
    assert found.shape == (5,) and not found.requires_grad
    theirs = LearnedPerceptualImagePatchSimilarity("alex", normalize=True)
    for i in range(5):
        assert found[i].item() == pytest.approx(theirs(first[i : i + 1], second[i : i + 1]).item(), rel=1e-4)
    assert PerceptualDistance("alex")(first, first).abs().max() < 1e-6
    # it follows its pictures: Lightning moves a module only after `setup`
    assert PerceptualDistance("alex")(first.to("meta"), second.to("meta")).device.type == "meta"


def test_missing_perceptual_weights_are_named(monkeypatch):
    import torchvision

    def gone(**_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(torchvision.models, "alexnet", gone)
    with pytest.raises(FileNotFoundError, match="LPIPS needs torchvision's alex weights, which cannot be loaded: no n"):
        PerceptualDistance("alex")
