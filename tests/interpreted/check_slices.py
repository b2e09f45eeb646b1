"""Few queries whose keys are split over programs, in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from coded import MIXTURES, coded_layer, random_coded_case
from kernel_checks import check_prefill, pairs
from ragged import layer, random_case

from rotor.kernels.key_ranges import PrefillKeys
from rotor.kernels.layer_table import MOST_SHARES, SHARES, Column, layer_parts
from rotor.kernels.prefill import few_launch
from rotor.kernels.prefill.slices import Split, planned_slices
from rotor.kernels.truth import Sequence

HEAD_DIM = 32
WAYS = [("none", None), ("pre", False), ("pre", True)]
"""Domains, and in `pre` keys rebuilt by each program or once in memory."""
MIXED = [Sequence(4, 0, 290), Sequence(1, 3, 150), Sequence(2, 100, 180), Sequence(0, 0, 0), Sequence(3, 0, 3)]
"""Chunks of a prompt, one of them its first, beside sequences that decode."""


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch):
    """The shapes of what was joined; a check in which keys are not split would prove nothing."""
    shapes = []
    launch = few_launch.launch

    def record(kernel, grid, *arguments, **constants):
        if kernel is few_launch.join_kernel:
            shapes.append(tuple(arguments[0].shape))
        launch(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(few_launch, "launch", record)
    yield shapes
    assert shapes


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


RAGGED = ((40, 24), (16, 8), (16, 8), (8, 72))
"""Widths of three classes, two of them narrow; decoding has three bodies for them, before RoPE two."""


@pytest.mark.parametrize(("page_size", "way"), pairs([0, 16, 64], WAYS, pytest.mark.slow), ids=str)
def test_groups_of_different_widths_in_one_launch(way, page_size, joined) -> None:
    domain, rebuilt = way
    case = random_case(layer(domain, 2, *RAGGED), 2, HEAD_DIM, 5, 4, 290)
    check_prefill(
        case, MIXED, page_size=page_size, rebuilt=rebuilt, programs=60, window=150 if page_size == 64 else None
    )
    assert len(joined) == 1


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_groups_of_different_widths_with_masks_caps_and_more_rows(way, joined) -> None:
    """Nine queries of two heads and more are row blocks of 64 rows, of 16-bit numbers too."""
    domain, rebuilt = way
    case = random_case(layer(domain, 1, *RAGGED), 2, HEAD_DIM, 2, 9, 150)
    mask = torch.rand(2, 9, 150, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[0, 1] = False
    sequences = [Sequence(9, 0, 150), Sequence(4, 30, 140)]
    check_prefill(case, sequences, mask=mask, rebuilt=rebuilt, programs=24)
    check_prefill(case.to("cpu", torch.float16), sequences, softcap=2.0, rebuilt=rebuilt, programs=24)
    assert len(joined) == 2


@pytest.mark.parametrize("way", CODED, ids=str)
def test_groups_of_different_codes_in_one_launch(way, joined) -> None:
    domain, rebuilt, dtype = way
    layout = coded_layer(domain, 1, (MIXTURES[0], MIXTURES[4]), (MIXTURES[7], MIXTURES[2]), (MIXTURES[3], MIXTURES[1]))
    case = random_coded_case(layout, 2, HEAD_DIM, 1, 3, 150, dtype)
    check_prefill(case, [Sequence(3, 0, 150)], page_size=16, rebuilt=rebuilt, programs=15)
    mask = torch.rand(1, 3, 150, generator=torch.Generator().manual_seed(0)) < 0.6
    check_prefill(case, [Sequence(3, 0, 150)], mask=mask, rebuilt=rebuilt, programs=15)
    assert len(joined) == 2


def test_latents_wider_than_registers_hold(joined) -> None:
    case = random_case(layer("pre", 2, (272, 24)), 1, HEAD_DIM, 1, 3, 270)
    check_prefill(case, [Sequence(3, 0, 270)], rebuilt=False, programs=8)
    assert joined == [(8, 16, 32)]


def test_the_rule_splits_where_half_of_the_gpu_would_idle(joined) -> None:
    """Two programs an SM, of which the interpreter is taken to have two; a head's row block is one of four, or two."""
    case = random_case(layer("none", 1, (16, 24)), 2, HEAD_DIM, 1, 4, 300)
    check_prefill(case, [Sequence(4, 0, 300)])
    assert joined == [(4, 16, 32)]
    case = random_case(layer("none", 1, (16, 24), (16, 24), (16, 24)), 2, HEAD_DIM, 1, 4, 300)
    check_prefill(case, [Sequence(4, 0, 300)])
    assert len(joined) == 1
    # Three classes of one group each would fill a quarter of it by launches of their own.
    case = random_case(layer("none", 1, (16, 24), (24, 24), (16, 16)), 2, HEAD_DIM, 1, 4, 300)
    check_prefill(case, [Sequence(4, 0, 300)])
    assert len(joined) == 2


