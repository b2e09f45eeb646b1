"""The parts of a study that rotor has: each is a class in a file of its name."""

ON_REQUEST = ("methods", "memory", "shift", "evict", "budgets", "combine", "gear", "tiers", "zdc", "overhead", "tasks")
"""Parts that take longest, and only run when they are named."""

PARTS = ("curves", "tokens", "pruning", "ablation", *ON_REQUEST)
"""In the order in which a study measures them."""

DEFAULT = ("curves", "ablation")
"""Without a request: one calibration a recipe. Each of the others calibrates many times, or searches many targets."""

ALL = "all"
"""Stands for all of PARTS but ON_REQUEST."""
