import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.nn import TransformerConv

from lightning_modules.graph_pfn.adapter import GraphAttention, Neighbours, attend, attend_dense, attend_sparse
from lightning_modules.graph_pfn.backbone import Block, ClassTargetEncoder, normalise_table, random_identity
from lightning_modules.graph_pfn.checkpoints import convert, main, read_weights, to_published_names
from lightning_modules.graph_pfn.network import PublishedConfig, PublishedNetwork, context_first, relabel


def random_edges(n: int, m: int) -> torch.Tensor:
    pairs = torch.randint(n, (2, m))
    pairs = pairs[:, pairs[0] != pairs[1]]
    return torch.cat([pairs, pairs.flip(0)], 1).unique(dim=1)


def small(**changes) -> PublishedNetwork:
    torch.manual_seed(0)
    sizes = {"width": 16, "heads": 4, "hidden": 32, "blocks": 2, "chunk": 64} | changes
    return PublishedNetwork(PublishedConfig(**sizes)).eval()


def ask(model, x, y, graph, task="classification", identity=None):
    return model.decode(model.encode(x, y, graph, task, identity), len(y), task)


def wake(model: torch.nn.Module) -> None:
    """Adapters start at zero; give them values."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)


def test_limix16m_has_the_published_size():
    with torch.device("meta"):
        model = PublishedNetwork(PublishedConfig())
    count = {name: p.numel() for name, p in model.named_parameters()}
    assert sum(count.values()) == 20_090_701
    adapters = sum(
        size for name, size in count.items() if ".conv." in name or ".mlp.norm" in name or "mlp.base" in name
    )
    assert adapters == 3_564_288


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 12), st.integers(0, 40), st.integers(1, 3), st.integers(1, 40))
def test_kernels_agree_with_each_other_and_with_a_loop(n, m, tokens, chunk):
    torch.manual_seed(n * m)
    edges = random_edges(n, m)
    graph = Neighbours.of(edges, n)
    q, k, v = torch.randn(3, n, tokens, 2, 4, dtype=torch.float64)
    expected = torch.zeros_like(q)
    for node in range(n):
        near = edges[0, edges[1] == node]
        if len(near):
            weight = torch.einsum("the,mthe->mth", q[node], k[near] / 2).softmax(0)
            expected[node] = (weight.unsqueeze(-1) * v[near]).sum(0)
    torch.testing.assert_close(attend_dense(q, k, v, graph), expected)
    torch.testing.assert_close(attend_sparse(q, k, v, graph, chunk), expected)
    assert torch.equal(attend(q, k, v, graph, "sparse", 8), attend_sparse(q, k, v, graph, 8))


def test_kernels_have_the_same_gradients():
    graph = Neighbours.of(random_edges(9, 12), 9)
    q, k, v = torch.randn(3, 9, 2, 2, 4, dtype=torch.float64)
    grads = []
    for function in (lambda *x: attend_dense(*x, graph), lambda *x: attend_sparse(*x, graph, 7)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        function(*inputs).pow(2).sum().backward()
        grads.append([x.grad for x in inputs])
    torch.testing.assert_close(grads[0], grads[1])


def test_graph_attention_is_a_transformer_conv_with_interleaved_weights():
    torch.manual_seed(0)
    ours, theirs = GraphAttention(16, 4), TransformerConv(16, 4, heads=4, root_weight=False)
    torch.nn.init.eye_(ours.output_linear.weight)
    qkv, bias = ours.attn_qkv_linear.weight.view(4, 3, 4, 16), ours.attn_qkv_linear.bias.view(4, 3, 4)
    with torch.no_grad():
        for i, layer in enumerate((theirs.lin_query, theirs.lin_key, theirs.lin_value)):
            layer.weight.copy_(qkv[:, i].reshape(16, 16))
            layer.bias.copy_(bias[:, i].reshape(16))
    x, edges = torch.randn(20, 16), random_edges(20, 40)
    ours_out = ours(x.unsqueeze(1), Neighbours.of(edges, 20)).squeeze(1)
    torch.testing.assert_close(ours_out, theirs(x, edges), atol=1e-5, rtol=1e-5)


def test_new_adapters_leave_the_backbone_unchanged():
    model = small()
    x, y, identity = torch.randn(15, 5), torch.randint(3, (6,)), random_identity(3, 4)
    graph = Neighbours.of(random_edges(15, 30), 15)
    assert torch.equal(ask(model, x, y, graph, identity=identity), ask(model, x, y, None, identity=identity))
    wake(model)
    assert not torch.allclose(ask(model, x, y, graph, identity=identity), ask(model, x, y, None, identity=identity))


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_renumbering_nodes_renumbers_predictions(task):
    model = small()
    wake(model)
    n, context = 14, torch.rand(14) < 0.4
    context[:2] = torch.tensor([True, False])
    x, edges, identity = torch.randn(n, 4), random_edges(n, 25), random_identity(2, 4)
    y = torch.randint(3, (n,)) if task == "classification" else torch.randn(n)

    def predict(x, edges, y, context):
        order = context_first(context)
        n_context = int(context.sum())
        out = ask(model, x[order], y[order[:n_context]], Neighbours.of(relabel(edges, order), n), task, identity)
        full = torch.zeros(n, *out.shape[1:])
        full[order[n_context:]] = out
        return full

    new = torch.randperm(n)
    renumbered = predict(x[new], relabel(edges, new), y[new], context[new])
    torch.testing.assert_close(renumbered, predict(x, edges, y, context)[new], atol=1e-5, rtol=1e-4)


def test_without_edges_a_query_does_not_depend_on_other_queries():
    model = small()
    wake(model)
    x, y, identity = torch.randn(12, 4), torch.randint(2, (5,)), random_identity(2, 4)
    graph = Neighbours.of(torch.empty(2, 0, dtype=torch.long), 12)
    full = ask(model, x, y, graph, identity=identity)
    fewer = Neighbours.of(torch.empty(2, 0, dtype=torch.long), 8)
    torch.testing.assert_close(ask(model, x[:8], y, fewer, identity=identity), full[:3], atol=1e-5, rtol=1e-4)


def test_chunks_change_nothing():
    x, y, identity = torch.randn(30, 7), torch.randint(3, (9,)), random_identity(4, 4)
    graph = Neighbours.of(random_edges(30, 60), 30)
    outputs = []
    for chunk in (1, 50, 2**14):
        model = small(chunk=chunk)
        wake(model)
        torch.manual_seed(1)
        wake(model)
        outputs.append(ask(model, x, y, graph, identity=identity))
    torch.testing.assert_close(outputs[0], outputs[2], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(outputs[1], outputs[2], atol=1e-5, rtol=1e-4)


def test_a_missing_cell_is_not_a_mean_cell():
    model = small()
    x, y, identity = torch.randn(12, 4), torch.randint(2, (5,)), random_identity(2, 4)
    missing, mean = x.clone(), x.clone()
    missing[8, 1] = torch.nan
    mean[8, 1] = x[:5, 1].mean()
    out = ask(model, missing, y, None, identity=identity)
    assert out.isfinite().all()
    assert not torch.allclose(out[3], ask(model, mean, y, None, identity=identity)[3])


def test_columns_without_variation_or_values():
    x = torch.randn(10, 4)
    x[:, 1] = 3.0
    x[:, 2] = torch.nan
    table, mean, std, valid = normalise_table(x, 4, 2)
    assert valid.flatten().tolist() == [1, 1]
    assert table[:, 1, 0].isnan().all()
    assert table[:, [0, 1], [0, 1]].isfinite().all()
    torch.testing.assert_close(mean[0, 0], x[:4, 0].mean())
    torch.testing.assert_close(std[0, 0], x[:4, 0].std())


def test_block_with_nothing_to_predict():
    block = Block(8, 2, 16, 64)
    x = torch.randn(5, 3, 8)
    torch.testing.assert_close(block(x, 5)[:4], block(torch.cat([x, x[:2]]), 5)[:4])


def test_more_classes_than_the_model_knows_are_refused():
    with pytest.raises(ValueError, match="11 classes"):
        ClassTargetEncoder(16, 10)(torch.arange(11), 20)


def test_no_or_all_nodes_labelled_is_refused():
    for n_context in (0, 6):
        with pytest.raises(ValueError, match="of 6 nodes are labelled"):
            ask(small(), torch.randn(6, 2), torch.zeros(n_context).long(), None)


def published_files(model: PublishedNetwork) -> tuple[dict, dict]:
    """A backbone's and an adapters' state dict under the published names."""
    backbone, adapters = {}, {}
    for name, value in model.state_dict().items():
        if ".base." in name and (".attentions" in name or "attentions." in name or ".mlp." in name.split(".base.")[1]):
            backbone[name.replace(".base.", ".", 1)] = value
        elif "transformer_encoder" in name:
            adapters["tfm.module." + name] = value
        else:
            backbone[name] = value
    return backbone, adapters


def test_published_names_fit_tensor_for_tensor(tmp_path):
    with torch.device("meta"):
        backbone, adapters = published_files(PublishedNetwork(PublishedConfig()))
    assert len(backbone) == 183
    assert backbone["transformer_encoder.layers.0.feature_attentions.1.qkv_proj_weight"].shape == (3, 6, 32, 192)
    assert backbone["transformer_encoder.layers.11.mlp.2.mlp.0.weight"].shape == (768, 192)
    assert backbone["encoder_x.0.fusion_network.0.weight"].shape == (192, 384)
    assert backbone["cls_y_encoder.2.y_mask.weight"].shape == (1, 192)
    assert backbone["reg_y_encoder.1.layer.weight"].shape == (192, 2)
    assert adapters["tfm.module.transformer_encoder.layers.3.conv.base.attn_qkv_linear.weight"].shape == (576, 192)
    assert adapters["tfm.module.transformer_encoder.layers.3.mlp.base.layers.2.weight"].shape == (192, 384)

    model = small()
    wake(model)
    backbone, adapters = published_files(model)
    torch.save({"config": {}, "state_dict": adapters}, tmp_path / "adapters.pt")
    torch.save({"config": {}, "state_dict": backbone}, tmp_path / "backbone.ckpt")
    convert(tmp_path / "backbone.ckpt", tmp_path / "backbone.safetensors")
    other = small()
    state = read_weights(tmp_path / "backbone.safetensors") | read_weights(tmp_path / "adapters.pt")
    other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    version_one = {name.replace("module.", ""): value for name, value in adapters.items()}
    assert to_published_names(version_one).keys() == to_published_names(adapters).keys()


class Harmful:
    def __reduce__(self):
        return (print, ("executed",))


def test_a_pickle_that_executes_code_is_refused_until_it_is_converted(tmp_path, capsys):
    whole = torch.randn(3, 4)  # two tensors of one storage, as the published target embeddings may be
    state = {"cls_y_encoder.2.y_embedding.weight": whole[:2], "cls_y_encoder.2.y_mask.weight": whole[2:], "note": 1}
    torch.save({"config": Harmful(), "state_dict": state}, tmp_path / "bad.ckpt")
    with pytest.raises(ValueError, match=r"convert it once with `python -m lightning_modules.graph_pfn.checkpoints "):
        read_weights(tmp_path / "bad.ckpt")
    assert "executed" not in capsys.readouterr().out
    main([str(tmp_path / "bad.ckpt"), str(tmp_path / "good.safetensors")])
    assert "executed" in capsys.readouterr().out
    good = read_weights(tmp_path / "good.safetensors")
    assert torch.equal(torch.cat(list(good.values())), whole)


@pytest.mark.parametrize(
    ("content", "words"), [(None, "No such file"), ([1], "holds no tensors by name"), (b"no", "cannot be read")]
)
def test_what_cannot_be_converted_is_said_in_one_line(content, words, tmp_path, capsys):
    if isinstance(content, bytes):
        (tmp_path / "it.ckpt").write_bytes(content)
    elif content:
        torch.save(content, tmp_path / "it.ckpt")
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path / "it.ckpt"), str(tmp_path / "it.safetensors")])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not (tmp_path / "it.safetensors").exists()
