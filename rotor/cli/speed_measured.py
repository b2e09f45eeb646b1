"""Speed, measured: bench, gpu."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from .app import check_folder, check_results, command, command_line, numbers, print_json
from .console import in_bytes, print_table, say, show_progress

LAYERS = 4
"""Layers that `rotor bench` measures where nothing else is asked for."""


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
    model: Path | None = None,
    engine: Annotated[
        str, typer.Option(help="transformers, or vllm: the checkpoint and its source served side by side.")
    ] = "transformers",
    device: str = "auto",
    dtype: str = "auto",
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Measure attention and generation of a checkpoint beside PyTorch's, a Palu-style baseline and the source model.

    Every row of attention is compared with float64 first; if one is wrong, nothing is reported. Without a GPU only what
    a CPU runs is measured, and the Triton kernels are listed as not measured.

    With --engine vllm: tokens of cache, throughput and latency in vLLM, on the device that it is built for. --batch are
    requests at once (1,4,16), --prefill tokens of a prompt (512); --lengths, --layers and --device do not apply.
    """
    from ..recipe.settings import Compute

    check_results(out)
    if engine not in ("transformers", "vllm"):
        raise UsageError(f"--engine {engine}: expected transformers or vllm.", "Leave it out, or give vllm.")
    in_vain = {"--lengths": lengths, "--layers": layers != LAYERS, "--device": device != "auto"}
    if engine == "vllm" and any(in_vain.values()):
        given = ", ".join(option for option, value in in_vain.items() if value)
        raise UsageError(f"{given}: not with --engine vllm.", "Leave it out.")
    loads = [
        None if text is None else tuple(numbers(option, text))
        for option, text in (("--lengths", lengths), ("--prefill", prefill), ("--batch", batch))
    ]
    Compute(device, dtype).check()
    check_folder(folder)
    progress = show_progress(quiet)

    from ..bench.records import write_report

    if engine == "vllm":
        from ..bench.serving import ServingSettings, bench_serving

        default = ServingSettings()
        prompts = loads[1] or (default.prompt_tokens,)
        if len(prompts) != 1 or new_tokens < 2:
            raise UsageError(
                "--engine vllm measures prompts of one length, and at least 2 new tokens.", "Give --prefill 512."
            )
        serving = ServingSettings(
            loads[2] or default.concurrency,
            prompts[0],
            new_tokens,
            repetitions=max(1, repetitions // 4),
        )
        result = bench_serving(folder, serving, model=model, dtype=dtype, command=command_line())
    else:
        from ..bench.bench import CPU_LOADS, GPU_LOADS, BenchSettings
        from ..bench.bench import bench as run_bench
        from ..models.hardware import pick_device

        usual = GPU_LOADS if pick_device(device).type == "cuda" else CPU_LOADS
        decode, prompts, batches = (given or default for given, default in zip(loads, usual, strict=True))
        settings = BenchSettings(decode, prompts, batches, layers, repetitions, new_tokens)
        result = run_bench(
            folder, settings, model=model, device=device, dtype=dtype, command=command_line(), progress=progress
        )
    if out is not None:
        write_report(out, result)
    if as_json:
        print_json(result)
    elif engine == "vllm":
        _print_serving(result)
    else:
        _print_bench(result)


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
    say(f"Device: {result['device']['name']} ({result['device']['type']}), {result['dtype']}")
    rows: list[tuple[Any, ...]] = []
    for r in result["attention"]:
        low, middle, high = (1e3 * r["seconds"][key] for key in ("low", "median", "high"))
        load = f"{r['batch_size']} x {r['length']}"
        quartiles = f"{low:.3f} - {high:.3f}"
        rows.append((r["row"], r["phase"], load, f"{middle:.3f}", quartiles, f"{r['over_stock']:.2f}"))
    print_table(
        f"Attention of layers {result['layers']}, medians, cold caches",
        ("row", "phase", "batch x tokens"),
        ("ms", "quartiles", "over the fastest SDPA"),
        rows,
    )
    rows = []
    for r in result["model"]:
        times = (f"{1e3 * r[key]['median']:.2f}" for key in ("time_to_first_token_s", "time_between_tokens_s"))
        load = f"{r['batch_size']} x {r['length']}"
        rows.append((r["row"], load, *times, in_bytes(r["kv_cache_bytes"]), r["largest_batch"]))
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
    out: Annotated[Path, typer.Option("--out", "-o", help="JSON lines, one of each measurement.")] = Path("gpu.jsonl"),
    minutes: Annotated[float, typer.Option(min=0.1, help="That everything may take.")] = 40.0,
    tune: Annotated[
        Path | None,
        typer.Option(
            help="A checkpoint whose tiles are measured and written into its kernel_config.json, and no more."
        ),
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry", help="Toy sizes in Triton's interpreter, on a CPU: everything but the numbers.")
    ] = False,
    as_json: bool = False,
) -> None:
    """Test and measure the kernels on this GPU: tests, NVIDIA's sanitizer, attention; or tune them for a checkpoint.

    Runs pytest in a checkout. Exit code 1 if a part failed.
    """
    if tune is not None:
        check_folder(tune)
    from ..bench import gpu as measured

    if tune is not None:
        records = measured.tune(tune, dry=dry)
        rows = [(r["layer"], f"{1e6 * r['before_s']:.1f}", f"{1e6 * r['after_s']:.1f}") for r in records]
        if as_json:
            print_json(records)
        else:
            print_table("A step's attention", ("layer",), ("us before", "us after"), rows)
        return
    check_results(out)
    parts = measured.run(out, minutes, dry)
    found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    if as_json:
        print_json({"parts": parts, "measured": found})
    else:
        measured_rows = []
        for r in found:
            load = f"{r['batch_size']} x {r['tokens']}, {r['new_tokens']} new"
            times = f"{1e6 * r['seconds']:.1f}", f"{r['over_uncompressed']:.2f}"
            measured_rows.append((r["layout"], r["cache"], load, *times))
        right = ("us", "over uncompressed")
        print_table("Attention of a layer", ("layout", "cache", "batch x tokens"), right, measured_rows)
        for name, outcome in parts.items():
            say(f"{name}: {outcome}")
    if any(outcome.startswith("failed") for outcome in parts.values()):
        raise typer.Exit(1)
