"""What is measured on each split: text alone for a metric of text, long rows, tasks over a distance; what is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.paths import DEMO_MODEL, ROOT

from rotor.calibration.planning.outline import ModelOutline
from rotor.models.lengths import long_sequence_count
from rotor.models.source import Checkpoint
from rotor.models.splits import LONG_SPLIT, evaluation_data
from rotor.progress import Progress
from rotor.recipe import Evaluation, distance_overrides, load_recipe
from rotor.recipe.metric_registry import report_metrics
from rotor.search.evaluation.fidelity import FidelityMeter
from rotor.search.evaluation.prompts import EvaluationContext, make_prompts
from rotor.search.export.export import export
from rotor.search.report.collect import collect
from rotor.search.table import RankTable
from rotor.tools.validation.validate import validate

DOCS = ROOT / "docs"
OF_DOCS = ["evaluation.source=text", f"evaluation.path={DOCS}", "evaluation.search_tokens=512"]
OF_DOCS += ["evaluation.lookup_prompts=4", "evaluation.copy_prompts=4"]
SPEC = Evaluation("text", str(DOCS), seq_len=128, search_tokens=512, report_tokens=4096)


class Counted(Progress):
    """Notes how many tokens are measured."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: list[float] = []

    def task(self, name, total, unit):
        if name == "measure":
            self.totals.append(total)
        return super().task(name, total, unit)


def test_a_metric_of_text_measures_text_alone(demo) -> None:
    """On both splits: no look-ups, no copies; and what is forecast is what runs."""
    checkpoint, network = demo
    spec = replace(SPEC, metric="text", report_tokens=1024)
    data, progress = evaluation_data(spec, checkpoint.config, checkpoint.tokenizer), Counted()
    meter = FidelityMeter(EvaluationContext(spec, data.sequences, checkpoint.tokenizer, checkpoint.config), progress)
    for split in ("search", "report"):
        meter.measure_base(network, split)
        assert set(meter.measured(split)) <= {"token_accuracy", "ppl_ratio", "top1_agreement", "kl_div"}
    assert progress.totals == [512, 1024]
    found = meter.measure(network, "report")
    assert found.accuracy == 1
    assert found.values["kl_div"] == 0
    assert not {"lookup", "copy", "default"} & found.values.keys()
    assert "lookup" in report_metrics("default")
    assert "copy" in report_metrics("lookup")
    outline = ModelOutline.of(checkpoint)
    import torch

    cpu, needed = torch.device("cpu"), {}
    for metric in ("text", "default"):
        recipe = load_recipe("rotor", [f"evaluation.metric={metric}", "evaluation.report_tokens=1024"])
        needed[metric] = outline.evaluation(recipe, cpu, torch.float32)[True].disk_bytes
    assert needed["text"] < needed["default"]


def test_long_rows_are_of_the_report_split(demo) -> None:
    checkpoint, network = demo
    data = evaluation_data(SPEC, checkpoint.config, checkpoint.tokenizer)
    assert data.long is not None
    assert data.long.shape == (1, 2048)
    assert list(data.sequences) == ["search", "report", LONG_SPLIT]
    assert data.long[0, :128].tolist() == data.report[0].tolist()
    assert replace(data, long=None).sha256 != data.sha256
    meter = FidelityMeter(EvaluationContext(SPEC, data.sequences, checkpoint.tokenizer, checkpoint.config), Progress())
    meter.measure_base(network, LONG_SPLIT)
    assert set(meter.measured(LONG_SPLIT)) == {"token_accuracy", "ppl_ratio", "kl_div"}
    found = meter.measure(network, LONG_SPLIT)
    assert (found.accuracy, found.values["kl_div"]) == (1, 0)
    config = checkpoint.config
    assert [long_sequence_count(n, 512, config) for n in (4095, 4096, 24576)] == [0, 1, 6]
    assert long_sequence_count(24576, 2048, config) == 0
    short = type(config)(**config.to_dict() | {"max_position_embeddings": 2047})
    assert long_sequence_count(24576, 512, short) == 0


@pytest.fixture(scope="module")
def exported(demo_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import shutil

    folder = tmp_path_factory.mktemp("measured")
    shutil.copytree(demo_run("rotor").folder, folder / "run")
    settings = [*OF_DOCS, "evaluation.report_tokens=4096", "search.resolution=0.2"]
    export(folder / "run", folder / "out", accuracy=0.9, overrides=settings)
    return folder


@pytest.mark.nightly
def test_an_export_reports_long_rows(exported: Path) -> None:
    report = collect(exported / "out")
    (told,) = (text for label, text in report.ratios if label == "rows of 2,048 tokens")
    assert told.endswith("2047 predicted tokens")
    assert f"| rows of 2,048 tokens | {told} |" in (exported / "out" / "README.md").read_text()
    checked = validate(exported / "out", text=DOCS, overrides=[*OF_DOCS[2:], "evaluation.report_tokens=4096"])
    assert not checked.damaged
    assert f"KL {checked.summary['accuracy'][LONG_SPLIT]['kl_div']:.4f}" in told
    without = validate(exported / "out", text=DOCS, overrides=[*OF_DOCS[2:], "evaluation.report_tokens=512"])
    assert LONG_SPLIT not in without.summary["accuracy"]


@pytest.mark.nightly
def test_another_report_split_keeps_what_was_searched(exported: Path) -> None:
    """Only the point that is written is measured, on the new report split."""
    from rotor.calibration.run import Run

    settings = [*OF_DOCS, "evaluation.report_tokens=1024", "search.resolution=0.2"]
    before = RankTable.latest(Run.open(exported / "run"))
    again = export(exported / "run", exported / "again", accuracy=0.9, overrides=settings)
    assert again.measured_points == 1
    table = RankTable.latest(Run.open(exported / "run"))
    assert before is not None
    assert table is not None
    assert table.context.key != before.context.key
    assert [point.search for point in table.points] == [point.search for point in before.points]
    assert sum(point.report is not None for point in table.points) == 1
    back = export(
        exported / "run", exported / "back", accuracy=0.9, overrides=[*settings, "evaluation.report_tokens=4096"]
    )
    assert back.measured_points == 0
    seeded = export(
        exported / "run", exported / "seed", accuracy=0.9, overrides=[*settings, "evaluation.copy_prompts=5"]
    )
    assert seeded.measured_points > 1


def test_tasks_over_a_distance() -> None:
    """Rows have room for what is stated, the text in between, and what asks."""
    assert distance_overrides(None) == ()
    checkpoint = Checkpoint(DEMO_MODEL)
    recipe = load_recipe("rotor", [*OF_DOCS, *distance_overrides(1500), "evaluation.report_tokens=4096"])
    assert recipe.evaluation.seq_len == 2048
    data = evaluation_data(recipe.evaluation, checkpoint.config, checkpoint.tokenizer)
    context = EvaluationContext(recipe.evaluation, data.sequences, checkpoint.tokenizer, checkpoint.config)
    for name in ("lookup", "copy"):
        prompts = make_prompts(name, context, "report")
        assert prompts.filler_tokens == 1500
        assert prompts.rows.shape[1] <= 2048
