"""A compressed checkpoint beside its source in vLLM: tokens of cache in equal memory, throughput, latency.

Both engines run at once, each with a cache of the same bytes, and are measured in turn; nothing is reported while one's
log-probabilities are not those of its model in float64.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..errors import NumericsError, UsageError
from ..format.layout import kv_bytes_per_token, uncompressed_kv_bytes_per_token
from ..models.compressed import CompressedCheckpoint
from ..models.hardware import pick_device, pick_dtype
from ..models.loading import load_model
from .clock import Seconds
from .engine import Engine, EngineOptions, check_installed
from .models import CHECKED_TOKENS, TOLERANCE
from .provenance import provenance
from .report import describe_device

VERSION = 1


@dataclass(frozen=True)
class ServingSettings:
    """What is measured.

    concurrency: requests sent at once. prompt_tokens, new_tokens: of each. cache_bytes: of each engine's cache.
    """

    concurrency: tuple[int, ...] = (1, 4, 16)
    prompt_tokens: int = 512
    new_tokens: int = 32
    cache_bytes: int = 1 << 30
    repetitions: int = 5
    seed: int = 0


def bench_serving(
    folder: Path,
    settings: ServingSettings,
    *,
    model: Path | None = None,
    dtype: str = "auto",
    command: str = "",
) -> dict[str, Any]:
    """Serve a compressed checkpoint and its source side by side, in one run, on the device that vLLM is built for.

    Args:
        folder: what `rotor export` wrote. model: the source model; by default where rotor.json says.
        command: recorded.
    Returns:
        What is written as JSON.
    Raises:
        NumericsError: an engine's log-probabilities are further from float64 than they may be.
        CheckpointError: not a compressed checkpoint.
        UsageError: vLLM is not installed, or there is no source model.
        RotorError: vLLM does not run one of the models.
    """
    check_installed()
    checkpoint = CompressedCheckpoint(folder)
    source = model if model is not None else checkpoint.source_folder
    if not source.is_dir():
        raise UsageError(f"the source model is not at {source}.", "Give it with --model.")
    device = pick_device("auto")
    chosen = pick_dtype(dtype, checkpoint.dtype, device)
    name = str(chosen).removeprefix("torch.")
    longest = settings.prompt_tokens + settings.new_tokens
    folders = {"source": source, "compressed": checkpoint.folder}
    checks, rows = [], []
    with ExitStack() as stack:
        most, eager = max(settings.concurrency), device.type == "cpu"
        starting = {
            row: Engine(EngineOptions(place, name, settings.cache_bytes, longest, most, eager))
            for row, place in folders.items()
        }
        engines = {row: stack.enter_context(engine) for row, engine in starting.items()}
        generator = torch.Generator().manual_seed(settings.seed)
        for row, engine in engines.items():
            checks.append(_checked(row, engine, folders[row], chosen, generator))
        for concurrency in settings.concurrency:
            rows += _measured(engines, concurrency, settings, checkpoint.config.vocab_size, generator)
        cache = _cache(engines, checkpoint, chosen.itemsize)
        version = engines["compressed"].version
    about = provenance(command)
    about["versions"]["vllm"] = version
    return {
        "version": VERSION,
        **about,
        "checkpoint": checkpoint.folder.name,
        "device": describe_device(device),
        "dtype": name,
        "settings": {**vars(settings), "enforce_eager": device.type == "cpu"},
        "cache": cache,
        "serving": rows,
        "checks": checks,
    }


def _cache(engines: dict[str, Engine], checkpoint: CompressedCheckpoint, element_bytes: int) -> dict[str, Any]:
    """Tokens that fit into equal memory, and what the bytes of their rows promise."""
    tokens = {row: engine.cache_tokens for row, engine in engines.items()}
    sizes = {
        "source": uncompressed_kv_bytes_per_token(checkpoint.shape, element_bytes),
        "compressed": kv_bytes_per_token(checkpoint.layouts, element_bytes),
    }
    return {
        "tokens": tokens,
        "bytes_per_token": sizes,
        "ratio_of_tokens": tokens["compressed"] / tokens["source"],
        "ratio_of_bytes": sizes["source"] / sizes["compressed"],
    }


def _checked(row: str, engine: Engine, folder: Path, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """Log-probabilities of a short prompt against the model in float64 on the CPU."""
    model = load_model(folder, torch.device("cpu"), torch.float64)
    prompt = torch.randint(model.config.vocab_size, (CHECKED_TOKENS,), generator=generator)
    with torch.inference_mode():
        exact = model(prompt[None]).logits[0, :-1].log_softmax(-1).gather(-1, prompt[1:, None])[:, 0]
    got = torch.tensor(engine.log_probabilities(prompt.tolist()), dtype=torch.float64)
    error, limit = float((got - exact).norm() / exact.norm()), TOLERANCE[dtype]
    if not error <= limit:
        raise NumericsError(
            f"vLLM, {row}: log-probabilities are off by {error:.3g}, allowed is {limit:.3g}; nothing is reported.",
            "Run `rotor validate`; ROTOR_ATTENTION=reference tells whether a kernel is the cause.",
        )
    return {"row": f"vllm, {row}", "error": error, "limit": limit}


def _measured(
    engines: dict[str, Engine],
    concurrency: int,
    settings: ServingSettings,
    vocabulary: int,
    generator: torch.Generator,
) -> list[dict[str, Any]]:
    """The same prompts through each engine in turn, `repetitions` times over, after once to warm up."""
    found: dict[str, list[dict[str, Any]]] = {row: [] for row in engines}
    for repetition in range(1 + settings.repetitions):
        prompts = torch.randint(vocabulary, (concurrency, settings.prompt_tokens), generator=generator).tolist()
        for row, engine in engines.items():
            result = engine.generate(prompts, settings.new_tokens)
            if repetition:
                found[row].append(result)
    rows = []
    for row, results in found.items():
        seconds = Seconds.of([r["seconds"] for r in results])
        rows.append(
            {
                "row": f"vllm, {row}",
                "concurrency": concurrency,
                "prompt_tokens": settings.prompt_tokens,
                "new_tokens": settings.new_tokens,
                "seconds": vars(seconds),
                "tokens_per_s": concurrency * settings.new_tokens / seconds.median,
                "time_to_first_token_s": vars(Seconds.of([s for r in results for s in r["first_token_s"]])),
                "time_between_tokens_s": vars(Seconds.of([s for r in results for s in r["between_tokens_s"]])),
                "preemptions": median(r["preemptions"] for r in results),
            }
        )
    source = next(r for r in rows if r["row"] == "vllm, source")
    for r in rows:
        r["throughput_over_source"] = r["tokens_per_s"] / source["tokens_per_s"]
    return rows
