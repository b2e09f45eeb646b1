"""Metrics: values checked by hand, identity, seeds, bounds, what the table and validate record, errors."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DEMO_MODEL, in_memory

from rotor import evaluation
from rotor.checkpoint import Checkpoint
from rotor.compress import load_model
from rotor.errors import DataError, RecipeError, UsageError
from rotor.evaluation import Tally, batch_logits, bootstrap, position_kl_div, score
from rotor.export import export
from rotor.layerwise import LayerwiseModel
from rotor.metrics import KLDivergence, Recall, Top1Agreement, accuracy_field, describe, make_metric
from rotor.metrics.recall import key_words, lookup_text, recall_hits, recall_prompts
from rotor.recipe import METRICS, Evaluation, load_recipe
from rotor.run import Run
from rotor.search import rank_path
from rotor.tokens import text_rows
from rotor.validate import validate

# Two rows of two predicted positions over three tokens, as probabilities.
BASE = torch.tensor([[[0.5, 0.25, 0.25], [0.2, 0.7, 0.1]], [[0.1, 0.1, 0.8], [0.6, 0.2, 0.2]]]).log()
OTHER = torch.tensor([[[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]], [[0.1, 0.1, 0.8], [0.3, 0.4, 0.3]]]).log()
ROWS = torch.tensor([[0, 0, 1], [0, 2, 1]])


@pytest.fixture(scope="module")
def demo():
    """The bundled model's checkpoint and the model itself, in float32."""
    checkpoint = Checkpoint(DEMO_MODEL)
    return checkpoint, LayerwiseModel.of(load_model(DEMO_MODEL, torch.device("cpu"), torch.float32))


@pytest.fixture
def run_copy(demo_run, tmp_path: Path) -> Run:
    shutil.copytree(demo_run("fdc").folder, tmp_path / "run")
    return Run.open(tmp_path / "run")


def tally(logits: torch.Tensor, reference: torch.Tensor | None = None):
    result = Tally()
    for i in range(len(logits)):
        result.add(logits[i], ROWS[i, 1:], None if reference is None else reference[i])
    return result.scores(len(logits))


def test_scores_by_hand() -> None:
    base, other = tally(BASE), tally(OTHER, BASE)
    assert base.tokens == 2
    assert base.correct.tolist() == [2, 1]
    assert other.correct.tolist() == [1, 2]
    np.testing.assert_allclose(base.nll, [-math.log(0.5 * 0.7), -math.log(0.8 * 0.2)], rtol=1e-6)
    assert base.top1.tolist() == [[0, 1], [2, 0]]
    assert base.kl_div is None
    # 0.5 ln 2 + 0.25 ln 1/2 = 0.25 ln 2, and 0.6 ln 2 + 0.2 ln 1/2 + 0.2 ln 2/3
    expected = [0.25 * math.log(2), 0.4 * math.log(2) + 0.2 * math.log(2 / 3)]
    np.testing.assert_allclose(other.kl_div, expected, rtol=1e-6)


def test_top1_agreement_and_kl_div_by_hand() -> None:
    base, other = tally(BASE), tally(OTHER, BASE)
    agreement = Top1Agreement("top1_agreement").measure(None, "report", base, other)
    assert agreement.value == 0.5
    assert agreement.interval == (0.5, 0.5)  # one of two positions in either row
    assert agreement.fields == {"top1_agreement": 0.5}
    found = KLDivergence("kl_div").measure(None, "report", base, other)
    mean = (0.65 * math.log(2) + 0.2 * math.log(2 / 3)) / 4
    assert found.fields["kl_div"] == pytest.approx(mean, abs=2e-7)
    assert found.value == found.fields["kl_accuracy"] == pytest.approx(math.exp(-mean), abs=2e-6)
    rows = np.exp(-other.kl_div / 2)
    assert found.interval == pytest.approx((rows.min(), rows.max()), abs=1e-6)  # two rows: both resampled extremes


def test_kl_in_pieces_is_kl_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (3 * torch.randn(21, 50, generator=generator) for _ in range(2))
    whole = position_kl_div(p, q).double()
    monkeypatch.setattr(evaluation, "KL_POSITIONS_BYTES", 4 * 50 * 4)
    torch.testing.assert_close(position_kl_div(p, q).double(), whole, rtol=0, atol=0)
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    torch.testing.assert_close(whole, (log_p.exp() * (log_p - log_q)).sum(-1), rtol=1e-4, atol=1e-6)
    assert position_kl_div(p, p).count_nonzero() == 0


