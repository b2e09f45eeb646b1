"""Measurements on each split: text alone for a metric of text, positions, tasks over a distance; what is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.paths import DEMO_MODEL, ROOT

from rotor import Progress, export, validate
from rotor.models.outline import ModelOutline
from rotor.models.source import Checkpoint
from rotor.models.splits import evaluation_data
from rotor.recipe.metric_registry import report_metrics
from rotor.recipe.reading import load_recipe
from rotor.recipe.sections import Evaluation
from rotor.search.evaluation.estimate import evaluation_estimates
from rotor.search.evaluation.fidelity import FidelityMeter
from rotor.search.evaluation.prompts import EvaluationContext, make_prompts
from rotor.search.report.collect import collect
from rotor.search.table import RankTable

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
    meter = FidelityMeter(EvaluationContext.of(spec, data, checkpoint.tokenizer, checkpoint.config), progress)
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
    cpu, needed = torch.device("cpu"), {}
    for metric in ("text", "default"):
        recipe = load_recipe("rotor", [f"evaluation.metric={metric}", "evaluation.report_tokens=1024"])
        needed[metric] = evaluation_estimates(outline, recipe, cpu, torch.float32)[True].disk_bytes
    assert needed["text"] < needed["default"]


def test_rows_are_as_long_as_what_is_served_and_told_by_position(demo) -> None:
    """Of a model that is right in the first 512 positions alone, the report says where it is wrong."""
    checkpoint, network = demo
    assert Evaluation().seq_len == 2048
    spec = Evaluation("text", str(DOCS), search_tokens=2048, report_tokens=4096, metric="text")
    data = evaluation_data(spec, checkpoint.config, checkpoint.tokenizer)
    assert (data.search.shape, data.report.shape) == ((1, 2048), (2, 2048))
    meter = FidelityMeter(EvaluationContext.of(spec, data, checkpoint.tokenizer, checkpoint.config), Progress())
    for split in ("search", "report"):
        meter.measure_base(network, split)

    def read(rows, prefill, advance):
        states = network.final_states(rows)
        return torch.cat([states[:, :512], states[:, 512:].flip(-1)], dim=1)

    found = meter.measure(network, "report", read)
    assert list(found.positions) == ["0-512", "512-1024", "1024-2048"]
    assert (found.positions["0-512"]["ppl_ratio"], found.positions["0-512"]["kl_div"]) == (1, 0)
    assert all(found.positions[name]["kl_div"] > 1 for name in ("512-1024", "1024-2048"))
    assert meter.measure(network, "search", read).positions == {}
    told = dict(meter.accuracy({"report": found, "search": found}, None, "docs").part_rows())
    assert told["positions 0 to 512"] == "next tokens 1.0000, perplexity 1.0000, KL 0.0000"
    low, high = found.interval
    assert low < found.accuracy < high  # eight runs of two rows are drawn


@pytest.fixture(scope="module")
def exported(demo_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import shutil

    folder = tmp_path_factory.mktemp("measured")
    shutil.copytree(demo_run("rotor").folder, folder / "run")
    settings = [*OF_DOCS, "evaluation.seq_len=2048", "evaluation.report_tokens=4096", "search.resolution=0.2"]
    export(folder / "run", folder / "out", accuracy=0.9, overrides=settings)
    return folder


@pytest.mark.nightly
def test_an_export_reports_positions(exported: Path) -> None:
    report = collect(exported / "out")
    (told,) = (text for label, text in report.ratios if label == "positions 1024 to 2048")
    assert f"| positions 1024 to 2048 | {told} |" in (exported / "out" / "README.md").read_text()
    checked = validate(exported / "out", text=DOCS, overrides=[*OF_DOCS[2:], "evaluation.report_tokens=4096"])
    assert not checked.damaged
    assert f"KL {checked.summary['accuracy']['positions']['1024-2048']['kl_div']:.4f}" in told


@pytest.mark.nightly
def test_another_report_split_keeps_what_was_searched(exported: Path) -> None:
    """Only the point that is written is measured, on the new report split."""
    from rotor.calibration.run import Run

    settings = [*OF_DOCS, "evaluation.seq_len=2048", "evaluation.report_tokens=2048", "search.resolution=0.2"]
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
    checkpoint = Checkpoint(DEMO_MODEL)
    longer = ["evaluation.filler_tokens=1500", "evaluation.seq_len=2048", "evaluation.report_tokens=4096"]
    recipe = load_recipe("rotor", [*OF_DOCS, *longer])
    data = evaluation_data(recipe.evaluation, checkpoint.config, checkpoint.tokenizer)
    context = EvaluationContext.of(recipe.evaluation, data, checkpoint.tokenizer, checkpoint.config)
    for name in ("lookup", "copy"):
        prompts = make_prompts(name, context, "report")
        assert prompts.filler_tokens == 1500
        assert prompts.rows.shape[1] <= 2048
