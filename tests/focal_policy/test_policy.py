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


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("action_dim", 0),
        ("action_steps", 0),
        ("history", 0),
        ("inference_steps", 0),
        ("state_dim", -1),
        ("point_features", 0),
        ("image_crop", 32),
        ("image_crop", -76),
        ("eps", 1.0),
        ("eps", -0.1),
        ("eps", float("nan")),
        ("widths", ()),
        ("widths", (0, 8, 8)),
        ("groups", 0),
        ("kernel_size", 4),
        ("time_features", 9),
    ],
)
def test_numbers_out_of_range_are_named(option, value):
    with pytest.raises(ValueError, match=rf"^{option} .*must be|^{option} .*outside"):
        PolicyConfig(**{option: value})


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


def test_a_policy_without_a_normaliser_says_so():
    with pytest.raises(ValueError, match="not fitted"):
        RolloutPolicy(PolicyNetwork(PolicyConfig(**SMALL)))


@pytest.fixture(scope="module")
def seeing() -> PolicyNetwork:
    return network(point_channels=3, image_crop=64)


GOOD = {"state": np.zeros(3), "point_cloud": np.zeros((5, 3)), "image": np.zeros((66, 70, 3), np.uint8)}
WRONG = {
    "scalar state": ("state", np.float32(1), r"state .* shape \(\)"),
    "long state": ("state", np.zeros(4), r"state .* shape \(4,\) .* needed is \(3,\)"),
    "state with two axes too many": ("state", np.zeros((1, 1, 3)), r"state .* shape \(1, 1, 3\)"),
    "words": ("state", ["a", "b", "c"], "state .* <U1"),
    "ragged": ("state", [[1.0], [1.0, 2.0]], "state is no array of numbers"),
    "nothing": ("state", None, "state .* object"),
    "not a number": ("state", np.array([0, np.nan, 1]), "state is not finite"),
    "a point": ("point_cloud", np.zeros(3), r"point_cloud .* shape \(3,\) .* needed is \(n, 3\)"),
    "no point": ("point_cloud", np.zeros((0, 3)), r"point_cloud .* shape \(0, 3\)"),
    "coloured points": ("point_cloud", np.zeros((5, 6)), r"point_cloud .* shape \(5, 6\)"),
    "infinite point": ("point_cloud", np.full((5, 3), np.inf), "point_cloud is not finite"),
    "float image": ("image", np.zeros((66, 70, 3)), "image .* float64; needed is .* uint8"),
    "channels first": ("image", np.zeros((3, 66, 70), np.uint8), r"image .* shape \(3, 66, 70\)"),
    "small image": ("image", np.zeros((60, 70, 3), np.uint8), r"image .* \(60, 70, 3\) .* needed .* at least 64"),
    "two robots, one cloud": ("state", np.zeros((2, 3)), r"one batch: state has \[2\], point_cloud has \[\]"),
}


@pytest.mark.parametrize(("name", "value", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_observation_is_named_and_forgotten(name, value, message, seeing):
    policy = RolloutPolicy(seeing)
    with pytest.raises(ValueError, match=message):
        policy.act(GOOD | {name: value})
    assert policy.act(GOOD).shape == (2,)  # nothing of it is remembered


def test_observations_change_no_size_within_an_episode(seeing):
    policy = RolloutPolicy(seeing)
    for name in GOOD:
        with pytest.raises(ValueError, match=f"the observation has no {name}"):
            policy.act({k: v for k, v in GOOD.items() if k != name})
    with pytest.raises(ValueError, match="ndarray"):
        policy.act(np.zeros(3))
    policy.act(GOOD)
    with pytest.raises(ValueError, match=r"point_cloud has the shape \(4, 3\), at the last step \(5, 3\).* reset"):
        policy.act(GOOD | {"point_cloud": np.zeros((4, 3))})
    with pytest.raises(ValueError, match=r"state has the shape \(2, 3\), at the last step \(3,\).* reset"):
        policy.act({k: np.stack([v, v]) for k, v in GOOD.items()})
    policy.reset()
    assert policy.act({k: np.stack([v, v]) for k, v in GOOD.items()}).shape == (2, 2)


def test_the_history_is_a_copy_and_takes_any_array():
    """A simulator may write every observation into the same memory, hand out a flipped view, or a tensor."""
    net, state = network(), np.zeros(3)
    policy, apart = RolloutPolicy(net), RolloutPolicy(net)
    for step in range(5):
        state[:] = [step, 0, 1]
        seen = policy.act({"state": state if step % 2 else state[::-1][::-1]})
        np.testing.assert_array_equal(seen, apart.act({"state": torch.tensor([step, 0.0, 1.0])}))


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


def test_the_action_depends_on_state_points_and_image(seeing):
    def act(**changes) -> np.ndarray:
        return RolloutPolicy(seeing).act(GOOD | changes)

    np.testing.assert_array_equal(act(), act())
    image = GOOD["image"].copy()
    image[:30, :30] = 255
    for change in ({"state": np.ones(3)}, {"point_cloud": np.ones((5, 3))}, {"image": image}):
        assert np.abs(act(**change) - act()).max() > 1e-5
