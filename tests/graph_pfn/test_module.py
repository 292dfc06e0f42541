import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from torch_geometric.data import Data

import configs
from callbacks import GraphEvaluation
from datamodules import GraphPrior, NodeClassification
from datamodules.nodes import clean_edges
from lightning_modules import GraphPFN, graph_pfn
from tests.graph_pfn.test_cli import planted

SMALL = {"width": 16, "heads": 2, "blocks": 1}
TINY_LIMIX = {"width": 16, "heads": 4, "hidden": 32, "blocks": 1}


def trainer(folder, **more) -> Trainer:
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(**(settings | {"default_root_dir": folder, "enable_checkpointing": False} | more))


def prior(regression: float = 0.1, **more) -> GraphPrior:
    settings = {"nodes": [30, 50], "scm": 1.0 if regression == 1 else 0.0, "regression": regression}
    return GraphPrior(settings=settings, batch_size=2, graphs_per_epoch=6, validation_graphs=4, **more)


def weights(module: GraphPFN) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.network.parameters()])


@pytest.mark.parametrize("layout", ["tiny", "limix16m"])
def test_pretraining_steps_and_logs(layout, tmp_path):
    torch.manual_seed(0)
    sizes = SMALL if layout == "tiny" else TINY_LIMIX
    features = 0.1 if layout == "limix16m" else 0.0
    module = GraphPFN(layout, sizes, recipe="pretrain", edge_weight=0.1, feature_weight=features, warmup=2)
    run = trainer(tmp_path, max_epochs=1)
    run.fit(module, prior())
    logged = run.callback_metrics
    assert {"train/loss", "train/prediction", "train/edges", "train/gain", "val/loss", "val/accuracy"} <= logged.keys()
    total = logged["val/prediction"] + 0.1 * logged["val/edges"] + features * logged.get("val/features", 0)
    torch.testing.assert_close(logged["val/loss"], total, atol=1e-4, rtol=1e-4)
    assert run.global_step == 3


@pytest.mark.parametrize("layout", ["tiny", "limix16m"])
def test_only_adapters_learn_when_asked(layout, tmp_path):
    module = GraphPFN(
        layout, SMALL if layout == "tiny" else TINY_LIMIX, recipe="pretrain", trained="adapters", warmup=1
    )
    module.configure_model()
    before = {k: v.clone() for k, v in module.network.state_dict().items()}
    trainer(tmp_path, max_epochs=1, limit_val_batches=0).fit(module, prior())
    changed = {k for k, v in module.network.state_dict().items() if not torch.equal(v, before[k])}
    assert changed
    words = (
        ("surroundings", "graph_attention", "mlps.1", "norms.2", "norms.3")
        if layout == "tiny"
        else (".conv.", ".mlp.", "feature_decoder")
    )
    assert all(any(word in k for word in words) and ".base.mlp.0" not in k for k in changed)


def test_resuming_in_the_middle_of_an_epoch_changes_nothing(tmp_path):
    def fit(ckpt_path=None):
        torch.manual_seed(0)
        module = GraphPFN(sizes=SMALL, recipe="pretrain", edge_weight=0.1, warmup=1)
        keep = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
        run = trainer(tmp_path, max_epochs=2, callbacks=[keep], enable_checkpointing=True)
        run.fit(module, prior(), ckpt_path=ckpt_path)
        assert run.global_step == 6
        return weights(module)

    whole = fit()
    torch.testing.assert_close(fit(tmp_path / "step=2.ckpt"), whole, atol=0, rtol=0)


def test_fine_tuning_is_never_below_in_context(tmp_path):
    torch.manual_seed(0)
    module = GraphPFN(sizes=SMALL, learning_rate=1.0, ensemble={"members": 2})  # a rate that destroys the network
    module.configure_model()
    start = weights(module)
    keep = ModelCheckpoint(tmp_path, filename="best", monitor="val/score", mode="max")
    data = NodeClassification(labels_per_class=2, val_fraction=0.2, steps_per_epoch=3)
    run = trainer(tmp_path, max_epochs=3, callbacks=[keep], enable_checkpointing=True)
    run.fit(module, data)
    assert run.global_step == 9
    assert not torch.equal(weights(module), start)
    in_context = GraphPFN(sizes=SMALL, ensemble={"members": 2})
    in_context.configure_model()
    torch.nn.utils.vector_to_parameters(start, in_context.network.parameters())
    (scores,) = trainer(tmp_path).validate(in_context, data, verbose=False)
    assert keep.best_model_score >= scores["val/score"]
    (scores,) = trainer(tmp_path).test(module, data, verbose=False)
    assert 0 <= scores["test/accuracy"] <= 1


