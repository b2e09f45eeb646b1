"""The part `tiers` of a study: what it measures, its tables and its picture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import FAST_EVALUATION, SHORT_TEXT
from test_tier_choice import grid

from rotor.policies import Tiers
from rotor.search import tier_grid
from rotor.study import cache_bench, tiers_codes, tiers_part, tiers_plot
from rotor.study import tiers_tables as tables
from rotor.study.store import StudyStore
from rotor.study.study import study
from rotor.study.tiers_codes import ALIKE, PLAN, TIERS, coded_labels
from rotor.study.tiers_part import labels, one_ratio
from rotor.study.tiers_tables import by_distance, tiers_of_recipes, tiers_tables


def test_one_ratio_removes_as_much_at_least_predicted_cost() -> None:
    found = grid()
    for removed in (0.2, 0.5):
        qk, v = one_ratio(found, removed)
        policy = Tiers(layer_important=(0.0,) * 3, qk_unimportant=qk, v_unimportant=v)
        assert found.removed(policy) == pytest.approx(removed)
        sizes = np.array(found.row_bytes).sum(0)
        for other in (v - 0.05, v + 0.05):
            if 0 <= other < 1 and 0 <= (rest := (removed * sizes.sum() - other * sizes[1]) / sizes[0]) < 0.96:
                changed = Tiers(layer_important=(0.0,) * 3, qk_unimportant=rest, v_unimportant=other)
                assert found.predicted(policy) <= found.predicted(changed) + 1e-9


def test_one_ratio_stays_where_costs_were_measured() -> None:
    measured = grid()
    nothing = replace(measured, costs=0 * measured.costs)
    for found, removed in ((measured, 0.8), (nothing, 0.84)):
        assert max(one_ratio(found, removed)) <= tier_grid.RATIOS[-1] + 1e-9
    assert one_ratio(measured, 0.9) == (0.9, 0.9)


def test_means_by_distance() -> None:
    assert by_distance([[1, 0.5, 0.1], [0.5, 1, 0.3], [0.1, 0.3, 1]]) == pytest.approx({1: 0.4, 2: 0.1})


def test_the_part_of_a_study(tiny, tmp_path, monkeypatch) -> None:
    limits = (0.05, 0.2, 2.0)
    for module in (tiers_part, tables, tiers_plot):
        monkeypatch.setattr(module, "LIMITS", limits)
    monkeypatch.setattr(tiers_part, "labels", lambda chosen=(2.0,): labels(chosen))
    monkeypatch.setattr(tiers_part, "COMPARED", (2.0,))
    monkeypatch.setattr(tier_grid, "RATIOS", (0.8,))
    monkeypatch.setattr(tier_grid, "SHARES", (0.0,))
    monkeypatch.setattr(tiers_part, "LEVELS", (0.0, 0.4, 0.8))
    monkeypatch.setattr(tier_grid, "LEVELS", (0.0, 0.4, 0.8))
    monkeypatch.setattr(cache_bench, "LONG_TOKENS", 512)
    monkeypatch.setattr(tiers_codes, "STAND", (0.5,))
    overrides = [*FAST_EVALUATION, *SHORT_TEXT, "tokens.count=512", "tokens.seq_len=64", "evaluation.seq_len=64"]
    overrides += ["evaluation.report_tokens=64", "evaluation.search_tokens=64", "evaluation.metric=text"]
    overrides += ["cache.tiers_tokens=64", "ranks.multiple_of=1", "codes.tokens=512"]
    arguments = {"parts": ["tiers"], "overrides": overrides, "plots": False, "focus": ["fdc", "rotor"]}
    result = study(tiny("llama"), tmp_path / "study", ["fdc", "rotor"], **arguments)
    names = list(result.records)
    assert names == [f"tiers/fdc/{what}" for what in ("layers", "grid", "shares", "ratios", "choices")] + [
        f"tiers/fdc/records/{label}" for label in labels([2.0])
    ] + [f"tiers/rotor/records/{label}" for label in coded_labels()]
    layers = result.records["tiers/fdc/layers"]
    for both in layers["repetition"].values():
        assert np.allclose(np.diag(both["most"]), 1.0)
        assert np.allclose(both["least"], np.array(both["least"]).T)
    assert all(spread["median"] <= spread["p90"] <= spread["largest"] for spread in layers["spread"])
    choices = result.records["tiers/fdc/choices"]
    for limit in limits:
        found = choices[f"{limit:g}"]
        fitting = [one["removed"] for kind, one in found.items() if one and kind not in ("oracle", "regression")]
        assert found["oracle"] is None or found["oracle"]["removed"] >= max(fitting)
        assert all(found[kind] is None or found[kind]["degradation"] <= limit for kind in ("tiers", "oracle"))
    tiers, chance, ratio, ranks = (
        result.records[f"tiers/fdc/records/Q_d 2, {kind}"]
        for kind in ("tiers", "tiers at random", "one ratio", "the recipe's ranks")
    )
    assert not tiers["skipped"], choices
    assert tiers["kv_bytes_per_token"] == chance["kv_bytes_per_token"]
    assert ratio["kv_bytes_per_token"] == pytest.approx(tiers["mean_kv_bytes_per_token"], rel=0.05)
    assert ranks["kv_bytes_per_token"] <= tiers["mean_kv_bytes_per_token"]
    tiers, alike, plan = (
        result.records[f"tiers/rotor/records/codes of 0.5 removed, {kind}"] for kind in (TIERS, ALIKE, PLAN)
    )
    assert plan["kv_bytes_per_token"] <= tiers["mean_kv_bytes_per_token"]
    assert not any(record["skipped"] for record in (tiers, alike, plan))
    rows = (tmp_path / "study" / "tiers.csv").read_text().splitlines()
    assert len(rows) == 1 + len(labels([2.0])) + len(coded_labels())
    assert rows[0].startswith("recipe,name,skipped,kl_div")
    store = StudyStore(tmp_path / "study", result.settings, result.records)
    titles = [title for title, _, _ in tiers_tables(store)]
    assert [title.partition("`: ")[2][:9] for title in titles] == [
        "important", "spread of", "g where 0", "p of one ", "ratios ch", "tiers aga", "tiers aga",
    ]  # fmt: skip
    summary = (tmp_path / "study" / "summary.md").read_text()
    assert all(f"## {title}" in summary for title in titles)
    assert study(tiny("llama"), tmp_path / "study", ["fdc", "rotor"], **arguments).added == 0
    figure = pytest.importorskip("matplotlib.figure").Figure()
    assert tiers_plot.draw_tiers(figure, tiers_of_recipes(store))
    assert len(figure.axes) == 2 * 5
    ways = figure.axes[4]
    assert len(ways.patches) == len(
        [one for one in labels([2.0]) if not result.records[f"tiers/fdc/records/{one}"]["skipped"]]
    )
    assert not tiers_plot.draw_tiers(figure, {})