def test_programs_go_by_the_bytes_of_rows(joined) -> None:
    """By hand: 64, 16 and 16 numbers of 96 are 2, 1/2 and 1/2 of the mean, in quarters."""
    joined.append("of no interest here")
    parts = layer_parts(layer("none", 1, (40, 24), (8, 8), (8, 8)), 2, HEAD_DIM)
    steps = [row[Column.SHARE] for row in parts.table]
    assert steps == [8, 2, 2]
    split = Split.of(steps, 1, 3, 60)
    assert (split.base, split.planned, split.programs) == (20, (1, MOST_SHARES), 40 + 10 + 10)
    assert [split.programs_of(step) for step in (1, 8, MOST_SHARES)] == [5, 40, 80]
    assert Split.of(steps, 1, 15, 60).programs_of(2) == 15  # a task has a program
    even = Split.of([SHARES] * 3, 2, 3, 60)
    assert (even.planned, even.slice_rows, even.programs) == ((SHARES, SHARES), 10, 60)


def test_slices_are_as_even_as_tiles_allow(joined) -> None:
    """By hand: 7, 1 and 0 tiles of 128 keys for 3, 4 and 9 programs."""
    joined.append("of no interest here")
    keys = PrefillKeys.causal(torch.tensor([2, 1, 0]), torch.tensor([130, 3, 0]), torch.tensor([1000, 90, 0]), 2)
    slices, starts = planned_slices(keys, 16, 2, 128, Split(3, 3, (SHARES,), 1))
    assert starts.tolist() == [[0, 2, 3, 3]]
    assert slices.tolist() == [[[0, 1, 4], [0, 4, 8], [1, 0, 1]]]
    nine = Split(9, 3, (SHARES,), 1)
    slices, starts = planned_slices(keys, 16, 2, 128, nine)
    assert starts.tolist() == [[0, 7, 8, 8]]
    assert slices.tolist() == [[[0, i, i + 1] for i in range(1, 8)] + [[1, 0, 1], [0, 0, 0]]]
    assert planned_slices(keys, 16, 2, 128, nine)[0] is slices  # for all layers of a step
    # Two row blocks a sequence, the longest first: four queries of eight heads. One sees a tile less than the other.
    keys = PrefillKeys.causal(torch.tensor([4]), torch.tensor([0]), torch.tensor([130]), 4)
    slices, starts = planned_slices(keys, 16, 8, 64, Split(5, 2, (SHARES,), 1))
    assert starts.tolist() == [[0, 2, 3]]
    assert slices.tolist() == [[[0, 0, 1], [0, 1, 3], [1, 0, 2], [0, 0, 0], [0, 0, 0]]]


def test_one_plan_has_the_slices_of_all_widths(joined) -> None:
    """For a quarter of the mean's nine programs up to four times as many; each is the plan of that many programs."""
    joined.append("of no interest here")
    keys = PrefillKeys.causal(torch.tensor([2, 1, 0]), torch.tensor([130, 3, 0]), torch.tensor([1000, 90, 0]), 2)
    ragged = Split(9, 3, (8, 2), 1)
    slices, starts = planned_slices(keys, 16, 2, 128, ragged)
    assert (slices.shape, starts.shape) == ((MOST_SHARES, 36, 3), (MOST_SHARES, 4))
    for step in range(1, MOST_SHARES + 1):
        programs = ragged.programs_of(step)
        own, own_starts = planned_slices(keys, 16, 2, 128, Split(programs, 3, (SHARES,), 1))
        assert torch.equal(slices[step - 1, :programs], own[0])
        assert torch.equal(starts[step - 1], own_starts[0])
    assert planned_slices(keys, 16, 2, 128, Split(9, 3, (6, 1, 5), 1))[0] is slices  # of another layer
