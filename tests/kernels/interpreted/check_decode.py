"""Decoding in Triton's interpreter against float64; layers of every form."""

from __future__ import annotations

import pytest
import torch
from decode_cases import check, layer_of, make

from rotor.format.kernel_config import Tile

HALF, SINGLE = torch.float16, torch.float32


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("fast", [0, 13])
def test_joint_in_blocks(fast: int, dtype: torch.dtype) -> None:
    check(make(layer_of([64, 64], 1, block=64, fast=fast), [150, 64, 1], dtype=dtype, per_head=2), page=64)


@pytest.mark.parametrize(("page", "keys"), [(0, 16), (16, 64), (48, 32), (64, 16)])
def test_pages(page: int, keys: int) -> None:
    """Of any multiple of 16; what no key lies in is poisoned, and the block table ends where memory ends."""
    layout = layer_of([48], 2, block=64, fast=4)
    check(make(layout, [97, 0, 64, 1], per_head=1), tiles=Tile(keys), page=page)


@pytest.mark.parametrize("block", [4, 16, 32, None])
def test_blocks(block: int | None) -> None:
    check(make(layer_of([32, 32], 1, block=block, fast=3 if block else 0), [75, 33], per_head=3, factor=1.2))


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("block", [16, None])
def test_apart(block: int | None, coded: bool) -> None:
    layout = layer_of([64, 32], 2, values=[32, 48], coded=coded, block=block)
    check(make(layout, [70, 20], per_head=3), page=16)


@pytest.mark.parametrize("coded", [True, False])
@pytest.mark.parametrize("values", [None, [48, 16]])
def test_without_rope(coded: bool, values: list[int] | None) -> None:
    check(make(layer_of([64, 32], 1, values=values, coded=coded), [70, 20], rotary=0, per_head=2, dtype=SINGLE))
    check(make(layer_of([64, 32], 1, values=values, coded=coded), [70, 20], rotary=0, per_head=2, tokens=[3, 5]))


@pytest.mark.parametrize(("head_dim", "per_head"), [(64, 1), (80, 3), (96, 7), (128, 4), (256, 1)])
def test_heads(head_dim: int, per_head: int) -> None:
    check(make(layer_of([64], 1, block=64, fast=16), [130], head_dim=head_dim, per_head=per_head))


def test_partial_rotary_and_all_planes_fast() -> None:
    check(make(layer_of([64], 2, block=64, fast=3), [130, 66], head_dim=64, rotary=24, per_head=2))
    check(make(layer_of([32, 16], 2, block=64, fast=16), [70, 20], per_head=1))


@pytest.mark.parametrize("size", [2, 8])
def test_groups(size: int) -> None:
    check(make(layer_of([96, 48], size, block=64, fast=5), [100, 40], per_head=2), page=64)


@pytest.mark.parametrize(("together", "fast"), [(2, 5), (4, 16)])
def test_heads_together(together: int, fast: int) -> None:
    tiles = Tile(64, 4, 1, lean=1, together=together, again=together - 1)
    check(make(layer_of([256, 96], 4, block=64, fast=fast), [100, 40], per_head=2), tiles=tiles, page=64)


@pytest.mark.parametrize("block", [64, None])
@pytest.mark.parametrize("tokens", [[2, 1, 3], [16, 0, 5]])
def test_several_tokens(tokens: list[int], block: int | None) -> None:
    layout = layer_of([32], 2, block=block, fast=4 if block else 0)
    check(make(layout, [70, 33, 90], tokens=tokens, per_head=2), page=64)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("block", [64, None])
def test_windows_padding_holes(window: int | None, block: int | None) -> None:
    layout = layer_of([64], 1, block=block, fast=4 if block else 0)
    check(make(layout, [150, 90], window=window, starts=[7, 70]), page=64)
    check(make(layout, [150, 90], window=window, starts=[7, 70], holes=True))
    check(make(layout, [100, 90], window=window, tokens=[2, 2], holes=True, per_head=2))


@pytest.mark.parametrize("tokens", [None, [2, 2]])
def test_softcap(tokens: list[int] | None) -> None:
    check(make(layer_of([64], 1, block=64, fast=4), [100, 90], softcap=3.0, tokens=tokens, per_head=2))
    check(make(layer_of([64], 1), [100, 90], softcap=3.0, tokens=tokens, per_head=2))


@pytest.mark.parametrize("programs", [1, 2, 7, 40])
def test_slices(programs: int) -> None:
    """However the work is cut; a batch of more sequences than are looked at together."""
    check(make(layer_of([32], 1, block=64), [0, 0], per_head=1), programs=programs)
    lengths = [5, 0, 200, 17, 64] if programs < 40 else [3, 0] * 40 + [90]
    check(make(layer_of([32, 16], 1, block=16, fast=2), lengths, per_head=1), programs=programs)
