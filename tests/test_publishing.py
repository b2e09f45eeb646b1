"""Files and folders that appear whole or not at all, and what a power loss leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.resumed import SETTINGS, drive, tensors
from support.resumed import model as model
from support.resumed import whole as whole

from rotor import Run, calibrate
from rotor.checkpoint.files import differences, replacing, write_json
from rotor.checkpoint.manifest import Manifest
from rotor.checkpoint.output_folder import remove
from rotor.errors import CheckpointError, UsageError
from rotor.models.source import sidecars

pytestmark = pytest.mark.nightly


def test_an_interrupted_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    victim = tmp_path / "victim"
    victim.write_text("keep")
    (tmp_path / ".a.json.tmp").symlink_to(victim)

    def interrupted_write() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted_write()
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert victim.read_text() == "keep"
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.json", "victim"}
    (tmp_path / "link").symlink_to(tmp_path)  # what a user calls a folder
    write_json(tmp_path / "link" / "a.json", {"b": 2})
    assert json.loads(path.read_text()) == {"b": 2}


def test_json_differences() -> None:
    assert list(differences({"a": {"b": 1, "c": [1, 2]}}, {"a": {"b": 1.0, "c": (1, 3)}})) == [
        ("a.b", 1, 1.0),
        ("a.c[1]", 2, 3),
    ]
    assert list(differences({"a": [1]}, {"a": [1, 2], "b": 0})) == [("a", [1], [1, 2]), ("b", None, 0)]
    later = list(differences({"r": {"x": 1, "y": 2}}, {"r": {"x": 1, "z": 3}}, optional=lambda name: name == "r"))
    assert later == []


KILLED_PUBLISHING = """
import rotor.checkpoint.publishing as publishing

partial = importlib.import_module("rotor.calibration.partial")

def killing(where):
    if where == "before":
        publishing.os.rename = lambda *names: die()
    if where == "after":
        partial.shutil.rmtree = lambda path: die()
    if where == "manifest":
        partial.write_manifest = lambda *arguments: die()

for where in ("manifest", "before", "after"):
    child = os.fork()
    if not child:
        killing(where)
        run(name=f"-{where}")
        os._exit(1)
    assert wait([child]) == [-signal.SIGKILL]
"""


def test_a_run_that_was_killed_while_it_was_published_keeps_its_recipe(model: Path, whole: Run, tmp_path: Path) -> None:
    """--resume with another recipe is refused as before, and with its own ends in the same run."""
    drive(KILLED_PUBLISHING, model, tmp_path / "run")
    for where in ("manifest", "before"):
        out = tmp_path / f"run-{where}"
        assert not out.exists()
        other = [*SETTINGS, "bases.refit=false"]
        with pytest.raises(UsageError, match=r"recipe\.bases\.refit was true, now is false"):
            calibrate(model, out, "rotor-16", other, batch_tokens=64, resume=True)
        run = calibrate(model, out, "rotor-16", SETTINGS, batch_tokens=64, resume=True)
        assert tensors(run) == tensors(whole)
        assert Manifest.read(out).problems() == {}
        assert not out.with_name(f"{out.name}.partial").exists()
    run = Run.open(tmp_path / "run-after")
    assert Manifest.read(run.folder).problems() == {}
    assert tensors(run).items() >= tensors(whole).items()
    again = calibrate(model, run.folder, "rotor-16", SETTINGS, batch_tokens=64, overwrite=True)
    assert tensors(again) == tensors(whole)


def test_sidecars_are_those_of_a_model(tmp_path: Path) -> None:
    """Never a key, a backup, or other weights; links that lead out are refused."""
    model = tmp_path / "dataset" / "model"
    model.mkdir(parents=True)
    wanted = [
        *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "LICENSE", "generation_config.json"),
        *("chat_template.jinja", "NOTICE", "qwen.tiktoken"),
    ]
    other = [
        *("config.json", "id_rsa", ".env", "tf_model.h5", "model.gguf", "tokenizer.json.bak", "merges.txt.orig"),
        *("pytorch_model.bin", "README.md", "modeling_x.py", "adapter_model.safetensors", "LICENSE.bak", "a.model"),
    ]
    for name in (*wanted, *other):
        (model / name).write_text(name)
    assert sidecars(model) == sorted(wanted)
    (tmp_path / "secret").write_text("key")
    (model / "vocab.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"vocab\.txt: is a link to .*/secret, outside of the model"):
        sidecars(model)


def test_a_removal_that_was_stopped_half_way_is_finished_by_the_next(whole: Run, tmp_path: Path) -> None:
    """A folder that is emptied but not yet gone is no file of the user's."""
    old = shutil.copytree(whole.folder, tmp_path / ".out.rotor-old")
    for path in (old / "bases").iterdir():
        path.unlink()
    assert (old / "manifest.json").is_file()
    remove(old, "run")
    assert not old.exists()
    shutil.copytree(whole.folder, old)
    (old / "empty").mkdir()
    with pytest.raises(UsageError, match="holds empty/, which rotor did not write"):
        remove(old, "run")
