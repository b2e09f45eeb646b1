"""Schedules as pure functions, and the simulator on top of them."""

from __future__ import annotations

import random

import pytest
import schedules
from schedules import parse_lengths
from simulation import (
    Tasks,
    equal_slices,
    longest_first,
    simulate,
)

from rotor import export
from rotor.calibration.prediction.devices import find_device
from rotor.checkpoint.layout import POST_ROPE, AttentionShape, GroupLayout, LayerLayout, ordered_by_class
from rotor.checkpoint.rows import NumberRow
from rotor.errors import UsageError

SHAPE = AttentionShape(num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096, rotary_dim=128)
H200 = find_device("h200")


def ragged_layout(seed: int = 0) -> LayerLayout:
    draw = random.Random(seed)
    ranks = [(draw.randrange(16, 129, 16), draw.randrange(16, 129, 16)) for _ in range(8)]
    groups = [GroupLayout((h,), NumberRow(key), NumberRow(value)) for h, (key, value) in enumerate(ranks)]
    return ordered_by_class(groups, POST_ROPE)


def of_each_sm(parts: list[list[tuple[int, int]]], tasks: Tasks) -> list[float]:
    return [sum(count * tasks.tile_seconds[task] for task, count in mine) for mine in parts]


def test_the_papers_example() -> None:
    """FDC figure 8, ZACK figure 12: tasks k1 to k8, longest first, on three SMs; durations that lead to the figure."""
    parts = longest_first(Tasks((1,) * 8, (9, 7, 6, 4.5, 4, 3, 2, 1)), 3)
    assert [[task + 1 for task, _ in mine] for mine in parts] == [[1, 6], [2, 5, 8], [3, 4, 7]]


@pytest.mark.parametrize("workers", [1, 3, 7, 64, 500])
def test_schedules_assign_every_tile_once_and_evenly(workers: int) -> None:
    draw = random.Random(2)
    tasks = Tasks(
        tuple(draw.randrange(1, 40) for _ in range(30)), tuple(draw.choice([16.0, 48.0, 80.0]) for _ in range(30))
    )
    whole = sum(tasks.seconds) / workers
    greedy = longest_first(tasks, workers)
    assert sorted(part for mine in greedy for part in mine) == list(enumerate(tasks.tiles))
    assert max(of_each_sm(greedy, tasks)) <= (4 / 3) * max(whole, max(tasks.seconds))  # Graham's bound
    slices = equal_slices(tasks, workers)
    in_line = [task for mine in slices for task, count in mine for _ in range(count)]
    assert in_line == [task for task, count in enumerate(tasks.tiles) for _ in range(count)]
    assert max(abs(load - whole) for load in of_each_sm(slices, tasks)) <= max(tasks.tile_seconds) + 1e-9


@pytest.mark.parametrize("lengths", [[32768], [200, 16000, 7, 1], [4096] * 64])
def test_finer_schedules_are_never_worse(lengths: list[int]) -> None:
    none, lpt, stream = simulate([ragged_layout(i) for i in range(4)], SHAPE, lengths, H200, 132)
    assert (none.schedule, lpt.schedule, stream.schedule) == ("none", "lpt", "stream")
    assert 1.0 <= stream.largest_over_mean <= lpt.largest_over_mean + 1e-9
    assert lpt.largest_over_mean <= none.largest_over_mean + 1e-9
    assert none.parts == lpt.parts == 4 * 8 * len(lengths)
    assert stream.parts >= none.parts
    if len(lengths) == 1:  # 8 ragged heads on 132 SMs
        assert none.largest_over_mean > 15
        assert stream.largest_over_mean < 1.1


def test_lengths() -> None:
    assert parse_lengths("32768") == [32768]
    assert parse_lengths("2x100, 7") == [100, 100, 7]
    for wrong in ("", "x5", "3x", "1.5", "-4"):
        with pytest.raises(UsageError, match="--lengths"):
            parse_lengths(wrong)
    with pytest.raises(UsageError, match="positive"):
        simulate([ragged_layout()], SHAPE, [0], H200, 132)


def test_the_study_of_a_checkpoint(capsys, monkeypatch: pytest.MonkeyPatch, demo_run, tmp_path) -> None:
    export(demo_run("fdc").folder, tmp_path / "out", removal_rate=0.2)
    monkeypatch.setattr("sys.argv", ["schedules.py", str(tmp_path / "out"), "--lengths", "8x4096,200"])
    schedules.main()
    step = capsys.readouterr().out
    assert "| step, 132 SMs | none | lpt | stream |" in step
    monkeypatch.setattr("sys.argv", ["schedules.py", str(tmp_path / "out"), "--prompts", "--lengths", "300"])
    schedules.main()
    assert "| prompts, causal, 132 SMs | rounds | none | rows | papers | stream |" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["schedules.py", str(tmp_path / "out"), "--lengths", "many"])
    with pytest.raises(SystemExit, match="'many' is not a number of tokens"):
        schedules.main()