def test_bootstrap_draws_the_same_rows_for_all_columns() -> None:
    column = np.random.default_rng(3).random(40)
    assert bootstrap(lambda a, b: b / a, column, column / 2) == (0.5, 0.5)
    low, high = bootstrap(lambda total: total / 40, column)
    assert low < column.mean() < high
    assert bootstrap(lambda total: total / 40, column) == (low, high)
    assert bootstrap(lambda total: total / 40, column, seed=1) != (low, high)


@pytest.mark.parametrize("name", METRICS)
def test_the_uncompressed_model_has_accuracy_one(name: str, demo) -> None:
    checkpoint, model = demo
    spec = Evaluation(metric=name, recall_prompts=4)
    metric = make_metric(spec, checkpoint.tokenizer, checkpoint.config)
    assert metric.name == name
    rows = text_rows(["def add(a, b):\n    return a + b\n" * 20], checkpoint.tokenizer, 32)[:3]
    metric.measure_base(model, "search")
    base = score(model, rows)
    same = score(model, rows, reference=model.final_states(rows))
    found = metric.measure(model, "search", base, same)
    assert found.value == 1
    assert found.interval == (1, 1)
    assert found.fields.get("kl_div", 0) == 0
    assert accuracy_field(name) in {*found.fields, "default", "token_accuracy", "ppl_ratio"}
    assert describe(name)


def test_swapping_the_attention_leaves_both_models_as_they_were(demo_run) -> None:
    run = demo_run("fdc")
    network = in_memory(run)
    rows = torch.randint(4096, (2, 24), generator=torch.Generator().manual_seed(0))
    before = batch_logits(network, rows)
    bases = run.bases()
    plan = rank_path(bases, run, run.recipe).at_compression(0.6)
    network.compress(plan.select(bases), plan.rounded)
    compressed = batch_logits(network, rows)
    assert not torch.equal(before, compressed)
    modules = [network.family.attention_module(network.model, i) for i in range(network.shape.num_layers)]
    with network.uncompressed():
        assert torch.equal(batch_logits(network, rows), before)
    assert torch.equal(batch_logits(network, rows), compressed)
    assert modules == [network.family.attention_module(network.model, i) for i in range(network.shape.num_layers)]


# Look-up prompts.


def test_lookup_text_asks_only_for_stated_keys_and_marks_the_answers() -> None:
    words = ["alpha", "beta", "gamma", "delta"]
    formats = set()
    for seed in range(12):
        text, spans = lookup_text(words, 3, 5, torch.Generator().manual_seed(seed))
        assert len(spans) == 5
        stated_end = text.index("}\n") if "{" in text else [i for i, c in enumerate(text) if c == "\n"][2]
        stated = text[:stated_end]
        formats.add("{" in text)
        for begin, end in spans:
            assert begin > stated_end
            assert 10 <= int(text[begin:end]) <= 99
            question = text[text.rindex("\n", 0, begin) + 1 : begin]
            key = question.split('"')[1] if '"' in question else question.split(":")[0]
            assert key in words
            assert f'"{key}": {text[begin:end]}' in stated or f"{key}: {text[begin:end]}" in stated
    assert formats == {True, False}


def test_recall_prompts_are_seeded_and_differ_between_splits(demo) -> None:
    checkpoint, _ = demo
    spec = Evaluation(recall_prompts=4, recall_keys=3, recall_questions=5)
    first = recall_prompts(spec, "search", checkpoint.tokenizer, checkpoint.config)
    again = recall_prompts(spec, "search", checkpoint.tokenizer, checkpoint.config)
    report = recall_prompts(spec, "report", checkpoint.tokenizer, checkpoint.config)
    other = recall_prompts(Evaluation(seed=1, recall_prompts=4), "search", checkpoint.tokenizer, checkpoint.config)
    assert torch.equal(first.rows, again.rows)
    assert torch.equal(first.answers, again.answers)
    for rows in (report.rows, other.rows):
        assert rows.shape != first.rows.shape or not torch.equal(rows, first.rows)
    assert first.rows.shape == first.answers.shape
    assert (first.rows[:, 0] == 0).all()
    for ids, answers in zip(first.rows, first.answers, strict=True):
        digits = checkpoint.tokenizer.decode(ids[answers]).replace(" ", "")
        assert len(digits) == 2 * 5
        assert digits.isdigit()


