"""JSON that rotor writes and prints: no NaN, no Infinity; what is measured later than its folder shows an edit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from conftest import calibrated

from rotor.calibration.run import Run
from rotor.cli.console import print_json
from rotor.export.export import export
from rotor.format.atomic import write_json
from rotor.search.table import RankTable
from rotor.study.store import StudyStore

NOT_FINITE = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": (1.5, math.nan), "e": "NaN"}
NULLS = {"a": None, "b": [None, {"c": None}], "d": [1.5, None], "e": "NaN"}


def strict(text: str) -> object:
    return json.loads(text, parse_constant=pytest.fail)


def test_what_is_not_finite_is_null(tmp_path: Path, capsys) -> None:
    write_json(tmp_path / "a.json", NOT_FINITE)
    print_json(NOT_FINITE)
    record = StudyStore.read(tmp_path / "study", {}).put("part/x", NOT_FINITE)
    texts = (tmp_path / "a.json").read_text(), capsys.readouterr().out, json.dumps(record)
    assert [strict(text) for text in texts] == [NULLS] * 3
    assert strict((tmp_path / "study" / "results.json").read_text())["records"]["part/x"] == NULLS  # type: ignore[index]


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a table and probes; what a test edits it puts back."""
    found = calibrated(tiny("llama"), tmp_path_factory.mktemp("json") / "run", "post", 1)
    export(found.folder, found.folder.parent / "out", compression=0.3, overrides=["ranks.method=global"])
    return found


def test_a_table_of_another_version_is_measured_again(run: Run) -> None:
    latest = RankTable.latest(run)
    assert latest is not None
    path = run.folder / "tables" / f"{latest.context.key}.json"
    original = path.read_text()
    path.write_text(json.dumps({**json.loads(original), "version": 3}))
    try:
        assert RankTable.open(run, latest.context).points == []
    finally:
        path.write_text(original)
    assert RankTable.open(run, latest.context).points == latest.points
