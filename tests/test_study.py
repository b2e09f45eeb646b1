"""The study: mathematics on cases by hand, a small study on the bundled model, continuing it, tables and plots."""

from __future__ import annotations

import csv
import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from conftest import DEMO_MODEL, FAST_EVALUATION
from test_cli import rotor

from rotor.bases.layer import LayerBases
from rotor.bases.pair import BasisPair
from rotor.calibration.run import Run
from rotor.errors import DataError, RecipeError, UsageError
from rotor.format.layout import GroupLayout, kv_bytes_per_token, ordered_by_class
from rotor.prediction.cost import DecodeStep, decode_seconds, uncompressed_decode_seconds
from rotor.prediction.devices import bundled_devices
from rotor.progress import Progress
from rotor.recipe import Tokens, load_recipe
from rotor.recipe.settings import Compute
from rotor.report.axes import shown_loss
from rotor.search.search import most_points, rank_path
from rotor.study import curves_plot, plots
from rotor.study import front as study_front
from rotor.study import parts as study_parts
from rotor.study import tables as study_tables
from rotor.study.comparison import (
    align_signs,
    basis_difference,
    coefficient_of_variation,
    mean_spectrum,
    principal_angles,
    relative_difference,
)
from rotor.study.measure import COLUMNS, StudySubject, uniform_ranks
from rotor.study.quantities import quantity
from rotor.study.request import PARTS, StudyPlan, parse_ablations, parse_counts, same_conditions
from rotor.study.store import StudyStore
from rotor.study.study import plan_study, study

study_module = importlib.import_module("rotor.study.study")

SMALL = [
    "tokens.count=1024",
    "tokens.seq_len=64",
    "evaluation.lookup_prompts=4",
    "evaluation.copy_prompts=4",
    "evaluation.seq_len=64",
    "evaluation.search_tokens=256",
    "evaluation.report_tokens=512",
    "search.resolution=0.2",
    "search.targets=[0.9]",
]


