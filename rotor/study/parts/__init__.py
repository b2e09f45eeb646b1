"""The parts of a study that rotor has: each is a class in a file of its name."""

PARTS = ("curves", "methods", "match")
"""In the order in which a study measures them."""
