"""A compressed checkpoint side by side with its alternatives: attention of its layers, and whole models generating."""

from __future__ import annotations

import time
from typing import Any

import torch

from ...checked import JsonObject
from ...errors import UsageError
from ...models.compressed import CompressedCheckpoint
from ...models.hardware import pick_device, pick_dtype
from ...models.loading import load_model
from ...models.sequences import bounded_seq_len
from ...options import with_fields_of
from ...policies import stored_bytes
from ...progress import Progress
from ...recipe.requests import BenchRequest
from .attention import UNCOMPRESSED, bench_layer
from .records import describe_device, provenance, quartiles

GPU_LOADS = (32768,), (8192,), (1, 8)
CPU_LOADS = (2048,), (512,), (1,)
"""Cached tokens, tokens of a prompt, and sequences in a batch, where nothing is asked for."""

LAYERS = 4
"""The most layers that are measured, at equal distances; times are their sum."""


def run_bench(request: BenchRequest) -> JsonObject:
    """Measure a compressed checkpoint beside the alternatives, in one run.

    Returns:
        What is written as JSON.
    Raises:
        NumericsError: a row's result is further from float64 than it may be; nothing is reported.
        CheckpointError: not a compressed checkpoint.
        UsageError: the device has not enough memory for it.
    """
    checkpoint, target, left_out = CompressedCheckpoint(request.folder), pick_device(request.device), dict[str, str]()
    chosen = pick_dtype(request.dtype, checkpoint.dtype, target)
    asked = request.lengths, request.prefill, request.batch
    usual = GPU_LOADS if target.type == "cuda" else CPU_LOADS
    decode, prefill, batches = (given or default for given, default in zip(asked, usual, strict=True))
    phases = [("decode", length) for length in decode] + [("prefill", length) for length in prefill]
    loads = [(*phase, batch) for phase in phases for batch in batches]
    last, count = len(checkpoint.layouts) - 1, min(len(checkpoint.layouts), LAYERS)
    layers = sorted({round(i * last / max(1, count - 1)) for i in range(count)})
    folders = {"model, compressed": checkpoint.folder, "model, source": request.model or checkpoint.source_folder}
    if not folders["model, source"].is_dir():
        left_out["model, source"] = "the source model is not where rotor.json says; give --model"
        del folders["model, source"]
    attention, records = [], []
    generator = torch.Generator(target).manual_seed(0)
    try:
        with (request.progress or Progress()).task("attention", len(loads), "loads") as advance, torch.inference_mode():
            for load in loads:
                attention += _attention(checkpoint, load, layers, chosen, generator, request.repetitions, left_out)
                advance(1)
        models = {name: load_model(path, target, chosen) for name, path in folders.items() if request.new_tokens}
        for length in sorted({*decode, *prefill}) if models else ():
            longest = min(bounded_seq_len(1 << 30, m.config) for m in models.values())
            if length + request.new_tokens + 1 > longest:
                left_out[f"model, {length} tokens"] = f"longer than the model's {longest} positions"
                continue
            for batch in batches:
                records += _generated(models, request, length, batch)
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"the device has too little memory: {error}", "Give a smaller --batch or --lengths."
        ) from error
    return {
        **provenance(request.command),
        "checkpoint": request.folder.name,
        "device": describe_device(target),
        "dtype": str(chosen).removeprefix("torch."),
        "settings": {
            "decode_lengths": request.lengths or None,
            "prefill_lengths": request.prefill or None,
            "batch_sizes": request.batch or None,
            "repetitions": request.repetitions,
            "new_tokens": request.new_tokens,
        },
        "layers": layers,
        "attention": attention,
        "model": records,
        "not_measured": left_out,
    }


bench = with_fields_of(BenchRequest, run_bench, "bench")


def _attention(
    checkpoint: CompressedCheckpoint,
    load: tuple[str, int, int],
    layers: list[int],
    dtype: torch.dtype,
    generator: torch.Generator,
    repetitions: int,
    left_out: dict[str, str],
) -> list[JsonObject]:
    """Every row at a load, times summed over layers; `over_uncompressed` is over the fastest at 16 bits."""
    phase, length, batch = load
    sizes = batch, 1 if phase == "decode" else length, length
    timed = [
        bench_layer(checkpoint.layouts[i], checkpoint.shape, sizes, dtype, generator, repetitions, left_out)
        for i in layers
    ]
    records: list[JsonObject] = []
    for name in (name for name in timed[0] if all(name in rows for rows in timed)):
        seconds = {part: sum(rows[name][part] for rows in timed) for part in ("median", "low", "high")}
        record = {"row": name, "phase": phase, "length": length, "batch_size": batch, "seconds": seconds}
        records.append({**record, "largest_error": max(rows[name]["error"] for rows in timed)})
    fastest = min(record["seconds"]["median"] for record in records if record["row"] in UNCOMPRESSED)
    return [record | {"over_uncompressed": record["seconds"]["median"] / fastest} for record in records]


def _generated(models: JsonObject, request: BenchRequest, length: int, batch_size: int) -> list[JsonObject]:
    """Models in turn: time to the first token (a prompt's), and over the source's; between tokens; cache bytes."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(model.config.get_text_config().vocab_size for model in models.values())
    ids = torch.randint(vocabulary, (batch_size, length), generator=generator)
    first: dict[str, list[float]] = {name: [] for name in models}
    between: dict[str, list[float]] = {name: [] for name in models}
    cached = {}
    for repetition in range(1 + max(1, request.repetitions // 4)):
        for name, model in models.items():
            to_first, _ = _generate(model, ids, 1)
            whole, cached[name] = _generate(model, ids, 1 + request.new_tokens)
            if repetition:  # once to warm up
                first[name].append(to_first)
                between[name].append((whole - to_first) / request.new_tokens)
    source = quartiles(first["model, source"])["median"] if "model, source" in first else None
    about = {"length": length, "batch_size": batch_size, "new_tokens": request.new_tokens}
    return [
        {
            "row": name,
            **about,
            "time_to_first_token_s": quartiles(first[name]),
            "first_token_over_source": source and quartiles(first[name])["median"] / source,
            "time_between_tokens_s": quartiles(between[name]),
            "kv_cache_bytes": cached[name],
        }
        for name in models
    ]


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
