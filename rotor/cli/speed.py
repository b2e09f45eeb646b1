"""Speed, predicted and counted: compile, schedule, traffic."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from .app import MAX_NUMBER, check_folder, check_results, command, command_line, numbers, print_json
from .console import print_table, say, show_progress


@command(
    name="compile",
    epilog="Example: rotor compile out/demo --arch sm_80,sm_90. Without a checkpoint: rotor compile --named --json. "
    "rotor compile --table rotor/prediction/instructions.json counts anew what predictions look up.",
)
def compile_kernels(
    folder: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Folder that rotor export wrote.", show_default=False)
    ] = None,
    arch: Annotated[str, typer.Option(help="Architectures of NVIDIA GPUs, as in sm_80,sm_90.")] = "sm_90",
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16: of activations and cache.")
    ] = "auto",
    batch: Annotated[int, typer.Option(min=1, max=MAX_NUMBER, help="Sequences of the step that is predicted.")] = 8,
    length: Annotated[int, typer.Option(min=1, max=MAX_NUMBER, help="Cached tokens of each of them.")] = 32768,
    named: Annotated[
        bool, typer.Option("--named", help="Count layouts that have names, without a checkpoint.")
    ] = False,
    table: Annotated[
        Path | None, typer.Option(help="Count every size that predictions look up, and write this JSON file.")
    ] = None,
    dump: Annotated[Path | None, typer.Option(help="Folder for cubin, SASS and PTX of every kernel.")] = None,
    target_device: str | None = None,
    device_file: Path | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Compile Triton kernels ahead of time and count what they issue; no GPU is needed.

    They go into Triton's own cache ($TRITON_CACHE_DIR, ~/.triton/cache by default). Of each kernel of a decode step the
    warp instructions in its machine code are counted, a key and KV head; of a layer's step it is predicted what share
    of the uncompressed layer's attention it takes, on --target-device or, where that is not given, on an A100, L40S,
    H200 or B200 by the architecture. Exit code 1 if one cannot be compiled or counted.
    """
    from ..recipe.settings import Compute

    Compute(dtype=dtype).check()
    if (folder is not None) + named + (table is not None) != 1:
        raise UsageError("expected one of OUT, --named and --table.", "Example: rotor compile out/demo")
    if folder is not None:
        check_folder(folder)
    check_results(table)

    from ..bench import precompile
    from ..bench.records import provenance
    from ..prediction.cost import DecodeStep
    from ..prediction.devices import find_device

    archs, progress = precompile.parse_archs(arch), show_progress(quiet)
    if table is not None:
        precompile.write_counts(table, archs[0], progress)
        return
    names = {number: target_device or precompile.DEVICE_OF_ARCH.get(number) for number in archs}
    where = None if device_file is None else str(device_file)
    devices = {number: find_device(device, where) for number, device in names.items() if device is not None}
    subjects = precompile.named_subjects() if folder is None else precompile.subjects_of(folder, dtype)
    step = DecodeStep(length, batch)
    layers = precompile.count_layers(subjects, archs, devices, step, dump=dump, progress=progress)
    failed = sum(kernel.error is not None for layer in layers for kernel in layer.kernels)
    rates = {f"sm_{number}": names[number] for number in archs}
    issued = {f"sm_{number}": device.instructions_per_cycle for number, device in devices.items()}
    if as_json:
        about = {**provenance(command_line()), "predicted_for": rates, "instructions_per_cycle": issued}
        about |= {"batch_size": batch, "length": length, "failed": failed}
        print_json({**about, "layers": [dataclasses.asdict(layer) for layer in layers]})
    else:
        _print_kernels(layers)
        on = ", ".join(
            f"{of}: {device} at {issued.get(of)} instructions a cycle and SM" for of, device in rates.items()
        )
        _print_layers(layers, f"A decode step's attention, {batch} x {length} tokens, predicted ({on})")
        say(f"{sum(len(layer.kernels) for layer in layers)} kernels, {failed} failed")
    if failed:
        raise typer.Exit(1)


def _print_kernels(layers: list[Any]) -> None:
    """One line a compiled kernel; errors below the table."""
    rows = []
    for layer in layers:
        for k in layer.kernels:
            taken = (
                "failed" if number is None else number for number in (k.registers, k.spilled_bytes, k.shared_bytes)
            )
            a_key = "-" if k.instructions_per_key is None else f"{k.instructions_per_key:.2f}"
            pipes = " ".join(f"{pipe} {n:.1f}" for pipe, n in (k.by_pipe or {}).items() if n >= 0.05)
            rows.append((layer.layout, k.name, k.arch, k.warps, *taken, a_key, pipes))
    right = "warps", "registers", "spilled B", "shared B", "instructions"
    title = "Kernels; warp instructions a key and KV head, of those that a decode step runs"
    print_table(title, ("layer", "kernel", "arch"), (*right, "by pipe"), rows)
    for layer in layers:
        for k in layer.kernels:
            if k.error is not None:
                say(f"{layer.layout}, {k.name}, {k.arch}: {k.error[:400]}")


def _print_layers(layers: list[Any], title: str) -> None:
    """One line a layer: instructions, both limits, and the share of the uncompressed model's attention."""
    rows = []
    for x in layers:
        a_key = "-" if x.instructions_per_key is None else f"{x.instructions_per_key:.2f}"
        times = ("-" if s is None else f"{1e6 * s:.1f}" for s in (x.memory_s, x.issue_s))
        share = "-" if x.share is None else f"{x.share:.2f}"
        rows.append((x.layout, x.arch, x.layers, f"{x.bytes_per_key:g}", a_key, x.spilled_bytes, *times, share))
    right = "layers", "bytes a key and head", "instructions", "spilled B", "us by memory", "us by issue"
    print_table(title, ("layer", "arch"), (*right, "over uncompressed"), rows)


