"""Speed: predicted and counted by compile, schedule and traffic; measured by bench and gpu."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import UsageError
from ..format.places import check_file
from .app import check_folder, command, command_line, numbers
from .console import in_bytes, print_table, say
from .options import Count, DeviceOptions, Json, Printed


@command(
    name="compile",
    epilog="Example: rotor compile out/demo --arch sm_80,sm_90. Without a checkpoint: rotor compile --named --json. "
    "rotor compile --table rotor/prediction/instructions.json counts anew what predictions look up.",
)
def compile_kernels(
    output: Printed,
    folder: Annotated[Path | None, typer.Argument(metavar="OUT", show_default=False)] = None,
    arch: str = "sm_90",
    batch: Count = 8,
    length: Count = 32768,
    named: bool = False,
    table: Path | None = None,
) -> None:
    """Compile Triton kernels ahead of time and count what they issue; no GPU is needed.

    They go into Triton's own cache ($TRITON_CACHE_DIR, ~/.triton/cache by default). Of each kernel of a decode step the
    warp instructions in its machine code are counted, a key and KV head; of a layer's step it is predicted what share
    of the uncompressed layer's attention it takes, on an A100, L40S, H200 or B200 by the architecture. Exit code 1 if
    one cannot be compiled or counted.

    Args:
        arch: Architectures of NVIDIA GPUs, as in sm_80,sm_90.
        batch: Sequences of the step that is predicted.
        length: Cached tokens of each of them.
        named: Count layouts that have names, without a checkpoint.
        table: Count every size that predictions look up, and write this JSON file.
    """
    if (folder is not None) + named + (table is not None) != 1:
        raise UsageError("expected one of OUT, --named and --table.", "Example: rotor compile out/demo")
    if folder is not None:
        check_folder(folder)
    if table is not None:
        check_file(table)

    from ..bench import precompile
    from ..bench.records import provenance
    from ..prediction.cost import DecodeStep

    archs, progress = precompile.parse_archs(arch), output.progress()
    if table is not None:
        precompile.write_counts(table, archs[0], progress)
        return
    subjects = precompile.named_subjects() if folder is None else precompile.subjects_of(folder)
    layers = precompile.count_layers(subjects, archs, DecodeStep(length, batch), progress=progress)
    kernels = [(layer.layout, kernel) for layer in layers for kernel in layer.kernels]
    failed = sum(kernel.error is not None for _, kernel in kernels)
    rates = {f"sm_{number}": precompile.DEVICE_OF_ARCH.get(number) for number in archs}

    def text() -> None:
        on = ", ".join(f"{of}: {name}" for of, name in rates.items())
        _print_layers(layers, f"A decode step's attention, {batch} x {length} tokens, predicted ({on})")
        for layout, kernel in kernels:
            if kernel.error is not None:
                say(f"{layout}, {kernel.name}, {kernel.arch}: {kernel.error[:400]}")
        say(f"{len(kernels)} kernels, {failed} failed; --json has registers and shared memory of each")

    about = {**provenance(command_line()), "predicted_for": rates, "batch_size": batch, "length": length}
    output.show({**about, "failed": failed, "layers": [*map(asdict, layers)]}, text)
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
def schedule(folder: Path, output: Json, sms: Count = 132, lengths: str = "32768", target_device: str = "h200") -> None:
    """Simulate how evenly a decode step's attention loads a GPU: unsplit, the papers' greedy schedule, equal slices.

    Arithmetic on predicted costs; nothing is run, and no GPU is needed.

    Args:
        sms: Streaming multiprocessors of the GPU.
        lengths: Cached tokens of each sequence of the batch: 32768, or 8x32768,200.
    """
    check_folder(folder)

    from ..bench.records import provenance
    from ..models.compressed import CompressedCheckpoint
    from ..prediction.devices import find_device
    from ..prediction.simulation import simulate

    tokens, device = parse_lengths(lengths), find_device(target_device)
    checkpoint = CompressedCheckpoint(folder)
    balances = simulate(checkpoint.layouts, checkpoint.shape, tokens, device, sms, checkpoint.dtype.itemsize)

    def text() -> None:
        ratios = [(f"{b.largest_over_mean:.3f}", f"{max(b.loads):.3f}") for b in balances]
        rows = [(b.schedule, a, b.parts, b.worst_layer, c) for b, (a, c) in zip(balances, ratios, strict=True)]
        right = "largest over mean", "partial results", "worst layer", "largest over mean there"
        print_table(f"{folder}: {len(tokens)} sequence(s) on {sms} SMs", ("schedule",), right, rows)

    found = {"schedules": [*map(asdict, balances)]}
    output.show({**provenance(command_line()), "sms": sms, "lengths": tokens, **found}, text)


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
    folder: Path, output: Json, processes: str = "2,4,8", tokens: Count = 1024, target_device: str = "h200"
) -> None:
    """Count the bytes that a prompt sends over several processes (generate --parallel sequence), and alternatives.

    Counted from the checkpoint's layouts. Times are predicted from data-sheet rates of links, as the busiest process's
    bytes over the rate: nothing is timed.

    Args:
        processes: Numbers of processes, as in 2,4,8.
        tokens: Tokens of the prompt.
    """
    from ..bench.traffic import LABELS, count_traffic
    from ..prediction.devices import find_device

    counts = numbers("--processes", processes)
    result = count_traffic(folder, counts, tokens, find_device(target_device), command_line())

    def text() -> None:
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

    output.show(result, text)


@command(epilog="Example: rotor bench out/demo --lengths 32768 --batch 1,8 --json")
def bench(
    folder: Path,
    compute: DeviceOptions,
    output: Printed,
    lengths: str | None = None,
    prefill: str | None = None,
    batch: str | None = None,
    repetitions: Count = 20,
    new_tokens: Annotated[int, typer.Option(min=0)] = 32,
    model: Path | None = None,
    engine: Literal["transformers", "vllm"] = "transformers",
    cache_mb: Annotated[float, typer.Option(min=0.1)] = 1074,
) -> None:
    """Measure attention and generation of a checkpoint beside PyTorch's and the source model.

    Every row of attention is compared with float64 first; if one is wrong, nothing is reported. Without a GPU only what
    a CPU runs is measured, and the Triton kernels are listed as not measured.

    With --engine vllm: tokens of cache in equal memory, throughput, latency and preemptions by `vllm bench serve`, on
    the device that vLLM is built for. --batch are requests at once (1,4,16), --prefill tokens of a prompt (512);
    --lengths and --device do not apply.

    Args:
        lengths: Cached tokens when decoding, as in 8192,32768. [32768; on a CPU 2048]
        prefill: Tokens of a prompt. [8192; on a CPU 512]
        batch: Sequences in a batch. [1,8; on a CPU 1]
        repetitions: Of every row of the attention; of a model a quarter.
        new_tokens: Tokens that whole models generate; 0 leaves them out.
        engine: transformers, or vllm: the checkpoint and its source served side by side.
        cache_mb: Megabytes of cache of each server, with --engine vllm.
    """
    options = (("--lengths", lengths), ("--prefill", prefill), ("--batch", batch))
    decode, prompts, batches = (None if text is None else tuple(numbers(option, text)) for option, text in options)
    compute.checked()
    check_folder(folder)
    progress = output.progress()
    if engine == "vllm":
        from ..bench.serving import ServingSettings, bench_serving

        if len(prompts or (1,)) != 1 or new_tokens < 2:
            message = "--engine vllm measures prompts of one length, and at least 2 new tokens."
            raise UsageError(message, "Give --prefill 512.")
        loads = batches or (1, 4, 16), (prompts or (512,))[0], new_tokens
        serving = ServingSettings(*loads, int(1e6 * cache_mb), max(1, repetitions // 4))
        result = bench_serving(folder, serving, model=model, dtype=compute.dtype, command=command_line())
        output.show(result, lambda: _print_serving(result))
        return

    from ..bench.bench import BenchSettings
    from ..bench.bench import bench as run_bench

    settings = BenchSettings(decode, prompts, batches, repetitions, new_tokens)
    result = run_bench(folder, settings, model=model, **vars(compute), command=command_line(), progress=progress)
    output.show(result, lambda: _print_bench(result))


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
        rows.append((r["row"], load, *_latency(r), in_bytes(r["kv_cache_bytes"])))
    if rows:
        right = ("first token ms", "between tokens ms", "cache")
        print_table("Whole model, transformers' generate", ("row", "batch x tokens"), right, rows)
    for row, why in result["not_measured"].items():
        say(f"not measured: {row}: {why}")


@command(
    epilog="Example: rotor gpu -o gpu.jsonl. Tiles of an export, measured and written into it: "
    "rotor gpu --tune out/demo. Where there is no GPU, to see that it would run: rotor gpu --dry -o dry.jsonl"
)
def gpu(
    output: Json,
    out: Path = Path("gpu.jsonl"),
    tune: Path | None = None,
    dry: bool = False,
) -> None:
    """Test and measure the kernels on this GPU: tests, NVIDIA's sanitizer, attention; or tune them for a checkpoint.

    Runs pytest in a checkout. Exit code 1 if a part failed.

    Args:
        out: JSON lines, one of each measurement.
        tune: A checkpoint whose tiles are measured and written into its kernel_config.json, and no more.
        dry: Toy sizes in Triton's interpreter, on a CPU: everything but the numbers.
    """
    check_file(out)
    from ..bench import gpu as measured

    if tune is not None:
        check_folder(tune)
        records = measured.tune(tune, dry=dry)
        rows = [(r["layer"], f"{1e6 * r['before_s']:.1f}", f"{1e6 * r['after_s']:.1f}") for r in records]
        output.show(records, lambda: print_table("A step's attention", ("layer",), ("us before", "us after"), rows))
        return
    parts = measured.run(out, dry)
    found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]

    def text() -> None:
        load = "{batch_size} x {tokens}, {new_tokens} new"
        cells = [
            (r["layout"], r["cache"], load.format(**r), f"{1e6 * r['seconds']:.1f}", f"{r['over_uncompressed']:.2f}")
            for r in found
        ]
        left = ("layout", "cache", "batch x tokens")
        print_table("Attention of a layer", left, ("us", "over uncompressed"), cells)
        for name, outcome in parts.items():
            say(f"{name}: {outcome}")

    output.show({"parts": parts, "measured": found}, text)
    if any(outcome.startswith("failed") for outcome in parts.values()):
        raise typer.Exit(1)
