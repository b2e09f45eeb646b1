"""Speed, predicted and measured: bench, compile, schedule, traffic."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from .app import (
    MAX_NUMBER,
    AsJson,
    CachePolicy,
    Checkpoint,
    Device,
    DeviceFile,
    Dtype,
    Quiet,
    SourceModel,
    TargetDevice,
    app,
    check_folder,
    command_line,
    numbers,
    print_json,
)
from .console import in_bytes, print_table, say, show_progress

LAYERS = 4
"""Layers that `rotor bench` measures unless it is told otherwise."""


@app.command(epilog="Example: rotor bench out/demo --lengths 32768 --batch 1,8 -o bench.json")
def bench(
    folder: Checkpoint,
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
    model: SourceModel = None,
    cache: CachePolicy = None,
    device_file: Annotated[
        Path | None, typer.Option(help="Device file to write the measured rates to, for --device-file of others.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="transformers, or vllm: the checkpoint and its source served side by side.")
    ] = "transformers",
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure attention and generation of a checkpoint beside PyTorch's, a Palu-style baseline and the source model.

    Every row is compared with float64 first; if one is wrong, nothing is reported. Without a GPU only what a CPU runs
    is measured, and the Triton kernels are listed as not measured.

    With --engine vllm: tokens of cache, throughput and latency in vLLM, on the device that it is built for. --batch are
    requests at once (1,4,16), --prefill tokens of a prompt (512), --memory-gb the cache of each (1); --lengths,
    --layers, --cache, --device and --device-file do not apply.
    """
    from ..recipe.settings import Compute

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


