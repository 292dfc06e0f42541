"""GraphPFN against arrays made by the authors' code (see `cases.py`)."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from torch.nn import functional as F

import datamodules.graph_attributes as attributes
import datamodules.graph_prior as prior
import datamodules.graph_structure as structure
from lightning_modules.graph_pfn.adapter import AdapterMLP, GraphAttention, Neighbours, PreNorm
from lightning_modules.graph_pfn.backbone import Block, CellEncoder, normalise_table
from lightning_modules.graph_pfn.checkpoints import to_published_names
from lightning_modules.graph_pfn.network import PublishedConfig, PublishedNetwork, context_first, relabel
from tests.parity.cases import check, files


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict]:
    arrays = np.load(path, allow_pickle=False)
    tensors = {key: torch.from_numpy(arrays[key]) for key in arrays.files if arrays[key].dtype.kind != "U"}
    weights = {key[2:]: value for key, value in tensors.items() if key.startswith("w/")}
    return tensors, weights, json.loads(str(arrays["config_json"]))


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 2e-5, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(actual.detach().to(expected.dtype), expected, atol=atol, rtol=rtol, equal_nan=True)


def adapter_case(path: Path) -> None:
    a, weights, config = load(path)
    width = config["embed_dim"]
    graph = Neighbours.of(a["in/edge_index"], config["n_nodes"])
    for kernel in ("dense", "sparse"):
        conv = PreNorm(width, GraphAttention(width, config["n_heads"], chunk=64, kernel=kernel))
        mlp = PreNorm(width, AdapterMLP(width))
        torch.nn.ModuleDict({"conv": conv, "mlp": mlp}).load_state_dict(weights)
        x = a["in/x"][0].clone().requires_grad_()
        aggregated = conv(x, graph)
        after = x + aggregated
        y = after + mlp(after)
        close(aggregated, a["out/graph_attention"][0])
        close(after, a["out/after_conv"][0])
        close(y, a["out/y"][0])
        (y * a["in/cotangent"][0]).sum().backward()
        close(x.grad, a["out/grad_x"][0])


def block_case(path: Path) -> None:
    a, weights, config = load(path)
    for batch in range(config["B"]):
        for chunk in (4, 2**14):  # one row, one token position at a time; everything at once
            block = Block(config["embed_dim"], config["n_heads"], config["hid_dim"], chunk)
            block.load_state_dict(weights)
            x = a["in/x"][batch].clone().requires_grad_()
            y = block(x, int(a["in/eval_pos"]))
            close(y, a["out/y"][batch])
            (y * a["in/cotangent"][batch]).sum().backward()
            close(x.grad, a["out/grad_x"][batch])
        with torch.no_grad():
            x = a["in/x"][batch]
            for i in range(2):
                part = block.feature_attentions[i](block.norm(x))
                close(part, a[f"out/feature_attention_{i}"][batch])
                x = x + part
                part = block.mlp[i](block.norm(x))
                close(part, a[f"out/mlp_{i}"][batch])
                x = x + part
            part = block.sequence_attentions[0](block.norm(x), int(a["in/eval_pos"]))
            close(part[: int(a["in/eval_pos"])], a["out/sample_attention_context"][batch])
            if "out/sample_attention_query" in a:
                close(part[int(a["in/eval_pos"]) :], a["out/sample_attention_query"][batch])
            close(block.mlp[2](block.norm(x + part)), a["out/mlp_2"][batch])


def network(config: dict, weights: dict[str, torch.Tensor], kernel: str = "auto") -> PublishedNetwork:
    sizes = PublishedConfig(
        width=config["embed_dim"],
        heads=config["n_heads"],
        hidden=config["hid_dim"],
        blocks=config["n_layers"],
        adapter_heads=config.get("adapter_heads", 4),
        group=config.get("features_per_group", 2),
        chunk=256,
        kernel=kernel,
    )
    model = PublishedNetwork(sizes).eval()
    missing = set(model.load_state_dict(to_published_names(weights), strict=False).missing_keys)
    assert all(re.match(r"transformer_encoder\.layers\.\d+\.(conv|mlp)\.(norm|base)\.", key) for key in missing)
    return model


@torch.no_grad()
def backbone_case(path: Path) -> None:
    a, weights, config = load(path)
    model = network(config, weights)
    x, n = a["in/x"], int(a["in/n_context"])
    table, mean, std, valid = normalise_table(x, n, config["features_per_group"])
    close(table, a["out/preprocessed_x"])
    close(mean, a["out/norm_mean"])
    close(std, a["out/norm_std"])
    assert torch.equal(valid, a["out/valid_slots"])
    encoder: CellEncoder = model.encoder_x[0]
    close(encoder(table), a["out/cell_embedding"])
    close(model.feature_positional_embedding(a["in/feature_identity"]), a["out/identity_embedding"])
    labels, values = a["in/y_class_context"], a["in/y_reg_context"]
    close(model.cls_y_encoder["2"](labels, len(x)).half(), a["out/target_embedding_cls"], atol=1e-3)
    close(model.reg_y_encoder["1"](values, len(x)).half(), a["out/target_embedding_reg"], atol=1e-3)
    encoded = model.encode(x, labels, None, "classification", a["in/feature_identity"])
    close(encoded.tokens, a["out/encoder_out_cls"])
    close(model.decode_features(encoded), a["out/feature_pred_cls"])
    close(model.decode(encoded, n), a["out/cls_logits"])
    encoded = model.encode(x, values, None, "regression", a["in/feature_identity"])
    close(encoded.tokens, a["out/encoder_out_reg"], atol=5e-4)
    close(model.decode(encoded, n, "regression"), a["out/reg_prediction"], atol=2e-4)


@torch.no_grad()
def whole_case(path: Path) -> None:
    a, weights, config = load(path)
    regression = config["task"] == "regression"
    task = "regression" if regression else "classification"
    x = a["in/features"]
    if "in/random_features" in a:
        x = torch.cat([x, a["in/random_features"]], 1)
    order = context_first(a["in/train_mask"])
    assert torch.equal(order, a["out/perm"])
    n_context = int(a["in/train_mask"].sum())
    graph = Neighbours.of(relabel(a["in/edge_index"], order), len(x))
    y = a["in/y"][order[:n_context]]
    for kernel in ("dense", "sparse"):
        model = network(config, weights, kernel)
        encoded = model.encode(x[order], y, graph, task, a["in/feature_identity"])
        tokens = torch.empty_like(a["out/encoder_target_token"])
        tokens[order] = encoded.tokens[:, -1]
        close(tokens, a["out/encoder_target_token"], atol=5e-4 if regression else 2e-5)

        def predictions(prediction: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(a["out/predictions"])
            out[order[n_context:]] = prediction if regression else F.log_softmax(prediction, -1)
            return out

        atol = 2e-4 if regression else 2e-5
        close(predictions(model.decode(encoded, n_context, task)), a["out/predictions"], atol=atol)
        plain = model.decode(model.encode(x[order], y, None, task, a["in/feature_identity"]), n_context, task)
        close(predictions(plain), a["out/predictions_zero_adapter"], atol=atol)


def approx(actual: np.ndarray, expected: np.ndarray, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(actual, dtype=expected.dtype), expected, rtol=1e-4, atol=atol)


def pieces_case(path: Path) -> None:
    a = np.load(path, allow_pickle=False)
    config = json.loads(str(a["config_json"]))
    n, x = config["n_nodes"], a["in/x"]
    source, target = a["in/edge_index"]
    graph = attributes.Adjacency.of(a["in/edge_index"][:, source < target], n)
    joined = graph.degree > 0
    approx(attributes.gcn(graph, x), a["out/conv_gcn"])
    approx(attributes.neighbour_mean(graph, x), a["out/conv_sage_mean"])
    approx(attributes.neighbour_extreme(graph, x, np.minimum)[joined], a["out/conv_sage_min"][joined])
    approx(attributes.neighbour_extreme(graph, x, np.maximum)[joined], a["out/conv_sage_max"][joined])
    qkv, out = ((a[f"w/gt.{k}.weight"], a[f"w/gt.{k}.bias"]) for k in ("attn_qkv_linear", "output_linear"))
    approx(attributes.graph_transformer(graph, x, qkv, out), a["out/conv_gt"])
    z = a["in/mixed_input"] @ a["w/mixed.linear.weight"].T + a["w/mixed.linear.bias"]
    mask = a["in/mixed_mask"]
    z[:, mask] = attributes.convolve(graph, z[:, mask], "sage-mean")
    approx(z, a["out/mixed_graph_linear"])
    approx(attributes.log_degree(graph), a["out/degree_feature"])
    approx(attributes.log_pagerank(graph, float(a["in/pagerank_damping"])), a["out/pagerank_feature"], 1e-4)
    for key in a.files:
        if key.startswith("out/activation/"):
            with np.errstate(over="ignore"):
                approx(attributes.ACTIVATIONS[key.split("/")[-1]](a["in/activation_grid"]), a[key])
    fourier = [a[f"in/fourier_{k}"] for k in ("input", "freqs", "bias", "weights")]
    approx(attributes.fourier(*fourier), a["out/fourier"])
    scaled = a["in/scale"] * (attributes.standardise(fourier[0]) + a["in/scale_bias"])
    approx(np.tanh(scaled), a["out/scaled_tanh"])

    sizes = a["in/block_sizes"]
    expected = structure.expected_edges(
        sizes, float(a["in/block_avg_degree"]), config["offdiagonal_coef"], a["in/block_uniforms"]
    )
    approx(expected, a["out/block_expected_edges"])
    propensity = structure.normalised_propensity(a["in/propensity_uniform"], a["in/propensity_group"])
    approx(propensity, a["out/propensity"])
    n_parts, parts, minimum = a["in/partition_n_parts_min"]
    assert parts == len(a["out/partition"])
    assert np.array_equal(structure.parts_from_cuts(n_parts, minimum, a["in/partition_cuts"]), a["out/partition"])
    blocks, shape = int(a["in/block_init_n_blocks"]), a["out/block_init_weight"].shape
    weight = attributes.block_weight(np.random.default_rng(0), *shape, 1.0, blocks)
    assert np.array_equal(weight != 0, a["out/block_init_nonzero"])
    std = float(a["in/block_init_std"])
    drawn = [attributes.block_weight(np.random.default_rng(i), *shape, std, blocks)[weight != 0] for i in range(200)]
    share = (shape[0] // blocks) * (shape[1] // blocks) * blocks / (shape[0] * shape[1])
    np.testing.assert_allclose(np.std(drawn), std / share**0.5, rtol=0.05)

    states = np.concatenate([a[k] for k in sorted(a.files) if k.startswith("in/scm_outputs_")], axis=1)
    for key in a.files:
        if key.startswith("out/extract_X/"):
            case = key.split("/")[-1]
            flags = dict(re.findall(r"(clique|effect|sort)(\d)", case))
            chosen = a[f"in/extract_perm/{case}"] + max(0, int(a[f"in/extract_start/{case}"])) * int(flags["clique"])
            features, y = attributes.read_out(
                states, a[key].shape[1], chosen, flags["effect"] == "1", flags["sort"] == "1"
            )
            approx(features, a[key])
            approx(y[:, None], a[f"out/extract_y/{case}"])

    features = a["in/features"]
    approx(prior.clamp_outliers(features), a["out/outlier_clamped"])
    approx(prior.scale(features), a["out/standard_scaled"])
    approx(prior.scale(prior.clamp_outliers(features)), a["out/clamped_then_scaled"])
    categorical = a["in/categorical_input"].copy()
    for column in a["in/categorical_columns"].tolist():
        values = a["in/categorical_input"][:, column]
        codes = prior.count_exceeded(values, values[a[f"in/categorical_boundary_rows/{column}"]])
        if a[f"in/categorical_permuted/{column}"]:
            codes = prior.renumber(codes, a[f"in/categorical_perm/{column}"])
        categorical[:, column] = codes
    assert np.array_equal(categorical, a["out/categorical"])
    y = prior.scale(a["in/y"][:, None])[:, 0]
    approx(y, a["out/y_scaled"])
    for name, flip in (("binary", False), ("binary_reversed", True)):
        assert np.array_equal(prior.binary_labels(y, float(a["in/quantile"]), flip), a[f"out/{name}"])
    for key in a.files:
        if key.startswith("out/multiclass/"):
            case = key.split("/")[-1]
            permutation = f"in/multiclass_perm/{case}"
            labels = prior.rank_labels(
                y,
                y[a[f"in/multiclass_boundary_rows/{case}"]],
                a[permutation] if permutation in a.files else None,
                case == "reversed",
            )
            assert np.array_equal(labels, a[key])


def describe(task: prior.GraphTask, rng: np.random.Generator) -> dict[str, float]:
    """The reference's record of one graph."""
    x, y, (source, target) = task.x.numpy(), task.y.numpy(), task.edge_index.numpy()
    n, f = x.shape
    degree = np.bincount(target, minlength=n)
    dense = np.zeros((n, n), np.float32)
    dense[target, source] = 1
    closed = ((dense @ dense) * dense).sum(1)
    clustering = np.where(degree > 1, closed / np.maximum(degree * (degree - 1), 1), 0)
    out = {
        "n_nodes": n,
        "n_features": f,
        "n_edges_undirected": len(source) // 2,
        "avg_degree": len(source) / n,
        "max_degree": degree.max(),
        "median_degree": np.median(degree),
        "frac_degree_le2": (degree <= 2).mean(),
        "clustering": clustering[rng.choice(n, min(100, n), replace=False)].mean(),
        "n_train": task.n_context,
        "train_frac_of_actual": task.n_context / n,
        "task": 0 if task.classes == 0 else 1 if task.classes == 2 else 2,
        "n_classes": task.classes,
        "frac_cols_le256_unique": np.mean([len(np.unique(column)) <= 256 for column in x.T]),
        "x_absmax": np.abs(x).max(),
        "mean_abs_feature_corr": np.nanmean(np.abs(np.corrcoef(x.T)[np.triu_indices(f, 1)])),
        "mean_edge_feature_corr": (x[source[:200_000]] * x[target[:200_000]]).mean(),
    }
    if task.classes == 0:
        out["edge_label_corr"] = np.corrcoef(y[source], y[target])[0, 1]
        out["y_skew"] = ((y - y.mean()) ** 3).mean() / y.std() ** 3
    else:
        share = np.bincount(y) / n
        out["edge_homophily"] = (y[source] == y[target]).mean()
        out["adj_homophily"] = structure.graph_statistics(task.edge_index.numpy(), y, n)["adjusted_homophily"]
        out["majority_frac"] = share.max()
        out["class_entropy_norm"] = -(share * np.log(share)).sum() / np.log(task.classes)
    return out


