"""The prefill kernel over rows of codes in Triton's interpreter, in float32 and float16."""

from __future__ import annotations

import pytest
import torch
from coded import MIXTURES, coded_layer, random_coded_case
from kernel_checks import check_prefill, pairs

from rotor.kernels.truth import Sequence

HEAD_DIM = 32
ROWS = [
    *(((columns, columns),) for columns in MIXTURES),
    ((MIXTURES[0], MIXTURES[7]), (MIXTURES[3], MIXTURES[2]), (MIXTURES[3], MIXTURES[2])),
]
DOMAINS = [("none", 2, 3, None), ("pre", 1, 3, True), ("pre", 2, 2, False)]


def whole(*lengths: int) -> list[Sequence]:
    return [Sequence(length, 0, length) for length in lengths]


TYPED = [*((rows, torch.float32) for rows in ROWS), (ROWS[0], torch.float16), (ROWS[-1], torch.float16)]


@pytest.mark.parametrize(("typed", "domain"), pairs(TYPED, DOMAINS, pytest.mark.slow), ids=str)
def test_widths_mixtures_and_domains(typed, domain) -> None:
    (rows, dtype), (kind, size, heads_per_kv, rebuilt) = typed, domain
    case = random_coded_case(coded_layer(kind, size, *rows), heads_per_kv, HEAD_DIM, 1, 21, 21, dtype)
    check_prefill(case, whole(21), rebuilt=rebuilt)


@pytest.mark.parametrize("domain", DOMAINS, ids=str)
def test_odd_lengths_chunks_padding_windows_and_holes(domain) -> None:
    kind, size, heads_per_kv, rebuilt = domain
    layout = coded_layer(kind, size, (MIXTURES[0], MIXTURES[3]), (MIXTURES[4], MIXTURES[0]))
    case = random_coded_case(layout, heads_per_kv, HEAD_DIM, 3, 11, 67)
    sequences = [Sequence(11, 0, 67), Sequence(3, 20, 50), Sequence(1, 0, 1)]
    check_prefill(case, sequences, rebuilt=rebuilt)
    check_prefill(case, sequences, rebuilt=rebuilt, window=9)
    mask = torch.rand(3, 11, 67, generator=torch.Generator().manual_seed(0)) < 0.6
    check_prefill(case, sequences, rebuilt=rebuilt, mask=mask)
    check_prefill(case, sequences, rebuilt=rebuilt, softcap=2.0)


@pytest.mark.parametrize("domain", ["none", "pre"])
def test_pages_permuted_and_poisoned(domain) -> None:
    layout = coded_layer(domain, 2, (MIXTURES[0], MIXTURES[7]), (MIXTURES[2], MIXTURES[6]))
    case = random_coded_case(layout, 1, HEAD_DIM, 2, 5, 70)
    check_prefill(case, [Sequence(5, 0, 70), Sequence(2, 0, 37)], page_size=16)
