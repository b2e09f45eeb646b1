"""Side-by-side benchmark of a compressed checkpoint; refuses to report while a row's result is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .bench_clock import Clock, Rates, Seconds, measure_rates
from .bench_model import ModelLoad, check_models, measure_models, physical_memory
from .bench_problem import (
    Problem,
    checked_output,
    compressed_layout,
    random_problem,
    rebuilt_layout,
    truth,
    uncompressed_layout,
)
from .bench_report import describe_device
from .bench_rows import Phase, Row, attention_rows, pytorch_path
from .checkpoint import Checkpoint, read_json
from .compress import load_model, pick_device, pick_dtype
from .devices import Device
from .errors import CheckpointError, NumericsError, UsageError
from .families import attention_shape
from .integration import METHOD, RotorConfig
from .layout import AttentionShape, LayerLayout
from .progress import Progress
from .provenance import provenance

VERSION = 1
ERROR_FLOOR = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative error that any row may have, by dtype: its epsilon in 16 bits; in float32 the order of sums matters more."""


@dataclass(frozen=True)
class BenchSettings:
    """What is measured.

    decode_lengths: cached tokens of each sequence. prefill_lengths: of prompts. layers: at most so many, evenly spread
    over the depth; times are their sum. new_tokens: of the whole model, 0 to leave it out. memory_bytes: for the
    largest batch; None is all that the device has.
    """

    decode_lengths: tuple[int, ...]
    prefill_lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    layers: int = 4
    repetitions: int = 20
    new_tokens: int = 32
    memory_bytes: int | None = None
    seed: int = 0

    @classmethod
    def of(
        cls,
        device: torch.device,
        decode: Sequence[int] | None,
        prefill: Sequence[int] | None,
        batch: Sequence[int] | None,
        **others: Any,
    ) -> BenchSettings:
        """Lengths and batch sizes as given, or such as the device takes in minutes."""
        default = GPU_LOADS if device.type == "cuda" else CPU_LOADS
        lengths, prompts, batches = (
            default[i] if g is None else tuple(g) for i, g in enumerate((decode, prefill, batch))
        )
        return cls(lengths, prompts, batches, **others)


GPU_LOADS = (32768,), (8192,), (1, 8)
CPU_LOADS = (2048,), (512,), (1,)
"""Cached tokens, tokens of a prompt, and sequences in a batch, where nothing is asked for."""


@dataclass
class BenchResult:
    """Everything that a run measured, checked, and did not measure, with the reason."""

    rates: Rates
    layers: list[int]
    attention: list[dict[str, Any]] = field(default_factory=list)
    model: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    not_measured: list[dict[str, Any]] = field(default_factory=list)

    def skip(self, row: str, why: str, **load: Any) -> None:
        self.not_measured.append({"row": row, **load, "why": why})


