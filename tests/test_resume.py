"""Interrupted calibrations go on where they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.resumed import LAYERS, SETTINGS, drive, tensors
from support.resumed import model as model
from support.resumed import whole as whole
from support.runs import FAST_EVALUATION
from support.stopped import Counting, Stopping

from rotor import Run, calibrate, export
from rotor.calibration.partial import PartialRun
from rotor.checkpoint.output_folder import OutputFolder
from rotor.errors import CheckpointError, UsageError

KILLED = """
commit, write_bases = PartialRun.commit, module.write_bases

def killing(layer, half):
    def committing(self, finished):
        if half and finished == layer + 1:
            die()
        commit(self, finished)
        if not half and finished == layer:
            die()
    return committing

for layer in (1, 2, 3):
    for half in (False, True):
        if layer == 3 and half:
            continue
        child = os.fork()
        if not child:
            PartialRun.commit = killing(layer, half)
            run(name=f"-{layer}-{half}")
            os._exit(1)
        assert wait([child]) == [-signal.SIGKILL]
"""


@pytest.mark.nightly
def test_killed_after_and_within_each_layer(model: Path, whole: Run, tmp_path: Path) -> None:
    drive(KILLED, model, tmp_path / "run")
    expected = tensors(whole)
    assert len(expected) == 1 + LAYERS
    for layer, half in ((1, False), (1, True), (2, False), (2, True), (3, False)):
        out = tmp_path / f"run-{layer}-{half}"
        assert not out.exists()
        partial = out.with_name(f"{out.name}.partial")
        progress = json.loads((partial / "work" / "progress.json").read_text())
        assert progress["finished_layers"] == layer
        with pytest.raises(CheckpointError):
            Run.open(partial)
        resumed = calibrate(model, out, "rotor-16", SETTINGS, batch_tokens=64, offload="always", resume=True)
        assert tensors(resumed) == expected
        assert not partial.exists()
        described, plain = ({k: v for k, v in run.info.items() if k != "stages"} for run in (resumed, whole))
        assert described == plain


TOKENS = 7 * 64
"""Tokens of a calibration here."""


def test_finished_layers_are_not_run_again(model: Path, whole: Run, tmp_path: Path) -> None:
    """And weights may be all in memory the second time."""
    out, again = tmp_path / "run", Counting()
    partial = interrupted(model, out, layers=2)
    resumed = calibrate(model, out, "rotor-16", SETTINGS, batch_tokens=64, offload="never", resume=True, progress=again)
    assert again.done["calibrate"] == (LAYERS - 2) * TOKENS
    assert tensors(resumed) == tensors(whole)
    assert not partial.exists()


def interrupted(model: Path, out: Path, layers: int, resume: bool = False) -> Path:
    """The folder of an unfinished run, which was stopped within the layer after so many."""
    stopped = Stopping("calibrate", layers * TOKENS + 64 if not resume else 64)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, out, "rotor-16", SETTINGS, batch_tokens=64, offload="always", resume=resume, progress=stopped)
    return out.with_name(f"{out.name}.partial")


FISHER = ["tokens.source=random", "tokens.count=448", "tokens.seq_len=64", "groups.size=1"]
"""Seven batches of a row each through three layers."""


@pytest.fixture(scope="module")
def fisher(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run with gradients."""
    return calibrate(model, tmp_path_factory.mktemp("fisher") / "run", "rotor", FISHER, batch_tokens=64)


BATCHES = 7 * LAYERS
FORWARD = LAYERS * TOKENS
"""Units of the forward pass; a batch of the backward pass has twice its tokens."""
BACKWARD, PART = "gradients of the layers from {} on", ", and a part of those of layer {}"


@pytest.mark.parametrize(
    ("units", "error", "holds", "left"),
    [
        (TOKENS + 64, KeyboardInterrupt, "hidden states of 1 layer(s) for gradients", BATCHES),
        (FORWARD + 128, SystemError, "gradients of the layers from 3 on", BATCHES),
        (FORWARD + 3 * 128, KeyboardInterrupt, "gradients of the layers from 3 on, and a part of those of layer 2", 18),
        (
            FORWARD + 10 * 128,
            KeyboardInterrupt,
            "gradients of the layers from 2 on, and a part of those of layer 1",
            11,
        ),
        (FORWARD + 10 * 128, SystemError, "gradients of the layers from 2 on", BATCHES - 7),
    ],
)
def test_gradients_go_on_at_the_batch_that_was_kept_last(
    units: int, error: type[BaseException], holds: str, left: int, model: Path, fisher: Run, tmp_path: Path
) -> None:
    """To the same bytes, whatever was stopped and when."""
    stop_and_go_on(model, fisher, tmp_path / "run", Stopping("gradients", units, error), holds, left)


def test_long_layers_are_kept_in_parts(model: Path, fisher: Run, tmp_path: Path, monkeypatch) -> None:
    """A process that is killed loses the batch that it was at."""
    monkeypatch.setattr("rotor.calibration.gradient_files.KEEP_SECONDS", 0)
    killed = Stopping("gradients", FORWARD + 11 * 128, SystemError)
    holds = BACKWARD.format(2) + PART.format(1)
    stop_and_go_on(model, fisher, tmp_path / "run", killed, holds, BATCHES - 10)


