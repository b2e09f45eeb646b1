"""A compressed checkpoint beside its source in vLLM: tokens of cache in equal memory, throughput, latency.

Each is served by vLLM's OpenAI server with a cache of the same bytes, and `vllm bench serve` loads both in turn.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import socket
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import RotorError, UsageError
from ..format.layout import kv_bytes_per_token, uncompressed_kv_bytes_per_token
from ..installing import pip_install
from ..models.compressed import CompressedCheckpoint
from ..models.hardware import pick_device, pick_dtype
from .records import describe_device, provenance, quartiles

START_SECONDS = 900
"""That a server may take to answer."""

ROUNDS = 4
"""Requests behind one another in each place of those in flight."""

PREEMPTIONS = "vllm:num_preemptions_total"


@dataclass(frozen=True)
class ServingSettings:
    """What is measured.

    concurrency: requests in flight. prompt_tokens, new_tokens: of each. cache_bytes: of each server's cache.
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
        RotorError: vLLM does not serve one of the models, or fails at a request.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UsageError("--engine vllm: vLLM is not installed here.", pip_install("vllm"))
    checkpoint = CompressedCheckpoint(folder)
    folders = {"source": model or checkpoint.source_folder, "compressed": checkpoint.folder}
    if not folders["source"].is_dir():
        raise UsageError(f"the source model is not at {folders['source']}.", "Give it with --model.")
    device = pick_device("auto")
    chosen = pick_dtype(dtype, checkpoint.dtype, device)
    # Prompts are random text, which may be some tokens longer than asked for.
    options = {"dtype": str(chosen).removeprefix("torch."), "kv-cache-memory-bytes": settings.cache_bytes}
    options |= {
        "max-model-len": settings.prompt_tokens + settings.new_tokens + 16,
        "max-num-seqs": max(settings.concurrency),
    }
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, context) as pool:  # in a process of its own, as vLLM changes the one that it is in
            version, tokens, rows = pool.submit(_served, folders, options, device.type == "cpu", settings).result()
    except (BrokenProcessPool, OSError, RuntimeError, ValueError) as error:  # what vLLM raises comes as it is
        raise RotorError(f"vLLM: {type(error).__name__}: {error}", "What vLLM said stands above.") from error
    before = uncompressed_kv_bytes_per_token(checkpoint.shape, chosen.itemsize)
    after = kv_bytes_per_token(checkpoint.layouts, chosen.itemsize)
    return {
        **provenance(command, vllm=version),
        "checkpoint": checkpoint.folder.name,
        "device": describe_device(device),
        "server": options,
        "settings": asdict(settings),
        "cache": {
            "tokens": tokens,
            "bytes_per_token": {"source": before, "compressed": after},
            "ratio_of_tokens": tokens["compressed"] / tokens["source"],
            "ratio_of_bytes": before / after,
        },
        "serving": rows,
    }


def _served(
    folders: dict[str, Path], options: dict[str, Any], eager: bool, settings: ServingSettings
) -> tuple[str, dict[str, int], list[dict[str, Any]]]:
    """vLLM's version, the tokens that each cache has room for, and what was measured."""
    os.environ.update(
        VLLM_LOGGING_STREAM="ext://sys.stderr", VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
    )
    import vllm
    from vllm.benchmarks.sweep.server import ServerProcess

    # No prompt comes twice, so that there is nothing to cache of a prefix; torch.compile takes minutes on a CPU. Not by
    # `vllm serve`, which wants metadata that vLLM for CPUs lacks.
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--no-enable-prefix-caching"]
    program += ["--enforce-eager"] * eager
    addresses, tokens = {}, {}
    with ExitStack() as stack, redirect_stdout(StringIO()):
        for row, folder in folders.items():
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            own = _words({"model": folder, "host": "127.0.0.1", "port": port, "served-model-name": row, **options})
            server = stack.enter_context(ServerProcess([*program, *own], [], show_stdout=False))
            server.wait_until_ready(START_SECONDS)
            addresses[row] = f"http://127.0.0.1:{port}"
            labels = _samples(addresses[row], "vllm:cache_config_info")[0].labels
            tokens[row] = int(labels["num_gpu_blocks"]) * int(labels["block_size"])
        return vllm.__version__, tokens, _measured(addresses, folders["compressed"], settings)


def _words(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _samples(address: str, name: str) -> list[Any]:
    """Of a metric of a server."""
    import requests
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(requests.get(f"{address}/metrics", timeout=60).text)
    return [sample for family in families for sample in family.samples if sample.name == name]


def _measured(addresses: dict[str, str], tokenizer: Path, settings: ServingSettings) -> list[dict[str, Any]]:
    """The same requests to each server in turn, `repetitions` times over, after once to warm up."""
    rows, times = [], {"time_to_first_token_s": "ttft", "time_between_tokens_s": "tpot"}
    for concurrency in settings.concurrency:
        found: dict[str, list[dict[str, float]]] = {row: [] for row in addresses}
        for seed in range(1 + settings.repetitions):
            for row, address in addresses.items():
                found[row].append(_load(address, row, tokenizer, settings, concurrency, 1000 * concurrency + seed))
        rates = {row: quartiles([r["output_throughput"] for r in runs[1:]]) for row, runs in found.items()}
        for row, (_, *runs) in found.items():
            about: dict[str, Any] = {"row": f"vllm, {row}", "concurrency": concurrency, "tokens_per_s": rates[row]}
            about |= {of: quartiles([1e-3 * r[f"median_{key}_ms"] for r in runs]) for of, key in times.items()}
            about["throughput_over_source"] = rates[row]["median"] / rates["source"]["median"]
            rows.append({**about, "preemptions": median(r["preemptions"] for r in runs)})
    return rows


def _load(
    address: str, model: str, tokenizer: Path, settings: ServingSettings, concurrency: int, seed: int
) -> dict[str, float]:
    """What `vllm bench serve` finds, and how many requests were preempted."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    requests = {"num-prompts": ROUNDS * concurrency, "max-concurrency": concurrency, "seed": seed, "temperature": 0}
    requests |= {"random-input-len": settings.prompt_tokens, "random-output-len": settings.new_tokens}
    options = {"base-url": address, "model": model, "tokenizer": tokenizer, "dataset-name": "random", **requests}
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    preempted = [sample.value for sample in _samples(address, PREEMPTIONS)]
    found = main(parser.parse_args([*_words(options), "--ignore-eos", "--disable-tqdm", "--save-detailed"]))
    if found["failed"]:
        raise RuntimeError(f"{found['failed']} requests to {model} failed: {max(found['errors'])[-500:]}")
    return {**found, "preemptions": sum(sample.value for sample in _samples(address, PREEMPTIONS)) - sum(preempted)}
