"""Sequence parallelism without processes: who has what, how much is sent, and what is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from folded_models import Folding, write_pair
from random_layers import layout_of
from test_cli import rotor

from rotor.format.channels import Numbers
from rotor.format.layout import AttentionShape
from rotor.parallel.attention import visible
from rotor.parallel.plan import token_runs
from rotor.parallel.traffic import of_heads, of_rows


@pytest.mark.parametrize("tokens, processes", [(8, 4), (9, 4), (23, 3), (5, 1), (1000, 7)])
def test_pieces_hold_every_token_once_and_share_the_causal_work(tokens: int, processes: int) -> None:
    found = token_runs(tokens, processes)
    assert sorted(i for runs in found for run in runs for i in run) == list(range(tokens))
    work = [sum(i + 1 for run in runs for i in run) for runs in found]
    assert all(run for runs in found for run in runs)
    assert max(work) - min(work) <= 3 * tokens  # of tokens^2 / 2 in all


def test_bytes_by_hand() -> None:
    """Two KV heads of two query heads, ranks 8 + 4, of ten tokens: each process sends half of everything it has."""
    layouts = [layout_of(1, [(Numbers(8), Numbers(4))] * 2)]
    found = of_heads(layouts, AttentionShape(1, 4, 2, 16, 64, rotary_dim=16), 10, 2, 2)
    assert (found.queries, found.rows, found.outputs) == (10 * 2 * 8 * 2, 10 * 12 * 2, 10 * 2 * 4 * 2)
    rows = of_rows(48, 10, 2)
    assert (rows.queries, rows.rows, rows.outputs) == (0, 10 * 24 * 2, 0)
    assert of_rows(48, 10, 1).total == 0


def test_windows_and_padding() -> None:
    queries, keys = torch.tensor([5, 6]), torch.tensor([2, 6, 4])
    assert visible(queries, keys, None, 3)[0, 0].tolist() == [[False, False, True], [False, True, True]]  # type: ignore[index]
    attended = torch.tensor([[True] * 4 + [False] * 4])
    seen = visible(queries, keys, attended, None)
    assert seen[0, 0].tolist() == [[True, False, False]] * 2  # type: ignore[index]
    assert visible(queries[:1], keys[:1], None, None, causal=False) is None


def test_the_command_counts(tiny, tmp_path: Path, capsys) -> None:
    folder = write_pair(tiny("llama"), tmp_path / "out", Folding(bits=((4,),), rank=12)).coded
    code, said, _ = rotor(capsys, "traffic", folder, "--processes", "1,2,4", "--tokens", "64", "--json")
    assert code == 0
    result = json.loads(said)
    one, two, four = result["counted"]
    assert one["rotor"]["bytes"] == one["ring"]["bytes"] == 0
    assert two["zdc"]["bytes"] < two["ulysses"]["bytes"]
    assert four["ring"]["bytes"] == 3 * 64 * result["kv_bytes_per_token"]["before"]
    assert four["rotor"]["bytes"] == 3 * 64 * result["kv_bytes_per_token"]["after"]
    code, said, _ = rotor(capsys, "traffic", folder, "--tokens", "64")
    assert code == 0
    assert "of Ulysses" in said
    code, _, error = rotor(capsys, "traffic", folder, "--tokens", "15")
    assert code == 2
    assert "15 tokens for 8 processes: expected 16" in error
