"""The kernel that packs new rows of codes, in Triton's interpreter: bit by bit what PyTorch packs."""

from __future__ import annotations

import pytest
import torch
from coded import MIXTURES, steps_of

from rotor.format.columns import Columns
from rotor.kernels.projection.append import pack_rows
from rotor.kernels.rows import LayerColumns, pack_layer

SIDES = [
    *((columns,) for columns in MIXTURES),
    (MIXTURES[0], MIXTURES[0], MIXTURES[3]),
    (Columns(n2=512, n4=136),),
]
LAYERS = [LayerColumns(key, value) for key, value in zip(SIDES, [*SIDES[1:], SIDES[0]], strict=True)]
JOINT = LayerColumns((MIXTURES[0], MIXTURES[4]), ())
"""Values are read from the key rows."""


def latents_of(columns: tuple[Columns, ...], tokens: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    steps = steps_of(list(columns))
    return (1.5 * torch.randn(tokens, len(steps), generator=generator) * steps).to(dtype)


def of_layer(columns: LayerColumns, tokens: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Latents of keys and of values, and what PyTorch packs of them."""
    sides = columns.key, columns.value
    latents = [latents_of(side, tokens, dtype) for side in sides]
    return latents, [pack_layer(side, of_side) for side, of_side in zip(latents, sides, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [*LAYERS, JOINT], ids=str)
def test_rows_are_those_that_pytorch_packs(columns, dtype) -> None:
    latents, expected = of_layer(columns, 19, dtype)
    assert all(map(torch.equal, pack_rows(*latents, columns), expected))
    batch = [side[:18].view(2, 9, -1) for side in latents]
    assert all(map(torch.equal, pack_rows(*batch, columns), (side[:18].view(2, 9, -1) for side in expected)))


def test_rows_go_to_their_slots_and_nowhere_else() -> None:
    columns = LayerColumns((MIXTURES[0], MIXTURES[4]), (MIXTURES[7], MIXTURES[2]))
    latents, packed = of_layer(columns, 5, torch.float32)
    caches = tuple(torch.full((12, side.shape[-1]), 7, dtype=torch.uint8) for side in packed)
    assert pack_rows(*latents, columns, caches, torch.tensor([3, -1, 0, 11, 4])) is caches
    written = [3, 0, 11, 4]
    untouched = [row for row in range(12) if row not in written]
    for cache, side in zip(caches, packed, strict=True):
        assert torch.equal(cache[written], side[[0, 2, 3, 4]])
        assert (cache[untouched] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_go_to_the_slots_of_pages_that_hold_more_than_them(dtype) -> None:
    """Pages of a layer between those of other layers; keys and values side by side; numbers are columns of 16 bits."""
    mixed = LayerColumns((MIXTURES[0], MIXTURES[4]), (MIXTURES[3], MIXTURES[1]))
    for columns in (mixed, LayerColumns((Columns(n16=6),), (Columns(n16=10),))):
        latents, packed = of_layer(columns, 5, dtype)
        sizes = [side.shape[-1] for side in packed]
        cache = torch.full((6, 3, 4, sum(sizes) + 12), 7, dtype=torch.uint8)
        pages = cache[:, 1, :, 8 : 8 + sizes[0]], cache[:, 1, :, 8 + sizes[0] : 8 + sum(sizes)]
        slots = torch.tensor([3, -1, 0, 23, 14])
        pack_rows(*latents, columns, pages, slots)
        expected = torch.full_like(cache, 7)
        for slot, row in zip(slots.tolist(), torch.cat(packed, -1), strict=True):
            if slot >= 0:
                expected[slot // 4, 1, slot % 4, 8 : 8 + sum(sizes)] = row
        assert torch.equal(cache, expected)
