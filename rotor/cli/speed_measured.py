"""Speed, measured: bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from .app import check_folder, check_results, command, command_line, numbers, print_json
from .console import in_bytes, print_table, say, show_progress

LAYERS = 4
"""Layers that `rotor bench` measures unless it is told otherwise."""


@command(epilog="Example: rotor bench out/demo --lengths 32768 --batch 1,8 -o bench.json")
def bench(
    folder: Path,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file to write.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Cached tokens when decoding, as in 8192,32768. [32768; on a CPU 2048]")
    ] = None,
    prefill: Annotated[str | None, typer.Option(help="Tokens of a prompt. [8192; on a CPU 512]")] = None,
    batch: Annotated[str | None, typer.Option(help="Sequences in a batch. [1,8; on a CPU 1]")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers to measure, spread over the depth.")] = LAYERS,
    repetitions: Annotated[int, typer.Option(min=1, help="Of every row of the attention; of a model a quarter.")] = 20,
    new_tokens: Annotated[int, typer.Option(min=0, help="Tokens that whole models generate; 0 leaves them out.")] = 32,
    memory_gb: Annotated[
        float | None, typer.Option(min=0.0, help="Memory for the largest batch, in 1e9 bytes. [the device's]")
    ] = None,
    model: Path | None = None,
    cache: str | None = None,
    device_file: Annotated[
        Path | None, typer.Option(help="Device file to write the measured rates to, for --device-file of others.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="transformers, or vllm: the checkpoint and its source served side by side.")
    ] = "transformers",
    device: str = "auto",
    dtype: str = "auto",
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Measure attention and generation of a checkpoint beside PyTorch's, a Palu-style baseline and the source model.

    Every row is compared with float64 first; if one is wrong, nothing is reported. Without a GPU only what a CPU runs
    is measured, and the Triton kernels are listed as not measured.

    With --engine vllm: tokens of cache, throughput and latency in vLLM, on the device that it is built for. --batch are
    requests at once (1,4,16), --prefill tokens of a prompt (512), --memory-gb the cache of each (1); --lengths,
    --layers, --cache, --device and --device-file do not apply.
    """
    from ..recipe.settings import Compute

    check_results(out, device_file)
    if engine != "transformers":
        if engine != "vllm":
            raise UsageError(f"--engine {engine}: expected transformers or vllm.", "Leave it out, or give vllm.")
        given_in_vain = {
            "--lengths": lengths is not None,
            "--layers": layers != LAYERS,
            "--cache": cache is not None,
            "--device-file": device_file is not None,
            "--device": device != "auto",
        }
        in_vain = [option for option, given in given_in_vain.items() if given]
        if in_vain:
            raise UsageError(f"{', '.join(in_vain)}: not with --engine vllm.", "Leave it out.")
        Compute("auto", dtype).check()
        check_folder(folder)
        show_progress(quiet)
        _bench_vllm(folder, out, prefill, batch, repetitions, new_tokens, memory_gb, model, dtype, as_json)
        return
    given = [
        None if text is None else numbers(option, text)
        for option, text in (("--lengths", lengths), ("--prefill", prefill), ("--batch", batch))
    ]
    Compute(device, dtype).check()
    check_folder(folder)

    from ..bench.bench import bench as run_bench
    from ..bench.report import add_device, device_name, write_report
    from ..bench.settings import BenchSettings
    from ..models.hardware import pick_device

    settings = BenchSettings.of(
        pick_device(device),
        *given,
        layers=layers,
        repetitions=repetitions,
        new_tokens=new_tokens,
        memory_bytes=None if memory_gb is None else int(memory_gb * 1e9),
        cache=cache,
    )
    result = run_bench(
        folder, settings, model=model, device=device, dtype=dtype, command=command_line(), progress=show_progress(quiet)
    )
    if out is not None:
        write_report(out, result)
    if device_file is not None:
        add_device(device_file, device_name(result), result)
    if as_json:
        print_json(result)
        return
    _print_bench(result)
    if device_file is not None:
        say(f"Rates written: --target-device {device_name(result)} --device-file {device_file}")


