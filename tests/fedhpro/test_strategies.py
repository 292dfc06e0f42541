"""What each strategy adds to the loss, sends, and does on the server."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_modules.fedhpro import strategies as all_strategies
from lightning_modules.fedhpro.clients import LocalTraining, features, train_client, train_together
from lightning_modules.fedhpro.finch import finch
from lightning_modules.fedhpro.losses import client_margin, hpal_loss, hpcl_loss
from lightning_modules.fedhpro.matching import (
    class_gradients,
    head_gradients,
    match_features,
    match_hyper_prototypes,
    retrain_head,
)
from lightning_modules.fedhpro.network import ResNet10, SmallCNN
from lightning_modules.fedhpro.strategies import FedAvg, HyperPrototypes, build_strategy, head_of
from tests.fedhpro import toys

NAMES = [n for n, c in vars(all_strategies).items() if isinstance(c, type) and issubclass(c, FedAvg)]


@pytest.fixture(scope="module")
def clients():
    data = toys.data()
    data.setup()
    return [data.client(k) for k in range(4)]


@pytest.fixture
def network():
    torch.manual_seed(0)
    return SmallCNN(10, width=4, dim=16)


def plan(lr=0.05):
    return LocalTraining(epochs=1, batch_size=16, optimizer=lambda p: torch.optim.SGD(p, lr=lr))


def made(name, **options):
    torch.manual_seed(1)
    strategy = build_strategy(name, options)
    strategy.build(10, 16)
    return strategy


def a_round(strategy, network, clients, number=0):
    """One round without averaging: what the server gets and does."""
    reports = [train_client(copy.deepcopy(network), c, strategy, plan(), number) for c in clients]
    sent = {n: torch.stack([r.sent[n] for r in reports]).double() for n in strategy.sends}
    if not strategy.stacked:
        sent = {n: t.sum(0) for n, t in sent.items()}
    return strategy.server(network, head_of(network), sent, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_two_rounds_of_every_strategy(name, network, clients):
    strategy = made(name)
    for number in range(2):
        for client in clients:
            report = train_client(copy.deepcopy(network), client, strategy, plan(), number)
            assert {n: tuple(t.shape) for n, t in report.sent.items()} == strategy.sends
            assert set(report.figures) >= set(strategy.figures)
        figures = a_round(strategy, network, clients, number)
        assert all(np.isfinite(v) for v in figures.values())
    images = clients[0].images(torch.arange(3))
    assert strategy.logits(network, images).shape == (3, 10)
    fresh = made(name)
    fresh.load_state_dict(strategy.state_dict())  # also where a round changes the number of prototypes


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("FedProx", {"mu": 0.0}),
        ("Moon", {"mu": 0.0}),
        ("FedProto", {"weight": 0.0}),
        ("HyperPrototypes", {"contrastive_weight": 0.0, "alignment_weight": 0.0}),
        ("HyperPrototypes", {"contrastive_weight": 0.0, "alignment_weight": 0.0, "gradient_samples": 5}),
    ],
)
def test_zero_weight_is_fedavg_bit_for_bit(name, options, network, clients):
    strategy = made(name, **options)
    a_round(strategy, network, clients)
    ours, plain = copy.deepcopy(network), copy.deepcopy(network)
    train_client(ours, clients[0], strategy, plan(), 1)
    train_client(plain, clients[0], made("FedAvg"), plan(), 1)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


def test_training_moves_the_weights_and_depends_on_the_round(network, clients):
    after = []
    for number in (0, 0, 1):
        net = copy.deepcopy(network)
        train_client(net, clients[0], made("FedAvg"), plan(), number)
        after.append(net.classifier.weight.detach())
    assert torch.equal(after[0], after[1])
    assert not torch.equal(after[0], after[2])
    assert not torch.equal(after[0], network.classifier.weight)


def test_dropout_depends_on_client_and_round_alone(clients):
    network = SmallCNN(10, width=4, dim=16)
    network.hidden = nn.Sequential(network.hidden, nn.Dropout(0.5))
    before = torch.get_rng_state()
    results = []
    for _ in range(2):
        torch.manual_seed(int(torch.randint(1000, ())))
        net = copy.deepcopy(network)
        train_client(net, clients[1], made("FedAvg"), plan(), 3)
        results.append(net.classifier.weight.detach())
    assert torch.equal(*results)
    torch.set_rng_state(before)


def test_proximal_gradient(network, clients):
    strategy = made("FedProx", mu=0.3)
    state = strategy.before(network, clients[0], 0)
    with torch.no_grad():
        network.classifier.bias += 2
    strategy.penalty(state, network, None, None, None).backward()
    torch.testing.assert_close(network.classifier.bias.grad, torch.full((10,), 0.6))
    assert network.conv1.weight.grad.eq(0).all()


def test_model_contrast(network, clients):
    strategy = made("Moon", mu=2.0, tau=0.5)
    images, labels = clients[0].images(torch.arange(5)), clients[0].labels[:5]
    old = copy.deepcopy(network)
    with torch.no_grad():
        old.hidden.bias += torch.randn(16)
    strategy.after(old, clients[0], {})
    state = strategy.before(network, clients[0], 0)
    z = torch.rand(5, 16)
    near = (F.cosine_similarity(z, network(images)[0]) / 0.5).exp()
    far = (F.cosine_similarity(z, old(images)[0]) / 0.5).exp()
    expected = -2 * torch.log(near / (near + far)).mean()
    torch.testing.assert_close(strategy.penalty(state, network, images, z, labels), expected)
    first = strategy.before(network, clients[1], 0)  # a client without a past: both models are the received one
    torch.testing.assert_close(strategy.penalty(first, network, images, z, labels), 2 * torch.tensor(2.0).log())


def test_prototypes_are_unweighted_means_over_holders(network, clients):
    strategy = made("FedProto", weight=1.0)
    sent = {"means": torch.zeros(10, 16), "holders": torch.zeros(10)}
    sent["means"][3], sent["holders"][3] = 6.0, 2
    strategy.server(network, None, sent, None)
    assert strategy.prototypes[3].eq(3).all() and strategy.known.nonzero().tolist() == [[3]]
    z = torch.full((4, 16), 5.0)
    penalty = strategy.penalty({}, network, None, z, torch.tensor([3, 0, 0, 0]))
    assert penalty.item() == pytest.approx(4 / 4)  # one sample of four has a prototype, at distance 2 in each dimension


def test_clustered_prototypes(network):
    strategy = made("FPL", tau=0.5)
    means, holders = torch.zeros(5, 10, 16), torch.zeros(5, 10)
    near, far = torch.eye(16)[0], torch.eye(16)[1]
    means[:4, 2] = torch.stack([near, near + 0.01 * far, far, far + 0.01 * near])
    means[4, 7] = torch.eye(16)[5]
    holders[:4, 2] = holders[4, 7] = 1
    strategy.server(network, None, {"means": means, "holders": holders}, None)
    assert strategy.cluster_labels.tolist() == [2, 2, 7]
    torch.testing.assert_close(strategy.unbiased[2], means[:4, 2].mean(0))
    z = torch.rand(2, 16)
    sim = torch.stack([F.cosine_similarity(z, p[None]) for p in strategy.clusters], 1) / 0.5
    first = -torch.log(sim[0, :2].exp().sum() / sim[0].exp().sum()) + (z[0] - strategy.unbiased[2]).square().mean()
    penalty = strategy.penalty({}, network, None, z, torch.tensor([2, 4]))  # class 4 has no prototype
    torch.testing.assert_close(penalty, first / 2)


def test_unbiased_prototype_is_the_mean_of_the_clusters_not_of_the_clients(network):
    strategy = made("FPL")
    near, far = torch.eye(16)[:2]
    points = torch.stack([near, near + 0.01 * far, near + 0.02 * far, far, far + 0.01 * near])
    sent = {"means": torch.zeros(5, 10, 16), "holders": torch.zeros(5, 10)}
    sent["means"][:, 2], sent["holders"][:, 2] = points, 1
    strategy.server(network, None, sent, None)
    clusters = torch.stack([points[:3].mean(0), points[3:].mean(0)])
    torch.testing.assert_close(strategy.clusters, clusters)
    torch.testing.assert_close(strategy.unbiased[2], clusters.mean(0))


def test_finch_finds_the_groups():
    g = torch.Generator().manual_seed(0)
    centres = 10 * torch.eye(8)[:3]
    points = torch.cat([c + 0.1 * torch.randn(6, 8, generator=g) for c in centres])
    labels = finch(points)
    truth = torch.arange(3).repeat_interleave(6)
    assert len(set(zip(labels.tolist(), truth.tolist(), strict=True))) <= labels.max() + 1, "a cluster mixes groups"
    assert finch(points[:1]).tolist() == [0]


def test_trained_prototypes_lie_apart(network):
    strategy = made("FedTGP", epochs=300, lr=0.1)
    means, holders = torch.randn(3, 10, 16) + 3 * torch.eye(10, 16), torch.ones(3, 10)
    figures = strategy.server(network, None, {"means": means, "holders": holders}, torch.Generator().manual_seed(0))
    class_mean = means.mean(0)
    gap = torch.cdist(class_mean, class_mean).fill_diagonal_(float("inf")).min(1).values.max()
    assert figures["prototype_margin"] == pytest.approx(gap.item(), rel=1e-4)
    nearest = torch.cdist(class_mean, strategy.prototypes).argmin(1)
    assert (nearest == torch.arange(10)).float().mean() >= 0.9
    assert all(p.grad is None for p in strategy.parameters())


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_fedhpro_loss_and_what_is_sent(variant, network, clients):
    strategy = made("HyperPrototypes", variant=variant)
    client = clients[0]
    state = strategy.before(network, client, 0)
    z, labels = features(network, client)
    sent = strategy.after(network, client, state)
    code = variant == "code"
    torch.testing.assert_close(sent["gradients"], class_gradients(z, labels, *head_of(network), code)[0])
    margin = 0.0 if code else client_margin(z, labels, 10)
    anchors = strategy.hyper_prototypes
    expected = hpcl_loss(z, labels, anchors, margin, 0.05, variant) + hpal_loss(z, labels, anchors, code)
    torch.testing.assert_close(strategy.penalty(state, network, None, z, labels), expected)


def test_every_difference_of_paper_and_code_is_an_argument():
    paper, code = made("HyperPrototypes"), made("HyperPrototypes", variant="code")
    names = ("distance", "contrastive_form", "contrastive_divide", "margin", "alignment_normalize")
    names += ("gradient_samples", "divide_again", "matching_head", "head_retraining")
    for name in names:
        assert getattr(paper, name) != getattr(code, name), name
        mixed = made("HyperPrototypes", variant="code", **{name: getattr(paper, name)})
        assert getattr(mixed, name) == getattr(paper, name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("HyperPrototypes", {"variant": "both"}, "variant is one of paper, code, not 'both'"),
        ("HyperPrototypes", {"variant": None}, "variant is one of paper, code, not None"),
        ("HyperPrototypes", {"optimizer": "adamw"}, "optimizer is one of sgd, adam, not 'adamw'"),
        ("HyperPrototypes", {"matching_head": "newest"}, "matching_head is one of received, new, None, not 'newest'"),
        ("HyperPrototypes", {"margin": "none_"}, "margin is one of distance, inner, none, None, not 'none_'"),
        ("HyperPrototypes", {"distance": "l2"}, "distance is one of cos, .* not 'l2'"),
        ("NoMargin", {"contrastive_form": ""}, "contrastive_form is one of paper, code, None, not ''"),
        ("HyperPrototypes", {"tau": 0}, "strategy HyperPrototypes: tau 0 must be above 0"),
        ("HyperPrototypes", {"per_class": 0}, "per_class 0 must be at least 1"),
        ("HyperPrototypes", {"steps": -1}, "steps -1 must be at least 0"),
        ("HyperPrototypes", {"lr": float("nan")}, "lr nan must be above 0"),
        ("HyperPrototypes", {"alignment_weight": -1.0}, "alignment_weight -1.0 must be at least 0"),
        ("HyperPrototypes", {"gradient_samples": -1}, "gradient_samples -1 must be at least 0"),
        ("FedProx", {"mu": -0.1}, "mu -0.1 must be at least 0"),
        ("Moon", {"tau": 0.0}, "tau 0.0 must be above 0"),
        ("FedProto", {"weight": -1}, "weight -1 must be at least 0"),
        ("FPL", {"tau": 0}, "tau 0 must be above 0"),
        ("FedTGP", {"epochs": 0}, "epochs 0 must be at least 1"),
        ("CReFF", {"per_class": 0}, "per_class 0 must be at least 1"),
        ("FedAvg", {"tau": 0.2}, "unexpected keyword argument 'tau'; strategy_args null"),
    ],
)
def test_options_that_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_strategy(name, options)


def test_gradient_samples_are_capped_per_class(network, clients):
    strategy = made("HyperPrototypes", gradient_samples=3)
    rows = strategy._sample(clients[0], 0)
    counts, capped = torch.bincount(clients[0].labels), torch.bincount(clients[0].labels[rows])
    assert torch.equal(capped, counts.clamp(max=3)[: len(capped)])
    assert not torch.equal(rows, strategy._sample(clients[0], 1))


@pytest.mark.parametrize(("head", "changed"), [("received", False), ("new", True)])
def test_matching_uses_the_chosen_head(head, changed, network, clients):
    results = []
    for shift in (0.0, 1.0):
        strategy = made("HyperPrototypes", matching_head=head)
        received = head_of(network)
        sent = {"gradients": torch.ones(10, 16), "holders": torch.ones(10)}
        new = copy.deepcopy(network)
        new.classifier.weight.data += shift * torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
        strategy.server(new, received, sent, torch.Generator())
        results.append(strategy.hyper_prototypes.clone())
    assert torch.equal(*results) != changed


def test_matching_is_to_the_mean_over_the_holders(network):
    """With a distance that sees lengths; the cosine does not."""
    strategy, received = made("HyperPrototypes", distance="mse"), head_of(network)
    sent = {"gradients": torch.randn(10, 16), "holders": torch.arange(10.0)}
    expected, _ = match_hyper_prototypes(
        strategy.hyper_prototypes,
        *received,
        sent["gradients"] / sent["holders"].clamp(min=1)[:, None],
        sent["holders"] > 0,
        distance="mse",
    )
    assert not torch.equal(strategy.hyper_prototypes, expected)
    strategy.server(network, received, sent, torch.Generator())
    torch.testing.assert_close(strategy.hyper_prototypes, expected)


def test_frozen_prototypes_stay_and_nothing_is_sent(network, clients):
    strategy = made("FrozenHyperPrototypes")
    before = strategy.hyper_prototypes.clone()
    assert torch.equal(before, made("HyperPrototypes").hyper_prototypes), "the control starts where FedHPro starts"
    a_round(strategy, network, clients)
    assert torch.equal(strategy.hyper_prototypes, before) and strategy.sends == {}


def test_averaged_prototypes(network, clients):
    strategy = made("AveragedPrototypes")
    z, labels = torch.rand(4, 16), torch.tensor([1, 1, 2, 2])
    assert strategy.penalty({"margin": 0.0}, network, None, z, labels) == 0
    sent = {"means": torch.zeros(10, 16), "holders": torch.zeros(10)}
    sent["means"][1], sent["holders"][1] = torch.arange(16.0), 2
    strategy.server(network, head_of(network), sent, torch.Generator())
    assert torch.equal(strategy.hyper_prototypes[1, 0], torch.arange(16.0) / 2)
    anchors = strategy.hyper_prototypes
    expected = hpcl_loss(z[:2], labels[:2], anchors) + hpal_loss(z[:2], labels[:2], anchors)
    torch.testing.assert_close(strategy.penalty({"margin": 0.0}, network, None, z, labels), expected / 2)


def test_zero_prototype_is_a_norm_penalty(network):
    strategy = made("ZeroPrototype")
    z = torch.rand(4, 16)
    penalty = strategy.penalty({"margin": 0.0}, network, None, z, torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(penalty, (z**2 / 2).mean())


def test_head_retraining_replaces_the_classifier(network, clients):
    strategy = made("HeadRetraining")
    before = head_of(network)[0].clone()
    a_round(strategy, network, clients)
    assert not torch.equal(network.classifier.weight, before)


def test_creff_keeps_the_averaged_head_for_training(network, clients):
    strategy = made("CReFF", epochs=5, steps=5)
    before, retrained = head_of(network)[0].clone(), strategy.weight.clone()
    a_round(strategy, network, clients)
    assert torch.equal(network.classifier.weight, before)
    assert not torch.equal(strategy.weight, retrained)
    images = clients[0].images(torch.arange(3))
    expected = F.linear(network(images)[0], strategy.weight, strategy.bias)
    torch.testing.assert_close(strategy.logits(network, images), expected)


@pytest.mark.parametrize("name", ["CReFF", "HeadRetraining"])
def test_head_gradients_and_their_matching_are_at_one_head(name, network, clients):
    strategy, received = made(name), head_of(network)
    own = (strategy.weight, strategy.bias) if name == "CReFF" else received
    sent = strategy.after(network, clients[0], strategy.before(network, clients[0], 0))
    for_weight, for_bias = head_gradients(*features(network, clients[0]), *own)
    torch.testing.assert_close(sent["head_weight"], for_weight)
    torch.testing.assert_close(sent["head_bias"], for_bias)
    assert for_weight.abs().sum() > 0 and for_bias.abs().sum() > 0
    used = []
    strategy.synthetic.fit = lambda head, *_: used.append([part.clone() for part in head]) or head_of(network)
    with torch.no_grad():
        network.classifier.weight += 1  # the average
    sums = {key: sent[key] if key in sent else torch.zeros(shape) for key, shape in strategy.sends.items()}
    expected = [part.clone() for part in own]
    strategy.server(network, received, sums, torch.Generator())
    assert all(torch.equal(a, b) for a, b in zip(used[0], expected, strict=True))


def test_synthetic_features_match_the_mean_over_the_holders(network):
    synthetic = all_strategies.SyntheticFeatures(10, 16, per_class=4, steps=2, lr=0.1, epochs=1)
    sent = {name: torch.randn(shape) for name, shape in synthetic.sends.items()} | {"holders": torch.arange(10.0)}
    share, head, start = 1 / sent["holders"].clamp(min=1), head_of(network), synthetic.features.clone()
    targets = sent["head_weight"] * share[:, None, None], sent["head_bias"] * share[:, None]
    expected = match_features(start, *head, *targets, sent["holders"] > 0, steps=2)
    weight, _ = synthetic.fit(head, sent, torch.Generator().manual_seed(0))
    torch.testing.assert_close(synthetic.features, expected)
    assert torch.equal(weight, retrain_head(expected, torch.Generator().manual_seed(0), epochs=1)[0])


class Listening:
    """A client that notes the epochs it is asked for."""

    def __init__(self, client):
        self.client, self.trained, self.ordered = client, [], []

    def __getattr__(self, name):
        return getattr(self.client, name)

    def batches(self, epoch, size):
        self.trained.append(epoch)
        return self.client.batches(epoch, size)

    def order(self, epoch):
        self.ordered.append(epoch)
        return self.client.order(epoch)


@pytest.mark.parametrize("together", [False, True])
def test_every_local_epoch_has_a_number_of_its_own(together, network, clients):
    client, strategy = Listening(clients[0]), made("HyperPrototypes", gradient_samples=3)
    training = LocalTraining(epochs=2, batch_size=64, optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
    for number in range(2):
        if together:
            list(train_together(network, [client], strategy, training, number))
        else:
            train_client(network, client, strategy, training, number)
    assert client.trained == [0, 1, 2, 3] and client.ordered == [0, 2]
    assert len({tuple(client.order(epoch).tolist()) for epoch in range(4)}) == 4


def test_batchnorm_without_a_second_image_names_the_client(clients):
    lonely = replace(clients[1], rows=clients[1].rows[:3])
    network = ResNet10(10, in_channels=1, width=4)
    training = LocalTraining(epochs=1, batch_size=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
    with pytest.raises(ValueError, match=r"client 1 has a batch of a single image, of 3, .* set norm to gn"):
        train_client(network, lonely, made("FedAvg"), training, 0)


def test_loss_that_is_not_finite_names_the_client(network, clients):
    with pytest.raises(ValueError, match=r"client 2: the loss is .* lower the learning rate"):
        train_client(network, clients[2], made("FedAvg"), plan(lr=1e30), 0)


class Mine(FedAvg):
    pass


class MyPrototypes(HyperPrototypes):
    """Without the argument `variant`."""

    def __init__(self, tau: float = 0.3) -> None:
        super().__init__(tau=tau)


def test_names():
    assert isinstance(build_strategy("tests.fedhpro.test_strategies.Mine"), Mine)
    mine = build_strategy("tests.fedhpro.test_strategies.MyPrototypes", {"tau": 0.4}, "code")
    assert mine.tau == 0.4 and mine.distance == "cos"
    assert build_strategy("NoMargin", variant="code").distance == "coord"
    with pytest.raises(ValueError, match="FedAvg, FedProx, Moon"):
        build_strategy("FedSGD")
    with pytest.raises(ValueError, match="no subclass"):
        build_strategy("torch.nn.Linear")
    with pytest.raises(ValueError, match=r"strategy FedProx: .*nu"):
        build_strategy("FedProx", {"nu": 1})
