"""Speed: kernels compiled ahead of time (compile), measured (bench) and tuned (tune)."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import typer

from ..checked import JsonObject
from ..progress import in_bytes
from ..recipe.requests import BenchRequest
from .app import check_folder, command, command_line
from .console import print_table, say
from .options import OutputOptions


@command(name="compile", epilog="Example: rotor compile out/demo --arch sm_80,sm_90")
def compile_kernels(folder: Path, output: OutputOptions, arch: str = "sm_90") -> None:
    """Compile a checkpoint's Triton kernels ahead of time; no GPU is needed.

    They go into Triton's own cache ($TRITON_CACHE_DIR, ~/.triton/cache by default), where the machine that serves finds
    them: those that prompts and steps of one token launch in transformers. Others, and those for vLLM's pages, are
    compiled when they are first launched. Exit code 1 if a kernel cannot be compiled.

    Args:
        arch: Architectures of NVIDIA GPUs, as in sm_80,sm_90.
    """
    check_folder(folder)

    from ..tools.bench.precompile import compile_layers, parse_archs, subjects_of
    from ..tools.bench.records import provenance

    archs = parse_archs(arch)
    progress = output.progress()
    layers = compile_layers(subjects_of(folder), archs, progress)
    kernels = [(layer.layout, kernel) for layer in layers for kernel in layer.kernels]
    failed = [(layout, kernel) for layout, kernel in kernels if kernel.error is not None]

    def text() -> None:
        rows = [(layer.layout, layer.arch, layer.layers, len(layer.kernels)) for layer in layers]
        print_table(str(folder), ("layer", "arch"), ("layers", "kernels"), rows)
        for layout, kernel in failed:
            say(f"{layout}, {kernel.name}, {kernel.arch}: {str(kernel.error)[:400]}")
        say(f"{len(kernels)} kernels, {len(failed)} failed")

    shown = {**provenance(command_line()), "failed": len(failed), "layers": [*map(asdict, layers)]}
    output.show(shown, text)
    if failed:
        raise typer.Exit(1)


@command(epilog="Example: rotor bench out/demo --lengths 32768 --batch 1,8 --json")
def bench(request: BenchRequest, output: OutputOptions) -> None:
    """Measure attention and generation of a checkpoint beside other caches and the source model.

    Other caches, in a decode step: 16 bits, fp8 with one scale, 4 bits with scales a token and head. PyTorch's own
    attention by the back end that it chooses, by flash and by cuDNN, where the device has them; ratios are over the
    fastest at 16 bits. Every row of attention is compared with float64 first; if one is wrong, nothing is
    reported. Without a GPU only what a CPU runs is measured: the Triton kernels are listed as not measured, and caches
    of fp8 and 4 bits are widened by PyTorch at each step, which says nothing of a server's kernel.
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
        rows.append((r["row"], r["phase"], load, middle, f"{low} - {high}", f"{r['over_uncompressed']:.2f}"))
    title = f"Attention of layers {result['layers']}, medians, cold caches"
    print_table(title, ("row", "phase", "batch x tokens"), ("ms", "quartiles", "over uncompressed"), rows)
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


@command(epilog="Example: rotor tune out/demo")
def tune(folder: Path, output: OutputOptions) -> None:
    """Measure tiles of the decode kernels on this GPU, and write the fastest into a checkpoint's kernel_config.json.

    For every kind of layer, at 8 x 32K tokens, beside its tiles so far; what is wrong or slower is not taken. Exit code
    2 without a GPU.
    """
    check_folder(folder)

    from ..tools.bench import tuning

    output.progress()  # shows what the logger says
    records = tuning.tune(folder)
    rows = [(r["layer"], f"{1e6 * r['before_s']:.1f}", f"{1e6 * r['after_s']:.1f}") for r in records]
    output.show(records, lambda: print_table("A step's attention", ("layer",), ("us before", "us after"), rows))
