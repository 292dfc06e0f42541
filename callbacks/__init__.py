"""What accompanies a run and changes no loss. Names are imported when first used."""

import lazy_loader

_NAMES = {  # file: names in it
    "compile": ["Compile"],
    "ema": ["EMA"],
    "expert_load": ["ExpertLoad"],
    "federated_pictures": ["FederatedPictures"],
    "graph_evaluation": ["GraphEvaluation"],
    "predictions": ["PredictionWriter"],
    "rollouts": ["Rollouts"],
    "run_folder": ["MetricsCsv", "RunFolder"],
    "speech_samples": ["SpeechSamples"],
    "spiking_report": ["SpikingReport"],
    "video_grid": ["VideoGrid"],
}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs=_NAMES)
