"""Speed: predicted and counted by compile and schedule; measured by bench and gpu."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..checked import JsonObject
from ..checkpoint.output_folder import check_file
from ..errors import UsageError
from ..logs import log
from ..options import Count
from ..progress import in_bytes
from ..recipe.requests import BenchRequest
from .app import check_folder, command, command_line
from .console import print_table, say
from .options import Json, OutputOptions, split

if TYPE_CHECKING:
    from ..tools.bench.precompile import CountedLayer


@command(
    name="compile",
    epilog="Example: rotor compile out/demo --arch sm_80,sm_90. Without a checkpoint: rotor compile --named --json.",
)
def compile_kernels(
    output: OutputOptions,
    folder: Annotated[Path | None, typer.Argument(metavar="OUT", show_default=False)] = None,
    arch: str = "sm_90",
    named: bool = False,
) -> None:
    """Compile Triton kernels ahead of time and count what they issue; no GPU is needed.

    They go into Triton's own cache ($TRITON_CACHE_DIR, ~/.triton/cache by default). For each kernel of a decode step,
    the warp instructions in its machine code are counted per key and KV head. From these follows the predicted time of
    a layer's attention, as a share of the uncompressed layer's, on an A100, L40S, H200 or B200 by the architecture.
    For sm_80 and sm_90 also which pipe of an SM is the limit, the share of the time if each kernel ran as fast as its
    busiest pipe (at least), and the bytes that go through shared memory and L1 (moved in SMs).
    Exit code 1 if a kernel cannot be compiled or counted.

    Args:
        arch: Architectures of NVIDIA GPUs, as in sm_80,sm_90.
        named: Count layouts that have names, without a checkpoint.
    """
    if (folder is not None) == named:
        raise UsageError("expected either OUT or --named.", "Example: rotor compile out/demo")
    if folder is not None:
        check_folder(folder)

    from ..tools.bench import precompile, subjects
    from ..tools.bench.records import provenance

    archs = precompile.parse_archs(arch)
    progress = output.progress()
    chosen = subjects.named_subjects().values() if folder is None else subjects.subjects_of(folder)
    layers = precompile.count_layers(chosen, archs, progress)
    batch = subjects.STEP.batch_size
    length = subjects.STEP.context_tokens
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


def _print_layers(layers: list[CountedLayer], title: str) -> None:
    """One line a layer: instructions, and the share of the uncompressed model's attention."""
    rows = []
    for x in layers:
        moved = "-" if x.path_bytes_per_key is None else f"{x.path_bytes_per_key:.0f}"
        counts = ("-" if of is None else f"{of:.2f}" for of in (x.instructions_per_key, x.share, x.share_of_limit))
        own = x.layout, x.arch, x.limit or "-", x.layers, f"{x.bytes_per_key:g}", moved, x.spilled_bytes
        rows.append((*own, *counts))
    right = (
        "layers",
        "bytes a key and head",
        "moved in SMs",
        "spilled B",
        "instructions",
        "over uncompressed",
        "at least",
    )
    print_table(title, ("layer", "arch", "limit"), right, rows)


@command(epilog="Example: rotor schedule out/demo --sms 132 --lengths 8x32768,200")
def schedule(
    folder: Path,
    output: Json,
    sms: Count = 132,
    lengths: str = "32768",
    target_device: str = "h200",
    prompts: bool = False,
) -> None:
    """Simulate how evenly attention loads a GPU: without a schedule, by that of FDC and ZACK, in equal slices.

    Arithmetic on predicted costs; nothing is run, and no GPU is needed. In a decode step the papers' schedule is the
    longest task first. In prompts it is blocks of B_r query rows by a head's ranks (rows), and these with the last
    round's tasks cut for all SMs (papers); costs are the papers' own, of ranks.

    Args:
        sms: Streaming multiprocessors of the GPU.
        lengths: Cached tokens of each sequence of the batch, or tokens of each prompt: 32768, or 8x32768,200.
        prompts: Simulate prompts of these lengths in place of a decode step.
    """
    check_folder(folder)

    from ..calibration.prediction.devices import find_device
    from ..models.compressed import CompressedCheckpoint
    from ..tools.bench.prompt_simulation import simulate_prompts
    from ..tools.bench.records import provenance
    from ..tools.bench.simulation import simulate

    tokens = parse_lengths(lengths)
    device = find_device(target_device)
    checkpoint = CompressedCheckpoint(folder)
    layouts, shape = checkpoint.layouts, checkpoint.shape
    if prompts:
        of_prompts = {
            keys: simulate_prompts(layouts, shape, tokens, sms, keys == "causal") for keys in ("all", "causal")
        }
    else:
        of_prompts = {"": simulate(layouts, shape, tokens, device, sms, checkpoint.dtype.itemsize)}

    def text() -> None:
        rows = [
            (b.schedule, *([keys] if keys else []), f"{b.largest_over_mean:.3f}", b.parts)
            for keys, balances in of_prompts.items()
            for b in balances
        ]
        left = ("schedule", "keys") if prompts else ("schedule",)
        right = "largest over mean", "tasks" if prompts else "partial results"
        print_table(f"{folder}: {len(tokens)} sequence(s) on {sms} SMs", left, right, rows)

    found = [asdict(b) | ({"keys": keys} if keys else {}) for keys, balances in of_prompts.items() for b in balances]
    output.show({**provenance(command_line()), "sms": sms, "lengths": tokens, "schedules": found}, text)


