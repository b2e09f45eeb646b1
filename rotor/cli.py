"""The `rotor` command. Prints; everything else is in the library."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from . import __version__
from .errors import Interrupted, RotorError, UsageError
from .logs import log
from .partial import PartialRun
from .progress import Advance, Progress


class Commands(typer.core.TyperGroup):
    """The commands; one that is interrupted says so, with its exit code."""

    def invoke(self, ctx: Any) -> Any:
        with _resumable(lambda: "Nothing was written half; give the same command again."):
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Shrink the KV cache of a decoder-only language model along its hidden dimension, at a stated accuracy.",
    epilog="Exit codes: 0 done, 1 a model, a file or the data is bad, 2 the request is, 3 the accuracy cannot be "
    "reached or is not met, 130 interrupted (Ctrl-C or SIGTERM).",
    rich_markup_mode=None,
)
MAX_NUMBER = 1 << 30
stdout, stderr = Console(width=None if sys.stdout.isatty() else 132), Console(stderr=True)

Model = Annotated[str, typer.Argument(help="Folder of the model (config.json and safetensors), or a hub id.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
RecipeOverrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe field; may be repeated.")
]
Device = Annotated[str, typer.Option(help="auto (the GPU if there is one), cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16 or float16.")]
BatchTokens = Annotated[int, typer.Option(min=1, help="Tokens in one forward pass of a calibration.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a non-empty output folder.")]
Offload = Annotated[
    str,
    typer.Option(
        metavar="WHEN",
        help="Whether to read weights from disk layer by layer: auto (if they do not fit in memory), always or never.",
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(metavar="MAP", help="auto spreads the model over several GPUs; needs the package accelerate."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars and no messages.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done and what it takes; write nothing.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Also tell how long each stage takes.")]


class RateColumn(ProgressColumn):
    """Units per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{_human(speed)} {task.fields['unit']}/s")


class ConsoleProgress(Progress):
    """Bars on stderr, if that is a terminal."""

    @contextmanager
    def task(self, name: str, total: float | None, unit: str) -> Iterator[Advance]:
        if not stderr.is_terminal:
            yield lambda done: None
            return
        columns = (
            TextColumn("{task.description:18}"),
            BarColumn(),
            RateColumn(),
            TimeRemainingColumn(elapsed_when_finished=True) if total is not None else TimeElapsedColumn(),
        )
        with RichProgress(*columns, console=stderr, transient=True) as bars:
            task = bars.add_task(name, total=total, unit=unit)
            yield lambda done: bars.advance(task, done)


class ConsoleHandler(logging.Handler):
    """What the logger is told, on stderr; above the bars, if there are any."""

    def emit(self, record: logging.LogRecord) -> None:
        stderr.print(record.getMessage(), highlight=False, markup=False, soft_wrap=True)


def _is_first_process() -> bool:
    """Of those that torchrun started; the others are silent."""
    return os.environ.get("RANK", "0") == "0"


def _progress(quiet: bool, verbose: bool = False) -> Progress:
    """What shows progress, having sent messages to stderr."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    silent = quiet or not _is_first_process()
    for old in [handler for handler in log.handlers if isinstance(handler, ConsoleHandler)]:
        log.removeHandler(old)
    log.addHandler(ConsoleHandler(logging.CRITICAL if silent else logging.DEBUG if verbose else logging.INFO))
    log.setLevel(logging.DEBUG if verbose else logging.INFO)
    return Progress() if silent else ConsoleProgress()


@contextmanager
def _resumable(how: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C becomes an error that says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted.", how()) from None


def _version(value: bool) -> None:
    if value:
        print(f"rotor {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


@app.command(
    epilog="Example: rotor calibrate artifacts/demo-model -o runs/demo --recipe fdc --set tokens.count=16384. "
    "Several processes that share the tokens: torchrun --nproc-per-node 4 -m rotor calibrate ... "
    "After an interruption: the same command with --resume."
)
def calibrate(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Run folder to write.")],
    recipe: Annotated[
        str, typer.Option(help="Name of a bundled recipe (see `rotor recipes`) or a YAML file.")
    ] = "rotor",
    revision: Revision = None,
    overrides: RecipeOverrides = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    batch_tokens: BatchTokens = 2048,
    offload: Offload = "auto",
    device_map: DeviceMap = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with an unfinished run (RUN.partial), after its last finished layer."),
    ] = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Find the bases of the model's KV heads and write them to a run folder."""
    from .calibrate import calibrate as run_calibrate
    from .dry_run import plan_calibration

    progress = _progress(quiet or dry_run, verbose)
    arguments: dict[str, Any] = {
        "model": model,
        "out": out,
        "recipe": recipe,
        "overrides": overrides or [],
        "revision": revision,
        "device": device,
        "dtype": dtype,
        "batch_tokens": batch_tokens,
        "offload": offload,
        "device_map": device_map,
        "overwrite": overwrite,
        "resume": resume,
    }
    if dry_run:
        plan = plan_calibration(**arguments)
        _print_json(plan.to_dict()) if as_json else _print_calibration_plan(plan)
        return
    with _resumable(lambda: _how_to_resume(out)):
        run = run_calibrate(**arguments, progress=progress)
    if not _is_first_process():
        return
    if as_json:
        _print_json({"run": str(run.folder), "recipe": run.recipe.name, **run.info})
        return
    stdout.print(
        f"{run.folder}: {run.recipe.name}, {run.shape.num_layers} layers, candidates (domain-group size) "
        f"{', '.join(run.info['candidates'])}, {run.info['tokens']['count']} tokens",
        highlight=False,
    )
    _print_seconds({name: values["seconds"] for name, values in run.info["stages"].items()})
    stdout.print(f"Next: rotor export {run.folder} -o OUT --accuracy 0.99", highlight=False)


