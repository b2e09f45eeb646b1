"""Predicted times of a decode step, and bytes, of every candidate (domain and group size); nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ..format.columns import Columns
from ..format.layout import AttentionShape, Domain, GroupLayout, LayerLayout, folds_keys, kv_bytes_per_token
from ..prediction.cost import DecodeStep, decode_seconds, uncompressed_decode_seconds
from ..prediction.devices import Device

SCENARIOS: tuple[tuple[str, float, int], ...] = (
    ("1/2 at 16 bits", 1 / 2, 16),
    ("1/4 at 16 bits", 1 / 4, 16),
    ("1/2 at 4 bits", 1 / 2, 4),
    ("1/2 at 2 bits", 1 / 2, 2),
)
"""Name, share of the columns that is kept in every group, and their bits."""

COLUMNS = 16
"""What counts of columns are multiples of: whole words at any width."""


@dataclass(frozen=True)
class DecodeTime:
    """One candidate in one of SCENARIOS; `pre-8 joint` has one latent for keys and values, which only codes have.

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
    """Every domain and group size that the model can have, in each of SCENARIOS that it allows; all layers alike."""
    base = uncompressed_decode_seconds(shape, device, step)
    domains: Sequence[Domain] = ("post", "pre") if rotary else ("none",)
    sizes = [size for size in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % size == 0]
    found = []
    for domain in domains:
        folded = folds_keys(domain, key_norm)
        for size, joint in product(sizes, (False, True) if folded else (False,)):
            for name, share, bits in SCENARIOS:
                if joint and bits == 16:
                    continue
                layouts = [uniform_layout(shape, domain, folded, size, share, bits, joint)] * shape.num_layers
                seconds = decode_seconds(layouts, shape, device, step)
                stored = kv_bytes_per_token(layouts, step.element_bytes)
                key = f"{domain}-{size}{' joint' if joint else ''}"
                found.append(DecodeTime(key, name, stored, seconds, seconds / base))
    return found


def uniform_layout(
    shape: AttentionShape,
    domain: Domain,
    folded_keys: bool,
    group_size: int,
    share: float,
    bits: int,
    joint: bool = False,
) -> LayerLayout:
    """A layer whose groups all keep a share of their columns, of keys and values alike or `joint`, at one width."""
    count = max(COLUMNS, round((1 + joint) * share * group_size * shape.head_dim / COLUMNS) * COLUMNS)
    groups = []
    for first in range(0, shape.num_kv_heads, group_size):
        heads = tuple(range(first, first + group_size))
        if bits == 16:
            groups.append(GroupLayout(heads, count, count))
        else:
            columns = Columns(**{f"n{bits}": count})
            groups.append(GroupLayout.coded(heads, columns, None if joint else columns))
    return LayerLayout(domain, folded_keys, tuple(groups))
