"""Layers of each form with random tensors, for tests that need no checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from rotor.format.channels import Channels, Latent, Numbers
from rotor.format.layout import POST_ROPE, AttentionShape, GroupLayout, KeyForm, LayerLayout
from rotor.format.tensors import layer_tensors

SHAPE = AttentionShape(1, 8, 4, 16, 64, rotary_dim=16)
NORMED = AttentionShape(1, 8, 4, 16, 64, rotary_dim=16, key_norm=True)
PARTIAL = AttentionShape(1, 8, 4, 16, 64, rotary_dim=8)
NO_ROPE = AttentionShape(1, 8, 4, 16, 64)

WIDE, NARROW = Channels(1, 0, 2, 5), Channels(n8=3, n4=4)


def layout_of(size: int, latents: list[tuple[Latent, Latent | None]], form: KeyForm = POST_ROPE) -> LayerLayout:
    """Groups of `size` KV heads in reverse order, of these key and value latents."""
    heads = list(reversed(range(size * len(latents))))
    groups = (GroupLayout(tuple(heads[i * size : (i + 1) * size]), *own) for i, own in enumerate(latents))
    return LayerLayout(tuple(groups), *form)


LAYERS: dict[str, tuple[LayerLayout, AttentionShape]] = {
    "joint, T 8, F 3": (layout_of(2, [(WIDE, None), (NARROW, None)], KeyForm(8, 3)), SHAPE),
    "joint, T 64, F 0": (layout_of(2, [(WIDE, None)] * 2, KeyForm(64, 0)), SHAPE),
    "joint, pre": (layout_of(1, [(WIDE, None)] * 2 + [(NARROW, None)] * 2, KeyForm(64, 8)), SHAPE),
    "joint, pre, normed": (layout_of(4, [(WIDE, None)], KeyForm(64, 8)), NORMED),
    "apart, post": (layout_of(1, [(WIDE, NARROW), (WIDE, NARROW), (NARROW, NARROW), (NARROW, WIDE)]), SHAPE),
    "apart, T 16, F 2, partial": (layout_of(2, [(WIDE, NARROW)] * 2, KeyForm(16, 2)), PARTIAL),
    "joint, no RoPE": (layout_of(2, [(WIDE, None), (NARROW, None)]), NO_ROPE),
    "numbers, post": (layout_of(1, [(Numbers(n), Numbers(m)) for n, m in ((12, 8), (8, 8), (8, 4), (4, 2))]), SHAPE),
    "numbers, pre": (layout_of(2, [(Numbers(24), Numbers(16))] * 2, KeyForm(64, 8)), SHAPE),
    "numbers, no RoPE": (layout_of(4, [(Numbers(30), Numbers(20))]), NO_ROPE),
}
"""By name: a layout and the sizes of its model, of every form, both kinds of rows, one to four groups."""


def random_tensors(
    layout: LayerLayout, shape: AttentionShape, biases: str = "", dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Of a layer, such that codes use their range; without norms."""
    generator = torch.Generator().manual_seed(0)
    specs = layer_tensors(layout, shape, biases)
    return {name: torch.randn(spec.shape, generator=generator, dtype=dtype) / 4 for name, spec in specs.items()}


def rotation_table(length: int, rotary_dim: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin [length, rotary_dim], float64, times the attention factor of some scaled RoPEs."""
    frequency = 100.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(rotary_dim, 1))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * torch.cat([frequency, frequency])
    return factor * angle.cos(), factor * angle.sin()
