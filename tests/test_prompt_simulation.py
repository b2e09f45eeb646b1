"""The papers' prompt schedule as arithmetic: blocks of rows by ranks, and the last round."""

from __future__ import annotations

import random

import pytest
from prompt_simulation import (
    Prompt,
    equal_rows,
    in_rounds,
    papers,
    rows_by_ranks,
    simulate_prompts,
    slices,
)

from rotor.checkpoint.layout import POST_ROPE, AttentionShape, GroupLayout, LayerLayout, ordered_by_class
from rotor.checkpoint.rows import NumberRow
from rotor.errors import UsageError

SHAPE = AttentionShape(num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096, rotary_dim=128)


def ragged_layout(seed: int = 0) -> LayerLayout:
    draw = random.Random(seed)
    ranks = [(draw.randrange(16, 129, 16), draw.randrange(16, 129, 16)) for _ in range(8)]
    groups = [GroupLayout((h,), NumberRow(key), NumberRow(value)) for h, (key, value) in enumerate(ranks)]
    return ordered_by_class(groups, POST_ROPE)


def test_rows_grow_as_ranks_fall() -> None:
    """Heads of d_sum 128, 64 and 32 get 64, 128 and 256 rows: FDC section 5.3, so each task has the same work."""
    prompt = Prompt((128, 64, 32), (512,), causal=False)
    loads, tasks = rows_by_ranks(prompt, sms=14)
    assert tasks == 8 + 4 + 2
    assert loads == [64.0 * 512 * 128] * 14
    assert equal_rows(prompt, 14)[1] == 24


def test_the_last_round_is_cut_for_all_sms() -> None:
    """Nine tasks of 64 rows on eight SMs: the last one is cut into wl / d_sum = 8 rows, but 16 at least."""
    prompt = Prompt((100,), (9 * 64,), causal=False)
    whole = 64.0 * 9 * 64 * 100
    loads, tasks = papers(prompt, sms=8)
    assert tasks == 8 + 4
    assert sorted(loads) == [whole] * 4 + [whole * 1.25] * 4
    assert max(rows_by_ranks(prompt, 8)[0]) == 2 * whole
    # Three tasks of 64 rows on eight SMs are one round, the last: wl is 24 rows of them, 32 with whole tensor cores.
    loads, tasks = papers(Prompt((100,), (3 * 64,), causal=False), sms=8)
    assert tasks == 6
    assert sorted(loads) == [0.0, 0.0] + [32.0 * 192 * 100] * 6


@pytest.mark.parametrize("causal", [False, True])
def test_no_schedule_leaves_work_out(causal: bool) -> None:
    prompt = Prompt.of_layer(ragged_layout(), SHAPE, (1000, 333), causal)
    assert len(prompt.widths) == 32
    least = sum(
        width * (length * (length + 1) / 2 if causal else length * length)
        for length in (1000, 333)
        for width in prompt.widths
    )
    for schedule in (in_rounds, equal_rows, rows_by_ranks, papers, slices):
        assert least <= sum(schedule(prompt, 132)[0]) <= 1.3 * least
    assert sum(equal_rows(prompt, 132)[0]) == pytest.approx(prompt.work)
    assert sum(slices(prompt, 132)[0]) == pytest.approx(prompt.work)


@pytest.mark.parametrize("causal", [False, True])
def test_schedules_of_a_short_prompt_of_ragged_heads(causal: bool) -> None:
    """In rounds of all SMs the papers' schedule helps, and its last round always does; equal slices are evenest."""
    layouts = [ragged_layout(i) for i in range(4)]
    found = {b.schedule: b.largest_over_mean for b in simulate_prompts(layouts, SHAPE, [512], 132, causal)}
    assert list(found) == ["rounds", "none", "rows", "papers", "stream"]
    assert 1.0 <= found["stream"] < found["papers"] < found["rounds"]
    assert found["none"] <= found["rounds"]
    assert found["papers"] < found["rows"]
    with pytest.raises(UsageError, match="positive"):
        simulate_prompts(layouts, SHAPE, [], 132, causal)