def random_basis(groups: int, dim: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(groups, dim, columns, dtype=torch.float64, generator=generator)
    return torch.linalg.qr(matrices).Q


def test_equal_bases_differ_by_nothing() -> None:
    basis = random_basis(3, 8, 8)
    found = basis_difference([basis, basis], [basis, basis])
    assert found.delta == 0
    assert found.ratio == 0
    assert found.epsilon == pytest.approx(float(basis.abs().mean()))
    assert principal_angles(basis, basis, 5).max() < 1e-7


def test_signs_and_scales_of_vectors_do_not_count() -> None:
    basis = random_basis(2, 8, 8)
    flipped = basis * torch.tensor([1.0, -1, 1, -1, -1, 1, 1, -1]) * torch.arange(1, 9)
    assert basis_difference([basis], [flipped]).delta < 1e-15
    assert torch.equal(align_signs(basis, -basis), basis)
    assert principal_angles(basis, flipped, 4).max() < 1e-7


def test_delta_and_epsilon_by_hand() -> None:
    """(1, 0), (0, 1) against (0.6, 0.8), (-0.8, 0.6): epsilon 1/2, and |differences| 0.4, 0.8, 0.8, 0.4."""
    basis = torch.eye(2, dtype=torch.float64)[None]
    other = torch.tensor([[[0.6, -0.8], [0.8, 0.6]]], dtype=torch.float64)
    found = basis_difference([basis], [other])
    assert found.epsilon == pytest.approx(0.5)
    assert found.delta == pytest.approx(0.6)
    assert found.ratio == pytest.approx(1.2)


@pytest.mark.parametrize("angle", [1e-9, 0.3, math.pi / 4, 1.2, math.pi / 2])
def test_rotated_subspace_has_the_angle_of_its_rotation(angle: float) -> None:
    """span(e0, e1) against span(e0, cos e1 + sin e2), in a rotated space and with mixed columns."""
    basis = torch.eye(4, dtype=torch.float64)[None, :, :2]
    other = basis.clone()
    other[0, 1, 1], other[0, 2, 1] = math.cos(angle), math.sin(angle)
    rotation = random_basis(1, 4, 4, seed=1)
    mixed = other @ torch.tensor([[2.0, 1.0], [0.5, -1.0]], dtype=torch.float64)
    found = principal_angles(rotation @ basis, rotation @ mixed, 2)
    assert found.tolist()[0] == pytest.approx([angle, 0.0], rel=1e-6, abs=1e-14 + 1e-7 * (angle > 1e-6))


def test_principal_angles_agree_with_scipy() -> None:
    subspace_angles = pytest.importorskip("scipy.linalg").subspace_angles
    first, second = random_basis(3, 10, 6, seed=2), random_basis(3, 10, 6, seed=3)
    found = principal_angles(first, second, 4)
    for group in range(3):
        expected = subspace_angles(first[group, :, :4].numpy(), second[group, :, :4].numpy())
        assert found[group].tolist() == pytest.approx(expected.tolist(), abs=1e-10)


def test_bases_that_cannot_be_compared() -> None:
    basis = random_basis(2, 8, 8)
    with pytest.raises(UsageError, match=r"layer 1: bases of shapes \[2, 8, 8\] and \[1, 8, 8\] cannot be compared"):
        basis_difference([basis, basis], [basis, basis[:1]])
    with pytest.raises(UsageError, match="rank 9: expected 1 to 8"):
        principal_angles(basis, basis, 9)


def test_coefficient_of_variation_by_hand() -> None:
    assert coefficient_of_variation(torch.tensor([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])) == pytest.approx(2 / 5)
    assert coefficient_of_variation(torch.full((4,), 3.0)) == 0
    assert coefficient_of_variation(torch.zeros(3)) == 0


def layer(*values: list[float]) -> LayerBases:
    singular_values = torch.tensor(values, dtype=torch.float64)
    basis = torch.eye(singular_values.shape[1], dtype=torch.float64).expand(len(values), -1, -1)
    pair = BasisPair(basis, basis, singular_values)
    return LayerBases("post", 1, pair, pair)


def test_spectra_and_uniform_ranks_by_hand() -> None:
    layers = [layer([4.0, 2.0], [0.0, 0.0]), layer([1.0, 1.0], [8.0, 2.0])]
    assert mean_spectrum(layers, "qk").tolist() == pytest.approx([3 / 4, (0.5 + 0 + 1 + 0.25) / 4])
    wide = [layer([1.0] * 10)] * 2
    assert uniform_ranks(wide, 0.3, "qk") == [[(7, 10)]] * 2
    assert uniform_ranks(wide, 0.99, "vo") == [[(10, 1)]] * 2
    assert relative_difference(torch.tensor([1.0, -3.0]), torch.tensor([2.0, -3.0])) == 0.25


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
    with pytest.raises(RecipeError, match="expected NAME:KEY=VALUE"):
        parse_ablations(["groups.size=1"], None)
    path.write_text("post: groups.size=1\n")
    with pytest.raises(RecipeError, match="post: expected a list"):
        parse_ablations([], path)
    assert parse_counts(["512", "1024"]) == (512, 1024)
    with pytest.raises(UsageError, match="expected positive numbers"):
        parse_counts(["512", "many"])


def test_store_keeps_every_record_and_names_what_differs(tmp_path: Path) -> None:
    settings = {"model": {"a": "1"}, "recipes": {"fdc": {"rank": 16}}, "ablations": {}}
    StudyStore.open(tmp_path / "s", settings).put("curves/fdc/p0.10", {"x": 1})
    more = {**settings, "recipes": {"rotor": {"rank": 8}}}
    store = StudyStore.open(tmp_path / "s", more)
    assert store.get("curves/fdc/p0.10") == {"x": 1}
    assert set(store.settings["recipes"]) == {"fdc", "rotor"}
    assert store.part("curves") == {"fdc/p0.10": {"x": 1}}
    with pytest.raises(UsageError, match=r"recipes\.fdc\.rank was 16, now 8"):
        StudyStore.open(tmp_path / "s", {**settings, "recipes": {"fdc": {"rank": 8}}})
    with pytest.raises(UsageError, match=r'model\.a was "1", now null'):
        StudyStore.open(tmp_path / "s", {**settings, "model": {}})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(UsageError, match="holds no study"):
        StudyStore.open(tmp_path / "other", settings)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory):
    """A study of two recipes with few points and tokens: (result, keyword arguments that give it)."""
    pytest.importorskip("matplotlib")
    patch = pytest.MonkeyPatch()
    patch.setattr(study_parts, "COMPRESSIONS", (0.3, 0.6))
    patch.setattr(study_parts, "HELD_OUT_TOKENS", 64)
    patch.setattr(study_parts, "PRUNE_SHARES", (0.0, 0.5))
    patch.setattr(study_parts, "CENTROIDS", (16,))
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
            assert "out_of_reach" in point or point["search"] >= float(target)
        assert records[f"{part}/{name}/spectra"]["qk"][0] == 1.0
    assert records["curves/rotor/p0.60"]["report"]["kl_div"] < records["curves/fdc/p0.60"]["report"]["kl_div"]

    source = records["sources/fdc"]
    assert {"random", "random-1", "text", "other-text"} <= set(source["variants"])
    assert len(source["pairs"]) == math.comb(len(source["variants"]), 2)
    seeds = next(p for p in source["pairs"] if (p["a"], p["b"]) == ("random", "random-1"))
    assert 0 < seeds["qk"]["ratio"] < 2
    assert seeds["vo"]["delta"] == 0  # from the weights alone
    assert 0 < seeds["qk"]["angles_degrees"]["0.5"]["mean"] <= seeds["qk"]["angles_degrees"]["0.5"]["largest"] <= 90

    assert records["tokens/fdc/random/1024/p0.50"]["count"] == 1024
    assert records["tokens/fdc/text/256/p0.50"]["report"]["kl_div"] > 0
    degraded = [records[f"degradation/fdc/qk/p{p:.2f}"] for p in (0.3, 0.6)]
    assert 0 < degraded[0]["calibration"] < degraded[1]["calibration"]
    assert all(len(record["held_out"]) == 2 for record in degraded)
    assert not (result.folder / "runs" / "variant").exists()