@app.command(epilog="Example: rotor export runs/demo -o out/demo --accuracy 0.99")
def export(
    run: Annotated[Path, typer.Argument(help="Run folder that `rotor calibrate` wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Checkpoint folder to write.")],
    accuracy: Annotated[
        float | None, typer.Option(help="Remove as much as keeps this accuracy (ratio to the model).")
    ] = None,
    compression: Annotated[float | None, typer.Option(help="Remove at least this share of the KV cache.")] = None,
    removal_rate: Annotated[float | None, typer.Option(help="Singular-value removal rate.")] = None,
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Keep all columns; ranks are chosen at load (rank_profile=0.95).")
    ] = False,
    objective: Annotated[
        str | None,
        typer.Option(help="memory (bytes of cache), latency (predicted decode time), or a weight from 0 to 1 between."),
    ] = None,
    target_device: Annotated[
        str | None, typer.Option(help="Device whose decode time is predicted, e.g. h200 (rotor/devices.yaml).")
    ] = None,
    device_file: Annotated[Path | None, typer.Option(help="YAML with further devices.")] = None,
    overrides: RecipeOverrides = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    offload: Offload = "auto",
    device_map: DeviceMap = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a compressed checkpoint; give exactly one of --accuracy, --compression, --removal-rate.

    The first --accuracy on a run measures a table from accuracy to ranks; later ones read it. Only the recipe's
    sections ranks, evaluation, search and objective can still be changed with --set.
    """
    from .dry_run import plan_export
    from .export import export as run_export

    progress = _progress(quiet or dry_run, verbose)
    arguments: dict[str, Any] = {
        "run": run,
        "out": out,
        "accuracy": accuracy,
        "compression": compression,
        "removal_rate": removal_rate,
        "overrides": [*(overrides or []), *_device_overrides(target_device, device_file)],
        "objective": objective,
        "elastic": elastic,
        "device": device,
        "dtype": dtype,
        "offload": offload,
        "device_map": device_map,
        "overwrite": overwrite,
    }
    if dry_run:
        plan = plan_export(**arguments)
        _print_json(plan.to_dict()) if as_json else _print_export_plan(plan)
        return
    with _resumable(
        lambda: f"Nothing was written to {out}; what was measured is kept in {run}: the same command goes on."
    ):
        result = run_export(**arguments, progress=progress)
    report = result.report
    if as_json:
        shown = {k: v for k, v in report.items() if k not in ("tensors", "layouts")}
        _print_json({"folder": str(out), **shown, "seconds": result.seconds, "measured_points": result.measured_points})
        return
    size, value = report["kv_bytes_per_token"], report["accuracy"]
    stdout.print(
        f"{out}: compression {report['compression']['stored']:.3f} ({size['before']} -> {size['after']} KV bytes per "
        f"token), accuracy {value['report']:.4f}{_interval(value)}, {result.measured_points} point(s) measured",
        highlight=False,
    )
    _print_seconds(result.seconds)
    stdout.print(f"Next: rotor validate {out}", highlight=False)


@app.command(epilog="Example: rotor validate out/demo")
def validate(
    folders: Annotated[list[Path], typer.Argument(help="One or more folders that `rotor export` wrote.")],
    model: Annotated[Path | None, typer.Option(help="Source model, if it is not where it was.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder, if it is not where it was.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    offload: Offload = "auto",
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Check integrity, numerics against the source, accuracy on the report split, and measured KV bytes per token.

    Exit code 3: everything is sound, but the stored accuracy target is not met.
    """
    from .validate import validate as run_validate

    progress = _progress(quiet, verbose)
    results = [
        run_validate(folder, model=model, run=run, device=device, dtype=dtype, offload=offload, progress=progress)
        for folder in folders
    ]
    if as_json:
        objects = [result.to_dict() for result in results]
        _print_json(objects[0] if len(objects) == 1 else {"folders": objects})
    else:
        for result in results:
            _print_checks(result)
            _print_seconds(result.seconds)
        _print_summary(results)
    if any(result.damaged for result in results):
        raise typer.Exit(1)
    if not all(result.target_met for result in results):
        raise typer.Exit(3)


