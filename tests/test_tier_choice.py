"""Choosing tiers: what the grid predicts, what layers repeat, and the choice at export."""

from __future__ import annotations

import json
from itertools import product
from math import expm1
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import calibrated, in_memory
from test_cli import rotor as command

from rotor.errors import UsageError
from rotor.export.export import export
from rotor.policies import Tiers, find_policy
from rotor.search.tier_choice import RatioRegression, Tried, within
from rotor.search.tier_grid import LEVELS, RATIOS, SHARES, TierGrid, TierMeter, alone, row_of, tiers_of

LAYERS = 3
ROW_BYTES = ((64, 32), (64, 32), (32, 32))


def grid() -> TierGrid:
    """Costs that rise with p and fall with g, each layer and side by its own factor."""
    factors = np.random.default_rng(0).uniform(0.5, 2.0, (LAYERS, 2, 1, 1))
    shape = (1 - np.array(SHARES))[:, None] * np.array(RATIOS) ** 2
    return TierGrid(factors * shape, ROW_BYTES)


def by_loops(found: TierGrid, policy: Tiers) -> tuple[float, float]:
    """What is predicted of a policy, and the share that it removes, a layer and a side at a time."""

    def cost(layer: int, side: int, share: float, ratio: float) -> float:
        column = [np.interp(share, [*SHARES, 1.0], [*found.costs[layer, side, :, r], 0.0]) for r in range(len(RATIOS))]
        return float(np.interp(ratio, [0.0, *RATIOS], [0.0, *column]))

    total, removed = 0.0, 0.0
    ratios = [(policy.qk_important, policy.qk_unimportant), (policy.v_important, policy.v_unimportant)]
    for layer, (side, (important, unimportant)) in product(range(LAYERS), enumerate(ratios)):
        share = policy.layer_important[layer]
        total += cost(layer, side, 0.0, important)
        total += cost(layer, side, share, unimportant) - cost(layer, side, share, important)
        removed += ROW_BYTES[layer][side] * (share * important + (1 - share) * unimportant)
    return total, removed / sum(map(sum, ROW_BYTES))


def test_candidates_are_what_the_grid_predicts_within_the_texts_constraints() -> None:
    found = grid()
    every = found.candidates()
    assert len(every.rows) == len(every.costs) == len(every.removed)
    chosen = np.random.default_rng(1).integers(len(every.rows), size=20)
    for index in chosen:
        policy = tiers_of(every.rows[index], LAYERS)
        assert row_of(policy) == pytest.approx(every.rows[index])
        expected = by_loops(found, policy)
        assert (found.predicted(policy), found.removed(policy)) == pytest.approx(expected)
        assert (every.costs[index], every.removed[index]) == pytest.approx(expected)
    first, last, qk_i, qk_u, v_i, v_u = every.rows.T
    assert (first <= last).all()
    assert (qk_i <= qk_u).all()
    assert (v_i <= v_u).all()
    ordered = every.ordered().rows
    assert (ordered[:, 2] >= ordered[:, 4]).all()
    assert (ordered[:, 3] >= ordered[:, 5]).all()
    tiered = every.tiered().rows
    assert (tiered[:, 0] < tiered[:, 1]).all()
    assert (tiered[:, 2] < tiered[:, 3]).all()
    alike, one = every.tiered(alike=True).rows, every.one_ratio().rows
    assert (alike[:, 0] == alike[:, 1]).all()
    assert (one[:, 2] == one[:, 3]).all()
    assert len(one) == len(LEVELS) ** 2 * len(LEVELS) * (len(LEVELS) + 1) / 2


def test_the_best_removes_most_at_a_cost() -> None:
    every = grid().candidates()
    limit = float(np.median(every.costs))
    policy = every.best(limit)
    assert policy is not None
    assert grid().removed(policy) == pytest.approx(every.removed[every.costs <= limit].max())
    assert every.best(-1.0) is None


def test_choices_within_a_limit_are_measured_until_one_is_near() -> None:
    found, limit, measured = grid(), 0.3, list[Tried]()

    def measure(policy: Tiers) -> Tried:
        measured.append(Tried(policy, expm1(1.7 * found.predicted(policy))))  # more than is predicted
        return measured[-1]

    fitting = within(found.candidates(), limit, measure)
    assert measured[0].degradation > limit
    assert fitting == [one for one in measured if one.degradation <= limit]
    assert fitting
    assert max(one.degradation for one in fitting) > 0.5 * limit
    assert len(measured) == len({one.policy for one in measured})


