"""A GraphPFN for laptops: the published idea with one token per node and a read-out over context labels.

It differs from the published layout where a small model learns faster for it. A node is one token, the sum of its
columns, its label, what lies around it (`Surroundings`: smoothed columns, degree) and the votes of simple predictors: a
ridge regression on the columns, two more on smoothed columns, random walks that count the labels they meet. So there is
no attention among columns. Queries attend with all heads, and several graphs are padded into one batch. The prediction
is read out by attention from query to context nodes over their labels, plus an MLP, plus the votes as far as each token
trusts them, over the classes present. MLP and trust start at zero, so an untrained model predicts the class frequencies
of the context.

Axes: `b` graphs, `n` nodes, `g` column groups of `p` columns, `h` heads, `e` width of a head, `d` token width, `c`
classes.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.graph_pfn.adapter import AdapterMLP, GraphAttention, Kernel, Neighbours, attend
from lightning_modules.graph_pfn.losses import Answer, Question, Task


@dataclass
class SmallConfig:
    """Sizes of the small layout.

    Attributes:
        width: token width `d`.
        heads: attention heads everywhere.
        blocks: number of blocks.
        classes: most classes in one context.
        group: columns with weights of their own; the ones beyond share them.
        chunk: edge tokens in one intermediate tensor of the sparse kernel.
        kernel: how adapters attend: `auto`, `dense` or `sparse` (`sparse` and `auto` on large graphs hold no (n, n)
            tensor).
    """

    width: int = 64
    heads: int = 4
    blocks: int = 4
    classes: int = 10
    group: int = 16
    chunk: int = 2**17
    kernel: Kernel = "auto"


class Batch(NamedTuple):
    """Padded graphs.

    Attributes:
        x: features (b, n, f), float32, zero where padded.
        y: targets (b, n): labels 0 to classes - 1 (int64) or values (float32), zero where not context.
        context: (b, n) bool, labelled nodes; they come first.
        real: (b, n) bool, False where padded.
        edges: directed edges (2, m) between nodes of the flattened batch, `b * n`; None leaves the adapters out.
        labelled: k, the most labelled nodes of a graph.
        columns: (b,) float32, how many columns of `x` are a graph's own.
    """

    x: Tensor
    y: Tensor
    context: Tensor
    real: Tensor
    edges: Tensor | None
    labelled: int
    columns: Tensor


def pad(questions: list[Question]) -> Batch:
    """Put graphs into one batch; without a single edge in it, its `edges` are None."""
    n = max(len(q.x) for q in questions)
    f = max(q.x.shape[1] for q in questions)
    x = torch.stack([F.pad(q.x, (0, f - q.x.shape[1], 0, n - len(q.x))) for q in questions])
    y = torch.stack([F.pad(q.y, (0, n - len(q.y))) for q in questions])
    position = torch.arange(n, device=x.device)
    context = torch.stack([position < len(q.y) for q in questions])
    real = torch.stack([position < len(q.x) for q in questions])
    edges = [q.edges + i * n for i, q in enumerate(questions) if q.edges is not None and q.edges.shape[1]]
    joined = torch.cat(edges, 1) if edges else None
    columns = x.new_tensor([q.x.shape[1] for q in questions])
    return Batch(x, y, context, real, joined, max(len(q.y) for q in questions), columns)


def neighbour_mean(x: Tensor, edges: Tensor) -> Tensor:
    """Mean of `x` (n, d) over in-neighbours along `edges` (2, m): (n, d), 0 without any."""
    source, target = edges
    degree = torch.bincount(target, minlength=len(x)).clamp(min=1)
    return torch.zeros_like(x).index_add_(0, target, x[source]) / degree.unsqueeze(-1)


@torch.no_grad()
def ridge(x: Tensor, y: Tensor, context: Tensor, strength: float = 30.0) -> Tensor:
    """Ridge regression with an intercept, fitted on the context.

    Args:
        x: columns (b, n, q) of about unit mean square.
        y: targets (b, k, c) of the first k nodes.
        context: (b, k) bool, which of the first k nodes are labelled.
        strength: of the penalty.

    Returns:
        (b, n, c), the context's mean taken off, times 1 + strength / labels, which undoes the shrinkage along a column
        of unit variance. A labelled node is predicted by the regression on the others.
    """
    labelled = context.unsqueeze(-1)
    k, count = context.shape[1], labelled.sum(1, keepdim=True).clamp(min=1)
    x = x - (x[:, :k] * labelled).sum(1, keepdim=True) / count
    y = (y - (y * labelled).sum(1, keepdim=True) / count) * labelled
    seen = x[:, :k] * labelled
    inverse = torch.linalg.inv(seen.mT @ seen + strength * torch.eye(x.shape[2], device=x.device))
    out = x @ (inverse @ (seen.mT @ y))
    leverage = ((seen @ inverse) * seen).sum(-1, keepdim=True) + 1 / count
    left_out = y - (y - out[:, :k]) / (1 - leverage).clamp(min=0.05)
    return torch.cat([torch.where(labelled, left_out, out[:, :k]), out[:, k:]], 1) * (1 + strength / count)


class Around(NamedTuple):
    """What lies around the nodes; see `Surroundings.look`.

    Attributes:
        columns: (b, n, 2 q), columns smoothed once and twice.
        votes: (b, n, 4, c), of predictors that look at the graph.
        structure: (b, n, 5).
        groups: (b, 1, 1), column groups of each graph.
    """

    columns: Tensor
    votes: Tensor
    structure: Tensor
    groups: Tensor


class Surroundings(nn.Module):
    """Enters what lies around a node into its token; all maps start at zero. Part of the graph adapter.

    Args:
        config: sizes.
    """

    steps, damping = 20, 0.9

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        self.group = config.group
        self.columns = nn.Linear(2 * config.group, config.width, bias=False)
        self.votes = nn.Linear(5 * config.classes, config.width, bias=False)
        self.value_votes = nn.Linear(5, config.width, bias=False)
        self.structure = nn.Linear(6, config.width, bias=False)
        self.trust = nn.Linear(config.width, 5)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    @torch.no_grad()
    def look(self, x: Tensor, y: Tensor, batch: Batch, task: Task) -> Around:
        """Gather what lies around the nodes of graphs with edges.

        Columns are averaged over neighbours once and twice and divided by their root mean square in the graph, one
        number for all columns, so that those which agree among neighbours stay larger. A random walk stops with
        probability 1 - `damping` after each step. Counted are the labels that walks from the node meet in their first
        step and in their first `steps` ones, and the visits, over the node's degree, of walks of `steps` steps from
        labelled nodes; starts are left out. (The first two count a hub's label more often than the third does.) Votes:
        those of the three counts (log of shares, or mean values); a ridge regression on columns smoothed twice by
        D^-1/2 (A + I) D^-1/2; one on columns, once and twice averaged columns. Structure: log-degree, log of the
        counts relative to the graph's mean, log of the root mean squares.

        Args:
            x: standardised columns (b, n, q), zero where padded.
            y: targets of the first k nodes (b, k, c), zero where not context.
            batch: the graphs.
            task: how their targets are read.
        """
        edges = batch.edges
        assert edges is not None
        b, n, _ = x.shape
        k = y.shape[1]
        count = batch.real.sum(1)[:, None]
        groups = (batch.columns / self.group).ceil()[:, None, None]

        def mean(z: Tensor) -> Tensor:
            return neighbour_mean(z.flatten(0, 1), edges).view_as(z)

        def size(z: Tensor) -> Tensor:  # b 1 1
            return (z.square().sum((1, 2), keepdim=True) / (count[:, None] * groups * self.group)).sqrt()

        degree = torch.bincount(edges[1], minlength=b * n).view(b, n, 1)
        once, smooth, root = mean(x), x, (1 + degree) ** -0.5
        twice = mean(once)
        for _ in range(2):
            smooth = root * (root * smooth + degree * mean(root * smooth))
        columns = torch.cat([z / (size(z) + 1e-6) for z in (once, twice)], -1)
        scales = [size(z).clamp(min=1e-3).log().squeeze(-1).expand(-1, n) for z in (once, twice)]
        context = batch.context[:, :k]
        ridges = [ridge(z, y, context) for z in (smooth / (size(smooth) + 1e-6), torch.cat([x, columns], -1))]

        known = batch.context.unsqueeze(-1).to(x)
        start = torch.cat([F.pad(y, (0, 0, 0, n - k)), known], -1)  # the last column counts labels whatever they are
        first = walk = total = self.damping * mean(torch.cat([start, start / degree.clamp(min=1)], -1))
        for _ in range(self.steps - 1):
            walk = self.damping * mean(walk)
            total = total + walk
        walks, masses = [], []
        for met in (first[..., : start.shape[-1]], *total.chunk(2, -1)):
            mass = met[..., -1:]
            share = met[..., :-1] / mass.clamp(min=1e-9)
            walks.append((share + 0.01).log() if task == "classification" else share)
            mass = mass.squeeze(-1)
            masses.append((mass / (mass.sum(1, keepdim=True) / count + 1e-9) + 0.01).log())
        structure = torch.stack([(degree.squeeze(-1) + 1.0).log() - 1.5, *masses, *scales], -1)
        scale = 5.0 if task == "classification" else 1.0
        return Around(columns, torch.stack([*walks, *(scale * r for r in ridges)], 2), structure, groups)

    def forward(self, around: Around, task: Task) -> Tensor:
        """What is added to the tokens, (b, n, d)."""
        votes = self.votes if task == "classification" else self.value_votes
        columns = around.columns.unflatten(-1, (2, -1, self.group))  # b n 2 g p
        columns = columns.sum(3).flatten(2) / around.groups.sqrt()
        return self.columns(columns) + votes(around.votes.flatten(2)) + self.structure(around.structure)


class BatchedGraphAttention(GraphAttention):
    """`GraphAttention` on padded graphs: a mask per graph, or edges of their disjoint union."""

    def forward(self, x: Tensor, graph: Tensor | Neighbours) -> Tensor:
        """Aggregate over neighbours.

        Args:
            x: (b, n, d).
            graph: (b, n, n) bool, `[target, source]`, with a loop at every node without neighbours and nowhere
                else; or the edges of the flattened batch.

        Returns:
            (b, n, d).
        """
        q, k, v = self.attn_qkv_linear(x).unflatten(-1, (self.heads, -1)).chunk(3, -1)  # each b n h e
        if isinstance(graph, Neighbours):
            q, k, v = (z.flatten(0, 1).unsqueeze(1) for z in (q, k, v))  # (b n) 1 h e
            flat = attend(q, k, v, graph, "sparse", self.chunk)
            return self.output_linear(flat.view_as(x))
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))  # b h n e
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=graph.unsqueeze(1)).transpose(1, 2).flatten(2)
        alone = graph.diagonal(dim1=1, dim2=2).unsqueeze(-1)  # b n 1
        return self.output_linear(out.masked_fill(alone, 0.0))


class Attention(nn.Module):
    """Multi-head attention with biases; queries and keys may differ."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None = None) -> Tensor:
        """Let `x` (b, n, d) attend to `source` (b, m, d) where `mask` (b, 1, 1, m) is True: (b, n, d)."""
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.key_value(source).unflatten(-1, (2 * self.heads, -1)).transpose(1, 2).chunk(2, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(out.transpose(1, 2).flatten(2))


class SmallBlock(nn.Module):
    """Sample attention, MLP, graph attention, MLP; each `x + f(LayerNorm(x))`. The last two are the graph adapter."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        width = config.width
        self.sample_attention = Attention(width, config.heads)
        self.graph_attention = BatchedGraphAttention(width, config.heads, config.chunk, config.kernel)
        self.mlps = nn.ModuleList(AdapterMLP(width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor, graph: Tensor | Neighbours | None) -> Tensor:
        """Apply the block.

        Args:
            x: (b, n, d).
            context: (b, k) bool, which of the first k nodes are labelled.
            graph: see `BatchedGraphAttention`; None leaves the adapter out.

        Returns:
            (b, n, d).
        """
        rows = self.norms[0](x)
        x = x + self.sample_attention(rows, rows[:, : context.shape[1]], context[:, None, None])
        x = x + self.mlps[0](self.norms[1](x))
        if graph is not None:
            x = x + self.graph_attention(self.norms[2](x), graph)
            x = x + self.mlps[1](self.norms[3](x))
        return x


class SmallNetwork(nn.Module):
    """The small layout.

    Args:
        config: sizes.
    """

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.columns = nn.Linear(config.group, width)
        self.surroundings = Surroundings(config)
        self.label = nn.Embedding(config.classes + 1, width)  # the last one is "unknown"
        self.value = nn.Linear(1, width)
        self.votes = nn.Linear(config.classes, width, bias=False)
        self.value_votes = nn.Linear(1, width, bias=False)
        self.blocks = nn.ModuleList(SmallBlock(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(width)
        self.read_query = nn.Linear(width, width)
        self.read_key = nn.Linear(width, width)
        self.trust = nn.Linear(width, 1)
        classes, value = nn.Linear(width, config.classes), nn.Linear(width, 1)
        for layer in (self.read_query, self.trust, classes, value):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.correct_class = nn.Sequential(nn.Linear(width, width), nn.GELU(), classes)
        self.correct_value = nn.Sequential(nn.Linear(width, width), nn.GELU(), value)

    def tokens(self, batch: Batch, y: Tensor, task: Task) -> tuple[Tensor, Tensor, Around | None]:
        """First tokens.

        Args:
            batch: the graphs.
            y: targets of the first k nodes (b, k, c), zero where not context.
            task: how they are read.

        Returns:
            Tokens (b, n, d), votes of the ridge regression on the columns (b, n, c), and what lies around the nodes
            where there are edges.
        """
        group = self.config.group
        real = batch.real.unsqueeze(-1)
        count = batch.real.sum(1)[:, None, None]
        x = batch.x * real
        missing = x.isnan()
        mean = x.nansum(1, keepdim=True) / (count - missing.sum(1, keepdim=True)).clamp(min=1)
        x = torch.where(missing, mean, x)
        mean = x.sum(1, keepdim=True) / count
        deviation = (((x - mean) * real).square().sum(1, keepdim=True) / count).sqrt()
        x = ((x - mean) / (deviation + 1e-6)).clamp(-10, 10) * real
        used = (deviation > 1e-6).sum(-1, keepdim=True).clamp(min=1)
        x = F.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))  # b n g p
        groups = (batch.columns / group).ceil()[:, None, None]  # its own: wider graphs of the batch change nothing
        x = x * (groups * group / used).sqrt().unsqueeze(-1)  # the same size whatever the number of columns
        token = self.columns(x.sum(2) / groups.sqrt())
        x = x.flatten(2)
        votes = ridge(x, y, batch.context[:, : y.shape[1]])
        if task == "classification":
            votes = 5 * votes
            token = token + self.label(torch.where(batch.context, batch.y, self.config.classes)) + self.votes(votes)
        else:
            known = batch.context.unsqueeze(-1)
            value = self.value((batch.y * batch.context).unsqueeze(-1))
            token = token + torch.where(known, value, self.label.weight[-1]) + self.value_votes(votes)
        if batch.edges is None:
            return token, votes, None
        around = self.surroundings.look(x, y, batch, task)
        return token + self.surroundings(around, task), votes, around

    def graph(self, batch: Batch) -> Tensor | Neighbours | None:
        """The form in which adapters read the edges."""
        if batch.edges is None:
            return None
        b, n = batch.real.shape
        kernel = self.config.kernel
        small = n <= 4096 and 64 * batch.edges.shape[1] > b * n * n
        if kernel == "sparse" or (kernel == "auto" and not small):
            return Neighbours.of(batch.edges, b * n)
        adjacency = torch.zeros(b, n, n, dtype=torch.bool, device=batch.x.device)
        source, target = batch.edges
        adjacency[target // n, target % n, source % n] = True
        adjacency.diagonal(dim1=1, dim2=2).copy_(~adjacency.any(2))
        return adjacency

    def answer(self, batch: Batch, task: Task) -> tuple[Tensor, Tensor]:
        """Predict all nodes of padded graphs.

        Returns:
            Logits (b, n, c) or values (b, n), and final tokens (b, n, d) after the last LayerNorm.
        """
        k = batch.labelled
        context, heads = batch.context[:, :k], self.config.heads
        if task == "classification":
            y = F.one_hot(batch.y[:, :k] * context, self.config.classes).to(batch.x)
        else:
            y = batch.y[:, :k].unsqueeze(-1)
        y = y * context.unsqueeze(-1)
        x, votes, around = self.tokens(batch, y, task)
        graph = self.graph(batch)
        for block in self.blocks:
            x = block(x, context, graph)
        x = self.norm(x)

        query = self.read_query(x).unflatten(-1, (heads, -1)).transpose(1, 2)  # b h n e
        key = self.read_key(x[:, :k]).unflatten(-1, (heads, -1)).transpose(1, 2)
        labels = y.unsqueeze(1).expand(-1, heads, -1, -1)
        share = F.scaled_dot_product_attention(query, key, labels, attn_mask=context[:, None, None]).mean(1)  # b n c
        trusted = self.trust(x) * votes
        if around is not None:
            trusted = trusted + (self.surroundings.trust(x).unsqueeze(-1) * around.votes).sum(2)
        if task == "regression":
            return (share + self.correct_value(x) + trusted).squeeze(-1), x
        logits = (share + 1e-4).log() + self.correct_class(x) + trusted
        return logits.masked_fill(~y.bool().any(1, keepdim=True), -torch.inf), x

    def forward(
        self, questions: list[Question], task: Task = "classification", reconstruct: bool = False
    ) -> list[Answer]:
        """Predict the query nodes of all graphs together.

        Args:
            questions: the graphs; missing cells count as the column's mean.
            task: how their targets are read.
            reconstruct: not available in this layout.

        Returns:
            Logits are -inf for classes absent from the context.
        """
        if reconstruct:
            raise ValueError("the small layout has no feature decoder: set feature_weight to 0")
        batch = pad(questions)
        prediction, final = self.answer(batch, task)
        return [Answer(prediction[i, len(q.y) : len(q.x)], final[i, : len(q.x)]) for i, q in enumerate(questions)]

    def peak_bytes(self, n: int, f: int, m: int, training: bool = False) -> int:
        """Estimate of the memory that one graph needs beyond the weights.

        Args:
            n: nodes.
            f: columns, random ones included.
            m: directed edges.
            training: keep what the backward pass needs.
        """
        c = self.config
        dense = n * n if n <= 4096 and c.kernel != "sparse" else 0
        around = 4 * max(-(-f // c.group) * c.group, 2 * (c.classes + 1)) * (m + 12 * n)
        if training:
            return around + c.blocks * (4 * (30 * n * c.width + (0 if dense else 3 * m * c.width)) + 4 * dense)
        return around + 4 * (16 * n * c.width + 6 * c.chunk * c.width) + 4 * dense + 24 * m
