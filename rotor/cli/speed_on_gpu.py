"""What a GPU is asked first: gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError
from .app import AsJson, Quiet, app, check_folder, check_results, command_line, print_json, split
from .console import print_table, say, show_progress


@app.command(
    epilog="Example: rotor gpu -o gpu.jsonl. Some of it: rotor gpu --phases tests,decode --minutes 15. Where there is "
    "no GPU, to see that it would run: rotor gpu --dry -o dry.jsonl"
)
def gpu(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="JSON lines, one a row, as they come; the verdict goes beside, as .json."),
    ] = Path("gpu.jsonl"),
    minutes: Annotated[float, typer.Option(min=0.1, help="That everything may take.")] = 40.0,
    phases: Annotated[
        str | None,
        typer.Option(help="Some of device,tests,sanitizer,decode,sweep,queries,prefill,model,vllm. [all]"),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="That vLLM serves; default: a quick one of the bundled model.")
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry", help="Toy sizes in Triton's interpreter, on a CPU: everything but the numbers.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Test and measure the kernels on this GPU, what tells most first, in at most forty minutes.

    Every phase runs in a process of its own within its time, and every row is on disk before the next begins: what
    fails, hangs or ends the CUDA context is one red row. Called again, it goes on where it was: what is measured, on
    this device at this commit, is not measured again. Exit code 1 if a row is red.
    """
    import torch

    from ..bench.gpu.phases import NAMES
    from ..bench.gpu.records import read
    from ..bench.gpu.runner import GpuSettings, run_phases
    from ..bench.gpu.verdict import judge
    from ..bench.provenance import provenance
    from ..bench.report import write_report

    check_results(out)
    if checkpoint is not None:
        check_folder(checkpoint)
    settings = GpuSettings(out, minutes, NAMES if phases is None else tuple(split(phases)), dry, checkpoint)
    settings.check()
    if not dry and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here.", "See that it would run: rotor gpu --dry")
    progress = show_progress(quiet)
    run_phases(settings, progress.message)
    verdict = {**provenance(command_line()), **judge(read(out))}
    write_report(out.with_suffix(".json"), verdict)
    if as_json:
        print_json(verdict)
    else:
        _print_verdict(verdict, out)
    if verdict["failed"]:
        raise typer.Exit(1)


def _print_verdict(verdict: dict[str, Any], out: Path) -> None:
    marks = {True: "met", False: "MISSED", None: "not measured"}
    rows = [(goal["name"], goal["wanted"], goal["got"], marks[goal["met"]]) for goal in verdict["goals"]]
    dry = ", a dry run: nothing is claimed" if verdict["dry"] else ""
    print_table(f"{verdict['device']['name']}{dry}", ("goal",), ("wanted", "got", ""), rows)
    for row in verdict["failed"]:
        say(f"red: {row['phase']}, {row['row']}: {row.get('why', '')[:200]}")
    for row in verdict["left_out"]:
        say(f"left out: {row['phase']}, {row['row']}: {row.get('why', '')[:120]}")
    counts = ", ".join(f"{count} {status}" for status, count in verdict["rows"].items())
    say(f"{counts}; {out}, {out.with_suffix('.json')}")
