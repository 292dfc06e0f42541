import torch

from lightning_modules.graph_pfn.losses import Question
from lightning_modules.graph_pfn.small import SmallConfig, SmallNetwork


def ring(n: int) -> torch.Tensor:
    nodes = torch.arange(n)
    edges = torch.stack([nodes, nodes.roll(-1)])
    return torch.cat([edges, edges.flip(0)], 1)


def network(awake: bool = True, **sizes) -> SmallNetwork:
    torch.manual_seed(0)
    model = SmallNetwork(SmallConfig(**({"width": 16, "heads": 2, "blocks": 2} | sizes))).eval()
    if awake:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def question(n: int, k: int, f: int = 5, classes: int = 3, seed: int = 0) -> Question:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, f, generator=generator)
    return Question(x, torch.arange(k) % classes, ring(n))


def test_untrained_it_predicts_the_class_frequencies():
    q = question(12, 6)._replace(y=torch.tensor([0, 0, 0, 1, 1, 4]))
    answer = network(awake=False)([q])[0]
    expected = torch.tensor([3, 2, 0, 0, 1, 0, 0, 0, 0, 0]) / 6
    torch.testing.assert_close(answer.query.softmax(1), expected.expand(6, -1), atol=1e-3, rtol=0)
    value = network(awake=False)([q._replace(y=torch.tensor([1.0, 2, 3, 4, 5, 6]))], "regression")[0]
    torch.testing.assert_close(value.query, torch.full((6,), 3.5))


def test_a_batch_answers_like_single_graphs():
    model = network()
    questions = [question(12, 6), question(20, 4, 3, seed=1), question(9, 7, seed=2)]
    together = model(questions)
    for q, answer in zip(questions, together, strict=True):
        alone = model([q])[0]
        assert alone.query.shape == (len(q.x) - len(q.y), 10)
        torch.testing.assert_close(alone.query, answer.query, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(alone.target, answer.target, atol=1e-4, rtol=1e-4)


def test_dense_and_sparse_agree():
    q = question(30, 8)
    q = q._replace(edges=q.edges[:, (q.edges != 5).all(0)])  # node 5 is alone
    dense, sparse = (network(kernel=kernel, chunk=16)([q])[0] for kernel in ("dense", "sparse"))
    torch.testing.assert_close(dense.query, sparse.query, atol=1e-5, rtol=1e-4)


def test_new_adapters_change_nothing_but_the_degree():
    model = network(awake=False)
    torch.nn.init.normal_(model.read_query.weight)
    torch.nn.init.zeros_(model.log_degree.weight)
    q = question(15, 6)
    torch.testing.assert_close(model([q])[0].query, model([q._replace(edges=None)])[0].query)


def test_renumbering_nodes_renumbers_predictions():
    model = network()
    q = question(16, 6)
    new = torch.cat([torch.randperm(6), 6 + torch.randperm(10)])
    moved = Question(q.x[new], q.y[new[:6]], torch.argsort(new)[q.edges])
    torch.testing.assert_close(model([moved])[0].query, model([q])[0].query[new[6:] - 6], atol=1e-5, rtol=1e-4)


def test_a_missing_cell_counts_as_the_mean():
    model = network()
    q = question(16, 6)
    missing, mean = q.x.clone(), q.x.clone()
    missing[9, 1] = torch.nan
    mean[9, 1] = torch.cat([q.x[:9, 1], q.x[10:, 1]]).mean()
    torch.testing.assert_close(model([q._replace(x=missing)])[0].query, model([q._replace(x=mean)])[0].query)


def test_many_columns_make_many_tokens():
    model = network()
    assert model([question(10, 4, f=40)])[0].query.isfinite()[:, :3].all()
    assert model([question(10, 4, f=1)])[0].query.isfinite()[:, :3].all()
