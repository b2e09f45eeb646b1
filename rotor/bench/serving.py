"""A compressed checkpoint beside its source in vLLM: tokens of cache in equal memory, throughput, latency.

Each engine runs in a process of its own with a cache of the same bytes, and both are measured in turn.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..errors import RotorError, UsageError
from ..format.layout import kv_bytes_per_token, uncompressed_kv_bytes_per_token
from ..installing import pip_install
from ..models.compressed import CompressedCheckpoint
from ..models.hardware import pick_device, pick_dtype
from .attention import quartiles
from .records import describe_device, provenance


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


def bench_serving(
    folder: Path, settings: ServingSettings, *, model: Path | None = None, dtype: str = "auto", command: str = ""
) -> dict[str, Any]:
    """Serve a compressed checkpoint and its source side by side, in one run, on the device that vLLM is built for.

    Args:
        folder: what `rotor export` wrote. model: the source model; by default where rotor.json says.
        command: recorded.
    Returns:
        What is written as JSON.
    Raises:
        CheckpointError: not a compressed checkpoint.
        UsageError: vLLM is not installed, or there is no source model.
        RotorError: vLLM does not run one of the models.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("--engine vllm: vLLM is not installed here.", pip_install("vllm"))
    checkpoint = CompressedCheckpoint(folder)
    folders = {"source": model or checkpoint.source_folder, "compressed": checkpoint.folder}
    if not folders["source"].is_dir():
        raise UsageError(f"the source model is not at {folders['source']}.", "Give it with --model.")
    device = pick_device("auto")
    chosen = pick_dtype(dtype, checkpoint.dtype, device)
    options = {
        "dtype": str(chosen).removeprefix("torch."),
        "kv_cache_memory_bytes": settings.cache_bytes,
        "max_model_len": settings.prompt_tokens + settings.new_tokens,
        "max_num_seqs": max(settings.concurrency),
        "enforce_eager": device.type == "cpu",  # torch.compile takes minutes there
    }
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, context) as source, ProcessPoolExecutor(1, context) as compressed:
            engines = {"source": source, "compressed": compressed}
            started = {row: pool.submit(_start, str(folders[row]), options) for row, pool in engines.items()}
            tokens, versions = zip(*(each.result() for each in started.values()), strict=True)
            rows = _measured(engines, settings, checkpoint.config.vocab_size)
    except (BrokenProcessPool, RuntimeError, ValueError) as error:  # what vLLM raises comes as it is
        raise RotorError(f"vLLM: {type(error).__name__}: {error}", "What vLLM said stands above.") from error
    before = uncompressed_kv_bytes_per_token(checkpoint.shape, chosen.itemsize)
    after = kv_bytes_per_token(checkpoint.layouts, chosen.itemsize)
    return {
        **provenance(command, vllm=versions[0]),
        "checkpoint": checkpoint.folder.name,
        "device": describe_device(device),
        **options,
        "settings": asdict(settings),
        "cache": {
            "tokens": dict(zip(engines, tokens, strict=True)),
            "bytes_per_token": {"source": before, "compressed": after},
            "ratio_of_tokens": tokens[1] / tokens[0],
            "ratio_of_bytes": before / after,
        },
        "serving": rows,
    }


def _measured(
    engines: dict[str, ProcessPoolExecutor], settings: ServingSettings, vocabulary: int
) -> list[dict[str, Any]]:
    """The same prompts through each engine in turn, `repetitions` times over, after once to warm up."""
    generator, rows = torch.Generator().manual_seed(0), []
    for concurrency in settings.concurrency:
        found: dict[str, list[dict[str, Any]]] = {row: [] for row in engines}
        for _ in range(1 + settings.repetitions):
            prompts = torch.randint(vocabulary, (concurrency, settings.prompt_tokens), generator=generator).tolist()
            for row, engine in engines.items():
                found[row].append(engine.submit(_generate, prompts, settings.new_tokens).result())
        seconds = {row: quartiles([r["seconds"] for r in results[1:]]) for row, results in found.items()}
        for row, (_, *results) in found.items():
            of_requests = "time_to_first_token_s", "time_between_tokens_s"
            rows.append(
                {
                    "row": f"vllm, {row}",
                    "concurrency": concurrency,
                    "seconds": seconds[row],
                    **{kind: quartiles([s for r in results for s in r[kind]]) for kind in of_requests},
                    "tokens_per_s": concurrency * settings.new_tokens / seconds[row]["median"],
                    "throughput_over_source": seconds["source"]["median"] / seconds[row]["median"],
                    "preemptions": median(r["preemptions"] for r in results),
                }
            )
    return rows


_engine: Any = None
"""In an engine's process."""


def _start(folder: str, options: dict[str, Any]) -> tuple[int, str]:
    """Tokens that the cache has room for, and vLLM's version."""
    global _engine
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm

    # No prompt comes twice, so that there is nothing to cache of a prefix.
    _engine = vllm.LLM(model=folder, enable_prefix_caching=False, disable_log_stats=False, **options)
    cache = _engine.llm_engine.vllm_config.cache_config
    return cache.num_gpu_blocks * cache.block_size, vllm.__version__


def _generate(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """All prompts at once, greedy: seconds of the whole, and of each request."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = _engine.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
    seconds, stats = time.perf_counter() - start, [output.metrics for output in outputs]
    return {
        "seconds": seconds,
        "time_to_first_token_s": [s.first_token_latency for s in stats],
        "time_between_tokens_s": [(s.last_token_ts - s.first_token_ts) / max(1, new_tokens - 1) for s in stats],
        "preemptions": sum(s.num_preemptions for s in stats),
    }
