"""JSON that rotor writes and prints: no NaN, no Infinity; what is measured later than its folder shows an edit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rotor.checkpoint.files import write_json
from rotor.cli.console import print_json
from rotor.tools.study.store import StudyStore

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
