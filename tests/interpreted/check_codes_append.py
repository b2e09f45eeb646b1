"""The kernel that packs new rows of codes, in Triton's interpreter: bit by bit what PyTorch packs."""

from __future__ import annotations

import pytest
import torch
from coded import MIXTURES, steps_of

from rotor.format.columns import Columns
from rotor.kernels.projection.append import pack_rows
from rotor.kernels.rows import pack_layer

LAYERS = [*((columns,) for columns in MIXTURES), (MIXTURES[0], MIXTURES[0], MIXTURES[3]), (Columns(n2=512, n4=136),)]


def latents_of(columns: tuple[Columns, ...], tokens: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    steps = steps_of(list(columns))
    return (1.5 * torch.randn(tokens, len(steps), generator=generator) * steps).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", LAYERS, ids=str)
def test_rows_are_those_that_pytorch_packs(columns, dtype) -> None:
    latents = latents_of(columns, 19, dtype)
    assert torch.equal(pack_rows(latents, columns), pack_layer(latents, list(columns)))
    batch = latents[:18].view(2, 9, -1)
    assert torch.equal(pack_rows(batch, columns), pack_layer(batch, list(columns)))


def test_rows_go_to_their_slots_and_nowhere_else() -> None:
    columns = (MIXTURES[0], MIXTURES[4])
    latents = latents_of(columns, 5, torch.float32)
    cache = torch.full((12, sum(c.row_bytes(4) for c in columns)), 7, dtype=torch.uint8)
    slots = torch.tensor([3, -1, 0, 11, 4])
    pack_rows(latents, columns, cache, slots)
    packed = pack_layer(latents, list(columns))
    written = [3, 0, 11, 4]
    assert torch.equal(cache[written], packed[[0, 2, 3, 4]])
    untouched = [row for row in range(12) if row not in written]
    assert (cache[untouched] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_go_to_the_slots_of_pages_that_hold_more_than_them(dtype) -> None:
    """Pages of a layer between those of other layers; keys and values side by side; numbers are columns of 16 bits."""
    for columns in ((MIXTURES[0], MIXTURES[4]), (Columns(n16=6),)):
        latents = latents_of(columns, 5, dtype)
        size = sum(c.row_bytes(dtype.itemsize) for c in columns)
        cache = torch.full((6, 3, 4, size + 12), 7, dtype=torch.uint8)
        pages = cache[:, 1, :, 8 : 8 + size]
        slots = torch.tensor([3, -1, 0, 23, 14])
        pack_rows(latents, columns, pages, slots)
        packed = pack_layer(latents, list(columns))
        expected = torch.full_like(cache, 7)
        for slot, row in zip(slots.tolist(), packed, strict=True):
            if slot >= 0:
                expected[slot // 4, 1, slot % 4, 8 : 8 + size] = row
        assert torch.equal(cache, expected)
