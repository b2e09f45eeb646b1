"""Hub ids, against a cache folder laid out as huggingface_hub lays it out; nothing is downloaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.paths import DEMO_MODEL
from support.runs import reseal

from rotor import Run, calibrate, export
from rotor.errors import CheckpointError, UnsupportedModelError, UsageError
from rotor.models.hub import find_model
from rotor.models.source import Checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A hub cache that holds the bundled model as team/demo; its files are links into blobs, as in a real one."""
    repository = tmp_path / "hub" / "models--team--demo"
    snapshot, blobs, refs = repository / "snapshots" / COMMIT, repository / "blobs", repository / "refs"
    for folder in (snapshot, blobs, refs):
        folder.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(p for p in DEMO_MODEL.iterdir() if p.is_file())):
        (blobs / f"{number:040x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / f"{number:040x}", snapshot))
    return repository.parent


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As with HF_HUB_CACHE and HF_HUB_OFFLINE, which huggingface_hub reads once; the cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


def test_calibrate_from_the_hub_pins_the_commit(offline: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    model = calibrate("team/demo", out, "fdc", ["tokens.count=512"]).info["model"]
    assert (model["name"], model["hub_id"], model["revision"]) == ("demo", "team/demo", COMMIT)

    # The cache has moved since: the run finds its model again, by id and commit.
    info = json.loads((out / "run.json").read_text())
    info["model"]["path"] = str(tmp_path / "gone")
    (out / "run.json").write_text(json.dumps(info))
    reseal(out)
    assert Run.open(out).fetch_model() == offline / "models--team--demo" / "snapshots" / COMMIT

    # A model that was a folder of the user's, and was moved: the run is good once it is there again.
    info["model"]["hub_id"] = None
    (out / "run.json").write_text(json.dumps(info))
    reseal(out)
    with pytest.raises(CheckpointError, match="was calibrated on the model in it") as caught:
        export(out, tmp_path / "checkpoint", compression=0.5, measure=False)
    assert f"ln -s MODEL {tmp_path / 'gone'}" in str(caught.value.hint)
    (tmp_path / "gone").symlink_to(DEMO_MODEL)
    export(out, tmp_path / "checkpoint", compression=0.5, measure=False)


def test_what_there_is_not(offline: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="team/other: no such folder, and not in the hub's cache; HF_HUB_OFFLINE"):
        find_model("team/other")
    with pytest.raises(CheckpointError, match="team/demo at revision v2: no such folder"):
        find_model("team/demo", "v2")
    source = find_model(DEMO_MODEL)
    assert (source.folder, source.hub_id, source.revision, source.name) == (DEMO_MODEL, None, None, "demo-model")
    with pytest.raises(CheckpointError, match="no such folder"):
        find_model(tmp_path / "nothing")
    with pytest.raises(UsageError, match="local folder"):
        find_model(DEMO_MODEL, "main")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adapter_config.json", "a LoRA adapter"),
        ("quantize_config.json", "already quantised"),
        ("hf_quant_config.json", "already quantised"),
        ("model.Q4_K_M.gguf", "a GGUF model"),
    ],
)
def test_other_formats_are_refused_with_the_reason(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(UnsupportedModelError, match=words):
        Checkpoint(tmp_path)


def test_other_copies_of_the_weights_are_not_fetched(monkeypatch, tmp_path: Path) -> None:
    """By huggingface_hub's own reading of the patterns."""
    from huggingface_hub.utils import filter_repo_objects

    names = ["config.json", "model.safetensors", "chat_template.jinja", "onnx/config.json", "pytorch_model.bin"]
    names += ["original/consolidated.safetensors", "consolidated.safetensors"]
    fetched = []

    def download(repo: str, revision: str | None, local_files_only: bool, **patterns: list[str]) -> str:
        fetched.extend(filter_repo_objects(names, **patterns))
        return str(tmp_path / COMMIT)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_model("team/demo", "main").revision == COMMIT
    assert fetched == names[:3]
