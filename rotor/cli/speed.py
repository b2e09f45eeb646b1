"""Speed: predicted and counted by compile, schedule and traffic; measured by bench and gpu."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import UsageError
from .app import check_folder, check_results, command, command_line, numbers
from .console import in_bytes, print_table, say
from .options import Count, DeviceOptions, Json, Printed, TargetOptions, find_device

LAYERS = 4
"""Layers that `rotor bench` measures where nothing else is asked for."""


@command(
    name="compile",
    epilog="Example: rotor compile out/demo --arch sm_80,sm_90. Without a checkpoint: rotor compile --named --json. "
    "rotor compile --table rotor/prediction/instructions.json counts anew what predictions look up.",
)
def compile_kernels(
    output: Printed,
    folder: Annotated[Path | None, typer.Argument(metavar="OUT", show_default=False)] = None,
    arch: str = "sm_90",
    dtype: str = "auto",
    batch: Count = 8,
    length: Count = 32768,
    named: bool = False,
    table: Path | None = None,
    dump: Path | None = None,
    target_device: str | None = None,
    device_file: Path | None = None,
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
        dump: Folder for cubin, SASS and PTX of every kernel.
    """
    DeviceOptions(dtype=dtype).checked()
    if (folder is not None) + named + (table is not None) != 1:
        raise UsageError("expected one of OUT, --named and --table.", "Example: rotor compile out/demo")
    if folder is not None:
        check_folder(folder)
    check_results(table)

    from ..bench import precompile
    from ..bench.records import provenance
    from ..prediction.cost import DecodeStep

    archs, progress = precompile.parse_archs(arch), output.progress()
    if table is not None:
        precompile.write_counts(table, archs[0], progress)
        return
    names = {number: target_device or precompile.DEVICE_OF_ARCH.get(number) for number in archs}
    devices = {number: find_device(name, device_file) for number, name in names.items() if name is not None}
    subjects = precompile.named_subjects() if folder is None else precompile.subjects_of(folder, dtype)
    step = DecodeStep(length, batch)
    layers = precompile.count_layers(subjects, archs, devices, step, dump=dump, progress=progress)
    kernels = [(layer.layout, kernel) for layer in layers for kernel in layer.kernels]
    failed = sum(kernel.error is not None for _, kernel in kernels)
    rates = {f"sm_{number}": names[number] for number in archs}
    issued = {f"sm_{number}": device.instructions_per_cycle for number, device in devices.items()}
    about = {**provenance(command_line()), "predicted_for": rates, "instructions_per_cycle": issued}
    about |= {"batch_size": batch, "length": length, "failed": failed, "layers": [*map(asdict, layers)]}

    def text() -> None:
        on = ", ".join(f"{of}: {name} at {issued.get(of)} instructions a cycle and SM" for of, name in rates.items())
        _print_layers(layers, f"A decode step's attention, {batch} x {length} tokens, predicted ({on})")
        for layout, kernel in kernels:
            if kernel.error is not None:
                say(f"{layout}, {kernel.name}, {kernel.arch}: {kernel.error[:400]}")
        say(f"{len(kernels)} kernels, {failed} failed; --json has registers, shared memory and pipes of each")

    output.show(about, text)
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
    target: TargetOptions,
    output: Json,
    sms: Count = 132,
    lengths: str = "32768",
    chunk: Annotated[int | None, typer.Option(min=1)] = None,
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
    balances = simulate(layouts, shape, tokens, target.device(), sms, checkpoint.dtype.itemsize)
    prefill = None if chunk is None else simulate_prefill(layouts, shape, chunk, max(tokens), len(tokens), sms)

    def text() -> None:
        ratios = [(f"{b.largest_over_mean:.3f}", f"{max(b.loads):.3f}") for b in balances]
        rows = [(b.schedule, a, b.parts, b.worst_layer, c) for b, (a, c) in zip(balances, ratios, strict=True)]
        right = "largest over mean", "partial results", "worst layer", "largest over mean there"
        print_table(f"{folder}: {len(tokens)} sequence(s) on {sms} SMs", ("schedule",), right, rows)
        if prefill:
            say(
                f"Prefill of {chunk} tokens each as FDC has it, time over that of even loads: row blocks alike "
                f"{prefill['equal']:.3f}, of B_r rows {prefill['balanced']:.3f}"
            )

    found = {"schedules": [*map(asdict, balances)], "prefill": prefill}
    output.show({**provenance(command_line()), "sms": sms, "lengths": tokens, "chunk": chunk, **found}, text)


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
    target: TargetOptions,
    output: Json,
    processes: str = "2,4,8",
    tokens: Count = 1024,
    ethernet_gbit: Annotated[float, typer.Option(min=0.001)] = 100,
    out: Path | None = None,
) -> None:
    """Count the bytes that a prompt sends over several processes (generate --parallel sequence), and alternatives.

    Counted from the checkpoint's layouts. Times are predicted from data-sheet rates of links, as the busiest process's
    bytes over the rate: nothing is timed.

    Args:
        processes: Numbers of processes, as in 2,4,8.
        tokens: Tokens of the prompt.
        ethernet_gbit: Gigabits a second of each process's network.
    """
    check_results(out)

    from ..bench.records import write_report
    from ..bench.traffic import LABELS, count_traffic

    rates, counts = target.device(), numbers("--processes", processes)
    result = count_traffic(folder, counts, tokens, rates, ethernet_gbit * 1e9 / 8, command_line())
    if out is not None:
        write_report(out, result)

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


