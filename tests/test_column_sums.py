"""Sums of attention's columns in plain PyTorch, against float64: every domain, blocks of queries, rows of codes."""

from __future__ import annotations

import pytest
import torch
from coded import MIXTURES, coded_layer, random_coded_case
from ragged import layer, random_case
from score_checks import assert_close, check_sums, got_sums, model_order, true_sums

from rotor.kernels.code_reference import partial_attention
from rotor.kernels.scores import column_sums as scores

CASES = [("none", 1), ("post", 2), ("pre", 2), ("pre", 1)]


@pytest.mark.parametrize("domain, size", CASES)
@pytest.mark.parametrize("block", [None, 3 * 21])
def test_sums_are_those_of_float64(domain, size, block, monkeypatch) -> None:
    if block is not None:
        monkeypatch.setattr(scores, "BLOCK_ELEMENTS_CPU", 2 * 8 * block)  # a few queries at a time
    check_sums(random_case(layer(domain, size, (16, 8), (24, 16)), 2, 16, 2, 21, 21))


def test_one_query_of_a_step() -> None:
    case = random_case(layer("post", 1, (16, 8)), 3, 16, 2, 1, 40)
    mask = torch.rand(2, 3, 1, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    assert_close(got_sums(case, mask), true_sums(case, mask)[0], 2e-5)
    added = torch.zeros(2, 3, 1, 40).masked_fill(~mask, -1e9)
    got = scores.column_sums(case.query, case.key.unsqueeze(1), case.parameters(), None, model_order(added, case))
    assert_close(got, true_sums(case, mask)[0], 2e-5)


@pytest.mark.parametrize("domain, size", CASES)
def test_attention_finds_the_log_sums_that_sums_need(domain, size) -> None:
    case = random_case(layer(domain, size, (16, 8), (24, 16)), 2, 16, 2, 21, 21)
    rows = case.key.unsqueeze(1), case.value.unsqueeze(1)
    _, log_sums = partial_attention(case.query, *rows, case.parameters(), case.key_rotation)
    expected, exact = true_sums(case)
    assert float((log_sums.double() - exact).abs().max()) < 1e-5
    assert_close(got_sums(case, log_sums=log_sums), expected, 2e-5)


@pytest.mark.parametrize("domain", ["none", "post", "pre"])
def test_rows_of_codes_draw_what_their_numbers_draw(domain) -> None:
    layout = coded_layer(domain, 2, (MIXTURES[0], MIXTURES[3]), (MIXTURES[4], MIXTURES[0]))
    case = random_coded_case(layout, 2, 16, 2, 13, 13)
    rotation = case.floats.key_rotation
    got = scores.column_sums(case.query, case.key.unsqueeze(1), case.parameters(), rotation)
    assert_close(got, true_sums(case.floats)[0], 1e-4)
