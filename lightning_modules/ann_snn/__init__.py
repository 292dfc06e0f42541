"""Closed-loop ANN-to-SNN fine-tuning: conversion, simulation, losses, and the two LightningModules."""

import lazy_loader

_NAMES = {  # file: names in it
    "classifier": ["ImageClassifier"],
    "conversion": ["SpikingNetwork", "convert", "prepare", "rebuild", "simulate", "teacher_features"],
    "energy": ["measure_energy"],
    "losses": ["closed_loop_loss", "layer_weights", "linear_cka"],
    "module": ["AnnSnn"],
    "networks": ["CifarResNet", "SmallResNet"],
    "neurons": ["IFNode"],
}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs=_NAMES)
