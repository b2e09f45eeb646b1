"""Measurements of speed, and kernels compiled ahead of time."""