def bench(
    folder: Path,
    settings: BenchSettings,
    *,
    model: Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    command: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure a compressed checkpoint beside the alternatives, in one run.

    Args:
        folder: what `rotor export` wrote.
        model: the source model; by default where rotor.json says.
        command: recorded.
    Returns:
        What is written as JSON.
    Raises:
        NumericsError: a row's result is further from float64 than it may be; nothing is reported.
        CheckpointError: not a compressed checkpoint.
        UsageError: the device has not enough memory for it.
    """
    try:
        return _measured(folder, settings, model, device, dtype, command, progress or Progress())
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"the device has too little memory: {error}", "Give a smaller --batch, --lengths or --layers."
        ) from error


def _measured(
    folder: Path,
    settings: BenchSettings,
    model: Path | None,
    device: str,
    dtype: str,
    command: str,
    progress: Progress,
) -> dict[str, Any]:
    shape, layouts, checkpoint_dtype = read_layouts(folder)
    target = pick_device(device)
    chosen = pick_dtype(dtype, checkpoint_dtype, target)
    clock = Clock(target)
    with torch.inference_mode():
        rates = measure_rates(clock, chosen, settings.repetitions)
        result = BenchResult(rates, spread_layers(len(layouts), settings.layers))
        measured = [layouts[i] for i in result.layers]
        _bench_attention(result, measured, shape, settings, clock, chosen, progress)
    clock.release()
    if settings.new_tokens:
        _bench_model(result, folder, model, settings, target, chosen)
    else:
        result.skip("model", "left out by the request")
    return {
        "version": VERSION,
        **provenance(command),
        "checkpoint": folder.name,
        "device": describe_device(target),
        "dtype": str(chosen).removeprefix("torch."),
        "settings": asdict(settings),
        "flush_bytes": clock.flush_bytes,
        **asdict(result),
    }


def read_layouts(folder: Path) -> tuple[AttentionShape, list[LayerLayout], torch.dtype]:
    """Sizes, layouts and dtype of a compressed checkpoint; raises CheckpointError if it is none."""
    config = Checkpoint(folder).config
    stored = getattr(config, "quantization_config", None)
    if not isinstance(stored, dict) or stored.get("quant_method") != METHOD:
        raise CheckpointError(f"{folder}: not a compressed checkpoint.", "Give a folder that `rotor export` wrote.")
    shape = attention_shape(config)
    return shape, RotorConfig(**stored).layouts(shape), config.dtype or torch.float32


def spread_layers(num_layers: int, wanted: int) -> list[int]:
    """At most `wanted` layers, the first and the last among them where there are two."""
    count = min(num_layers, wanted)
    return sorted({round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count)})


def _bench_attention(
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
                makers = _problem_makers(layout, shape, batch_size, seq_len, length, dtype, generator)
                measured.append(_bench_layer(result, phase, makers, load, clock, settings.repetitions))
                advance(1)
            result.attention += _sum_of_layers(measured, load, clock.device, result.rates)


def _problem_makers(
    layout: LayerLayout,
    shape: AttentionShape,
    batch_size: int,
    seq_len: int,
    kv_len: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> dict[str, Callable[[], Problem]]:
    layouts = {
        "compressed": compressed_layout(layout),
        "uncompressed": uncompressed_layout(shape),
        "rebuilt": rebuilt_layout(layout),
    }
    return {
        kind: lambda each=each: random_problem(each, shape, batch_size, seq_len, kv_len, dtype, generator)  # type: ignore[misc]
        for kind, each in layouts.items()
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
        exact = truth(problem)
        plain = relative_error(checked_output(problem, pytorch_path(problem)()), exact)
        limit = max(2 * plain, ERROR_FLOOR[problem.key.dtype])
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
    limits = Device(rates.copy_bytes_per_s, rates.matmul_flops_per_s, 1.0, "measured")
    records = []
    for name, runs in runs_of.items():
        floor = sum(problem.work.cache_seconds(limits) for _, problem in runs)
        seconds, flops = medians[name], sum(problem.work.cache_flops for _, problem in runs)
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


def _bench_model(
    result: BenchResult,
    folder: Path,
    model: Path | None,
    settings: BenchSettings,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """The compressed model and its source, generating side by side."""
    recorded = read_json(folder / "rotor.json").get("source", {}).get("path")
    source = model if model is not None else folder.resolve() / str(recorded)
    folders = {"compressed": folder, "source": source}
    if model is None and not source.is_dir():
        result.skip("model, source", "the source model is not where rotor.json says; give --model")
        del folders["source"]
    models = {name: load_model(path, device, dtype) for name, path in folders.items()}
    generator = torch.Generator().manual_seed(settings.seed)
    result.checks += check_models(models, folders, generator)
    memory = settings.memory_bytes or physical_memory(device)
    longest = getattr(models["compressed"].config, "max_position_embeddings", None)
    for length in sorted({*settings.decode_lengths, *settings.prefill_lengths}):
        if longest is not None and length + settings.new_tokens + 1 > longest:
            prompt = longest - settings.new_tokens - 1
            result.skip("model", f"longer than the model's {longest} positions; up to {prompt} fits", length=length)
            continue
        for batch_size in settings.batch_sizes:
            load = ModelLoad(length, batch_size, settings.new_tokens)
            result.model += measure_models(models, load, max(1, settings.repetitions // 4), memory, generator)
