"""Attention in the benchmark: every row is checked against float64, then all are timed together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import NumericsError
from ..format.layout import AttentionShape, LayerLayout
from ..progress import Progress
from .clock import Clock, Rates, Seconds
from .problem import (
    Problem,
    checked_output,
    random_problem,
    rebuilt_layout,
    truth,
    uncompressed_layout,
    without_rope,
)
from .rows import Phase, Row, attention_rows, pytorch_path
from .settings import BenchResult, BenchSettings

ERROR_FLOOR = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative error that any row may have, by dtype: its epsilon in 16 bits; in float32 the order of sums matters more."""


def bench_attention(
    result: BenchResult,
    layouts: list[LayerLayout],
    shape: AttentionShape,
    settings: BenchSettings,
    clock: Clock,
    dtype: torch.dtype,
    progress: Progress,
) -> None:
    """Every row of both phases at every load."""
    lengths: dict[Phase, tuple[int, ...]] = {"decode": settings.decode_lengths, "prefill": settings.prefill_lengths}
    loads = [(phase, length, batch) for phase in lengths for length in lengths[phase] for batch in settings.batch_sizes]
    generator = torch.Generator(clock.device).manual_seed(settings.seed)
    with progress.task("attention", len(loads) * len(layouts), "layers") as advance:
        for phase, length, batch_size in loads:
            seq_len = 1 if phase == "decode" else length
            load = {"phase": phase, "length": length, "batch_size": batch_size}
            measured = []
            for layout in layouts:
                make = partial(
                    random_problem,
                    batch_size=batch_size,
                    seq_len=seq_len,
                    kv_len=length,
                    dtype=dtype,
                    generator=generator,
                )
                makers = _problem_makers(layout, shape, make)
                measured.append(_bench_layer(result, phase, makers, load, clock, settings.repetitions))
                advance(1)
            result.attention += _sum_of_layers(measured, load, clock.device, result.rates)


def _problem_makers(
    layout: LayerLayout, shape: AttentionShape, make: Callable[[LayerLayout, AttentionShape], Problem]
) -> dict[str, Callable[[], Problem]]:
    """What makes the random inputs of each kind of row, by kind."""
    return {
        "compressed": partial(make, layout, shape),
        "uncompressed": partial(make, uncompressed_layout(shape), without_rope(shape)),
        "rebuilt": partial(make, rebuilt_layout(layout, shape), shape),
    }


def _bench_layer(
    result: BenchResult,
    phase: Phase,
    makers: dict[str, Callable[[], Problem]],
    load: dict[str, Any],
    clock: Clock,
    repetitions: int,
) -> dict[str, tuple[Seconds, Problem]]:
    """Check every row of one layer, then time all of them together; seconds and problem of each by name."""
    calls: dict[str, Callable[[], Tensor]] = {}
    problems = {kind: make() for kind, make in makers.items()}
    of_row: dict[str, Problem] = {}
    for kind, problem in problems.items():
        exact, limit = truth_and_limit(problem)
        for row in attention_rows():
            if row.kind != kind or phase not in row.phases:
                continue
            why = row.why_not(problem) or _try(row, problem, calls, result, exact, limit, load)
            if why is None:
                of_row[row.name] = problem
            elif not any(s["row"] == row.name and s.get("phase") == phase for s in result.not_measured):
                result.skip(row.name, why, phase=phase)
    seconds = clock.interleaved(calls, repetitions)
    return {name: (seconds[name], of_row[name]) for name in calls}


def _try(
    row: Row,
    problem: Problem,
    calls: dict[str, Callable[[], Tensor]],
    result: BenchResult,
    exact: Tensor,
    limit: float,
    load: dict[str, Any],
) -> str | None:
    """Run a row once, compare it, and add it to `calls`; or the reason for which a backend refuses it.

    Raises:
        NumericsError: the result is wrong.
    """
    try:
        call = row.prepare(problem)
        output = call()
    except row.refusals as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    error_size = relative_error(checked_output(problem, output), exact)
    where = f"{load['phase']}, {load['batch_size']} x {load['length']} tokens"
    if not error_size <= limit:  # NaN is no number below the limit
        raise NumericsError(
            f"benchmark row {row.name!r} ({where}): relative error {error_size:.3g} against float64, allowed is "
            f"{limit:.3g}; nothing is reported.",
            "The row computes something wrong: a defect of rotor, of PyTorch or of the driver; report it.",
        )
    result.checks.append({"row": row.name, **load, "error": error_size, "limit": limit})
    calls[row.name] = call
    return None


def truth_and_limit(problem: Problem) -> tuple[Tensor, float]:
    """What of a problem is compared, in float64, and the relative error that a row may have there."""
    exact = truth(problem)
    plain = relative_error(checked_output(problem, pytorch_path(problem)()), exact)
    return exact, max(2 * plain, ERROR_FLOOR[problem.dtype])


def relative_error(got: Tensor, expected: Tensor) -> float:
    """NaN where `got` has one."""
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))


def _sum_of_layers(
    measured: list[dict[str, tuple[Seconds, Problem]]], load: dict[str, Any], device: torch.device, rates: Rates
) -> list[dict[str, Any]]:
    """One record a row that ran in every layer: the sum of its times, and the floor of the work it is for.

    speed_up: over the fastest row of full width at the same load.
    """
    runs_of = {
        name: [layer[name] for layer in measured] for name in measured[0] if all(name in layer for layer in measured)
    }
    kinds = {row.name: row.kind for row in attention_rows()}
    medians = {name: sum(s.median for s, _ in runs) for name, runs in runs_of.items()}
    fastest = min(medians[name] for name in medians if kinds[name] == "uncompressed")
    records = []
    for name, runs in runs_of.items():
        floor = sum(problem.work.seconds(rates.copy_bytes_per_s, rates.matmul_flops_per_s) for _, problem in runs)
        seconds, flops = medians[name], sum(problem.work.flops for _, problem in runs)
        records.append(
            {
                "row": name,
                "kind": kinds[name],
                "device": device.type,
                **load,
                "seconds": {
                    "median": seconds,
                    "low": sum(s.low for s, _ in runs),
                    "high": sum(s.high for s, _ in runs),
                    "repetitions": runs[0][0].repetitions,
                },
                "layer_seconds": [s.median for s, _ in runs],
                "bytes": sum(problem.work.cache_bytes for _, problem in runs),
                "flops": flops,
                "flops_per_s": flops / seconds,
                "floor_seconds": floor,
                "fraction_of_floor": floor / seconds,
                "speed_up": fastest / seconds,
            }
        )
    return records
