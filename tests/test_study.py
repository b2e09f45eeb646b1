"""The study: mathematics on cases by hand, a small study on the bundled model, continuing it, tables and plots."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import DEMO_MODEL

from rotor.calibration.run import Run
from rotor.errors import DataError, UsageError
from rotor.prediction.devices import bundled_devices
from rotor.recipe import load_recipe
from rotor.recipe.settings import Compute
from rotor.report.style import shown_loss
from rotor.search import tiers as tier_search
from rotor.search.measurer import rank_path
from rotor.study import caches
from rotor.study import context as study_context
from rotor.study.part import find_part
from rotor.study.parts import combine, curves, pruning, tiers, tokens, zdc
from rotor.study.records import METRIC_LABELS
from rotor.study.request import StudyPlan
from rotor.study.store import StudyStore
from rotor.study.study import plan_study, study
from rotor.study.variants import reads_tokens

SMALL = [
    "tokens.count=1024",
    "tokens.seq_len=64",
    "evaluation.lookup_prompts=4",
    "evaluation.copy_prompts=4",
    "evaluation.seq_len=64",
    "evaluation.search_tokens=256",
    "evaluation.report_tokens=512",
    "search.resolution=0.2",
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory):
    """A study of two recipes with few points and tokens: (result, keyword arguments that give it)."""
    pytest.importorskip("matplotlib")
    patch = pytest.MonkeyPatch()
    patch.setattr(curves, "COMPRESSIONS", (0.3, 0.6))
    patch.setattr(pruning, "SHARES", (0.0, 0.5))
    patch.setattr(pruning, "CENTROIDS", (16, 4096))
    out = tmp_path_factory.mktemp("study") / "study"
    arguments = {
        "recipes": ["fdc", "rotor"],
        "overrides": SMALL,
        "counts": (256, 1024),
        "parts": ["all"],
        "ablations": {"per-head": ["groups.size=1"]},
        "plots": False,
    }
    yield study(DEMO_MODEL, out, **arguments), arguments
    patch.undo()


def test_small_study_measures_every_part(small) -> None:
    result, _ = small
    records = result.records
    assert result.added == len(records)
    stored = json.loads((result.folder / "results.json").read_text())
    assert stored["records"] == records
    assert stored["settings"]["tokens"]["count"] == 1024
    for name, part in (("fdc", "curves"), ("rotor", "curves"), ("rotor-per-head", "ablation")):
        for p in (0.3, 0.6):
            point = records[f"{part}/{name}/p{p:.2f}"]
            assert point["stored"] >= p
            for split in ("search", "report"):
                parts = ("token_accuracy", "ppl_ratio", "lookup", "copy")
                smallest = min(point[split][name] for name in parts if name in point[split])
                assert point[split]["accuracy"] == pytest.approx(smallest, abs=1e-6)
            assert point["report"]["kl_div"] >= 0
            assert 0 < point["report"]["top1_agreement"] <= 1
        mild, strong = (records[f"{part}/{name}/p{p:.2f}"]["report"]["kl_div"] for p in (0.3, 0.6))
        assert mild < strong
        targets = records[f"{part}/{name}/targets"]
        assert list(targets) == ["0.99", "0.95", "0.90"]
        for target, point in targets.items():
            assert "out_of_reach" in point or point["search"]["accuracy"] >= float(target)
    assert records["curves/rotor/p0.60"]["report"]["kl_div"] < records["curves/fdc/p0.60"]["report"]["kl_div"]

    assert records["tokens/fdc/random/1024/p0.50"]["count"] == 1024
    assert records["tokens/fdc/text/256/p0.50"]["report"]["kl_div"] > 0
    same, seeds = (records[f"tokens/fdc/{source}/1024/p0.50"]["bases"]["random"] for source in ("random", "random-1"))
    assert same["qk"]["ratio"] == 0 < seeds["qk"]["ratio"] < 2
    assert seeds["vo"]["delta"] == 0  # from the weights alone
    assert 0 < seeds["qk"]["angles_degrees"]["0.5"]["mean"] <= seeds["qk"]["angles_degrees"]["0.5"]["largest"] <= 90
    found = {key: record for key, record in records.items() if key.startswith("pruning/")}
    assert [(r["share"], r["kmeans"]) for r in found.values()] == [(0.0, None), (0.5, None), (0.5, 16), (0.5, 4096)]
    assert "4096 centroids for 512 tokens" in records["pruning/fdc/kmeans-4096/p0.50"].get("skipped", "")
    assert all("skipped" in record or record["report"]["kl_div"] > 0 for record in found.values())
    assert not (result.folder / "runs" / "variant").exists()


def test_fidelity_is_what_validate_reports(small, tmp_path: Path) -> None:
    """KL and agreement of a point against a compressed checkpoint loaded beside the source."""
    from rotor.export.export import export
    from rotor.validation.validate import validate

    result, _ = small
    run = Run.open(result.folder / "runs" / "fdc")
    plan = rank_path(run, run.recipe).at_compression(0.6)
    assert plan is not None
    export(run.folder, tmp_path / "out", compression=0.6)
    summary = validate(tmp_path / "out", dtype="float32").summary
    point = result.records["curves/fdc/p0.60"]
    assert point["stored"] == pytest.approx(plan.stored)
    assert summary["accuracy"]["kl_div"] == pytest.approx(point["report"]["kl_div"], rel=1e-3, abs=1e-6)
    assert summary["accuracy"]["top1_agreement"] == pytest.approx(point["report"]["top1_agreement"], abs=0.003)


def test_second_start_measures_nothing(small, monkeypatch: pytest.MonkeyPatch) -> None:
    result, arguments = small

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(study_context, "calibrate", refuse)
    monkeypatch.setattr("rotor.search.measurer.Measurer.measure", refuse)
    before = (result.folder / "results.json").read_text()
    again = study(DEMO_MODEL, result.folder, **arguments)
    assert again.added == 0
    request = StudyPlan.of(**{key: value for key, value in arguments.items() if key != "plots"})
    found = plan_study(DEMO_MODEL, result.folder, request, Compute())
    assert [(part.calibrations, part.points) for part in found.parts] == [(0, 0)] * len(found.parts)
    assert found.known_records == len(json.loads(before)["records"])
    assert (result.folder / "results.json").read_text() == before


def test_a_lost_record_is_measured_again_alone(small) -> None:
    result, arguments = small
    path = result.folder / "results.json"
    data = json.loads(path.read_text())
    expected = data["records"].pop("curves/fdc/p0.30")
    path.write_text(json.dumps(data))
    again = study(DEMO_MODEL, result.folder, **arguments)
    assert again.added == 1
    assert again.records["curves/fdc/p0.30"] == expected


def test_numbers_of_tokens_that_cannot_be_are_noted(small, monkeypatch: pytest.MonkeyPatch) -> None:
    result, arguments = small

    def too_short(*args: object, **kwargs: object) -> None:
        raise DataError("tokens.path text: 3 rows of 512 tokens, expected 4.")

    monkeypatch.setattr(study_context, "calibrate", too_short)
    again = study(DEMO_MODEL, result.folder, **{**arguments, "parts": ["tokens"], "counts": (2048,)})
    assert (
        again.records["tokens/fdc/text/2048/p0.50"]["skipped"] == "tokens.path text: 3 rows of 512 tokens, expected 4."
    )
    assert "not measured: tokens.path text: 3 rows" in (result.folder / "summary.md").read_text()


def test_other_settings_are_refused(small) -> None:
    result, arguments = small
    others = [*SMALL, "tokens.count=2048", "evaluation.report_tokens=1024"]
    with pytest.raises(
        UsageError, match=r"tokens\.count was 1024, now 2048.*evaluation\.report_tokens was 512, now 1024"
    ):
        study(DEMO_MODEL, result.folder, **{**arguments, "overrides": others})
    with pytest.raises(UsageError, match=r"recipes\.fdc\.ranks\.multiple_of was 16, now 8"):
        study(DEMO_MODEL, result.folder, **{**arguments, "overrides": [*SMALL, "ranks.multiple_of=8"]})
    with pytest.raises(UsageError, match="--focus palu: not among the recipes"):
        study(DEMO_MODEL, result.folder, **{**arguments, "focus": ["palu"]})
    with pytest.raises(UsageError, match="all are measured the same way"):
        study(DEMO_MODEL, result.folder, **{**arguments, "ablations": {"x": ["evaluation.seq_len=32"]}})


def test_tables_and_plots_appear_as_parts_complete(tmp_path: Path, monkeypatch) -> None:
    """They are there, with what was measured, when the next part begins."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(curves, "COMPRESSIONS", (0.5,))
    out = tmp_path / "study"
    seen: list[list[str]] = []

    def tasks(self, context) -> None:
        seen.append(sorted(path.name for path in [*out.glob("*.md"), *(out / "plots").glob("*.png")]))
        raise KeyboardInterrupt

    monkeypatch.setattr(tokens.Tokens, "tasks", tasks)
    with pytest.raises(KeyboardInterrupt):
        study(DEMO_MODEL, out, ["fdc"], SMALL, parts=["curves", "tokens"])
    assert seen == [["recipes.png", "summary.md"]]


