"""From a run and a goal to a compressed checkpoint."""
