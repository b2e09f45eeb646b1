"""The report: one HTML file that parses, stands alone, and holds the run's numbers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support.command_line import expect_error, rotor
from support.pages import Page
from support.paths import DEMO_MODEL
from support.quick import mostly_nightly
from support.runs import reseal

from rotor import Run, export
from rotor.checkpoint.layout import AttentionShape
from rotor.progress import in_time
from rotor.recipe.metric_registry import METRICS
from rotor.search.evaluation.accuracy import Accuracy, Fidelity
from rotor.search.report.collect import _windows, collect
from rotor.search.report.report import report
from rotor.search.table import RankTable


def read(path: Path) -> Page:
    html = path.read_text("utf-8")
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    assert all(address.startswith(("#", "data:,")) for address in page.addresses)
    assert not re.search(r"@import|url\((?!#)", html)
    assert "<script" not in html
    for tag, attributes in page.tags:
        if tag == "svg":
            assert attributes["aria-label"]
    return page


def kept_channels(path: Path) -> list[int]:
    """Channels of each latent in the table of what layers keep."""
    return [int(kept) for kept in re.findall(r"(\d+)/\d+</td><td>", path.read_text("utf-8"))]


@pytest.fixture(scope="module")
def exported(demo_run, tmp_path_factory: pytest.TempPathFactory):
    """exported(recipe) -> (run folder, checkpoint folder), exported once; do not write to them.

    fdc at an accuracy, so that there is a table of points; rotor at a compression, which measures one point.
    """
    made: dict[str, tuple[Path, Path]] = {}

    def get(recipe: str) -> tuple[Path, Path]:
        if recipe not in made:
            folder = tmp_path_factory.mktemp(f"report-{recipe}")
            shutil.copytree(demo_run(recipe).folder, folder / "run")
            goal = {"accuracy": 0.9} if recipe == "fdc" else {"compression": 0.75}
            export(folder / "run", folder / "out", **goal)
            made[recipe] = folder / "run", folder / "out"
        return made[recipe]

    return get


@pytest.mark.parametrize("recipe", mostly_nightly(["fdc", "rotor-16"], lambda recipe: recipe == "fdc"))
def test_export_writes_both_reports_with_the_numbers_of_the_run(recipe: str, exported) -> None:
    run, out = exported(recipe)
    facts = json.loads((out / "rotor.json").read_text())
    page = read(out / "report.html")
    size = facts["kv_bytes_per_token"]
    assert f"{size['before']} → {size['after']}" in page.text
    assert f"{facts['accuracy']['report']:.4f}" in page.text
    low, high = facts["accuracy"]["interval_95"]
    assert f"{low:.4f} to {high:.4f}" in page.text
    table = RankTable.latest(Run.open(run))
    assert table is not None
    for point in table.points:
        assert f"{point.stored:.3f}" in page.text
        assert f"{point.fidelity('search').accuracy:.4f}" in page.text
    for name in ("token_accuracy", "ppl_ratio", "top1_agreement"):
        assert METRICS[name].label in page.text
        assert f"{facts['accuracy']['measurements']['report']['values'][name]:.4f}" in page.text
    for name in ("lookup", "copy"):
        base, filler = (facts["accuracy"]["base"]["report"][f"{name}{end}"] for end in ("", "_filler_tokens"))
        assert f"base {base:.3f}, over {filler} tokens of other text" in page.text
    assert "source: synthetic" in page.text if recipe == "rotor-16" else "source: random" in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 4

    ranks = [int(cell) for layer in facts["ranks"]["stored"] for group in layer for cell in group]
    heads, width = ("0, 1", 128) if recipe == "rotor-16" else ("0", 64)
    assert f"layer 0: KV heads {heads}: {ranks[0]} of {width} channels, " in page.text
    assert kept_channels(out / "report.html") == ranks
    assert "Seconds of each stage are in the report of the run" in page.text
    assert "rotor validate out checks files, numbers and accuracy" in page.text
    in_run = read(run / "report.html")
    assert "rotor export run -o OUT --accuracy 0.99" in in_run.text
    seconds = json.loads((run / "run.json").read_text())["stages"]["capture"]["seconds"]
    assert f"{seconds:.2f}" in in_run.text
    stages = json.loads((run / "run.json").read_text())["stages"].values()
    assert f"together{in_time(sum(stage['seconds'] for stage in stages))}" in in_run.text


def test_windows_are_told_by_their_tokens() -> None:
    shape = AttentionShape(3, 4, 2, 32, 64, windows=(512, None, 512))
    assert _windows(shape) == "2 of 3 layers hold at most 512 tokens"


def test_a_ratio_that_was_left_out_says_why() -> None:
    found = Fidelity(0.9, (0.9, 0.9), {"token_accuracy": 0.9})
    left_out = {"search": {}, "report": {"copy": "it cannot"}}
    assert Accuracy("default", None, {"report": found}, {}, left_out).ratio_rows() == [
        (METRICS["token_accuracy"].label, "0.9000"),
        (METRICS["copy"].label, "left out: it cannot"),
    ]


def test_a_run_that_measured_nothing_says_so(demo_run, tmp_path: Path) -> None:
    folder = shutil.copytree(demo_run("fdc").folder, tmp_path / "run")
    shutil.rmtree(folder / "tables", ignore_errors=True)
    shutil.rmtree(folder / "probes", ignore_errors=True)
    result = report(folder, tmp_path / "page.html")
    page = read(tmp_path / "page.html")
    assert result.figures == ["spectra-qk", "spectra-vo"]
    assert "No point was measured yet" in page.text


def test_a_checkpoint_without_its_run(exported, tmp_path: Path) -> None:
    _, out = exported("fdc")
    moved = shutil.copytree(out, tmp_path / "far" / "away")
    result = report(moved)
    assert result.path == tmp_path / "far" / "away-report.html"
    page = read(result.path)
    assert result.figures == ["points", "layers"]
    assert set(result.absent) == {"spectra", "timings"}
    assert "The run folder is not where rotor.json says" in page.text
    assert len(kept_channels(result.path)) == 20


def test_text_of_a_recipe_is_escaped(demo_run, tmp_path: Path) -> None:
    folder = shutil.copytree(demo_run("fdc").folder, tmp_path / "run")
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(re.sub("summary: .*", "summary: <script>alert(1)</script>", text))
    reseal(folder)
    report(folder)
    assert "<script>alert(1)</script>" in read(folder / "report.html").text


def test_command(exported, tmp_path: Path, capsys) -> None:
    run, out = exported("fdc")
    code, printed, _ = rotor(capsys, "report", out, "-o", tmp_path / "page.html", "--json")
    assert code == 0
    assert json.loads(printed)["figures"] == ["points", "layers", "spectra-qk", "spectra-vo"]
    expect_error(capsys, 2, "a report is an .html file", "report", out, "-o", out / "model.safetensors")
    expect_error(capsys, 1, "neither run.json nor rotor.json", "report", DEMO_MODEL)
    expect_error(capsys, 2, "cannot be written", "report", run, "-o", tmp_path / "nowhere" / "page.html")


def test_a_report_reads_no_bases(demo_run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Singular values are all that it shows of them; those of a large model are hundreds of megabytes."""

    def refuse(run: Run, layer: int) -> None:
        raise AssertionError(f"the bases of layer {layer} were read")

    monkeypatch.setattr(Run, "layer_bases", refuse)
    run = demo_run("fdc")
    data = collect(run.folder)
    assert len(data.spectra) == run.shape.num_layers
    assert all(layer[side][0] == 1 for layer in data.spectra for side in ("qk", "vo"))