def test_a_recipe_that_no_tokens_change_is_left_out(tmp_path: Path) -> None:
    """Of a recipe of which all is of the weights alone, nothing is measured."""
    assert reads_tokens(load_recipe("fdc"))
    assert reads_tokens(load_recipe("rotor-plain"))
    assert not reads_tokens(load_recipe("fdc-prerope"))
    alone = study(DEMO_MODEL, tmp_path / "study", ["fdc-prerope"], SMALL, parts=["tokens", "pruning"], plots=False)
    assert alone.records == {}


def drawn(part: str, name: str, store: StudyStore):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    find_part(part).plots(store)[name](figure)
    return figure


def read_store(folder: Path) -> StudyStore:
    return StudyStore.read(folder, json.loads((folder / "results.json").read_text())["settings"])


def test_curves_start_at_the_uncompressed_model_and_show_crossings(small) -> None:
    """With intervals on KL too; accuracy logarithmic in what is lost."""
    store = read_store(small[0].folder)
    found = curves.curves(store, "curves")
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


def test_csv_and_summary(small) -> None:
    result, _ = small
    rows = list(csv.DictReader((result.folder / "results.csv").open()))
    assert [(r["part"], r["recipe"], r["compression_target"]) for r in rows] == [
        ("curves", "fdc", "0.3"),
        ("curves", "fdc", "0.6"),
        ("curves", "rotor", "0.3"),
        ("curves", "rotor", "0.6"),
        ("ablation", "rotor-per-head", "0.3"),
        ("ablation", "rotor-per-head", "0.6"),
    ]
    point = result.records["curves/rotor/p0.60"]
    assert {f"{split}_{metric}" for split in ("search", "report") for metric in METRIC_LABELS} <= set(rows[0])
    assert float(rows[3]["report_kl_div"]) == point["report"]["kl_div"]
    assert float(rows[3]["compression_stored"]) == point["stored"]
    assert float(rows[3]["report_interval_low"]) == point["interval"][0]

    summary = (result.folder / "summary.md").read_text()
    assert summary.startswith("# Study of demo-model\n")
    for title in ("Recipes", "Ablation", "Error and bases by source", "Pruning and K-means"):
        assert f"\n## {title}" in summary
    assert "| recipe | at 0.99 | at 0.95 | at 0.9 |" in summary
    assert f"| {point['report']['kl_div']:.5f} |" in summary
    ablation = summary[summary.index("\n## Ablation") :]
    assert ablation.index("| `rotor` |") < ablation.index("| `rotor-per-head` |")  # what was changed comes first
    widths: set[int] = set()
    for line in summary.splitlines():
        widths = widths | {line.count("|")} if line.startswith("|") else set()
        assert len(widths) <= 1, line