@pytest.mark.parametrize("classes", [0, 2, 12])
@pytest.mark.parametrize("layout", ["tiny", "limix16m"])
def test_fit_and_predict_on_values_and_classes(layout, classes, tmp_path):
    torch.manual_seed(0)
    n = 60
    y = torch.rand(n) if classes == 0 else torch.arange(n) % classes
    if classes == 0:
        y[:5] = torch.nan
    else:
        y[:5] = -1
    torch.save(Data(x=torch.randn(n, 4), edge_index=torch.randint(n, (2, 90)), y=y), tmp_path / "g.pt")
    data = NodeClassification(str(tmp_path / "g.pt"), train_fraction=0.5, steps_per_epoch=2)
    module = GraphPFN(layout, SMALL if layout == "tiny" else TINY_LIMIX, ensemble={"members": 2})
    run = trainer(tmp_path, max_epochs=2)
    run.fit(module, data)
    assert run.callback_metrics["train/loss"].isfinite()
    (scores,) = run.test(module, data, verbose=False)
    assert (
        set(scores)
        == {
            0: {"test/r2", "test/score"},
            2: {"test/accuracy", "test/average_precision", "test/auc", "test/score"},
            12: {"test/accuracy", "test/score"},
        }[classes]
    )
    (rows,) = run.predict(module, data)
    assert rows["node"] == ["0", "1", "2", "3", "4"]
    if classes:
        assert rows["probability"].shape == (5, classes)
        torch.testing.assert_close(rows["probability"].sum(1), torch.ones(5))
        assert set(rows["prediction"]) <= set(data.nodes.class_names)
    else:
        assert rows["prediction"].isfinite().all()


def test_what_is_hidden_in_a_graph_depends_on_neither_batch_nor_rank():
    torch.manual_seed(0)
    module = GraphPFN(sizes=SMALL, edge_weight=0.1, edge_rate=0.3)
    module.configure_model()
    graphs = [prior().sample(i) for i in range(5)]
    with torch.no_grad():
        whole = module._pretrain(graphs)
        parts = [module._pretrain(graphs[:3]), module._pretrain(graphs[3:])]  # as two ranks share five graphs
    for name in ("loss", "prediction", "edges", "gain"):
        torch.testing.assert_close((3 * parts[0][name] + 2 * parts[1][name]) / 5, whole[name], atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        other = module._pretrain([g._replace(number=g.number + 1) for g in graphs])
    assert not torch.allclose(other["edges"], whole["edges"])


def test_graphs_with_values_do_not_count_for_the_accuracy(tmp_path):
    torch.manual_seed(0)
    module = GraphPFN(sizes=SMALL, recipe="pretrain")
    module.configure_model()
    values = [prior(regression=1.0).sample(i) for i in range(2)]
    classes = [prior(regression=0.0).sample(i) for i in range(2)]
    with torch.no_grad():
        assert module._pretrain(values)["accuracy"].isnan()
        expected = module._pretrain(classes)["accuracy"]
        torch.testing.assert_close(module._pretrain([*values, *classes])["accuracy"], expected)
    batches = DataLoader([values, classes, values], batch_size=None)
    (logged,) = trainer(tmp_path).validate(module, batches, verbose=False)
    assert logged["val/accuracy"] == pytest.approx(float(expected), abs=1e-6)


def rates(folder, recipe, **limits) -> list[float]:
    """Learning rates of the steps of a run that starts at 1e-3."""
    seen = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            seen.append(optimizer.param_groups[0]["lr"])

    module = GraphPFN(sizes=SMALL, recipe=recipe, learning_rate=1e-3, warmup=2)
    data = prior() if recipe == "pretrain" else NodeClassification(labels_per_class=2, steps_per_epoch=4)
    trainer(folder, callbacks=[Watch()], limit_val_batches=0, **limits).fit(module, data)
    return seen


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"max_epochs": 2}, 4),
        ({"max_epochs": -1, "max_steps": 9}, 4),  # no number of epochs: the first one still has 4 steps
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, 2),
        ({"max_epochs": 2, "limit_train_batches": 3}, 3),
    ],
)
def test_the_first_epoch_of_fine_tuning_only_validates(limits, steps, tmp_path):
    seen = rates(tmp_path, "finetune", **limits)
    assert seen[:steps] == [0.0] * steps
    assert seen[steps:] == [1e-3] * (len(seen) - steps)
    assert len(seen) > steps


def test_pretraining_warms_up_and_cools_down(tmp_path):
    seen = rates(tmp_path, "pretrain", max_epochs=2)
    assert seen == pytest.approx([1e-5, 5.05e-4, 1e-3, 8.535534e-4, 5e-4, 1.464466e-4])
    endless = rates(tmp_path, "pretrain", max_epochs=-1, max_time={"seconds": 1})
    assert endless[2:] == [1e-3] * (len(endless) - 2)


