"""Importing rotor, layouts, the kernel configuration, and the schedule's arithmetic."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.paths import ROOT

import rotor
from rotor.checkpoint.kernel_config import KernelConfig
from rotor.checkpoint.layout import POST_ROPE, GroupLayout, KeyForm, LayerLayout, ordered_by_class
from rotor.checkpoint.rows import CodedRow, NumberRow
from rotor.errors import CheckpointError
from rotor.kernels.dispatch import default_config


def test_groups_are_ordered_by_class_widest_first() -> None:
    groups = [
        GroupLayout((h,), NumberRow(k), NumberRow(v))
        for h, (k, v) in enumerate([(16, 32), (48, 16), (16, 32), (48, 32)])
    ]
    layout = ordered_by_class(groups, POST_ROPE)
    assert layout.kv_head_order == (3, 1, 0, 2)
    assert [(c.start, c.count, c.key.rank, c.value.rank, c.key_rank, c.value_rank) for c in layout.classes()] == [
        (0, 1, 48, 32, 0, 0),
        (1, 1, 48, 16, 48, 32),
        (2, 2, 16, 32, 96, 48),
    ]
    assert layout.byte_offsets(2) == [(0, 0), (96, 64), (192, 96), (224, 160)]
    assert (layout.key_width, layout.value_width) == (128, 112)
    assert LayerLayout.from_dict(json.loads(json.dumps(layout.to_dict())), "here") == layout


@pytest.mark.parametrize(
    "change",
    [
        {"rope_block": 48},
        {"groups": []},
        {"groups": [{"kv_heads": [0], "key": 0, "value": 16}]},
        {"groups": [{"kv_heads": [0], "key": "x", "value": 16}]},
        {"groups": [{"kv_heads": [0], "key": {"6": 8}, "value": 16}]},
        {"groups": [{"kv_heads": [0], "key": {"8": 8}, "value": 16}]},
        {"groups": [{"kv_heads": [0], "value": 16}]},
        {"groups": [{"kv_heads": [0], "key": 8, "value": 8}, {"kv_heads": [1, 2], "key": 8, "value": 8}]},
        {"groups": [{"kv_heads": [0], "key": 8, "value": 8}, {"kv_heads": [1], "key": 8}]},
    ],
)
def test_an_edited_layout_is_refused(change: dict) -> None:
    good = {"groups": [{"kv_heads": [0], "key": 8, "value": 8}]}
    LayerLayout.from_dict(good, "x")
    with pytest.raises(CheckpointError, match="layer 3"):
        LayerLayout.from_dict({**good, **change}, "config.json, layer 3")


def test_a_default_kernel_config_lists_the_layers_launches() -> None:
    rows = (CodedRow(n4=width, scaled=True) for width in (16, 48))
    groups = [GroupLayout((2 * g, 2 * g + 1), row, None) for g, row in enumerate(rows)]
    layout = ordered_by_class(groups, KeyForm(64))
    config = default_config([layout])
    (layer,) = config.to_dict()["layers"]
    assert set(layer) == {"layout", "sm_80", "sm_90", "slices_per_sm", "materialise"}
    assert KernelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    config.check([layout])
    with pytest.raises(CheckpointError):
        config.check([replace(layout, rope_block=32)])


def test_the_package_offers_what_the_commands_do() -> None:
    assert all(callable(getattr(rotor, name)) for name in rotor.__all__ if name != "__version__")
    assert set(rotor.__all__) <= set(dir(rotor))
    assert (Path(rotor.__file__).parent / "py.typed").is_file()
    with pytest.raises(AttributeError, match="no attribute 'calibrat'"):
        rotor.calibrat  # noqa: B018


@pytest.mark.nightly
def test_importing_the_package_is_quick_and_registers_it() -> None:
    """It imports neither torch nor transformers, and lets transformers load checkpoints once that can load models, with
    nothing else and no GPU touched."""
    program = """
import sys, rotor
print("torch" in sys.modules, "transformers" in sys.modules)
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
import torch
print({"sklearn", "typer", "rich", "matplotlib"} & set(sys.modules), torch.cuda.is_initialized())
print("rotor" in AUTO_QUANTIZER_MAPPING, any("rotor" in type(finder).__module__ for finder in sys.meta_path))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False False", "set() False", "True False"]


def test_every_dependency_is_imported() -> None:
    """The package imports somewhere whatever it declares to need."""
    declared = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    names = re.findall(r'"([a-z0-9-]+)', declared[1])
    modules = {"pyyaml": "yaml", "scikit-learn": "sklearn"}
    source = "".join(path.read_text("utf-8") for part in ("rotor", "kernels") for path in (ROOT / part).rglob("*.py"))
    wanted = {name: modules.get(name, name.replace("-", "_")) for name in names}
    found = set(re.findall(r"^\s*(?:from|import) (\w+)", source, re.MULTILINE))
    assert len(names) > 8
    assert [name for name, module in wanted.items() if module not in found] == []


def test_every_package_is_installed() -> None:
    listed = re.search(r"^packages = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert listed is not None
    folders = {path.parent.relative_to(ROOT) for top in ("rotor", "kernels") for path in (ROOT / top).rglob("*.py")}
    there = {".".join(("rotor", *folder.parts[folder.parts[0] == "rotor" :])) for folder in folders}
    assert set(re.findall(r'"([\w.]+)"', listed[1])) == there | {"rotor.recipes"}
