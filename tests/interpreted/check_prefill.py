"""The prefill kernel in Triton's interpreter, in float32 (it computes bfloat16 wrongly)."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import check_prefill, pairs
from ragged import layer, random_case

from rotor.kernels.gpu import sm_count
from rotor.kernels.key_ranges import PrefillKeys
from rotor.kernels.masks import mask_ranges
from rotor.kernels.prefill.tile_sizes import prefill_constants, prefill_workers
from rotor.kernels.schedule import last_round
from rotor.kernels.truth import Sequence

HEAD_DIM = 16
WAYS = [("none", None), ("pre", False), ("pre", True)]
"""Domains, and in `pre` keys rebuilt by each row block or once in memory."""


@pytest.mark.parametrize("widths", [((80, 48),), ((24, 40), (24, 40), (16, 8))], ids=str)
@pytest.mark.parametrize(("group", "way"), pairs([(1, 3), (2, 2), (2, 1)], WAYS, pytest.mark.slow), ids=str)
def test_widths_domains_group_sizes_and_query_rows(widths, group, way) -> None:
    (size, heads_per_kv), (domain, rebuilt) = group, way
    case = random_case(layer(domain, size, *widths), heads_per_kv, HEAD_DIM, 1, 35, 35)
    check_prefill(case, [Sequence(35, 0, 35)], rebuilt=rebuilt)


@pytest.mark.parametrize("length", [1, 63, 64, 65])
@pytest.mark.parametrize("domain", ["none", "pre"])
def test_lengths_around_a_tile(domain, length) -> None:
    case = random_case(layer(domain, 1, (16, 8)), 1, HEAD_DIM, 1, length, length)
    check_prefill(case, [Sequence(length, 0, length)])


@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("domain", ["none", "pre"])
def test_chunks_against_an_existing_cache_of_different_lengths(domain, page_size) -> None:
    case = random_case(layer(domain, 1, (16, 24), (16, 8)), 2, HEAD_DIM, 3, 18, 90)
    sequences = [Sequence(18, 0, 90), Sequence(5, 7, 67), Sequence(0, 0, 0)]
    check_prefill(case, sequences, page_size=page_size)
    if not page_size and domain == "pre":
        check_prefill(case, sequences, rebuilt=True)


@pytest.mark.parametrize("window", [7, 40])
def test_sliding_windows_and_left_padding(window) -> None:
    case = random_case(layer("pre", 1, (16, 24)), 2, HEAD_DIM, 2, 50, 60)
    for rebuilt in (False, True):
        check_prefill(case, [Sequence(50, 0, 60), Sequence(50, 23, 60)], window=window, rebuilt=rebuilt)


@pytest.mark.parametrize(
    ("way", "dtype"), pairs(WAYS, [torch.float32, torch.float16], pytest.mark.slow), ids=str
)  # tiles of 32 and of 64 keys
def test_a_mask_with_holes(way, dtype) -> None:
    domain, rebuilt = way
    case = random_case(layer(domain, 1, (16, 24)), 2, HEAD_DIM, 2, 20, 150).to("cpu", dtype)
    mask = torch.rand(2, 20, 150, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[1, :10] = True
    mask[1, 15] = False
    check_prefill(case, [Sequence(20, 0, 150), Sequence(20, 3, 150)], mask=mask, rebuilt=rebuilt)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2]], ids=str)
def test_row_blocks_of_the_last_round_in_pieces(way) -> None:
    """Five row blocks of 64 for the four programs that the interpreter is taken to run at a time."""
    domain, rebuilt = way
    layout = layer(domain, 1, (16, 24))
    seq_len, kv_len = 150, 350
    ((_, constants),) = prefill_constants(layout, 2, 4, HEAD_DIM, bool(rebuilt))
    workers = prefill_workers(constants, sm_count(torch.device("cpu")))
    blocks = -(-seq_len * 2 // constants["ROWS"])
    assert last_round(seq_len, 200, constants["ROWS"], 2, 1, workers) == (blocks - 1, True)
    case = random_case(layout, 2, HEAD_DIM, 1, seq_len, kv_len)
    mask = torch.ones(1, seq_len, kv_len, dtype=torch.bool)
    check_prefill(case, [Sequence(seq_len, 3, kv_len)], mask=mask, rebuilt=rebuilt)


def test_softcap() -> None:
    check_prefill(random_case(layer("none", 1, (16, 24)), 2, HEAD_DIM, 1, 20, 40), [Sequence(20, 0, 40)], softcap=2.0)


def test_ranges_of_causal_queries() -> None:
    keys = PrefillKeys.causal(torch.tensor([3, 1]), torch.tensor([0, 2]), torch.tensor([5, 4]), 3, window=2)
    assert keys.first.tolist() == [[1, 2, 3], [2, 3, 4]]
    assert keys.end.tolist() == [[3, 4, 5], [4, 0, 0]]
    assert [edge.tolist() for edge in keys.union] == [[1, 2], [5, 4]]


def test_a_mask_as_words_of_bits() -> None:
    mask = torch.rand(2, 3, 131, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[..., 63] = True  # the sign
    first, end, holes, words = mask_ranges(mask, words=True)
    assert words.shape == (2, 3, 3)
    bits = (words.unsqueeze(-1) >> torch.arange(64)) & 1
    assert torch.equal(bits.flatten(-2)[..., :131].bool(), mask)
    assert not bits.flatten(-2)[..., 131:].any()
    index = torch.arange(131)
    assert torch.equal(first, torch.where(mask, index, 131).amin(-1))
    assert torch.equal(end, torch.where(mask, index + 1, 0).amax(-1))
    assert torch.equal(holes.bool(), mask.sum(-1) != end - first)
