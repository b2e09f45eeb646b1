"""The study: mathematics on cases by hand, a small study on the bundled model, continuing it, tables and plots."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import DEMO_MODEL
from support.runs import SMALL_STUDY as SMALL
from support.runs import TINY_STUDY
from support.stopped import Counting

from rotor import study
from rotor.errors import UsageError
from rotor.search.report.figures import shown_loss
from rotor.tools.study.context import TARGETS, StudyContext
from rotor.tools.study.part import Part, Task, find_part
from rotor.tools.study.parts import curves
from rotor.tools.study.parts.curves import METRIC_LABELS, Curves
from rotor.tools.study.store import StudyStore


class Few(Curves):
    """Two points of each curve, and the targets."""

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for task in super().tasks(study):
            if task.key.endswith(("/p0.30", "/p0.60", "/targets")):
                yield task


class Interrupted(Part):
    """Ctrl-C when the part begins, with the names of the files that are there then."""

    name = "interrupted"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        out = study.store.folder
        raise KeyboardInterrupt(*sorted(path.name for path in [*out.glob("*.md"), *(out / "plots").glob("*.png")]))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory):
    """A study of two recipes with few points and tokens: (result, keyword arguments that give it)."""
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("study") / "study"
    arguments = {
        "recipes": ["rotor", "fdc"],
        "overrides": SMALL,
        "parts": [f"{__file__}:Few"],
        "plots": False,
    }
    return study(DEMO_MODEL, out, **arguments), arguments


@pytest.mark.nightly
def test_small_study_measures_every_part(small) -> None:
    result, _ = small
    records = result.records
    assert result.added == len(records)
    stored = json.loads((result.folder / "results.json").read_text())
    assert stored["records"] == records
    assert stored["settings"]["tokens"]["count"] == 1024
    for name in ("fdc", "rotor"):
        for p in (0.3, 0.6):
            point = records[f"curves/{name}/p{p:.2f}"]
            assert point["stored"] >= p
            for split in ("search", "report"):
                parts = ("token_accuracy", "ppl_ratio", "lookup", "copy")
                smallest = min(point[split][name] for name in parts if name in point[split])
                assert point[split]["accuracy"] == pytest.approx(smallest, abs=1e-6)
            assert point["report"]["kl_div"] >= 0
            assert 0 < point["report"]["top1_agreement"] <= 1
        mild, strong = (records[f"curves/{name}/p{p:.2f}"]["report"]["kl_div"] for p in (0.3, 0.6))
        assert mild < strong
        targets = records[f"curves/{name}/targets"]
        assert list(targets) == [f"{target:.2f}" for target in TARGETS]
        for target, point in targets.items():
            assert "out_of_reach" in point or point["search"]["accuracy"] >= float(target)
    assert records["curves/rotor/p0.60"]["report"]["kl_div"] < records["curves/fdc/p0.60"]["report"]["kl_div"]


@pytest.mark.nightly
def test_second_start_measures_nothing(small) -> None:
    result, arguments = small
    before, begun = (result.folder / "results.json").read_text(), Counting()
    again = study(DEMO_MODEL, result.folder, **arguments, progress=begun)
    assert begun.names == []
    assert again.added == 0
    assert again.records == json.loads(before)["records"]
    assert (result.folder / "results.json").read_text() == before


@pytest.mark.nightly
def test_a_lost_record_is_measured_again_alone(small) -> None:
    result, arguments = small
    path = result.folder / "results.json"
    data = json.loads(path.read_text())
    expected = data["records"].pop("curves/fdc/p0.30")
    path.write_text(json.dumps(data))
    again = study(DEMO_MODEL, result.folder, **arguments)
    assert again.added == 1
    assert again.records["curves/fdc/p0.30"] == expected


@pytest.mark.nightly
def test_other_settings_are_refused(small) -> None:
    result, arguments = small
    others = [*SMALL, "tokens.count=2048", "evaluation.report_tokens=1024"]
    with pytest.raises(
        UsageError, match=r"tokens\.count was 1024, now 2048.*evaluation\.report_tokens was 512, now 1024"
    ):
        study(DEMO_MODEL, result.folder, **{**arguments, "overrides": others})
    with pytest.raises(UsageError, match=r"recipes\.fdc\.ranks\.multiple_of was 16, now 8"):
        study(DEMO_MODEL, result.folder, **{**arguments, "overrides": [*SMALL, "ranks.multiple_of=8"]})


def test_tables_and_plots_appear_as_parts_complete(tiny, tmp_path: Path) -> None:
    """They are there, with what was measured, when the next part begins."""
    pytest.importorskip("matplotlib")
    parts = [f"{__file__}:Few", f"{__file__}:Interrupted"]
    with pytest.raises(KeyboardInterrupt) as caught:
        study(tiny("llama"), tmp_path / "study", ["fdc"], TINY_STUDY, parts=parts)
    assert caught.value.args == ("recipes.png", "summary.md")


def drawn(part: str, name: str, store: StudyStore):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    find_part(part).plots(store)[name](figure)
    return figure


def read_store(folder: Path) -> StudyStore:
    return StudyStore.read(folder, json.loads((folder / "results.json").read_text())["settings"])


@pytest.mark.nightly
def test_curves_start_at_the_uncompressed_model_and_show_crossings(small) -> None:
    """With intervals on KL too; accuracy logarithmic in what is lost."""
    store = read_store(small[0].folder)
    found = curves.curves(store.records)
    accuracy, divergence = drawn("curves", "recipes", store).axes
    assert accuracy.get_yscale() == divergence.get_yscale() == "log"
    for axes, start in ((accuracy, shown_loss(1)), (divergence, 1e-6)):
        lines = [line for line in axes.lines if line.get_label() in found]
        assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in lines] == [(0, start)] * 2
        assert len(axes.collections) == 2  # a shaded interval each
    crossings = {
        (point["stored"], shown_loss(point["report"]["accuracy"]))
        for records in found.values()
        for point in records["targets"].values()
        if "stored" in point
    }
    hollow = [line for line in accuracy.lines if line.get_markersize() == 9]
    assert {place for line in hollow for place in zip(*line.get_data(), strict=True)} == crossings
    point = found["fdc"]["p0.60"]
    assert point["kl_interval"][0] <= point["report"]["kl_div"] <= point["kl_interval"][1]


@pytest.mark.nightly
def test_csv_and_summary(small) -> None:
    result, _ = small
    rows = list(csv.DictReader((result.folder / "results.csv").open()))
    assert [(r["part"], r["recipe"], r["compression_target"]) for r in rows] == [
        ("curves", "rotor", "0.3"),
        ("curves", "rotor", "0.6"),
        ("curves", "fdc", "0.3"),
        ("curves", "fdc", "0.6"),
    ]
    point = result.records["curves/rotor/p0.60"]
    assert {f"{split}_{metric}" for split in ("search", "report") for metric in METRIC_LABELS} <= set(rows[0])
    assert float(rows[1]["report_kl_div"]) == point["report"]["kl_div"]
    assert float(rows[1]["compression_stored"]) == point["stored"]
    assert float(rows[1]["report_interval_low"]) == point["interval"][0]

    summary = (result.folder / "summary.md").read_text()
    assert summary.startswith("# Study of demo-model\n")
    assert "\n## Recipes" in summary
    targets = " | ".join(f"at {target:g}" for target in TARGETS)
    assert f"| recipe | {targets} |" in summary
    assert f"| {point['report']['kl_div']:.5f} |" in summary
    widths: set[int] = set()
    for line in summary.splitlines():
        widths = widths | {line.count("|")} if line.startswith("|") else set()
        assert len(widths) <= 1, line


@pytest.mark.nightly
def test_plots_are_written(small) -> None:
    """Of a study that is complete: nothing is measured for them."""
    first, arguments = small
    assert not any(path.suffix == ".png" for path in first.files)
    result = study(DEMO_MODEL, first.folder, **{**arguments, "plots": True})
    assert result.added == 0
    png = result.folder / "plots" / "recipes.png"
    assert png in result.files
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in png.with_suffix(".svg").read_bytes()


def test_a_part_of_ones_own_is_a_class_in_a_file(tiny, tmp_path: Path) -> None:
    """The one that CONTRIBUTING.md shows."""
    guide = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    path = tmp_path / "layers.py"
    path.write_text(guide[guide.index("## A part of a study") :].split("```python\n")[1].split("```")[0])
    arguments = {"overrides": SMALL, "parts": [f"{path}:Layers"], "plots": False}
    result = study(tiny("llama"), tmp_path / "study", ["fdc"], **arguments)
    assert result.records == {"layers/count": {"count": 2}}
    assert "\n## Layers\n\n| layers |\n| --- |\n| 2 |\n" in (tmp_path / "study" / "summary.md").read_text()
    for name, message in ((f"{path}:Nothing", "is no subclass"), ("none.py:Layers", "no such file")):
        with pytest.raises(UsageError, match=message):
            study(tiny("llama"), tmp_path / "study", ["fdc"], **{**arguments, "parts": [name]})
