"""Bits of a model by bytes."""

from __future__ import annotations

import torch

from rotor.calibration.allocation.bits import BitsPath
from rotor.calibration.allocation.plan import Plan
from rotor.calibration.codes.layer import LayerCodes, channels_bytes
from rotor.calibration.codes.side import FITTED_BITS, SideCodes
from rotor.checkpoint.layout import AttentionShape


def side(groups: int, columns: int, size: float, seed: int) -> SideCodes:
    """Columns whose loss falls fast, each bit of which leaves a quarter of it."""
    generator = torch.Generator().manual_seed(seed)
    decay = torch.exp(-torch.arange(columns, dtype=torch.float64) / (columns / 8))
    variance = size * decay * (0.5 + torch.rand(groups, columns, generator=generator, dtype=torch.float64))
    distortion = torch.tensor([4.0**-bits for bits in FITTED_BITS], dtype=torch.float64)
    nothing = torch.zeros(len(FITTED_BITS), groups, columns, dtype=torch.float64)
    spread = distortion[:, None, None].expand_as(nothing).clone()
    weight = torch.ones(groups, columns, dtype=torch.float64)
    return SideCodes(weight, variance, nothing, nothing + 1, spread, 0 * weight)


def predicted_loss(layers: list[LayerCodes], plan: Plan) -> float:
    assert plan.channels is not None
    total = 0.0
    for layer, groups in zip(layers, plan.channels, strict=True):
        for group, pair in enumerate(groups):
            for own, channels in zip(layer.sides, pair, strict=True):
                _, code = own.code(group, channels)
                losses = own.losses(group, FITTED_BITS)[:, own.order(group)]
                index = torch.tensor([FITTED_BITS.index(bits) for bits in code.bits.tolist()])
                total += float(losses[index, torch.arange(len(index))].sum())
    return total


def layer_codes(groups: int, columns: int, size: float, seed: int) -> LayerCodes:
    return LayerCodes((side(groups, columns, size, seed), side(groups, columns, size, seed + 10)))


WIDE = AttentionShape(num_layers=2, num_heads=16, num_kv_heads=4, head_dim=32, hidden_size=512, rotary_dim=32)


def test_groups_rows_begin_where_sectors_do() -> None:
    """Of several groups, 16 or 32 bytes; one unit more costs nothing where there is room."""
    layers = [layer_codes(4, 32, 1.0, seed) for seed in range(2)]
    for plan in BitsPath(layers, WIDE, (0, 4, 8), 2).plans():
        for channels in (own for layer in plan.channels or [] for pair in layer for own in pair):
            assert channels.width in {32, *range(64, 257, 64)}


def test_lighter_plans_have_a_unit_less_in_one_layer() -> None:
    layers = [layer_codes(1, 128, 1.0, seed) for seed in range(2)]
    path = BitsPath(layers, WIDE, (0, 4, 8), 2)
    plan = path.at_compression(0.9)
    assert plan is not None
    lighter = path.lighter(plan)
    assert len(lighter) == 2
    before = [channels_bytes([layer]) for layer in plan.channels or []]
    for other in lighter:
        less = [a - channels_bytes([layer]) for a, layer in zip(before, other.channels or [], strict=True)]
        assert sorted(less) == [0, 8]
    losses = [predicted_loss(layers, other) for other in lighter]
    assert losses == sorted(losses)
