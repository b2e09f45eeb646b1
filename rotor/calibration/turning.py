"""Keys in the forms in which they are stored: before RoPE, rotated within blocks of positions, or after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..bases.moments import JOINT, named_form
from ..format.layout import AttentionShape, KeyForm, pre_rope
from ..kernels.rotary import Rotation, rotate, within_blocks
from ..runtime.families import Family


class StoredKeys:
    """Makes keys of what they are before RoPE, or gradients by the ones of gradients by the others."""

    def __init__(self, model: Any, family: Family, shape: AttentionShape) -> None:
        self.model, self.family, self.shape = model, family, shape

    def __call__(self, layer: int, keys: Tensor, seq_len: int, form: KeyForm) -> Tensor:
        """[tokens, num_kv_heads, head_dim] of whole rows of seq_len tokens -> the same, float32 or wider.

        Args:
            form: with a rope_block.
        """
        if form.fast_planes == pre_rope(self.shape).fast_planes:
            return keys
        dtype = torch.promote_types(keys.dtype, torch.float32)
        positions = torch.arange(seq_len, device=keys.device)
        cos, sin = within_blocks(self._rotation(layer, form, keys.device, dtype), positions, form)
        rotated = rotate(keys.to(dtype).unflatten(0, (-1, seq_len)), cos[:, None], sin[:, None])
        return rotated.flatten(0, 1)

    def _rotation(self, layer: int, form: KeyForm, device: torch.device, dtype: torch.dtype) -> Rotation:
        """Of the first block."""
        assert self.family.rotary is not None
        kind = self.family.rotary_type(self.model.config, layer)
        rotary = self.model.get_submodule(self.family.rotary)
        places = torch.arange(form.rope_block or 1, device=device)
        like = torch.empty(0, device=device, dtype=dtype)
        cos, sin = rotary(like, places[None], *(() if kind is None else (kind,)))
        return cos[0].to(device), sin[0].to(device)

    def of(
        self, name: str, layer: int, seq_len: int, before: Tensor | None, after: Tensor | None, value: Tensor | None
    ) -> Tensor:
        """What a moment, other than those of queries and outputs, is of.

        Args:
            name: `value`, or what `stored_name` gives.
            before, after: keys before and after RoPE, [tokens, num_kv_heads, head_dim]. value: likewise.
        Returns:
            [tokens, num_kv_heads, head_dim], or of joint ones twice that: of each head the key, then the value.
        """
        form = named_form(name)
        if form is None:
            assert value is not None
            return value
        if form.rope_block is None:
            assert after is not None
            keys = after
        else:
            assert before is not None
            keys = self(layer, before, seq_len, form)
        if not name.startswith(JOINT):
            return keys
        assert value is not None
        return torch.cat([keys, value.to(keys.dtype)], dim=-1)


def reads_before_rope(names: frozenset[str]) -> bool:
    """Whether any of these moments is of keys that are not rotated by their whole position."""
    forms = (named_form(name) for name in names)
    return any(form is not None and form.rope_block is not None for form in forms)