def test_overheads_are_predicted(small) -> None:
    """Rebuilding writes and reads keys and values of full width: nearly twice the uncompressed model's time more."""
    result, arguments = small
    found = study(DEMO_MODEL, result.folder, **{**arguments, "parts": ["overhead"]}).records["overhead/fdc/p0.50"]
    assert found["stored"] >= 0.5
    assert 0.5 * (1 - found["stored"]) < found["time"] < 1
    assert 1.5 < found["rebuilt"] - found["time"] < 2
    assert found["unbalanced"] >= 0.99 * found["time"]
    assert "| `fdc` | " in (result.folder / "summary.md").read_text().partition("## Overheads, predicted")[2]


def test_plots_are_written(small) -> None:
    """Of a study that is complete: nothing is measured for them."""
    first, arguments = small
    assert not any(path.suffix == ".png" for path in first.files)
    result = study(DEMO_MODEL, first.folder, **{**arguments, "plots": True})
    assert result.added == 0
    for name in ("recipes", "ablation", "tokens", "pruning"):
        png = result.folder / "plots" / f"{name}.png"
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


def test_zdcs_job_times_are_those_of_bytes(tmp_path: Path, monkeypatch) -> None:
    """Against sums by hand: Ulysses over two processes, and steps that each read weights and cache once."""
    monkeypatch.setattr(combine, "STEPS", 2)
    monkeypatch.setattr(caches, "GREEDY_TOKENS", 1)
    fixed = ("uncompressed", "4 bits", "GEAR-4")
    monkeypatch.setattr(zdc, "FIXED", {name: zdc.FIXED[name] for name in fixed})
    for module in (tiers, zdc):
        monkeypatch.setattr(module, "LIMIT", 4.0)
    monkeypatch.setattr(tier_search, "STEP", 0.8)
    monkeypatch.setattr(caches, "LONG_TOKENS", 256)
    overrides = [*SMALL, "evaluation.metric=text", "evaluation.report_tokens=64", "evaluation.search_tokens=64"]
    overrides += ["cache.tiers_tokens=64", "prune.kmeans=null"]
    overrides += ["tokens.source=random", "tokens.count=512"]
    arguments = {"overrides": overrides, "parts": ["zdc"], "plots": find_spec("matplotlib") is not None}
    found = study(DEMO_MODEL, tmp_path / "study", ["zdc"], **arguments).records
    rates, whole = zdc.Rates(**found["zdc/rates"]), found["zdc/caches/uncompressed"]
    # A process sends half of the heads of its 1250 tokens, and half of the outputs of the others', in 5 layers.
    assert whole["sent"]["2500"] == 5 * 1250 * (3 * 64 + 2 * 64 + 3 * 64) * 2
    assert (whole["sent"]["161"], whole["bytes"], whole["q_d"]) == (0, 2560, pytest.approx(0, abs=0.01))
    size = (DEMO_MODEL / "model.safetensors").stat().st_size
    seconds = zdc.jobs(rates, whole, 2500, 2)
    read = {"weights": 2 * size, "cache": (2501 + 2502) * 2560, "rebuilt": 0}
    device = bundled_devices()[StudyPlan.of(["zdc"], []).first.objective.device]
    assert seconds == pytest.approx(
        {"sent": 5 * 1250 * 1024 / device.link_bytes_per_s}
        | {part: of / device.bandwidth_bytes_per_s for part, of in read.items()}
    )
    four = found["zdc/caches/4 bits"]
    rebuilding = zdc.jobs(rates, four, 2500, 2)["rebuilt"] * device.bandwidth_bytes_per_s
    assert rebuilding == pytest.approx(2 * (2501 + 2502) * 2560)
    assert four["bytes"] == 720
    # Half of the channels halve what is sent, where rows and queries are cut alike.
    half = found["zdc/at equal Q_d/zdc"]
    assert half["sent"]["2500"] < 0.9 * whole["sent"]["2500"]
    assert half["q_d"] <= 4
    batches = [batch for *_, batch in zdc.rate_curve(rates, whole)]
    assert batches[-1] == (zdc.GPU_BYTES - size) // (2560 * 2946)
    summary = (tmp_path / "study" / "summary.md").read_text()
    for figures in ("19 and 22", "3b, 4, 5 and 9", "20 and 23", "21"):
        assert f"(ZDC figure{'s' * (figures != '21')} {figures}, in shape)" in summary
    for row in ("| zdc/ZO | ", "| weights in 4 bits | 2500 | "):
        assert row in summary
