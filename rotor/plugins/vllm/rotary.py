"""Cosines and sines by position, in float32, made once for all layers that share a rotary embedding of vLLM's."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...runtime.rope_blocks import Rotation, block_starts

_tables: WeakKeyDictionary[nn.Module, dict[int, Rotation]] = WeakKeyDictionary()


def rotation_table(rotary: nn.Module, length: int, rope_block: int = 1) -> Rotation:
    """Compute cos and sin, each [length, rotary_dim], both halves alike; vLLM's own are rounded to the model's dtype.

    Args:
        length: positions that there are, max_model_len. Where frequencies depend on it (longrope), vLLM has decided for
            one set of them, and so does this.
        rope_block: each row is of the first of so many positions: what keys that are turned within blocks are turned by
            when they are read.
    """
    tables = _tables.setdefault(rotary, {})
    known = tables.get(rope_block)
    if known is None or len(known[0]) < length:
        if rope_block > 1:
            known = block_starts(rotation_table(rotary, length), rope_block, 0, length)
        else:
            cos, sin = _both(rotary).float()[:length].chunk(2, dim=-1)
            known = torch.cat([cos, cos], -1).contiguous(), torch.cat([sin, sin], -1).contiguous()
        tables[rope_block] = known
    return known[0][:length], known[1][:length]


def _both(rotary: Any) -> Tensor:
    """[positions, rotary_dim]: cosines, then sines, of half the dimensions each."""
    arguments: tuple[Any, ...] = ()
    if hasattr(rotary, "use_long_rope"):
        which = "long" if rotary.use_long_rope else "short"
        length = "max_position_embeddings" if rotary.use_long_rope else "original_max_position_embeddings"
        arguments = tuple(getattr(rotary, name) for name in (length, f"{which}_factor", f"{which}_mscale"))
    return rotary._compute_cos_sin_cache(*arguments)
