"""Speed, predicted and counted: compile, schedule, traffic."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from .app import check_folder, check_results, command, command_line, numbers, print_json
from .console import print_table, say, show_progress
from .options import Count

if TYPE_CHECKING:
    from ..prediction.devices import Device


def find_device(name: str, file: Path | None) -> Device:
    from ..prediction import devices

    return devices.find_device(name, None if file is None else str(file))


@command(
    name="compile",
    epilog="Example: rotor compile out/demo --arch sm_80,sm_90. Without a checkpoint: rotor compile --named --json. "
    "rotor compile --table rotor/prediction/instructions.json counts anew what predictions look up.",
)
def compile_kernels(
    folder: Annotated[Path | None, typer.Argument(metavar="OUT", show_default=False)] = None,
    arch: str = "sm_90",
    dtype: str = "auto",
    batch: Count = 8,
    length: Count = 32768,
    named: bool = False,
    table: Path | None = None,
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

    Args:
        arch: Architectures of NVIDIA GPUs, as in sm_80,sm_90.
        dtype: auto (the checkpoint's), float32, bfloat16 or float16: of activations and cache.
        batch: Sequences of the step that is predicted.
        length: Cached tokens of each of them.
        named: Count layouts that have names, without a checkpoint.
        table: Count every size that predictions look up, and write this JSON file.
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

    archs, progress = precompile.parse_archs(arch), show_progress(quiet)
    if table is not None:
        precompile.write_counts(table, archs[0], progress)
        return
    names = {number: target_device or precompile.DEVICE_OF_ARCH.get(number) for number in archs}
    devices = {number: find_device(name, device_file) for number, name in names.items() if name is not None}
    subjects = precompile.named_subjects() if folder is None else precompile.subjects_of(folder, dtype)
    step = DecodeStep(length, batch)
    layers = precompile.count_layers(subjects, archs, devices, step, progress=progress)
    kernels = [kernel for layer in layers for kernel in layer.kernels]
    failed = sum(kernel.error is not None for kernel in kernels)
    rates = {f"sm_{number}": names[number] for number in archs}
    issued = {f"sm_{number}": device.instructions_per_cycle for number, device in devices.items()}
    if as_json:
        about = {**provenance(command_line()), "predicted_for": rates, "instructions_per_cycle": issued}
        about |= {"batch_size": batch, "length": length, "failed": failed, "layers": [*map(asdict, layers)]}
        print_json(about)
    else:
        on = ", ".join(f"{of}: {name} at {issued.get(of)} instructions a cycle and SM" for of, name in rates.items())
        _print_layers(layers, f"A decode step's attention, {batch} x {length} tokens, predicted ({on})")
        for layer in layers:
            for k in layer.kernels:
                if k.error is not None:
                    say(f"{layer.layout}, {k.name}, {k.arch}: {k.error[:400]}")
        say(f"{len(kernels)} kernels, {failed} failed; --json has registers, shared memory and pipes of each")
    if failed:
        raise typer.Exit(1)


def _print_layers(layers: list[Any], title: str) -> None:
    """One line a layer: instructions, both limits, and the share of the uncompressed model's attention."""
    rows = []
    for x in layers:
        times = (_known(x.memory_s, ".1f", 1e6), _known(x.issue_s, ".1f", 1e6))
        about = (x.layout, x.arch, x.layers, f"{x.bytes_per_key:g}", _known(x.instructions_per_key), x.spilled_bytes)
        rows.append((*about, *times, _known(x.share)))
    right = "layers", "bytes a key and head", "instructions", "spilled B", "us by memory", "us by issue"
    print_table(title, ("layer", "arch"), (*right, "over uncompressed"), rows)


def _known(value: float | None, form: str = ".2f", scale: float = 1) -> str:
    return "-" if value is None else format(scale * value, form)


@command(epilog="Example: rotor schedule out/demo --sms 132 --lengths 8x32768,200")
def schedule(
    folder: Path,
    sms: Count = 132,
    lengths: str = "32768",
    target_device: str = "h200",
    device_file: Path | None = None,
    chunk: Annotated[int | None, typer.Option(min=1)] = None,
    as_json: bool = False,
) -> None:
    """Simulate how evenly a decode step's attention loads a GPU: unsplit, the papers' greedy schedule, equal slices.

    With --chunk also a prefill's, of row blocks alike and of FDC's. Arithmetic on predicted costs; nothing is run, and
    no GPU is needed.

    Args:
        sms: Streaming multiprocessors of the GPU.
        lengths: Cached tokens of each sequence of the batch: 32768, or 8x32768,200.
        chunk: Also a prefill of so many new tokens of each sequence, after the longest cached one.
    """
    check_folder(folder)

    from ..bench.records import provenance
    from ..models.compressed import CompressedCheckpoint
    from ..prediction.simulation import simulate, simulate_prefill

    tokens = parse_lengths(lengths)
    checkpoint = CompressedCheckpoint(folder)
    layouts, shape = checkpoint.layouts, checkpoint.shape
    balances = simulate(layouts, shape, tokens, find_device(target_device, device_file), sms, checkpoint.dtype.itemsize)
    prefill = None if chunk is None else simulate_prefill(layouts, shape, chunk, max(tokens), len(tokens), sms)
    if as_json:
        found = {"schedules": [*map(asdict, balances)], "prefill": prefill}
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
    """`32768`, `200,16000`, `8x32768,64x100`: keys of each sequence; raises UsageError for anything else."""
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
    processes: str = "2,4,8",
    tokens: Count = 1024,
    target_device: str = "h200",
    device_file: Path | None = None,
    ethernet_gbit: Annotated[float, typer.Option(min=0.001)] = 100,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Count the bytes that a prompt sends over several processes (generate --parallel sequence), and alternatives.

    Counted from the checkpoint's layouts. Times are predicted from data-sheet rates of links, as the busiest process's
    bytes over the rate: nothing is timed.

    Args:
        processes: Numbers of processes, as in 2,4,8.
        tokens: Tokens of the prompt.
        ethernet_gbit: Gigabits a second of each process's network.
        out: JSON file to write.
    """
    check_results(out)

    from ..bench.records import write_report
    from ..bench.traffic import LABELS, count_traffic

    rates, counts = find_device(target_device, device_file), numbers("--processes", processes)
    result = count_traffic(folder, counts, tokens, rates, ethernet_gbit * 1e9 / 8, command_line())
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
