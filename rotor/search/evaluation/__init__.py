"""Accuracy against the uncompressed model: splits, scores, metrics."""