def test_fidelity_is_what_validate_reports(small, tmp_path: Path) -> None:
    """KL and agreement of a point against a compressed checkpoint loaded beside the source."""
    from rotor.export.export import export
    from rotor.validation.validate import validate

    result, _ = small
    run = Run.open(result.folder / "runs" / "fdc")
    plan = rank_path(run.bases(), run, run.recipe).at_compression(0.6)
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

    monkeypatch.setattr(study_parts, "calibrate", refuse)
    monkeypatch.setattr("rotor.search.search.Measurer.measure", refuse)
    monkeypatch.setattr(StudySubject, "degradation", refuse)
    before = (result.folder / "results.json").read_text()
    again = study(DEMO_MODEL, result.folder, **arguments)
    assert again.added == 0
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

    monkeypatch.setattr(study_parts, "calibrate", too_short)
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
    with pytest.raises(UsageError, match="--parts speed: expected some of curves"):
        study(DEMO_MODEL, result.folder, **{**arguments, "parts": ["speed"]})


def test_a_dry_run_tells_what_each_part_takes(tmp_path: Path, capsys, monkeypatch) -> None:
    """Counts by hand: calibrations that are kept are made once, whatever parts use them; nothing is written."""
    monkeypatch.setattr(study_parts, "COMPRESSIONS", (0.3, 0.6))
    arguments = ["study", DEMO_MODEL, "-o", tmp_path / "study", "--recipes", "fdc,rotor", "--counts", "256,1024"]
    arguments += [item for setting in SMALL for item in ("--set", setting)]
    code, out, err = rotor(capsys, *arguments, "--dry-run", "--json")
    assert code == 0, err
    found = json.loads(out)
    (curves,) = found["parts"]  # the others are not run by default
    searched = most_points(0.2)  # a bisection for each of three targets, then the report split of what it chose
    assert (curves["part"], curves["calibrations"], curves["points"]) == ("curves", 2, 2 * (2 + 3 * searched))
    assert curves["seconds"] >= 0
    assert found["not_run"] == [part for part in PARTS if part != "curves"]
    assert found["known_records"] == 0

    code, out, _ = rotor(capsys, *arguments, "--parts", "all", "--ablation", "a:groups.size=1", "--dry-run", "--json")
    parts = {part["part"]: (part["calibrations"], part["points"]) for part in json.loads(out)["parts"]}
    assert parts["sources"] == (5, 0)
    assert parts["tokens"] == (3 * 2, 3 * 2)  # `other-text` is there from the sources
    assert parts["degradation"] == (0, 2 * 2)
    assert parts["ablation"] == (1, 2 + 3 * searched)
    assert parts["pruning"] == (len(study_parts.PRUNE_SHARES) + len(study_parts.CENTROIDS),) * 2
    code, out, _ = rotor(capsys, *arguments, "--dry-run")
    assert code == 0
    assert "nothing is written in a dry run" in " ".join(out.split())
    assert not (tmp_path / "study").exists()


