"""The adaptive table on synthetic accuracies: which points are measured, and which one is chosen."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from rotor.recipe import Search, load_recipe
from rotor.search import RankTable, choose, complete_table

STEPS = [i * 0.00625 for i in range(150)]


class FakeMeasurer:
    """Measures nothing: a plan's accuracy in each split is a function of its saving."""

    def __init__(self, table: RankTable, curves: dict[str, Any]) -> None:
        self.table, self.curves = table, curves

    def measure(self, plan: Any) -> dict[str, Any]:
        found = next((p for p in self.table.points if p["saving"] == plan.saving), None)
        if found is None:
            found = {"saving": plan.saving, "compression": {"stored": plan.saving}}
            found |= {split: {"default": curve(plan.saving)} for split, curve in self.curves.items()}
            self.table.points.append(found)
        return found


def cliff(edge: float, beyond: float) -> Any:
    return lambda saving: 1.0 - 0.01 * saving if saving < edge else beyond - (saving - edge)


def completed(search: Any, report: Any, settings: Search, steps: list[float]) -> RankTable:
    run = SimpleNamespace(write_rank_table=lambda data: None)
    table = RankTable(run, replace(load_recipe("rotor"), search=settings), "", [], False)  # type: ignore[arg-type]
    path = SimpleNamespace(steps=lambda: [SimpleNamespace(saving=s) for s in steps])
    complete_table(FakeMeasurer(table, {"search": search, "report": report}), path)  # type: ignore[arg-type]
    assert table.complete
    return table


@pytest.mark.parametrize("resolution", [0.0065, 0.01, 0.03])
@pytest.mark.parametrize(("search_edge", "report_edge"), [(0.807, 0.807), (0.81, 0.77), (0.3, 0.33), (0.013, 0.9)])
def test_chosen_point_and_next_refused_one_are_at_most_the_resolution_apart(
    search_edge: float, report_edge: float, resolution: float
) -> None:
    """Wherever the cliff lies, and whichever split refuses."""
    settings = Search(resolution=resolution)
    table = completed(cliff(search_edge, 0.93), cliff(report_edge, 0.935), settings, STEPS)
    chosen = choose(table, 0.95)["saving"]
    edge = min(search_edge, report_edge)
    assert edge - resolution <= chosen < edge
    savings = sorted(p["saving"] for p in table.points)
    assert savings[savings.index(chosen) + 1] - chosen <= resolution + 1e-9
    assert len(savings) < len(STEPS) / 3


def test_neighbours_on_the_path_are_measured_where_they_are_further_apart_than_the_resolution() -> None:
    steps = [0.0, 0.2, 0.4, 0.6, 0.7, 0.75, 0.8, 0.82, 0.84, 0.9]
    table = completed(cliff(0.83, 0.5), cliff(0.83, 0.5), Search(resolution=0.001), steps)
    assert choose(table, 0.95)["saving"] == 0.82
    assert {0.82, 0.84} <= {p["saving"] for p in table.points}


def test_points_are_at_most_a_step_apart_where_no_target_is_crossed() -> None:
    def slope(saving: float) -> float:
        return 1.0 - saving / 4

    table = completed(slope, slope, Search(targets=(0.99,), step=0.05, floor=0.9), STEPS)
    savings = sorted(p["saving"] for p in table.points)
    relevant = [s for s in savings if 0.9 <= slope(s) < 0.99]
    assert all(b - a <= 0.05 + 1e-9 for a, b in pairwise(relevant))
