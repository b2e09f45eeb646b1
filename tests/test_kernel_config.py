"""kernel_config.json at load: what is read, from where, what is refused by name, and what runs without it."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tiny, calibrated
from ragged import layer
from transformers import AutoModelForCausalLM

from rotor.errors import CheckpointError
from rotor.export.export import export
from rotor.format.kernel_config import KERNEL_CONFIG, KernelConfig
from rotor.format.layout import AttentionShape
from rotor.format.truncation import truncate_layer
from rotor.kernels.decode.variants import decode_variants
from rotor.kernels.defaults import default_config, default_layer
from rotor.kernels.layer_table import layer_parts
from rotor.kernels.prefill.tile_sizes import prefill_constants
from rotor.progress import Progress
from rotor.runtime import integration
from rotor.runtime.attention import RotorAttention
from rotor.runtime.integration import RotorConfig, find_kernel_config
from rotor.runtime.kernel_choice import kernels_of
from rotor.validation.integrity import Validation, check_integrity

SHAPE = AttentionShape(num_layers=2, num_heads=8, num_kv_heads=4, head_dim=32, hidden_size=48)
LAYOUTS = [layer("pre", 2, (48, 24), (16, 16)), layer("pre", 2, (32, 32), (32, 32))]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernel-config")
    run = calibrated(build_tiny("mistral", folder / "m"), folder / "run", "pre", 2)
    return export(run.folder, folder / "out", compression=0.45).folder


@pytest.fixture
def folder(out: Path, tmp_path: Path) -> Path:
    return shutil.copytree(out, tmp_path / "out")


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def attention(model: Any) -> list[RotorAttention]:
    return [module for module in model.modules() if isinstance(module, RotorAttention)]


def edit(folder: Path, **changes: Any) -> dict[str, Any]:
    path = folder / KERNEL_CONFIG
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(data))
    return data


@pytest.mark.parametrize("schedule", ["lpt", "none", "stream"])
def test_a_loaded_checkpoint_has_what_the_file_says(schedule: str, folder: Path) -> None:
    data = edit(folder, schedule=schedule)
    data["layers"][0] |= {"tile": 16}
    data["layers"][1]["classes"][0] |= {"blocks": {"rows": 32, "columns": 16}, "rebuilt": {"rows": 16, "columns": 32}}
    edit(folder, layers=data["layers"])
    modules = attention(load(folder))
    assert [module.schedule for module in modules] == [schedule] * 2
    assert KernelConfig(schedule, tuple(module.kernels for module in modules)).to_dict() == data  # type: ignore[arg-type]
    assert modules[0].kernels != default_layer(modules[0].layout, 16)


def test_without_the_file_and_in_memory_the_rule_holds(folder: Path) -> None:
    written = KernelConfig.read(folder / KERNEL_CONFIG)
    (folder / KERNEL_CONFIG).unlink()
    modules = attention(load(folder))
    assert tuple(module.kernels for module in modules) == written.layers
    assert {module.schedule for module in modules} == {written.schedule}
    source = folder.parent / "again"
    load(folder).save_pretrained(source)
    assert tuple(module.kernels for module in attention(load(source))) == written.layers


def test_validate_names_an_edit(folder: Path) -> None:
    edit(folder, schedule="lpt")
    result = Validation(folder)
    check_integrity(result, Progress())
    found = {check.name: check.detail for check in result.checks if check.status == "fail"}
    assert found["files"].startswith("kernel_config.json differs from its SHA-256")
    assert found["layouts agree"] == "kernel_config.json.schedule: 'lpt', config.json implies 'stream'"


CHANGES = [
    ("schedule", "fastest", r"schedule: got 'fastest', expected one of stream, lpt, none"),
    ("tile", "48", r"layers\[0\].tile: got '48', expected int"),
    ("layers.0.tile", 48, r"layers\[0\].tile: got 48, expected one of 16, 32, 64, 128"),
    ("layers.0.slices_per_sm", 17, r"layers\[0\].slices_per_sm: got 17, expected a number from 0 to 16"),
    ("layers.0.tiles", 64, r"unknown key 'layers\[0\].tiles'; did you mean 'tile'"),
    ("layers", [], r"layers: got '0 layers', expected 2, as in config.json"),
    ("layers.0.classes.0.qk_rank", 32, r"layers\[0\].classes: got .*, expected the ranks of the groups in config.json"),
    ("layers.0.classes.0.groups", 2, r"layers\[0\].classes: got .*, expected the ranks of the groups"),
    ("layers.0.classes.0.groups", 0, r"layers\[0\].classes\[0\].groups: got 0, expected a positive number"),
    ("layers.0.classes.0.blocks.rows", 40, r"layers\[0\].classes\[0\].blocks.rows: got 40, expected a multiple of 16"),
    ("layers.1.classes.0.rebuilt.columns", 128, r"layers\[1\].classes\[0\].rebuilt.columns: got 128, expected one of"),
    ("layers.1.classes.0.rebuilt", None, r"layers\[1\].classes\[0\].rebuilt: got None, expected blocks in domain pre"),
    ("layers.0.specialisations", [[32, 32]], r"layers\[0\].specialisations: got .*, expected one that is as wide as"),
    ("layers.0.specialisations.0", [64, 48], r"layers\[0\].specialisations\[0\]: got .*, expected powers of two"),
    ("layers.0.specialisations.0", [128, 64], r"layers\[0\].specialisations\[0\]: got .*, expected powers of two"),
    ("layers.1.specialisations", [[32, 32], [16, 16]], r"layers\[1\].specialisations\[1\]: got .*this serves none"),
    ("layers.1.slow_planes", {"rebuilt": 24, "block": 128, "nodes": 3}, r"layers\[1\].slow_planes.rebuilt: got 24"),
    ("layers.1.slow_planes", {"rebuilt": 16, "block": 100, "nodes": 3}, r"layers\[1\].slow_planes.block: got 100"),
    ("layers.1.slow_planes", {"rebuilt": 16, "block": 128, "nodes": 9}, r"layers\[1\].slow_planes.nodes: got 9"),
    ("layers.1.slow_planes", {"rebuilt": 16, "block": 128}, r"missing key 'layers\[1\].slow_planes.nodes'"),
    ("version", 1, r"version 1, this rotor reads 2"),
]


@pytest.mark.parametrize(("place", "value", "words"), CHANGES, ids=[f"{p}={v}"[:40] for p, v, _ in CHANGES])
def test_nonsense_is_refused_by_name(place: str, value: Any, words: str) -> None:
    data: Any = copy.deepcopy(default_config(LAYOUTS, SHAPE).to_dict())
    *path, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    if place == "tile":
        path, last = ["layers", 0], "tile"
    node = data
    for key in path:
        node = node[key]
    node[last] = value
    with pytest.raises(CheckpointError, match=r"^here\.json: " + words) as caught:
        KernelConfig.from_dict(data, "here.json").check(LAYOUTS, "here.json")
    assert "remove the file" in caught.value.hint or "Known keys" in caught.value.hint


def test_slow_planes_are_of_keys_before_rope() -> None:
    layouts = [layer("post", 2, (32, 32))]
    data = default_config(layouts, SHAPE).to_dict()
    data["layers"][0]["slow_planes"] = {"rebuilt": 16, "block": 128, "nodes": 3}
    with pytest.raises(
        CheckpointError, match=r"layers\[0\].slow_planes: got .*, expected none in other domains than pre"
    ):
        KernelConfig.from_dict(data).check(layouts)


def test_slow_planes_are_not_of_keys_turned_within_blocks() -> None:
    layouts = [layer("pre", 2, (32, 32), rope_block=16)]
    data = default_config(layouts, SHAPE).to_dict()
    KernelConfig.from_dict(data).check(layouts)
    data["layers"][0]["slow_planes"] = {"rebuilt": 16, "block": 128, "nodes": 3}
    expected = r"layers\[0\].slow_planes: got .*, expected none, as keys are turned within blocks of 16 and no plane"
    with pytest.raises(CheckpointError, match=expected):
        KernelConfig.from_dict(data).check(layouts)


def test_a_damaged_file_keeps_the_checkpoint_from_loading(folder: Path) -> None:
    edit(folder, schedule="fastest")
    with pytest.raises(CheckpointError, match=r"kernel_config\.json: schedule: got 'fastest'"):
        load(folder)
    (folder / KERNEL_CONFIG).write_text("[")
    with pytest.raises(CheckpointError, match=r"kernel_config\.json: not readable as JSON"):
        load(folder)


def test_a_profile_of_other_ranks_goes_by_the_rule(tmp_path: Path) -> None:
    """The file of an elastic checkpoint is of one profile; that of another model is refused."""
    profiles = {"0.9": [[(32, 24), (16, 16)], [(32, 32), (16, 16)]], "0.8": [[(16, 16), (16, 16)], [(16, 8), (8, 8)]]}
    stored = {str(i): layout.to_dict() for i, layout in enumerate(LAYOUTS)}
    config = RotorConfig(layers=stored, profiles=json.loads(json.dumps(profiles)))
    path = tmp_path / KERNEL_CONFIG

    def written(name: str) -> KernelConfig:
        layouts = [truncate_layer({}, a, b, SHAPE)[0] for a, b in zip(LAYOUTS, profiles[name], strict=True)]
        return default_config(layouts, SHAPE)

    path.write_text(json.dumps(written("0.9").to_dict() | {"schedule": "lpt"}))
    assert kernels_of(config, path, SHAPE, "0.9") == KernelConfig("lpt", written("0.9").layers)
    assert kernels_of(config, path, SHAPE, "0.8") == written("0.8")
    assert kernels_of(config, None, SHAPE, "0.9") == written("0.9")
    path.write_text(json.dumps(default_config([LAYOUTS[1], LAYOUTS[0]], SHAPE).to_dict()))
    with pytest.raises(CheckpointError, match=r"layers\[0\].classes: got"):
        kernels_of(config, path, SHAPE, "0.8")


def test_the_file_is_looked_for_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--team--demo" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    weights = [str(snapshot / "model.safetensors")]
    asked: list[Any] = []
    answers = [str(snapshot / "fetched"), None]

    def cached_file(name: str, file: str, **options: Any) -> str | None:
        asked.append((name, file, options["cache_dir"], options["revision"]))
        return answers.pop(0)

    monkeypatch.setattr(integration, "cached_file", cached_file)
    config = type("Config", (), {"name_or_path": "team/demo"})()
    assert find_kernel_config(config, weights) == snapshot / "fetched"
    assert find_kernel_config(config, weights) is None  # the repository has none
    assert asked == [("team/demo", KERNEL_CONFIG, tmp_path / "hub", "0123")] * 2
    (snapshot / KERNEL_CONFIG).write_text("{}")
    assert find_kernel_config(config, weights) == snapshot / KERNEL_CONFIG
    assert find_kernel_config(config, None) is None
    assert find_kernel_config(config, [str(tmp_path / "model.safetensors")]) is None  # a local folder without one
    assert len(asked) == 2


def test_classes_and_specialisations_decide_what_is_compiled() -> None:
    """A class in two is two launches; one body for all groups is one specialisation."""
    default = default_layer(LAYOUTS[1], SHAPE.head_dim)
    (cls,) = default.classes
    halves = (type(cls)(1, 32, 32, cls.blocks, cls.rebuilt),) * 2
    split = prefill_constants(LAYOUTS[1], 2, 2, 32, False, kernels=type(default)(halves, ((32, 32),), 64))
    assert [(c.start, c.count, c.qk_offset, c.v_offset) for c, _ in split] == [(0, 1, 0, 0), (1, 1, 32, 32)]
    data = default_config(LAYOUTS, SHAPE).to_dict()
    assert data["layers"][0]["specialisations"] == [[64, 32], [16, 16]]
    data["layers"][0]["specialisations"] = [[64, 32]]
    config = KernelConfig.from_dict(data)
    config.check(LAYOUTS)
    parts = layer_parts(LAYOUTS[0], 2, 32, config.layers[0])
    attention, *_ = decode_variants(parts, 2, 32, torch.bfloat16)
    assert attention.constants["BODIES"] == ((((0, 0, 64),), ((0, 0, 32),)),)