@app.command(
    "compile",
    epilog="Example: rotor compile out/demo --arch sm_80,sm_90. At other loads: rotor compile out/demo --batch 1,64 "
    "--lengths 8192 --target-device h100-sxm",
)
def compile_kernels(
    folder: Checkpoint,
    arch: Annotated[str, typer.Option(help="Architectures of NVIDIA GPUs, as in sm_80,sm_90.")] = "sm_90",
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16: of activations and cache.")
    ] = "auto",
    batch: Annotated[
        str, typer.Option(help="Sequences of a decode step, as in 1,8; rounded up to powers of two.")
    ] = "1",
    lengths: Annotated[str, typer.Option(help="Cached tokens of a decode step that is predicted.")] = "32768",
    prefill: Annotated[str, typer.Option(help="Tokens of a prompt that is predicted.")] = "8192",
    target_device: TargetDevice = None,
    device_file: DeviceFile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compile the Triton kernels of a checkpoint ahead of time and show what each takes; no GPU is needed.

    They go into Triton's own cache ($TRITON_CACHE_DIR, ~/.triton/cache by default). Of each it is predicted what it
    reads and multiplies, what of it is on an SM, and what share of its floor follows, on --target-device or, where that
    is not given, on an A100, L40S, H200 or B200 by the architecture. Exit code 1 if one cannot be compiled.
    """
    from ..recipe.settings import Compute

    batch_sizes = numbers("--batch", batch)
    cached, prompts = numbers("--lengths", lengths), numbers("--prefill", prefill)
    Compute(dtype=dtype).check()
    check_folder(folder)

    from ..bench.floors import DEVICE_OF_ARCH, with_floors
    from ..bench.precompile import cache_folder, parse_archs, precompile
    from ..bench.provenance import provenance
    from ..prediction.devices import find_device

    archs = parse_archs(arch)
    names = {f"sm_{number}": target_device or DEVICE_OF_ARCH.get(number) for number in archs}
    where = None if device_file is None else str(device_file)
    devices = {name: find_device(device, where) for name, device in names.items() if device is not None}
    kernels = precompile(folder, archs, dtype=dtype, batch_sizes=batch_sizes, progress=show_progress(quiet))
    failed = [kernel for kernel in kernels if kernel.error is not None]
    loads = {"batch_sizes": batch_sizes, "lengths": cached, "prompts": prompts}
    kernels = with_floors(folder, kernels, devices, dtype=dtype, **loads)
    if as_json:
        entries = [dataclasses.asdict(kernel) for kernel in kernels]
        about = {**provenance(command_line()), "folder": str(folder), "predicted_for": names}
        print_json({**about, "cache": cache_folder(), "failed": len(failed), "kernels": entries})
    else:
        _print_kernels(kernels)
        _print_floors(kernels, names)
        say(f"{len(kernels) - len(failed)} compiled, {len(failed)} failed; cache: {cache_folder()}")
    if failed:
        raise typer.Exit(1)


def _print_kernels(kernels: list[Any]) -> None:
    """One line a compiled kernel; errors below the table."""
    rows = []
    for k in kernels:
        found = (k.registers, k.spill_bytes, k.shared_bytes, k.async_copies, k.scalar_loads, k.matrix_products)
        shown = ("failed" if number is None else number for number in found)
        batch = "any" if k.batch_size is None else k.batch_size
        rows.append((k.name, k.arch, "yes" if k.mask else "no", batch, *shown, f"{k.seconds:.1f}"))
    right = "registers", "spills B", "shared B", "async copies", "16-bit loads", "mma", "s"
    print_table(None, ("kernel", "arch", "mask", "batch"), right, rows)
    for k in kernels:
        if k.error is not None:
            say(f"{k.name}, {k.arch}: {k.error[:400]}")


def _print_floors(kernels: list[Any], devices: dict[str, str | None]) -> None:
    """One line a kernel and load: what it reads and multiplies in all layers, and what follows."""
    rows = []
    for k in kernels:
        for floor in k.floors:
            new = "" if floor.new_tokens == 1 else f"{floor.new_tokens} new"
            load = f"{floor.batch_size} x {new or floor.past + 1}"
            flight = "-" if floor.flight_bytes is None else f"{floor.flight_bytes / 1024:.1f}"
            sizes = in_bytes(floor.memory_bytes), in_bytes(floor.l2_bytes), f"{floor.flops / 1e9:.3g}"
            times = f"{1e6 * floor.seconds:.1f}", floor.limit, f"{floor.share:.0%}"
            rows.append((k.name, k.arch, load, floor.launches, *sizes, floor.programs_per_sm, flight, *times))
    if not rows:
        return
    right = "layers", "memory", "L2 besides", "GFLOP", "programs/SM", "KB in flight/SM", "us", "limit", "of the floor"
    named = ", ".join(f"{arch}: {device}" for arch, device in devices.items() if device is not None)
    print_table(
        f"Predicted, all layers that launch it together ({named})", ("kernel", "arch", "batch x tokens"), right, rows
    )


@app.command(epilog="Example: rotor schedule out/demo --sms 132 --lengths 8x32768,200 --plot balance.png")
def schedule(
    folder: Checkpoint,
    sms: Annotated[int, typer.Option(min=1, help="Streaming multiprocessors of the GPU.")] = 132,
    lengths: Annotated[
        str, typer.Option(help="Cached tokens of each sequence of the batch: 32768, or 8x32768,200.")
    ] = "32768",
    target_device: Annotated[
        str, typer.Option(help="Device whose rates are used (rotor/prediction/devices.yaml).")
    ] = "h200",
    device_file: DeviceFile = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1, help="Also a prefill of so many new tokens of each sequence, after the longest cached one."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the loads to this .png, .svg or .pdf; needs matplotlib.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate how evenly a decode step's attention loads a GPU: unsplit, the papers' greedy schedule, equal slices.

    With --chunk also a prefill's, with and without its last round redistributed. Arithmetic on predicted costs; nothing
    is run, and no GPU is needed.
    """
    check_folder(folder)

    from ..bench.provenance import provenance
    from ..models.compressed import CompressedCheckpoint
    from ..prediction.devices import find_device
    from ..prediction.simulation import parse_lengths, simulate, simulate_prefill

    tokens = parse_lengths(lengths)
    checkpoint = CompressedCheckpoint(folder)
    layouts, shape, element_bytes = checkpoint.layouts, checkpoint.shape, checkpoint.dtype.itemsize
    rates = find_device(target_device, None if device_file is None else str(device_file))
    balances = simulate(layouts, shape, tokens, rates, sms, element_bytes)
    prefill = None
    if chunk is not None:
        prefill = simulate_prefill(layouts, shape, chunk, max(tokens), len(tokens), sms, element_bytes)
    if plot is not None:
        from ..study.plots import write_balance_plot

        write_balance_plot(balances, plot)
    if as_json:
        entries = [dataclasses.asdict(balance) for balance in balances]
        found = {"schedules": entries, "prefill": None if prefill is None else dataclasses.asdict(prefill)}
        print_json({**provenance(command_line()), "sms": sms, "lengths": tokens, "chunk": chunk, **found})
        return
    rows = [(b.schedule, f"{b.largest_over_mean:.3f}", b.parts, b.worst_layer, f"{max(b.loads):.3f}") for b in balances]
    right = "largest over mean", "partial results", "worst layer", "largest over mean there"
    print_table(f"{folder}: {len(tokens)} sequence(s) on {sms} SMs", ("schedule",), right, rows)
    if prefill is not None:
        say(
            f"Prefill of {chunk} tokens each, time over that of even loads: longest first {prefill.longest_first:.3f}, "
            f"last round redistributed {prefill.redistributed:.3f} ({prefill.cut_launches} of {prefill.launches} "
            "launches cut theirs)"
        )


