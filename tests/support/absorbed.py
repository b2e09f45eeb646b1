"""Queries absorbed by the launch that makes a step's rows, beside a launch of their own, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rotor.checkpoint.layout import AttentionShape, LayerLayout
from rotor.kernels.absorb_launch import Absorbing, block_starts
from rotor.kernels.append import append
from rotor.kernels.decode_launch import DecodeLayer, blocks_of
from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.ranges import KeyRanges
from support.kernel_cases import random_scale, rotation_table

UNTOUCHED = 7.0


def check_absorbing(layout: LayerLayout, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> None:
    """Of three sequences, of which one reads no rows; blocks that nobody reads are left as they are."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(size, generator=generator).to(device, kind)

    heads, dims = layout.group_size * shape.head_dim, (3, 1, shape.num_kv_heads, shape.head_dim)
    parameters = AttentionParameters(
        layout, shape, 0.3, query_basis=random(heads, layout.key_width),
        key_constant=random(*dims[2:], kind=torch.float32) if layout.coded else None,
    )  # fmt: skip
    layer, rotation = DecodeLayer(parameters, dtype, device), rotation_table(300, shape.rotary_dim, factor=1.3)
    rotation = rotation[0].to(device), rotation[1].to(device)
    first, end = torch.tensor([[70, 0, 40], [290, 20, 40]], dtype=torch.int32, device=device)
    ranges, starts = KeyRanges(first, end, first, end), block_starts(rotation, layout)
    absorbing = Absorbing.of(layer, ranges, slice(0, 3), blocks_of(layer, 300), starts)
    scale = random_scale(layout, generator)
    options: dict[str, Any] = {
        "query": random(3, 1, shape.num_heads, shape.head_dim),
        "key_basis": random(heads, layout.key_rank),
        "key_shift": torch.zeros(layout.key_rank, device=device) if layout.coded else None,
        "rotation": rotation,
        "index": torch.tensor([[289], [19], [39]], device=device),
        "scale": scale and type(scale)(*(part.to(device) for part in scale)),
    }
    key, value = random(*dims), random(3, 1, layout.value_rank)
    buffers, found = (absorbing.absorbed, absorbing.constant), []
    for alone in (False, True):
        for buffer in buffers:
            buffer.fill_(UNTOUCHED)
        made = append(key, value, layout, shape, **options, absorb=None if alone else absorbing)
        if alone:
            assert made.query is not None
            absorbing.launch(made.query[:, :, 0])
        found.append([made.key.clone(), *(buffer.clone() for buffer in buffers)])
    rows, *absorbed = zip(*found, strict=True)
    assert (rows[0] == rows[1]).float().mean() > 0.99
    assert (absorbed[0][1] != UNTOUCHED).any()
    for got, expected in absorbed:
        assert torch.equal(got == UNTOUCHED, expected == UNTOUCHED)
        error = (got.double() - expected.double()).norm() / expected.double().norm()
        assert error <= (1e-6 if dtype == torch.float32 else 1e-3), error
