"""Folding bases into projections: a layer, a shard, or a whole model in memory."""
