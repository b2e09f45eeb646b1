"""Count the bytes of a cache of transformers."""

from __future__ import annotations

from typing import Any


def cache_bytes_per_token(cache: Any) -> float:
    """Count bytes per token that a layer keeps: one with a sliding window drops the older ones.

    Args:
        cache: of layers [batch_size, heads, tokens, width], holding at least one token.
    """
    return sum(
        (layer.keys.nbytes + layer.values.nbytes) / (layer.keys.shape[0] * layer.keys.shape[2])
        for layer in cache.layers
    )
