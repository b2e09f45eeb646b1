"""Tasks of lm-eval as a metric."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from metric_values import context

from rotor.errors import DataError, UsageError
from rotor.evaluation.harness import LMEval
from rotor.export.export import export
from rotor.recipe import Evaluation
from rotor.validation.validate import validate


def test_lm_eval_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch, demo) -> None:
    checkpoint, _ = demo
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UsageError, match=r"evaluation\.metric lm-eval:hellaswag: the lm-eval package") as error:
        LMEval("lm-eval:hellaswag", context(Evaluation(metric="lm-eval:hellaswag"), checkpoint))
    assert error.value.hint == "pip install 'PATH/TO/rotor[eval]'"


@pytest.fixture
def lookup_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A multiple-choice task of look-ups, defined and filled by local files; needs no network."""
    pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval is not installed (the extra eval)")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    words = ["table", "value", "index", "config", "result", "error", "name", "path"]
    lines = []
    for i in range(24):
        values = {word: 10 + (37 * i + 11 * j) % 90 for j, word in enumerate(words)}
        asked = words[(5 * i) % 8]
        choices = [f" {values[words[(5 * i + 3 * j) % 8]]}" for j in range(4)]
        label = i % 4
        choices[0], choices[label] = choices[label], choices[0]
        prompt = "".join(f"{word}: {value}\n" for word, value in values.items()) + f"{asked}:"
        lines.append(json.dumps({"prompt": prompt, "choices": choices, "label": label}))
    (tmp_path / "documents.jsonl").write_text("\n".join(lines))
    path = tmp_path / "lookup.yaml"
    path.write_text(
        f"""task: rotor_lookup
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "documents.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    return path


@pytest.mark.peer
def test_lm_eval_task_of_local_files(lookup_task: Path, demo, run_copy, tmp_path: Path, capsys) -> None:
    run = run_copy("fdc")
    checkpoint, model = demo
    capsys.readouterr()
    spec = Evaluation(metric=f"lm-eval:{lookup_task}", lm_eval_limit=10)
    metric = LMEval(spec.metric, context(spec, checkpoint))
    assert metric._documents("search") == {"rotor_lookup": list(range(0, 20, 2))}
    assert metric._documents("report") == {"rotor_lookup": list(range(1, 20, 2))}
    base = metric.measure_base(model, "report")
    assert "%|" not in capsys.readouterr().err  # no bars but rotor's own
    assert base["score"] >= 0.8  # four choices: 0.25 by chance
    found = metric.measure(model, "report")
    assert found.value == 1
    assert found.fields == {"compressed_score": base["score"]}
    assert found.interval == (1, 1)  # paired: every document alike

    settings = [f"evaluation.metric={metric.name}", "evaluation.lm_eval_limit=10"]
    report = export(run.folder, tmp_path / "out", compression=0.7, overrides=settings).report
    accuracy = report["accuracy"]
    measured = accuracy["measurements"]["report"]["values"]
    assert accuracy["base"]["report"]["score"] == base["score"]
    assert accuracy["report"] == pytest.approx(measured["compressed_score"] / base["score"], abs=1e-6)
    assert "accuracy" not in validate(tmp_path / "out").summary  # a task that only the checkpoint names
    result = validate(tmp_path / "out", overrides=settings)
    assert result.summary["accuracy"]["value"] == accuracy["report"]
    assert checkpoint.tokenizer.pad_token is None


@pytest.mark.peer
def test_lm_eval_errors_name_the_task(lookup_task: Path, demo) -> None:
    checkpoint, _ = demo
    with pytest.raises(DataError, match="lm-eval:no_such_task_here: lm-eval cannot load the task"):
        LMEval("lm-eval:no_such_task_here", context(None, checkpoint))
    with pytest.raises(DataError, match="needs a tokenizer"):
        LMEval(f"lm-eval:{lookup_task}", context())
    metric = LMEval(f"lm-eval:{lookup_task}", context(None, checkpoint))
    samples = {"t": [{"metrics": ["acc", "f1"], "acc": hit, "f1": 0.0} for hit in (1.0, 0.0)]}
    samples["u"] = [{"metrics": ["acc"], "acc": 0.5}]
    output = {"higher_is_better": {}, "samples": samples}
    assert metric._read(output) == [1.0, 0.0, 0.5]
    with pytest.raises(DataError, match="less acc is better"):
        metric._read(output | {"higher_is_better": {"t": {"acc": False}}})
    with pytest.raises(DataError, match="no number for each document"):
        metric._read({"higher_is_better": {}, "samples": {}})
