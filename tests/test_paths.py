"""Outputs by whatever name: nothing is removed that rotor did not write, and no source by an alias."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.command_line import expect_error
from support.runs import calibrated, contents

from rotor import Run, calibrate, export
from rotor.checkpoint.output_folder import mark_unfinished
from rotor.errors import CheckpointError, UsageError

SETTINGS = ["tokens.source=random", "tokens.count=512", "tokens.seq_len=64", "groups.size=1", "ranks.multiple_of=4"]


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run and an OUT; do not write to them."""
    folder = tmp_path_factory.mktemp("paths")
    model = shutil.copytree(tiny("llama"), folder / "model")
    run = calibrated(model, folder / "run", "post", 1)
    export(run.folder, folder / "out", compression=0.4)
    return run


@pytest.fixture
def model(tiny, tmp_path: Path) -> Path:
    return shutil.copytree(tiny("llama"), tmp_path / "model")


def notes(folder: Path) -> Path:
    """A user's folder."""
    folder.mkdir(parents=True)
    (folder / "diary.txt").write_text("dear diary")
    return folder


def test_dots_after_a_link_remove_nothing(model: Path, tmp_path: Path) -> None:
    """link/../notes is beside what the link leads to; by its text it would be beside the link."""
    elsewhere = tmp_path / "elsewhere" / "deep"
    elsewhere.mkdir(parents=True)
    (tmp_path / "link").symlink_to(elsewhere)
    for name in ("notes", "notes.partial", "run.partial"):
        notes(tmp_path / name)
    before = contents(tmp_path)
    run = calibrate(model, tmp_path / "link" / ".." / "notes", "fdc", SETTINGS, overwrite=True)
    assert run.folder == tmp_path / "elsewhere" / "notes"
    assert before.items() <= contents(tmp_path).items()
    calibrate(model, tmp_path / "link" / ".." / "model", "fdc", SETTINGS, overwrite=True)
    assert before.items() <= contents(tmp_path).items()
    with pytest.raises(UsageError, match=r"run\.partial: is(: an unfinished run| not empty, and nothing)|unfinished"):
        calibrate(model, tmp_path / "run", "fdc", SETTINGS, overwrite=True)
    assert before.items() <= contents(tmp_path).items()


def test_only_what_says_that_it_is_rotors_is_replaced(run: Run, model: Path, tmp_path: Path, capsys) -> None:
    mine, fake = notes(tmp_path / "mine"), notes(tmp_path / "fake")
    (fake / "rotor.json").write_text("{}")
    (fake / "manifest.json").write_text('{"rotor_manifest": 1, "kind": "checkpoint", "files": {}}')
    out = shutil.copytree(run.folder.parent / "out", tmp_path / "out")
    added = shutil.copytree(out, tmp_path / "added")
    notes(added / "more")
    damaged = shutil.copytree(out, tmp_path / "damaged")
    (damaged / "manifest.json").write_text("{")
    before = contents(tmp_path)
    for place, why in (
        (mine, "nothing in it says that it is a checkpoint folder"),
        (damaged, "nothing in it says that it is a checkpoint folder"),
        (fake, "holds diary.txt, which rotor did not write"),
        (added, "holds more/diary.txt, which rotor did not write"),
    ):
        expect_error(capsys, 2, why, "export", run.folder, "-o", place, "--compression", "0.5", "--overwrite")
    # Of another kind: a checkpoint in the place of a run, and the other way round.
    other = shutil.copytree(run.folder, tmp_path / "other")
    why = "is a run folder, and would become a checkpoint folder"
    expect_error(capsys, 2, why, "export", run.folder, "-o", other, "--compression", "0.5", "--overwrite")
    expect_error(capsys, 2, "is a checkpoint folder", "calibrate", model, "-o", out, "--overwrite")
    shutil.rmtree(other)
    assert contents(tmp_path) == before


