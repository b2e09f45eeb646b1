"""Every file of a finished folder is covered: what is edited, added or gone is named."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import pytest
from support.command_line import rotor
from support.runs import calibrated, reseal

from rotor import Progress, Run, Validation, export
from rotor.checkpoint.manifest import Manifest
from rotor.errors import CheckpointError
from rotor.models.source import Checkpoint
from rotor.search.export.model_card import markdown
from rotor.tools.validation.integrity import check_integrity


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model, run and out in one folder; do not write to them."""
    folder = tmp_path_factory.mktemp("manifest")
    model = shutil.copytree(tiny("llama"), folder / "model")
    (model / "LICENSE").write_text("do what you like")
    run = calibrated(model, folder / "run", "post", 1)
    export(run.folder, folder / "out", compression=0.4)
    return folder


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / "out", tmp_path / "out")


def found(folder: Path) -> dict[str, str]:
    """The checks that failed, with what they say."""
    result = Validation(folder)
    check_integrity(result, Progress())
    return {check.name: check.detail for check in result.checks if check.status == "fail"}


def test_any_file_that_is_edited_added_or_gone_is_named(out: Path) -> None:
    manifest = Manifest.read(out)
    assert manifest.problems() == {}
    names = [path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()]
    assert set(names) == {*manifest.files, "manifest.json"}
    for name in manifest.files:
        path = out / name
        original = path.read_bytes()
        data = bytearray(original)
        position = random.Random(name).randrange(len(data))
        data[position] ^= 1 << (position % 8)
        for edited in (data, original + b"\n"):
            path.write_bytes(edited)
            assert manifest.problems() == {name: "differs from its SHA-256"}
        path.unlink()
        assert manifest.problems()[name] == "is missing"
        path.symlink_to(out / "recipe.yaml")
        assert manifest.problems() == {name: "is missing"}
        path.unlink()
        path.write_bytes(original)
    (out / "tokenizer.model").write_bytes(b"")
    (out / "sub").mkdir()
    os.mkfifo(out / "pipe")
    (out / "dangling").symlink_to("nowhere")
    assert manifest.problems() == dict.fromkeys(("dangling", "pipe", "sub/", "tokenizer.model"), "is unexpected")


def test_validate_says_what_changed(out: Path, capsys) -> None:
    """Values that no other check looks at."""
    for file, edit in (
        ("config.json", lambda data: data.update(rms_norm_eps=0.5)),
        ("tokenizer.json", lambda data: data["model"]["vocab"].update(dict(zip("ab", (7, 8), strict=True)))),
        ("rotor.json", lambda data: data["accuracy"].update(report=0.9999)),
    ):
        original = (out / file).read_bytes()
        data = json.loads(original)
        edit(data)
        (out / file).write_text(json.dumps(data))
        assert found(out)["files"] == f"{file} differs from its SHA-256"
        code, text, _ = rotor(capsys, "validate", out, "--json")
        assert code == 1
        assert f"{file} differs from its SHA-256" in text
        (out / file).write_bytes(original)
    assert found(out) == {}
    (out / "manifest.json").unlink()
    assert "no such file" in found(out)["files"]


@pytest.mark.parametrize("content", ["[]", '{"rotor_manifest": 1, "kind": "other", "files": {}}', "{"])
def test_what_is_no_manifest(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json: "):
        Manifest.read(tmp_path)


def test_what_says_that_a_folder_is_unfinished_is_named(out: Path) -> None:
    (out / "unfinished.json").write_text("#!/bin/sh")
    assert found(out) == {"files": "unfinished.json is unexpected"}


def test_the_digest_is_that_of_the_manifest(out: Path, made: Path, capsys) -> None:
    text = rotor(capsys, "export", made / "run", "-o", out, "--compression", "0.4", "--overwrite", "--json")[1]
    assert json.loads(text)["digest"] == hashlib.sha256((out / "manifest.json").read_bytes()).hexdigest()


def test_a_run_is_as_calibrate_wrote_it(made: Path, tmp_path: Path) -> None:
    run = shutil.copytree(made / "run", tmp_path / "run")
    Run.open(run)
    for name in ("run.json", "recipe.yaml"):
        original = (run / name).read_text()
        (run / name).write_text(original + "\n")
        with pytest.raises(CheckpointError, match=f"{name}: differs from its SHA-256"):
            Run.open(run)
        (run / name).write_text(original)
    (run / "fisher.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"fisher\.safetensors: is unexpected"):
        Run.open(run)
    (run / "fisher.safetensors").unlink()
    path = run / "bases" / "layer-0001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    opened = Run.open(run)
    assert opened.bases()[0]
    for read in (opened.layer_bases, opened.spectra):
        with pytest.raises(CheckpointError, match=r"layer-0001\.safetensors: differs from its SHA-256"):
            read(1)
    (run / "log.txt").write_text("rotor writes to these later")
    (run / "tables").mkdir(exist_ok=True)
    (run / "tables" / "a.json").write_text("{}")
    Run.open(run)
    (run / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json: no such file"):
        Run.open(run)


def test_files_added_to_a_source_are_changes(made: Path, tmp_path: Path) -> None:
    for name in ("model", "run"):
        shutil.copytree(made / name, tmp_path / name)
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    info["model"]["path"] = str(tmp_path / "model")
    (tmp_path / "run" / "run.json").write_text(json.dumps(info))
    reseal(tmp_path / "run")
    (tmp_path / "model" / "notes.txt").write_text("not part of the model")
    export(tmp_path / "run", tmp_path / "out", compression=0.4)
    assert not (tmp_path / "out" / "notes.txt").exists()
    (tmp_path / "model" / "special_tokens_map.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"special_tokens_map\.json: was added since calibration"):
        export(tmp_path / "run", tmp_path / "other", compression=0.4)
    recorded = {**info["model"]["shards"], **info["model"]["files"]}
    (problem,) = Checkpoint(tmp_path / "model").changes(recorded)
    assert problem.endswith("special_tokens_map.json was added since calibration")


def test_names_in_the_card_are_no_markup() -> None:
    assert markdown("<img src=x>`a`\n# b [c](d)\x1b[0m|") == r"\<img src=x\>\`a\` \# b \[c\](d) \[0m\|"
    assert markdown("demo-model 1.5B") == "demo-model 1.5B"