def test_the_regression_gives_back_what_is_regular_and_keeps_the_constraints() -> None:
    limits = [0.02, 0.05, 0.1, 0.2, 0.4]
    rows = [[0.1, 0.3, 0.1 + 0.1 * i, 0.2 + 0.1 * i, 0.05 * i, 0.1 * i] for i in range(5)]
    model = RatioRegression(limits, [tiers_of(row, LAYERS) for row in rows])
    found = row_of(model.predict(0.1))
    assert found == pytest.approx(rows[2], abs=0.1)
    for limit in (0.001, 0.03, 5.0):
        first, last, qk_i, qk_u, v_i, v_u = row_of(model.predict(limit))
        assert first <= last
        assert qk_i <= qk_u
        assert v_i <= v_u


def test_what_a_layer_alone_costs_is_of_that_layer(tiny, tmp_path) -> None:
    run = calibrated(tiny("llama"), tmp_path / "run", "post", 1)
    network = in_memory(run)
    bases = run.bases()
    chosen = bases.select([next(iter(bases[0]))] * len(bases))
    network.compress(chosen, [[(16, 16)] * len(layer.qk.encode) for layer in chosen])
    rows = torch.randint(1, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    meter = TierMeter(network, rows)
    assert meter.cost(Tiers(important=1.0), 8) == pytest.approx(0.0, abs=1e-6)
    assert meter.degradation(alone(2, 1, "qk", 1.0, 0.8)) == pytest.approx(0.0, abs=1e-6)
    values = [abs(meter.cost(alone(2, 1, "v", share, 0.9), 8)) for share in (0.9, 0.0)]
    assert 0 < values[0] < values[1]
    assert meter.row_bytes == [(2 * 4 * 16, 2 * 4 * 16)] * 2


def test_an_export_chooses_ratios_and_stores_them(tiny, tmp_path, capsys) -> None:
    run = calibrated(tiny("llama"), tmp_path / "run", "post", 1)
    code, said, error = command(
        capsys, "export", run.folder, "-o", tmp_path / "out", "--compression", "0.2", "--set", "cache.tiers=0.5",
        "--set", "cache.tiers_tokens=128",
    )  # fmt: skip
    assert code == 0, error
    stored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["cache"]
    assert stored["method"] == "tiers"
    assert len(stored["layer_important"]) == 2
    assert "Cache policy tiers" in said
    report = json.loads((tmp_path / "out" / "rotor.json").read_text())
    assert report["cache"]["policy"] == stored
    assert report["cache"]["kv_bytes_per_token"]["32768"] < report["kv_bytes_per_token"]["after"]


def test_what_an_export_with_ratios_cannot_do_is_said(tiny, tmp_path) -> None:
    run = calibrated(tiny("llama"), tmp_path / "run", "post", 1)

    def refused(text: str, *more: str, **options: object) -> None:
        with pytest.raises(UsageError, match=text):
            export(run.folder, tmp_path / "out", overrides=["cache.tiers=0.1", *more], **options)  # type: ignore[arg-type]

    refused("for ranks that are known, got --accuracy", accuracy=0.9)
    refused("for ranks that are known, got --cache h2o-50", compression=0.2, cache="h2o-50")
    refused("asks for ratios that are measured", compression=0.2, measure=False)
    assert not (tmp_path / "out").exists()


def test_bundled_tiers_follow_the_text_where_equation_6_contradicts_it() -> None:
    policy = find_policy("zdc")
    assert isinstance(policy, Tiers)
    assert policy.qk_unimportant > policy.qk_important
    assert policy.qk_unimportant >= policy.v_unimportant
    header = (Path(__file__).parents[1] / "recipes" / "cache" / "tiers-50.yaml").read_text()
    assert "equation 6" in header


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_limit_that_is_none_is_refused(value: str, capsys, tmp_path) -> None:
    code, _, error = command(
        capsys, "calibrate", tmp_path, "-o", tmp_path / "run", "--recipe", "fdc", "--set", f"cache.tiers={value}"
    )
    assert code == 2
    assert "cache.tiers" in error
