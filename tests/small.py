"""Shipped configs with less data, for tests that run every method."""

from pathlib import Path

import yaml

import configs

EPISODES = {"tasks": ["reach-v3"], "episodes": 3}
SMALL = {
    "RobotDemonstrations": EPISODES | {"batch_size": 8},
    "ExpertVideos": EPISODES | {"test_episodes": 2, "batch_size": 2, "eval_batch_size": 2},
    "SpeechText": {"made": {"utterances": 100, "words": [2, 2], "unseen_utterances": 20}},
    "GraphPrior": {"graphs_per_epoch": 16, "validation_graphs": 4},
    "FederatedImages": {"train_size": 300},
}
SMALL_CALLBACKS = {"Rollouts": {"episodes": 2, "max_steps": 20, "latency_calls": 1}}


def smaller(name: str, home: Path) -> Path:
    """The config with less data, which are kept in `home`."""
    content = yaml.safe_load(configs.find(name).read_text())
    data = content["data"]
    kind = data["class_path"].split(".")[-1]
    data["init_args"] |= SMALL.get(kind, {})
    if kind in ("RobotDemonstrations", "ExpertVideos", "SpeechText"):
        data["init_args"]["data_dir"] = str(home / "data")
    if Path(data["init_args"].get("source", ".")).suffix not in ("", "."):
        from tests.focal_policy.toys import recording

        home.mkdir(exist_ok=True)
        data["init_args"]["source"] = str(recording(home))
    for callback in content["trainer"]["callbacks"]:
        callback.setdefault("init_args", {}).update(SMALL_CALLBACKS.get(callback["class_path"].split(".")[-1], {}))
    file = home / name / f"{name.replace('/', '_')}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(content))
    return file
