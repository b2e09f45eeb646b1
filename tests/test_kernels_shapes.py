"""Tile sizes by rule: what fits on GPUs of little shared memory, and when keys are rebuilt in memory first."""

from __future__ import annotations

import pytest
import torch
from ragged import layer

from rotor.kernels.decode.tile_sizes import decode_config, decode_shared_bytes
from rotor.kernels.dispatch import fits_shared_memory
from rotor.kernels.gpu import Gpu, gpu_of
from rotor.kernels.layer_table import layer_parts
from rotor.kernels.prefill.tile_sizes import (
    can_be_cut,
    pieces_of,
    prefill_constants,
    prefill_shared_bytes,
    rebuilding_pays,
)

HEADS_PER_KV, HEAD_DIM = 4, 128
LAYOUTS = [
    layer("post", 1, (128, 128), (64, 64), (16, 16)),
    layer("post", 8, (512, 512), (256, 128)),
    layer("pre", 1, (128, 128), (64, 48)),
    layer("pre", 8, (256, 256), (128, 64)),
]


@pytest.mark.parametrize("capability", [75, 80, 86, 90])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.domain}-{x.group_size}")
def test_whether_widths_fit_into_shared_memory(layout, capability: int) -> None:
    fits = fits_shared_memory(layout, HEADS_PER_KV, HEAD_DIM, 2, Gpu.of_capability(capability))
    assert fits == ((layout.group_size, capability) != (8, 75))


@pytest.mark.parametrize("capability", [80, 86, 90])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.domain}-{x.group_size}")
def test_tiles_fit_into_shared_memory(layout, capability: int) -> None:
    gpu, sizes = Gpu.of_capability(capability), (HEADS_PER_KV, 2, HEAD_DIM)
    parts = layer_parts(layout, HEADS_PER_KV, HEAD_DIM)
    config = decode_config(parts, HEADS_PER_KV, 2, HEAD_DIM if layout.domain == "pre" else 0, gpu)
    assert decode_shared_bytes(config, 2) <= gpu.shared_bytes
    for rebuilt in {False, layout.domain == "pre"}:
        for _, constants in prefill_constants(layout, *sizes, rebuilt, gpu):
            for shape in (constants, pieces_of(constants)) if can_be_cut(constants) else (constants,):
                assert prefill_shared_bytes(shape, 2) <= gpu.shared_bytes
                assert min(shape["ROWS"], shape["TILE"]) >= 16


def test_tiles_shrink_only_where_they_must() -> None:
    layout = LAYOUTS[1]
    shapes = [prefill_constants(layout, 4, 2, HEAD_DIM, False, Gpu.of_capability(c))[0][1] for c in (90, 86)]
    assert [(s["ROWS"], s["TILE"], s["num_stages"]) for s in shapes] == [(32, 32, 2), (32, 16, 2)]


def test_gpus() -> None:
    assert Gpu.of_capability(90) == gpu_of(torch.device("cpu")) == Gpu(90, 227 << 10)
    assert [Gpu.of_capability(c).registers_hold_operands for c in (80, 86, 90, 100, 120)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert Gpu.of_capability(130).shared_bytes == 64 << 10  # nothing is known of it


def test_keys_are_rebuilt_in_memory_where_many_row_blocks_need_them() -> None:
    layout = layer("pre", 2, (64, 64))
    assert not rebuilding_pays(layout, 4, 128, 16, 4096, 2)
    assert not rebuilding_pays(layout, 4, 128, 96, 4096, 2)  # 5 row blocks' rebuilding is saved, of 64 columns
    assert rebuilding_pays(layout, 4, 128, 112, 4096, 2)  # 6
    assert rebuilding_pays(layout, 4, 128, 112, 1 << 21, 2)  # 1 GB of keys
    assert not rebuilding_pays(layout, 4, 128, 112, (1 << 21) + 1, 2)
    assert not rebuilding_pays(layer("none", 2, (64, 64)), 4, 128, 4096, 4096, 2)
