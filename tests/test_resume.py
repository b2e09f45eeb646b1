"""Interrupted calibrations go on where they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resumed import LAYERS, SETTINGS, drive, tensors
from support.resumed import model as model
from support.resumed import whole as whole
from support.runs import FAST_EVALUATION

from rotor import Run, calibrate, export
from rotor.calibration.gradient_sums import GradientSums
from rotor.calibration.partial import PartialRun
from rotor.checkpoint.output_folder import OutputFolder
from rotor.errors import CheckpointError, UsageError
from rotor.models.compressible import CompressibleModel
from rotor.models.layerwise import LayerwiseModel

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


def test_finished_layers_are_not_run_again(
    model: Path, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And weights may be all in memory the second time."""
    partial = interrupted(model, tmp_path / "run", monkeypatch, at=2)
    seen = []
    run = LayerwiseModel.run
    monkeypatch.setattr(LayerwiseModel, "run", lambda self, index, *rest: (seen.append(index), run(self, index, *rest)))
    resumed = calibrate(model, tmp_path / "run", "rotor-16", SETTINGS, batch_tokens=64, offload="never", resume=True)
    assert seen == [2]
    assert tensors(resumed) == tensors(whole)
    assert not partial.exists()


def interrupted(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, at: int, resume: bool = False) -> Path:
    """The folder of an unfinished run with `at` finished layers."""
    run = LayerwiseModel.run

    def failing(self: LayerwiseModel, index: int, *rest: object) -> None:
        if index == at:
            raise KeyboardInterrupt
        run(self, index, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(LayerwiseModel, "run", failing)
        with pytest.raises(KeyboardInterrupt):
            calibrate(model, out, "rotor-16", SETTINGS, batch_tokens=64, offload="always", resume=resume)
    return out.with_name(f"{out.name}.partial")


FISHER = ["tokens.source=random", "tokens.count=448", "tokens.seq_len=64", "groups.size=1"]
"""Seven batches of a row each through three layers."""


class Stopped:
    """Ctrl-C in the gradients of a calibration.

    Args:
        at: batches that are added before, of the backward pass; negative: layers of the forward pass.
        seconds: seconds between what is kept of a layer.
        killed: the process ends without a chance to keep anything.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, seconds: float = 1e9, killed: bool = False) -> None:
        self.patch, self.at, self.seconds, self.killed = monkeypatch, at, seconds, killed
        self.added = 0

    def __call__(self, model: Path, out: Path, resume: bool = False) -> Run | None:
        add, run = GradientSums.add, LayerwiseModel.run

        def adding(sums: GradientSums, *batch: Any) -> None:
            if self.added == self.at:
                raise RuntimeError if self.killed else KeyboardInterrupt
            self.added += 1
            add(sums, *batch)

        def running(network: LayerwiseModel, index: int, *rest: Any) -> None:
            if index == -self.at:
                raise KeyboardInterrupt
            run(network, index, *rest)

        with self.patch.context() as patch:
            patch.setattr(GradientSums, "add", adding)
            patch.setattr("rotor.calibration.gradient_files.KEEP_SECONDS", self.seconds)
            if self.at < 0:
                patch.setattr(LayerwiseModel, "run", running)
            try:
                return calibrate(model, out, "rotor", FISHER, batch_tokens=64, resume=resume)
            except (KeyboardInterrupt, RuntimeError):
                return None


@pytest.fixture(scope="module")
def fisher(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run with gradients."""
    return calibrate(model, tmp_path_factory.mktemp("fisher") / "run", "rotor", FISHER, batch_tokens=64)


BATCHES = 7 * LAYERS


@pytest.mark.parametrize(
    ("at", "options", "holds", "left"),
    [
        (-1, {}, "hidden states of 1 layer(s) for gradients", BATCHES),
        (0, {}, "gradients of the layers from 3 on", BATCHES),
        (3, {}, "gradients of the layers from 3 on, and a part of those of layer 2", BATCHES - 3),
        (10, {}, "gradients of the layers from 2 on, and a part of those of layer 1", BATCHES - 10),
        (10, {"killed": True}, "gradients of the layers from 2 on", BATCHES - 7),
        (10, {"killed": True, "seconds": 0}, "gradients of the layers from 2 on, and a part of those of layer 1", 11),
    ],
)
def test_gradients_go_on_at_the_batch_that_was_kept_last(
    at: int,
    options: dict[str, Any],
    holds: str,
    left: int,
    model: Path,
    fisher: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the same bytes, whatever was stopped and when."""
    out = tmp_path / "run"
    assert Stopped(monkeypatch, at, **options)(model, out) is None
    assert PartialRun(OutputFolder.at(out, "run")).holdings() == holds
    again = Stopped(monkeypatch, 10**9)
    run = again(model, out, resume=True)
    assert run is not None
    assert again.added == left
    assert tensors(run) == tensors(fisher)
    assert run.info["fisher_top_share"] == fisher.info["fisher_top_share"]
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_an_unfinished_run_is_not_taken_for_granted(
    model: Path, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    partial = interrupted(model, out, monkeypatch, at=1)
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
def test_a_run_that_fails_before_its_first_layer_leaves_nothing(
    resume: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that was to be resumed where none was; an unfinished one stays, however early it fails again."""
    partial = interrupted(model, tmp_path / "run", monkeypatch, at=0, resume=resume)
    assert list(tmp_path.iterdir()) == []
    interrupted(model, tmp_path / "run", monkeypatch, at=1)
    interrupted(model, tmp_path / "run", monkeypatch, at=1, resume=True)
    assert list(tmp_path.iterdir()) == [partial]


def test_probes_go_on_after_the_last_layer_that_was_saved(
    model: Path, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rotor.search.table import ProbeTable, RankTable

    overrides = ["ranks.probe_tokens=256", *FAST_EVALUATION]
    folders = [shutil.copytree(whole.folder, tmp_path / name) for name in ("a", "b")]
    expected = export(folders[0], tmp_path / "out-a", compression=0.4, overrides=overrides).report
    save, begun = ProbeTable.save, []

    def stop_after_two(self: ProbeTable) -> None:
        save(self)
        if len(self.sensitivities) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProbeTable, "save", stop_after_two)
        with pytest.raises(KeyboardInterrupt):
            export(folders[1], tmp_path / "out-b", compression=0.4, overrides=overrides)
    put = CompressibleModel.compressed_layer
    monkeypatch.setattr(
        CompressibleModel,
        "compressed_layer",
        lambda self, index, *rest: (begun.append(index), put(self, index, *rest))[1],
    )
    got = export(folders[1], tmp_path / "out-b", compression=0.4, overrides=overrides).report
    assert begun == [2] * 4  # two probes of keys and two of values, all of the last layer
    assert got["ranks"] == expected["ranks"]
    runs = [Run.open(folder) for folder in folders]
    first, second = (next((folder / "probes").iterdir()) for folder in folders)
    assert first.read_bytes() == second.read_bytes()
    tables = [RankTable.latest(run) for run in runs]
    assert [t.points for t in tables if t] == [tables[0].points] * 2


def test_text_that_the_model_writes_is_kept(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By finished batches; it is not gone on with by other settings, and the run is the same in the end."""
    writes = ("tokens.source=synthetic", "tokens.count=192", "tokens.seq_len=32")
    monkeypatch.setattr("rotor.models.tokens.SAMPLING_TOKENS", 64)
    keep = PartialRun.keep

    def stopped(partial: PartialRun, name: str, tensors: dict[str, torch.Tensor]) -> None:
        keep(partial, name, tensors)
        if len(tensors["rows"]) == 4:
            raise KeyboardInterrupt

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(PartialRun, "keep", stopped)
        with pytest.raises(KeyboardInterrupt):
            calibrate(model, out, "fdc", writes)
    assert PartialRun(OutputFolder.at(out, "run")).holdings() == "a part of the text that the model writes"
    with pytest.raises(UsageError, match=r"recipe.tokens.seed was 0, now is 1"):
        calibrate(model, out, "fdc", (*writes, "tokens.seed=1"), resume=True)
    run = calibrate(model, out, "fdc", writes, resume=True)
    assert tensors(run) == tensors(calibrate(model, tmp_path / "whole", "fdc", writes))
