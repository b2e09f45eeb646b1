"""Keys as domain `block` stores them: turned by RoPE within blocks of positions (see runtime.rope_blocks)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.reference import rotate
from ..runtime.families import Family
from ..runtime.rope_blocks import within_blocks
from ..runtime.rotary_table import RotaryTable


class KeyTurning:
    """Turns keys before RoPE, or gradients by them, which turn alike.

    Args:
        rope_block: positions of a block; 1 leaves keys as they are.
    """

    def __init__(self, model: Any, family: Family, rope_block: int) -> None:
        self.model, self.family, self.rope_block = model, family, rope_block
        self._tables: dict[str | None, RotaryTable] = {}

    def __call__(self, layer: int, keys: Tensor, seq_len: int) -> Tensor:
        """[tokens, num_kv_heads, head_dim] of whole rows of seq_len tokens -> the same, float32 or wider."""
        if self.rope_block == 1:
            return keys
        kind = self.family.rotary_type(self.model.config, layer)
        if kind not in self._tables:
            assert self.family.rotary is not None
            self._tables[kind] = RotaryTable(self.model.get_submodule(self.family.rotary), kind)
        dtype = torch.promote_types(keys.dtype, torch.float32)
        rows = self._tables[kind](0, self.rope_block, self.rope_block, keys.device, dtype)
        cos, sin = within_blocks(rows, torch.arange(seq_len, device=keys.device), self.rope_block)
        turned = rotate(keys.to(dtype).unflatten(0, (-1, seq_len)), cos[:, None], sin[:, None])
        return turned.flatten(0, 1)
