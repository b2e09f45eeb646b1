"""A compressed checkpoint side by side with its alternatives: attention of its layers, and whole models generating."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from ..models.compressed import CompressedCheckpoint, open_model
from ..models.hardware import pick_device, pick_dtype
from ..models.loading import load_model
from ..policies import find_policy, stored_bytes, use_cache_policy
from ..progress import Progress
from .attention import bench_layer, quartiles
from .records import describe_device, provenance

GPU_LOADS = (32768,), (8192,), (1, 8)
CPU_LOADS = (2048,), (512,), (1,)
"""Cached tokens, tokens of a prompt, and sequences in a batch, where nothing is asked for."""


@dataclass(frozen=True)
class BenchSettings:
    """What is measured.

    decode_lengths: cached tokens of each sequence. prefill_lengths: of prompts. layers: at most so many, spread over
    the depth; times are their sum. new_tokens: that whole models generate, 0 to leave them out.
    """

    decode_lengths: tuple[int, ...]
    prefill_lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    layers: int = 4
    repetitions: int = 20
    new_tokens: int = 32


def bench(
    folder: Path,
    settings: BenchSettings,
    *,
    model: Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    cache: str | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure a compressed checkpoint beside the alternatives, in one run; with `cache` also an uncompressed model.

    Args:
        folder: what `rotor export` wrote, or with `cache` an uncompressed model. cache: a policy, as --cache names it,
            with which generation is measured, too. model: the source model; by default where rotor.json says.
        command: recorded.
    Returns:
        What is written as JSON.
    Raises:
        NumericsError: a row's result is further from float64 than it may be; nothing is reported.
        CheckpointError: not a compressed checkpoint.
        UsageError: the device has not enough memory for it.
    """
    policy = None if cache is None else find_policy(cache)
    checkpoint = CompressedCheckpoint(folder) if policy is None else open_model(folder)
    target = pick_device(device)
    chosen = pick_dtype(dtype, checkpoint.config.dtype or torch.float32, target)
    left_out: dict[str, str] = {}
    attention, layers, folders = [], [], {"model, source": checkpoint.folder}
    try:
        if isinstance(checkpoint, CompressedCheckpoint):
            layers = spread_layers(len(checkpoint.layouts), settings.layers)
            attention = _attention(checkpoint, settings, layers, target, chosen, progress or Progress(), left_out)
            folders = {"model, compressed": checkpoint.folder, "model, source": model or checkpoint.source_folder}
        loaded = _loaded(folders, target, chosen, left_out) if settings.new_tokens else {}
        if policy is not None and loaded:
            name = f"model, {cache}"
            loaded[name] = load_model(checkpoint.folder, target, chosen)
            use_cache_policy(loaded[name], policy)
        models = _models(loaded, settings, target, left_out)
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"the device has too little memory: {error}", "Give a smaller --batch, --lengths or --layers."
        ) from error
    return {
        **provenance(command),
        "checkpoint": folder.name,
        "device": describe_device(target),
        "dtype": str(chosen).removeprefix("torch."),
        "settings": asdict(settings),
        "layers": layers,
        "attention": attention,
        "model": models,
        "not_measured": left_out,
    }


def spread_layers(num_layers: int, wanted: int) -> list[int]:
    """At most `wanted` layers, the first and the last among them where there are two."""
    count = min(num_layers, wanted)
    return sorted({round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count)})


