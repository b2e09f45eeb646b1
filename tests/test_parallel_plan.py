"""Sequence parallelism without processes: who has what, how much is sent, and what is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from folded_models import Folding, write_pair
from test_cli import rotor

from rotor.parallel.plan import token_runs


@pytest.mark.parametrize("tokens, processes", [(8, 4), (9, 4), (23, 3), (5, 1), (1000, 7)])
def test_pieces_hold_every_token_once_and_share_the_causal_work(tokens: int, processes: int) -> None:
    found = token_runs(tokens, processes)
    assert sorted(i for runs in found for run in runs for i in run) == list(range(tokens))
    work = [sum(i + 1 for run in runs for i in run) for runs in found]
    assert all(run for runs in found for run in runs)
    assert max(work) - min(work) <= 3 * tokens  # of tokens^2 / 2 in all


def test_the_command_counts(tiny, tmp_path: Path, capsys) -> None:
    folder = write_pair(tiny("llama"), tmp_path / "out", Folding(bits=((4,),), rank=12)).coded
    code, said, _ = rotor(capsys, "traffic", folder, "--processes", "1,2,4", "--tokens", "64", "--json")
    assert code == 0
    result = json.loads(said)
    one, two, four = result["counted"]
    assert one["bytes"] == one["bytes_uncompressed"] == 0
    assert two["bytes"] == 64 * result["kv_bytes_per_token"]["after"]
    assert four["bytes_uncompressed"] == 3 * 64 * result["kv_bytes_per_token"]["before"]
    code, said, _ = rotor(capsys, "traffic", folder, "--tokens", "64")
    assert code == 0
    assert "of uncompressed rows" in said
    code, _, error = rotor(capsys, "traffic", folder, "--tokens", "15")
    assert code == 2
    assert "15 tokens for 8 processes: expected 16" in error
