"""Queries of sequences of any lengths in one launch, packed behind each other, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from coded import MIXTURES, coded_layer, random_coded_case
from kernel_checks import check_prefill
from ragged import layer, random_case

from rotor.kernels.key_ranges import PrefillKeys
from rotor.kernels.prefill import few_launch
from rotor.kernels.prefill import launch as prefill
from rotor.kernels.prefill.tasks import packed_tasks, task_count
from rotor.kernels.truth import Sequence

HEAD_DIM = 32
WAYS = [("none", None), ("pre", False), ("pre", True)]
"""Domains, and in `pre` keys rebuilt by each row block or once in memory."""

LENGTHS = (1, 2, 15, 0, 16, 17, 100)
"""New tokens; one sequence has none."""


def mixed(*pasts: int) -> list[Sequence]:
    """Sequences of all LENGTHS, with some keys before the new ones."""
    return [Sequence(n, 0, n + pasts[i % len(pasts)] if n else 0) for i, n in enumerate(LENGTHS)]


def lengths_of(sequences: list[Sequence]) -> tuple[int, int, int]:
    return len(sequences), max(s.query_len for s in sequences), max(s.kv_end for s in sequences)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The grid of each launch of a prefill kernel."""
    grids: list[tuple[int, ...]] = []
    launch = prefill.launch
    monkeypatch.setattr(
        prefill, "launch", lambda kernel, grid, *a, **k: (grids.append(grid), launch(kernel, grid, *a, **k))
    )
    return grids


@pytest.mark.parametrize("group", [(1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_mixed_lengths_domains_and_groups(way, group, launches) -> None:
    """Classes of equal widths are a launch each, all sequences together."""
    (domain, rebuilt), (size, heads_per_kv) = way, group
    sequences = mixed(0, 37)
    case = random_case(
        layer(domain, size, (80, 48), (24, 40), (24, 40)), heads_per_kv, HEAD_DIM, *lengths_of(sequences)
    )
    check_prefill(case, sequences, page_size=16, rebuilt=rebuilt)
    assert len(launches) == 2


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_windows_and_pages(way, page_size) -> None:
    domain, rebuilt = way
    sequences = mixed(90, 3)
    case = random_case(layer(domain, 1, (24, 40)), 2, HEAD_DIM, *lengths_of(sequences))
    check_prefill(case, sequences, page_size=page_size, window=21, rebuilt=rebuilt)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_soft_cap_and_sixteen_bits(way) -> None:
    domain, rebuilt = way
    sequences = mixed(5)
    case = random_case(layer(domain, 1, (24, 40)), 2, HEAD_DIM, *lengths_of(sequences))
    check_prefill(case, sequences, page_size=16, softcap=2.0, rebuilt=rebuilt)
    check_prefill(case.to("cpu", torch.float16), sequences, page_size=16, rebuilt=rebuilt)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(
    "rows", [((MIXTURES[0], MIXTURES[7]), (MIXTURES[3], MIXTURES[2])), ((MIXTURES[4],) * 2,)], ids=str
)
def test_mixtures_of_codes(way, rows) -> None:
    domain, rebuilt = way
    sequences = mixed(0, 21)
    case = random_coded_case(coded_layer(domain, 2, *rows), 1, HEAD_DIM, *lengths_of(sequences))
    check_prefill(case, sequences, page_size=16, rebuilt=rebuilt)
    check_prefill(case, sequences, page_size=32, window=9, softcap=2.0, rebuilt=rebuilt)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_few_queries_beside_each_other_split_their_keys(way, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as speculation asks for, and a request without new tokens."""
    domain, rebuilt = way
    joined, launch = [], few_launch.launch
    monkeypatch.setattr(few_launch, "launch", lambda *args, **rest: (joined.append(args[0]), launch(*args, **rest)))
    sequences = [Sequence(4, 0, 290), Sequence(1, 0, 150), Sequence(0, 0, 0), Sequence(3, 0, 3), Sequence(2, 0, 180)]
    case = random_case(layer(domain, 1, (24, 40)), 2, HEAD_DIM, 5, 4, 290)
    for window in (None, 150):
        check_prefill(case, sequences, page_size=16, programs=13, window=window, rebuilt=rebuilt)
    case = random_coded_case(coded_layer(domain, 1, (MIXTURES[0], MIXTURES[4])), 2, HEAD_DIM, 5, 4, 290)
    check_prefill(case, sequences, page_size=64, programs=13, rebuilt=rebuilt)
    assert joined == [few_launch.few_kernel, few_launch.join_kernel] * 3


def test_a_step_without_new_tokens_launches_nothing(launches) -> None:
    case = random_case(layer("none", 1, (24, 40)), 2, HEAD_DIM, 1, 1, 16)
    keys = PrefillKeys.packed(torch.tensor([1, 1, 1], dtype=torch.int32), torch.tensor([9, 0]), 1, 0, 9)
    output = torch.full((1, 80), 7.0)
    prefill.prefill_attention(
        case.query[0], case.key, case.value, case.layout, keys, 2, case.scaling, output=output,
        block_table=torch.zeros(2, 1, dtype=torch.int32),
    )  # fmt: skip
    assert launches == []
    assert bool((output == 7.0).all())


def test_ranges_of_packed_queries() -> None:
    """Two tokens that decode stand before them, and one of padding behind; the second request has no new token."""
    starts, kv_lens = torch.tensor([2, 5, 5, 7], dtype=torch.int32), torch.tensor([9, 4, 2])
    keys = PrefillKeys.packed(starts, kv_lens, 8, 3, 9, window=2)
    assert keys.first[2:7].tolist() == [5, 6, 7, 0, 0]
    assert keys.end.tolist() == [0, 0, 7, 8, 9, 1, 2, 0]
    assert keys.first.dtype == keys.end.dtype == torch.int32
    assert (keys.batch_size, keys.seq_len, keys.longest_kv) == (3, 3, 9)
    first, end = keys.union
    assert end.tolist() == [9, 0, 2]
    assert (first[0], first[2]) == (5, 0)
    assert not PrefillKeys.packed(starts, kv_lens, 8, 3).first.any()


def test_every_row_block_is_one_task_and_the_longest_come_first() -> None:
    """By hand: row blocks of 16 rows are 4 queries of 4 heads."""
    starts, kv_lens = torch.tensor([1, 11, 11, 12, 17], dtype=torch.int32), torch.tensor([10, 0, 500, 20])
    keys = PrefillKeys.packed(starts, kv_lens, 17, 10)
    assert task_count(keys, 16, 4) == 17 // 4 + 4
    found = packed_tasks(keys, 16, 4)
    assert found[:6].tolist() == [[2, 0], [3, 1], [3, 0], [0, 2], [0, 1], [0, 0]]
    assert all(s == 3 and block >= 2 for s, block in found[6:].tolist())  # which it does not have
    assert packed_tasks(keys, 16, 4) is found  # for all layers of a step


def test_there_are_tasks_enough_whatever_the_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    for pack, rows in ((1, 16), (3, 16), (7, 64), (96, 64)):
        for _ in range(50):
            lengths = torch.randint(0, 40, (6,), generator=generator)
            starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
            keys = PrefillKeys.packed(starts, lengths + 5, max(1, int(lengths.sum())), max(1, int(lengths.max())))
            wanted = {(s, b) for s, n in enumerate(lengths.tolist()) for b in range(-(-n * pack // rows))}
            assert wanted <= {tuple(task) for task in packed_tasks(keys, rows, pack).tolist()}
