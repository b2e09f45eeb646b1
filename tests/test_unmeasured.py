"""An export whose accuracy is not measured: for want of a tokenizer, or because it was asked not to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from support.command_line import expect_error, rotor
from support.runs import calibrated
from support.stopped import Counting

from rotor import Run, calibrate, export, materialise, validate
from rotor.errors import UsageError
from rotor.search.export.model_card import repeated_metadata
from rotor.search.report.collect import collect

RANDOM = ["tokens.count=512", "tokens.seq_len=64", "tokens.source=random", "ranks.multiple_of=4"]


@pytest.fixture(scope="module")
def without_tokenizer(tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of a model that has no tokenizer."""
    folder = tmp_path_factory.mktemp("no-tokenizer")
    names = shutil.ignore_patterns("tokenizer*")
    model = shutil.copytree(tiny("llama"), folder / "model", ignore=names)
    return calibrate(model, folder / "run", "fdc", RANDOM)


@pytest.mark.parametrize("goal", [("--compression", "0.4"), ("--removal-rate", "0.1")])
def test_without_a_tokenizer_accuracy_is_not_measured(goal, without_tokenizer: Run, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    code, said, err = rotor(capsys, "export", without_tokenizer.folder, "-o", out, *goal)
    assert code == 0, err
    assert "accuracy not measured: the model has no tokenizer" in said
    info = json.loads((out / "rotor.json").read_text())["accuracy"]
    assert (info["search"], info["report"], info["interval_95"], info["table"]) == (None, None, None, None)
    assert info["not_measured"].startswith("the model has no tokenizer")
    assert "| accuracy | not measured: the model has no tokenizer" in (out / "README.md").read_text()
    assert not (without_tokenizer.folder / "tables").exists()

    result = validate(out)
    assert not result.damaged
    assert result.target_met
    found = {check.name: (check.status, check.detail) for check in result.checks}
    assert found["accuracy target"] == ("skipped", "no tokenizer to read text with")
    assert found["full-rank rewrite"][0] == "pass"
    assert found["KV bytes per token"][0] == "pass"
    assert rotor(capsys, "validate", out)[0] == 0


def test_an_accuracy_needs_a_tokenizer(without_tokenizer: Run, tmp_path: Path, capsys) -> None:
    """Calibration ends with a command that runs: without a tokenizer there is no accuracy to ask for."""
    arguments = ["calibrate", without_tokenizer.model_folder, "-o", tmp_path / "run", "--recipe", "fdc"]
    code, said, err = rotor(capsys, *arguments, *(word for setting in RANDOM for word in ("--set", setting)))
    assert code == 0, err
    assert f"Next: rotor export {tmp_path}/run -o OUT --compression 0.8" in said
    arguments = ["export", without_tokenizer.folder, "-o", tmp_path / "out", "--accuracy", "0.9"]
    expect_error(capsys, 1, "text needs a tokenizer", *arguments)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return calibrated(tiny("llama"), tmp_path_factory.mktemp("measured") / "run", "post", 1)


def test_not_measured_when_asked(run: Run, tmp_path: Path, capsys) -> None:
    """Nothing is loaded or read for it; every tensor is as with measuring; `validate` then measures or not."""
    measured = export(run.folder, tmp_path / "measured", removal_rate=0.1)
    begun = Counting()
    result = export(run.folder, tmp_path / "out", removal_rate=0.1, measure=False, progress=begun)
    assert not {"load text", "load model", "measure"} & set(begun.names)
    assert result.measured_points == 0
    assert result.report["tensors"] == measured.report["tensors"]
    assert result.report["accuracy"]["not_measured"] == "the export was asked not to measure it (--no-measure)"
    page = collect(tmp_path / "out")
    assert page.points == []
    assert "--no-measure" in page.absent["points"]
    assert ("accuracy", "not measured", "no target was set") in page.headline
    assert "Accuracy was not measured" in (tmp_path / "out" / "report.html").read_text()
    code, said, _ = rotor(capsys, "validate", tmp_path / "out", "--json", "--set", "evaluation.source=stdlib")
    assert code == 0
    assert json.loads(said)["summary"]["accuracy"]["kl_div"] > 0
    begun = Counting()
    validate(tmp_path / "out", measure=False, progress=begun)
    assert "integrity" in begun.names
    assert not {"load text", "measure"} & set(begun.names)
    code, said, err = rotor(capsys, "validate", tmp_path / "out", "--no-measure", "--json")
    assert code == 0, err
    found = {check["name"]: (check["status"], check["detail"]) for check in json.loads(said)["checks"]}
    assert found.pop("accuracy target") == ("skipped", "not measured (--no-measure)")
    assert {"files", "tensor hashes", "full-rank rewrite", "source unchanged", "KV bytes per token"} <= found.keys()
    assert [name for name, (status, _) in found.items() if status == "fail"] == []


def test_what_has_to_be_measured_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--no-measure: an --accuracy is found by measuring"):
        export(run.folder, tmp_path / "out", accuracy=0.9, measure=False)
    with pytest.raises(UsageError, match=r"--no-measure: ranks\.method global chooses"):
        export(run.folder, tmp_path / "out", compression=0.4, overrides=["ranks.method=global"], measure=False)
    assert not (tmp_path / "out").exists()


def test_a_card_names_the_source_and_its_licence(run_copy, tmp_path: Path) -> None:
    """By --base-model, and by the source's own card as far as it can be read; also after materialising."""
    source = Path(run_copy("fdc").info["model"]["path"])
    for text, expected in (
        ("---\nlicense: other\nlicense_name: own\nlanguage: [en, de]\ntags: [x]\n---\nWords", ("other", ["en", "de"])),
        ("---\nlicense: &a other\nlanguage: *a\n---\n", (None, None)),
        ("---\nlicense: {a: b}\n---\n", (None, None)),
        ("No metadata\n---\nlicense: mit\n---\n", (None, None)),
    ):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "README.md").write_text(text)
        found = repeated_metadata(folder)
        assert (found.get("license"), found.get("language")) == expected
        assert "tags" not in found
    assert repeated_metadata(source) == {}
    run = run_copy("fdc")
    apart = export(
        run.folder, tmp_path / "apart", compression=0.3, measure=False, without_weights=True, base_model="org/Model-1"
    )
    assert apart.report["source"]["base_model"] == "org/Model-1"
    materialise(tmp_path / "apart", tmp_path / "full")
    for name in ("apart", "full"):
        metadata = ModelCard.load(tmp_path / name / "README.md").data
        assert metadata.base_model == "org/Model-1"
    with pytest.raises(UsageError, match="--base-model"):
        export(run.folder, tmp_path / "out", compression=0.3, base_model="no id")


def test_checkpoints_stand_side_by_side(run_copy, tmp_path: Path, capsys) -> None:
    """By what their exports measured; not measured is said, and numbers of different texts are not set beside."""
    run = run_copy("fdc")
    for name, share in (("a", 0.2), ("b", 0.4)):
        export(run.folder, tmp_path / name, compression=share)
    export(run.folder, tmp_path / "c", compression=0.5, measure=False)
    code, printed, error = rotor(capsys, "compare", tmp_path / "a", tmp_path / "b", "--json")
    assert code == 0, error
    first, second = json.loads(printed)
    assert first["compression"]["stored"] < second["compression"]["stored"]
    assert first["accuracy"]["report"] > second["accuracy"]["report"]
    code, printed, error = rotor(capsys, "compare", tmp_path / "a", tmp_path / "b")
    assert "look-up ratio" in printed
    assert "cannot be compared" not in printed
    code, printed, error = rotor(capsys, "compare", tmp_path / "a", tmp_path / "c")
    assert "not measured" in printed
    assert "cannot be compared" in printed
    expect_error(capsys, 2, "is a run of `rotor calibrate`", "compare", tmp_path / "a", run.folder)
