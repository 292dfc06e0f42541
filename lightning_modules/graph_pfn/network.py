"""GraphPFN in the published layout: the LimiX backbone with a graph adapter after every block.

Axes as in `backbone.py`. Source: GraphPFN (arXiv 2509.21489), `graphpfn` 0.1.1 package.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.graph_pfn.adapter import AdapterMLP, GraphAttention, Kernel, Neighbours, PreNorm
from lightning_modules.graph_pfn.backbone import (
    Block,
    CellEncoder,
    ClassTargetEncoder,
    RegressionTargetEncoder,
    normalise_table,
    random_identity,
)
from lightning_modules.graph_pfn.losses import Answer, Question, Task


@dataclass
class PublishedConfig:
    """Sizes of the published layout; the defaults are LimiX-16M with its adapters (20,090,701 parameters).

    Attributes:
        width: token width `d`.
        heads: attention heads of the backbone.
        hidden: width inside the backbone's MLPs and heads.
        blocks: number of blocks.
        classes: outputs of the class head.
        group: columns per feature token.
        adapter_heads: attention heads of the adapters.
        chunk: tokens in one intermediate tensor, at least the nodes: memory beyond the token tensor (n * t * width * 4
            bytes, about five of them at the peak) stays near 32 * hidden * chunk bytes.
        kernel: how adapters attend: `auto`, `dense` or `sparse`.
    """

    width: int = 192
    heads: int = 6
    hidden: int = 768
    blocks: int = 12
    classes: int = 10
    group: int = 2
    adapter_heads: int = 4
    chunk: int = 2**14
    kernel: Kernel = "auto"


class AdaptedBlock(nn.Module):
    """A backbone block followed by its graph adapter."""

    def __init__(self, config: PublishedConfig) -> None:
        super().__init__()
        self.base = Block(config.width, config.heads, config.hidden, config.chunk)
        attention = GraphAttention(config.width, config.adapter_heads, config.chunk, config.kernel)
        self.conv = PreNorm(config.width, attention)
        self.mlp = PreNorm(config.width, AdapterMLP(config.width))
        self.chunk = config.chunk

    def adapt(self, x: Tensor, graph: Neighbours) -> Tensor:
        """Apply the adapter, a few token positions at a time: (n, t, d) to (n, t, d)."""
        out = []
        for part in x.split(max(1, self.chunk // len(x)), 1):
            part = part + self.conv(part, graph)
            out.append(part + self.mlp(part))
        return torch.cat(out, 1)

    def forward(self, x: Tensor, n_context: int, graph: Neighbours | None) -> Tensor:
        """Apply block and adapter; without a graph the adapter is left out.

        Args:
            x: (n, t, d), context rows first.
            n_context: number of context rows.
            graph: edges in the same row order, or None.

        Returns:
            (n, t, d).
        """
        x = self.base(x, n_context)
        return x if graph is None else self.adapt(x, graph)


class Encoder(nn.Module):
    """The blocks, under the published name `layers`."""

    def __init__(self, config: PublishedConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AdaptedBlock(config) for _ in range(config.blocks))


class Encoded(NamedTuple):
    """What the network knows after its last block.

    Attributes:
        tokens: (n, t, d) after the final LayerNorm; the last token of a row is its target token.
        mean: (g, p) context mean of the columns.
        std: (g, p) context deviation of the columns.
    """

    tokens: Tensor
    mean: Tensor
    std: Tensor


class PublishedNetwork(nn.Module):
    """The backbone with adapters.

    One call handles one graph. Rows are nodes, the labelled context nodes first.

    Args:
        config: sizes.
    """

    def __init__(self, config: PublishedConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden
        self.config = config
        self.encoder_x = nn.Sequential(CellEncoder(width, config.group))
        self.cls_y_encoder = nn.ModuleDict({"2": ClassTargetEncoder(width, config.classes)})
        self.reg_y_encoder = nn.ModuleDict({"1": RegressionTargetEncoder(width)})
        self.transformer_encoder = Encoder(config)
        self.cls_y_decoder = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, config.classes))
        self.reg_y_decoder = nn.Sequential(
            nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, 1)
        )
        self.feature_decoder = nn.Sequential(
            nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, config.group)
        )
        self.feature_positional_embedding = nn.Linear(width // 4, width)

    def encode(
        self,
        x: Tensor,
        y: Tensor,
        graph: Neighbours | None,
        task: Task = "classification",
        identity: Tensor | None = None,
    ) -> Encoded:
        """Run everything but the heads.

        Args:
            x: features (n, f), float32, NaN where missing; the first `len(y)` rows are the context.
            y: context targets (n_context,): class labels (int64) or values (float32).
            graph: edges between rows, or None for the table-only backbone.
            task: how `y` is read.
            identity: (g, d // 4) column identities; drawn afresh when None.

        Returns:
            Tokens and the statistics that undo the normalisation.
        """
        n, n_context = len(x), len(y)
        if not 0 < n_context < n:
            raise ValueError(f"{n_context} of {n} nodes are labelled: at least one must be, and one must not be")
        table, mean, std, _ = normalise_table(x, n_context, self.config.group)
        rows = max(1, self.config.chunk // table[0].numel())
        cells = torch.cat([self.encoder_x(part) for part in table.split(rows)])  # n g d
        if identity is None:
            identity = random_identity(table.shape[1], self.config.width // 4).to(cells)
        cells = cells + self.feature_positional_embedding(identity)
        encoder = self.cls_y_encoder["2"] if task == "classification" else self.reg_y_encoder["1"]
        target = encoder(y, n).half().to(cells.dtype)  # the published model rounds targets to float16
        tokens = torch.cat([cells, target.unsqueeze(1)], 1)  # n t d
        for layer in self.transformer_encoder.layers:
            tokens = layer(tokens, n_context, graph)
        return Encoded(F.layer_norm(tokens, (self.config.width,)), mean, std)

    def decode(self, encoded: Encoded, n_context: int, task: Task = "classification") -> Tensor:
        """Logits (n_query, classes), or values (n_query,), of the rows after the context."""
        target = encoded.tokens[n_context:, -1]
        if task == "classification":
            return self.cls_y_decoder(target)
        return self.reg_y_decoder(target).squeeze(-1)

    def decode_features(self, encoded: Encoded) -> Tensor:
        """Reconstructed features in normalised units, (n, g, p)."""
        return self.feature_decoder(encoded.tokens[:, :-1])

    def forward(
        self, questions: list[Question], task: Task = "classification", reconstruct: bool = False
    ) -> list[Answer]:
        """Predict the query nodes of each graph, one graph after the other.

        Args:
            questions: the graphs.
            task: how their targets are read.
            reconstruct: also reconstruct the features.
        """
        answers = []
        for x, y, edges in questions:
            graph = None if edges is None else Neighbours.of(edges, len(x))
            encoded = self.encode(x, y, graph, task)
            features = self.decode_features(encoded) if reconstruct else None
            answers.append(Answer(self.decode(encoded, len(y), task), encoded.tokens[:, -1], features))
        return answers

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
        if training:
            per_block = 12 * c.width + 3 * c.hidden + 8 * c.width
            return 4 * c.blocks * (tokens * per_block + 4 * m * c.width * tokens // n)
        chunk = min(max(c.chunk, n), tokens)
        return 4 * (5 * tokens * c.width + 8 * c.hidden * chunk + 8 * n * c.width) + 24 * m


def context_first(context: Tensor) -> Tensor:
    """Stable order that puts context nodes first: `order[new] = old`.

    Args:
        context: (n,) bool.

    Returns:
        (n,) int64.
    """
    return torch.argsort(~context, stable=True)


def relabel(edge_index: Tensor, order: Tensor) -> Tensor:
    """Edges (2, m) between old node numbers as edges between positions in `order` (n,)."""
    return torch.argsort(order)[edge_index]
