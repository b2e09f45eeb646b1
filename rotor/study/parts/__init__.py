"""The parts of a study that rotor has: each is a class in a file of its name."""

PARTS = ("curves", "ablation", "methods", "tasks")
"""In the order in which a study measures them."""

DEFAULT = ("curves", "ablation")
"""Without a request: one calibration a recipe."""
