"""The decode kernel in Triton's interpreter, in float32 (it computes bfloat16 wrongly)."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_checks import check_decode, pairs
from ragged import layer, random_case

from rotor.kernels.decode.longest_first import longest_first
from rotor.kernels.decode.tile_sizes import decode_config
from rotor.kernels.defaults import MAX_BODIES
from rotor.kernels.key_ranges import DecodeKeys
from rotor.kernels.layer_table import layer_parts
from rotor.kernels.truth import Sequence

HEAD_DIM = 32
WIDTHS = [((16, 32), (16, 32)), ((48, 40), (24, 16), (8, 24)), ((64, 8), (32, 8), (24, 40), (16, 16), (8, 8))]
GROUPS = [("none", 1, 7), ("none", 2, 4), ("pre", 1, 3), ("pre", 4, 1)]


def whole(*lengths: int) -> list[Sequence]:
    return [Sequence(1 if length else 0, 0, length) for length in lengths]


@pytest.mark.parametrize(("widths", "group"), pairs(WIDTHS, GROUPS, pytest.mark.slow), ids=str)
def test_widths_domains_group_sizes_and_query_rows(widths, group) -> None:
    domain, size, heads_per_kv = group
    layout = layer(domain, size, *widths)
    assert len(layer_parts(layout, heads_per_kv, HEAD_DIM).bodies) == min(MAX_BODIES[domain], len(set(widths)))
    check_decode(random_case(layout, heads_per_kv, HEAD_DIM, 1, 1, 70), whole(70), programs=2)


@pytest.mark.parametrize("schedule", ["stream", "lpt", "none"])
@pytest.mark.parametrize("domain", ["none", "pre"])
def test_lengths_around_a_tile_and_empty_sequences(domain, schedule) -> None:
    layout = layer(domain, 1, (48, 24), (16, 40))
    tile = decode_config(layer_parts(layout, 2, HEAD_DIM), 2, 4, HEAD_DIM if domain == "pre" else 0)["TILE"]
    lengths = (1, tile - 1, 0, tile, tile + 1, 257, 0)
    case = random_case(layout, 2, HEAD_DIM, len(lengths), 1, max(lengths))
    check_decode(case, whole(*lengths), schedule=schedule, programs=5)


@pytest.mark.parametrize("programs", [1, 7, 40])
def test_slices_forced_through_units_and_empty_slices(programs) -> None:
    """40 programs share a few tiles of 2 parts: most slices are empty, others begin and end inside a unit."""
    layout = layer("none", 1, (16, 16), (8, 8))
    check_decode(random_case(layout, 2, HEAD_DIM, 1, 1, 300), whole(300), programs=programs)


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("domain", ["none", "pre"])
def test_pages_permuted_and_poisoned(domain, page_size) -> None:
    case = random_case(layer(domain, 2, (32, 16), (8, 8)), 1, HEAD_DIM, 2, 1, 100)
    check_decode(case, [Sequence(1, 0, 100), Sequence(1, 13, 77)], page_size=page_size)


@pytest.mark.parametrize("domain", ["none", "pre"])
def test_left_padding_and_windows_are_ranges(domain) -> None:
    case = random_case(layer(domain, 1, (24, 24), (16, 8)), 2, HEAD_DIM, 3, 1, 200)
    check_decode(case, [Sequence(1, 65, 200), Sequence(1, 137, 200), Sequence(1, 199, 200)])


@pytest.mark.parametrize("domain", ["none", "pre"])
def test_a_mask_with_holes(domain) -> None:
    case = random_case(layer(domain, 1, (24, 24), (16, 8)), 2, HEAD_DIM, 4, 1, 140)
    mask = torch.rand(4, 140, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[1] = True
    mask[2] = False
    mask[3, :70] = False
    sequences = [Sequence(1, 0, 140), Sequence(1, 20, 100), Sequence(1, 0, 140), Sequence(1, 0, 140)]
    check_decode(case, sequences, mask=mask)


@pytest.mark.parametrize("domain", ["none", "pre"])
def test_softcap(domain) -> None:
    check_decode(random_case(layer(domain, 1, (24, 24)), 2, HEAD_DIM, 1, 1, 90), whole(90), softcap=2.0)


def test_a_rotation_with_an_attention_factor() -> None:
    check_decode(random_case(layer("pre", 2, (24, 24)), 2, HEAD_DIM, 1, 1, 90, factor=1.3), whole(90))


@pytest.mark.parametrize("ranks", [(12, 10), (7, 5)])
def test_widths_that_are_no_multiples_of_eight(ranks) -> None:
    check_decode(random_case(layer("pre", 1, ranks, ranks), 2, 16, 1, 1, 70), whole(70))


def test_parts_share_a_group_whose_rows_are_too_many() -> None:
    """64 query rows of 512 columns are cut into parts of 32, of 16 where keys are rebuilt, with the same latents."""
    layout = layer("none", 4, (16, 512))
    parts = layer_parts(layout, 16, HEAD_DIM)
    assert (len(parts.table), parts.rows) == (2, 32)
    check_decode(random_case(layout, 16, HEAD_DIM, 1, 1, 20), whole(20), programs=3)
    layout = layer("pre", 4, (16, 512))
    parts = layer_parts(layout, 16, HEAD_DIM)
    assert (len(parts.table), parts.rows, parts.heads) == (4, 16, 1)
    check_decode(random_case(layout, 16, HEAD_DIM, 1, 1, 20), whole(20), programs=3)


def test_the_greedy_schedule_gives_each_task_to_the_least_loaded() -> None:
    """By hand: 8, 7 and 6 to one program each, 5 to the third, 4 to the second, 3 to the first; 1 finds all at 11."""
    work = torch.tensor([3, 8, 5, 7, 4, 6, 1])
    tasks, bounds = longest_first(work.unsqueeze(0), 3)
    lists = [sorted(work[tasks[a:b].long()].tolist()) for a, b in itertools.pairwise(bounds)]
    assert lists == [[1, 3, 8], [4, 7], [5, 6]]


def test_ranges_from_a_mask() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    keys = DecodeKeys.from_mask(mask)
    assert keys.first.tolist() == [1, 0, 0]
    assert keys.end.tolist() == [3, 4, 0]
    assert keys.holes.tolist() == [0, 1, 0]
    assert keys.tile_prefix(2).tolist() == [0, 2, 4, 4]
