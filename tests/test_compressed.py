"""Opening a compressed checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import DEMO_MODEL

from rotor import export
from rotor.errors import CheckpointError
from rotor.format.layout import kv_bytes_per_token
from rotor.models.checkpoint import Checkpoint
from rotor.models.compressed import CompressedCheckpoint, open_model


@pytest.fixture(scope="module")
def folder(demo_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compressed") / "out"
    export(demo_run("fdc").folder, out, compression=0.5)
    return out


def test_its_files_are_read_through_one_object(folder: Path) -> None:
    checkpoint = CompressedCheckpoint(folder)
    report = json.loads((folder / "rotor.json").read_text())
    assert json.loads(json.dumps(checkpoint.report)) == report
    assert [layout.to_dict() for layout in checkpoint.layouts] == report["layouts"]
    size = report["kv_bytes_per_token"]
    assert checkpoint.dtype.itemsize == size["element_bytes"]
    assert kv_bytes_per_token(checkpoint.layouts, checkpoint.dtype.itemsize) == size["after"]
    assert len(checkpoint.kernel_config.layers) == checkpoint.shape.num_layers
    assert checkpoint.source_folder.resolve() == DEMO_MODEL.resolve()
    assert (checkpoint.run_folder / "run.json").is_file()


def test_plain_models_and_folders_that_are_none(folder: Path) -> None:
    assert type(open_model(DEMO_MODEL)) is Checkpoint
    assert type(open_model(folder)) is CompressedCheckpoint
    with pytest.raises(CheckpointError, match=f"{re.escape(str(DEMO_MODEL))}: not a compressed checkpoint"):
        CompressedCheckpoint(DEMO_MODEL)
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        CompressedCheckpoint("nowhere")
