"""Equation 1 on spectra computed by hand, rounding, and the path of rank plans."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from rotor.calibration.allocation.fisher import FisherPath
from rotor.calibration.allocation.plan import RankInputs, Spectra, round_rank
from rotor.calibration.allocation.removal_rate import RemovalRatePath, ranks_from_shares, tail_shares
from rotor.calibration.allocation.uniform import UniformPath
from rotor.calibration.allocation.water_filling import LARGEST_GAP, WaterFillingPath, _wide_gap, interpolated
from rotor.calibration.form import group_sizes
from rotor.checkpoint.layout import AttentionShape, HeadSizes
from rotor.checkpoint.sizes import compression, uncompressed_kv_bytes_of_sequence, uncompressed_kv_bytes_per_token
from rotor.errors import CheckpointError


def rank(values: list[float], rate: float) -> int:
    return ranks_from_shares(tail_shares(torch.tensor([values], dtype=torch.float64)), rate)[0]


@pytest.mark.parametrize(
    ("values", "rate", "expected"),
    [
        ([4, 3, 2, 1], 0.0, 4),  # nothing may go
        ([4, 3, 2, 1], 0.0999, 4),
        ([4, 3, 2, 1], 0.1, 3),  # the tail [1] is exactly a tenth of 10
        ([4, 3, 2, 1], 0.2999, 3),
        ([4, 3, 2, 1], 0.3, 2),  # [2, 1]
        ([4, 3, 2, 1], 0.6, 1),  # [3, 2, 1]
        ([4, 3, 2, 1], 0.999999, 1),  # the first column always stays
        ([1, 1, 1, 1], 0.25, 3),  # ties: as many as fit
        ([1, 1, 1, 1], 0.49, 3),
        ([1, 1, 1, 1], 0.5, 2),
        ([0.1] * 10, 0.3, 7),  # 0.1 + 0.1 + 0.1 is not 0.3 in floating point; the rank is
        ([5, 2, 0, 0], 0.0, 2),  # what carries nothing is removed even at 0
        ([0, 0, 0], 0.5, 1),  # a head without any energy keeps one column
        ([7], 0.9, 1),
    ],
)
def test_equation_1_by_hand(values: list[float], rate: float, expected: int) -> None:
    assert rank(values, rate) == expected


@pytest.mark.parametrize(
    ("exact", "multiple", "columns", "expected"),
    [(1, 16, 64, 16), (16, 16, 64, 16), (17, 16, 64, 32), (60, 16, 62, 62)],
)
def test_rounding_goes_up_but_not_beyond_the_columns(exact: int, multiple: int, columns: int, expected: int) -> None:
    assert round_rank(exact, multiple, columns) == expected


SHAPE = AttentionShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=64)


def spectra(layers: int = 2) -> list[Spectra]:
    generator = torch.Generator().manual_seed(3)

    def values() -> torch.Tensor:
        return torch.rand(2, 64, dtype=torch.float64, generator=generator).pow(3).sort(descending=True).values

    return [Spectra(values(), values()) for _ in range(layers)]


def path() -> RemovalRatePath:
    return RemovalRatePath(RankInputs(spectra(), SHAPE, 16))


def test_steps_are_all_distinct_plans_in_order() -> None:
    steps = path().plans()
    stored = [plan.stored for plan in steps]
    assert stored == sorted(stored)
    assert len({str(plan.ranks) for plan in steps}) == len(steps)
    assert steps[0].stored == 0.0
    assert steps[-1].ranks == [[(16, 16)] * 2] * 2
    # Between two steps nothing new appears: a rate halfway gives one of them.
    for low, high in pairwise(steps):
        assert path().plan((low.parameter + high.parameter) / 2).ranks == low.ranks


def test_compression_is_found_at_the_lowest_rate_that_reaches_it_and_counts_what_it_says() -> None:
    ranks = path()
    for target in (0.1, 0.33, 0.5, 0.75):
        plan = ranks.at_compression(target)
        assert plan is not None
        assert plan.stored >= target
        below = [p for p in ranks.plans() if p.parameter < plan.parameter]
        assert all(p.stored < target for p in below)
    assert ranks.at_compression(0.76) is None  # 16 of 64 columns always stay
    plan = path().plan(0.05)
    kept = sum(qk + v for layer in plan.unrounded for qk, v in layer)
    assert plan.planned == pytest.approx(1 - kept / (2 * 2 * 2 * 64))
    assert plan.stored == compression(plan.ranks, SHAPE)
    assert plan.stored <= plan.planned
    assert all(r % 16 == 0 for layer in plan.ranks for pair in layer for r in pair)


def constant(qk: float, vo: float) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    return [(16, qk)], [(16, vo)]


def water_filling(multiple_of: int = 16, sensitivities=((3.0, 1.0), (0.5, 2.0))) -> WaterFillingPath:
    probed = [constant(*pair) for pair in sensitivities]
    return WaterFillingPath(RankInputs(spectra(), SHAPE, multiple_of, sensitivities=probed))


def predicted_loss(ranks: list[list[tuple[int, int]]], sensitivities=((3.0, 1.0), (0.5, 2.0))) -> float:
    total = 0.0
    for values, layer_ranks, pair in zip(spectra(), ranks, sensitivities, strict=True):
        for group, (qk, v) in enumerate(layer_ranks):
            total += pair[0] * float(values.qk[group, qk:].square().sum())
            total += pair[1] * float(values.vo[group, v:].square().sum())
    return total


def test_water_filling_gives_the_least_loss_at_its_cost() -> None:
    """Against brute force: no plan of at most the same cost has a lower predicted loss."""
    choices = (16, 32, 48, 64)
    curves = []
    for values, pair in zip(spectra(), ((3.0, 1.0), (0.5, 2.0)), strict=True):
        for group in range(2):
            for side, sensitivity in ((values.qk[group], pair[0]), (values.vo[group], pair[1])):
                curves.append({r: sensitivity * float(side[r:].square().sum()) for r in choices})
    best = {0: 0.0}  # dynamic programme over the sum of ranks
    for curve in curves:
        following: dict[int, float] = {}
        for used, loss in best.items():
            for r, extra in curve.items():
                following[used + r] = min(following.get(used + r, float("inf")), loss + extra)
        best = following
    steps = water_filling().plans()
    assert len(steps) > 5
    for plan in steps:
        used = sum(qk + v for layer in plan.ranks for qk, v in layer)
        least = min(loss for total, loss in best.items() if total <= used)
        assert predicted_loss(plan.ranks) == pytest.approx(least, abs=1e-9)
        assert plan.unrounded == plan.ranks


def test_uniform_ranks_are_alike_and_fishers_in_proportion_to_the_information() -> None:
    steps = UniformPath(RankInputs(spectra(), SHAPE, 16)).plans()
    assert [plan.stored for plan in steps] == [0.0, 0.25, 0.5, 0.75]
    assert steps[2].ranks == [[(32, 32)] * 2] * 2
    information = [
        (torch.tensor([4.0, 2.0]), torch.tensor([1.0, 1.0])),
        (torch.tensor([2.0, 1.0]), torch.tensor([4.0, 4.0])),
    ]
    steps = FisherPath(RankInputs(spectra(), SHAPE, 1, gradients=lambda: information)).plans()
    assert steps[0].ranks == [[(64, 64)] * 2] * 2
    quarter = next(plan for plan in steps if plan.unrounded[0][0][0] == 32)
    assert quarter.unrounded == [[(32, 8), (16, 8)], [(16, 32), (8, 32)]]
    assert [plan.stored for plan in steps] == sorted({plan.stored for plan in steps})


def test_water_filling_leaves_no_plan_out_that_one_change_gives() -> None:
    """Two ranks whose gains differ by less than a step of the sweep still fall one after the other."""
    values = torch.tensor([[1.0, 1.0, 0.5, 0.5]], dtype=torch.float64)
    shape = AttentionShape(num_layers=2, num_heads=1, num_kv_heads=1, head_dim=4, hidden_size=4)
    probed = [constant(1.0, 1.0001), constant(1.0002, 1.0003)]
    both = [Spectra(values, values)] * 2
    path = WaterFillingPath(RankInputs(both, shape, 2, sensitivities=probed))
    assert [plan.stored for plan in path.plans()] == [0.0, 0.125, 0.25, 0.375, 0.5]


def test_sensitivity_between_probes_is_a_power_of_the_rank() -> None:
    ranks = torch.tensor([4, 8, 16, 32, 64])
    values = interpolated([(8, 4.0), (32, 1.0)], ranks)
    assert values.tolist() == pytest.approx([4.0, 4.0, 2.0, 1.0, 1.0])
    assert interpolated([], ranks).tolist() == [0.0] * 5


TWO_SIZES = AttentionShape(
    2, 8, 4, 16, 64, rotary_dim=16, windows=(10, None), heads=(HeadSizes(4, 16, 16), HeadSizes(2, 48, 48))
)
"""A layer with a window, 4 heads of 16; one without, 2 heads of 48."""


def test_bytes_and_heads_of_layers_of_two_sizes() -> None:
    assert TWO_SIZES.heads_in_words == "4 KV heads of 16 (1 layer) or 2 KV heads of 48 (1 layer)"
    assert TWO_SIZES.layer(1) == AttentionShape(2, 8, 2, 48, 64, rotary_dim=48, windows=(10, None))
    assert group_sizes(TWO_SIZES) == [1, 2]
    assert uncompressed_kv_bytes_per_token(TWO_SIZES, 2) == 2 * 2 * (64 + 96)
    assert uncompressed_kv_bytes_of_sequence(TWO_SIZES, 2, 100) == 2 * 2 * (10 * 64 + 100 * 96)
    kept = [[(8, 8)] * 4, [(48, 48)] * 2]
    assert compression(kept, TWO_SIZES) == pytest.approx(1 - (64 + 192) / (128 + 192))
    assert compression(kept, TWO_SIZES, 100) == pytest.approx(1 - (640 + 19200) / (1280 + 19200))
    with pytest.raises(CheckpointError, match="1 sizes of heads of 2 layers"):
        AttentionShape(2, 8, 4, 16, 64, heads=(HeadSizes(4, 16, 0),))
    with pytest.raises(CheckpointError, match="8 query heads are not a multiple of 3"):
        AttentionShape(2, 8, 4, 16, 64, heads=(HeadSizes(4, 16, 0), HeadSizes(3, 16, 0)))


def test_every_rule_gives_each_layer_ranks_of_its_own_columns() -> None:
    """Groups of two heads: two of 32 columns, and one of 96."""
    generator = torch.Generator().manual_seed(5)

    def values(groups: int, columns: int) -> torch.Tensor:
        return torch.rand(groups, columns, dtype=torch.float64, generator=generator).sort(descending=True).values

    layers = [Spectra(values(n, columns), values(n, columns)) for n, columns in ((2, 32), (1, 96))]
    information = [(torch.rand(n, generator=generator), torch.rand(n, generator=generator)) for n in (2, 1)]
    sensitivity = ([(16, 1.0)], [(16, 2.0)])
    inputs = RankInputs(layers, TWO_SIZES, 16, lambda: information, [sensitivity] * 2, 100)
    for rule in (RemovalRatePath, FisherPath, UniformPath, WaterFillingPath):
        plans = rule(inputs).plans()
        assert plans[0].ranks == [[(32, 32)] * 2, [(96, 96)]]
        assert plans[0].stored == 0
        for plan in plans:
            assert [len(layer) for layer in plan.ranks] == [2, 1]
            for layer, columns in zip(plan.ranks, (32, 96), strict=True):
                assert all(1 <= rank <= columns for pair in layer for rank in pair)
        assert plans[-1].stored > 0.5


def test_plans_are_looked_for_between_two_that_differ_in_several_ranks() -> None:
    """One rank less is the next plan; two may be taken one after the other, whichever sides they are of."""
    first = SimpleNamespace(stored=0.1, ranks=[[(8, 8)], [(8, 8)]])
    for ranks, between in (
        ([[(8, 4)], [(8, 8)]], False),
        ([[(4, 4)], [(8, 8)]], True),
        ([[(8, 4)], [(8, 4)]], True),
        ([[(4, 8)], [(4, 8)]], True),
    ):
        assert _wide_gap(first, SimpleNamespace(stored=0.2, ranks=ranks)) is between
    near = SimpleNamespace(stored=0.1 + LARGEST_GAP / 2, ranks=[[(4, 4)], [(4, 4)]])
    assert not _wide_gap(first, near)
