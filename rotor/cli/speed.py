"""Speed, predicted and counted: compile, schedule, traffic."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from .app import (
    MAX_NUMBER,
    AsJson,
    Checkpoint,
    DeviceFile,
    Quiet,
    TargetDevice,
    app,
    check_folder,
    check_results,
    command_line,
    numbers,
    print_json,
)
from .console import in_bytes, print_table, say, show_progress


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
    check_results(plot)

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
    check_results(out, plot)

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
