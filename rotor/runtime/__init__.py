"""A loaded checkpoint: registration with transformers, attention over the packed cache."""
