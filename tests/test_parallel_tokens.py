"""Sequence parallelism without processes: who has what."""

from __future__ import annotations

import pytest

from rotor.parallel.launch import token_runs


@pytest.mark.parametrize("tokens, processes", [(8, 4), (9, 4), (23, 3), (5, 1), (1000, 7)])
def test_pieces_hold_every_token_once_and_share_the_causal_work(tokens: int, processes: int) -> None:
    found = token_runs(tokens, processes)
    assert sorted(i for runs in found for run in runs for i in run) == list(range(tokens))
    work = [sum(i + 1 for run in runs for i in run) for runs in found]
    assert all(run for runs in found for run in runs)
    assert max(work) - min(work) <= 3 * tokens  # of tokens^2 / 2 in all
