"""Sequence parallelism without processes: who computes what, how much is sent, and attention in parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from folded_models import Folding, write_pair
from random_layers import LAYERS, layout_of, random_tensors, rotation_table
from test_cli import rotor

from rotor.format.channels import Numbers
from rotor.format.layout import AttentionShape, LayerLayout
from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.reference import attention, join, partial_attention
from rotor.kernels.rotary import when_read
from rotor.kernels.rows import pack_layer
from rotor.parallel.attention import visible
from rotor.parallel.plan import bounds, pieces, plan_layer
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
    found = pieces(tokens, processes)
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


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("seq_len", [1, 3])
def test_parts_of_the_keys_join_to_the_whole(name: str, seq_len: int) -> None:
    length, (layout, shape) = 150, LAYERS[name]
    generator = torch.Generator().manual_seed(1)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    tensors = random_tensors(layout, shape)
    parameters = AttentionParameters(layout, shape, 0.25, tensors.get("query_basis"), tensors.get("key_constant"))
    sides = ((layout.key_rank, True), (layout.value_rank, False))
    key, value = (pack_layer(4 * random(2, length, rank), layout, keys)[:, None] for rank, keys in sides)
    absorbed = 2, seq_len, shape.num_heads // len(layout.groups) * layout.key_width
    query = random(*(2, shape.num_heads, seq_len, shape.head_dim) if shape.rotary_dim else absorbed)
    rotation = when_read(rotation_table(length, shape.rotary_dim), layout.form) if layout.in_blocks else None
    attended = torch.ones(2, length, dtype=torch.bool)
    attended[0, :40] = False
    queries, every = torch.arange(length - seq_len, length), torch.arange(length)

    def attend(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_keys = None if rotation is None else (rotation[0][None, None, indices], rotation[1][None, None, indices])
        mask = visible(queries, indices, attended, 120)
        return partial_attention(query, key[:, :, indices], value[:, :, indices], parameters, of_keys, mask)

    whole, _ = attend(every)
    shuffled = torch.randperm(length, generator=torch.Generator().manual_seed(0))
    parts = [torch.arange(25), *shuffled[shuffled >= 25].split(50)]  # of the first, nothing is seen
    widths = [group.values.width for group in layout.groups for _ in range(parameters.heads_per_group)]
    found = [attend(part) for part in parts]
    assert torch.isinf(found[0][1]).all()
    joined, _ = join([output for output, _ in found], [log_sum for _, log_sum in found], widths)
    torch.testing.assert_close(joined, whole)
    mask = visible(queries, every, attended, 120)
    expected = attention(query, key, value, parameters, rotation, mask)
    torch.testing.assert_close(whole, expected, rtol=1e-9, atol=1e-9)
    nothing, _ = join([found[0][0]] * 2, [found[0][1]] * 2, widths)
    assert torch.equal(nothing, torch.zeros_like(nothing))


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
