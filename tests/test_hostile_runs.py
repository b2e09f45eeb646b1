"""Runs and checkpoints of unknown origin: whatever is in their files, the end is success or a clean error."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import calibrated, reseal
from hypothesis import given
from hypothesis import strategies as st
from mutations import BYTES, CHANGES, SHARES, both, changed, clean, garbled, mutations
from worlds import SECONDS, limited

from rotor.calibration.run import Run
from rotor.errors import CheckpointError
from rotor.export.export import export
from rotor.format.atomic import json_bytes
from rotor.format.manifest import CHECKSUM
from rotor.models.checkpoint import Checkpoint
from rotor.progress import Progress
from rotor.recipe import override
from rotor.report.collect import collect
from rotor.runtime.families import attention_shape
from rotor.runtime.integration import RotorConfig
from rotor.search.measurer import rank_path
from rotor.search.table import RankTable, probes_json, read_probes
from rotor.validation.integrity import Validation, check_integrity

pytestmark = pytest.mark.usefixtures("bounded_memory")


@pytest.fixture(scope="module")
def small(tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(model, run, checkpoint) of a tiny model."""
    folder = tmp_path_factory.mktemp("hostile")
    run = calibrated(tiny("llama"), folder / "run", "pre", 2)
    export(run.folder, folder / "out", compression=0.4)
    return tiny("llama"), folder / "run", folder / "out"


@pytest.fixture
def places_for(small, tmp_path: Path) -> tuple[Path, Path, Path]:
    """Copies of them that a test may damage."""
    return tuple(shutil.copytree(path, tmp_path / path.name) for path in small)  # type: ignore[return-value]


@pytest.mark.parametrize("share", SHARES)
def test_quantization_configs(small, share: float) -> None:
    _, _, out = small
    config = json.loads((out / "config.json").read_text())
    shape = attention_shape(Checkpoint(out).config)
    base = config["quantization_config"]
    base["profiles"] = {"0.9": [[[4, 4]] * 2] * 2, "0.99": [[[8, 8]] * 2] * 2}

    def check(data: bytes) -> None:
        with suppress(ValueError, RecursionError):  # not JSON: read_json's work
            found = json.loads(data)
            if isinstance(found, dict):
                clean(lambda: use(found))

    def use(found: dict[str, Any]) -> None:
        read = RotorConfig(**found)
        read.layouts(shape)

    both("quantization", base, check, share)


@pytest.mark.parametrize("share", SHARES)
def test_run_files(places_for, share: float) -> None:
    _, run, _ = places_for

    def check(data: bytes) -> None:
        (run / "run.json").write_bytes(data)
        reseal(run)
        clean(lambda: use(Run.open(run)))

    def use(opened: Run) -> None:
        assert opened.shape.num_layers > 0
        assert opened.model_folder
        collect(opened.folder)

    (run / "recipe.yaml").write_text("{name: x, summary: y, bases: {qk: kq, vo: kq}, groups: {domain: pre, size: 2}}")
    shutil.rmtree(run / "tables")
    shutil.rmtree(run / "probes", ignore_errors=True)
    shutil.rmtree(run / "bases")
    both("run", json.loads((run / "run.json").read_text()), check, share)


def test_a_pipe_in_a_run_is_not_waited_for(places_for) -> None:
    _, run, _ = places_for
    for name in ("bases/layer-0000.safetensors", "recipe.yaml", "run.json"):
        (run / name).unlink()
        os.mkfifo(run / name)
        with limited(SECONDS), pytest.raises(CheckpointError, match=f"{name}: is no regular file"):
            Run.open(run).spectra(0)


def write_sealed(path: Path, data: bytes) -> None:
    """Write what may be a JSON object, with the SHA-256 that fits: what lies behind that check is to be reached."""
    try:
        content = json.loads(data)
        if isinstance(content, dict):
            content.pop(CHECKSUM, None)
            sealed = {CHECKSUM: hashlib.sha256(json_bytes(content)).hexdigest(), **content}
            data = json.dumps(sealed).encode()  # with NaN, if there is one
    except (ValueError, RecursionError):
        pass
    path.write_bytes(data)


@pytest.mark.parametrize("share", SHARES)
def test_rank_tables(places_for, share: float) -> None:
    _, folder, _ = places_for
    run = Run.open(folder)
    latest = RankTable.latest(run)
    assert latest is not None
    path = folder / "tables" / f"{latest.context.key}.json"

    def check(data: bytes) -> None:
        write_sealed(path, data)
        clean(use)

    def use() -> None:
        table = RankTable.open(run, latest.context)
        table.find(rank_path(run, override(run.recipe, ["ranks.method=uniform"])).steps()[0])
        for point in table.points:
            point.to_json()

    both("table", json.loads(path.read_text()), check, share)


@pytest.mark.parametrize("share", SHARES)
def test_probes(places_for, share: float) -> None:
    _, folder, _ = places_for
    run = Run.open(folder)
    path = folder / "probes" / "some.json"
    path.parent.mkdir(exist_ok=True)
    layers = [([(16, 1e-9)], [(16, 1e-9)]) for _ in run.bases()]

    def check(data: bytes) -> None:
        write_sealed(path, data)
        clean(lambda: read_probes(run, "some"))

    both("table", json.loads(json.dumps(probes_json(layers))), check, share)
    path.unlink()


@pytest.mark.parametrize("share", SHARES)
def test_checkpoint_files(places_for, share: float) -> None:
    _, _, out = places_for

    def check(data: bytes) -> None:
        (out / "rotor.json").write_bytes(data)
        clean(lambda: check_integrity(Validation(out), Progress()))
        clean(lambda: collect(out))

    both("checkpoint", json.loads((out / "rotor.json").read_text()), check, share)


@pytest.mark.parametrize("share", SHARES)
def test_kernel_configs(places_for, share: float) -> None:
    _, _, out = places_for
    written = (out / "kernel_config.json").read_bytes()
    original = json.loads(written)

    def check(data: bytes) -> None:
        (out / "kernel_config.json").write_bytes(data)
        result = Validation(out)
        clean(lambda: check_integrity(result, Progress()))
        with suppress(ValueError, RecursionError):
            assert result.damaged == (data != written)
            json.loads(data)

    both("kernels", original, check, share)


@pytest.mark.parametrize("share", SHARES)
def test_bases(places_for, share: float) -> None:
    _, folder, _ = places_for
    run = Run.open(folder)
    files = [folder / "bases" / f"layer-000{layer}.safetensors" for layer in range(2)]
    originals = {path: path.read_bytes() for path in files}

    @mutations("bases", share)
    @given(st.sampled_from(files), st.one_of(CHANGES, BYTES))
    def mutate(path: Path, changes: Any) -> None:
        data = originals[path]
        length = struct.unpack("<Q", data[:8])[0]
        if changes[0][1] in ("flip", "insert", "cut", "end"):
            head = garbled(data[: 8 + length], changes)
        else:
            text = json.dumps(changed(json.loads(data[8 : 8 + length]), changes)).encode()
            head = struct.pack("<Q", len(text)) + text
        path.write_bytes(head + data[8 + length :])
        clean(lambda: rank_path(run, run.recipe).steps()[0])
        clean(lambda: run.bases()[0])
        path.write_bytes(data)

    mutate()
