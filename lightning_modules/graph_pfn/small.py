"""A GraphPFN for laptops: the published idea with few, wide tokens and a read-out over context labels.

It differs from the published layout where a small model learns faster for it: one token holds up to 16 columns; the
target token also sees the row and the log-degree directly; queries attend with all heads; several graphs are padded
into one batch; and the prediction is read out by attention from query to context nodes over their labels, plus an MLP
that starts at zero, over the classes present. So an untrained model predicts the class frequencies of the context.

Axes: `b` graphs, `n` nodes, `g` column groups, `t` tokens (g, then the target token), `h` heads, `e` width of a head,
`d` token width, `c` classes.
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
        group: columns in a feature token.
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
    """

    x: Tensor
    y: Tensor
    context: Tensor
    real: Tensor
    edges: Tensor | None


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
    return Batch(x, y, context, real, torch.cat(edges, 1) if edges else None)


class BatchedGraphAttention(GraphAttention):
    """`GraphAttention` on padded graphs: a mask per graph, or edges of their disjoint union."""

    def forward(self, x: Tensor, graph: Tensor | Neighbours) -> Tensor:  # type: ignore[override]
        """Aggregate over neighbours.

        Args:
            x: (b, n, t, d).
            graph: (b, n, n) bool, `[target, source]`, with a loop at every node without neighbours and nowhere
                else; or the edges of the flattened batch.

        Returns:
            (b, n, t, d).
        """
        q, k, v = self.attn_qkv_linear(x).unflatten(-1, (self.heads, -1)).chunk(3, -1)  # each b n t h e
        if isinstance(graph, Neighbours):
            q, k, v = (z.flatten(0, 1) for z in (q, k, v))
            flat = attend(q, k, v, graph, "sparse", self.chunk)
            return self.output_linear(flat.flatten(-2).view_as(x))
        t = x.shape[2]
        q, k, v = (z.permute(0, 2, 3, 1, 4).flatten(1, 2) for z in (q, k, v))  # b (t h) n e
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=graph.unsqueeze(1))
        alone = graph.diagonal(dim1=1, dim2=2)  # b n
        out = out.masked_fill(alone[:, None, :, None], 0.0).unflatten(1, (t, -1))  # b t h n e
        return self.output_linear(out.permute(0, 3, 1, 2, 4).flatten(-2))


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
    """Feature attention, MLP, sample attention, MLP, graph attention, MLP; each `x + f(LayerNorm(x))`.

    The last two are the graph adapter.
    """

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        width = config.width
        self.feature_attention = Attention(width, config.heads)
        self.sample_attention = Attention(width, config.heads)
        self.graph_attention = BatchedGraphAttention(width, config.heads, config.chunk, config.kernel)
        self.mlps = nn.ModuleList(AdapterMLP(width) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(6))

    def forward(self, x: Tensor, context: Tensor, graph: Tensor | Neighbours | None) -> Tensor:
        """Apply the block.

        Args:
            x: (b, n, t, d).
            context: (b, k) bool, which of the first k nodes are labelled.
            graph: see `BatchedGraphAttention`; None leaves the adapter out.

        Returns:
            (b, n, t, d).
        """
        b, n, t, _ = x.shape
        k = context.shape[1]
        rows = self.norms[0](x).flatten(0, 1)
        x = x + self.feature_attention(rows, rows).unflatten(0, (b, n))
        x = x + self.mlps[0](self.norms[1](x))
        columns = self.norms[2](x).transpose(1, 2).flatten(0, 1)  # (b t) n d
        mask = context.repeat_interleave(t, 0)[:, None, None]
        x = x + self.sample_attention(columns, columns[:, :k], mask).unflatten(0, (b, t)).transpose(1, 2)
        x = x + self.mlps[1](self.norms[3](x))
        if graph is not None:
            x = x + self.graph_attention(self.norms[4](x), graph)
            x = x + self.mlps[2](self.norms[5](x))
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
        self.cells = nn.Linear(config.group, width)
        self.row = nn.Linear(config.group, width)
        self.log_degree = nn.Linear(1, width, bias=False)
        self.label = nn.Embedding(config.classes + 1, width)  # the last one is "unknown"
        self.value = nn.Linear(1, width)
        self.blocks = nn.ModuleList(SmallBlock(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(width)
        self.read_query = nn.Linear(width, width)
        self.read_key = nn.Linear(width, width)
        classes, value = nn.Linear(width, config.classes), nn.Linear(width, 1)
        for layer in (self.read_query, classes, value):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.correct_class = nn.Sequential(nn.Linear(width, width), nn.GELU(), classes)
        self.correct_value = nn.Sequential(nn.Linear(width, width), nn.GELU(), value)

    def tokens(self, batch: Batch, task: Task) -> Tensor:
        """First tokens (b, n, t, d)."""
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
        x = x * (x.shape[2] * group / used.unsqueeze(-1)).sqrt()  # the same size whatever the number of columns
        target = self.row(x.mean(2) * x.shape[2] ** 0.5)
        if task == "classification":
            target = target + self.label(torch.where(batch.context, batch.y, self.config.classes))
        else:
            known = batch.context.unsqueeze(-1)
            value = self.value((batch.y * batch.context).unsqueeze(-1))
            target = target + torch.where(known, value, self.label.weight[-1])
        if batch.edges is not None:
            degree = torch.bincount(batch.edges[1], minlength=batch.real.numel()).view_as(batch.real)
            target = target + self.log_degree((degree + 1.0).log().unsqueeze(-1) - 1.5)
        return torch.cat([self.cells(x), target.unsqueeze(2)], 2)

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

    def encode(self, batch: Batch, task: Task = "classification") -> Tensor:
        """Final target tokens (b, n, d) after the last LayerNorm."""
        first = int(batch.context.sum(1).max())
        context = batch.context[:, :first]
        x, graph = self.tokens(batch, task), self.graph(batch)
        for block in self.blocks:
            x = block(x, context, graph)
        return self.norm(x[:, :, -1])

    def decode(self, target: Tensor, batch: Batch, task: Task = "classification") -> Tensor:
        """Predictions from final target tokens; see `forward`."""
        first = int(batch.context.sum(1).max())
        context, heads = batch.context[:, :first], self.config.heads
        q = self.read_query(target).unflatten(-1, (heads, -1)).transpose(1, 2)  # b h n e
        k = self.read_key(target[:, :first]).unflatten(-1, (heads, -1)).transpose(1, 2)
        mask = context[:, None, None]
        if task == "regression":
            v = (batch.y[:, :first] * context)[:, None, :, None].expand(-1, heads, -1, -1)
            mean = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).mean(1).squeeze(-1)
            return mean + self.correct_value(target).squeeze(-1)
        labels = torch.where(context, batch.y[:, :first], 0)
        v = F.one_hot(labels, self.config.classes).to(q) * context.unsqueeze(-1)  # b k c
        share = F.scaled_dot_product_attention(q, k, v.unsqueeze(1).expand(-1, heads, -1, -1), attn_mask=mask)
        logits = (share.mean(1) + 1e-4).log() + self.correct_class(target)
        present = v.any(1, keepdim=True)  # b 1 c
        return logits.masked_fill(~present, -torch.inf)

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
        target = self.encode(batch, task)
        prediction = self.decode(target, batch, task)
        return [Answer(prediction[i, len(q.y) : len(q.x)], target[i, : len(q.x)]) for i, q in enumerate(questions)]

    def peak_bytes(self, n: int, f: int, m: int, training: bool = False) -> int:
        """Estimate of the memory that one graph needs beyond the weights.

        Args:
            n: nodes.
            f: columns, random ones included.
            m: directed edges.
            training: keep what the backward pass needs.
        """
        c = self.config
        tokens = n * (-(-f // c.group) + 1)
        dense = 4 * n * n if n <= 4096 and c.kernel != "sparse" else 0
        if training:
            return 4 * c.blocks * (40 * tokens * c.width + (0 if dense else 3 * m * c.width)) + c.blocks * dense
        return 4 * (16 * tokens * c.width + 6 * c.chunk * c.width) + dense + 24 * m
