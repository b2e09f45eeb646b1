"""Bits of channels where decode time is what is saved: against enumeration, against bytes, on devices of one limit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from rotor.allocation.bits import BitsPath, layer_curves
from rotor.allocation.plan import GroupCost, RankPlan
from rotor.allocation.priced_bits import PricedBitsPath, lower_hull
from rotor.codes.layer import MEASURED, LayerCodes, SideCodes, channels_bytes
from rotor.format.layout import POST_ROPE, AttentionShape, Candidate, pre_rope
from rotor.prediction.cost import DecodeStep
from rotor.prediction.devices import Device
from rotor.prediction.objective import Objective

SHAPE = AttentionShape(num_layers=2, num_heads=16, num_kv_heads=4, head_dim=32, hidden_size=512, rotary_dim=32)
BITS = (0, 4, 8)
ALIKE = Device(bandwidth_bytes_per_s=1e12, source="measured")
KINDS = {
    "pre-4": Candidate(pre_rope(SHAPE), 4),
    "pre-1": Candidate(pre_rope(SHAPE), 1),
    "post-4": Candidate(POST_ROPE, 4),
}


def side(groups: int, columns: int, size: float, seed: int) -> SideCodes:
    """Columns whose loss falls fast, each bit of which leaves a quarter of it."""
    generator = torch.Generator().manual_seed(seed)
    decay = torch.exp(-torch.arange(columns, dtype=torch.float64) / (columns / 8))
    variance = size * decay * (0.5 + torch.rand(groups, columns, generator=generator, dtype=torch.float64))
    distortion = torch.tensor([4.0**-bits for bits in MEASURED], dtype=torch.float64)
    nothing = torch.zeros(len(MEASURED), groups, columns, dtype=torch.float64)
    spread = distortion[:, None, None].expand_as(nothing).clone()
    return SideCodes(torch.ones(groups, columns, dtype=torch.float64), variance, nothing, nothing + 1, spread)


def layer_of(keys: dict[str, float], seed: int) -> dict[str, LayerCodes]:
    """Candidates by what their keys lose; values lose 1, spread over the groups."""
    found = {}
    for place, (key, loss) in enumerate(keys.items()):
        size = KINDS[key].group_size
        groups, columns = SHAPE.num_kv_heads // size, size * SHAPE.head_dim
        sides = [side(groups, columns, share / groups, 10 * seed + 2 * place + i) for i, share in enumerate((loss, 1))]
        found[key] = LayerCodes(*sides)
    return found


def path_of(
    layers: list[dict[str, LayerCodes]], device: Device, weight: float = 1.0, step: DecodeStep | None = None
) -> PricedBitsPath:
    objective = Objective(weight, device, SHAPE, step or DecodeStep(32768, 8))
    return PricedBitsPath(layers, SHAPE, BITS, 2, cost_of(objective, len(layers)))


def cost_of(objective: Objective, layers: int) -> GroupCost:
    return lambda key, keys, values: objective.group_cost(KINDS[key], keys, values) / layers


def predicted_loss(layers: list[dict[str, LayerCodes]], plan: RankPlan) -> float:
    assert plan.channels is not None
    total = 0.0
    for layer, key, groups in zip(layers, plan.choice, plan.channels, strict=True):
        for group, pair in enumerate(groups):
            for own, channels in zip((layer[key].qk, layer[key].vo), pair, strict=True):
                _, code = own.code(group, channels)
                losses = own.losses(group, MEASURED)[:, own.order(group)]
                index = torch.tensor([MEASURED.index(bits) for bits in code.bits.tolist()])
                total += float(losses[index, torch.arange(len(index))].sum())
    return total


def test_the_lower_hull() -> None:
    cost, loss = np.array([3.0, 1.0, 2.0, 2.5, 1.0, 4.0]), np.array([0.0, 4.0, 1.5, 1.6, 5.0, 0.0])
    assert lower_hull(cost, loss) == [1, 2, 0]


def test_for_bytes_alone_every_plan_is_the_best_of_its_bytes() -> None:
    """The losses of BitsPath, which is exact, but for what lies between two prices."""
    layers = [layer_of({"pre-4": 1.0, "pre-1": 1.1}, seed) for seed in range(2)]
    exact = BitsPath(layers, SHAPE, BITS, 2)
    steps = path_of(layers, ALIKE, weight=0.0).steps()
    assert len(steps) > 20
    for plan in steps[:: len(steps) // 20]:
        units = channels_bytes(plan.channels or []) // 8
        assert predicted_loss(layers, plan) == pytest.approx(float(exact._path.loss[units]), rel=0.02)
        assert plan.saving == pytest.approx(plan.stored)


def test_groups_rows_begin_where_sectors_do() -> None:
    """Of several groups, 16 or 32 bytes; one plane more costs nothing where there is room."""
    layers = [layer_of({"pre-1": 1.0}, seed) for seed in range(2)]
    for plan in BitsPath(layers, SHAPE, BITS, 2).steps():
        for channels in (own for layer in plan.channels or [] for pair in layer for own in pair):
            assert channels.width in {32, *range(64, 257, 64)}


def test_lighter_plans_have_a_plane_less_in_one_layer() -> None:
    layers = [layer_of({"pre-4": 1.0}, seed) for seed in range(2)]
    path = BitsPath(layers, SHAPE, BITS, 2)
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
    assert BitsPath(layers, SHAPE, BITS, 2, uniform_rows=True).lighter(plan) == []


def test_a_device_on_which_instructions_are_free_saves_bytes_and_another_rebuilds_nothing() -> None:
    """Keys before RoPE lose a third: they are taken where rebuilding them costs nothing, and not where it is dear."""
    layers = [layer_of({"pre-4": 0.3, "post-4": 1.0}, seed) for seed in range(2)]
    for plan in path_of(layers, ALIKE).steps()[1:-1:5]:
        assert set(plan.choice) == {"pre-4"}
    slow = replace(ALIKE, sms=1, clock_hz=1e9)
    assert set(path_of(layers, slow).steps()[-1].choice) == {"post-4"}
    other = BitsPath(layers, SHAPE, BITS, 2).at_compression(0.9)
    assert other is not None
    assert set(other.choice) == {"pre-4"}


def test_at_a_price_every_group_takes_the_best_of_all_rows() -> None:
    layers = [layer_of({"pre-4": 1.0}, seed) for seed in range(2)]
    priced = path_of(layers, ALIKE)
    cost = cost_of(Objective(1.0, ALIKE, SHAPE, DecodeStep(32768, 8)), 2)
    keys, values = layer_curves(layers[0]["pre-4"], BITS)
    for plan in priced.steps()[:: len(priced.steps()) // 8]:
        (chosen,) = (plan.channels or [])[0]
        best = min(
            keys.loss[p] + values.loss[q] + plan.parameter * cost("pre-4", keys.channels(p), values.channels(q))
            for p, q in itertools.product(range(1, len(keys.loss)), range(1, len(values.loss)))
        )
        assert chosen[1] is not None
        at = keys.loss[chosen[0].width // 16] + values.loss[chosen[1].width // 16]
        assert at + plan.parameter * cost("pre-4", *chosen) == pytest.approx(best, rel=1e-9)
        assert plan.saving == pytest.approx(1 - sum(cost("pre-4", *own) for (own,) in plan.channels or []), rel=1e-4)