def _attention(
    checkpoint: CompressedCheckpoint,
    settings: BenchSettings,
    layers: list[int],
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    left_out: dict[str, str],
) -> list[dict[str, Any]]:
    """Every row at every load, times summed over layers; `over_stock` is over the fastest SDPA at the same load."""
    lengths = [("decode", n) for n in settings.decode_lengths] + [("prefill", n) for n in settings.prefill_lengths]
    loads = [(*phase, batch) for phase in lengths for batch in settings.batch_sizes]
    generator = torch.Generator(device).manual_seed(0)
    records: list[dict[str, Any]] = []
    with progress.task("attention", len(loads) * len(layers), "layers") as advance, torch.inference_mode():
        for phase, length, batch in loads:
            load, found = (batch, 1 if phase == "decode" else length, length), []
            for layer in layers:
                layout, shape = checkpoint.layouts[layer], checkpoint.shape
                found.append(bench_layer(layout, shape, load, dtype, generator, settings.repetitions, left_out))
                advance(1)
            sums = {
                name: {part: sum(rows[name][part] for rows in found) for part in ("median", "low", "high")}
                for name in found[0]
                if all(name in rows for rows in found)
            }
            stock = min(of["median"] for name, of in sums.items() if name.startswith("SDPA"))
            about = {"phase": phase, "length": length, "batch_size": batch}
            for name, seconds in sums.items():
                errors = max(rows[name]["error"] for rows in found)
                over = {"over_stock": seconds["median"] / stock, "largest_error": errors}
                records.append({"row": name, **about, "seconds": seconds, **over})
    return records


def _loaded(
    folders: dict[str, Path], device: torch.device, dtype: torch.dtype, left_out: dict[str, str]
) -> dict[str, Any]:
    if not folders["model, source"].is_dir():
        left_out["model, source"] = "the source model is not where rotor.json says; give --model"
        del folders["model, source"]
    return {name: load_model(path, device, dtype) for name, path in folders.items()}


def _models(
    models: dict[str, Any], settings: BenchSettings, device: torch.device, left_out: dict[str, str]
) -> list[dict[str, Any]]:
    """Models in turn: transformers' generate at every load."""
    longest = min((getattr(m.config, "max_position_embeddings", None) or 1 << 30 for m in models.values()), default=0)
    records: list[dict[str, Any]] = []
    if not models:
        return records
    for length in sorted({*settings.decode_lengths, *settings.prefill_lengths}):
        if length + settings.new_tokens + 1 > longest:
            left_out[f"model, {length} tokens"] = f"longer than the model's {longest} positions"
            continue
        for batch in settings.batch_sizes:
            records += _generated(models, settings, length, batch, int(describe_device(device)["memory_bytes"]))
    return records


def _generated(
    models: dict[str, Any], settings: BenchSettings, length: int, batch_size: int, memory_bytes: int
) -> list[dict[str, Any]]:
    """Time to the first token and between tokens, bytes of the cache, and how many such sequences would fit."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(model.config.vocab_size for model in models.values())
    ids = torch.randint(vocabulary, (batch_size, length), generator=generator)
    first: dict[str, list[float]] = {name: [] for name in models}
    between: dict[str, list[float]] = {name: [] for name in models}
    cached = {}
    for repetition in range(1 + max(1, settings.repetitions // 4)):
        for name, model in models.items():
            to_first, _ = _generate(model, ids, 1)
            whole, cached[name] = _generate(model, ids, 1 + settings.new_tokens)
            if repetition:  # once to warm up
                first[name].append(to_first)
                between[name].append((whole - to_first) / settings.new_tokens)
    records = []
    for name, model in models.items():
        weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        record = {"row": name, "length": length, "batch_size": batch_size, "new_tokens": settings.new_tokens}
        record |= {"time_to_first_token_s": quartiles(first[name]), "time_between_tokens_s": quartiles(between[name])}
        record |= {"kv_cache_bytes": cached[name], "weight_bytes": weights}
        record["largest_batch"] = max(0, (memory_bytes - weights) * batch_size // cached[name])
        records.append(record)
    return records


def _generate(model: Any, ids: torch.Tensor, new_tokens: int) -> tuple[float, int]:
    """Seconds of one greedy generate, and the bytes of its cache at the end."""
    ids = ids.to(model.device)
    start = time.perf_counter()
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), min_new_tokens=new_tokens, max_new_tokens=new_tokens,
        do_sample=False, pad_token_id=0, return_dict_in_generate=True,
    )  # fmt: skip
    output.sequences.cpu()  # waits for a GPU
    return time.perf_counter() - start, stored_bytes(output.past_key_values)
