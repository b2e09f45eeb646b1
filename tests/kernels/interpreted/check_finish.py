"""Steps of layers with exact tokens in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from check_decode import HALF, HEADS, SINGLE, allowed_of, layer_of
from support import kernel_truth as truth
from support.kernel_cases import exact_keys, in_pages, random_case, shape_of, with_values
from support.quick import mostly_nightly

from rotor.checkpoint.layout import ExactTokens, LayerLayout
from rotor.kernels import absorb_launch, decode_launch
from rotor.kernels.absorb_launch import block_starts
from rotor.kernels.decode_launch import DecodeLayer, decode_attention
from rotor.kernels.exact_slots import ExactSlots
from rotor.kernels.ranges import KeyRanges, ranges_of_codes


def check(
    layout: LayerLayout, lengths: list[int], tokens: list[int] | None = None, *, first: int = 4, newest: int = 20,
    page: int = 0, programs: int | None = 5, dtype: torch.dtype = HALF, per_head: int = 2, head_dim: int = 32,
    rotary: int | None = None, window: int | None = None, starts: list[int] | None = None, holes: bool = False,
    **rest: float,
) -> None:  # fmt: skip
    """By the worst number, the error against float64 is at most twice that of plain PyTorch in the same dtype."""
    counts = tokens or [1] * len(lengths)
    layout = replace(layout, exact=ExactTokens(first, newest))
    shape = shape_of(len(layout.groups) * layout.group_size, per_head, head_dim, head_dim if rotary is None else rotary)
    case = random_case(layout, shape, len(lengths), max(counts), max(*lengths, 1) + 3, **rest)
    case, generator = with_values(case).to("cpu", dtype), torch.Generator().manual_seed(4)
    allowed = allowed_of(lengths, counts, window, starts)
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    if holes:
        allowed = [own & (torch.rand(own.shape, generator=generator) > 0.3) for own in allowed]
    if holes or starts is not None:
        ranges = KeyRanges.of_mask(torch.cat(allowed))
    elif tokens is None:
        ranges = KeyRanges.of_lengths(kv_lens, window)
    else:
        query_start = torch.tensor([0, *counts]).cumsum(0).int()
        ranges = KeyRanges.packed(query_start, kv_lens, sum(counts), max(counts), window)
    exact = exact_keys(case, lengths, counts, starts or [0] * len(lengths), first, newest)
    packed, found, plain = [], [], []
    for s, count in enumerate(counts):
        own, at = case.query[s : s + 1, :, :count], slice(s, s + 1)
        packed.append(own[0].transpose(0, 1))
        of = ExactSlots(exact.key[at], exact.value[at], exact.index[at], exact.first[at], exact.until[at, :count])
        args = own, case.key[at], case.value[at], case.parameters, allowed[s], of, case.rotation
        found.append(truth.with_exact(*args)[0])
        plain.append(truth.with_exact(*args, dtype=dtype)[0])
    layer, rotations = DecodeLayer(case.parameters, dtype, torch.device("cpu")), None
    if case.rotation is not None:
        rotations = block_starts(case.rotation, layout)
    rows, table = (case.key, case.value), None
    if page:
        pages = in_pages(case, lengths, page)
        rows, table = (pages.key, pages.value), pages.block_table
    until = torch.cat([own[:count] for own, count in zip(exact.until, counts, strict=True)])
    exact = replace(exact, until=until)
    got = decode_attention(
        torch.cat(packed), *rows, layer, ranges_of_codes(ranges, exact), rotations, block_table=table,
        programs=programs, exact=exact, attended=ranges,
    )  # fmt: skip
    expected = torch.cat(found)
    error, of_plain = (float((x.double() - expected).abs().max()) for x in (got, torch.cat(plain)))
    assert error <= 2 * of_plain + 3e-6 * float(expected.abs().max() + 1), (error, of_plain)


@pytest.mark.parametrize("dtype", mostly_nightly([SINGLE, HALF], lambda dtype: dtype == HALF))
def test_joint_in_blocks(dtype: torch.dtype) -> None:
    """Among the sequences one within the ring, and one that the first tokens hold."""
    check(layer_of([64, 64], 1, block=64), [150, 64, 20, 3], dtype=dtype)


SIZES = [(size, programs) for size in (1, 2, 4, 8) for programs in (1, 40)]


@pytest.mark.parametrize(("size", "programs"), mostly_nightly(SIZES, lambda case: case == (2, 40)))
def test_groups(size: int, programs: int) -> None:
    check(layer_of([48], size, block=64), [100, 40], per_head=1 if size > 2 else 3, programs=programs)


@pytest.mark.parametrize(("head_dim", "per_head"), mostly_nightly(HEADS, lambda case: case[0] == 80))
def test_heads(head_dim: int, per_head: int) -> None:
    check(layer_of([64], 1, block=64), [130], head_dim=head_dim, per_head=per_head)


@pytest.mark.parametrize("coded", mostly_nightly([True, False], lambda coded: not coded))
def test_latents_of_other_widths_and_values_apart(coded: bool) -> None:
    check(layer_of([64, 32], 2, [32, 48], coded, 16), [70, 20], per_head=3, page=16)
    check(layer_of([20, 40], 1, [28, 12], coded), [70, 20])


def test_without_rope() -> None:
    check(layer_of([64, 32], 1, [48, 16]), [70, 20], rotary=0)
    check(layer_of([40], 2), [70, 20], [3, 2], rotary=0)


@pytest.mark.nightly
def test_wide_latents() -> None:
    check(layer_of([1000], 2), [60, 80], programs=7)


@pytest.mark.parametrize(
    ("tokens", "block"), mostly_nightly([([2, 1, 3], 64), ([16, 0, 5], None)], lambda case: case[1] is None)
)
def test_several_tokens(tokens: list[int], block: int | None) -> None:
    check(layer_of([32], 2, block=block), [70, 33, 90], tokens, page=64)


@pytest.mark.parametrize(
    ("window", "block"), mostly_nightly([(None, 64), (40, 64), (10, None)], lambda case: case == (10, None))
)
def test_windows_padding_holes(window: int | None, block: int | None) -> None:
    """A window may be shorter than the newest tokens."""
    layout = layer_of([64], 1, block=block)
    check(layout, [150, 90], window=window)
    check(layout, [150, 90], window=window, starts=[7, 70])
    check(layout, [150, 90], window=window, starts=[7, 80], holes=True)
    check(layout, [100, 90], [2, 2], window=window, holes=True)


@pytest.mark.parametrize(
    ("first", "newest"), mostly_nightly([(0, 16), (3, 1), (60, 80)], lambda case: case == (60, 80))
)
def test_other_numbers_of_exact_tokens(first: int, newest: int) -> None:
    """With more than a tile of them."""
    check(layer_of([32], 1, block=64), [180, 90, 1], first=first, newest=newest)


def test_softcap() -> None:
    check(layer_of([64], 1, block=64), [100, 90], [2, 2], softcap=3.0)
    check(layer_of([64], 1), [100, 90], softcap=3.0)


def test_heads_that_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_launch, "sm_count", lambda device: 4)
    check(layer_of([64, 64], 1, block=64), [70, 20], per_head=4)
    check(layer_of([64], 3, block=64), [70, 20], [2, 3], per_head=3)


def test_a_batch_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorb_launch, "ABSORBED_BYTES", 1)
    check(layer_of([64], 1, block=64), [70, 20, 40])
    check(layer_of([64], 1, block=64), [70, 20, 40], [2, 1, 2])


def test_parts_of_a_batch_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sequences, of which three would fit, are two and two. Each part has the programs of its own tiles."""
    parts: list[object] = []
    finish = decode_launch._finish

    def recorded(*given: object) -> None:
        parts.append(given[-4:-2])
        finish(*given)

    monkeypatch.setattr(decode_launch, "_finish", recorded)
    monkeypatch.setattr(decode_launch, "sm_count", lambda device: 2)
    monkeypatch.setattr(decode_launch, "TILES_OF_A_PROGRAM", 1)
    sequence_bytes = 4 * 2 * 128 * 2  # four blocks, two query rows, 128 columns of operands, two bytes each
    for most_bytes in (4 * sequence_bytes, 3 * sequence_bytes):
        monkeypatch.setattr(absorb_launch, "ABSORBED_BYTES", most_bytes)
        check(layer_of([64], 1, block=64), [70, 20, 40, 130], programs=None)
    tiles = 3  # of 64 keys, as the cache has room for 133
    assert parts == [(slice(0, 4), 4 * tiles), (slice(0, 2), 2 * tiles), (slice(2, 4), 2 * tiles)]
