"""Metrics: values checked by hand, identity, seeds, bounds, what the table and validate record, errors."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DEMO_MODEL, in_memory

from rotor.calibration.run import Run
from rotor.data.splits import evaluation_data
from rotor.errors import DataError, RecipeError, UsageError
from rotor.evaluation import scoring as evaluation
from rotor.evaluation.fidelity import FidelityMeter
from rotor.evaluation.metrics import EvaluationContext, Measurement, Seen, make_metric, smallest
from rotor.evaluation.metrics.distance import key_words, lookup_text
from rotor.evaluation.scoring import Scores, Tally, answer_scores, batch_logits, position_kl_div, quantiles, resample
from rotor.export.export import export
from rotor.models.checkpoint import Checkpoint
from rotor.models.layerwise import LayerwiseModel
from rotor.models.loading import load_model
from rotor.progress import Progress
from rotor.recipe import Evaluation, load_recipe
from rotor.recipe.metric_registry import METRICS, accuracy_field, describe
from rotor.search.search import rank_path
from rotor.search.table import RankTable
from rotor.validation.validate import validate

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


def context(spec: Evaluation | None = None, checkpoint: Checkpoint | None = None) -> EvaluationContext:
    rows = {split: ROWS for split in ("search", "report")}
    if checkpoint is None:
        return EvaluationContext(spec or Evaluation(), rows, None, None)
    spec = spec or Evaluation()
    data = evaluation_data(
        replace(spec, search_tokens=2048, report_tokens=2048), checkpoint.config, checkpoint.tokenizer
    )
    return EvaluationContext(spec, data.rows, checkpoint.tokenizer, checkpoint.config)


def measured(name: str, base: Scores, other: Scores) -> Measurement:
    metric = make_metric(name, context())
    metric.measure_base(Seen(None, base), "report")  # type: ignore[arg-type]
    return metric.measure(Seen(None, other), "report")  # type: ignore[arg-type]


def test_ratios_by_hand() -> None:
    base, other = tally(BASE), tally(OTHER, BASE)
    agreement = measured("top1_agreement", base, other)
    assert agreement.value == 0.5
    assert agreement.interval == (0.5, 0.5)  # one of two positions in either row
    found = measured("kl_div", base, other)
    mean = (0.65 * math.log(2) + 0.2 * math.log(2 / 3)) / 4
    assert found.fields["kl_div"] == pytest.approx(mean, abs=2e-7)
    assert found.value == pytest.approx(math.exp(-mean), abs=2e-6)
    rows = np.exp(-other.kl_div / 2)
    assert found.interval == pytest.approx((rows.min(), rows.max()), abs=1e-6)  # two rows: both resampled extremes
    assert measured("token_accuracy", base, other).value == 1.0  # three right of four, both
    logs = math.log(0.5 * 0.7 * 0.8 * 0.2) - math.log(0.25 * 0.7 * 0.8 * 0.4)
    assert measured("ppl_ratio", base, other).value == pytest.approx(math.exp(-logs / 4), abs=1e-6)


def test_the_smallest_is_so_in_every_resample() -> None:
    first = Measurement.of(0.9, np.array([0.8, 1.0]))
    second = Measurement.of(0.95, np.array([0.9, 0.9]))
    found = smallest([first, second])
    assert found.value == 0.9
    assert found.resampled is not None
    assert found.resampled.tolist() == [0.8, 0.9]


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
    assert quantiles(resample(lambda a, b: b / a, column, column / 2)) == (0.5, 0.5)
    low, high = quantiles(resample(lambda total: total / 40, column))
    assert low < column.mean() < high
    assert quantiles(resample(lambda total: total / 40, column)) == (low, high)
    assert quantiles(resample(lambda total: total / 40, column, seed=1)) != (low, high)


@pytest.mark.parametrize("name", METRICS)
def test_the_uncompressed_model_has_accuracy_one(name: str, demo) -> None:
    checkpoint, model = demo
    spec = Evaluation(metric=name, seq_len=256, lookup_prompts=4, copy_prompts=4)
    made = context(spec, checkpoint)
    meter = FidelityMeter(made, Progress())
    meter.measure_base(model, "search")
    found = meter.measure(model, "search")
    assert found.accuracy == 1
    assert found.interval == (1, 1)
    assert found.values.get("kl_div", 0) == 0
    assert found.values[accuracy_field(name)] == 1
    assert describe(name)
    assert meter.left_out["search"] == {}


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


# Look-up and copying rows.


def test_lookup_text_asks_for_each_stated_key_once_and_marks_the_answers() -> None:
    keys = [("alpha", "12"), ("beta", "34"), ("gamma", "56")]
    stated, asked, spans = lookup_text(keys, [2, 0, 1], "codes")
    assert stated == 'codes = {\n    "alpha": 12,\n    "beta": 34,\n    "gamma": 56,\n}\n'
    assert asked == '\nassert codes["gamma"] == 56\nassert codes["alpha"] == 12\nassert codes["beta"] == 34\n'
    assert [asked[begin:end] for begin, end in spans] == ["56", "12", "34"]


@pytest.mark.parametrize("seq_len", [256, 512])
@pytest.mark.parametrize("name", ["lookup", "copy"])
def test_rows_of_a_split_are_seeded_and_hold_text_between(name: str, seq_len: int, demo) -> None:
    checkpoint, _ = demo
    spec = Evaluation(lookup_prompts=4, copy_prompts=4, seq_len=seq_len)
    made = context(spec, checkpoint)
    prompts = make_metric(name, made).prompts("search")
    again = make_metric(name, made).prompts("search")
    assert torch.equal(prompts.rows, again.rows)
    assert torch.equal(prompts.answers, again.answers)
    length = prompts.rows.shape[1]
    assert prompts.rows.shape == prompts.answers.shape == (4, length)
    assert length <= seq_len
    room = seq_len == 512 or (name == "copy" and seq_len >= 3 * 32 + 1 + 200)
    assert (prompts.filler_tokens == 200) == room
    assert prompts.filler_tokens >= seq_len // 3
    for other in (
        make_metric(name, made).prompts("report"),
        make_metric(name, replace(made, spec=replace(spec, seed=1))).prompts("search"),
    ):
        assert not torch.equal(other.rows, prompts.rows)
    assert (prompts.rows[:, 0] == 0).all()
    assert not (prompts.rows[:, 1:] == 0).any()  # what separates documents may make a model forget
    for ids, answers in zip(prompts.rows, prompts.answers, strict=True):
        where = answers.nonzero()[:, 0]
        text = made.rows["search"].flatten()
        middle = ids[seq_len // 3 :][:20]
        assert any(torch.equal(text[i : i + 20], middle) for i in range(len(text) - 20))
        if name == "copy":
            count = 32
            assert torch.equal(ids[1 : 1 + count], ids[-count:])
            assert torch.equal(ids[1 + count : 1 + 2 * count], ids[-count:])
            assert len(set(ids[-count:].tolist())) == count
            assert length == 1 + 3 * count + prompts.filler_tokens
            assert where.tolist() == list(range(length - count + 1, length))
        else:
            digits = checkpoint.tokenizer.decode(ids[answers]).replace(" ", "")
            assert digits.isdigit()
            assert len(digits) >= 2 * 2
            assert len(digits) % 2 == 0
            assert int(where.min()) >= length - seq_len // 3


def test_batches_do_not_change_the_scores_of_answers(demo, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, model = demo
    prompts = make_metric("lookup", context(Evaluation(lookup_prompts=3, seq_len=256), checkpoint)).prompts("report")
    states = model.final_states(prompts.rows)
    together = answer_scores(model, prompts.rows, prompts.answers, states)
    monkeypatch.setitem(evaluation.LOGIT_BYTES, "cpu", 1)
    alone = answer_scores(model, prompts.rows, prompts.answers, states)
    np.testing.assert_allclose(alone.probability, together.probability, rtol=1e-5)
    logits = model.model(prompts.rows).logits[:, :-1].double().softmax(-1)
    right = logits.gather(-1, prompts.rows[:, 1:, None])[..., 0]
    expected = (right * prompts.answers[:, 1:]).sum(-1).detach().numpy()
    np.testing.assert_allclose(together.probability, expected, rtol=1e-4)
    hits = (logits.argmax(-1) == prompts.rows[:, 1:]) & prompts.answers[:, 1:]
    assert together.hits.tolist() == hits.sum(-1).tolist()


def test_the_bundled_model_looks_up_and_a_random_one_leaves_it_out(demo, tiny, caplog) -> None:
    checkpoint, model = demo
    meter = FidelityMeter(context(Evaluation(lookup_prompts=8, copy_prompts=8), checkpoint), Progress())
    meter.measure_base(model, "report")
    assert 0.35 < meter.base["report"]["lookup"] < 0.75  # measured: 0.52 over 64 rows of the search split
    assert 0.3 < meter.base["report"]["copy"] < 0.6  # measured: 0.40
    assert meter.base["report"]["copy_filler_tokens"] == 200
    other = Checkpoint(tiny("llama"))
    random = LayerwiseModel.of(load_model(other.folder, torch.device("cpu"), torch.float32))
    spec = Evaluation(seq_len=128, lookup_prompts=4, copy_prompts=4)
    caplog.clear()
    with caplog.at_level("INFO", "rotor"):
        meter = FidelityMeter(context(spec, other), Progress())
        for split in ("search", "report"):
            meter.measure_base(random, split)
    for name in ("lookup", "copy"):
        why = rf"{name}: the uncompressed model gives the right answers a mean probability of 0\.0\d\d "
        assert re.match(why, meter.left_out["search"][name])
        assert sum(f"leaves out `{name}`" in message for message in caplog.messages) == 1
    found = meter.measure(random, "search")
    assert found.accuracy == 1
    assert {"lookup", "copy"}.isdisjoint(found.values)
    with pytest.raises(DataError, match="choose another metric"):
        FidelityMeter(context(replace(spec, metric="lookup"), other), Progress()).measure_base(random, "search")


def test_lookup_says_what_it_cannot_do(demo) -> None:
    checkpoint, _ = demo
    made = context(Evaluation(), checkpoint)
    with pytest.raises(DataError, match="needs a tokenizer with character offsets, and the model's folder has none"):
        make_metric("lookup", replace(made, tokenizer=None)).prompts("search")
    short = replace(made, rows={"search": made.rows["search"][:, :24]})
    with pytest.raises(DataError, match="rows of 24 tokens are too short to state two keys"):
        make_metric("lookup", short).prompts("search")
    with pytest.raises(DataError, match="copy: rows of 5 tokens are too short"):
        make_metric("copy", replace(made, rows={"search": made.rows["search"][:, :5]})).prompts("search")


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
        (
            "top1",
            "got 'top1', expected one of default, text, token_accuracy, ppl_ratio, lookup, copy, top1_agreement, kl",
        ),
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
    for name in ("lookup_prompts", "lookup_keys", "copy_prompts", "copy_tokens", "filler_tokens", "lm_eval_limit"):
        with pytest.raises(RecipeError, match=f"evaluation.{name}: got 0"):
            load_recipe("fdc", [f"evaluation.{name}=0"])


@pytest.mark.parametrize("metric", ["kl_div", "lookup", "text"])
def test_export_and_validate_agree_on_a_metric(metric: str, run_copy: Run, tmp_path: Path) -> None:
    settings = [f"evaluation.metric={metric}", "evaluation.lookup_prompts=6", "evaluation.seq_len=256"]
    report = export(run_copy.folder, tmp_path / "out", accuracy=0.9, overrides=settings).report
    accuracy = report["accuracy"]
    assert accuracy["metric"] == metric
    assert accuracy["search"] >= 0.9
    low, high = accuracy["interval_95"]
    assert low <= accuracy["report"] <= high
    table = RankTable.latest(run_copy)
    assert table is not None
    assert [point.stored for point in table.points if point.report] == [report["compression"]["stored"]]
    for point in table.points:
        for split in ("search", "report"):
            if not point.has(split):
                continue
            found = point.fidelity(split).values
            assert {"text", "token_accuracy", "ppl_ratio", accuracy_field(metric)} <= set(found)
            assert found["text"] == min(found["token_accuracy"], found["ppl_ratio"])
            assert found[accuracy_field(metric)] == point.fidelity(split).accuracy
            if metric == "kl_div":
                assert found["kl_accuracy"] == pytest.approx(math.exp(-found["kl_div"]), abs=1e-6)
            elif metric == "lookup":
                base = table.base[split]["lookup"]
                assert found["compressed_lookup"] == pytest.approx(base * found["lookup"], abs=1e-5)
    chosen = accuracy["measurements"]["report"]["values"]
    assert chosen["default"] == min(chosen[name] for name in ("token_accuracy", "ppl_ratio", "lookup", "copy"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"accuracy ({metric})" in card
    assert describe(metric) in card
    for name in ("token_accuracy", "ppl_ratio", "lookup", "copy", "top1_agreement"):
        assert f"| {METRICS[name].label} | {chosen[name]:.4f}" in card
    filler = accuracy["base"]["report"]["copy_filler_tokens"]
    assert f", over {filler} tokens of other text |" in card
    assert f", over {filler} tokens of other text" in (tmp_path / "out" / "report.html").read_text()

    result = validate(tmp_path / "out")
    assert result.target_met
    assert not result.damaged
    assert result.summary["same_data_as_export"]
    summary = result.summary["accuracy"]
    assert summary["value"] == pytest.approx(accuracy["report"], abs=1e-4)
    assert summary["interval_95"] == pytest.approx([low, high], abs=1e-4)
    assert 0 < summary["kl_div"] < 0.3
    assert 0.5 < summary["top1_agreement"] < 1
    assert summary["lookup"] == pytest.approx(summary["compressed_lookup"] / summary["base_lookup"], abs=1e-5)
    assert summary["left_out"] == {}


def test_another_metric_adds_a_table_and_wipes_none(run_copy: Run, tmp_path: Path) -> None:
    shutil.rmtree(run_copy.folder / "tables", ignore_errors=True)  # of tests before
    first = export(run_copy.folder, tmp_path / "a", accuracy=0.9, overrides=["evaluation.metric=text"])
    table = RankTable.latest(run_copy)
    export(run_copy.folder, tmp_path / "b", compression=0.4, overrides=["evaluation.metric=kl_div"])
    other = RankTable.latest(run_copy)
    assert table is not None
    assert other is not None
    assert (table.context.metric, other.context.metric) == ("text", "kl_div")
    assert len(list((run_copy.folder / "tables").glob("*.json"))) == 3  # and latest.json
    again = export(run_copy.folder, tmp_path / "c", accuracy=0.9, overrides=["evaluation.metric=text"])
    assert again.measured_points == 0
    assert again.report["ranks"] == first.report["ranks"]


# lm-eval.


def test_lm_eval_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch, demo) -> None:
    checkpoint, _ = demo
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UsageError, match=r"evaluation\.metric lm-eval:hellaswag: the lm-eval package") as error:
        make_metric("lm-eval:hellaswag", context(Evaluation(metric="lm-eval:hellaswag"), checkpoint))
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
def test_lm_eval_task_of_local_files(lookup_task: Path, demo, run_copy: Run, tmp_path: Path, capsys) -> None:
    checkpoint, model = demo
    capsys.readouterr()
    spec = Evaluation(metric=f"lm-eval:{lookup_task}", lm_eval_limit=10)
    metric = make_metric(spec.metric, context(spec, checkpoint))
    assert metric._documents("search") == {"rotor_lookup": list(range(0, 20, 2))}
    assert metric._documents("report") == {"rotor_lookup": list(range(1, 20, 2))}
    base = metric.measure_base(Seen(model, tally(BASE)), "report")
    assert "%|" not in capsys.readouterr().err  # no bars but rotor's own
    assert base["score"] >= 0.8  # four choices: 0.25 by chance
    found = metric.measure(Seen(model, tally(BASE)), "report")
    assert found.value == 1
    assert found.fields == {
        "compressed_score": base["score"],
        "compressed_score_stderr": base["score_stderr"],
    }
    assert found.interval is not None
    assert found.interval[0] <= 1 <= found.interval[1]

    settings = [f"evaluation.metric={metric.name}", "evaluation.lm_eval_limit=10"]
    report = export(run_copy.folder, tmp_path / "out", compression=0.7, overrides=settings).report
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
        make_metric("lm-eval:no_such_task_here", context(None, checkpoint))
    with pytest.raises(DataError, match="needs a tokenizer"):
        make_metric(f"lm-eval:{lookup_task}", context())
    metric = make_metric(f"lm-eval:{lookup_task}", context(None, checkpoint))
    result = {"alias": "t", "loss,none": 4.0, "loss_stderr,none": 0.8, "acc,none": 0.5}
    output = {"results": {"t": result}, "higher_is_better": {"t": {"loss": False}}}
    assert metric._read(output) == (0.25, pytest.approx(0.05))
    with pytest.raises(DataError, match="several tasks and no score over all of them") as error:
        metric._read({"results": {"t": result, "u": result}, "higher_is_better": {}})
    assert error.value.hint == "Name one of t, u."
    with pytest.raises(DataError, match="reports no number"):
        metric._read({"results": {"t": {"alias": "t"}}, "higher_is_better": {}})
