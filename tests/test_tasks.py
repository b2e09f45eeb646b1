"""Benchmarks: tasks of lm-eval and of our own, in lm-eval's files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.paths import DEMO_MODEL

from rotor import export, validate
from rotor.errors import DataError, UsageError
from rotor.models.source import Checkpoint
from rotor.search.evaluation.tasks import TaskSuite, document_scores, paired

TASK = "capitals"


def lm_eval_or_skip() -> None:
    for module in ("lm_eval.models.huggingface", "datasets"):
        pytest.importorskip(module, reason=f"{module} is not installed (the extra eval)")


def test_differences_are_paired_by_document() -> None:
    before = {"t 512": [1.0, 0.0, 1.0, 1.0] * 25, "u acc": [0.0] * 10}
    same, constant = paired(before, {"t 512": before["t 512"], "u acc": [0.5] * 10})
    assert (same.documents, same.before, same.after, same.interval) == (100, 0.75, 0.75, (0.0, 0.0))
    assert (constant.difference, constant.interval) == (0.5, (0.5, 0.5))
    (half,) = paired({"t": [1.0] * 100}, {"t": [1.0, 0.0] * 50})
    assert half.difference == -0.5
    assert -0.62 < half.interval[0] < -0.5 < half.interval[1] < -0.38  # 1.96 sqrt(0.25 / 100)


def test_scores_of_answers() -> None:
    samples = [{"metrics": ["512", "f1"], "512": 1.0, "f1": (0, 1)}, {"metrics": ["1024"], "1024": 0}]
    assert document_scores({"t": samples}) == {"t 512": [1.0], "t 1024": [0.0]}


def test_what_is_missing_is_said_with_what_to_do(demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, _ = demo
    with pytest.raises(DataError, match="capitals: needs a tokenizer"):
        TaskSuite([TASK], None)
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="there: exists"), TaskSuite.results(tmp_path / "there"):
        pass
    with pytest.raises(ValueError, match="half"), TaskSuite.results(tmp_path / "out"):
        raise ValueError("half")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UsageError, match="--tasks vt: the lm-eval package cannot be imported") as error:
        TaskSuite(["vt"], checkpoint.tokenizer)
    assert error.value.hint == "pip install 'PATH/TO/rotor[eval]'"


@pytest.fixture
def capitals(tmp_path: Path) -> str:
    """A task as a YAML file, whose five documents lie beside it."""
    cities = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo", "Japan": "Tokyo"}
    lines = (json.dumps({"country": country, "city": city}) for country, city in cities.items())
    (tmp_path / "capitals.jsonl").write_text("\n".join(lines))
    (tmp_path / "capitals.yaml").write_text(f"""
task: {TASK}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/capitals.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: {list(cities.values())}
doc_to_target: city
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""")
    return str(tmp_path / "capitals.yaml")


@pytest.mark.peer
def test_lm_eval_reads_what_validate_writes(run_copy, capitals: str, tmp_path: Path) -> None:
    lm_eval_or_skip()
    from lm_eval.evaluator_utils import _compute_task_aggregations
    from lm_eval.utils import get_file_task_name, get_results_filenames, get_sample_results_filenames, make_table

    run = run_copy("fdc")
    export(run.folder, tmp_path / "out", compression=0.3, measure=False)
    asked = {"tasks": [capitals], "overrides": ["evaluation.lm_eval_limit=4"]}
    found = validate(tmp_path / "out", measure=False, **asked).summary["tasks"]
    assert [row["task"] for row in found["results"]] == [f"{TASK} acc", f"{TASK} acc_norm"]
    assert {row["documents"] for row in found["results"]} == {4}
    folder = tmp_path / "out-tasks"
    assert found["folder"] == str(folder)
    comparison = json.loads((folder / "comparison.json").read_text())
    assert comparison["results"] == json.loads(json.dumps(found["results"]))
    files = [str(path) for path in folder.rglob("*.json*")]
    results, samples = get_results_filenames(files), get_sample_results_filenames(files)
    assert len(results) == 2
    assert sorted(get_file_task_name(Path(path).name) for path in samples) == [TASK] * 2
    suite = TaskSuite([capitals], Checkpoint(DEMO_MODEL).tokenizer, limit=4)
    for path in map(Path, results):
        data = json.loads(path.read_text())
        assert data["model_name"] == str(DEMO_MODEL if "demo-model" in path.parent.name else tmp_path / "out")
        assert TASK in make_table(data)
        for name, task in suite.tasks.items():
            (lines,) = path.parent.glob(f"samples_{name}_*.jsonl")
            logged = [json.loads(line) for line in lines.read_text().splitlines()]
            assert len(logged) == 4
            raw = {(n, "none"): [sample[n] for sample in logged] for n in ("acc", "acc_norm")}
            aggregated, count = _compute_task_aggregations(task, raw, 1000)
            assert count == 4
            assert {key: data["results"][name][key] for key in aggregated} == aggregated
    with pytest.raises(UsageError, match="out-tasks: exists"):
        validate(tmp_path / "out", measure=False, **asked)
