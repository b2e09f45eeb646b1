"""Side-by-side benchmark of a compressed checkpoint; refuses to report while a row's result is wrong."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from ..models.compressed import CompressedCheckpoint
from ..models.hardware import pick_device, pick_dtype
from ..models.loading import load_model
from ..policies import use_cache_policy
from ..progress import Progress
from .attention import bench_attention
from .clock import Clock, measure_rates
from .models import ModelLoad, check_models, measure_models, physical_memory
from .provenance import provenance
from .report import describe_device
from .settings import BenchResult, BenchSettings

VERSION = 1


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
    checkpoint = CompressedCheckpoint(folder)
    shape, layouts = checkpoint.shape, checkpoint.layouts
    target = pick_device(device)
    chosen = pick_dtype(dtype, checkpoint.dtype, target)
    clock = Clock(target)
    with torch.inference_mode():
        rates = measure_rates(clock, chosen, settings.repetitions)
        result = BenchResult(rates, spread_layers(len(layouts), settings.layers))
        measured = [layouts[i] for i in result.layers]
        bench_attention(result, measured, shape, settings, clock, chosen, progress)
    clock.release()
    if settings.new_tokens:
        _bench_model(result, checkpoint, model, settings, target, chosen)
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


def spread_layers(num_layers: int, wanted: int) -> list[int]:
    """At most `wanted` layers, the first and the last among them where there are two."""
    count = min(num_layers, wanted)
    return sorted({round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count)})


def _bench_model(
    result: BenchResult,
    checkpoint: CompressedCheckpoint,
    model: Path | None,
    settings: BenchSettings,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """The compressed model and its source, generating side by side."""
    source = model if model is not None else checkpoint.source_folder
    folders = {"compressed": checkpoint.folder, "source": source}
    if model is None and not source.is_dir():
        result.skip("model, source", "the source model is not where rotor.json says; give --model")
        del folders["source"]
    models = {name: load_model(path, device, dtype) for name, path in folders.items()}
    if settings.cache is not None:
        use_cache_policy(models["compressed"], settings.cache)
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