def test_padding_and_batches_do_not_change_the_hits(demo, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, model = demo
    prompts = recall_prompts(Evaluation(recall_prompts=3), "report", checkpoint.tokenizer, checkpoint.config)
    together = recall_hits(model, prompts)
    monkeypatch.setitem(evaluation.LOGIT_BYTES, "cpu", 1)
    assert recall_hits(model, prompts).tolist() == together.tolist()
    for i, (ids, answers) in enumerate(zip(prompts.rows, prompts.answers, strict=True)):
        end = int(answers.nonzero().max()) + 1
        hits = model.model(ids[None, :end]).logits[0, :-1].argmax(-1) == ids[1:end]
        assert int(hits[answers[1:end]].sum()) == together[i]


def test_the_bundled_model_looks_up_and_a_random_one_cannot(demo, tiny) -> None:
    checkpoint, model = demo
    spec = Evaluation(metric="recall", recall_prompts=8)
    base = Recall("recall", spec, checkpoint.tokenizer, checkpoint.config).measure_base(model, "report")
    assert base["recall"] > 0.98  # measured: 0.999 over 32 prompts
    other = Checkpoint(tiny("llama"))
    random = LayerwiseModel.of(load_model(other.folder, torch.device("cpu"), torch.float32))
    recall = Recall("recall", spec, other.tokenizer, other.config)
    with pytest.raises(DataError, match=r"looks up 0\.0\d\d of the keys \(search split\), expected at least 0\.2"):
        recall.measure_base(random, "search")


def test_recall_says_what_it_cannot_do(demo) -> None:
    checkpoint, _ = demo
    with pytest.raises(DataError, match="the model's folder has none"):
        recall_prompts(Evaluation(), "search", None, checkpoint.config)
    with pytest.raises(DataError, match="the model 2048 positions") as error:
        recall_prompts(
            Evaluation(recall_prompts=1, recall_questions=1000), "search", checkpoint.tokenizer, checkpoint.config
        )
    assert "evaluation.recall_questions" in error.value.hint


def test_a_tokenizer_without_words_gets_made_up_ones() -> None:
    class Bytes:
        def get_vocab(self) -> dict[str, int]:
            return {chr(i): i for i in range(128)} | {"baba": 128}

    words = key_words(Bytes(), 20)
    assert len(words) == len(set(words)) == 21
    assert all(3 <= len(word) <= 9 for word in words)
    with pytest.raises(DataError, match="1000000 keys asked for"):
        key_words(Bytes(), 1_000_000)


# Recipes, the rank table, export and validate.


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        ("top1", "got 'top1', expected one of default, token_accuracy, ppl_ratio, top1_agreement, kl_div, recall"),
        ("kldiv", "did you mean 'kl_div'?"),
        ("lm-eval", "or lm-eval:TASK; did you mean 'lm-eval:'?"),
        ("'lm-eval:'", "evaluation.metric: got 'lm-eval:'"),
    ],
)
def test_an_unknown_metric_names_the_nearest(metric: str, text: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("fdc", [f"evaluation.metric={metric}"])
    assert text in str(error.value)


def test_recipes_take_metrics_and_check_their_settings() -> None:
    assert (
        load_recipe("fdc", ["evaluation.metric=lm-eval:tasks/a b.yaml"]).evaluation.metric == "lm-eval:tasks/a b.yaml"
    )
    assert load_recipe("fdc", ["evaluation.lm_eval_limit=null"]).evaluation.lm_eval_limit is None
    for name in ("recall_prompts", "recall_keys", "recall_questions", "lm_eval_limit"):
        with pytest.raises(RecipeError, match=f"evaluation.{name}: got 0"):
            load_recipe("fdc", [f"evaluation.{name}=0"])


@pytest.mark.parametrize("metric", ["kl_div", "recall"])
def test_export_and_validate_agree_on_a_metric(metric: str, run_copy: Run, tmp_path: Path) -> None:
    settings = [f"evaluation.metric={metric}", "evaluation.recall_prompts=6"]
    report = export(run_copy.folder, tmp_path / "out", accuracy=0.9, overrides=settings).report
    accuracy = report["accuracy"]
    assert accuracy["metric"] == metric
    assert min(accuracy["search"], accuracy["report"]) >= 0.9
    low, high = accuracy["interval_95"]
    assert low <= accuracy["report"] <= high
    table = json.loads((run_copy.folder / "rank_table.json").read_text())
    for point in table["points"]:
        for split in ("search", "report"):
            found = point[split]
            assert {"default", "token_accuracy", "ppl_ratio", accuracy_field(metric)} <= set(found)
            if metric == "kl_div":
                assert found["kl_accuracy"] == pytest.approx(math.exp(-found["kl_div"]), abs=1e-6)
            else:
                base = table["base"][split]["recall"]
                assert found["compressed_recall"] == pytest.approx(base * found["recall"], abs=1e-5)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"accuracy ({metric})" in card
    assert describe(metric) in card

    result = validate(tmp_path / "out")
    assert result.target_met
    assert not result.damaged
    summary = result.summary["accuracy"]
    assert summary["value"] == pytest.approx(accuracy["report"], abs=1e-4)
    assert summary["interval_95"] == pytest.approx([low, high], abs=1e-4)
    assert 0 < summary["kl_div"] < 0.3
    assert 0.5 < summary["top1_agreement"] < 1
    assert summary["recall"] == pytest.approx(summary["compressed_recall"] / summary["base_recall"], abs=1e-5)


def test_the_default_metric_asks_for_no_base_logits(
    run_copy: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rotor.compress import CompressibleModel

    def refuse(self: CompressibleModel) -> None:
        raise AssertionError("the base model was put back for a metric that does not need it")

    monkeypatch.setattr(CompressibleModel, "uncompressed", refuse)
    report = export(run_copy.folder, tmp_path / "out", compression=0.5).report
    assert "kl_div" not in report["accuracy"]["measurements"]["report"]


def test_recall_is_refused_as_the_metric_of_a_model_that_cannot(tiny, tmp_path: Path) -> None:
    from conftest import SHORT_TEXT, calibrated

    run = calibrated(tiny("llama"), tmp_path / "run", "post", 1)
    with pytest.raises(DataError, match="choose another metric"):
        export(run.folder, tmp_path / "out", compression=0.3, overrides=["evaluation.metric=recall"])
    assert not (tmp_path / "out").exists()
    export(run.folder, tmp_path / "out", compression=0.3)
    summary = validate(tmp_path / "out", overrides=SHORT_TEXT).summary["accuracy"]
    assert summary["recall"] is None
    assert "looks up" in summary["recall_not_measured"]


# lm-eval.


def test_lm_eval_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch, demo) -> None:
    checkpoint, _ = demo
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UsageError, match=r"evaluation\.metric lm-eval:hellaswag: the lm-eval package") as error:
        make_metric(Evaluation(metric="lm-eval:hellaswag"), checkpoint.tokenizer, checkpoint.config)
    assert error.value.hint == "pip install rotor-kv[eval]"


