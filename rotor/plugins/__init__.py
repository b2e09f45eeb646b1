"""Engines that serve compressed checkpoints: each a package of its own, above `rotor.format` and `rotor.runtime`."""