@app.command(epilog="Example: rotor traffic out/demo --processes 2,4,8 --measure 2 --plot traffic.png")
def traffic(
    folder: Checkpoint,
    processes: Annotated[str, typer.Option(help="Numbers of processes, as in 2,4,8.")] = "2,4,8",
    tokens: Annotated[int, typer.Option(min=1, max=MAX_NUMBER, help="Tokens of the prompt.")] = 1024,
    measure: Annotated[
        str | None,
        typer.Option(
            metavar="N,M", help="Also start so many processes here, on CPUs, and count the bytes of their calls."
        ),
    ] = None,
    target_device: Annotated[
        str, typer.Option(help="Device whose links' rate is used (rotor/prediction/devices.yaml).")
    ] = "h200",
    device_file: DeviceFile = None,
    ethernet_gbit: Annotated[float, typer.Option(min=0.001, help="Gigabits a second of each process's network.")] = 100,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it to this .png, .svg or .pdf; needs matplotlib.")] = None,
    as_json: AsJson = False,
) -> None:
    """Count the bytes that a prompt sends over several processes (generate --parallel sequence), and alternatives.

    Counted from the checkpoint's layouts; with --measure also from the calls of real processes, which must send as
    many. Times are predicted from data-sheet rates of links: nothing is timed.
    """
    from ..bench.report import write_report
    from ..bench.traffic import measure_traffic
    from ..bench.traffic_plot import write_traffic_plot
    from ..prediction.devices import find_device

    rates = find_device(target_device, None if device_file is None else str(device_file))
    result = measure_traffic(
        folder,
        numbers("--processes", processes),
        tokens,
        [] if measure is None else numbers("--measure", measure),
        rates,
        target_device,
        ethernet_gbit * 1e9 / 8,
        command_line(),
    )
    if out is not None:
        write_report(out, result)
    if plot is not None:
        write_traffic_plot(result, plot)
    if as_json:
        print_json(result)
        return
    _print_traffic(result)


def _print_traffic(result: dict[str, Any]) -> None:
    """Bytes a token by what is sent, and their share of plain Ulysses; predicted times of the prompt; measurements."""
    tokens, rows = result["tokens"], []
    for entry in result["counted"]:
        for name, label in result["labels"].items():
            found = entry[name]
            parts = (f"{found[part] / tokens:.0f}" for part in ("queries", "rows", "outputs", "bytes"))
            share = found["bytes"] / entry["ulysses"]["bytes"] if entry["ulysses"]["bytes"] else 0.0
            times = (f"{1e6 * found['predicted_s'][link]:.1f}" for link in ("link", "ethernet"))
            rows.append((entry["processes"], label, *parts, f"{share:.3f}", *times))
    right = ("queries", "rows", "outputs", "bytes a token", "of Ulysses", "predicted us, link", "us, Ethernet")
    print_table(f"Sent by all processes, {tokens} tokens, {result['dtype']}", ("processes", "what"), right, rows)
    for entry in result["measured"]:
        sent = ", ".join(f"{kind} {size}" for kind, size in entry["sent_bytes"].items())
        what = f"{entry['processes']} processes, exchange {entry['exchange']}"
        say(f"measured, {what}, a prompt and one token, bytes of {sent}")