@pytest.fixture
def lookup_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A multiple-choice task of look-ups, defined and filled by local files; needs no network."""
    pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval is not installed (pip install rotor-kv[eval])")
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
def test_lm_eval_task_of_local_files(lookup_task: Path, demo, run_copy: Run, tmp_path: Path, capsys) -> None:
    checkpoint, model = demo
    capsys.readouterr()
    spec = Evaluation(metric=f"lm-eval:{lookup_task}", lm_eval_limit=10)
    metric = make_metric(spec, checkpoint.tokenizer, checkpoint.config)
    assert metric._documents("search") == {"rotor_lookup": list(range(0, 20, 2))}
    assert metric._documents("report") == {"rotor_lookup": list(range(1, 20, 2))}
    base = metric.measure_base(model, "report")
    assert "%|" not in capsys.readouterr().err  # no bars but rotor's own
    assert base["score"] >= 0.8  # four choices: 0.25 by chance
    scores = tally(BASE)
    found = metric.measure(model, "report", scores, scores)
    assert found.value == 1
    assert found.fields == {
        metric.name: 1,
        "compressed_score": base["score"],
        "compressed_score_stderr": base["score_stderr"],
    }
    assert found.interval is not None
    assert found.interval[0] <= 1 <= found.interval[1]

    settings = [f"evaluation.metric={metric.name}", "evaluation.lm_eval_limit=10"]
    report = export(run_copy.folder, tmp_path / "out", compression=0.7, overrides=settings).report
    accuracy = report["accuracy"]
    measured = accuracy["measurements"]["report"]
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
        make_metric(Evaluation(metric="lm-eval:no_such_task_here"), checkpoint.tokenizer, checkpoint.config)
    with pytest.raises(DataError, match="needs a tokenizer"):
        make_metric(Evaluation(metric=f"lm-eval:{lookup_task}"), None, checkpoint.config)
    metric = make_metric(Evaluation(metric=f"lm-eval:{lookup_task}"), checkpoint.tokenizer, checkpoint.config)
    result = {"alias": "t", "loss,none": 4.0, "loss_stderr,none": 0.8, "acc,none": 0.5}
    output = {"results": {"t": result}, "higher_is_better": {"t": {"loss": False}}}
    assert metric._read(output) == (0.25, pytest.approx(0.05))
    with pytest.raises(DataError, match="several tasks and no score over all of them") as error:
        metric._read({"results": {"t": result, "u": result}, "higher_is_better": {}})
    assert error.value.hint == "Name one of t, u."
    with pytest.raises(DataError, match="reports no number"):
        metric._read({"results": {"t": {"alias": "t"}}, "higher_is_better": {}})
