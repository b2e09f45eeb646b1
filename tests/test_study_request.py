"""What a study is asked for: conditions, ablations, the store, dry runs, parts that cannot run, the command."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from conftest import DEMO_MODEL
from test_cli import rotor
from test_study import SMALL

from rotor.errors import RecipeError, UsageError
from rotor.recipe import load_recipe
from rotor.search.search import most_points
from rotor.study.parts import curves
from rotor.study.request import StudyPlan, parse_ablations, parse_counts, same_conditions
from rotor.study.store import StudyStore
from rotor.study.study import StudyEstimate, study


def test_recipes_get_the_same_conditions(tmp_path: Path) -> None:
    recipes = [load_recipe("fdc"), load_recipe("rotor", ["evaluation.search_tokens=7", "tokens.seed=3"])]
    specs = same_conditions(recipes, [])
    assert {s.tokens.count for s in specs.values()} == {max(r.tokens.count for r in recipes)}
    assert len({(s.tokens.seed, s.tokens.seq_len, s.evaluation, s.search) for s in specs.values()}) == 1
    assert specs["rotor"].bases == recipes[1].bases
    assert {s.tokens.count for s in same_conditions(recipes, ["tokens.count=99"]).values()} == {99}
    with pytest.raises(UsageError, match="two recipes are named 'fdc'"):
        same_conditions([recipes[0], recipes[0]], [])
    with pytest.raises(UsageError, match="no recipes"):
        same_conditions([], [])


def test_ablations_and_counts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "ablations.yaml"
    path.write_text('post: ["groups.domain=post", "groups.size=1"]\n')
    found = parse_ablations(["per head: groups.size=1"], path)
    assert found == {"per head": ["groups.size=1"], "post": ["groups.domain=post", "groups.size=1"]}
    with pytest.raises(RecipeError, match="'post' is given twice"):
        parse_ablations(["post:groups.size=1"], path)
    with pytest.raises(RecipeError, match="expected a name and a list of KEY=VALUE"):
        parse_ablations(["groups.size=1"], None)
    path.write_text("post: groups.size=1\n")
    with pytest.raises(RecipeError, match="post: expected a name and a list"):
        parse_ablations([], path)
    assert parse_counts(["512", "1024"]) == (512, 1024)
    with pytest.raises(UsageError, match="expected positive numbers"):
        parse_counts(["512", "many"])
    with pytest.raises(UsageError, match="--bytes 320,few: expected positive numbers of bytes"):
        parse_counts(["320", "few"], "--bytes", "bytes")


def test_a_study_has_settings_of_its_own() -> None:
    plan = StudyPlan.of(["fdc"], ["study.prompt_share=0.5", "tokens.seed=3", "study.budgets=[0.2, 0.9]"])
    assert (plan.settings.prompt_share, plan.settings.budgets, plan.first.tokens.seed) == (0.5, (0.2, 0.9), 3)
    assert StudyPlan.of(["fdc"]).settings.squeeze == (0.85, 0.15)
    for setting in ("prompt_share=0", "prompt_share=1", "prompt_share=some", "budgets=[1.5]", "squeeze=0.3", "p=0.3"):
        with pytest.raises(UsageError, match=r"--set study: .*(expected|unknown key)"):
            StudyPlan.of(["fdc"], [f"study.{setting}"])


def test_store_keeps_every_record_and_names_what_differs(tmp_path: Path) -> None:
    settings = {"model": {"a": "1"}, "recipes": {"fdc": {"rank": 16}}, "ablations": {}}
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


def test_a_dry_run_tells_what_each_part_takes(tmp_path: Path, capsys, monkeypatch) -> None:
    """Counts by hand: calibrations that are kept are made once, whatever parts use them; nothing is written."""
    monkeypatch.setattr(curves, "COMPRESSIONS", (0.3, 0.6))
    arguments = ["study", DEMO_MODEL, "-o", tmp_path / "study", "--recipes", "fdc,rotor", "--counts", "256,1024"]
    arguments += [item for setting in SMALL for item in ("--set", setting)]
    code, out, err = rotor(capsys, *arguments, "--dry-run", "--json")
    assert code == 0, err
    found = json.loads(out)
    (part,) = found["parts"]  # the others are not run by default
    searched = most_points(0.2)  # a bisection for each of three targets, then the report split of what it chose
    assert (part["part"], part["calibrations"], part["points"]) == ("curves", 2, 2 * (2 + 3 * searched))
    assert found["known_records"] == 0

    code, out, _ = rotor(capsys, *arguments, "--parts", "all", "--ablation", "a:groups.size=1", "--dry-run", "--json")
    parts = {part["part"]: (part["calibrations"], part["points"]) for part in json.loads(out)["parts"]}
    assert parts["tokens"] == (2 + 4 * 2, 4 * 2)  # two that are kept, and each source and number
    assert parts["ablation"] == (1, 2 + 3 * searched)
    code, out, _ = rotor(capsys, *arguments, "--dry-run")
    assert code == 0
    assert "nothing is written in a dry run" in " ".join(out.split())
    assert not (tmp_path / "study").exists()


def test_a_text_of_ones_own_is_for_all_recipes(tmp_path: Path, capsys, monkeypatch) -> None:
    words = tmp_path / "words.txt"
    words.write_text("one word after another\n" * 50)
    asked = []

    def estimate(model, out, request, *rest) -> StudyEstimate:
        asked.append(request)
        return StudyEstimate("model", [], 0)

    monkeypatch.setattr(importlib.import_module("rotor.study.study"), "plan_study", estimate)
    code, _, error = rotor(capsys, "study", DEMO_MODEL, "-o", tmp_path / "s", "--text", words, "--dry-run")
    assert code == 0, error
    found = {(r.tokens.source, r.tokens.path, r.evaluation.path) for r in asked[0].recipes.values()}
    assert found == {("text", str(words), str(words))}


def test_parts_that_cannot_run_are_refused_by_name(tmp_path: Path) -> None:
    for parts, message in (
        (["curves", "tables"], "--parts tables: expected some of curves, tokens, pruning"),
        ([], "--parts is empty"),
        (["ablation"], "--parts ablation: there are no ablations"),
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


def test_command(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "COMPRESSIONS", (0.5,))
    arguments = ["study", DEMO_MODEL, "-o", tmp_path / "study", "--recipes", "fdc", "--parts", "curves", "--no-plots"]
    arguments += [item for setting in SMALL for item in ("--set", setting)]
    code, out, err = rotor(capsys, *arguments, "--json", "-q")
    assert code == 0, err
    found = json.loads(out)
    assert found["measured_records"] == 2
    assert found["files"] == [str(tmp_path / "study" / name) for name in ("results.csv", "summary.md")]
    code, out, _ = rotor(capsys, *arguments)
    assert code == 0
    assert "0 of them new" in " ".join(out.split())
    assert "Compression at a target accuracy" in out
