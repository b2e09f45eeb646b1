"""Bits of columns where decode time is what is saved: against enumeration, against bytes, on devices of one limit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rotor.allocation.bits import BitsPath
from rotor.allocation.plan import RankPlan
from rotor.allocation.priced_bits import PricedBitsPath, lower_hull
from rotor.codes.allocation import priced_counts
from rotor.codes.layer import MEASURED, LayerCodes, SideCodes
from rotor.errors import RecipeError
from rotor.format.layout import AttentionShape, Domain, GroupLayout, LayerLayout
from rotor.prediction.cost import DecodeStep, decode_seconds, uncompressed_decode_seconds
from rotor.prediction.devices import Device
from rotor.prediction.objective import Objective
from rotor.search.costs import RunCosts

SHAPE = AttentionShape(num_layers=2, num_heads=16, num_kv_heads=4, head_dim=32, hidden_size=512)
BITS = (0, 2, 4, 8)
ALIKE = Device(bandwidth_bytes_per_s=1e12, matmul_flops_per_s=200e12, memory_bytes=1e11, source="measured")
ARITHMETIC_FREE = replace(ALIKE, matmul_flops_per_s=1e20, l2_bytes_per_s=1e20, vector_flops_per_s=1e20)
ARITHMETIC_DEAR = replace(ALIKE, matmul_flops_per_s=1e11)
KINDS: dict[str, tuple[Domain, bool, int, int]] = {
    "pre-4": ("pre", True, 4, 1),
    "pre-1": ("pre", True, 1, 1),
    "post-4": ("post", False, 4, 1),
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
        size = KINDS[key][2]
        groups, columns = SHAPE.num_kv_heads // size, size * SHAPE.head_dim
        sides = [side(groups, columns, share / groups, 10 * seed + 2 * place + i) for i, share in enumerate((loss, 1))]
        found[key] = LayerCodes(*sides)
    return found


def path_of(
    layers: list[dict[str, LayerCodes]], device: Device, weight: float = 1.0, step: DecodeStep | None = None
) -> PricedBitsPath:
    objective = Objective(weight, device, SHAPE, step or DecodeStep(32768, 8))
    costs = RunCosts(objective, KINDS, len(layers))
    return PricedBitsPath(layers, SHAPE, BITS, 2, costs.parts, costs.group)


def predicted_loss(layers: list[dict[str, LayerCodes]], plan: RankPlan) -> float:
    assert plan.columns is not None
    total = 0.0
    for layer, key, groups in zip(layers, plan.choice, plan.columns, strict=True):
        for group, pair in enumerate(groups):
            for own, columns in zip((layer[key].qk, layer[key].vo), pair, strict=True):
                _, code = own.code(group, columns)
                losses = own.losses(group, MEASURED)[:, own.order(group)]
                index = torch.tensor([MEASURED.index(bits) for bits in code.bits.tolist()])
                total += float(losses[index, torch.arange(len(index))].sum())
    return total


def cost_of(losses: Tensor, counts: tuple[int, ...], costs: tuple[float, ...]) -> tuple[float, float]:
    """(loss, cost) of columns by width, widest first; `losses` and `costs` have 0 bits last."""
    places = [i for i, count in enumerate(counts) for _ in range(count)]
    places += [len(counts)] * (losses.shape[1] - len(places))
    order = losses[-1].argsort(descending=True, stable=True)
    return float(losses[places, order].sum()), sum(n * cost for n, cost in zip(counts, costs, strict=False))


@pytest.mark.parametrize("costs", [(8.0, 4.0, 2.0, 0.0), (3.0, 2.5, 2.2, 0.0), (1.0, 1.0, 1.0, 0.0)])
def test_columns_at_a_price_are_the_best_of_all(costs: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.rand(8, generator=generator, dtype=torch.float64)
    losses = torch.stack([weight * share for share in (0.001, 0.02, 0.2, 1.0)])  # at 8, 4, 2 and 0 bits
    prices = np.logspace(-5, 1, 25)
    found = priced_counts(losses, (8, 4, 2, 0), costs, prices, word_bits=8)
    possible = [
        counts
        for counts in itertools.product(range(9), range(0, 9, 2), range(0, 9, 4))
        if 0 < sum(counts) <= losses.shape[1]
    ]
    for price, counts in zip(prices, found.tolist(), strict=True):
        values = {own: cost_of(losses, own, costs) for own in possible}
        best = min(loss + price * cost for loss, cost in values.values())
        loss, cost = values[tuple(counts)]
        assert loss + price * cost == pytest.approx(best, rel=1e-12)


def test_where_the_columns_fill_no_word_there_are_none() -> None:
    losses = torch.tensor([[0.1] * 3, [1.0] * 3], dtype=torch.float64)
    assert priced_counts(losses, (2, 0), (1.0, 0.0), np.array([0.1, 1.0])).tolist() == [[0], [0]]


def test_the_lower_hull() -> None:
    cost, loss = np.array([3.0, 1.0, 2.0, 2.5, 1.0, 4.0]), np.array([0.0, 4.0, 1.5, 1.6, 5.0, 0.0])
    assert lower_hull(cost, loss) == [1, 2, 0]


def test_for_bytes_alone_every_plan_is_the_best_of_its_bytes() -> None:
    """The losses of BitsPath, which is exact, but for what lies between two prices."""
    layers = [layer_of({"pre-4": 1.0, "pre-1": 1.1}, seed) for seed in range(2)]
    exact = BitsPath(layers, SHAPE, BITS, 2)
    steps = path_of(layers, ALIKE, weight=0.0).steps()
    assert len(steps) > 50
    for plan in steps[:: len(steps) // 20]:
        assert plan.columns is not None
        words = sum(own.row_bytes() for layer in plan.columns for pair in layer for own in pair) // 4
        assert predicted_loss(layers, plan) == pytest.approx(float(exact._path.loss[words]), rel=0.01)
        assert plan.saving == pytest.approx(plan.stored)


def test_a_device_on_which_arithmetic_is_free_saves_bytes_and_another_columns() -> None:
    """Keys before RoPE lose a tenth: they are taken where rebuilding them costs nothing, and not where it is dear."""
    layers = [layer_of({"pre-4": 0.1, "post-4": 1.0}, seed) for seed in range(2)]
    for plan in path_of(layers, ARITHMETIC_FREE).steps()[1:-1:10]:
        assert set(plan.choice) == {"pre-4"}
    dear = path_of(layers, ARITHMETIC_DEAR)
    bytes_alone = BitsPath(layers, SHAPE, BITS, 2)
    plan = dear.at_compression(0.9)
    assert plan is not None
    assert set(plan.choice) == {"post-4"}
    other = bytes_alone.at_compression(0.9)
    assert other is not None
    assert set(other.choice) == {"pre-4"}
    # What counts there are columns: the same bytes go to fewer and wider ones.
    columns = sum(qk.rank + v.rank for layer in plan.columns or [] for qk, v in layer)
    alone = BitsPath([{"post-4": layer["post-4"]} for layer in layers], SHAPE, BITS, 2).at_compression(plan.stored)
    assert alone is not None
    assert columns < sum(qk.rank + v.rank for layer in alone.columns or [] for qk, v in layer)


def test_what_a_plan_saves_is_predicted_decode_time() -> None:
    layers = [layer_of({"pre-4": 1.0, "post-4": 2.0}, seed) for seed in range(2)]
    step = DecodeStep(32768, 8)
    for plan in path_of(layers, ALIKE, step=step).steps()[::25]:
        layouts = [
            LayerLayout(domain, folded, (GroupLayout.coded((0, 1, 2, 3), *pair),))
            for key, (pair,) in zip(plan.choice, plan.columns or [], strict=True)
            for domain, folded, *_ in [KINDS[key]]
        ]
        seconds = decode_seconds(layouts, SHAPE, ALIKE, step)
        assert plan.saving == pytest.approx(1 - seconds / uncompressed_decode_seconds(SHAPE, ALIKE, step))


def test_on_a_real_device_no_other_plan_of_its_kind_is_faster_at_its_loss() -> None:
    """Against bytes alone at the shares of bytes where these choose: never slower by prediction at equal loss."""
    layers = [layer_of({"pre-4": 1.0, "pre-1": 1.3, "post-4": 2.0}, seed) for seed in range(2)]
    priced = path_of(layers, ALIKE)
    costs = RunCosts(Objective(1.0, ALIKE, SHAPE, DecodeStep(32768, 8)), KINDS, 2)
    losses = np.array([predicted_loss(layers, plan) for plan in priced.steps()])
    savings = np.array([plan.saving for plan in priced.steps()])
    for key in KINDS:
        alone = BitsPath([{key: layer[key]} for layer in layers], SHAPE, BITS, 2)
        for plan in alone.steps()[::40]:
            cost = sum(costs.group(key, *pair) for groups in plan.columns or [] for pair in groups)
            as_good = savings[losses <= predicted_loss(layers, plan) * (1 + 1e-9)]
            if len(as_good):
                assert as_good.max() >= 1 - cost - 0.01


def test_groups_without_a_whole_word_are_refused() -> None:
    layers = [layer_of({"pre-1": 1.0}, 0)]
    narrow = [
        {
            "pre-1": LayerCodes(
                *(
                    SideCodes(
                        s.weight[:, :8], s.variance[:, :8], *(t[..., :8] for t in (s.mean, s.scale, s.distortion))
                    )
                    for s in (layer["pre-1"].qk, layer["pre-1"].vo)
                )
            )
        }
        for layer in layers
    ]
    costs = RunCosts(Objective(1.0, ALIKE, SHAPE, DecodeStep(1024, 1)), KINDS, 1)
    with pytest.raises(RecipeError, match="fills no whole word"):
        PricedBitsPath(narrow, SHAPE, (0, 2), 2, costs.parts, costs.group)
