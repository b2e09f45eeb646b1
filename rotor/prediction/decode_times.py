"""Predicted times of a decode step, and bytes, of every candidate: domain, group size, and whether keys and values
share one latent. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..format.columns import Columns
from ..format.layout import (
    AttentionShape,
    Candidate,
    Domain,
    GroupLayout,
    LayerLayout,
    folds_keys,
    kv_bytes_per_token,
)
from ..kernels.dispatch import MAX_REBUILT_WIDTH, MAX_WIDTH
from .cost import DecodeStep, decode_seconds, uncompressed_decode_seconds
from .devices import Device

SCENARIOS: tuple[tuple[str, float, int], ...] = (
    ("1/2 at 16 bits", 1 / 2, 16),
    ("1/4 at 16 bits", 1 / 4, 16),
    ("1/2 at 4 bits", 1 / 2, 4),
    ("1/2 at 2 bits", 1 / 2, 2),
)
"""Name, share of the columns of keys and values together that is kept in every group, and their bits."""

TURNED = 16
"""Positions of the blocks within which keys are turned, where a candidate says that they are."""

COLUMNS = 16
"""What counts of columns are multiples of: whole words at any width."""


@dataclass(frozen=True)
class DecodeTime:
    """One candidate in one of SCENARIOS.

    seconds: of attention in all layers in a decode step, predicted. share: of the uncompressed model's.
    """

    candidate: str
    scenario: str
    kv_bytes_per_token: int
    seconds: float
    share: float


def decode_times(
    shape: AttentionShape, rotary: bool, key_norm: bool, device: Device, step: DecodeStep
) -> list[DecodeTime]:
    """Every domain and group size that the model can have, with latents of their own for keys and values and, where
    both are linear in the hidden state, with joint ones, in each of SCENARIOS; all layers alike. Before RoPE also joint
    ones of keys that are turned within blocks of TURNED positions.

    What is too wide for the kernels is left out.
    """
    base = uncompressed_decode_seconds(shape, device, step)
    domains: Sequence[Domain] = ("post", "pre") if rotary else ("none",)
    found = []
    kinds: list[tuple[Domain, bool, int]] = [(domain, False, 1) for domain in domains]
    kinds += [(domain, True, 1) for domain in domains if folds_keys(domain, key_norm)]
    kinds += [("pre", True, TURNED)] if rotary else []
    for domain, joint, rope_block in kinds:
        folded = folds_keys(domain, key_norm, rope_block)
        for size in group_sizes(shape):
            candidate = Candidate(domain, size, joint, rope_block)
            for name, share, bits in SCENARIOS:
                layout = uniform_layout(shape, candidate, folded, share, bits)
                if not _served(layout):
                    continue
                layouts = [layout] * shape.num_layers
                seconds = decode_seconds(layouts, shape, device, step)
                stored = kv_bytes_per_token(layouts, step.element_bytes)
                label = f"{domain}-{size}" + (", joint" if joint else "")
                label += f", turned in {rope_block}" if rope_block > 1 else ""
                found.append(DecodeTime(label, name, stored, seconds, seconds / base))
    return found


def group_sizes(shape: AttentionShape) -> list[int]:
    """KV heads that can share a latent: every divisor of their number, ascending."""
    return [size for size in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % size == 0]


def largest_fast_group(
    shape: AttentionShape, kind: Candidate, folded_keys: bool, bits: int, device: Device, step: DecodeStep
) -> int:
    """Find the most KV heads that can share a latent without making attention slower, as predicted.

    A decode step with half of the columns, at `bits`, is predicted to take no longer than the uncompressed model's, and
    the kernels have bodies for its latents. 1 where no size is.

    Args:
        kind: of any group size.
    """
    base = uncompressed_decode_seconds(shape, device, step)
    for size in reversed(group_sizes(shape)):
        layout = uniform_layout(shape, kind._replace(group_size=size), folded_keys, 1 / 2, bits)
        if _served(layout) and decode_seconds([layout] * shape.num_layers, shape, device, step) <= base:
            return size
    return 1


def uniform_layout(
    shape: AttentionShape, candidate: Candidate, folded_keys: bool, share: float, bits: int
) -> LayerLayout:
    """A layer whose groups all keep a share of their columns, of keys and values alike, at one width.

    A joint latent has as many as two latents have together, so that it takes as many bytes.
    """
    domain, size, joint, rope_block = candidate
    kept = share * size * shape.head_dim * (2 if joint else 1)
    count = max(COLUMNS, round(kept / COLUMNS) * COLUMNS)
    columns = Columns(**{f"n{bits}": count})
    groups = []
    for first in range(0, shape.num_kv_heads, size):
        heads = tuple(range(first, first + size))
        if bits == 16 and not joint:
            groups.append(GroupLayout(heads, count, count))
        else:
            groups.append(GroupLayout.coded(heads, columns, None if joint else columns))
    return LayerLayout(domain, folded_keys, tuple(groups), rope_block)


def _served(layout: LayerLayout) -> bool:
    """Whether the kernels have bodies for such wide latents."""
    keys = MAX_REBUILT_WIDTH if layout.domain == "pre" else MAX_WIDTH
    return all(group.qk_rank <= keys and group.v_rank <= MAX_WIDTH for group in layout.groups)
