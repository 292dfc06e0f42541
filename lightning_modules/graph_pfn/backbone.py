"""The tabular in-context transformer below GraphPFN: LimiX-16M, tensor for tensor.

Axes: `n` rows (nodes; the first `n_context` are labelled), `f` feature columns, `g` groups of columns, `p` columns in a
group, `t` tokens of a row (g feature tokens, then one target token), `h` heads, `e` width of a head, `d` token width.
Attribute names are those of the published checkpoint, so a state dict fits without a table of names.

Source: LimiX model code (https://github.com/limix-ldm-ai/LimiX) as vendored in the `graphpfn` 0.1.1 package.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Projections(nn.Module):
    """The maps of an attention without biases.

    Args:
        width: token width `d`.
        heads: number of heads; must divide `width`.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} cannot be split over {heads} heads: choose a divisor")
        self.qkv_proj_weight = nn.Parameter(torch.empty(3, heads, width // heads, width))
        self.out_proj_weight = nn.Parameter(torch.empty(heads, width // heads, width))
        nn.init.normal_(self.qkv_proj_weight, std=width**-0.5)
        nn.init.normal_(self.out_proj_weight, std=width**-0.5)

    def project(self, x: Tensor, first: int, last: int) -> Tensor:
        """Queries, keys, values `first` to `last - 1` of `x` (..., d): (..., last - first, h, e)."""
        weight = self.qkv_proj_weight[first:last]
        return F.linear(x, weight.flatten(0, 2)).unflatten(-1, weight.shape[:3])

    def merge(self, heads: Tensor) -> Tensor:
        """Sum the heads' outputs (..., h, e) into tokens (..., d)."""
        return heads.flatten(-2) @ self.out_proj_weight.flatten(0, 1)


class FeatureAttention(Projections):
    """Attention among the tokens of one row, without mask."""

    def forward(self, x: Tensor) -> Tensor:
        """Let the tokens of each row look at each other.

        Args:
            x: (n, t, d).

        Returns:
            (n, t, d), without the residual.
        """
        q, k, v = self.project(x, 0, 3).permute(2, 0, 3, 1, 4)  # each n h t e
        return self.merge(F.scaled_dot_product_attention(q, k, v).transpose(1, 2))


class SampleAttention(Projections):
    """Attention among rows at one token position; rows only look at context rows.

    Context rows attend with all heads. Query rows use all heads for their queries, but the keys and values of head 0,
    shared by all heads, as LimiX does; they never see each other.
    """

    def forward(self, x: Tensor, n_context: int) -> Tensor:
        """Let rows look at the context rows.

        Args:
            x: (n, t, d), context rows first.
            n_context: number of context rows, at least 1.

        Returns:
            (n, t, d), without the residual.
        """
        x = x.transpose(0, 1)  # t n d
        q = self.project(x, 0, 1).squeeze(2).transpose(1, 2)  # t h n e
        k, v = self.project(x[:, :n_context], 1, 3).permute(2, 0, 3, 1, 4)  # each t h n_context e
        context = F.scaled_dot_product_attention(q[:, :, :n_context], k, v)
        heads = q.shape[1]
        # All heads share one set of keys, so their queries are laid end to end and no key is copied.
        query = q[:, :, n_context:].flatten(1, 2).unsqueeze(1)  # t 1 (h n_query) e
        query = F.scaled_dot_product_attention(query, k[:, :1], v[:, :1])
        query = query.squeeze(1).unflatten(1, (heads, -1))  # t h n_query e
        return self.merge(torch.cat([context, query], dim=2).permute(2, 0, 1, 3))


class MLP(nn.Module):
    """Two linear maps without biases around a GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., d) to (..., d)."""
        return self.mlp(x)


class Block(nn.Module):
    """One LimiX block: feature attention, MLP, feature attention, MLP, sample attention, MLP.

    Every sub-layer is `x + f(LayerNorm(x))` with a LayerNorm that has no parameters.

    Args:
        width: token width `d`.
        heads: attention heads.
        hidden: width inside the MLPs.
        chunk: at most this many tokens are in one intermediate tensor, so the memory of a block beyond its input and
            output is about `4 * hidden * chunk * 4` bytes.
    """

    def __init__(self, width: int, heads: int, hidden: int, chunk: int) -> None:
        super().__init__()
        self.feature_attentions = nn.ModuleList(FeatureAttention(width, heads) for _ in range(2))
        self.sequence_attentions = nn.ModuleList([SampleAttention(width, heads)])
        self.mlp = nn.ModuleList(MLP(width, hidden) for _ in range(3))
        self.width = width
        self.chunk = chunk

    def norm(self, x: Tensor) -> Tensor:
        """LayerNorm without parameters."""
        return F.layer_norm(x, (self.width,))

    def mix_features(self, x: Tensor) -> Tensor:
        """Run the first four sub-layers, which treat each row alone: (n, t, d) to (n, t, d)."""
        for attention, mlp in zip(self.feature_attentions, self.mlp, strict=False):
            x = x + attention(self.norm(x))
            x = x + mlp(self.norm(x))
        return x

    def mix_samples(self, x: Tensor, n_context: int) -> Tensor:
        """Run the last two sub-layers, which treat each token position alone: (n, t, d) to (n, t, d)."""
        x = x + self.sequence_attentions[0](self.norm(x), n_context)
        return x + self.mlp[2](self.norm(x))

    def forward(self, x: Tensor, n_context: int) -> Tensor:
        """Apply the block.

        Args:
            x: (n, t, d), context rows first.
            n_context: number of context rows.

        Returns:
            (n, t, d).
        """
        n, t, _ = x.shape
        x = torch.cat([self.mix_features(rows) for rows in x.split(max(1, self.chunk // t))])
        return torch.cat([self.mix_samples(part, n_context) for part in x.split(max(1, self.chunk // n), 1)], 1)


class CellEncoder(nn.Module):
    """Encode groups of table cells; a missing cell is a learned vector.

    Args:
        width: token width `d`.
        group: columns in a group, `p`.
    """

    def __init__(self, width: int, group: int) -> None:
        super().__init__()
        self.mask_embedding = nn.Parameter(torch.randn(width))
        self.numeric_mlp = nn.Sequential(
            nn.Linear(1, width // 2),
            nn.LayerNorm(width // 2),
            nn.ReLU(),
            nn.Linear(width // 2, width),
            nn.LayerNorm(width),
            nn.ReLU(),
        )
        self.fusion_network = nn.Sequential(
            nn.Linear(group * width, width),
            nn.LayerNorm(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Encode groups.

        Args:
            x: (n, g, p); NaN marks a missing cell.

        Returns:
            (n, g, d).
        """
        missing = x.isnan().unsqueeze(-1)
        cells = self.numeric_mlp(x.unsqueeze(-1).masked_fill(missing, 0.0))  # n g p d
        return self.fusion_network(torch.where(missing, self.mask_embedding, cells).flatten(-2))


class ClassTargetEncoder(nn.Module):
    """One vector per class rank and one for "unknown"; together rows of one orthogonal matrix at the start."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.y_embedding = nn.Embedding(classes, width)
        self.y_mask = nn.Embedding(1, width)
        if not self.y_mask.weight.is_meta:
            rows = nn.init.orthogonal_(torch.empty(classes + 1, width))
            with torch.no_grad():
                self.y_embedding.weight.copy_(rows[:-1])
                self.y_mask.weight.copy_(rows[-1:])

    def forward(self, y: Tensor, n: int) -> Tensor:
        """Encode targets.

        Args:
            y: context labels (n_context,), any integers; they count by their rank among the labels present.
            n: number of rows.

        Returns:
            (n, d).
        """
        ranks = torch.unique(y, return_inverse=True)[1]
        if ranks.max() >= self.y_embedding.num_embeddings:
            raise ValueError(
                f"the context has {int(ranks.max()) + 1} classes, the model knows {self.y_embedding.num_embeddings}: "
                "use error-correcting output codes"
            )
        return torch.cat([self.y_embedding(ranks), self.y_mask.weight.expand(n - len(y), -1)])


class RegressionTargetEncoder(nn.Module):
    """A linear map of (value, indicator); unknown targets are the context mean with indicator -2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, width)

    def forward(self, y: Tensor, n: int) -> Tensor:
        """Encode context values `y` (n_context,), float, for `n` rows: (n, d)."""
        known = torch.stack([y, torch.zeros_like(y)], -1)
        unknown = torch.stack([y.mean(), y.new_tensor(-2.0)]).expand(n - len(y), 2)
        return self.layer(torch.cat([known, unknown]))


def normalise_table(x: Tensor, n_context: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prepare a table for the cell encoder, with statistics of the context rows only.

    Columns are padded with zeros to whole groups; missing and infinite cells become the context mean; columns are
    standardised (unbiased deviation, clipped to ±100); each group is scaled by sqrt(p / number of its columns that are
    not constant over all rows); missing cells become NaN again. A single context row has deviation 1.

    Args:
        x: (n, f) float; NaN marks a missing cell.
        n_context: number of context rows.
        group: columns per group, `p`.

    Returns:
        The table (n, g, p), the context mean (g, p), the context deviation (g, p), the number of columns that count in
        each group (g, 1).
    """
    x = F.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group))  # n g p
    missing = x.isnan()

    def mean_of(values: Tensor) -> Tensor:
        return values.nansum(0) / (~values.isnan()).sum(0).clamp(min=1)

    x = torch.where(missing | x.isinf(), mean_of(x[:n_context]), x)
    mean = mean_of(x[:n_context])
    if n_context == 1:
        std = torch.ones_like(mean)
    else:
        count = (~x[:n_context].isnan()).sum(0)
        std = ((x[:n_context] - mean).square().nansum(0) / (count - 1)).sqrt() + 1e-20
    x = ((x - mean) / std).clamp(-100, 100)
    valid = (~(x == x[:1]).all(0)).sum(-1, keepdim=True).clamp(min=1)
    x = x * (group / valid).sqrt()
    return x.masked_fill(missing, torch.nan), mean, std, valid


def random_identity(groups: int, width: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw (groups, width) with orthogonal rows or columns: an identity for each column group."""
    return nn.init.orthogonal_(torch.empty(groups, width), generator=generator)
