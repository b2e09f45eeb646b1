"""The decode kernel over rows of codes in Triton's interpreter, in float32 and float16: it gets bfloat16 wrong."""

from __future__ import annotations

import pytest
import torch
from coded import MIXTURES, coded_layer, random_coded_case
from kernel_checks import check_decode, pairs

from rotor.format.columns import Columns
from rotor.kernels.truth import Sequence

HEAD_DIM = 32
ROWS = [
    *(((columns, columns),) for columns in MIXTURES),
    ((MIXTURES[0], MIXTURES[7]), (MIXTURES[3], MIXTURES[2])),
    ((MIXTURES[7], MIXTURES[4]), (MIXTURES[5], MIXTURES[6]), (MIXTURES[1], MIXTURES[0]), (MIXTURES[1], MIXTURES[0])),
]
GROUPS = [("none", 1, 7), ("none", 2, 4), ("pre", 1, 3), ("pre", 4, 1)]


def whole(*lengths: int) -> list[Sequence]:
    return [Sequence(1 if length else 0, 0, length) for length in lengths]


TYPED = [*((rows, torch.float32) for rows in ROWS), *((rows, torch.float16) for rows in ROWS[-2:])]


@pytest.mark.parametrize(("typed", "group"), pairs(TYPED, GROUPS, pytest.mark.slow), ids=str)
def test_widths_mixtures_domains_and_group_sizes(typed, group) -> None:
    (rows, dtype), (domain, size, heads_per_kv) = typed, group
    layout = coded_layer(domain, size, *rows)
    check_decode(random_coded_case(layout, heads_per_kv, HEAD_DIM, 1, 1, 70, dtype), whole(70), programs=2)


@pytest.mark.parametrize("schedule", ["stream", "lpt", "none"])
@pytest.mark.parametrize("domain", ["none", "pre"])
def test_odd_lengths_and_empty_sequences(domain, schedule) -> None:
    layout = coded_layer(domain, 1, (MIXTURES[0], MIXTURES[3]), (MIXTURES[4], MIXTURES[0]))
    lengths = (1, 63, 0, 65, 257, 0)
    case = random_coded_case(layout, 2, HEAD_DIM, len(lengths), 1, max(lengths))
    check_decode(case, whole(*lengths), schedule=schedule, programs=5)


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("domain", ["none", "pre"])
def test_pages_permuted_and_poisoned(domain, page_size) -> None:
    layout = coded_layer(domain, 2, (MIXTURES[0], MIXTURES[7]), (Columns(n8=8), Columns(n4=8)))
    case = random_coded_case(layout, 1, HEAD_DIM, 2, 1, 100)
    check_decode(case, whole(100, 37), page_size=page_size)


@pytest.mark.parametrize("domain", ["none", "pre"])
def test_left_padding_windows_and_holes(domain) -> None:
    layout = coded_layer(domain, 1, (MIXTURES[3], MIXTURES[0]))
    case = random_coded_case(layout, 2, HEAD_DIM, 3, 1, 140)
    sequences = [Sequence(1, 65, 140), Sequence(1, 20, 100), Sequence(1, 139, 140)]
    check_decode(case, sequences)
    mask = torch.rand(3, 140, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[2] = True
    check_decode(case, sequences, mask=mask)


@pytest.mark.parametrize("domain", ["none", "pre"])
def test_softcap(domain) -> None:
    case = random_coded_case(coded_layer(domain, 1, (MIXTURES[0], MIXTURES[0])), 2, HEAD_DIM, 1, 1, 90)
    check_decode(case, whole(90), softcap=2.0)
