"""JSON that rotor writes and prints: no NaN, no Infinity; what is measured later than its folder shows an edit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from conftest import calibrated
from test_cli import expect_error, rotor

from rotor.calibration.run import Run
from rotor.cli.console import print_json
from rotor.errors import CheckpointError
from rotor.export.export import export
from rotor.format.atomic import write_json
from rotor.format.json_files import read_json
from rotor.search.table import RankTable, read_probes
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


def test_what_is_nested_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": ' + "[" * 60 + "]" * 60 + "}")
    assert read_json(path)["a"]
    path.write_text('{"a": ' + "[" * 400 + "]" * 400 + "}")
    with pytest.raises(CheckpointError, match="more than 64 levels"):
        read_json(path)


@pytest.mark.parametrize("folder", ["tables", "probes"])
def test_an_edited_measurement_is_refused(run: Run, folder: str, tmp_path: Path, capsys) -> None:
    path = next(path for path in (run.folder / folder).iterdir() if path.name != "latest.json")
    original = path.read_text()
    number = next(word for word in original.split() if word.startswith(("0.", "1.")) and word[2:6].isdigit())
    path.write_text(original.replace(number, "1" + number[1:] if number[0] == "0" else "0" + number[1:]))
    try:
        with pytest.raises(CheckpointError, match=f"{path.name}: differs from the SHA-256 in it"):
            RankTable.latest(run) if folder == "tables" else read_probes(run, path.stem)
        arguments = ["--compression", "0.3", "--set", "ranks.method=global"]
        expect_error(
            capsys, 1, "differs from the SHA-256", "export", run.folder, "-o", tmp_path / "new", *arguments, "-q"
        )
    finally:
        path.write_text(original)
    assert rotor(capsys, "export", run.folder, "-o", tmp_path / "out", *arguments)[0] == 0


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
