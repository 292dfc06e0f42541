"""Federated strategies: what a client adds to its cross-entropy, what it sends, what the server does with it.

`FedAvg` is the whole interface; every other class overrides a few of its methods, and so can yours: name its dotted
path in the config. Models are always averaged by the round loop, weighted by the number of samples, also for
FedProto and FedTGP, which were published without it, so that all strategies end in one global model.

State of the server lives in buffers and parameters, so it is in the checkpoint and moves with the module.
Axes: `b` samples of a batch, `c` classes, `d` features, `k` clients of the round.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from datamodules.checks import check_above, check_least
from lightning_modules.fedhpro.clients import Client, features
from lightning_modules.fedhpro.finch import finch
from lightning_modules.fedhpro.losses import class_means, client_margin, hpal_loss, hpcl_loss
from lightning_modules.fedhpro.matching import (
    Distance,
    Optimizer,
    class_gradients,
    head_gradients,
    match_features,
    match_hyper_prototypes,
    retrain_head,
)
from lightning_modules.fedhpro.network import import_class

Head = tuple[Tensor, Tensor]  # weight (c, d) and bias (c,) of the classifier


def head_of(network: nn.Module) -> Head:
    """A copy of the classifier's weight and bias, whole (gathered, where they are sharded), without gradient."""
    classifier: Any = network.classifier
    weight, bias = classifier.weight.detach(), classifier.bias.detach()
    if isinstance(weight, DTensor):
        weight, bias = weight.full_tensor(), bias.full_tensor()
    return weight.clone(), bias.clone()