def test_a_dry_run_counts_what_is_there(small, capsys) -> None:
    result, arguments = small
    request = StudyPlan.of(
        arguments["recipes"], SMALL, ["all"], None, arguments["ablations"], "rotor", arguments["counts"], None
    )
    before = (result.folder / "results.json").read_bytes()
    found = plan_study(DEMO_MODEL, result.folder, request, 0.5, Compute())
    assert [(part.calibrations, part.points) for part in found.parts] == [(0, 0)] * len(found.parts)
    assert found.known_records == len(json.loads(before)["records"])
    assert (result.folder / "results.json").read_bytes() == before


def test_tables_and_plots_appear_as_parts_complete(tmp_path: Path, monkeypatch) -> None:
    """They are there, with what was measured, when the next part begins."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(study_parts, "COMPRESSIONS", (0.5,))
    out = tmp_path / "study"
    seen: list[list[str]] = []

    def sources(self, name, recipe) -> None:
        seen.append(sorted(path.name for path in [*out.glob("*.md"), *(out / "plots").glob("*.png")]))
        raise KeyboardInterrupt

    monkeypatch.setitem(study_module._PARTS, "sources", study_module._each(sources))
    with pytest.raises(KeyboardInterrupt):
        study(DEMO_MODEL, out, ["fdc"], SMALL, parts=["curves", "sources"])
    assert seen == [["recipes.png", "spectra.png", "summary.md"]]


def test_rows_that_no_tokens_change_are_left_out(small, tmp_path: Path) -> None:
    """The values of fdc are of the weights alone; of a recipe of which all is, nothing is measured."""
    result, _ = small
    summary = (result.folder / "summary.md").read_text()
    sources = summary[summary.index("## Bases by source") : summary.index("## Error by number")]
    pairs = [line for line in sources.splitlines() if line.startswith("| `fdc` | random, random-1 |")]
    assert [line.split(" | ")[2] for line in pairs] == ["QK"]
    (variation,) = [line for line in sources.splitlines() if line.startswith("| `fdc` | random |")]
    assert variation.split(" | ")[-1] == "- |"
    assert study_parts.reads_tokens(load_recipe("fdc"))
    assert study_parts.reads_tokens(load_recipe("rotor-plain"))
    weights_alone = load_recipe("fdc-prerope")
    assert not study_parts.reads_tokens(weights_alone)
    store = StudyStore.open(tmp_path / "study", {})
    driver = study_parts.StudyParts(None, store, Progress(), {}, 0.5)  # type: ignore[arg-type]
    driver.sources("fdc-prerope", weights_alone)
    driver.tokens("fdc-prerope", weights_alone, (256,))
    assert store.records == {}


def test_spectra_of_different_quantities_are_in_axes_of_their_own(small) -> None:
    """Keys by SVD after RoPE and by Fisher information before it; one axis for recipes that agree."""
    figure_module = pytest.importorskip("matplotlib.figure")
    result, _ = small
    store = StudyStore.read(result.folder, json.loads((result.folder / "results.json").read_text())["settings"])
    figure = figure_module.Figure()
    spectra = {name: records["spectra"] for name, records in study_tables.curves(store, "curves").items()}
    spectra["fdc-again"] = spectra["fdc"]
    assert curves_plot.draw_spectra(
        figure, spectra, lambda name, side: quantity(store, name.removesuffix("-again"), side)
    )
    shown = {axes.get_title(): [line.get_label() for line in axes.lines] for axes in figure.axes if axes.lines}
    assert {title: len(lines) for title, lines in shown.items()} == {
        "QK by svd, after RoPE": 2,
        "QK by fisher, before RoPE": 1,
        "V by palu": 2,
        "V by fisher": 1,
    }


def test_curves_start_at_the_uncompressed_model_and_show_crossings(small) -> None:
    """With intervals on KL too; accuracy logarithmic in what is lost."""
    figure_module = pytest.importorskip("matplotlib.figure")
    result, _ = small
    settings = json.loads((result.folder / "results.json").read_text())["settings"]
    found = study_tables.curves(StudyStore.read(result.folder, settings), "curves")
    figure = figure_module.Figure()
    assert curves_plot.draw_curves(figure, found)
    accuracy, divergence = figure.axes
    assert accuracy.get_yscale() == divergence.get_yscale() == "log"
    for axes, start in ((accuracy, shown_loss(1)), (divergence, curves_plot.LEAST_KL)):
        lines = [line for line in axes.lines if line.get_label() in found]
        assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in lines] == [(0, start)] * 2
        assert len(axes.collections) == 2  # a shaded interval each
    crossings = {
        (point["stored"], shown_loss(point["report"]))
        for records in found.values()
        for point in records["targets"].values()
        if "stored" in point
    }
    hollow = {(line.get_xdata()[0], line.get_ydata()[0]) for line in accuracy.lines if line.get_markersize() == 9}
    assert hollow == crossings
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
    assert {f"{split}_{metric}" for split in ("search", "report") for metric in COLUMNS} <= set(rows[0])
    assert float(rows[3]["report_kl_div"]) == point["report"]["kl_div"]
    assert float(rows[3]["compression_stored"]) == point["stored"]
    assert float(rows[3]["report_interval_low"]) == point["interval"][0]

    summary = (result.folder / "summary.md").read_text()
    assert summary.startswith("# Study of demo-model\n")
    for title in ("Recipes", "Ablation", "Bases by source", "Error by number of calibration tokens", "Degradation"):
        assert f"\n## {title}" in summary
    assert "| recipe | at 0.99 | at 0.95 | at 0.9 |" in summary
    assert f"| {point['report']['kl_div']:.5f} |" in summary
    ablation = summary[summary.index("\n## Ablation") :]
    assert ablation.index("| `rotor` |") < ablation.index("| `rotor-per-head` |")  # what was changed comes first
    widths: set[int] = set()
    for line in summary.splitlines():
        widths = widths | {line.count("|")} if line.startswith("|") else set()
        assert len(widths) <= 1, line


def test_plots_are_written(small) -> None:
    """Of a study that is complete: nothing is measured for them."""
    first, arguments = small
    assert not any(path.suffix == ".png" for path in first.files)
    result = study(DEMO_MODEL, first.folder, **{**arguments, "plots": True})
    assert result.added == 0
    for name in ("recipes", "ablation", "spectra", "tokens", "degradation"):
        png = result.folder / "plots" / f"{name}.png"
        assert png in result.files
        assert png.read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in png.with_suffix(".svg").read_bytes()


def test_pruning_measures_shares_and_centroids(small) -> None:
    result, _ = small
    found = {key: r for key, r in result.records.items() if key.startswith("pruning/")}
    assert [(r["share"], r["kmeans"]) for r in found.values()] == [(0.0, None), (0.5, None), (0.5, 16)]
    assert all("skipped" in r or r["report"]["kl_div"] > 0 for r in found.values())


def test_parts_that_cannot_run_are_refused_by_name(tmp_path: Path) -> None:
    for parts, message in (
        (["curves", "tables"], "--parts tables: expected some of curves, sources, tokens"),
        ([], "--parts is empty"),
        (["ablation"], "--parts ablation: there are no ablations"),
        (["front"], "--parts front: the ranks of fdc do not choose"),
    ):
        with pytest.raises(UsageError, match=message):
            study(DEMO_MODEL, tmp_path / "study", ["fdc"], SMALL, parts=parts, plots=False)
    assert not (tmp_path / "study").exists()


def test_pruning_tables_and_plots(tmp_path: Path) -> None:
    """From records as the part leaves them."""
    pytest.importorskip("matplotlib")
    from rotor.study.tables import write_summary

    settings = {
        "model": {"name": "m"},
        "dtype": "float32",
        "tokens": vars(Tokens()),
        "evaluation": load_recipe("fdc").to_dict()["evaluation"],
    }
    store = StudyStore.open(tmp_path / "study", settings)
    spectra = {"qk": [1.0, 0.5], "vo": [1.0, 0.1]}
    for label, share, kmeans in (("share-0", 0.0, None), ("share-0.5", 0.5, None), ("kmeans-16", 0.5, 16)):
        report = {"accuracy": 0.99, "kl_div": 0.01 + share}
        record = {"recipe": "zdc", "share": share, "kmeans": kmeans, "report": report}
        store.put(f"pruning/zdc/{label}/p0.50", {**record, "seconds": {"capture": 1.5}, "bases": spectra})
    store.put("pruning/zdc/kmeans-64/p0.50", {"recipe": "zdc", "share": 0.5, "kmeans": 64, "skipped": "too few"})
    text = write_summary(store).read_text()
    assert "| `zdc` | 0.5 | 16 | p = 0.50 | 0.9900 | 0.51000 | 1.50 |" in text
    assert "not measured: too few" in text
    assert {p.stem for p in plots.write_plots(store)} == {"pruning", "pruning-spectra"}


def test_front_of_bytes_against_predicted_time(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(study_front, "WEIGHTS", (0.0, 1.0))
    overrides = ["tokens.source=random", "tokens.count=512", "tokens.seq_len=64", "ranks.multiple_of=4"]
    overrides += [*FAST_EVALUATION, "ranks.probe_tokens=128", "objective.context_tokens=1024", "objective.device=l40s"]
    overrides += ["evaluation.metric=kl_div"]  # the tiny model gets no token right
    arguments = {"parts": ["front"], "focus": ["rotor-16"], "overrides": overrides}
    with pytest.raises(UsageError, match="--parts front: the ranks of fdc do not choose"):
        study(tiny("llama"), tmp_path / "study", ["fdc", "rotor-16"], **{**arguments, "focus": ["fdc"]})
    result = study(tiny("llama"), tmp_path / "study", ["fdc", "rotor-16"], **arguments)
    assert list(result.records) == ["front/rotor-16/w0.00", "front/rotor-16/w1.00"]
    run = Run.open(result.folder / "runs" / "front" / "rotor-16")
    device, step = bundled_devices()["l40s"], DecodeStep(1024, 8, 4)
    for record in result.records.values():
        assert (record["device"], record["context_tokens"], record["batch_size"]) == ("l40s", 1024, 8)
        assert list(record["targets"]) == ["0.99", "0.95", "0.90"]
        for target, point in record["targets"].items():
            assert point["search"] >= float(target)
            assert point["bytes_share"] == pytest.approx(1 - point["stored"], abs=1e-6)
            layouts = [
                ordered_by_class(
                    run.info["candidates"][key]["domain"],
                    run.info["folded_keys"][key],
                    [GroupLayout(tuple(range(4 // len(ranks))), qk, v) for qk, v in ranks],
                )[0]
                for key, ranks in zip(point["choice"], point["ranks"], strict=True)
            ]
            assert point["kv_bytes_per_token"] == kv_bytes_per_token(layouts, 4)
            assert point["predicted_seconds"] == pytest.approx(decode_seconds(layouts, run.shape, device, step))
            expected = point["predicted_seconds"] / uncompressed_decode_seconds(run.shape, device, step)
            assert point["time_share"] == pytest.approx(expected, abs=1e-6)
    assert (result.folder / "plots" / "front.png").is_file()
    assert "rates of l40s, at 1024 tokens of context and a batch of 8" in (result.folder / "summary.md").read_text()
    assert study(tiny("llama"), result.folder, ["fdc", "rotor-16"], **arguments).added == 0


def test_missing_matplotlib_is_said_before_anything_is_measured(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'PATH/TO/rotor\[plots\]'"):
        study(DEMO_MODEL, tmp_path / "study", ["fdc"])
    code, out, err = rotor(capsys, "study", DEMO_MODEL, "-o", tmp_path / "study", "--recipes", "fdc")
    assert code == 2
    assert out == ""
    assert "matplotlib" in err.splitlines()[0]
    assert "PATH/TO/rotor[plots]" in err.splitlines()[1]
    assert not (tmp_path / "study").exists()


def test_command(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_parts, "COMPRESSIONS", (0.5,))
    arguments = ["study", DEMO_MODEL, "-o", tmp_path / "study", "--recipes", "fdc", "--parts", "curves", "--no-plots"]
    arguments += [item for setting in SMALL for item in ("--set", setting)]
    code, out, err = rotor(capsys, *arguments, "--json", "-q")
    assert code == 0, err
    found = json.loads(out)
    assert found["measured_records"] == 3
    assert found["files"] == [str(tmp_path / "study" / name) for name in ("results.csv", "summary.md")]
    code, out, _ = rotor(capsys, *arguments)
    assert code == 0
    assert "0 of them new" in " ".join(out.split())
    assert "Compression at a target accuracy" in out
