"""Decoding in Triton's interpreter against float64; layers of every form."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import kernel_truth as truth
from support.kernel_cases import Case, CodedRow, NumberRow, causal, in_pages, layer, random_case, shape_of
from support.quick import mostly_nightly
from torch import Tensor

from rotor.checkpoint.kernel_config import Tile
from rotor.checkpoint.layout import KeyForm, LayerLayout
from rotor.kernels.absorb_launch import block_starts
from rotor.kernels.decode_launch import DecodeLayer, decode_attention
from rotor.kernels.launch import kept_memory
from rotor.kernels.ranges import KeyRanges

HALF, SINGLE = torch.float16, torch.float32
HEADS = [(64, 1), (80, 3), (96, 7), (128, 4), (256, 1)]
"""Dimensions of a head, and query heads of a KV head."""


def layer_of(
    widths: list[int], size: int, values: list[int] | None = None, coded: bool = True, block: int | None = None,
) -> LayerLayout:  # fmt: skip
    """Groups of `size` KV heads with latents of these widths, joint where no `values` are given."""

    def of_width(width: int) -> CodedRow | NumberRow:
        return CodedRow(n8=width // 4, n4=width // 2) if coded else NumberRow(width)

    keys = [of_width(width) for width in widths]
    pairs = keys if values is None else list(zip(keys, map(of_width, values), strict=True))
    return layer(KeyForm(block), size, *pairs)


def allowed_of(lengths: list[int], counts: list[int], window: int | None, starts: list[int] | None) -> list[Tensor]:
    """Keys that the new tokens of each sequence see, [1, tokens, longest]: they are its last keys."""
    found = []
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        found.append(torch.zeros(1, count, max(*lengths, 1) + 3, dtype=torch.bool))
        found[s][..., :length] = causal(1, count, length, window)
        found[s][..., : 0 if starts is None else starts[s]] = False
    return found


def check(
    layout: LayerLayout, lengths: list[int], tokens: list[int] | None = None, *, page: int = 0,
    tiles: Tile | None = None, programs: int = 5, dtype: torch.dtype = HALF, per_head: int = 2, head_dim: int = 32,
    rotary: int | None = None, window: int | None = None, starts: list[int] | None = None, holes: bool = False,
    hidden: tuple[int, int] | None = None, before: int = 0, change: Callable[[Case], None] | None = None, **rest: float,
) -> None:  # fmt: skip
    """By the worst number, the error against float64 is at most twice that of plain PyTorch in the same dtype.

    lengths: keys of each sequence. tokens: its new ones, else one. page: keys of a page; pages lie anywhere, what no
    key is in is poisoned, and the block table ends where the longest sequence does. hidden: keys that no query sees,
    from the first to before the second. before: rows in memory before the first of a sequence. change: of what the
    kernel and PyTorch are given.
    """
    counts = tokens or [1] * len(lengths)
    shape = shape_of(len(layout.groups) * layout.group_size, per_head, head_dim, head_dim if rotary is None else rotary)
    case = random_case(layout, shape, len(lengths), max(counts), max(*lengths, 1) + 3, **rest).to("cpu", dtype)
    if change is not None:
        change(case)
    allowed = allowed_of(lengths, counts, window, starts)
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    if holes:
        generator = torch.Generator().manual_seed(3)
        allowed = [own & (torch.rand(own.shape, generator=generator) > 0.3) for own in allowed]
    if hidden is not None:
        for own in allowed:
            own[..., slice(*hidden)] = False
    if holes or starts is not None or hidden is not None:
        ranges = KeyRanges.of_mask(torch.cat(allowed))
    elif tokens is None:
        ranges = KeyRanges.of_lengths(kv_lens, window)
    else:
        query_start = torch.tensor([0, *counts]).cumsum(0).int()
        ranges = KeyRanges.packed(query_start, kv_lens, sum(counts), max(counts), window)
    packed, exact, plain = [], [], []
    for s, count in enumerate(counts):
        own = case.query[s : s + 1, :count] if case.query.dim() == 3 else case.query[s : s + 1, :, :count]
        packed.append(own[0] if own.dim() == 3 else own[0].transpose(0, 1))
        args = own, case.key[s : s + 1], case.value[s : s + 1], case.parameters, allowed[s], case.rotation
        exact.append(truth.attention(*args)[0][0])
        plain.append(truth.attention(*args, dtype=dtype)[0][0])
    layer, rotations = DecodeLayer(case.parameters, dtype, torch.device("cpu")), None
    if case.rotation is not None:
        rotations = block_starts(case.rotation, layout)
    behind = (torch.cat([torch.full_like(side[:, :before], 77), side], 1) for side in (case.key, case.value))
    rows, table = tuple(side[:, before:] for side in behind), None
    if page:
        pages = in_pages(case, lengths, page)
        rows, table = (pages.key, pages.value), pages.block_table
    got = decode_attention(
        torch.cat(packed), *rows, layer, ranges, rotations, block_table=table, tiles=tiles, programs=programs
    )
    expected = torch.cat(exact)
    error, of_plain = (float((x.double() - expected).abs().max()) for x in (got, torch.cat(plain)))
    assert error <= 2 * of_plain + 3e-6 * float(expected.abs().max() + 1), (error, of_plain)
    assert bool((got[~torch.cat(allowed, 1)[0].any(1)] == 0).all())


@pytest.mark.parametrize("dtype", mostly_nightly([SINGLE, HALF], lambda dtype: dtype == HALF))
def test_joint_in_blocks(dtype: torch.dtype) -> None:
    check(layer_of([64, 64], 1, block=64), [150, 64, 1], dtype=dtype, page=64)


@pytest.mark.parametrize(("page", "keys"), mostly_nightly([(0, 16), (16, 64), (48, 32)], lambda case: case[0] == 48))
def test_pages(page: int, keys: int) -> None:
    """Of any multiple of 16."""
    check(layer_of([48], 2, block=64), [97, 0, 64, 1], per_head=1, tiles=Tile(keys), page=page)


def test_views_that_begin_at_no_multiple_of_16_bytes() -> None:
    assert layer_of([44], 2, block=64).row_bytes(2)[0] == 24
    check(layer_of([44], 2, block=64), [97, 3], per_head=1, before=1)
    check(layer_of([20], 1, [28], coded=False), [70, 20], before=1)


@pytest.mark.parametrize("page", mostly_nightly([0, 48, 64], lambda page: page == 64))
def test_tiles_and_pages(page: int) -> None:
    check(layer_of([48], 1, block=64), [97, 3], per_head=1, page=page, tiles=Tile(64))
    check(layer_of([32, 48], 1, [48, 16]), [70, 20], [2, 1], page=page, tiles=Tile(32))
    check(layer_of([40], 1, [16], coded=False), [70, 20], page=page, tiles=Tile(32, 2))


@pytest.mark.parametrize("block", mostly_nightly([4, 16, None], lambda block: block == 4))
def test_blocks(block: int | None) -> None:
    check(layer_of([32, 32], 1, block=block), [75, 33], per_head=3, factor=1.2)


@pytest.mark.parametrize(
    ("block", "coded"),
    mostly_nightly([(16, True), (None, True), (16, False), (None, False)], lambda case: case[1] == (case[0] is None)),
)
def test_apart(block: int | None, coded: bool) -> None:
    check(layer_of([64, 32], 2, [32, 48], coded, block), [70, 20], per_head=3, page=16)


@pytest.mark.parametrize(
    ("coded", "values"),
    mostly_nightly([(True, None), (True, [48, 16]), (False, [48, 16])], lambda case: case == (True, None)),
)
def test_without_rope(coded: bool, values: list[int] | None) -> None:
    check(layer_of([64, 32], 1, values, coded), [70, 20], rotary=0, dtype=SINGLE)
    check(layer_of([64, 32], 1, values, coded), [70, 20], [3, 5], rotary=0)


@pytest.mark.parametrize(("head_dim", "per_head"), mostly_nightly(HEADS, lambda case: case[0] == 128))
def test_heads(head_dim: int, per_head: int) -> None:
    check(layer_of([64], 1, block=64), [130], head_dim=head_dim, per_head=per_head)


def test_partial_rotary() -> None:
    check(layer_of([64], 2, block=64), [130, 66], head_dim=64, rotary=24)


@pytest.mark.nightly
def test_eight_heads_in_a_group() -> None:
    check(layer_of([48], 8, block=64), [100, 40], per_head=1, page=64)


def test_four_heads() -> None:
    check(layer_of([256, 96], 4, block=64), [100, 40], tiles=Tile(64, 4, 1), page=64)


@pytest.mark.parametrize(
    ("tokens", "block"), mostly_nightly([([2, 1, 3], 64), ([16, 0, 5], None)], lambda case: case[1] == 64)
)
def test_several_tokens(tokens: list[int], block: int | None) -> None:
    check(layer_of([32], 2, block=block), [70, 33, 90], tokens, page=64)


@pytest.mark.parametrize(
    ("block", "window"), mostly_nightly([(64, None), (64, 40), (None, 40)], lambda case: case == (64, 40))
)
def test_windows_padding_holes(window: int | None, block: int | None) -> None:
    layout = layer_of([64], 1, block=block)
    check(layout, [150, 90], window=window, starts=[7, 70])
    check(layout, [150, 90], window=window, starts=[7, 70], holes=True)
    check(layout, [100, 90], [2, 2], window=window, holes=True)


def test_softcap() -> None:
    check(layer_of([64], 1, block=64), [100, 90], [2, 2], softcap=3.0)
    check(layer_of([64], 1), [100, 90], softcap=3.0)


PEAK = 170
"""A key that takes nearly all of the weight."""


def drifting(case: Case) -> None:
    """Make logits of numbers grow along the keys, by more than float16 reaches; one key is a peak."""
    growth = torch.linspace(0.05, 6.0, case.key.shape[1])
    growth[PEAK] = 12.0
    case.key *= growth[None, :, None].to(case.key.dtype)


def growing_scales(case: Case) -> None:
    """The same by the scales of rows of codes: the least ones, then the largest."""
    case.query *= 6.0
    nibble = torch.arange(case.key.shape[1]).div(20, rounding_mode="floor").clamp(max=15).to(torch.uint8)
    nibble[PEAK] = 15
    case.key[..., 0] = case.key[..., 0] & 0xF0 | nibble


def falling(case: Case) -> None:
    """Logits whose largest lie in the first tile: all later weights are small, or none in float16."""
    case.query *= 4.0
    case.key[:, 32:, 0] &= 0xF0


@pytest.mark.parametrize("programs", mostly_nightly([1, 3], lambda programs: programs == 1))
def test_logits_that_drift_or_peak(programs: int) -> None:
    """The reference of weights moves in the middle of a slice: what was summed before is scaled by it, not lost."""
    numbers, codes = layer_of([20], 1, [28], coded=False), layer_of([64], 1, block=64)
    for dtype in (HALF, SINGLE):
        check(numbers, [300], programs=programs, dtype=dtype, change=drifting)
        check(codes, [300], programs=programs, dtype=dtype, change=growing_scales)
        check(codes, [300], programs=programs, dtype=dtype, change=falling, page=64)
    check(codes, [300, 200], [2, 2], programs=programs, change=growing_scales, holes=True)
    check(codes, [64 * 20], programs=programs, page=64)  # beyond the tiles after which it moves anyway


@pytest.mark.parametrize("programs", mostly_nightly([1, 7, 40], lambda programs: programs == 7))
def test_slices(programs: int) -> None:
    """However the work is cut; a batch of more sequences than are looked at together."""
    check(layer_of([32], 1, block=64), [0, 0], per_head=1, programs=programs)
    lengths = [5, 0, 200, 17, 64] if programs < 40 else [3, 0] * 33 + [90]
    check(layer_of([32, 16], 1, block=16), lengths, per_head=1, programs=programs)


def test_what_launches_leave_to_each_other_is_kept() -> None:
    first, second = kept_memory("a test", (100, 3), torch.device("cpu"))
    assert (len(first), len(second), second.data_ptr() - first.data_ptr()) == (100, 3, 128 * 4)
    assert kept_memory("a test", (7,), torch.device("cpu"))[0].data_ptr() == first.data_ptr()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(kept_memory, "a test", (7,), torch.device("cpu")).result()[0].data_ptr() != first.data_ptr()
