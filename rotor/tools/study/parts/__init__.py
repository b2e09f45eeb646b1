"""The parts of a study that come with rotor: each is a class in a file of its name."""

PARTS = ("curves", "methods", "match", "long", "context")
"""Parts in the order in which a study measures them."""
