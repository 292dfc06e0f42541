"""Closed-loop ANN-to-SNN fine-tuning: conversion, simulation, losses, and the two LightningModules."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # names: __init__.pyi
