"""The kernels of column sums in Triton's interpreter: lengths that are no multiple of a tile, every domain."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from ragged import layer, random_case
from score_checks import check_sums, got_sums, true_sums

from rotor.kernels.dispatch import VARIABLE
from rotor.kernels.scores import kernel
from rotor.kernels.scores.column_sums import sums_in_blocks


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")


CASES = [("none", 1), ("post", 2), ("pre", 2)]


@pytest.mark.parametrize(("domain", "size"), CASES)
def test_sums_are_those_of_float64(domain, size) -> None:
    # Two blocks of queries and of keys, and a width of more than one piece where keys are not rebuilt.
    case = random_case(layer(domain, size, (20, 8)), 1 + (size == 1), 16, 1 + (size == 1), 21, 21)
    with (
        patch.object(kernel, "QUERIES", 16), patch.object(kernel, "KEYS", 16), patch.object(kernel, "WIDTH", 16),
        patch.object(kernel, "sums_of_columns", wraps=kernel.sums_of_columns) as run,
    ):  # fmt: skip
        check_sums(case, every=False)
    assert run.called


def test_halves_are_as_exact_as_pytorch() -> None:
    case = random_case(layer("post", 1, (16, 8)), 2, 16, 1, 40, 40).to("cpu", torch.float16)
    expected = true_sums(case)[0]
    got = float((got_sums(case).double() - expected).norm() / expected.norm())
    with patch.object(kernel, "sums_of_columns", sums_in_blocks):
        plain = float((got_sums(case).double() - expected).norm() / expected.norm())
    assert got <= max(2 * plain, 4e-6)
