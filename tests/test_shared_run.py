"""Exporting from somebody else's run, which cannot be written; and shards that cannot be read."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.runs import calibrated, contents

from rotor import export
from rotor.errors import CheckpointError, UsageError
from rotor.models.source import Checkpoint

NOBODY = 65534


@contextmanager
def as_another_user() -> Iterator[None]:
    """root may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_run_that_cannot_be_written_serves_what_is_known_and_refuses_to_measure(tiny, tmp_path: Path) -> None:
    for parent in tmp_path.parents[: len(tmp_path.parents) - len(Path(tempfile.gettempdir()).parents) - 1]:
        parent.chmod(0o755)  # pytest keeps its folders for itself
    tmp_path.chmod(0o755)
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    for file in model.iterdir():
        file.chmod(0o644)
    run, mine = calibrated(model, tmp_path / "run", "post", 1).folder, tmp_path / "mine"
    first = export(run, tmp_path / "first", compression=0.3)
    mine.mkdir()
    mine.chmod(0o777)
    for folder in (run, *(path for path in run.rglob("*") if path.is_dir())):
        folder.chmod(0o555)
    before = contents(run)
    try:
        with as_another_user():
            again = export(run, mine / "out", compression=0.3)
            assert again.report["tensors"] == first.report["tensors"]
            assert again.measured_points == 0
            told = "run: cannot be written, and what this export has to measure first is kept there"
            with pytest.raises(UsageError, match=told) as caught:
                export(run, mine / "other", compression=0.3, overrides=["evaluation.seed=9"])
            assert "Copy the run (cp -r " in caught.value.hint
        assert contents(run) == before
        assert not (mine / "other").exists()
    finally:
        for folder in (run, *(path for path in run.rglob("*") if path.is_dir())):
            folder.chmod(0o755)


def test_a_shard_that_cannot_be_read_is_not_called_truncated(tiny, tmp_path: Path, monkeypatch) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    shard, opened = model / "model.safetensors", Path.open

    def refuse(path: Path, *arguments, **options):
        if path == shard:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read \(Permission denied\)") as caught:
        Checkpoint(model)
    assert "permissions" in caught.value.hint


def test_a_pointer_of_git_lfs_is_named(tiny, tmp_path: Path) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n")
    with pytest.raises(CheckpointError, match="not a safetensors file") as caught:
        Checkpoint(model)
    assert "git lfs pull" in caught.value.hint
