"""Decoding in Triton's interpreter, which must be switched on before Triton is imported; and compiled without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from decode_cases import layer_of

from rotor.bench.ahead import Variant, compile_variant
from rotor.format.channels import Channels
from rotor.format.layout import AttentionShape, GroupLayout, LayerLayout
from rotor.kernels.decode import decode_kernel
from rotor.kernels.decoding import DecodeLayer
from rotor.kernels.parameters import AttentionParameters

HERE = Path(__file__).parent


def test_in_the_interpreter() -> None:
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-p", "interpreter",
         str(HERE / "interpreted_decode.py")],
        env={**os.environ, **environment}, capture_output=True, text=True, cwd=HERE.parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def joint(width: int, heads: int, block: int | None = 64, fast: int = 0) -> LayerLayout:
    groups = tuple(
        GroupLayout(tuple(range(start, start + heads)), Channels(n4=width), None) for start in range(0, 8, heads)
    )
    return LayerLayout(groups, block, fast)


NAMED = {
    "joint-64-fast": joint(64, 1, fast=16),
    "joint-128-fast": joint(128, 1, fast=16),
    "joint-128x2-fast": joint(128, 2, fast=16),
    "joint-256x4-fast": joint(256, 4, fast=16),
    "joint-64": joint(64, 1),
    "joint-128": joint(128, 1),
    "apart-64": layer_of([64] * 8, 1, values=[64] * 8),
    "numbers-64": layer_of([64] * 8, 1, values=[64] * 8, coded=False),
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", NAMED)
def test_nothing_is_spilled(name: str, capability: int) -> None:
    layout, dtype = NAMED[name], torch.bfloat16
    shape = AttentionShape(1, 32, 8, 128, 4096, 128)
    basis = torch.zeros(layout.group_size * 128, layout.key_width, dtype=dtype)
    constant = torch.zeros(8, 128) if layout.coded else None
    layer = DecodeLayer(AttentionParameters(layout, shape, 1.0, basis, constant), dtype, torch.device("cpu"))
    tiles, single, integer = layer.tiles(capability=capability), torch.float32, torch.int32
    rows = torch.int16 if layout.coded else dtype
    pointers = {
        **dict.fromkeys(("query", "fast_query", "fast_basis", "turns"), dtype),
        **dict.fromkeys(("constant", "fast_constant", "partial", "partial_lse"), single),
        **dict.fromkeys(("table", "begin", "until", "first", "end", "query_start", "block_table", "holes"), integer),
        "key": rows, "value": rows, "mask": torch.uint8,
    }  # fmt: skip
    constants = layer.constants(1, tiles, 64, mask=False, softcap=False) | {"KEY_ALIGN": 16, "VALUE_ALIGN": 16}
    constants["ASM"] = True
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    variant = Variant(name, decode_kernel, pointers, constants, ("scale", "softcap"), options)
    assert compile_variant(variant, capability).spill_bytes == 0