def stop_and_go_on(model: Path, fisher: Run, out: Path, stopping: Stopping, holds: str, left: int) -> None:
    with pytest.raises(stopping.error):
        calibrate(model, out, "rotor", FISHER, batch_tokens=64, progress=stopping)
    assert PartialRun(OutputFolder.at(out, "run")).holdings() == holds
    again = Counting()
    run = calibrate(model, out, "rotor", FISHER, batch_tokens=64, resume=True, progress=again)
    assert again.done["gradients"] == left * 128 + max(0, FORWARD - stopping.done["gradients"] // TOKENS * TOKENS)
    assert tensors(run) == tensors(fisher)
    assert run.info["fisher_top_share"] == fisher.info["fisher_top_share"]
    assert {path.name for path in out.parent.iterdir()} == {"run"}


def test_an_unfinished_run_is_not_taken_for_granted(
    model: Path, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    partial = interrupted(model, out, layers=1)
    with pytest.raises(UsageError, match="an unfinished run is there") as caught:
        calibrate(model, out, "rotor-16", SETTINGS, batch_tokens=64)
    assert "--resume" in caught.value.hint
    assert "--overwrite" in caught.value.hint
    for changes, options, difference in (
        (["tokens.seed=1"], {}, r"recipe\.tokens\.seed was 0, now is 1\."),
        (["bases.refit=false"], {}, r"recipe\.bases\.refit was true, now is false\."),
        ([], {"dtype": "bfloat16"}, r'dtype was "torch\.float32", now is "torch\.bfloat16"'),
        ([], {"batch_tokens": 128}, r"batch_tokens was 64, now is 128\."),
    ):
        with pytest.raises(UsageError, match=difference):
            calibrate(model, out, "rotor-16", [*SETTINGS, *changes], resume=True, **{"batch_tokens": 64, **options})
    with monkeypatch.context() as patch:  # sums of forward passes may differ in their last digits
        patch.setattr(torch, "get_num_threads", lambda: 99)
        with pytest.raises(UsageError, match=r"threads was \d+, now is 99"):
            calibrate(model, out, "rotor-16", SETTINGS, batch_tokens=64, resume=True)
    other = shutil.copytree(model, tmp_path / "other")
    shard = next(iter(sorted(other.glob("*.safetensors"))))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UsageError, match=rf"model\.shards\.{shard.name} was .*, now is "):
        calibrate(other, out, "rotor-16", SETTINGS, batch_tokens=64, resume=True)
    again = calibrate(model, out, "rotor-16", SETTINGS, batch_tokens=64, overwrite=True)
    assert tensors(again) == tensors(whole)
    assert not partial.exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_fails_before_its_first_layer_leaves_nothing(resume: bool, model: Path, tmp_path: Path) -> None:
    """Nor one that was to be resumed where none was; an unfinished one stays, however early it fails again."""
    partial = interrupted(model, tmp_path / "run", layers=0, resume=resume)
    assert list(tmp_path.iterdir()) == []
    interrupted(model, tmp_path / "run", layers=1)
    interrupted(model, tmp_path / "run", layers=1, resume=True)
    assert list(tmp_path.iterdir()) == [partial]


def test_probes_go_on_after_the_last_layer_that_was_saved(model: Path, whole: Run, tmp_path: Path) -> None:
    from rotor.search.table import RankTable

    overrides = ["ranks.probe_tokens=256", *FAST_EVALUATION]
    folders = [shutil.copytree(whole.folder, tmp_path / name) for name in ("a", "b")]
    expected = export(folders[0], tmp_path / "out-a", compression=0.4, overrides=overrides).report
    options = {"compression": 0.4, "overrides": overrides}
    with pytest.raises(KeyboardInterrupt):
        export(folders[1], tmp_path / "out-b", **options, progress=Stopping("probe", LAYERS - 1))
    again = Counting()
    got = export(folders[1], tmp_path / "out-b", **options, progress=again).report
    assert again.done["probe"] == 1
    assert got["ranks"] == expected["ranks"]
    runs = [Run.open(folder) for folder in folders]
    first, second = (next((folder / "probes").iterdir()) for folder in folders)
    assert first.read_bytes() == second.read_bytes()
    tables = [RankTable.latest(run) for run in runs]
    assert [t.points for t in tables if t] == [tables[0].points] * 2


def test_text_that_the_model_writes_is_kept(model: Path, tmp_path: Path, few_written_at_a_time) -> None:
    """By finished batches; it is not gone on with by other settings, and the run is the same in the end."""
    writes = ("tokens.source=synthetic", "tokens.count=192", "tokens.seq_len=32")
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, out, "fdc", writes, progress=Stopping("sample", 2 * 64 + 1))
    assert PartialRun(OutputFolder.at(out, "run")).holdings() == "a part of the text that the model writes"
    with pytest.raises(UsageError, match=r"recipe.tokens.seed was 0, now is 1"):
        calibrate(model, out, "fdc", (*writes, "tokens.seed=1"), resume=True)
    again = Counting()
    run = calibrate(model, out, "fdc", writes, resume=True, progress=again)
    assert again.done["sample"] == 192
    assert tensors(run) == tensors(calibrate(model, tmp_path / "whole", "fdc", writes))