def summary_case(path: Path, graphs: int = 150) -> None:
    """Two-sample tests at the 0.1 % level; the reference counts two-class multiclass graphs as multiclass."""
    a = np.load(path, allow_pickle=False)
    config = json.loads(str(a["config_json"]))
    sizes = [int(v) for v in re.findall(r"ln (\d+)", config["n_nodes"])]
    degrees = [float(v) for v in re.findall(r"\d+(?:\.\d+)?", config["avg_degree"].replace("0.5 LogU", ""))]
    settings = {"nodes": sizes, "sparse_degree": degrees[-4:-2], "dense_degree": degrees[-2:]}
    data = prior.GraphPrior("paper", settings, seed=7)
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        rows = [describe(data.sample(i), rng) for i in range(graphs)]
    far = {}
    for name in sorted({key for row in rows for key in row}):
        ours = np.array([row[name] for row in rows if name in row], dtype=float)
        theirs = a[f"record/{name}"]
        if name == "task":
            theirs = np.where(a["record/n_classes"] == 2, 1, theirs)
        ours, theirs = ours[~np.isnan(ours)], theirs[~np.isnan(theirs)]
        distance = ks_2samp(ours, theirs).statistic
        if distance > 1.95 * np.sqrt(1 / len(ours) + 1 / len(theirs)):
            far[name] = distance
    assert not far


CHECKS = {
    "prior_pieces_*": pieces_case,
    "prior_summary_*": summary_case,
    "adapter_*": adapter_case,
    "block_*": block_case,
    "backbone_*": backbone_case,
    "graphpfn_*": whole_case,
}


@pytest.mark.parametrize("path", files("graph_pfn"))
def test_case(path: Path) -> None:
    check(path, CHECKS)


@pytest.mark.long
@pytest.mark.parametrize("path", [p for p in files("graph_pfn") if "prior_summary" in str(p.values[0])])
def test_many_graphs(path: Path) -> None:
    summary_case(path, 1000)
