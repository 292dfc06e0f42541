"""What accompanies a run and changes no loss. Names are imported when first used."""

from importlib import import_module

_HOME = {
    "Compile": "compile",
    "EMA": "ema",
    "ExpertLoad": "expert_load",
    "FederatedPictures": "federated_pictures",
    "GraphEvaluation": "graph_evaluation",
    "MetricsCsv": "run_folder",
    "PredictionWriter": "predictions",
    "Rollouts": "rollouts",
    "RunFolder": "run_folder",
    "SpeechSamples": "speech_samples",
    "SpikingReport": "spiking_report",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