def _check_choices(function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Refuse an argument that is typed as a `Literal` and is none of its values."""
    for name, hint in get_type_hints(function).items():
        kinds = (hint, *get_args(hint))  # a Literal, or a union of one and None
        choices = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        choices += [None] if type(None) in kinds else []
        if choices and choices != [None] and given[name] not in choices:
            raise ValueError(f"{name} is one of {', '.join(map(str, choices))}, not {given[name]!r}")


class FedAvg(nn.Module):
    """Federated averaging (McMahan et al., AISTATS 2017): cross-entropy alone.

    Attributes:
        shared: Names of the buffers that the server sends to every client beside the model.
        sends: Names and shapes of the tensors that every client sends beside its weights (float32); set in `build`.
        figures: Names of the numbers in the entry `figures` of what `before` returns.
        stacked: The server gets each client's tensors, stacked along a first axis `k`, instead of their sum.
        stateful: Clients keep `client_states`, so a client is trained by the same rank in every round.
        sharded: Whether the clients' models may be sharded (FSDP2), so that no parameter is read outside `forward`.
        together: Whether clients may be trained together (`clients.train_together`): `penalty` reads no parameter
            either, and does the same whatever the values in the batch.
        client_states: What clients keep between their rounds, by client id, on the CPU.
    """

    shared: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    stacked: bool = False
    stateful: bool = False
    sharded: bool = True
    together: bool = True

    def __init__(self) -> None:
        super().__init__()
        self.sends: dict[str, tuple[int, ...]] = {}
        self.client_states: dict[int, dict[str, Tensor]] = {}

    def build(self, num_classes: int, dim: int) -> None:
        """Make the server's state; called once, before the first round.

        Args:
            num_classes: C.
            dim: d, inputs of the classifier.
        """
        self.num_classes, self.dim = num_classes, dim

    def before(self, network: nn.Module, client: Client, first_epoch: int) -> dict[str, Any]:
        """What a client computes from the received model before it trains.

        Args:
            network: The received model.
            client: The client's data.
            first_epoch: Number of the first local epoch, for draws.

        Returns:
            Anything `penalty` and `after` need. The numbers in an entry `figures`, a dict, are logged as the mean
            over the clients of the round (declare their names in the attribute `figures`).
        """
        return {}

    def penalty(
        self, state: dict[str, Any], network: nn.Module, images: Tensor, z: Tensor, labels: Tensor
    ) -> Tensor | float:
        """What is added to the batch's mean cross-entropy.

        Args:
            state: Made by `before`.
            network: The model in training.
            images: `(b, channels, h, w)`.
            z: `(b, d)` features, float32, with gradient.
            labels: `(b,)`.
        """
        return 0.0

    def after(self, network: nn.Module, client: Client, state: dict[str, Any]) -> dict[str, Tensor]:
        """What a client sends beside its weights; names and shapes as declared in `sends`.

        Args:
            network: The trained model.
            client: The client's data.
            state: Made by `before`.
        """
        return {}

    def server(
        self, network: nn.Module, received: Head, sent: dict[str, Tensor], generator: torch.Generator
    ) -> dict[str, float]:
        """The server's step, after averaging. Deterministic, as every rank runs it.

        Args:
            network: The averaged model; may be changed in place.
            received: The head that the clients got at the start of the round.
            sent: The sum over clients of what `after` returned, or all of it along a first axis (`stacked`).
            generator: CPU generator, seeded by round.

        Returns:
            Figures to log.
        """
        return {}

    def logits(self, network: nn.Module, images: Tensor) -> Tensor:
        """Logits `(b, c)` of the global model."""
        return network(images)[1]


class FedProx(FedAvg):
    """FedProx (Li et al., MLSys 2020): `mu / 2 * |w - w_received|^2` over the trainable parameters.

    Args:
        mu: Weight, at least 0.
    """

    sharded = False
    together = False

    def __init__(self, mu: float = 0.01) -> None:
        super().__init__()
        check_least(0, mu=mu)
        self.mu = mu

    def before(self, network: nn.Module, client: Client, first_epoch: int) -> dict[str, Any]:
        """Keep the received parameters."""
        return {"received": [p.detach().clone() for p in network.parameters()]}

    def penalty(
        self, state: dict[str, Any], network: nn.Module, images: Tensor, z: Tensor, labels: Tensor
    ) -> Tensor | float:
        """The proximal term."""
        pairs = zip(network.parameters(), state["received"], strict=True)
        return self.mu / 2 * sum((p - received).square().sum() for p, received in pairs)


class Moon(FedAvg):
    """MOON (Li et al., CVPR 2021), without its projector: model-contrastive loss on the features.

    `-mu log(e^(cos(z, z_received) / tau) / (e^(cos(z, z_received) / tau) + e^(cos(z, z_previous) / tau)))`, where
    `previous` is the client's own model after its last round (the received one before its first). One model a
    client is kept on the CPU.

    Args:
        mu: Weight, at least 0.
        tau: Temperature.
    """

    stateful = True
    sharded = False
    together = False

    def __init__(self, mu: float = 5.0, tau: float = 0.5) -> None:
        super().__init__()
        check_least(0, mu=mu)
        check_above(0, tau=tau)
        self.mu, self.tau = mu, tau

    def before(self, network: nn.Module, client: Client, first_epoch: int) -> dict[str, Any]:
        """Two frozen models: the received one, and the client's last."""
        received = copy.deepcopy(network).eval()
        previous = copy.deepcopy(network).eval()
        if client.id in self.client_states:
            previous.load_state_dict(self.client_states[client.id])
        return {"received": received, "previous": previous}

    def penalty(
        self, state: dict[str, Any], network: nn.Module, images: Tensor, z: Tensor, labels: Tensor
    ) -> Tensor | float:
        """The model-contrastive term."""
        with torch.no_grad():
            others = [state[name](images)[0].float() for name in ("received", "previous")]
        similarity = torch.stack([F.cosine_similarity(z, other) for other in others], dim=1) / self.tau  # b 2
        return self.mu * F.cross_entropy(similarity, torch.zeros_like(labels))

    def after(self, network: nn.Module, client: Client, state: dict[str, Any]) -> dict[str, Tensor]:
        """Keep the trained model; send nothing more."""
        self.client_states[client.id] = {k: v.detach().to("cpu", copy=True) for k, v in network.state_dict().items()}
        return {}


class FedProto(FedAvg):
    """FedProto (Tan et al., AAAI 2022) with averaged models: features are drawn to the global class means.

    The server averages the clients' prototypes without weights, over the clients that hold the class. Prototypes
    are taken after local training, in eval mode. Samples of a class without a global prototype add nothing.

    Args:
        weight: Of the squared distance (mean over the dimensions).
    """

    shared = ("prototypes", "known")
    prototypes: Tensor
    known: Tensor

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        check_least(0, weight=weight)
        self.weight = weight

    def build(self, num_classes: int, dim: int) -> None:
        """No class has a prototype yet."""
        super().build(num_classes, dim)
        self.sends = {"means": (num_classes, dim), "holders": (num_classes,)}
        self.register_buffer("prototypes", torch.zeros(num_classes, dim))
        self.register_buffer("known", torch.zeros(num_classes, dtype=torch.bool))

    def penalty(
        self, state: dict[str, Any], network: nn.Module, images: Tensor, z: Tensor, labels: Tensor
    ) -> Tensor | float:
        """Squared distance to the own class's prototype."""
        distance = (z - self.prototypes[labels]).square().mean(1)
        return self.weight * (distance * self.known[labels]).mean()

    def after(self, network: nn.Module, client: Client, state: dict[str, Any]) -> dict[str, Tensor]:
        """The client's class means `(c, d)`, and which classes it holds `(c,)`."""
        means, counts = class_means(*features(network, client), self.num_classes)
        return {"means": means, "holders": (counts > 0).to(means.dtype)}

    def server(
        self, network: nn.Module, received: Head, sent: dict[str, Tensor], generator: torch.Generator
    ) -> dict[str, float]:
        """Average over the holders; a class without any keeps its prototype."""
        seen = sent["holders"] > 0
        self.prototypes[seen] = (sent["means"] / sent["holders"].clamp(min=1)[:, None]).to(self.prototypes)[seen]
        self.known |= seen
        return {}


class FPL(FedAvg):
    """FPL (Huang et al., CVPR 2023): contrast with clustered prototypes, consistency with unbiased ones.

    The clients' class means are clustered with FINCH; the mean of each cluster is a prototype, the mean of a class's
    cluster means its unbiased prototype. With `P` all cluster means and `P_y` those of the own class:
    `-log(sum over P_y of e^(cos / tau) / sum over P of e^(cos / tau)) + mean square distance to the unbiased one`.

    Args:
        tau: Temperature.
    """

    shared = ("clusters", "cluster_labels", "unbiased", "known")
    clusters: Tensor
    cluster_labels: Tensor
    unbiased: Tensor
    known: Tensor
    stacked = True
    together = False

    def __init__(self, tau: float = 0.02) -> None:
        super().__init__()
        check_above(0, tau=tau)
        self.tau = tau

    def build(self, num_classes: int, dim: int) -> None:
        """No class has a prototype yet."""
        super().build(num_classes, dim)
        self.sends = {"means": (num_classes, dim), "holders": (num_classes,)}
        self.register_buffer("clusters", torch.zeros(0, dim))
        self.register_buffer("cluster_labels", torch.zeros(0, dtype=torch.long))
        self.register_buffer("unbiased", torch.zeros(num_classes, dim))
        self.register_buffer("known", torch.zeros(num_classes, dtype=torch.bool))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        for name in ("clusters", "cluster_labels"):  # as many as there were in that round
            setattr(self, name, getattr(self, name).new_zeros(state_dict[prefix + name].shape))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def penalty(
        self, state: dict[str, Any], network: nn.Module, images: Tensor, z: Tensor, labels: Tensor
    ) -> Tensor | float:
        """Both terms; samples of a class without prototypes add nothing."""
        own = self.known[labels]
        if not own.any():
            return 0.0
        similarity = F.normalize(z[own], dim=1) @ F.normalize(self.clusters, dim=1).T / self.tau  # b p
        positive = self.cluster_labels == labels[own][:, None]
        contrast = similarity.logsumexp(1) - similarity.masked_fill(~positive, float("-inf")).logsumexp(1)
        consistency = (z[own] - self.unbiased[labels[own]]).square().mean(1)
        return (contrast + consistency).sum() / len(z)

    def after(self, network: nn.Module, client: Client, state: dict[str, Any]) -> dict[str, Tensor]:
        """The client's class means `(c, d)`, and which classes it holds `(c,)`."""
        means, counts = class_means(*features(network, client), self.num_classes)
        return {"means": means, "holders": (counts > 0).to(means.dtype)}

    def server(
        self, network: nn.Module, received: Head, sent: dict[str, Tensor], generator: torch.Generator
    ) -> dict[str, float]:
        """Cluster each class's means; classes that nobody holds in this round keep theirs."""
        clusters, labels = [], []
        for c in range(self.num_classes):
            means = sent["means"][sent["holders"][:, c] > 0, c].to(self.unbiased)
            if len(means) == 0:
                clusters.append(self.clusters[self.cluster_labels == c])
            else:
                cluster_of = finch(means)
                clusters.append(class_means(means, cluster_of, int(cluster_of.max()) + 1)[0])
                self.unbiased[c] = clusters[-1].mean(0)
                self.known[c] = True
            labels.append(torch.full((len(clusters[-1]),), c, device=self.known.device))
        self.clusters, self.cluster_labels = torch.cat(clusters), torch.cat(labels)
        return {"clusters": float(len(self.clusters))}


class FedTGP(FedProto):
    """FedTGP (Zhang et al., AAAI 2024) with averaged models: prototypes that the server trains to lie apart.

    The server learns one embedding a class and a two-layer network on it, by SGD on all prototypes that clients
    sent: cross-entropy of minus the Euclidean distances, the own one enlarged by a margin
    `min(max over c of min over c' of |p_c - p_c'|, 100)` between the class means of the round.

    Args:
        weight: Of the clients' squared distance.
        epochs: The server's passes over the prototypes in a round.
        lr: The server's step size.
        batch_size: Prototypes a step.
    """

    stacked = True

    def __init__(self, weight: float = 10.0, epochs: int = 100, lr: float = 0.01, batch_size: int = 32) -> None:
        super().__init__(weight)
        check_least(1, epochs=epochs, batch_size=batch_size)
        check_above(0, lr=lr)
        self.epochs, self.lr, self.batch_size = epochs, lr, batch_size

    def build(self, num_classes: int, dim: int) -> None:
        """Embeddings and their network."""
        super().build(num_classes, dim)
        self.embedding = nn.Parameter(torch.randn(num_classes, dim))
        self.generate = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def server(
        self, network: nn.Module, received: Head, sent: dict[str, Tensor], generator: torch.Generator
    ) -> dict[str, float]:
        """Train on the prototypes of the round, then send the generated ones."""
        held = sent["holders"] > 0  # k c
        points = sent["means"][held].to(self.prototypes)
        labels = held.nonzero()[:, 1]
        seen = held.any(0)
        means, _ = class_means(points, labels, self.num_classes)
        gaps = torch.cdist(means[seen], means[seen]).fill_diagonal_(float("inf")).min(1).values
        margin = gaps[gaps.isfinite()].max().clamp(max=100) if len(gaps) > 1 else gaps.new_zeros(())
        own = F.one_hot(labels, self.num_classes).to(points)
        optimizer = torch.optim.SGD([self.embedding, *self.generate.parameters()], lr=self.lr)
        with torch.enable_grad():
            for _ in range(self.epochs):
                for rows in torch.randperm(len(points), generator=generator).to(labels.device).split(self.batch_size):
                    distance = torch.cdist(points[rows], self.generate(self.embedding)) + margin * own[rows]
                    loss = F.cross_entropy(-distance, labels[rows])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            self.prototypes.copy_(self.generate(self.embedding))
        self.known |= seen
        return {"prototype_margin": float(margin), "prototype_loss": float(loss.detach())}


class SyntheticFeatures(nn.Module):
    """Features that the server fits to the clients' head gradients, and the head it trains on them (CReFF).

    Args:
        num_classes: C.
        dim: d.
        per_class: Features a class.
        steps: Matching steps a round.
        lr: Step size of the matching.
        epochs: Passes of the head's training.
    """

    features: Tensor

    def __init__(self, num_classes: int, dim: int, per_class: int, steps: int, lr: float, epochs: int) -> None:
        super().__init__()
        self.steps, self.lr, self.epochs = steps, lr, epochs
        self.sends = {
            "head_weight": (num_classes, num_classes, dim),
            "head_bias": (num_classes, num_classes),
            "holders": (num_classes,),
        }
        self.register_buffer("features", torch.randn(num_classes, per_class, dim))

    @torch.no_grad()
    def fit(self, head: Head, sent: dict[str, Tensor], generator: torch.Generator) -> Head:
        """Match the features to the mean of what clients sent, and train a fresh head on them.

        Args:
            head: At which the clients took their gradients.
            sent: Sums over clients: `head_weight` `(c, c, d)`, `head_bias` `(c, c)`, `holders` `(c,)`.
            generator: Of the fresh head.
        """
        share = 1 / sent["holders"].clamp(min=1)
        for_weight = (sent["head_weight"] * share[:, None, None]).to(self.features)
        for_bias = (sent["head_bias"] * share[:, None]).to(self.features)
        fitted = match_features(self.features, *head, for_weight, for_bias, sent["holders"] > 0, self.steps, self.lr)
        self.features.copy_(fitted)
        return retrain_head(self.features, generator, self.epochs)


class CReFF(FedAvg):
    """CReFF (Shang et al., IJCAI 2022): the head is re-trained on synthetic features after every round.

    Local training goes on from the averaged head; the re-trained one serves evaluation and the clients' gradients.

    Args:
        per_class: Synthetic features a class.
        steps: Matching steps a round.
        lr: Step size of the matching.
        epochs: Passes of the head's training.
    """

    shared = ("weight", "bias")
    weight: Tensor
    bias: Tensor

    def __init__(self, per_class: int = 100, steps: int = 100, lr: float = 0.1, epochs: int = 300) -> None:
        super().__init__()
        check_least(1, per_class=per_class, steps=steps, epochs=epochs)
        check_above(0, lr=lr)
        self.options: dict[str, Any] = {"per_class": per_class, "steps": steps, "lr": lr, "epochs": epochs}

    def build(self, num_classes: int, dim: int) -> None:
        """Random features, and a head of the usual initialisation."""
        super().build(num_classes, dim)
        self.synthetic = SyntheticFeatures(num_classes, dim, **self.options)
        self.sends = self.synthetic.sends
        head = nn.Linear(dim, num_classes)
        self.register_buffer("weight", head.weight.detach())
        self.register_buffer("bias", head.bias.detach())

    def before(self, network: nn.Module, client: Client, first_epoch: int) -> dict[str, Any]:
        """Head gradients at the re-trained head."""
        z, labels = features(network, client)
        for_weight, for_bias = head_gradients(z, labels, self.weight, self.bias)
        holders = (torch.bincount(labels, minlength=self.num_classes) > 0).to(z.dtype)
        return {"head_weight": for_weight, "head_bias": for_bias, "holders": holders}

    def after(self, network: nn.Module, client: Client, state: dict[str, Any]) -> dict[str, Tensor]:
        """The gradients."""
        return state

    def server(
        self, network: nn.Module, received: Head, sent: dict[str, Tensor], generator: torch.Generator
    ) -> dict[str, float]:
        """Fit the features and re-train the head."""
        weight, bias = self.synthetic.fit((self.weight, self.bias), sent, generator)
        self.weight.copy_(weight)
        self.bias.copy_(bias)
        return {}

    def logits(self, network: nn.Module, images: Tensor) -> Tensor:
        """Logits of the re-trained head."""
        return F.linear(network(images)[0].float(), self.weight, self.bias)


class HyperPrototypes(FedAvg):
    """FedHPro: contrast with, and alignment to, hyper-prototypes that the server fits to the clients' gradients.

    `None` means what `variant` says. Both variants average the clients' models correctly.

    Args:
        variant: `"paper"`, the paper's formulas, or `"code"`, the released ones.
        per_class: I, hyper-prototypes a class.
        steps: M, the server's matching steps a round; 0 freezes the random hyper-prototypes.
        lr: Step size of the matching.
        optimizer: `"sgd"`, or `"adam"` started afresh each round.
        init_std: Standard deviation of the initial hyper-prototypes.
        distance: See `matching.matching_distance`; paper `"cos"`, code `"coord"`.
        tau: Temperature of the contrast.
        contrastive_weight: Of HPCL.
        alignment_weight: Of HPAL.
        contrastive_form: Where HPCL has the margin: in the exponent (`"paper"`) or the denominator (`"code"`).
        contrastive_divide: Divide HPCL by the batch size once more; paper no, code yes.
        margin: `"distance"` (paper), `"inner"` (the released code's, when switched on), or `"none"` (code).
        margin_normalize: Margins between prototypes of length 1.
        alignment_normalize: HPAL between vectors of length 1; paper no, code yes.
        gradient_samples: Images of a class that enter its gradient, drawn anew each round; 0 means all. Paper 0,
            code 100.
        divide_again: Divide class gradients by that number once more; paper no, code yes.
        matching_head: The head of the matching: the `"received"` one that the clients' gradients were taken at
            (paper), or the `"new"` one after averaging (code).
        head_retraining: CReFF's re-training of the head after every round; paper no, code yes.
    """

    shared: tuple[str, ...] = ("hyper_prototypes",)
    hyper_prototypes: Tensor

    def __init__(
        self,
        variant: Literal["paper", "code"] = "paper",
        per_class: int = 5,
        steps: int = 30,
        lr: float = 0.1,
        optimizer: Optimizer = "sgd",
        init_std: float = 1.0,
        distance: Distance | None = None,
        tau: float = 0.05,
        contrastive_weight: float = 1.0,
        alignment_weight: float = 1.0,
        contrastive_form: Literal["paper", "code"] | None = None,
        contrastive_divide: bool | None = None,
        margin: Literal["distance", "inner", "none"] | None = None,
        margin_normalize: bool = False,
        alignment_normalize: bool | None = None,
        gradient_samples: int | None = None,
        divide_again: bool | None = None,
        matching_head: Literal["received", "new"] | None = None,
        head_retraining: bool | None = None,
    ) -> None:
        given = locals()
        super().__init__()
        _check_choices(HyperPrototypes.__init__, given)
        check_least(1, per_class=per_class)
        check_least(0, steps=steps, gradient_samples=gradient_samples, init_std=init_std)
        check_least(0, contrastive_weight=contrastive_weight, alignment_weight=alignment_weight)
        check_above(0, lr=lr, tau=tau)
        code = variant == "code"
        self.per_class, self.steps, self.lr, self.optimizer, self.init_std = per_class, steps, lr, optimizer, init_std
        self.distance: Distance = distance or ("coord" if code else "cos")
        self.tau, self.contrastive_weight, self.alignment_weight = tau, contrastive_weight, alignment_weight
        self.contrastive_form = contrastive_form or variant
        self.contrastive_divide = code if contrastive_divide is None else contrastive_divide
        self.margin = margin or ("none" if code else "distance")
        self.margin_normalize = margin_normalize
        self.alignment_normalize = code if alignment_normalize is None else alignment_normalize
        self.gradient_samples = (100 if code else 0) if gradient_samples is None else gradient_samples
        self.divide_again = code if divide_again is None else divide_again
        self.matching_head = matching_head or ("new" if code else "received")
        self.head_retraining = code if head_retraining is None else head_retraining
        self.with_margin = self.margin != "none" and contrastive_weight != 0
        self.figures = ("margin",) if self.with_margin else ()
        self.sharded = not self.head_retraining

    def build(self, num_classes: int, dim: int) -> None:
        """Random hyper-prototypes `(c, i, d)`, once; later rounds go on from them."""
        super().build(num_classes, dim)
        start = self.init_std * torch.randn(num_classes, self.per_class, dim)
        self.register_buffer("hyper_prototypes", start)
        if self.steps:
            self.sends |= {"gradients": (num_classes, dim), "holders": (num_classes,)}
        if self.head_retraining:
            self.synthetic = SyntheticFeatures(num_classes, dim, per_class=50, steps=100, lr=0.1, epochs=100)
            self.sends |= self.synthetic.sends

    def before(self, network: nn.Module, client: Client, first_epoch: int) -> dict[str, Any]:
        """Class gradients and the margin, from the received model."""
        state: dict[str, Any] = {"margin": 0.0}
        if self.with_margin:
            z, labels = features(network, client)
            kind: Literal["distance", "inner"] = "distance" if self.margin == "distance" else "inner"
            state["margin"] = client_margin(z, labels, self.num_classes, kind, self.margin_normalize)
            state["figures"] = {"margin": float(state["margin"])}
        if self.steps or self.head_retraining:
            if self.gradient_samples or not self.with_margin:
                z, labels = features(network, client, self._sample(client, first_epoch))
            head = head_of(network)
            gradients, counts = class_gradients(z, labels, *head, self.divide_again)
            state["sent"] = {"holders": (counts > 0).to(z.dtype)}
            if self.steps:
                state["sent"]["gradients"] = gradients
            if self.head_retraining:
                for_weight, for_bias = head_gradients(z, labels, *head)
                state["sent"] |= {"head_weight": for_weight, "head_bias": for_bias}
        return state

    def _sample(self, client: Client, first_epoch: int) -> Tensor | None:
        """Rows of at most `gradient_samples` images a class, the first of the round's order."""
        if not self.gradient_samples:
            return None
        order = client.order(first_epoch)
        one_hot = F.one_hot(client.labels[order], self.num_classes)
        rank = (one_hot.cumsum(0) * one_hot).sum(1)  # 1, 2, ... within the class
        return order[rank <= self.gradient_samples]

    def penalty(
        self, state: dict[str, Any], network: nn.Module, images: Tensor, z: Tensor, labels: Tensor
    ) -> Tensor | float:
        """`contrastive_weight * HPCL + alignment_weight * HPAL` (both 1 in the sources)."""
        anchors = self.hyper_prototypes
        form, divide = self.contrastive_form, self.contrastive_divide
        contrast = hpcl_loss(z, labels, anchors, state["margin"], self.tau, form, divide_again=divide)
        alignment = hpal_loss(z, labels, anchors, self.alignment_normalize)
        return self.contrastive_weight * contrast + self.alignment_weight * alignment

    def after(self, network: nn.Module, client: Client, state: dict[str, Any]) -> dict[str, Tensor]:
        """Class gradients `(c, d)` and which classes the client holds `(c,)`; nothing with frozen prototypes."""
        return state.get("sent", {})

    @torch.no_grad()
    def server(
        self, network: nn.Module, received: Head, sent: dict[str, Tensor], generator: torch.Generator
    ) -> dict[str, float]:
        """Re-train the head if asked to, then match the hyper-prototypes to the mean class gradients."""
        if self.head_retraining:
            weight, bias = self.synthetic.fit(received, sent, generator)
            classifier: Any = network.classifier
            classifier.weight.copy_(weight)
            classifier.bias.copy_(bias)
        if not self.steps:
            return {}
        head = head_of(network) if self.matching_head == "new" else received
        old = self.hyper_prototypes
        targets = (sent["gradients"] / sent["holders"].clamp(min=1)[:, None]).to(old)
        new, trace = match_hyper_prototypes(
            old, *head, targets, sent["holders"] > 0, self.steps, self.lr, self.distance, self.optimizer
        )
        move = float((new - old).norm() / old.norm())
        old.copy_(new)
        return {
            "matching_loss_before": float(trace[0]),
            "matching_loss_after": float(trace[-1]),
            "hyper_prototype_move": move,
        }


# ------------------------------------------------------------------------------ controls that FedHPro must beat


class FrozenHyperPrototypes(HyperPrototypes):
    """Control: the random hyper-prototypes stay as they were drawn; clients send no gradients."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "steps": 0})


class ContrastiveOnly(HyperPrototypes):
    """Control: HPCL without HPAL."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "alignment_weight": 0.0})


class AlignmentOnly(HyperPrototypes):
    """Control: HPAL without HPCL."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "contrastive_weight": 0.0})


class NoMargin(HyperPrototypes):
    """Control: HPCL with margin 0."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "margin": "none"})


class HeadRetraining(HyperPrototypes):
    """Control: FedHPro with the released code's re-training of the head, whatever the variant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "head_retraining": True})


class ZeroPrototype(HyperPrototypes):
    """Control: HPAL towards the zero vector and nothing else, a penalty on the size of the features."""

    def __init__(self, **options: Any) -> None:
        fixed = {"steps": 0, "per_class": 1, "init_std": 0.0, "contrastive_weight": 0.0, "margin": "none"}
        super().__init__(**{**options, **fixed})


class AveragedPrototypes(HyperPrototypes):
    """Control: FedHPro's losses with the clients' averaged class means in the place of hyper-prototypes.

    Samples of a class that has no mean yet (all of them in the first round) add nothing.
    """

    shared = ("hyper_prototypes", "known")
    known: Tensor
    together = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "steps": 0, "per_class": 1, "init_std": 0.0})

    def build(self, num_classes: int, dim: int) -> None:
        """No class has a prototype yet."""
        super().build(num_classes, dim)
        self.sends |= {"means": (num_classes, dim), "holders": (num_classes,)}
        self.register_buffer("known", torch.zeros(num_classes, dtype=torch.bool))

    def penalty(
        self, state: dict[str, Any], network: nn.Module, images: Tensor, z: Tensor, labels: Tensor
    ) -> Tensor | float:
        """FedHPro's losses on the samples whose class has a prototype."""
        own = self.known[labels]
        if not own.any():
            return 0.0
        return super().penalty(state, network, images, z[own], labels[own]) * own.float().mean()

    def after(self, network: nn.Module, client: Client, state: dict[str, Any]) -> dict[str, Tensor]:
        """Class means after training, beside what the head's re-training needs."""
        means, counts = class_means(*features(network, client), self.num_classes)
        return {**state.get("sent", {}), "means": means, "holders": (counts > 0).to(means.dtype)}

    @torch.no_grad()
    def server(
        self, network: nn.Module, received: Head, sent: dict[str, Tensor], generator: torch.Generator
    ) -> dict[str, float]:
        """Average over the holders; a class without any keeps its prototype."""
        figures = super().server(network, received, sent, generator)
        seen = sent["holders"] > 0
        means = (sent["means"] / sent["holders"].clamp(min=1)[:, None]).to(self.hyper_prototypes)
        self.hyper_prototypes[seen] = means[seen][:, None]
        self.known |= seen
        return figures


def strategy_class(name: str) -> type[FedAvg]:
    """The class of a strategy.

    Args:
        name: A class of this file, or the dotted path of your own subclass of `FedAvg`.

    Raises:
        ValueError: Unknown name, or not a subclass of `FedAvg`.
    """
    known = {n: c for n, c in globals().items() if isinstance(c, type) and issubclass(c, FedAvg)}
    if name not in known and "." not in name:
        raise ValueError(f"strategy is one of {', '.join(known)} or a dotted class path, not {name!r}")
    chosen = known.get(name) or import_class(name)
    if not (isinstance(chosen, type) and issubclass(chosen, FedAvg)):
        raise ValueError(f"strategy {name} is no subclass of lightning_modules.fedhpro.strategies.FedAvg")
    return chosen


def build_strategy(name: str, options: dict[str, Any] | None = None, variant: str = "paper") -> FedAvg:
    """A strategy by name; see `strategy_class`.

    Args:
        name: Of the class.
        options: Its arguments.
        variant: Passed to FedHPro and its controls, unless `options` have one or an `__init__` of your own lacks it.

    Raises:
        ValueError: Unknown name or argument, or a value out of range.
    """
    chosen, options = strategy_class(name), dict(options or {})
    parameters = inspect.signature(chosen).parameters.values()
    if issubclass(chosen, HyperPrototypes) and any(p.name == "variant" or p.kind is p.VAR_KEYWORD for p in parameters):
        options = {"variant": variant, **options}
    try:
        return chosen(**options)
    except TypeError as error:
        raise ValueError(f"strategy {name}: {error}; strategy_args null takes them all away") from None
    except ValueError as error:
        raise ValueError(f"strategy {name}: {error}") from None
