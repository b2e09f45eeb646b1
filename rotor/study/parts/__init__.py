"""The parts of a study that rotor has: each is a class in a file of its name."""

PARTS = (
    *("curves", "sources", "tokens", "degradation", "pruning", "ablation", "front"),
    *("peers", "quantise", "evict", "budgets", "combine", "tiers", "tasks"),
)
"""In the order in which a study measures them."""

ON_REQUEST = ("peers", "quantise", "evict", "budgets", "combine", "tiers", "tasks")
"""Parts that take longest, and only run when they are named."""

DEFAULT = ("curves", "ablation")
"""Without a request: one calibration a recipe. Each of the others calibrates many times, or searches many targets."""

ALL = "all"
"""Stands for all of PARTS that can run, but ON_REQUEST."""
