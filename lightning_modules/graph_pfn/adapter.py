"""The graph adapter of GraphPFN: attention over neighbours, added after every block of the backbone.

    x <- x + GA(LN(x));  x <- x + MLP(LN(x))
    GA(x)_v = W_o concat_h( sum_{u -> v} softmax_u( <q_v, k_u> / sqrt(e) ) v_u ) + b_o

Each token position is treated alone. No self loops are added: a node without neighbours gets only `b_o`.
Axes: `n` nodes, `t` tokens, `h` heads, `e` width of a head, `d` token width, `m` directed edges.

Source: GraphPFN (arXiv 2509.21489), `graphpfn` 0.1.1 package.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kernel = Literal["auto", "dense", "sparse"]


class Neighbours(NamedTuple):
    """Directed edges sorted by target.

    Attributes:
        source: (m,) int64, node that sends.
        target: (m,) int64, node that receives, ascending.
        start: (n + 1,) int64, edges of node v are `start[v]` to `start[v + 1] - 1`.
    """

    source: Tensor
    target: Tensor
    start: Tensor

    @classmethod
    def of(cls, edge_index: Tensor, n: int) -> "Neighbours":
        """Sort `edge_index` (2, m; row 0 sends, row 1 receives) over `n` nodes."""
        target, order = edge_index[1].sort(stable=True)
        start = torch.searchsorted(target, torch.arange(n + 1, device=target.device))
        return cls(edge_index[0][order], target, start)


def attend_dense(q: Tensor, k: Tensor, v: Tensor, graph: Neighbours) -> Tensor:
    """Attention over in-neighbours through an (n, n) mask; see `attend`."""
    n = len(q)
    adjacency = torch.zeros(n, n, dtype=torch.bool, device=q.device)
    adjacency[graph.target, graph.source] = True
    alone = graph.start[1:] == graph.start[:-1]
    adjacency |= torch.diag(alone)  # softmax over nothing is undefined; the row is zeroed below
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))  # t h n e
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=adjacency).permute(2, 0, 1, 3)
    return out.masked_fill(alone[:, None, None, None], 0.0)


def attend_sparse(q: Tensor, k: Tensor, v: Tensor, graph: Neighbours, chunk: int) -> Tensor:
    """Attention over in-neighbours edge by edge, `chunk` edge tokens at a time; see `attend`."""
    _, t, heads, e = q.shape
    q = q * e**-0.5
    parts = []
    for first, last in _node_ranges(graph.start, max(1, chunk // t)):
        edges = slice(int(graph.start[first]), int(graph.start[last]))
        source, target = graph.source[edges], graph.target[edges] - first
        score = (q[first:last][target] * k[source]).sum(-1)  # m t h
        where = target[:, None, None].expand_as(score)
        top = score.new_full((last - first, t, heads), -torch.inf).scatter_reduce(0, where, score.detach(), "amax")
        weight = (score - top[target]).exp()
        total = weight.new_zeros(last - first, t, heads).index_add(0, target, weight)
        mixed = weight.new_zeros(last - first, t, heads, e).index_add(0, target, weight.unsqueeze(-1) * v[source])
        parts.append(mixed / total.clamp(min=torch.finfo(total.dtype).tiny).unsqueeze(-1))
    return torch.cat(parts)


def _node_ranges(start: Tensor, edges: int) -> list[tuple[int, int]]:
    """Cut nodes into consecutive ranges of at most `edges` edges each; a node with more is a range of its own."""
    offsets = start.tolist()
    n, ranges, first = len(offsets) - 1, [], 0
    for node in range(1, n + 1):
        if node == n or offsets[node + 1] - offsets[first] > edges:
            ranges.append((first, node))
            first = node
    return ranges


def attend(q: Tensor, k: Tensor, v: Tensor, graph: Neighbours, kernel: Kernel = "auto", chunk: int = 2**15) -> Tensor:
    """Scaled-dot-product attention of every node over its in-neighbours.

    Args:
        q: queries (n, t, h, e).
        k: keys, same shape.
        v: values, same shape.
        graph: the edges.
        kernel: `dense` holds an (n, n) mask, `sparse` gathers edges; `auto` takes the dense one on small graphs that
            are dense enough to gain from it. Both give the same values.
        chunk: edge tokens in one intermediate tensor of the sparse kernel, at least the largest degree.

    Returns:
        (n, t, h, e); zero where a node has no neighbour.
    """
    n = len(q)
    if kernel == "auto":
        kernel = "dense" if n <= 2**12 and 32 * len(graph.source) > n * n else "sparse"
    return attend_dense(q, k, v, graph) if kernel == "dense" else attend_sparse(q, k, v, graph, chunk)


class GraphAttention(nn.Module):
    """`GA` of the module's docstring.

    The output of the first linear map is split into (heads, 3 * e) and then, within each head, into query, key, value.
    Its last linear map starts at zero.

    Args:
        width: token width `d`.
        heads: attention heads; must divide `width`.
        chunk: tokens in one intermediate tensor.
        kernel: see `attend`.
    """

    def __init__(self, width: int, heads: int, chunk: int = 2**15, kernel: Kernel = "auto") -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} cannot be split over {heads} adapter heads: choose a divisor")
        self.attn_qkv_linear = nn.Linear(width, 3 * width)
        self.output_linear = nn.Linear(width, width)
        nn.init.zeros_(self.output_linear.weight)
        nn.init.zeros_(self.output_linear.bias)
        self.heads = heads
        self.chunk = chunk
        self.kernel = kernel

    def forward(self, x: Tensor, graph: Neighbours) -> Tensor:
        """Aggregate over neighbours: (n, t, d) to (n, t, d)."""
        q, k, v = self.attn_qkv_linear(x).unflatten(-1, (self.heads, -1)).chunk(3, -1)  # each n t h e
        return self.output_linear(attend(q, k, v, graph, self.kernel, self.chunk).flatten(-2))


class AdapterMLP(nn.Module):
    """Linear, GELU, Linear; the last map starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        last = nn.Linear(2 * width, width)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), last)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., d) to (..., d)."""
        return self.layers(x)


class PreNorm(nn.Module):
    """`base(LayerNorm(x), ...)`, under the published names `norm` and `base`."""

    def __init__(self, width: int, base: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.base = base

    def forward(self, x: Tensor, *rest: object) -> Tensor:
        """Apply `base` to the normalised tokens (..., d)."""
        return self.base(self.norm(x), *rest)


class EdgeHead(nn.Module):
    """Says whether two nodes are joined, from their final target tokens; used in pretraining only.

    Args:
        width: token width `d`.
        hidden: width inside.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, 1))

    def forward(self, tokens: Tensor, pairs: Tensor) -> Tensor:
        """Score node pairs.

        Args:
            tokens: final target tokens (n, d).
            pairs: (2, m) int64.

        Returns:
            (m,) logits.
        """
        return self.layers(tokens[pairs[0]] * tokens[pairs[1]]).squeeze(-1)