def _bench_vllm(
    folder: Path,
    out: Path | None,
    prefill: str | None,
    batch: str | None,
    repetitions: int,
    new_tokens: int,
    memory_gb: float | None,
    model: Path | None,
    dtype: str,
    as_json: bool,
) -> None:
    from ..bench.report import write_report
    from ..bench.serving import ServingSettings, bench_serving

    default = ServingSettings()
    prompts = (default.prompt_tokens,) if prefill is None else numbers("--prefill", prefill)
    if len(prompts) != 1 or new_tokens < 2:
        raise UsageError(
            "--engine vllm measures prompts of one length, and at least 2 new tokens.", "Give --prefill 512."
        )
    settings = ServingSettings(
        default.concurrency if batch is None else tuple(numbers("--batch", batch)),
        prompts[0],
        new_tokens,
        default.cache_bytes if memory_gb is None else int(memory_gb * 1e9),
        max(1, repetitions // 4),
    )
    result = bench_serving(folder, settings, model=model, dtype=dtype, command=command_line())
    if out is not None:
        write_report(out, result)
    if as_json:
        print_json(result)
        return
    _print_serving(result)


def _print_serving(result: dict[str, Any]) -> None:
    cache, device = result["cache"], result["device"]
    say(
        f"Device: {device['name']} ({device['type']}), {result['dtype']}, vLLM {result['versions']['vllm']}; tokens in "
        f"{in_bytes(result['settings']['cache_bytes'])} of cache: source {cache['tokens']['source']}, compressed "
        f"{cache['tokens']['compressed']}, {cache['ratio_of_tokens']:.2f} times as many (bytes "
        f"{cache['ratio_of_bytes']:.2f})"
    )
    rows = []
    for r in result["serving"]:
        times = (f"{1e3 * r[key]['median']:.1f}" for key in ("time_to_first_token_s", "time_between_tokens_s"))
        ratio = f"{r['throughput_over_source']:.2f}"
        rows.append((r["row"], r["concurrency"], f"{r['tokens_per_s']:.1f}", ratio, *times, r["preemptions"]))
    print_table(
        "Prompts of {prompt_tokens} tokens, {new_tokens} new ones, medians".format(**result["settings"]),
        ("row",),
        ("requests", "tokens/s", "over source", "first token ms", "between tokens ms", "preemptions"),
        rows,
    )


def _print_bench(result: dict[str, Any]) -> None:
    """Attention, whole models, and what was not measured."""
    device, rates = result["device"], result["rates"]
    say(
        f"Device: {device['name']} ({device['type']}), {result['dtype']}; copies {rates['copy_bytes_per_s'] / 1e9:.1f} "
        f"GB/s, matrix products {rates['matmul_flops_per_s'] / 1e12:.3f} TFLOP/s, measured in this run"
    )
    rows: list[tuple[Any, ...]] = []
    for r in result["attention"]:
        low, middle, high = (1e3 * r["seconds"][key] for key in ("low", "median", "high"))
        spread, share = f"{low:.3f} - {high:.3f}", f"{r['fraction_of_floor']:.1%}"
        rows.append((*_load(r, "phase"), f"{middle:.3f}", spread, share, f"{r['speed_up']:.2f}"))
    print_table(
        f"Attention of layers {result['layers']}, medians, cold caches",
        ("row", "device", "phase", "batch x tokens"),
        ("ms", "quartiles", "of the floor", "speed-up"),
        rows,
    )
    rows = []
    for r in result["model"]:
        times = (f"{1e3 * r[key]['median']:.2f}" for key in ("time_to_first_token_s", "time_between_tokens_s"))
        peak = "not measured" if r["peak_bytes"] is None else in_bytes(r["peak_bytes"])
        rows.append((*_load(r), *times, in_bytes(r["kv_cache_bytes"]), peak, r["largest_batch"]))
    if rows:
        print_table(
            "Whole model, transformers' generate",
            ("row", "device", "batch x tokens"),
            ("first token ms", "between tokens ms", "cache", "peak", "largest batch"),
            rows,
        )
    for r in result["not_measured"]:
        load = "".join(f", {key} {r[key]}" for key in ("phase", "length") if key in r)
        say(f"not measured: {r['row']}{load}: {r['why']}")


def _load(row: dict[str, Any], *more: str) -> tuple[str, ...]:
    """What was measured, where, and on how much."""
    return row["row"], row["device"], *(row[key] for key in more), f"{row['batch_size']} x {row['length']}"
