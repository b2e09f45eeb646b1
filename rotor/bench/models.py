"""Whole models in the benchmark: time to first token and between tokens with transformers' generate, and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..errors import NumericsError
from ..models.loading import load_model
from ..policies import stored_bytes
from .clock import Seconds

CHECKED_TOKENS = 32
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Relative error of logits that a model may have against itself in float64, by dtype: rounding through all layers."""


@dataclass(frozen=True)
class ModelLoad:
    """One measurement: prompts of `length` tokens, `batch_size` of them, and `new_tokens` after each."""

    length: int
    batch_size: int
    new_tokens: int


def check_models(
    models: Mapping[str, Any], folders: Mapping[str, Path], generator: torch.Generator
) -> list[dict[str, Any]]:
    """Each model's logits on a short prompt against the same model in float64 on the CPU, in plain PyTorch.

    Raises:
        NumericsError: a model is further off than TOLERANCE; names it.
    """
    checks = []
    for name, model in models.items():
        ids = _prompt(model, 1, CHECKED_TOKENS, generator)
        with torch.inference_mode():
            got = model(ids).logits.double().cpu()
            exact = load_model(folders[name], torch.device("cpu"), torch.float64)(ids.cpu()).logits
        error, limit = float((got - exact).norm() / exact.norm()), TOLERANCE[model.dtype]
        checks.append({"row": f"model, {name}", "error": error, "limit": limit})
        if not error <= limit:
            raise NumericsError(
                f"benchmark row model, {name}: logits are off by {error:.3g}, allowed is {limit:.3g}; nothing is "
                "reported.",
                "Run `rotor validate`; ROTOR_ATTENTION=reference tells whether a kernel is the cause.",
            )
    return checks


def measure_models(
    models: Mapping[str, Any], load: ModelLoad, repetitions: int, memory_bytes: int, generator: torch.Generator
) -> list[dict[str, Any]]:
    """Generate with every model in turn, `repetitions` times over.

    Args:
        memory_bytes: what the largest batch has to fit in.
    Returns:
        For each model its times and memory; see `_record`.
    """
    prompts = {name: _prompt(model, load.batch_size, load.length, generator) for name, model in models.items()}
    first: dict[str, list[float]] = {name: [] for name in models}
    between: dict[str, list[float]] = {name: [] for name in models}
    memory: dict[str, tuple[int, int | None]] = {}
    for name, model in models.items():
        _generate(model, prompts[name], 2)  # compiles kernels, and fills the tables of rotations
    for _ in range(repetitions):
        for name, model in models.items():
            begin = _peak_reset(model.device)
            to_first, _ = _generate(model, prompts[name], 1)
            whole, filled = _generate(model, prompts[name], 1 + load.new_tokens)
            first[name].append(to_first)
            between[name].append((whole - to_first) / load.new_tokens)
            memory[name] = filled, _peak(model.device, begin)
    return [_record(n, models[n], load, first[n], between[n], *memory[n], memory_bytes) for n in models]


def _record(
    name: str,
    model: Any,
    load: ModelLoad,
    first: list[float],
    between: list[float],
    filled: int,
    peak_bytes: int | None,
    memory_bytes: int,
) -> dict[str, Any]:
    """filled: bytes of the cache at the end.

    peak_bytes: allocated on the GPU while generating, without any model's weights; None on a CPU.

    largest_batch: sequences of this length whose share of that (on a CPU: of the cache alone) fits beside the weights.
    """
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    each = (filled if peak_bytes is None else peak_bytes) / load.batch_size
    return {
        "row": f"model, {name}",
        "device": model.device.type,
        "length": load.length,
        "batch_size": load.batch_size,
        "new_tokens": load.new_tokens,
        "time_to_first_token_s": vars(Seconds.of(first)),
        "time_between_tokens_s": vars(Seconds.of(between)),
        "tokens_per_s": load.batch_size / max(median(between), 1e-12),
        "kv_cache_bytes": filled,
        "weight_bytes": weights,
        "peak_bytes": peak_bytes,
        "largest_batch": max(0, int((memory_bytes - weights) / each)),
        "largest_batch_from": "cache bytes and weights" if peak_bytes is None else "measured peak and weights",
    }


def _generate(model: Any, ids: Tensor, new_tokens: int) -> tuple[float, int]:
    """Seconds of one greedy generate, and the bytes of its cache at the end."""
    _synchronise(model.device)
    start = time.perf_counter()
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    _synchronise(model.device)
    seconds = time.perf_counter() - start
    return seconds, stored_bytes(output.past_key_values)


def _prompt(model: Any, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
    """Random tokens; every model of a run has the same vocabulary."""
    vocabulary = model.config.vocab_size
    return torch.randint(vocabulary, (batch_size, length), generator=generator, device="cpu").to(model.device)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_reset(device: torch.device) -> int:
    """Begin to watch the peak; what is allocated now."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device, before: int) -> int | None:
    return torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None


def physical_memory(device: torch.device) -> int:
    """All memory of the device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
