"""What a GPU is asked first: gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import check_folder, check_results, command, command_line, print_json, split
from .console import print_table, say, show_progress


@command(
    epilog="Example: rotor gpu -o gpu.jsonl. Tiles of an export, measured and written into it: "
    "rotor gpu --tune out/demo. Where there is no GPU, to see that it would run: rotor gpu --dry -o dry.jsonl"
)
def gpu(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="JSON lines, one a row, as they come; the verdict goes beside, as .json."),
    ] = Path("gpu.jsonl"),
    minutes: Annotated[float, typer.Option(min=0.1, help="That everything may take.")] = 40.0,
    parts: Annotated[str | None, typer.Option(help="Some of tests,sanitizer,measure. [all]")] = None,
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
    quiet: bool = False,
) -> None:
    """Test and measure the kernels on this GPU, what tells most first; or tune them for a checkpoint.

    Every part runs in a process of its own within its time, and every row is on disk before the next begins: what
    fails, hangs or ends the CUDA context is one red row. Exit code 1 if a row is red.
    """
    from ..bench import gpu as bench
    from ..bench.report import write_report

    if tune is not None:
        check_folder(tune)
        records = bench.tune(tune, dry=dry)
        if as_json:
            print_json(records)
        else:
            rows = [(r["layer"], f"{1e6 * r['before_s']:.1f}", f"{1e6 * r['after_s']:.1f}") for r in records]
            print_table("a step's attention", ("layer",), ("us before", "us after"), rows)
        return
    check_results(out)
    settings = bench.GpuSettings(out, minutes, bench.PARTS if parts is None else tuple(split(parts)), dry)
    found = bench.verdict(bench.run(settings, show_progress(quiet).message), command_line())
    write_report(out.with_suffix(".json"), found)
    if as_json:
        print_json(found)
    else:
        ratios = [(name, f"{ratio:.2f}") for name, ratio in found["time_over_uncompressed"].items()]
        print_table("a step's attention over the uncompressed one's", ("layout",), ("time",), ratios)
        for row in found["failed"]:
            say(f"red: {row['part']}, {row['name']}: {row.get('why', '')[:200]}")
        say(f"{', '.join(f'{count} {status}' for status, count in found['rows'].items())}; {out}")
    if found["failed"]:
        raise typer.Exit(1)
