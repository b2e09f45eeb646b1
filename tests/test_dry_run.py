"""Dry runs: what they promise is what is written, and they write nothing themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import DEMO_MODEL, calibrated
from safetensors import safe_open
from test_cli import rotor
from test_processes import SETTINGS

from rotor.calibration.run import Run
from rotor.errors import UsageError
from rotor.export.export import export
from rotor.planning.dry_run import plan_export
from rotor.recipe.settings import ExportSettings, Goal


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file, and every folder."""
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in [folder, *folder.rglob("*")]
    }


def stored_sizes(folder: Path) -> dict[str, int]:
    sizes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                tensor = file.get_tensor(name)
                sizes[name] = tensor.numel() * tensor.element_size()
    return sizes


@pytest.mark.parametrize(
    ("family", "domain", "methods"),
    [
        ("llama", "post", {}),
        ("phi3", "pre", {}),
        ("gpt2", "none", {}),
        ("qwen2", "post", {"qk": "kq"}),
        ("qwen3", "pre", {}),
    ],
)
def test_ranks_and_sizes_are_those_that_export_writes(family: str, domain: str, methods, tiny, tmp_path: Path) -> None:
    run = calibrated(tiny(family), tmp_path / "run", domain if domain != "none" else "post", 1, **methods)
    before = state(tmp_path)
    plan = plan_export(ExportSettings(run.folder, tmp_path / "out", Goal(compression=0.4)))
    assert state(tmp_path) == before
    assert (plan.points, plan.known_points, plan.probed_layers) == (1, 0, 0)
    report = export(run.folder, tmp_path / "out", compression=0.4).report
    assert plan.ranks == report["ranks"]["stored"]
    assert plan.compression == pytest.approx(report["compression"]["stored"], abs=1e-6)
    assert plan.kv_bytes_per_token == {k: report["kv_bytes_per_token"][k] for k in ("before", "after")}
    old, new = stored_sizes(tiny(family)), stored_sizes(tmp_path / "out")
    assert plan.checkpoint_bytes == {"before": sum(old.values()), "after": sum(new.values())}
    assert plan.tensors is not None
    for name, sizes in plan.tensors.items():
        assert sizes == {"before": old.get(name, 0), "after": new.get(name, 0)}
    unchanged = {name: size for name, size in old.items() if name not in plan.tensors}
    assert unchanged == {name: size for name, size in new.items() if name not in plan.tensors}
    assert plan_export(ExportSettings(run.folder, tmp_path / "out-2", Goal(compression=0.4))).points == 0


def test_an_accuracy_needs_measuring_until_the_table_is_complete(tmp_path: Path, capsys) -> None:
    run = calibrated(DEMO_MODEL, tmp_path / "run", "post", 1).folder
    command = ["export", run, "-o", tmp_path / "out", "--accuracy", "0.5"]
    before = state(tmp_path)
    code, said, error = rotor(capsys, *command, "--dry-run", "--json")
    assert (code, error) == (0, "")
    plan = json.loads(said)
    assert (plan["ranks"], plan["tensors"], plan["kv_bytes_per_token"]["after"]) == (None, None, None)
    assert plan["points"] > 1
    code, said, _ = rotor(capsys, *command, "--dry-run")
    assert code == 0
    assert "depend on what is measured" in said
    assert state(tmp_path) == before
    assert rotor(capsys, *command, "-q")[0] == 0
    before = state(tmp_path)
    code, said, _ = rotor(capsys, *command, "--overwrite", "--dry-run")
    assert code == 0
    assert "nothing; the table has the point" in said
    assert "model.layers.0.self_attn.key_basis" in said
    assert state(tmp_path) == before


def test_probes_come_first_where_ranks_need_them(tiny, tmp_path: Path) -> None:
    run = calibrated(tiny("llama"), tmp_path / "run", "post", 1).folder
    settings = ExportSettings(run, tmp_path / "out", Goal(compression=0.4), overrides=("ranks.method=global",))
    plan = plan_export(settings)
    assert (plan.ranks, plan.probed_layers, plan.points) == (None, 2, 1)


def test_calibrate(tiny, tmp_path: Path, capsys) -> None:
    model = shutil.copytree(tiny("llama"), tmp_path / "model")
    before = state(tmp_path)
    command = ["calibrate", model, "-o", tmp_path / "run", *SETTINGS]
    code, said, error = rotor(capsys, *command, "--dry-run", "--json")
    assert (code, error) == (0, "")
    assert state(tmp_path) == before
    plan = json.loads(said)
    assert plan["tokens"] == {"source": "random", "count": 1024, "seq_len": 64}
    code, said, _ = rotor(capsys, *command, "--dry-run")
    assert code == 0
    assert "nothing is written in a dry run" in said
    assert state(tmp_path) == before
    assert rotor(capsys, *command, "-q")[0] == 0
    run = Run.open(tmp_path / "run")
    assert run.form.in_words(run.shape) == plan["form"]
    kept = sum(path.stat().st_size for path in run.folder.rglob("*.safetensors"))
    assert kept == pytest.approx(plan["needs"]["kept_disk_bytes"], rel=0.1)
    code, said, error = rotor(capsys, *command, "--dry-run")
    assert (code, said) == (2, "")
    assert "exists and is not empty" in error


def test_a_wrong_request_is_refused_as_it_would_be(tiny, tmp_path: Path) -> None:
    run = calibrated(tiny("llama"), tmp_path / "run", "post", 1).folder
    with pytest.raises(UsageError, match="the most that can be removed"):
        plan_export(ExportSettings(run, tmp_path / "out", Goal(compression=0.999)))
    with pytest.raises(UsageError, match="which rotor reads from"):
        plan_export(ExportSettings(run, run / "out", Goal(compression=0.5)))
