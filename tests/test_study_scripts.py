"""The parts of studies in artifacts/studies/parts, each with few cases on a tiny model."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from support.paths import ROOT
from support.quick import mostly_nightly
from support.runs import TINY_STUDY

from rotor.policies import find_policy
from rotor.tools.study import study
from rotor.tools.study.cache_part import StudiedCache
from rotor.tools.study.context import StudyContext
from rotor.tools.study.part import Part, find_part
from rotor.tools.study.parts.methods import Methods

FOLDER = ROOT / "artifacts" / "studies" / "parts"


class Few(Methods):
    """Of all methods one."""

    def caches(self, study: StudyContext) -> dict[str, StudiedCache]:
        return {"per-token-4": StudiedCache("per-token", find_policy("per-token-4"))}


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "tokens.py:Tokens": ({"COUNTS": (256,)}, "tokens/fdc/text/256", "Error at 0.5 removed and bases by source"),
    "tokens.py:Pruning": ({"SHARES": (0.5,), "CENTROIDS": (16,)}, "pruning/fdc/kmeans-16", "Pruning and K-means"),
    "budgets.py:Budgets": (
        {"BUDGETS": (0.5,), "SQUEEZE": (0.85,)},
        "budgets/H2O, SqueezeAttention 0.85, 0.5 of the tokens",
        "Budgets of layers",
    ),
    "combine.py:Combine": (
        {"STEPS": 2, "ACCURACY": 0.0, "CODES": {}},
        "combine/fdc and H2O, at 0",
        "The most removed",
    ),
    "gear_ablations.py:Ablations": ({"ABLATED": {"rank": (0,)}}, "gear-ablations/GEAR, rank 0", "GEAR's parts"),
    "memory.py:Memory": ({"Methods": Few}, "memory/per-token-4", "What fits into 16 GB"),
    "overhead.py:Overhead": ({}, "overhead/fdc", "Overheads, predicted"),
    "shift.py:Shift": ({"TEXTS": {"numbers": lambda: "1, 2, " * 4000}}, "shift/numbers: fdc, 512 bytes", "Other text"),
}


QUICK = ("budgets.py:Budgets", "memory.py:Memory", "tokens.py:Pruning")
"""One that plans, one that measures caches, one that calibrates; the others are nightly."""


@pytest.mark.parametrize("name", mostly_nightly(CASES, lambda name: name in QUICK))
def test_a_part_measures_and_shows(name: str, tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants, key, title = CASES[name]

    def with_constants(part: str) -> Part:
        found = find_part(part)
        for function in vars(type(found)).values():
            if isinstance(function, FunctionType) and part.endswith(name):  # rotor's own stay as they are
                function.__globals__.update(constants)
        return found

    monkeypatch.setattr(study, "find_part", with_constants)
    part = f"{FOLDER / name}"
    result = study.study(tiny("llama"), tmp_path / "study", ["fdc"], TINY_STUDY, parts=[part], sizes=[512], plots=False)
    assert not result.records[key].get("skipped")
    assert f"## {title}" in (tmp_path / "study" / "summary.md").read_text()
    if (
        name == "overhead.py:Overhead"
    ):  # ragged sequences, which the papers' schedule loads better than none, and slices best
        record = result.records[key]
        assert record["sliced"] <= 1.001 <= record["unbalanced"]
