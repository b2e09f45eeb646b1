"""Calibration turns a model and a recipe into a run folder: tokens, capture, moments, bases."""