@command(epilog="Example: rotor schedule out/demo --sms 132 --lengths 8x32768,200")
def schedule(
    folder: Path,
    sms: Annotated[int, typer.Option(min=1, help="Streaming multiprocessors of the GPU.")] = 132,
    lengths: Annotated[
        str, typer.Option(help="Cached tokens of each sequence of the batch: 32768, or 8x32768,200.")
    ] = "32768",
    target_device: Annotated[
        str, typer.Option(help="Device whose rates are used (rotor/prediction/devices.yaml).")
    ] = "h200",
    device_file: Path | None = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1, help="Also a prefill of so many new tokens of each sequence, after the longest cached one."
        ),
    ] = None,
    as_json: bool = False,
) -> None:
    """Simulate how evenly a decode step's attention loads a GPU: unsplit, the papers' greedy schedule, equal slices.

    With --chunk also a prefill's, of row blocks alike and of FDC's. Arithmetic on predicted costs; nothing is run, and
    no GPU is needed.
    """
    check_folder(folder)

    from ..bench.records import provenance
    from ..models.compressed import CompressedCheckpoint
    from ..prediction.devices import find_device
    from ..prediction.simulation import simulate, simulate_prefill

    tokens = parse_lengths(lengths)
    checkpoint = CompressedCheckpoint(folder)
    layouts, shape, element_bytes = checkpoint.layouts, checkpoint.shape, checkpoint.dtype.itemsize
    rates = find_device(target_device, None if device_file is None else str(device_file))
    balances = simulate(layouts, shape, tokens, rates, sms, element_bytes)
    prefill = chunk and simulate_prefill(layouts, shape, chunk, max(tokens), len(tokens), sms)
    if as_json:
        entries = [dataclasses.asdict(balance) for balance in balances]
        found = {"schedules": entries, "prefill": prefill}
        print_json({**provenance(command_line()), "sms": sms, "lengths": tokens, "chunk": chunk, **found})
        return
    rows = [(b.schedule, f"{b.largest_over_mean:.3f}", b.parts, b.worst_layer, f"{max(b.loads):.3f}") for b in balances]
    right = "largest over mean", "partial results", "worst layer", "largest over mean there"
    print_table(f"{folder}: {len(tokens)} sequence(s) on {sms} SMs", ("schedule",), right, rows)
    if prefill:
        say(
            f"Prefill of {chunk} tokens each as FDC has it, time over that of even loads: row blocks alike "
            f"{prefill['equal']:.3f}, of B_r rows {prefill['balanced']:.3f}"
        )


def parse_lengths(text: str) -> list[int]:
    """Parse `32768`, `200,16000`, `8x32768,64x100`: keys of each sequence.

    Raises:
        UsageError: not of that form.
    """
    lengths: list[int] = []
    for item in text.split(","):
        count, times, length = item.strip().rpartition("x")
        if not length.isdigit() or (times and not count.isdigit()):
            raise UsageError(f"--lengths {text}: {item.strip()!r} is not a number of tokens.", "Example: 8x32768,200")
        lengths += [int(length)] * int(count or 1)
    return lengths


@command(epilog="Example: rotor traffic out/demo --processes 2,4,8")
def traffic(
    folder: Path,
    processes: Annotated[str, typer.Option(help="Numbers of processes, as in 2,4,8.")] = "2,4,8",
    tokens: Annotated[int, typer.Option(min=1, max=MAX_NUMBER, help="Tokens of the prompt.")] = 1024,
    target_device: Annotated[
        str, typer.Option(help="Device whose links' rate is used (rotor/prediction/devices.yaml).")
    ] = "h200",
    device_file: Path | None = None,
    ethernet_gbit: Annotated[float, typer.Option(min=0.001, help="Gigabits a second of each process's network.")] = 100,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file to write.")] = None,
    as_json: bool = False,
) -> None:
    """Count the bytes that a prompt sends over several processes (generate --parallel sequence), and alternatives.

    Counted from the checkpoint's layouts. Times are predicted from data-sheet rates of links, as the busiest process's
    bytes over the rate: nothing is timed.
    """
    check_results(out)

    from ..bench.records import write_report
    from ..bench.traffic import LABELS, count_traffic
    from ..prediction.devices import find_device

    rates = find_device(target_device, None if device_file is None else str(device_file))
    result = count_traffic(
        folder, numbers("--processes", processes), tokens, rates, ethernet_gbit * 1e9 / 8, command_line()
    )
    if out is not None:
        write_report(out, result)
    if as_json:
        print_json(result)
        return
    rows = []
    for entry in result["counted"]:
        for name, label in LABELS.items():
            found = entry[name]
            parts = (f"{found[part] / tokens:.0f}" for part in ("queries", "rows", "outputs", "bytes"))
            share = found["bytes"] / entry["ulysses"]["bytes"] if entry["ulysses"]["bytes"] else 0.0
            times = (f"{1e6 * found['predicted_s'][link]:.1f}" for link in ("link", "ethernet"))
            rows.append((entry["processes"], label, *parts, f"{share:.3f}", *times))
    right = ("queries", "rows", "outputs", "bytes a token", "of Ulysses", "predicted us, link", "us, Ethernet")
    print_table(f"Sent by all processes, {tokens} tokens, {result['dtype']}", ("processes", "what"), right, rows)