@command(epilog="Example: rotor bench out/demo --lengths 32768 --batch 1,8 -o bench.json")
def bench(
    folder: Path,
    compute: DeviceOptions,
    output: Printed,
    out: Path | None = None,
    lengths: str | None = None,
    prefill: str | None = None,
    batch: str | None = None,
    layers: Count = LAYERS,
    repetitions: Count = 20,
    new_tokens: Annotated[int, typer.Option(min=0)] = 32,
    model: Path | None = None,
    engine: Literal["transformers", "vllm"] = "transformers",
    cache: str | None = None,
) -> None:
    """Measure attention and generation of a checkpoint beside PyTorch's, a Palu-style baseline and the source model.

    With --cache generation with that policy is measured, too; so an uncompressed model can be, beside its plain cache.

    Every row of attention is compared with float64 first; if one is wrong, nothing is reported. Without a GPU only what
    a CPU runs is measured, and the Triton kernels are listed as not measured.

    With --engine vllm: tokens of cache, throughput and latency in vLLM, on the device that it is built for. --batch are
    requests at once (1,4,16), --prefill tokens of a prompt (512); --lengths, --layers and --device do not apply.

    Args:
        lengths: Cached tokens when decoding, as in 8192,32768. [32768; on a CPU 2048]
        prefill: Tokens of a prompt. [8192; on a CPU 512]
        batch: Sequences in a batch. [1,8; on a CPU 1]
        layers: Layers to measure, spread over the depth.
        repetitions: Of every row of the attention; of a model a quarter.
        new_tokens: Tokens that whole models generate; 0 leaves them out.
        engine: transformers, or vllm: the checkpoint and its source served side by side.
    """
    check_results(out)
    served = engine == "vllm"
    in_vain = {
        "--lengths": lengths,
        "--layers": layers != LAYERS,
        "--device": compute.device != "auto",
        "--cache": cache,
    }
    if served and any(in_vain.values()):
        given = ", ".join(option for option, value in in_vain.items() if value)
        raise UsageError(f"{given}: not with --engine vllm.", "Leave it out.")
    options = (("--lengths", lengths), ("--prefill", prefill), ("--batch", batch))
    loads = [None if text is None else tuple(numbers(option, text)) for option, text in options]
    compute.checked()
    check_folder(folder)
    progress = output.progress()

    from ..bench.records import write_report

    if served:
        from ..bench.serving import ServingSettings, bench_serving

        default = ServingSettings()
        prompts = loads[1] or (default.prompt_tokens,)
        if len(prompts) != 1 or new_tokens < 2:
            message = "--engine vllm measures prompts of one length, and at least 2 new tokens."
            raise UsageError(message, "Give --prefill 512.")
        requests, runs = loads[2] or default.concurrency, max(1, repetitions // 4)
        serving = ServingSettings(requests, prompts[0], new_tokens, repetitions=runs)
        result = bench_serving(folder, serving, model=model, dtype=compute.dtype, command=command_line())
    else:
        from ..bench.bench import CPU_LOADS, GPU_LOADS, BenchSettings
        from ..bench.bench import bench as run_bench
        from ..models.hardware import pick_device

        usual = GPU_LOADS if pick_device(compute.device).type == "cuda" else CPU_LOADS
        decode, prompts, batches = (given or default for given, default in zip(loads, usual, strict=True))
        settings = BenchSettings(decode, prompts, batches, layers, repetitions, new_tokens)
        how: dict[str, Any] = {**vars(compute), "cache": cache, "command": command_line()}
        result = run_bench(folder, settings, model=model, **how, progress=progress)
    if out is not None:
        write_report(out, result)
    output.show(result, lambda: (_print_serving if served else _print_bench)(result))


def _latency(record: dict[str, Any]) -> list[str]:
    times = ("time_to_first_token_s", "time_between_tokens_s")
    return [f"{1e3 * record[time]['median']:.2f}" for time in times]


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
        rates = f"{r['tokens_per_s']:.1f}", f"{r['throughput_over_source']:.2f}"
        rows.append((r["row"], r["concurrency"], *rates, *_latency(r), r["preemptions"]))
    title = "Prompts of {prompt_tokens} tokens, {new_tokens} new ones, medians".format(**result["settings"])
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
    if rows:
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
    output: Json,
    out: Path = Path("gpu.jsonl"),
    minutes: Annotated[float, typer.Option(min=0.1)] = 40.0,
    tune: Path | None = None,
    dry: bool = False,
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
        output.show(records, lambda: print_table("A step's attention", ("layer",), ("us before", "us after"), rows))
        return
    check_results(out)
    from ..bench import gpu as measured

    parts = measured.run(out, minutes, dry)
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
