import json

import numpy as np
import pytest
import torch

from lightning_modules.focal_policy.normalizer import Normalizer, fit_affine
from lightning_modules.focal_policy.policy import PolicyConfig, PolicyNetwork
from lightning_modules.focal_policy.rollout import RolloutPolicy

SMALL = {"state_dim": 3, "point_channels": 0, "action_dim": 2, "widths": (8, 16, 16), "time_features": 8}


def network(**changes) -> PolicyNetwork:
    torch.manual_seed(0)
    net = PolicyNetwork(PolicyConfig(**SMALL | changes))
    points = torch.randn(50, 5, 3)
    net.normalizer.fit({"action": torch.randn(50, 2) * 3 + 1, "state": torch.randn(50, 3), "point_cloud": points})
    return net.eval()


def test_normaliser_round_trip_with_a_constant_column():
    data = torch.randn(100, 3)
    data[:, 1] = 0.7
    normalizer = Normalizer({"action": 3})
    assert not normalizer.fitted
    assert normalizer("action", data).isnan().all()
    normalizer.fit({"action": data})
    y = normalizer("action", data)
    assert y[:, 1].abs().max() < 1e-6
    torch.testing.assert_close(y.amin(0)[[0, 2]], -torch.ones(2))
    torch.testing.assert_close(y.amax(0)[[0, 2]], torch.ones(2))
    torch.testing.assert_close(normalizer.inverse("action", y), data)
    with pytest.raises(ValueError, match="no action"):
        normalizer.fit({"state": data})
    with pytest.raises(ValueError, match="2 numbers per action, the policy expects 3"):
        normalizer.fit({"action": data[:, :2]})


def test_gaussian_and_offset_free_fits():
    data = torch.randn(100, 2) * 5 + 3
    data[:, 1] = 0
    scale, offset = fit_affine(data, "gaussian")
    y = data * scale + offset
    torch.testing.assert_close(y[:, 0].std(), torch.tensor(1.0))
    assert y.mean(0).abs().max() < 1e-5 and scale[1] == 1
    scale, offset = fit_affine(data, fit_offset=False)
    assert (data * scale).abs().amax(0).tolist() == pytest.approx([1, 0]) and not offset.any()


def test_impossible_windows_say_so():
    with pytest.raises(ValueError, match="ends at step 5"):
        PolicyConfig(horizon=4)
    with pytest.raises(ValueError, match=r"not divisible by 4.*use 12"):
        PolicyConfig(horizon=10)
    assert PolicyConfig().executed == slice(1, 5)


def test_one_step_is_one_call_at_eps_with_a_step_of_one():
    net = network()
    observation = {"state": torch.randn(4, 2, 3)}
    noise = torch.randn(4, 12, 2)
    calls = []
    net.model.register_forward_hook(lambda m, args, out: calls.append((args[1], out)))
    with torch.no_grad():
        window = net(observation, noise)
    torch.testing.assert_close(calls[0][0], torch.full((4,), 0.99))
    torch.testing.assert_close(window, net.normalizer.inverse("action", noise + calls[0][1]))
    calls.clear()
    with torch.no_grad():
        net(observation, noise, steps=4)
    times = torch.stack([t[0] for t, _ in calls]) / 99
    torch.testing.assert_close(times, torch.tensor([0.01, 0.2575, 0.505, 0.7525]))


def test_act_plans_every_chunk_and_repeats_the_first_observation():
    net = network()
    policy = RolloutPolicy(net, seed=3)
    seen = []
    policy.plan = lambda observation, noise: (
        seen.append(observation["state"]) or RolloutPolicy.plan(policy, observation, noise)
    )
    states = torch.randn(9, 3)
    actions = [policy.act({"state": state.numpy()}) for state in states]
    assert [a.shape for a in actions] == [(2,)] * 9 and actions[0].dtype == np.float32
    expected = [states[[0, 0]], states[[3, 4]], states[[7, 8]]]
    assert all(torch.equal(s[0], e) for s, e in zip(seen, expected, strict=True))
    np.testing.assert_allclose(actions[8], policy.window[1])
    policy.reset()
    policy.act({"state": states[5].numpy()})
    assert torch.equal(seen[-1][0], states[[5, 5]])


def test_act_on_a_batch_keeps_the_axis():
    policy = RolloutPolicy(network())
    assert policy.act({"state": np.zeros((5, 3))}).shape == (5, 2)
    assert policy.window.shape == (5, 12, 2)


def test_the_wrong_observation_says_so():
    policy = RolloutPolicy(network())
    with pytest.raises(ValueError, match="no state"):
        policy.act({"image": np.zeros((8, 8, 3))})
    with pytest.raises(ValueError, match="4 numbers, the policy was trained on 3"):
        policy.act({"state": np.zeros(4)})
    with pytest.raises(ValueError, match="not fitted"):
        RolloutPolicy(PolicyNetwork(PolicyConfig(**SMALL)))


def test_saved_policy_acts_the_same(tmp_path):
    policy = RolloutPolicy(network(), seed=1)
    policy.save_pretrained(tmp_path)
    again = RolloutPolicy.from_pretrained(tmp_path, seed=1)
    assert again.config == policy.config
    for state in np.random.default_rng(0).normal(size=(6, 3)):
        np.testing.assert_array_equal(again.act({"state": state}), policy.act({"state": state}))


def test_files_that_are_no_policy_say_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        RolloutPolicy.from_pretrained(tmp_path)
    RolloutPolicy(network()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (({"format": 99}, "format 99"), ({"class": "GraphPFN"}, "not written by FocalPolicy")):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message):
            RolloutPolicy.from_pretrained(tmp_path)


def test_state_points_and_images_together():
    net = network(point_channels=3, image_crop=16)
    net.normalizer.fit({"action": torch.randn(9, 2), "state": torch.randn(9, 3), "point_cloud": torch.randn(9, 5, 3)})
    policy = RolloutPolicy(net)
    observation = {"state": np.zeros(3), "point_cloud": np.zeros((5, 3)), "image": np.zeros((32, 32, 3), np.uint8)}
    assert policy.act(observation).shape == (2,)
