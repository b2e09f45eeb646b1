"""Comparing and showing: study, report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..recipe.requests import StudyRequest
from .app import command, resumable
from .console import print_table, say
from .options import OutputOptions

if TYPE_CHECKING:
    from ..tools.study.study import Study


@command(epilog="Example: rotor study artifacts/demo-model --recipes fdc,rotor -o studies/demo")
def study(request: StudyRequest, output: OutputOptions) -> None:
    """Compare recipes on the same model, tokens and held-out data; writes JSON, CSV, Markdown and plots.

    Every measured point is kept at once, so that an interrupted study continues where it was with the same command;
    tables and plots are written after each part.
    --set applies to all recipes; the number of tokens is the largest that any of them asks for, and their seed, row
    length, evaluation and search are those of the first.
    """
    from ..models.hub import check_name
    from ..recipe.reading import load_recipe

    for recipe in request.recipes:
        load_recipe(recipe, request.overrides)
    check_name(str(request.model))

    from ..tools.study.study import run_study

    with resumable(lambda: f"What was measured is kept in {request.out}: the same command goes on."):
        result = run_study(replace(request, progress=output.progress()))
    shown = {
        "study": str(request.out),
        "settings": result.settings,
        "records": result.records,
        "files": [*map(str, result.files)],
        "measured_records": result.added,
        "seconds": result.seconds,
    }
    output.show(shown, lambda: _print_study(result))


def _print_study(result: Study) -> None:
    """Print what every recipe removes at the target accuracies, and where all of it is."""
    from ..tools.study.parts.curves import curves, target_tables

    for table in target_tables(curves(result.records)):
        print_table(table.text, table.header[:1], table.header[1:], table.rows)
    names = ", ".join(path.name for path in result.files)
    records = f"{len(result.records)} records, {result.added} of them new"
    say(f"{result.folder}: {records}, {result.seconds:.1f} s; see {names}")


@command(epilog="Example: rotor report runs/demo -o report.html")
def report(folder: Path, output: OutputOptions, out: Path | None = None) -> None:
    """Write one HTML file that shows spectra, ranks, accuracy, sizes and timings (export writes one too).

    Args:
        folder: Folder that `rotor calibrate` or `rotor export` wrote.
        out: HTML file to write; by default report.html in a run, OUT-report.html beside OUT.
    """
    from ..search.report.report import report as write_report

    with output.progress().task("report", None, ""):
        result = write_report(folder, out)
    lines = [f"{result.path}: {len(result.figures)} figures"]
    lines += [f"  {section}: {why}" for section, why in result.absent.items()]
    data = {"report": str(result.path), "figures": result.figures, "absent": result.absent}
    output.show(data, lambda: say("\n".join(lines)))