def test_a_source_under_a_name_that_may_be_removed(run: Run, model: Path, tmp_path: Path) -> None:
    """OUT.partial, staging folders, what lies in them, links to them and in them; text that is calibrated with too."""
    for name in ("L.partial", ".L.rotor-new/deep/model", ".L.rotor-old"):
        source = shutil.copytree(model, tmp_path / name)
        mark_unfinished(tmp_path / name.split("/")[0], "run")
        linked = tmp_path / "linked"
        linked.mkdir()
        for path in source.iterdir():
            (linked / path.name).symlink_to(path)
        before = contents(tmp_path)
        for given, resume in ((source, False), (linked, True)):
            with pytest.raises(UsageError, match="which rotor reads from"):
                calibrate(given, tmp_path / "L", "fdc", SETTINGS, overwrite=True, resume=resume)
        assert contents(tmp_path) == before
        shutil.rmtree(tmp_path / name.split("/")[0])
        shutil.rmtree(linked)
    text = notes(tmp_path / "L.partial")
    mark_unfinished(text, "run")
    settings = [*SETTINGS, "tokens.source=text", f"tokens.path={text}"]
    with pytest.raises(UsageError, match="which rotor reads from"):
        calibrate(model, tmp_path / "L", "fdc", settings, overwrite=True)
    assert (text / "diary.txt").is_file()


def test_a_link_to_a_folder_stays_and_what_it_leads_to_is_replaced(run: Run, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for compression in (0.3, 0.4):
        result = export(run.folder, tmp_path / "link", compression=compression, overwrite=True)
        assert result.folder == tmp_path / "real"
    assert (tmp_path / "link").readlink() == Path("real")
    weights = "model.safetensors"
    assert contents(tmp_path / "real")[weights] == contents(run.folder.parent / "out")[weights]
    (tmp_path / "dangling").symlink_to("new")
    assert export(run.folder, tmp_path / "dangling", compression=0.4).folder == tmp_path / "new"


@pytest.mark.parametrize("name", ["m[ab]", "-rf **"])
def test_names_with_a_meaning_to_others(run: Run, tmp_path: Path, name: str) -> None:
    """Neighbours that a pattern would match stay; so does the backup of `.ma`, which `m[ab]` once took."""
    neighbours = [tmp_path / f".{other}.rotor-{end}" for other in ("ma", "x") for end in ("new", "old")]
    for neighbour in neighbours:
        shutil.copytree(run.folder.parent / "out", neighbour)
    before = contents(tmp_path)
    for _ in range(2):
        out = export(run.folder, tmp_path / name, compression=0.4, overwrite=True).folder
    after = contents(tmp_path)
    assert {key: value for key, value in after.items() if not key.startswith(f"{out.name}/")} == before


def test_leftovers_are_cleaned_up_whatever_process_left_them(run: Run, tmp_path: Path) -> None:
    """A folder that was to be replaced is put back where the new one has not come."""
    out, whole = tmp_path / "out", run.folder.parent / "out"
    unfinished, replaced = tmp_path / ".out.rotor-new", tmp_path / ".out.rotor-old"
    shutil.copytree(whole, replaced)
    unfinished.mkdir()
    mark_unfinished(unfinished, "checkpoint")
    (unfinished / "config.json").write_text("{")
    with pytest.raises(UsageError, match="exists and is not empty"):  # it is put back before that is looked at
        export(run.folder, out, compression=0.3)
    assert contents(out) == contents(whole)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    shutil.copytree(whole, replaced)
    export(run.folder, out, compression=0.3, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    theirs = notes(tmp_path / ".out.rotor-new")
    with pytest.raises(CheckpointError, match="File exists"):
        export(run.folder, out, compression=0.4, overwrite=True)
    assert (theirs / "diary.txt").is_file()


def test_the_root_files_and_long_names(run: Run, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("x")
    for out, why in (
        ("/", "is the root of the file system"),
        ("/..", "is the root of the file system"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "x", "file is no folder"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        for command in (["export", run.folder, "--compression", "0.5"], ["calibrate", run.model_folder]):
            code = 2 if "is " in why else 1
            expect_error(capsys, code, why, *command, "-o", out, "--overwrite")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
