"""Sequence parallelism without processes: who computes what, how much is sent, and attention in parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from folded_models import Folding, write_pair
from random_layers import LAYERS, layout_of
from test_cli import rotor

from rotor.format.channels import Numbers
from rotor.format.layout import AttentionShape, LayerLayout
from rotor.parallel.attention import visible
from rotor.parallel.plan import bounds, plan_layer, token_runs
from rotor.parallel.traffic import of_prompt, of_ring


def numbers(*ranks: tuple[int, int]) -> LayerLayout:
    """One KV head for each (key rank, value rank)."""
    return layout_of(1, [(Numbers(key), Numbers(value)) for key, value in ranks])


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("name", LAYERS)
def test_every_head_is_computed_once(name: str, processes: int) -> None:
    layout, shape = LAYERS[name]
    plan = plan_layer(layout, shape, 2, processes)
    size = layout.group_size * 2
    heads = [(part.group, head) for parts in plan.parts for part in parts for head in part.heads(2)]
    assert sorted(heads) == [(i, head) for i in range(len(layout.groups)) for head in range(size)]
    busy = sum(bool(parts) for parts in plan.parts)
    assert busy == min(processes, len(heads))
    for process in range(processes):
        in_calls = [part for _, _, parts in plan.calls(process) for part in parts]
        assert sorted(in_calls, key=plan.parts[process].index) == list(plan.parts[process])
    if processes <= len(layout.groups):  # no group is cut, and each row goes to one process
        rows = sum(plan.sizes(process).rows for process in range(processes))
        assert rows == sum(latent.row_bytes(2) for group in layout.groups for latent in group.latents)


def test_longest_first() -> None:
    layout = numbers((40, 40), (30, 30), (20, 20), (10, 10))
    plan = plan_layer(layout, AttentionShape(1, 4, 4, 64, 64, rotary_dim=64), 2, 2)
    assert [[part.group for part in parts] for parts in plan.parts] == [[0, 3], [1, 2]]


def test_bounds_are_even() -> None:
    assert bounds(10, 4) == [0, 2, 5, 7, 10]
    assert bounds(3, 3) == [0, 1, 2, 3]


@pytest.mark.parametrize("tokens, processes", [(8, 4), (9, 4), (23, 3), (5, 1), (1000, 7)])
def test_pieces_hold_every_token_once_and_share_the_causal_work(tokens: int, processes: int) -> None:
    found = token_runs(tokens, processes)
    assert sorted(i for runs in found for run in runs for i in run) == list(range(tokens))
    work = [sum(i + 1 for run in runs for i in run) for runs in found]
    assert all(run for runs in found for run in runs)
    assert max(work) - min(work) <= 3 * tokens  # of tokens^2 / 2 in all


def test_bytes_by_hand() -> None:
    """Two KV heads of two query heads, ranks 8 + 4, of ten tokens: each process sends half of everything it has."""
    layouts = [numbers((8, 4), (8, 4))]
    shape = AttentionShape(1, 4, 2, 16, 64, rotary_dim=16)
    found = of_prompt(layouts, shape, 10, 2, 2, "heads")
    assert (found.queries, found.rows, found.outputs) == (10 * 2 * 8 * 2, 10 * 12 * 2, 10 * 2 * 4 * 2)
    assert found.busiest_bytes == found.total // 2
    rows = of_prompt(layouts, shape, 10, 2, 2, "rows")
    assert (rows.queries, rows.rows, rows.outputs, rows.busiest_bytes) == (0, 10 * 24 * 2, 0, 5 * 24 * 2)
    assert of_prompt(layouts, shape, 10, 2, 2) == rows
    assert of_prompt(layouts, shape, 40, 16, 2).queries > 0
    assert of_ring(48, 10, 2).total == rows.total
    assert of_ring(48, 10, 1).total == of_prompt(layouts, shape, 10, 1, 2).total == 0


def test_windows_and_padding() -> None:
    queries, keys = torch.tensor([5, 6]), torch.tensor([2, 6, 4])
    assert visible(queries, keys, None, 3)[0, 0].tolist() == [[False, False, True], [False, True, True]]  # type: ignore[index]
    attended = torch.tensor([[True] * 4 + [False] * 4])
    seen = visible(queries, keys, attended, None)
    assert seen[0, 0].tolist() == [[True, False, False]] * 2  # type: ignore[index]
    assert visible(queries[:1], keys[:1], None, None, causal=False) is None


def test_the_command_counts(tiny, tmp_path: Path, capsys) -> None:
    folder = write_pair(tiny("llama"), tmp_path / "out", Folding(bits=((4,),), rank=12)).coded
    out = tmp_path / "traffic.json"
    code, said, _ = rotor(capsys, "traffic", folder, "--processes", "1,2,4", "--tokens", "64", "-o", out, "--json")
    assert code == 0
    result = json.loads(said)
    assert json.loads(out.read_text()) == result
    one, two, four = result["counted"]
    assert one["auto"]["bytes"] == one["ring"]["bytes"] == 0
    assert two["auto"]["bytes"] <= two["heads"]["bytes"] < two["ulysses"]["bytes"]
    assert four["ring"]["bytes"] == 3 * 64 * result["kv_bytes_per_token"]["before"]
    assert four["auto"]["bytes"] == 3 * 64 * result["kv_bytes_per_token"]["after"]
    assert four["ring"]["predicted_s"]["ethernet"] == four["ring"]["busiest_bytes"] / 12.5e9
    code, said, _ = rotor(capsys, "traffic", folder, "--tokens", "64")
    assert code == 0
    assert "of Ulysses" in said
    code, _, error = rotor(capsys, "traffic", folder, "--tokens", "15")
    assert code == 2
    assert "15 tokens for 8 processes: expected 16" in error
