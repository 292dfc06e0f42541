"""In-context inference: ensembles, error-correcting output codes, and episodes for fine-tuning.

Axes: `n` nodes, `f` columns, `c` classes, `k` members of an ensemble, `a` letters of a code's alphabet (the classes
that a network can tell apart). Source: GraphPFN (arXiv 2509.21489), `graphpfn` 0.1.1 package.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_modules.graph_pfn.losses import Answer, Question, Task

Ask = Callable[[list[Question], Task], list[Answer]]


@dataclass
class Ensemble:
    """How members of an ensemble differ; the defaults are the paper's.

    Attributes:
        members: number of members; raised where more than `letters` classes need it.
        permute_columns: each member sees the columns in its own order.
        flip_signs: each member sees each column with its own sign.
        random_columns: columns of N(0, 1) appended for each member: they tell nodes of equal structure apart.
        max_columns: most columns that a member sees, chosen at random; none means all.
        letters: classes that the network can tell apart.
    """

    members: int = 10
    permute_columns: bool = True
    flip_signs: bool = False
    random_columns: int = 8
    max_columns: int | None = None
    letters: int = 10


class Member(NamedTuple):
    """One view of a graph.

    Attributes:
        columns: (f',) int64, the columns it sees, in its order.
        signs: (f',) float32.
        codes: (c,) int64, the letter of each class; empty for regression.
    """

    columns: Tensor
    signs: Tensor
    codes: Tensor


def codebook(classes: int, columns: int, letters: int, generator: torch.Generator, tries: int = 51) -> Tensor:
    """Error-correcting output codes: a word of `columns` letters for each class.

    Column j < min(classes, columns) gives class j the letter 0 and splits the other classes at random into
    `letters - 1` groups of nearly equal size; further columns split all classes at random into `letters` groups. Of
    `tries` random books the one with the best (smallest, mean) distance between words is taken.

    Args:
        classes: number of classes, more than `letters`.
        columns: letters of a word, at least `fewest_members(classes, letters)`.
        letters: size of the alphabet.
        generator: source of randomness.
        tries: books drawn.

    Returns:
        (classes, columns) int64.
    """

    def split(members: Tensor, groups: int, first: int, column: Tensor) -> None:
        order = members[torch.randperm(len(members), generator=generator)]
        for letter, part in enumerate(torch.tensor_split(order, groups), start=first):
            column[part] = letter

    best, best_score = torch.empty(0), (-1.0, -1.0)
    everyone = torch.arange(classes)
    for _ in range(tries):
        book = torch.zeros(columns, classes, dtype=torch.long)
        for j, column in enumerate(book):
            if j < classes:
                split(everyone[everyone != j], letters - 1, 1, column)
            else:
                split(everyone, letters, 0, column)
        distance = (book[:, :, None] != book[:, None]).sum(0).float()[~torch.eye(classes, dtype=torch.bool)]
        score = (float(distance.min()), float(distance.mean()))
        if score > best_score:
            best, best_score = book.T.contiguous(), score
    return best


def fewest_members(classes: int, letters: int) -> int:
    """Members that codes need: 1 up to `letters` classes, else max(log_letters classes, classes / (letters - 1))."""
    if classes <= letters:
        return 1
    return max(math.ceil(math.log(classes) / math.log(letters) - 1e-9), math.ceil(classes / (letters - 1)))


def draw_members(f: int, classes: int, settings: Ensemble, generator: torch.Generator) -> list[Member]:
    """Draw the members of an ensemble.

    Args:
        f: number of columns.
        classes: number of classes; 0 for regression.
        settings: how they differ.
        generator: source of randomness, on the CPU.
    """
    count = max(settings.members, fewest_members(classes, settings.letters) if classes else 1)
    if classes > settings.letters:
        codes = codebook(classes, count, settings.letters, generator).T
    elif classes > 2:
        codes = torch.stack([torch.randperm(classes, generator=generator) for _ in range(count)])
    else:
        codes = torch.arange(classes).expand(count, -1)
    members = []
    for code in codes:
        kept = min(f, settings.max_columns or f)
        shuffled = torch.randperm(f, generator=generator)[:kept]
        columns = shuffled if settings.permute_columns else shuffled.sort()[0]
        signs = torch.randint(2, (kept,), generator=generator) * 2.0 - 1
        members.append(Member(columns, signs if settings.flip_signs else torch.ones(kept), code))
    return members


def combine(log_probabilities: list[Tensor], members: list[Member], letters: int) -> Tensor:
    """Class probabilities of an ensemble.

    Up to `letters` classes the members' probabilities are averaged; with codes the score of a class is the sum of
    the log-probabilities of its letters, and the scores go through a softmax.

    Args:
        log_probabilities: of each letter, (q, a) per member.
        members: in the same order.
        letters: size of the alphabet.

    Returns:
        (q, c).
    """
    by_class = torch.stack([p[:, m.codes] for p, m in zip(log_probabilities, members, strict=True)])  # k q c
    if by_class.shape[2] > letters:
        return by_class.clamp(min=-1e4).sum(0).softmax(-1)
    return by_class.exp().mean(0)


class View(NamedTuple):
    """A member's question about a graph.

    Attributes:
        question: what the network is asked.
        letters: (a',) int64, the letter that each of its labels stands for.
    """

    question: Question
    letters: Tensor


def view(
    x: Tensor, y: Tensor, edges: Tensor | None, member: Member, random_columns: int, generator: torch.Generator
) -> View:
    """Show a graph to a member.

    Args:
        x: (n, f), context nodes first.
        y: targets of the context (n_context,): classes (int64) or values (float32).
        edges: (2, m), or None.
        member: how it sees them.
        random_columns: columns of N(0, 1) to append.
        generator: source of randomness, on the CPU.
    """
    noise = torch.randn(len(x), random_columns, generator=generator).to(x)
    x = torch.cat([x[:, member.columns.to(x.device)] * member.signs.to(x), noise], 1)
    if y.is_floating_point():
        return View(Question(x, y, edges), torch.empty(0, dtype=torch.long))
    letters, ranks = torch.unique(member.codes.to(y.device)[y], return_inverse=True)
    return View(Question(x, ranks, edges), letters)


def letter_log_probabilities(logits: Tensor, letters: Tensor, alphabet: int) -> Tensor:
    """Log-probabilities (q, alphabet) from a network's logits for the labels present; absent letters get -inf."""
    out = logits.new_full((len(logits), alphabet), -torch.inf)
    out[:, letters] = logits[:, : len(letters)].log_softmax(-1)
    return out


@torch.no_grad()
def predict(
    ask: Ask,
    x: Tensor,
    y: Tensor,
    edges: Tensor | None,
    context: Tensor,
    classes: int,
    settings: Ensemble,
    seed: int = 0,
) -> Tensor:
    """Predict all nodes outside the context.

    Args:
        ask: the network.
        x: features (n, f), float32, finite.
        y: targets of all nodes (n,), read at the context only: classes 0 to c - 1 (int64) or values (float32).
        edges: (2, m), both directions, no loops and duplicates; None for a table.
        context: (n,) bool.
        classes: number of classes; 0 for regression.
        settings: the ensemble.
        seed: of the ensemble.

    Returns:
        Probabilities (q, c) or values (q,) of the nodes outside the context, in ascending order.
    """
    order = torch.argsort(~context, stable=True)
    n_context = int(context.sum())
    x, target = x[order], y[order[:n_context]]
    if edges is not None:
        edges = torch.argsort(order)[edges]
    generator = torch.Generator().manual_seed(seed)
    members = draw_members(x.shape[1], classes, settings, generator)
    if classes == 0:
        mean, std = target.mean(), target.std(correction=0).clamp(min=1e-6)
        target = (target - mean) / std
    task: Task = "classification" if classes else "regression"
    outputs = []
    for member in members:
        shown = view(x, target, edges, member, settings.random_columns, generator)
        query = ask([shown.question], task)[0].query.float()
        if classes:
            alphabet = min(classes, settings.letters)
            query = letter_log_probabilities(query, shown.letters, alphabet)
        outputs.append(query)
    if classes == 0:
        return torch.stack(outputs).mean(0) * std + mean
    return combine(outputs, members, settings.letters)


def episode(context: Tensor, y: Tensor, step: int, seed: int, classes: int) -> tuple[Tensor, Tensor]:
    """Split the labelled nodes into a smaller context and nodes to predict, for one step of fine-tuning.

    The latter, a quarter of the labelled nodes and at most 1,024, go through one random permutation after the other.
    A class that would vanish from the context keeps one node there.

    Args:
        context: labelled nodes (n,) bool.
        y: targets of all nodes (n,).
        step: number of the step.
        seed: of the permutations.
        classes: number of classes; 0 for regression.

    Returns:
        Context nodes and nodes to predict, both int64.
    """
    nodes = context.nonzero().squeeze(1)
    if len(nodes) < 2:
        raise ValueError("fine-tuning needs at least 2 labelled training nodes")
    wanted = max(1, min(1024, len(nodes) // 4))
    position = torch.arange(step * wanted, (step + 1) * wanted)
    drawn = torch.zeros(len(nodes), dtype=torch.bool)
    for turn in torch.unique(position // len(nodes)).tolist():
        order = torch.randperm(len(nodes), generator=torch.Generator().manual_seed(seed * 1_000_003 + turn))
        drawn[order[position[position // len(nodes) == turn] % len(nodes)]] = True
    drawn = drawn.to(nodes.device)
    if classes:
        label = y[nodes]
        left = torch.bincount(label[~drawn], minlength=classes)
        for missing in torch.unique(label[left[label] == 0]).tolist():
            drawn[(label == missing).nonzero()[0]] = False
    elif drawn.all():
        drawn[0] = False
    return nodes[~drawn], nodes[drawn]