def test_fine_tuning_on_many_classes_sees_all_columns_of_a_code(tmp_path, monkeypatch):
    alone = []
    view = graph_pfn.module.view

    def watch(x, y, edges, member, *rest):
        letter = member.codes.bincount().argmin()
        alone.append(int((member.codes == letter).nonzero()[0]) if (member.codes == letter).sum() == 1 else None)
        return view(x, y, edges, member, *rest)

    monkeypatch.setattr(graph_pfn.module, "view", watch)
    y = torch.arange(120) % 12
    torch.save(Data(x=torch.randn(120, 4), edge_index=torch.randint(120, (2, 200)), y=y), tmp_path / "g.pt")
    data = NodeClassification(str(tmp_path / "g.pt"), train_fraction=0.5, steps_per_epoch=12)
    trainer(tmp_path, max_epochs=1, limit_val_batches=0).fit(GraphPFN(sizes=SMALL), data)
    assert len(set(alone)) > 3


def test_a_module_outside_a_run_has_the_weights_it_names():
    assert torch.equal(answers(GraphPFN(init_from="tiny")), answers(GraphPFN.from_pretrained("tiny")))
    assert not torch.equal(answers(GraphPFN()), answers(GraphPFN.from_pretrained("tiny")))


def answers(module: GraphPFN) -> torch.Tensor:
    x = torch.arange(40.0).view(10, 4).sin()
    return module.predict_nodes(x, None, torch.arange(10) % 2, torch.arange(10) < 6, 2)


def test_accumulated_batches_are_episodes_of_their_own(tmp_path, monkeypatch):
    seen = []
    episode = graph_pfn.module.episode
    monkeypatch.setattr(
        graph_pfn.module, "episode", lambda *args: (seen.append(args[2]), episode(*args))[1], raising=True
    )
    data = NodeClassification(labels_per_class=2, steps_per_epoch=5)
    run = trainer(tmp_path, max_epochs=2, accumulate_grad_batches=2, limit_val_batches=0)
    run.fit(GraphPFN(sizes=SMALL), data)
    assert run.global_step == 6
    assert len(set(seen)) == len(seen) == 10


@pytest.mark.parametrize("classes", [3, 13])
def test_the_shipped_model_finds_planted_classes(classes):
    """Above ten classes only with error-correcting output codes."""
    rng = np.random.default_rng(0)
    y = np.arange(20 * classes) % classes
    edges, _ = clean_edges(planted(rng, y), len(y))
    x = torch.from_numpy(rng.standard_normal((len(y), 4)).astype(np.float32))
    context = torch.arange(len(y)) < 4 * classes
    output = GraphPFN.from_pretrained("tiny").predict_nodes(
        x, torch.from_numpy(edges), torch.from_numpy(y), context, classes
    )
    assert output.shape == (16 * classes, classes)
    torch.testing.assert_close(output.sum(1), torch.ones(len(output)))
    assert (output.argmax(1) == torch.from_numpy(y)[~context]).float().mean() > 0.8


def test_checkpoints_load_with_nothing_but_the_file(tmp_path):
    module = GraphPFN(sizes=SMALL, recipe="pretrain", warmup=1)
    run = trainer(tmp_path, max_epochs=1, limit_val_batches=0)
    run.fit(module, prior())
    run.save_checkpoint(tmp_path / "m.ckpt")
    loaded = GraphPFN.load_from_checkpoint(tmp_path / "m.ckpt", weights_only=True)
    assert torch.equal(weights(loaded), weights(module))
    started = GraphPFN(sizes=SMALL)
    started.configure_model()
    started.load_weights_from(str(tmp_path / "m.ckpt"))
    assert torch.equal(weights(started), weights(module))


def test_pretrained_folders(tmp_path):
    module = GraphPFN(sizes=SMALL)
    module.save_pretrained(tmp_path / "p")
    assert json.loads((tmp_path / "p" / "config.json").read_text())["format"] == 1
    assert torch.equal(weights(GraphPFN.from_pretrained(tmp_path / "p")), weights(module))


def test_real_graphs_are_watched_and_drawn(tmp_path):
    module = GraphPFN(sizes=SMALL, recipe="pretrain", warmup=1, ensemble={"members": 1})
    data = prior(real=[{"source": "karate", "labels_per_class": 2, "val_fraction": 0.5}])
    run = trainer(tmp_path, max_epochs=2, limit_train_batches=1, callbacks=[GraphEvaluation(graphs=5)])
    run.fit(module, data)
    assert 0 <= run.callback_metrics["real/karate"] <= 1
    assert len(run.callbacks[0].curves["karate"]) == 2
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {"in_context.png", "prior_statistics.png"}


