"""Speed, measured: bench, gpu."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import UsageError
from .app import check_folder, check_results, command, command_line, numbers, print_json
from .console import in_bytes, print_table, say, show_progress
from .options import Count, DeviceOptions

LAYERS = 4
"""Layers that `rotor bench` measures where nothing else is asked for."""


@command(epilog="Example: rotor bench out/demo --lengths 32768 --batch 1,8 -o bench.json")
def bench(
    folder: Path,
    compute: DeviceOptions,
    out: Path | None = None,
    lengths: str | None = None,
    prefill: str | None = None,
    batch: str | None = None,
    layers: Count = LAYERS,
    repetitions: Count = 20,
    new_tokens: Annotated[int, typer.Option(min=0)] = 32,
    model: Path | None = None,
    engine: Literal["transformers", "vllm"] = "transformers",
    cache_mb: Annotated[float | None, typer.Option("--cache-mb", min=0.1)] = None,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Measure attention and generation of a checkpoint beside PyTorch's, a Palu-style baseline and the source model.

    Every row of attention is compared with float64 first; if one is wrong, nothing is reported. Without a GPU only what
    a CPU runs is measured, and the Triton kernels are listed as not measured.

    With --engine vllm: tokens of cache in equal memory, throughput, latency and preemptions by `vllm bench serve`, on
    the device that vLLM is built for. --batch are requests at once (1,4,16), --prefill tokens of a prompt (512);
    --lengths, --layers and --device do not apply.

    Args:
        out: JSON file to write.
        lengths: Cached tokens when decoding, as in 8192,32768. [32768; on a CPU 2048]
        prefill: Tokens of a prompt. [8192; on a CPU 512]
        batch: Sequences in a batch. [1,8; on a CPU 1]
        layers: Layers to measure, spread over the depth.
        repetitions: Of every row of the attention; of a model a quarter.
        new_tokens: Tokens that whole models generate; 0 leaves them out.
        engine: transformers, or vllm: the checkpoint and its source served side by side.
        cache_mb: Megabytes of cache of each server, with --engine vllm. [1074]
    """
    check_results(out)
    served = engine == "vllm"
    in_vain = {"--lengths": lengths, "--layers": layers != LAYERS, "--device": compute.device != "auto"}
    if not served and cache_mb is not None:
        raise UsageError("--cache-mb: with --engine vllm alone.", "Leave it out.")
    if served and any(in_vain.values()):
        given = ", ".join(option for option, value in in_vain.items() if value)
        raise UsageError(f"{given}: not with --engine vllm.", "Leave it out.")
    options = (("--lengths", lengths), ("--prefill", prefill), ("--batch", batch))
    loads = [None if text is None else tuple(numbers(option, text)) for option, text in options]
    compute.checked()
    check_folder(folder)
    progress = show_progress(quiet)

    from ..bench.records import write_report

    if served:
        from ..bench.serving import ServingSettings, bench_serving

        default = ServingSettings()
        prompts = loads[1] or (default.prompt_tokens,)
        if len(prompts) != 1 or new_tokens < 2:
            message = "--engine vllm measures prompts of one length, and at least 2 new tokens."
            raise UsageError(message, "Give --prefill 512.")
        requests, runs = loads[2] or default.concurrency, max(1, repetitions // 4)
        size = default.cache_bytes if cache_mb is None else int(1e6 * cache_mb)
        serving = ServingSettings(requests, prompts[0], new_tokens, size, runs)
        result = bench_serving(folder, serving, model=model, dtype=compute.dtype, command=command_line())
    else:
        from ..bench.bench import CPU_LOADS, GPU_LOADS, BenchSettings
        from ..bench.bench import bench as run_bench
        from ..models.hardware import pick_device

        usual = GPU_LOADS if pick_device(compute.device).type == "cuda" else CPU_LOADS
        decode, prompts, batches = (given or default for given, default in zip(loads, usual, strict=True))
        settings = BenchSettings(decode, prompts, batches, layers, repetitions, new_tokens)
        result = run_bench(folder, settings, model=model, **vars(compute), command=command_line(), progress=progress)
    if out is not None:
        write_report(out, result)
    if as_json:
        print_json(result)
    else:
        (_print_serving if served else _print_bench)(result)


def _latency(record: dict[str, Any]) -> list[str]:
    times = ("time_to_first_token_s", "time_between_tokens_s")
    return [f"{1e3 * record[time]['median']:.2f}" for time in times]


def _print_serving(result: dict[str, Any]) -> None:
    cache, device = result["cache"], result["device"]
    size, tokens = in_bytes(result["settings"]["cache_bytes"]), cache["tokens"]
    say(
        f"Device: {device['name']} ({device['type']}), {result['server']['dtype']}, vLLM {result['versions']['vllm']}; "
        f"tokens in {size} of cache: source {tokens['source']}, compressed {tokens['compressed']}, "
        f"{cache['ratio_of_tokens']:.2f} times as many (bytes {cache['ratio_of_bytes']:.2f})"
    )
    rows = []
    for r in result["serving"]:
        rates = f"{r['tokens_per_s']['median']:.1f}", f"{r['throughput_over_source']:.2f}"
        rows.append((r["row"], r["concurrency"], *rates, *_latency(r), r["preemptions"]))
    title = "Prompts of {prompt_tokens} tokens, {new_tokens} new ones; vllm bench serve, medians"
    title = title.format(**result["settings"])
    right = ("requests", "tokens/s", "over source", "first token ms", "between tokens ms", "preemptions")
    print_table(title, ("row",), right, rows)


def _print_bench(result: dict[str, Any]) -> None:
    """Attention, whole models, and what was not measured."""
    say(f"Device: {result['device']['name']} ({result['device']['type']}), {result['dtype']}")
    rows: list[tuple[Any, ...]] = []
    for r in result["attention"]:
        low, middle, high = (f"{1e3 * r['seconds'][key]:.3f}" for key in ("low", "median", "high"))
        load = f"{r['batch_size']} x {r['length']}"
        rows.append((r["row"], r["phase"], load, middle, f"{low} - {high}", f"{r['over_stock']:.2f}"))
    title = f"Attention of layers {result['layers']}, medians, cold caches"
    print_table(title, ("row", "phase", "batch x tokens"), ("ms", "quartiles", "over the fastest SDPA"), rows)
    rows = []
    for r in result["model"]:
        load = f"{r['batch_size']} x {r['length']}"
        rows.append((r["row"], load, *_latency(r), in_bytes(r["kv_cache_bytes"]), r["largest_batch"]))
    if rows:
        right = ("first token ms", "between tokens ms", "cache", "largest batch")
        print_table("Whole model, transformers' generate", ("row", "batch x tokens"), right, rows)
    for row, why in result["not_measured"].items():
        say(f"not measured: {row}: {why}")


@command(
    epilog="Example: rotor gpu -o gpu.jsonl. Tiles of an export, measured and written into it: "
    "rotor gpu --tune out/demo. Where there is no GPU, to see that it would run: rotor gpu --dry -o dry.jsonl"
)
def gpu(
    out: Path = Path("gpu.jsonl"),
    minutes: Annotated[float, typer.Option(min=0.1)] = 40.0,
    tune: Path | None = None,
    dry: bool = False,
    as_json: bool = False,
) -> None:
    """Test and measure the kernels on this GPU: tests, NVIDIA's sanitizer, attention; or tune them for a checkpoint.

    Runs pytest in a checkout. Exit code 1 if a part failed.

    Args:
        out: JSON lines, one of each measurement.
        minutes: That everything may take.
        tune: A checkpoint whose tiles are measured and written into its kernel_config.json, and no more.
        dry: Toy sizes in Triton's interpreter, on a CPU: everything but the numbers.
    """
    if tune is not None:
        check_folder(tune)
        from ..bench import gpu as measured

        records = measured.tune(tune, dry=dry)
        rows = [(r["layer"], f"{1e6 * r['before_s']:.1f}", f"{1e6 * r['after_s']:.1f}") for r in records]
        if as_json:
            print_json(records)
        else:
            print_table("A step's attention", ("layer",), ("us before", "us after"), rows)
        return
    check_results(out)
    from ..bench import gpu as measured

    parts = measured.run(out, minutes, dry)
    found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    if as_json:
        print_json({"parts": parts, "measured": found})
    else:
        load = "{batch_size} x {tokens}, {new_tokens} new"
        cells = [
            (r["layout"], r["cache"], load.format(**r), f"{1e6 * r['seconds']:.1f}", f"{r['over_uncompressed']:.2f}")
            for r in found
        ]
        left = ("layout", "cache", "batch x tokens")
        print_table("Attention of a layer", left, ("us", "over uncompressed"), cells)
        for name, outcome in parts.items():
            say(f"{name}: {outcome}")
    if any(outcome.startswith("failed") for outcome in parts.values()):
        raise typer.Exit(1)
