"""Keys in the forms in which they are stored: before RoPE, rotated within blocks of positions, or after it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..bases.moments import JOINT, named_form
from ..format.layout import AttentionShape, KeyForm, pre_rope
from ..kernels.rotary import Rotation, rotate, within_blocks
from ..models.projections import keys_before_rope
from ..runtime.families import Family


class StoredKeys:
    """Makes what moments are of from what attention sees, or gradients by the former from gradients by the latter."""

    def __init__(self, model: Any, family: Family, shape: AttentionShape) -> None:
        self.model, self.family, self.shape = model, family, shape

    def of(self, names: Iterable[str], layer: int, seq_len: int, seen: dict[str, Tensor]) -> dict[str, Tensor]:
        """What moments, other than those of queries and outputs, are of.

        Args:
            names: `value`, or what `stored_name` gives.
            seen: `key_post`, `value` and, where there is RoPE, `key_pre`, as `observed_attention` reports them.
        Returns:
            Each [tokens, num_kv_heads, head_dim]; of joint ones twice as wide: of each head the key, then the value.
        """
        by_token = {name: self._by_token(name, tensor) for name, tensor in seen.items() if name != "query"}
        found = {}
        for name in names:
            form = named_form(name)
            if form is None:
                found[name] = by_token["value"]
                continue
            keys = by_token["key_post"]
            if form.rope_block is not None:
                keys = self._within_blocks(layer, by_token["key_pre"], seq_len, form)
            joint = name.startswith(JOINT)
            found[name] = torch.cat([keys, by_token["value"].to(keys.dtype)], dim=-1) if joint else keys
        return found

    def _by_token(self, name: str, tensor: Tensor) -> Tensor:
        """As a module has it -> [tokens, num_kv_heads, head_dim]."""
        if name == "key_pre":
            return keys_before_rope(self.family, tensor, self.shape).unflatten(-1, (-1, self.shape.head_dim))
        return tensor.transpose(1, 2).flatten(0, 1)

    def _within_blocks(self, layer: int, keys: Tensor, seq_len: int, form: KeyForm) -> Tensor:
        """Keys of whole rows of seq_len tokens, slow planes rotated within blocks; float32 or wider if any is."""
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