@app.command(epilog='Example: rotor generate out/demo "def main(" --max-new-tokens 40')
def generate(
    folder: Annotated[str, typer.Argument(help="A compressed checkpoint (or any model's folder or hub id).")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    profile: Annotated[str | None, typer.Option(help="Rank profile of an elastic checkpoint, e.g. 0.95.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy; above, samples at this temperature.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue a prompt with transformers' generate()."""
    from .generate import continue_prompt

    _progress(quiet=True)
    result = continue_prompt(folder, prompt, max_new_tokens, temperature, seed, device, dtype, profile)
    if as_json:
        _print_json(result)
    else:
        print(result["text"])


@app.command(epilog="Example: rotor study artifacts/demo-model --recipes fdc,rotor -o studies/demo")
def study(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Study folder; one with the same settings is continued.")],
    recipes: Annotated[str, typer.Option(help="Names of bundled recipes or YAML files, with commas.")] = "fdc,rotor",
    parts: Annotated[
        str | None,
        typer.Option(
            help="Some of curves, sources, tokens, degradation, pruning, ablation, front, with commas; by default all "
            "that can run (pruning needs recipes with a section prune, ablation needs ablations, front a recipe in "
            "focus with ranks.method=global)."
        ),
    ] = None,
    focus: Annotated[
        str | None,
        typer.Option(help="Recipes for the parts other than curves and ablation; by default the first of --recipes."),
    ] = None,
    ablation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:KEY=VALUE ...", help="Overrides, with spaces, of the recipe --ablation-base; may be repeated."
        ),
    ] = None,
    ablations: Annotated[
        Path | None, typer.Option(help="YAML file with the same: a mapping from names to lists of KEY=VALUE.")
    ] = None,
    ablation_base: Annotated[str, typer.Option(help="Recipe that the ablations change.")] = "rotor",
    at: Annotated[float, typer.Option(help="Compression at which the parts tokens and pruning are measured.")] = 0.5,
    counts: Annotated[
        str, typer.Option(help="Numbers of calibration tokens for the part tokens.")
    ] = "512,1024,2048,4096,8192,16384,32768",
    overrides: RecipeOverrides = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    batch_tokens: BatchTokens = 2048,
    offload: Offload = "auto",
    device_map: DeviceMap = None,
    plots: Annotated[bool, typer.Option(help="Draw the results, which needs matplotlib.")] = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare recipes on the same model, tokens and held-out data; writes JSON, CSV, Markdown and plots.

    Every measured point is kept at once, so that an interrupted study continues where it was with the same command.
    --set applies to all recipes; the number of tokens is the largest that any of them asks for, and their seed, row
    length, evaluation and search are those of the first.
    """
    from .study import PARTS, parse_ablations, parse_counts
    from .study import study as run_study

    with _resumable(lambda: f"What was measured is kept in {out}: the same command goes on."):
        result = run_study(
            model,
            out,
            _split(recipes),
            overrides or [],
            parts=PARTS if parts is None else _split(parts),
            focus=None if focus is None else _split(focus),
            ablations=parse_ablations(ablation or [], ablations),
            ablation_base=ablation_base,
            at=at,
            counts=parse_counts(_split(counts)),
            device=device,
            dtype=dtype,
            batch_tokens=batch_tokens,
            offload=offload,
            device_map=device_map,
            plots=plots,
            progress=_progress(quiet, verbose),
        )
    if as_json:
        files = [str(path) for path in result.files]
        shown = {"study": str(out), "settings": result.settings, "records": result.records, "files": files}
        _print_json({**shown, "measured_records": result.added, "seconds": result.seconds})
        return
    _print_targets(result.records)
    stdout.print(
        f"{out}: {len(result.records)} records, {result.added} of them new, {result.seconds:.1f} s; "
        f"see {', '.join(path.name for path in result.files)}",
        highlight=False,
    )


@app.command(epilog="Example: rotor inspect artifacts/demo-model --recipe fdc")
def inspect(
    model: Model,
    recipe: Annotated[str, typer.Option(help="Recipe whose needs are shown: a bundled one or a YAML file.")] = "rotor",
    revision: Revision = None,
    overrides: RecipeOverrides = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    batch_tokens: BatchTokens = 2048,
    as_json: AsJson = False,
) -> None:
    """Tell what a model is to rotor: attention, cache, what a recipe does with it, memory and disk that it takes.

    Reads the configuration and the headers of the shards, no weights; of a hub id nothing else is fetched.
    """
    from .inspection import inspect as run_inspect

    found = run_inspect(
        model, recipe, overrides or [], revision=revision, device=device, dtype=dtype, batch_tokens=batch_tokens
    )
    if as_json:
        _print_json(found.to_dict())
    else:
        _print_inspection(found)


@app.command(epilog="Example: rotor schedule out/demo --sms 132 --lengths 8x32768,200 --plot balance.png")
def schedule(
    folder: Annotated[Path, typer.Argument(help="A checkpoint that `rotor export` wrote.")],
    sms: Annotated[int, typer.Option(min=1, help="Streaming multiprocessors of the GPU.")] = 132,
    lengths: Annotated[
        str, typer.Option(help="Cached tokens of each sequence of the batch: 32768, or 8x32768,200.")
    ] = "32768",
    target_device: Annotated[str, typer.Option(help="Device whose rates are used (rotor/devices.yaml).")] = "h200",
    device_file: Annotated[Path | None, typer.Option(help="YAML with further devices.")] = None,
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
    from .devices import find_device
    from .provenance import provenance
    from .simulation import parse_lengths, read_layouts, simulate, simulate_prefill

    tokens = parse_lengths(lengths)
    layouts, shape, element_bytes = read_layouts(folder)
    rates = find_device(target_device, None if device_file is None else str(device_file))
    balances = simulate(layouts, shape, tokens, rates, sms, element_bytes)
    prefill = None
    if chunk is not None:
        prefill = simulate_prefill(layouts, shape, chunk, max(tokens), len(tokens), sms, element_bytes)
    if plot is not None:
        from .plots import write_balance_plot

        write_balance_plot(balances, plot)
    if as_json:
        entries = [dataclasses.asdict(balance) for balance in balances]
        found = {"schedules": entries, "prefill": None if prefill is None else dataclasses.asdict(prefill)}
        _print_json({**provenance(_command()), "sms": sms, "lengths": tokens, "chunk": chunk, **found})
        return
    table = Table(title=f"{folder}: {len(tokens)} sequence(s) on {sms} SMs", title_justify="left")
    for column in ("schedule", "largest over mean", "partial results", "worst layer", "largest over mean there"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for b in balances:
        row = b.schedule, f"{b.largest_over_mean:.3f}", str(b.parts), str(b.worst_layer), f"{max(b.loads):.3f}"
        table.add_row(*row)
    stdout.print(table)
    if prefill is not None:
        stdout.print(
            f"Prefill of {chunk} tokens each, time over that of even loads: longest first {prefill.longest_first:.3f}, "
            f"last round redistributed {prefill.redistributed:.3f} ({prefill.cut_launches} of {prefill.launches} "
            "launches cut theirs)",
            highlight=False,
        )


@app.command("compile", epilog="Example: rotor compile out/demo --arch sm_80,sm_90")
def compile_kernels(
    folder: Annotated[Path, typer.Argument(help="A checkpoint that `rotor export` wrote.")],
    arch: Annotated[str, typer.Option(help="Architectures of NVIDIA GPUs, as in sm_80,sm_90.")] = "sm_90",
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16: of activations and cache.")
    ] = "auto",
    batch: Annotated[
        str, typer.Option(help="Sequences of a decode step, as in 1,8; rounded up to powers of two.")
    ] = "1",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compile the Triton kernels of a checkpoint ahead of time and show what each takes; no GPU is needed.

    They go into Triton's own cache ($TRITON_CACHE_DIR, ~/.triton/cache by default). Exit code 1 if one cannot be
    compiled.
    """
    from .precompile import cache_folder, parse_archs, precompile
    from .provenance import provenance

    archs, batch_sizes = parse_archs(arch), _numbers("--batch", batch)
    kernels = precompile(folder, archs, dtype=dtype, batch_sizes=batch_sizes, progress=_progress(quiet))
    failed = [kernel for kernel in kernels if kernel.error is not None]
    if as_json:
        entries = [dataclasses.asdict(kernel) for kernel in kernels]
        about = {**provenance(_command()), "folder": str(folder)}
        _print_json({**about, "cache": cache_folder(), "failed": len(failed), "kernels": entries})
    else:
        _print_kernels(kernels)
        stdout.print(f"{len(kernels) - len(failed)} compiled, {len(failed)} failed; cache: {cache_folder()}")
    if failed:
        raise typer.Exit(1)


@app.command(epilog="Example: rotor bench out/demo --lengths 32768 --batch 1,8 -o bench.json")
def bench(
    folder: Annotated[Path, typer.Argument(help="A checkpoint that `rotor export` wrote.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file to write.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Cached tokens when decoding, as in 8192,32768. [32768; on a CPU 2048]")
    ] = None,
    prefill: Annotated[str | None, typer.Option(help="Tokens of a prompt. [8192; on a CPU 512]")] = None,
    batch: Annotated[str | None, typer.Option(help="Sequences in a batch. [1,8; on a CPU 1]")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers to measure, spread over the depth.")] = 4,
    repetitions: Annotated[int, typer.Option(min=1, help="Of every row of the attention; of a model a quarter.")] = 20,
    new_tokens: Annotated[int, typer.Option(min=0, help="Tokens that whole models generate; 0 leaves them out.")] = 32,
    memory_gb: Annotated[
        float | None, typer.Option(min=0.0, help="Memory for the largest batch, in 1e9 bytes. [the device's]")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Source model, if it is not where it was.")] = None,
    device_file: Annotated[
        Path | None, typer.Option(help="Device file to write the measured rates to, for --device-file of others.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure attention and generation of a checkpoint beside PyTorch's, a Palu-style baseline and the source model.

    Every row is compared with float64 first; if one is wrong, nothing is reported. Without a GPU only what a CPU runs
    is measured, and the Triton kernels are listed as not measured.
    """
    from .bench import bench as run_bench
    from .bench_report import add_device, device_name, write_report
    from .bench_settings import BenchSettings
    from .compress import pick_device

    given = (
        None if text is None else _numbers(option, text)
        for option, text in (("--lengths", lengths), ("--prefill", prefill), ("--batch", batch))
    )
    settings = BenchSettings.of(
        pick_device(device),
        *given,
        layers=layers,
        repetitions=repetitions,
        new_tokens=new_tokens,
        memory_bytes=None if memory_gb is None else int(memory_gb * 1e9),
    )
    result = run_bench(
        folder, settings, model=model, device=device, dtype=dtype, command=_command(), progress=_progress(quiet)
    )
    if out is not None:
        write_report(out, result)
    if device_file is not None:
        add_device(device_file, device_name(result), result)
    if as_json:
        _print_json(result)
        return
    _print_bench(result)
    if device_file is not None:
        stdout.print(f"Rates written: --target-device {device_name(result)} --device-file {device_file}")


@app.command(epilog="Example: rotor report runs/demo -o report.html")
def report(
    folder: Annotated[Path, typer.Argument(help="Folder that `rotor calibrate` or `rotor export` wrote.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="HTML file to write; by default report.html in the folder.")
    ] = None,
    study: Annotated[
        Path | None, typer.Option(help="Study folder; its comparison of calibration tokens is shown.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file that shows spectra, ranks, accuracy, losses, sizes and timings (export writes one too)."""
    from .report import report as write_report

    result = write_report(folder, out, study=study)
    if as_json:
        _print_json({"report": str(result.path), "figures": result.figures, "absent": result.absent})
        return
    stdout.print(f"{result.path}: {len(result.figures)} figures", highlight=False)
    for section, why in result.absent.items():
        stdout.print(f"  {section}: {why}", highlight=False)


@app.command(epilog="Example: rotor recipes --json")
def recipes(as_json: AsJson = False) -> None:
    """List the bundled recipes."""
    from .recipe import bundled_recipes

    found = bundled_recipes()
    if as_json:
        _print_json({name: recipe.to_dict() for name, recipe in found.items()})
        return
    for name, recipe in found.items():
        print(f"{name:8} {recipe.summary}")


def _how_to_resume(out: Path) -> str:
    partial = PartialRun(out)
    if not partial.exists:
        return "No layer was finished and nothing was written; give the same command again."
    return (
        f"{partial.folder} holds {partial.finished_layers} finished layer(s): the same command with --resume goes on."
    )


def _device_overrides(name: str | None, file: Path | None) -> list[str]:
    given = {"device": name, "device_file": None if file is None else json.dumps(str(file))}
    return [f"objective.{key}={value}" for key, value in given.items() if value is not None]


def _command() -> str:
    """What the user gave, for records."""
    return shlex.join(["rotor", *sys.argv[1:]])


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def _print_seconds(seconds: dict[str, float]) -> None:
    stdout.print("Seconds: " + ", ".join(f"{name} {value:.2f}" for name, value in seconds.items()), highlight=False)


def _print_inspection(found: Any) -> None:
    """Two columns: what, and its value."""
    shape = found.shape
    extras = ("RoPE" if found.rotary else "no RoPE") + (", norm on queries and keys" if found.key_norm else "")
    cache = ", ".join(f"{_bytes(size)} at {tokens // 1024} K" for tokens, size in found.kv_cache_bytes.items())
    device = "" if found.available_device_bytes is None else f", {_bytes(found.available_device_bytes)} on the GPU"
    _print_pairs(
        ("model", found.name + (f" at {found.revision}" if found.revision else "")),
        ("family", f"{found.model_type}, {found.dtype}, {found.parameters / 1e6:,.1f} M parameters"),
        ("weights", _bytes(found.weight_bytes)),
        (
            "attention",
            f"{shape.num_layers} layers, {shape.num_heads} query and {shape.num_kv_heads} KV heads of "
            f"{shape.head_dim}, {extras}",
        ),
        ("KV cache", f"{found.kv_bytes_per_token:,} bytes per token: {cache}"),
        ("recipe", f"{found.recipe}, {found.tokens['count']} {found.tokens['source']} tokens"),
        *(("keys", f"{key}: {what}") for key, what in found.keys.items()),
        ("calibrate", _needs(found.calibrate) + f", run folder {_bytes(found.calibrate.kept_disk_bytes)}"),
        ("export", _needs(found.export) + f", checkpoint {_bytes(found.export_disk_bytes)}"),
        ("available", _bytes(found.available_host_bytes) + device),
    )


def _print_calibration_plan(plan: Any) -> None:
    """Two columns: what, and its value."""
    tokens, layers = plan.tokens, f"{plan.num_layers} layers"
    if plan.finished_layers:
        layers += f", {plan.finished_layers} of them done"
    _print_pairs(
        ("calibrate", f"{plan.model} -> {plan.run}; nothing is written in a dry run"),
        ("recipe", f"{plan.recipe}, {tokens['count']} {tokens['source']} tokens in rows of {tokens['seq_len']}"),
        ("work", f"{layers}, on {plan.device} in {plan.dtype}"),
        ("candidates", ", ".join(f"{key} ({domain}, groups of {n})" for key, (domain, n) in plan.candidates.items())),
        *_planned_needs(plan.needs),
    )


def _print_export_plan(plan: Any) -> None:
    """What is known before anything is measured: ranks by layer and sizes by tensor, or how much to measure."""
    goal = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in plan.goal.items())
    measure = f"about {plan.points} point(s), {plan.known_points} are in the table"
    if plan.probed_layers:
        measure = f"probes of {plan.probed_layers} layer(s), then {measure}"
    cache, size = plan.kv_bytes_per_token, plan.checkpoint_bytes
    rows = [
        ("export", f"{plan.run} -> {plan.out}; nothing is written in a dry run"),
        ("recipe", f"{plan.recipe}, {goal}"),
        ("measure", measure if plan.points or plan.probed_layers else "nothing; the table has the point"),
    ]
    if plan.ranks is None:
        rows.append(("ranks", "depend on what is measured"))
    else:
        rows.append(
            ("compression", f"{plan.compression:.3f}, {cache['before']} -> {cache['after']} KV bytes per token")
        )
        rows.append(("tensors", f"{_bytes(size['before'])} -> {_bytes(size['after'])}"))
    _print_pairs(*rows, *_planned_needs(plan.needs))
    if plan.ranks is None:
        return
    table = Table(title="Ranks (key, value) of each group", title_justify="left")
    for column in ("layer", "basis", "ranks"):
        table.add_column(column)
    for index, (key, ranks) in enumerate(zip(plan.choice, plan.ranks, strict=True)):
        table.add_row(str(index), key, " ".join(f"({qk}, {v})" for qk, v in ranks))
    stdout.print(table)
    table = Table(title="Bytes of each tensor that changes", title_justify="left")
    for column in ("tensor", "before", "after"):
        table.add_column(column, justify="left" if column == "tensor" else "right")
    for name, sizes in plan.tensors.items():
        table.add_row(name, f"{sizes['before']:,}", f"{sizes['after']:,}")
    stdout.print(table)


def _planned_needs(needs: Any) -> list[tuple[str, str]]:
    """Memory, disk and time of a plan."""
    rows = []
    for where, parts in (("memory", needs.host_bytes), ("GPU memory", needs.device_bytes)):
        if parts:
            named = ", ".join(f"{name} {_bytes(size)}" for name, size in parts.items())
            there = f"; {_bytes(needs.available_host_bytes)} available" if where == "memory" else ""
            rows.append((where, f"about {_bytes(sum(parts.values()))} ({named}){there}"))
    disk = f"up to {_bytes(needs.disk_bytes)}, of which {_bytes(needs.kept_disk_bytes)} stay"
    rows.append(("disk", f"{disk}; {_bytes(needs.free_disk_bytes)} free"))
    if needs.product_seconds:
        named = ", ".join(f"{name} {seconds:g}" for name, seconds in needs.product_seconds.items())
        total = sum(needs.product_seconds.values())
        rows.append(("time", f"about {total:.1f} s for the matrix products alone ({named}), at the rate measured here"))
    return rows


def _print_pairs(*rows: tuple[str, str]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    stdout.print(table, highlight=False)


def _print_kernels(kernels: list[Any]) -> None:
    """One line a compiled kernel; errors below the table."""
    table = Table()
    table.add_column("kernel", overflow="fold")
    for column in ("arch", "mask", "batch"):
        table.add_column(column)
    for column in ("registers", "spills B", "shared B", "async copies", "16-bit loads", "mma", "s"):
        table.add_column(column, justify="right")
    for k in kernels:
        numbers = (k.registers, k.spill_bytes, k.shared_bytes, k.async_copies, k.scalar_loads, k.matrix_products)
        shown = ("failed" if number is None else str(number) for number in numbers)
        batch = "any" if k.batch_size is None else str(k.batch_size)
        table.add_row(k.name, k.arch, "yes" if k.mask else "no", batch, *shown, f"{k.seconds:.1f}")
    stdout.print(table)
    for k in kernels:
        if k.error is not None:
            stdout.print(f"{k.name}, {k.arch}: {k.error[:400]}", highlight=False, markup=False)


def _print_bench(result: dict[str, Any]) -> None:
    """Attention, whole models, and what was not measured."""
    device, rates = result["device"], result["rates"]
    stdout.print(
        f"Device: {device['name']} ({device['type']}), {result['dtype']}; copies {rates['copy_bytes_per_s'] / 1e9:.1f} "
        f"GB/s, matrix products {rates['matmul_flops_per_s'] / 1e12:.3f} TFLOP/s, measured in this run",
        highlight=False,
    )
    table = Table(title=f"Attention of layers {result['layers']}, medians, cold caches", title_justify="left")
    table.add_column("row", overflow="fold")
    for column in ("device", "phase", "batch x tokens"):
        table.add_column(column)
    for column in ("ms", "quartiles", "of the floor", "speed-up"):
        table.add_column(column, justify="right")
    for r in result["attention"]:
        low, middle, high = (1e3 * r["seconds"][key] for key in ("low", "median", "high"))
        load = f"{r['batch_size']} x {r['length']}"
        spread, share = f"{low:.3f} - {high:.3f}", f"{r['fraction_of_floor']:.1%}"
        table.add_row(r["row"], r["device"], r["phase"], load, f"{middle:.3f}", spread, share, f"{r['speed_up']:.2f}")
    stdout.print(table)
    if result["model"]:
        table = Table(title="Whole model, transformers' generate", title_justify="left")
        for column in ("row", "device", "batch x tokens"):
            table.add_column(column)
        for column in ("first token ms", "between tokens ms", "cache", "peak", "largest batch"):
            table.add_column(column, justify="right")
        for r in result["model"]:
            times = (f"{1e3 * r[key]['median']:.2f}" for key in ("time_to_first_token_s", "time_between_tokens_s"))
            peak = "not measured" if r["peak_bytes"] is None else _bytes(r["peak_bytes"])
            load = f"{r['batch_size']} x {r['length']}"
            table.add_row(
                r["row"], r["device"], load, *times, _bytes(r["kv_cache_bytes"]), peak, str(r["largest_batch"])
            )
        stdout.print(table)
    for r in result["not_measured"]:
        load = "".join(f", {key} {r[key]}" for key in ("phase", "length") if key in r)
        stdout.print(f"not measured: {r['row']}{load}: {r['why']}", highlight=False, markup=False)


def _needs(needs: Any) -> str:
    kind = "one layer of weights at a time" if needs.streamed else "all weights in memory"
    gpu = f" and {_bytes(needs.device_bytes)} on the GPU" if needs.device_bytes else ""
    return f"about {_bytes(needs.host_bytes)} of memory{gpu}, {kind}"


def _bytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def _print_checks(result: Any) -> None:
    table = Table(title=str(result.folder), title_justify="left")
    for column in ("check", "result", "detail"):
        table.add_column(column)
    colours = {"pass": "green", "fail": "red", "skipped": "yellow"}
    for check in result.checks:
        table.add_row(check.name, Text(check.status, style=colours[check.status]), Text(check.detail))
    stdout.print(table)


def _print_summary(results: list[Any]) -> None:
    table = Table(title="KV cache compression", title_justify="left")
    for column in ("folder", "recipe", "target", "accuracy [95 % interval]", "KL"):
        table.add_column(column)
    for column in ("planned", "stored", "measured", "bytes/token"):
        table.add_column(column, justify="right")
    for result in results:
        summary = result.summary
        accuracy = summary.get("accuracy")
        size, share = summary.get("kv_bytes_per_token") or {}, summary.get("compression") or {}
        table.add_row(
            str(result.folder),
            str(summary.get("recipe")),
            "-" if not accuracy or accuracy["target"] is None else f"{accuracy['target']:g}",
            f"{accuracy['value']:.4f}{_interval(accuracy)}" if accuracy else "not measured",
            "-" if not accuracy else f"{accuracy['kl_div']:.4f}",
            *(f"{share[k]:.3f}" if k in share else "-" for k in ("planned", "stored")),
            f"{summary['measured_compression']:.3f}" if "measured_compression" in summary else "-",
            f"{size.get('before')} -> {summary.get('measured_kv_bytes_per_token', size.get('after')):g}",
        )
    stdout.print(table)


def _interval(accuracy: dict[str, Any]) -> str:
    """` [low, high]`, or nothing where a metric has no interval."""
    return "" if accuracy["interval_95"] is None else " [{:.4f}, {:.4f}]".format(*accuracy["interval_95"])


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _numbers(option: str, text: str) -> list[int]:
    """`1,8`; raises UsageError unless they are positive whole numbers."""
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdecimal() and item.isascii() and 0 < int(item) <= MAX_NUMBER for item in items):
        raise UsageError(f"{option} {text}: expected whole numbers from 1 to {MAX_NUMBER}.", f"Example: {option} 1,8")
    return list(dict.fromkeys(int(item) for item in items))


def _print_targets(records: dict[str, dict[str, Any]]) -> None:
    """What every recipe and ablation of a study removes at the target accuracies."""
    rows = {key.split("/")[1]: record for key, record in records.items() if key.endswith("/targets")}
    if not rows:
        return
    table = Table(title="Compression at a target accuracy", title_justify="left")
    table.add_column("recipe")
    targets = sorted({target for record in rows.values() for target in record}, reverse=True)
    for target in targets:
        table.add_column(target, justify="right")
    for name, record in rows.items():
        stored = (record.get(target, {}).get("stored") for target in targets)
        table.add_row(name, *("-" if value is None else f"{value:.3f}" for value in stored))
    stdout.print(table)


def _human(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if abs(value) < 1000 or unit == "G":
            return f"{value:.0f}{unit}" if unit == "" else f"{value:.1f}{unit}"
        value /= 1000
    raise AssertionError


def main() -> None:
    """Entry point: an error of rotor's is two lines on stderr and its exit code; ROTOR_DEBUG=1 shows the traceback."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        with _terminable():
            app()
    except RotorError as error:
        if os.environ.get("ROTOR_DEBUG"):
            raise
        if _is_first_process() or not isinstance(error, Interrupted):
            print(f"error: {error.message}", file=sys.stderr)
            print(f"  {error.hint or 'Set ROTOR_DEBUG=1 for a traceback.'}", file=sys.stderr)
        sys.exit(error.exit_code)


@contextmanager
def _terminable() -> Iterator[None]:
    """A request to end (SIGTERM) is like Ctrl-C: what is half done is removed, what is done is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
