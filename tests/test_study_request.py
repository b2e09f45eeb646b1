"""Requests of a study: conditions, the store, parts that cannot run, the command."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import rotor
from support.paths import DEMO_MODEL
from support.runs import SMALL_STUDY as SMALL
from support.runs import TINY_STUDY

from rotor import study
from rotor.errors import UsageError
from rotor.recipe.reading import load_recipe
from rotor.tools.study.context import StudyContext
from rotor.tools.study.inputs import same_conditions
from rotor.tools.study.part import Part, Task
from rotor.tools.study.parts.curves import Curves
from rotor.tools.study.store import StudyStore


def test_recipes_get_the_same_conditions(tmp_path: Path) -> None:
    found = same_conditions(["fdc", "rotor"], [])
    fdc, rotor = load_recipe("fdc"), load_recipe("rotor")
    assert {r.tokens.count for r in found.values()} == {max(fdc.tokens.count, rotor.tokens.count)}
    assert len({(r.tokens.seed, r.tokens.seq_len, r.evaluation, r.search) for r in found.values()}) == 1
    assert found["rotor"].bases == rotor.bases
    assert {r.tokens.count for r in same_conditions(["fdc", "rotor"], ["tokens.count=99"]).values()} == {99}
    short = same_conditions(["fdc", "rotor"], [], 2048)
    assert (short["fdc"].exact.newest, short["rotor"].exact.newest, found["rotor"].exact.newest) == (0, 64, 128)
    assert same_conditions(["rotor"], ["exact.newest=96"], 2048)["rotor"].exact.newest == 96
    with pytest.raises(UsageError, match="two recipes are named 'fdc'"):
        same_conditions(["fdc", "fdc"], [])
    with pytest.raises(UsageError, match="no recipes"):
        same_conditions([], [])


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys) -> None:
    command = ["study", DEMO_MODEL, "-o", tmp_path / "study"]
    code, _, error = rotor(capsys, *command, "--bytes", "320,few")
    assert code == 2
    assert "--bytes 320,few" in error


def test_store_keeps_every_record_and_names_what_differs(tmp_path: Path) -> None:
    settings = {"model": {"a": "1"}, "recipes": {"fdc": {"rank": 16}}}
    StudyStore.read(tmp_path / "s", settings).put("curves/fdc/p0.10", {"x": 1})
    more = {**settings, "recipes": {"rotor": {"rank": 8}}}
    store = StudyStore.read(tmp_path / "s", more)
    assert store.records == {"curves/fdc/p0.10": {"x": 1}}
    assert set(store.settings["recipes"]) == {"fdc", "rotor"}
    assert store.part("curves") == {"fdc/p0.10": {"x": 1}}
    with pytest.raises(UsageError, match=r"recipes\.fdc\.rank was 16, now 8"):
        StudyStore.read(tmp_path / "s", {**settings, "recipes": {"fdc": {"rank": 8}}})
    with pytest.raises(UsageError, match=r'model\.a was "1", now null'):
        StudyStore.read(tmp_path / "s", {**settings, "model": {}})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(UsageError, match="holds no study"):
        StudyStore.read(tmp_path / "other", settings)


class Asked(Part):
    """The text that each recipe is to calibrate on and to be measured on; nothing is measured."""

    name = "asked"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name, recipe in study.inputs.recipes.items():
            text = [recipe.tokens.source, recipe.tokens.path, recipe.evaluation.path]
            yield Task(f"asked/{name}", lambda text=text: {"text": text})


class Half(Curves):
    """One point of each curve, and the targets."""

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for task in super().tasks(study):
            if task.key.endswith(("/p0.50", "/targets")):
                yield task


def test_a_text_of_ones_own_is_for_all_recipes(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("one word after another\n" * 50)
    result = study(DEMO_MODEL, tmp_path / "s", text=words, parts=[f"{__file__}:Asked"], plots=False)
    assert len(result.records) > 1
    assert all(record == {"text": ["text", str(words), str(words)]} for record in result.records.values())


def test_parts_that_cannot_run_are_refused_by_name(tmp_path: Path) -> None:
    for parts, message in (
        (["curves", "tables"], "--parts tables: expected some of curves, methods"),
        ([], "--parts is empty"),
    ):
        with pytest.raises(UsageError, match=message):
            study(DEMO_MODEL, tmp_path / "study", ["fdc"], SMALL, parts=parts, plots=False)
    assert not (tmp_path / "study").exists()


def test_missing_matplotlib_is_said_before_anything_is_measured(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = rotor(capsys, "study", DEMO_MODEL, "-o", tmp_path / "study", "--recipes", "fdc")
    assert code == 2
    assert out == ""
    assert "matplotlib" in err.splitlines()[0]
    assert "PATH/TO/rotor[plots]" in err.splitlines()[1]
    assert not (tmp_path / "study").exists()


def test_command(tiny, tmp_path: Path, capsys) -> None:
    arguments = [
        "study",
        tiny("llama"),
        "-o",
        tmp_path / "study",
        "--recipes",
        "fdc",
        "--parts",
        f"{__file__}:Half",
        "--no-plots",
    ]
    arguments += [item for setting in TINY_STUDY for item in ("--set", setting)]
    code, out, err = rotor(capsys, *arguments, "--json", "-q")
    assert code == 0, err
    found = json.loads(out)
    assert found["measured_records"] == 2
    assert found["files"] == [str(tmp_path / "study" / name) for name in ("results.csv", "summary.md")]
    code, out, _ = rotor(capsys, *arguments)
    assert code == 0
    assert "0 of them new" in " ".join(out.split())
    assert "Compression at a target accuracy" in out