def test_published_files_load(tmp_path):
    source = GraphPFN("limix16m", TINY_LIMIX)
    source.configure_model()
    for parameter in source.network.parameters():
        torch.nn.init.normal_(parameter)
    adapters = {id(p) for p in source.adapter_parameters()} - {
        id(p) for p in source.network.feature_decoder.parameters()
    }
    named = dict(source.network.named_parameters())
    save_file(
        {k.replace(".base.", ".", 1): v.data for k, v in named.items() if id(v) not in adapters},
        tmp_path / "b.safetensors",
    )
    prefixed = {"tfm.module." + k: v.data for k, v in named.items() if id(v) in adapters}
    torch.save({"state_dict": prefixed}, tmp_path / "a.pt")
    module = GraphPFN("limix16m", TINY_LIMIX)
    module.configure_model()
    module.load_weights_from([str(tmp_path / "b.safetensors"), str(tmp_path / "a.pt")])
    assert torch.equal(weights(module), weights(source))
    with pytest.raises(ValueError, match=r"lacks \d+ tensors of the backbone"):
        module.load_weights_from(str(tmp_path / "a.pt"))
    save_file({"strange": torch.zeros(1)}, tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=r"does not fit layout limix16m: strange \[1\], not one of its tensors"):
        module.load_weights_from(str(tmp_path / "c.safetensors"))
    wider = GraphPFN("limix16m", TINY_LIMIX | {"hidden": 64})
    wider.configure_model()
    with pytest.raises(ValueError, match=r"limix16m: \S+ \[32\], here \[64\]: see sizes"):
        wider.load_weights_from(str(tmp_path / "b.safetensors"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        module.load_weights_from("nowhere.safetensors")


def test_what_cannot_be_is_refused_in_one_line():
    with pytest.raises(ValueError, match="no size widht; it has width"):
        GraphPFN(sizes={"widht": 3})
    with pytest.raises(ValueError, match="the ensemble has no setting member"):
        GraphPFN(ensemble={"member": 3})
    with pytest.raises(ValueError, match="edge_rate 1.5"):
        GraphPFN(edge_rate=1.5)
    module = GraphPFN(sizes=SMALL, memory_gb=1e-5)
    x, y, context = torch.randn(50, 3), torch.zeros(50).long(), torch.arange(50) < 5
    with pytest.raises(ValueError, match=r"on 50 nodes, 3 columns and 0 edges needs about 0\.1 GB, above memory_gb"):
        module.predict_nodes(x, None, y, context, 2)
    with pytest.raises(ValueError, match="no node is labelled"):
        module.predict_nodes(x, None, y, torch.zeros(50, dtype=torch.bool), 2)
    with pytest.raises(ValueError, match="every node is labelled"):
        module.predict_nodes(x, None, y, torch.ones(50, dtype=torch.bool), 2)
    with pytest.raises(ValueError, match="no feature columns: set structure"):
        module.predict_nodes(x[:, :0], None, y, context, 2)


def test_a_labelled_query_node_does_not_see_its_own_label():
    torch.manual_seed(0)
    module = GraphPFN(sizes=SMALL, ensemble={"members": 2})
    x, context = torch.randn(20, 3), torch.arange(20) < 6
    y = torch.arange(20) % 2
    changed = torch.where(context, y, 1 - y)
    edges = torch.tensor([[0, 7, 7, 8], [7, 0, 8, 7]])
    one, two = (module.predict_nodes(x, edges, t, context, 2) for t in (y, changed))
    assert torch.equal(one, two)


def test_the_shipped_model_is_small_and_has_learnt_something():
    folder = Path(graph_pfn.__file__).parent / "tiny"
    assert sum(p.stat().st_size for p in folder.iterdir()) < 4e6
    made_with = yaml.safe_load((folder / "pretraining.yaml").read_text())
    assert made_with == yaml.safe_load(configs.find("graph_pfn/prior_tiny").read_text())
    module = GraphPFN.from_pretrained("tiny")
    module.hparams["recipe"] = "pretrain"
    data = GraphPrior(settings={"regression": 0.0}, batch_size=8, seed=99)
    with torch.no_grad():
        losses = module._pretrain([data.sample(i) for i in range(16)])
    assert losses["gain"] < -0.25
    karate = NodeClassification(labels_per_class=2)
    karate.setup()
    nodes, context = karate.nodes, karate.parts["train"]
    output = module.predict_nodes(nodes.x, nodes.edge_index, nodes.y, context, 4)
    assert (output.argmax(1) == nodes.y[~context]).float().mean() > 0.6
