"""A loaded checkpoint: registration with transformers, attention over rows."""
