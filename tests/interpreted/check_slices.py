"""Few queries whose keys are split over programs, in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from coded import MIXTURES, coded_layer, random_coded_case
from kernel_checks import check_prefill, pairs
from ragged import layer, random_case

from rotor.kernels.key_ranges import PrefillKeys
from rotor.kernels.prefill import launch as prefill
from rotor.kernels.prefill.slices import planned_slices
from rotor.kernels.truth import Sequence

HEAD_DIM = 32
WAYS = [("none", None), ("pre", False), ("pre", True)]
"""Domains, and in `pre` keys rebuilt by each program or once in memory."""
MIXED = [Sequence(4, 0, 290), Sequence(1, 3, 150), Sequence(2, 100, 180), Sequence(0, 0, 0), Sequence(3, 0, 3)]
"""Chunks of a prompt, one of them its first, beside sequences that decode."""


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch):
    """What was joined; a check in which keys are not split would prove nothing."""
    calls = []
    join = prefill.join_slices
    monkeypatch.setattr(prefill, "join_slices", lambda *args: (calls.append(args[0].shape), join(*args)))
    yield calls
    assert calls


@pytest.mark.parametrize(("seq_len", "way"), pairs([2, 4, 16, 64], WAYS, pytest.mark.slow), ids=str)
def test_few_queries_against_a_long_cache(way, seq_len) -> None:
    domain, rebuilt = way
    case = random_case(layer(domain, 2, (24, 40)), 1, HEAD_DIM, 1, seq_len, 333)
    check_prefill(case, [Sequence(seq_len, 0, 333)], rebuilt=rebuilt, programs=8)


@pytest.mark.parametrize(("programs", "way"), pairs([10, 13], WAYS, pytest.mark.slow), ids=str)
def test_a_batch_of_mixed_lengths(way, programs) -> None:
    domain, rebuilt = way
    case = random_case(layer(domain, 1, (24, 40)), 2, HEAD_DIM, 5, 4, 290)
    check_prefill(case, MIXED, rebuilt=rebuilt, programs=programs, window=150 if programs == 13 else None)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("domain", ["none", "pre"])
def test_pages_permuted_and_poisoned(domain, page_size) -> None:
    case = random_case(layer(domain, 1, (24, 40)), 2, HEAD_DIM, 5, 4, 290)
    check_prefill(case, MIXED, page_size=page_size, programs=13)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_mask_with_holes_and_a_soft_cap(way) -> None:
    domain, rebuilt = way
    case = random_case(layer(domain, 1, (16, 24)), 2, HEAD_DIM, 2, 5, 270)
    mask = torch.rand(2, 5, 270, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[0, 1] = False
    mask[1, 2, :200] = False
    sequences = [Sequence(5, 0, 270), Sequence(4, 30, 260)]
    check_prefill(case, sequences, mask=mask, rebuilt=rebuilt, programs=6)
    check_prefill(case, sequences, softcap=2.0, rebuilt=rebuilt, programs=6)


CODED = [
    ("none", None, torch.float32),
    ("none", None, torch.float16),
    ("pre", False, torch.float32),
    ("pre", True, torch.float32),
]


@pytest.mark.parametrize("way", CODED, ids=str)
def test_rows_of_codes(way) -> None:
    domain, rebuilt, dtype = way
    case = random_coded_case(coded_layer(domain, 1, (MIXTURES[0], MIXTURES[4])), 2, HEAD_DIM, 2, 3, 150, dtype)
    sequences = [Sequence(3, 0, 150), Sequence(1, 5, 140)]
    if not rebuilt:
        check_prefill(case, sequences, page_size=16, programs=6)
    mask = torch.rand(2, 3, 150, generator=torch.Generator().manual_seed(0)) < 0.6
    check_prefill(case, sequences, mask=mask, rebuilt=rebuilt, programs=6)


def test_latents_wider_than_registers_hold(joined) -> None:
    case = random_case(layer("pre", 2, (272, 24)), 1, HEAD_DIM, 1, 3, 270)
    check_prefill(case, [Sequence(3, 0, 270)], rebuilt=False, programs=8)
    assert joined == [(4, 2, 16, 24)]


def test_the_rule_splits_where_half_of_the_gpu_would_idle(joined) -> None:
    """Two programs an SM, of which the interpreter is taken to have two; a head's row block is one of four, or two."""
    case = random_case(layer("none", 1, (16, 24)), 2, HEAD_DIM, 1, 4, 300)
    check_prefill(case, [Sequence(4, 0, 300)])
    assert joined == [(4, 1, 16, 24)]
    case = random_case(layer("none", 1, (16, 24), (16, 24), (16, 24)), 2, HEAD_DIM, 1, 4, 300)
    check_prefill(case, [Sequence(4, 0, 300)])
    assert len(joined) == 1


def test_slices_are_as_even_as_tiles_allow(joined) -> None:
    """By hand: 7, 1 and 0 tiles of 128 keys for 3, 4 and 9 programs."""
    joined.append("of no interest here")
    keys = PrefillKeys.causal(torch.tensor([2, 1, 0]), torch.tensor([130, 3, 0]), torch.tensor([1000, 90, 0]), 2)
    slices, starts = planned_slices(keys, 16, 2, 128, 3)
    assert starts.tolist() == [0, 2, 3, 3]
    assert slices.tolist() == [[0, 1, 4], [0, 4, 8], [1, 0, 1]]
    slices, starts = planned_slices(keys, 16, 2, 128, 9)
    assert starts.tolist() == [0, 7, 8, 8]
    assert slices.tolist() == [[0, i, i + 1] for i in range(1, 8)] + [[1, 0, 1], [0, 0, 0]]
    assert planned_slices(keys, 16, 2, 128, 9)[0] is slices  # for all layers of a step
    # Two row blocks a sequence, the longest first: four queries of eight heads. One sees a tile less than the other.
    keys = PrefillKeys.causal(torch.tensor([4]), torch.tensor([0]), torch.tensor([130]), 4)
    slices, starts = planned_slices(keys, 16, 8, 64, 5)
    assert starts.tolist() == [0, 2, 3]
    assert slices.tolist() == [[0, 0, 1], [0, 1, 3], [1, 0, 2], [0, 0, 0], [0, 0, 0]]
