import torch
from sklearn.linear_model import Ridge
from torch.nn import functional as F

from lightning_modules.graph_pfn.losses import Question
from lightning_modules.graph_pfn.small import SmallConfig, SmallNetwork, pad, ridge


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
    questions = [question(12, 6), question(20, 4, 3, seed=1), question(9, 7, seed=2), question(10, 5, 40, seed=3)]
    for task in ("classification", "regression"):
        if task == "regression":
            questions = [q._replace(y=q.y.float()) for q in questions]
        for q, answer in zip(questions, model(questions, task), strict=True):
            alone = model([q], task)[0]
            assert len(alone.query) == len(q.x) - len(q.y)
            torch.testing.assert_close(alone.query, answer.query, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(alone.target, answer.target, atol=1e-4, rtol=1e-4)


def test_dense_and_sparse_agree():
    q = question(30, 8)
    q = q._replace(edges=q.edges[:, (q.edges != 5).all(0)])  # node 5 is alone
    dense, sparse = (network(kernel=kernel, chunk=16)([q])[0] for kernel in ("dense", "sparse"))
    torch.testing.assert_close(dense.query, sparse.query, atol=1e-5, rtol=1e-4)


def test_new_adapters_change_nothing():
    model = network(awake=False)
    torch.nn.init.normal_(model.read_query.weight)
    q = question(15, 6)
    torch.testing.assert_close(model([q])[0].query, model([q._replace(edges=None)])[0].query)


def test_surroundings_by_matrix_powers():
    model = network()
    q = question(12, 5)
    q = q._replace(edges=q.edges[:, (q.edges != 3).all(0)])  # node 3 is alone
    batch, labels = pad([q]), F.one_hot(q.y, 10).float()
    x = F.pad(q.x, (0, 11))[None]
    around = model.surroundings.look(x, labels[None], batch, "classification")
    adjacency = torch.zeros(12, 12)
    adjacency[q.edges[1], q.edges[0]] = 1
    step = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
    smoothed = [z / (z.square().sum() / (12 * 16)).sqrt() for z in (step @ x[0], step @ step @ x[0])]
    torch.testing.assert_close(around.columns[0], torch.cat(smoothed, 1))
    start = F.pad(labels, (0, 0, 0, 7))
    powers = [0.9**k * torch.matrix_power(step, k) for k in range(1, 21)]
    reach = sum(powers)
    leaving = reach / adjacency.sum(1).clamp(min=1)  # = reach.T / d_v: visits of walks from u
    counts = (powers[0] @ start, reach @ start, leaving @ start)
    for i, met in enumerate(counts):
        shares = met / met.sum(1, keepdim=True).clamp(min=1e-9)
        torch.testing.assert_close(around.votes[0, :, i], (shares + 0.01).log())
    root = (adjacency.sum(1) + 1) ** -0.5
    normal = root[:, None] * (adjacency + torch.eye(12)) * root
    both = normal @ normal @ x[0]
    both = both / (both.square().sum() / (12 * 16)).sqrt()
    for i, columns in ((3, both), (4, torch.cat([x[0], *smoothed], 1))):
        expected = 5 * ridge(columns[None], labels[None], batch.context[:, :5])[0]
        torch.testing.assert_close(around.votes[0, :, i], expected, atol=1e-4, rtol=1e-4)
    degree = torch.full((12,), 2.0)
    degree[[2, 4]], degree[3] = 1, 0
    torch.testing.assert_close(around.structure[0, :, 0], (degree + 1).log() - 1.5)
    for i, met in enumerate(counts):
        mass = met.sum(1)
        torch.testing.assert_close(around.structure[0, :, 1 + i], (mass / mass.mean() + 0.01).log())
    met = model.surroundings.look(x, q.y.float()[None, :, None], batch, "regression").votes
    torch.testing.assert_close(met[0, 5, 0, 0], torch.tensor(1.0))  # joined to nodes 4, of value 1, and 6, unknown


def test_ridge_leaves_labelled_nodes_out():
    torch.manual_seed(0)
    x, y = torch.randn(9, 3), torch.randn(9, 2)
    context = torch.arange(9) < 7
    out = ridge(x[None], y[None, :8], context[None, :8])[0]
    for node in range(9):
        seen = context.clone()
        seen[node] = False
        model = Ridge(30.0).fit(x[seen], y[seen])
        expected = torch.from_numpy(model.predict(x[node : node + 1]))[0].float() - y[:7].mean(0)
        torch.testing.assert_close(out[node], expected * (1 + 30 / 7), atol=1e-4, rtol=1e-4)


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
