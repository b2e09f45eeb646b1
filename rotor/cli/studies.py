"""Comparing and showing: study, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..tools.study.parts import PARTS
from .app import command, numbers, resumable, split
from .console import print_table, say
from .options import NONE, Count, MemoryOptions, OptionalCount, Printed

ABOUT_PARTS = (
    "methods, every cache policy and recipes at equal bytes, takes longest; match finds the bytes at which a recipe is "
    "as good as fp8, 4 bits, KIVI and KVTC. FILE.py:CLASS is a part of your own."
)


@command(epilog="Example: rotor study artifacts/demo-model --recipes fdc,rotor -o studies/demo")
def study(
    model: str,
    out: Path,
    compute: MemoryOptions,
    output: Printed,
    recipes: str = "fdc,rotor",
    parts: Annotated[
        str, typer.Option(help=f"Some of {', '.join(PARTS)}, separated by commas. {ABOUT_PARTS}")
    ] = "curves",
    sizes: str = "",
    caches: str = "",
    text: Path | None = None,
    distance: OptionalCount = None,
    overrides: list[str] = NONE,
    batch_tokens: Count = 2048,
    plots: Annotated[bool, typer.Option(help="Draw the results, which needs matplotlib.")] = True,
) -> None:
    """Compare recipes on the same model, tokens and held-out data; writes JSON, CSV, Markdown and plots.

    Every measured point is kept at once, so that an interrupted study continues where it was with the same command;
    tables and plots are written after each part.
    --set applies to all recipes; the number of tokens is the largest that any of them asks for, and their seed, row
    length, evaluation and search are those of the first.

    Args:
        out: Study folder; one with the same settings is continued.
        recipes: Names of bundled recipes or YAML files, separated by commas.
        sizes: Bytes of cache per token at which the parts methods and match measure recipes, separated by commas; by
            default sizes from 3.75 % to 50 % of the uncompressed cache.
        caches: Cache policies of your own for the part methods, separated by commas, as --cache takes them.
    """
    from ..models.hub import check_name
    from ..recipe import load_recipe

    names = split(recipes)
    for recipe in names:
        load_recipe(recipe, overrides)
    compute.checked()
    check_name(model)

    from ..tools.study.study import study as run_study

    request: dict[str, Any] = {
        "parts": split(parts),
        "sizes": numbers("--bytes", sizes) if sizes else (),
        "caches": split(caches),
    }
    request |= {"text": text, "distance": distance, "batch_tokens": batch_tokens, "plots": plots} | vars(compute)
    with resumable(lambda: f"What was measured is kept in {out}: the same command goes on."):
        result = run_study(model, out, names, overrides, **request, progress=output.progress())
    shown: dict[str, Any] = {"study": str(out), "settings": result.settings, "records": result.records}
    shown |= {"files": [*map(str, result.files)], "measured_records": result.added, "seconds": result.seconds}
    output.show(shown, lambda: _print_study(result))


def _print_study(result: Any) -> None:
    """What every recipe removes at the target accuracies, and where all of it is."""
    from ..tools.study.parts.curves import curves, target_tables

    for table in target_tables(curves(result.records)):
        print_table(table.text, table.header[:1], table.header[1:], table.rows)
    names = ", ".join(path.name for path in result.files)
    records = f"{len(result.records)} records, {result.added} of them new"
    say(f"{result.folder}: {records}, {result.seconds:.1f} s; see {names}")


@command(epilog="Example: rotor report runs/demo -o report.html")
def report(folder: Path, output: Printed, out: Path | None = None) -> None:
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