def parse_lengths(text: str) -> list[int]:
    """`32768`, `200,16000`, `8x32768,64x100`: keys of each sequence; raises UsageError for anything else."""
    lengths: list[int] = []
    for item in text.split(","):
        count, times, length = item.strip().rpartition("x")
        if not length.isdigit() or (times and not count.isdigit()):
            raise UsageError(f"--lengths {text}: {item.strip()!r} is not a number of tokens.", "Example: 8x32768,200")
        lengths += [int(length)] * int(count or 1)
    return lengths


@command(epilog="Example: rotor bench out/demo --lengths 32768 --batch 1,8 --json")
def bench(request: BenchRequest, output: OutputOptions) -> None:
    """Measure attention and generation of a checkpoint beside PyTorch's and the source model.

    Every row of attention is compared with float64 first; if one is wrong, nothing is reported. Without a GPU only what
    a CPU runs is measured, and the Triton kernels are listed as not measured.
    """
    check_folder(request.folder)

    from ..tools.bench.bench import run_bench

    result = run_bench(replace(request, command=command_line(), progress=output.progress()))
    output.show(result, lambda: _print_bench(result))


def _print_bench(result: JsonObject) -> None:
    """Attention, whole models, and what was not measured."""
    say(f"Device: {result['device']['name']} ({result['device']['type']}), {result['dtype']}")
    rows: list[tuple[object, ...]] = []
    for r in result["attention"]:
        low, middle, high = (f"{1e3 * r['seconds'][key]:.3f}" for key in ("low", "median", "high"))
        load = f"{r['batch_size']} x {r['length']}"
        rows.append((r["row"], r["phase"], load, middle, f"{low} - {high}", f"{r['over_stock']:.2f}"))
    title = f"Attention of layers {result['layers']}, medians, cold caches"
    print_table(title, ("row", "phase", "batch x tokens"), ("ms", "quartiles", "over SDPA"), rows)
    rows = []
    for r in result["model"]:
        load = f"{r['batch_size']} x {r['length']}"
        times = (f"{1e3 * r[f'time_{part}_s']['median']:.2f}" for part in ("to_first_token", "between_tokens"))
        over = r["first_token_over_source"]
        first, between = times
        rows.append((r["row"], load, first, f"{over:.2f}" if over else "", between, in_bytes(r["kv_cache_bytes"])))
    if rows:
        right = ("first token ms", "over source", "between tokens ms", "cache")
        print_table("Whole model, transformers' generate", ("row", "batch x tokens"), right, rows)
    for row, why in result["not_measured"].items():
        say(f"not measured: {row}: {why}")


@command(
    epilog="Example: rotor gpu -o gpu.jsonl --minutes 4. Tiles of an export, measured and written into it: "
    "rotor gpu --tune out/demo"
)
def gpu(
    output: OutputOptions,
    out: Path = Path("gpu.jsonl"),
    minutes: Annotated[float, typer.Option(min=0.5, max=600.0)] = 9.0,
    only: str | None = None,
    layouts: str | None = None,
    tune: Path | None = None,
) -> None:
    """Test and measure the kernels on this GPU within some minutes; or tune them for a checkpoint.

    Numbers come before long tests, each job in processes of its own; what they find is appended to the file as it
    comes, and a summary in Markdown is written beside it. Tests, which need a checkout, and what needs NVIDIA's ncu
    or compute-sanitizer, are skipped where these are not. Without a GPU it prints what would run. Exit code 1 if a
    part failed, 2 without a GPU.

    Args:
        out: File to write: JSON lines, one for each measurement and test. The summary has its name with .md.
        minutes: Time for all of it; with less than 9, fewer times, tiles and tests.
        only: Jobs to run, separated by commas: compile, correctness, times, tiles, tune, model, counters, compiled,
            sanitizer, tests.
        layouts: Named layouts to compile, time and tune, separated by commas (default all).
        tune: Only measure tiles for this checkpoint, and write the fastest into its kernel_config.json.
    """
    check_file(out)
    if tune is not None:
        check_folder(tune)
        from ..tools.bench import tuning

        records = tuning.tune(tune)
        rows = [(r["layer"], f"{1e6 * r['before_s']:.1f}", f"{1e6 * r['after_s']:.1f}") for r in records]
        output.show(records, lambda: print_table("A step's attention", ("layer",), ("us before", "us after"), rows))
        return
    from ..tools.bench.gpu.session import run

    output.progress()  # shows what the logger says
    session = run(out, minutes, command_line(), log.info, split(only or ""), split(layouts or ""))
    output.show({"cuda": session.cuda, "records": session.records}, lambda: say(session.summary))
    if not session.cuda:
        raise UsageError("there is no CUDA device here.", "Run it on the GPU that is to serve.")
    if session.failed:
        raise typer.Exit(1)
