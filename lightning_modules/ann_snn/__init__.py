"""Closed-loop ANN-to-SNN fine-tuning: conversion, simulation, losses, and the two LightningModules."""

from importlib import import_module

_HOME = {
    "AnnSnn": "module",
    "ImageClassifier": "classifier",
    "CifarResNet": "networks",
    "SmallResNet": "networks",
    "IFNode": "neurons",
    "SpikingNetwork": "conversion",
    "convert": "conversion",
    "prepare": "conversion",
    "rebuild": "conversion",
    "simulate": "conversion",
    "teacher_features": "conversion",
    "closed_loop_loss": "losses",
    "layer_weights": "losses",
    "linear_cka": "losses",
    "measure_energy": "energy",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
