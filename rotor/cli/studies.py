"""Comparing and showing: study, report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from ..study.parts import PARTS
from .app import command, print_json, resumable, split
from .console import print_table, say
from .options import ComputeOptions, Count, Output, Printed

ABOUT_PARTS = (
    "Default: curves, and ablation where there are ablations. all: all but methods (every cache policy, and "
    "recipes at equal bytes) and those behind it, which take longest. FILE.py:CLASS is a part of your own."
)


@command(epilog="Example: rotor study artifacts/demo-model --recipes fdc,rotor -o studies/demo")
def study(
    model: str,
    out: Path,
    compute: ComputeOptions,
    output: Output,
    recipes: str = "fdc,rotor",
    parts: Annotated[str | None, typer.Option(help=f"Some of {', '.join(PARTS)}, with commas. {ABOUT_PARTS}")] = None,
    focus: str | None = None,
    ablation: list[str] | None = None,
    ablations: Path | None = None,
    ablation_base: str = "rotor",
    at: float = 0.5,
    counts: str = "512,1024,2048,4096,8192,16384,32768",
    sizes: str | None = None,
    text: Path | None = None,
    overrides: list[str] | None = None,
    batch_tokens: Count = 2048,
    plots: Annotated[bool, typer.Option(help="Draw the results, which needs matplotlib.")] = True,
    dry_run: bool = False,
) -> None:
    """Compare recipes on the same model, tokens and held-out data; writes JSON, CSV, Markdown and plots.

    Every measured point is kept at once, so that an interrupted study continues where it was with the same command;
    tables and plots are written after each part. --dry-run tells what each part takes.
    --set applies to all recipes; the number of tokens is the largest that any of them asks for, and their seed, row
    length, evaluation and search are those of the first.

    Args:
        out: Study folder; one with the same settings is continued.
        recipes: Names of bundled recipes or YAML files, with commas.
        focus: Recipes for tokens, pruning and tiers; by default the first.
        ablation: Overrides, with spaces, of the recipe --ablation-base; may be repeated.
        ablations: YAML file with the same: a mapping from names to lists of KEY=VALUE.
        ablation_base: Recipe that the ablations change.
        at: Compression at which the part tokens is measured.
        counts: Numbers of calibration tokens for the part tokens.
        sizes: Bytes of cache per token at which methods and shift measure recipes; by default ten, 3.75 % to 50 %.
    """
    from ..models.hub import check_name
    from ..recipe import load_recipe, text_overrides
    from ..study.request import StudyPlan, parse_ablations, parse_counts, split_overrides

    for recipe in split(recipes):
        load_recipe(recipe, split_overrides(overrides or [])[1])
    where = compute.checked()
    check_name(model)

    from ..study.study import plan_study
    from ..study.study import study as run_study

    request: dict[str, Any] = {
        "parts": None if parts is None else split(parts),
        "focus": None if focus is None else split(focus),
        "ablations": parse_ablations(ablation or [], ablations),
        "ablation_base": ablation_base,
        "at": at,
        "counts": parse_counts(split(counts)),
        "sizes": None if sizes is None else parse_counts(split(sizes), "--bytes", "bytes"),
    }
    if dry_run:
        output.progress(dry_run=True)
        plan = StudyPlan.of(split(recipes), [*text_overrides(text), *(overrides or ())], **request)
        estimate = plan_study(model, out, plan, where)
        print_json(dataclasses.asdict(estimate)) if output.as_json else _print_estimate(estimate, out)
        return
    with resumable(lambda: f"What was measured is kept in {out}: the same command goes on."):
        request |= {"text": text, "batch_tokens": batch_tokens, "plots": plots} | vars(compute)
        progress = output.progress()
        result = run_study(model, out, split(recipes), overrides or [], **request, progress=progress)
    if output.as_json:
        shown: dict[str, Any] = {"study": str(out), "settings": result.settings, "records": result.records}
        shown |= {"files": [*map(str, result.files)], "measured_records": result.added, "seconds": result.seconds}
        print_json(shown)
        return
    _print_targets(result.records)
    names = ", ".join(path.name for path in result.files)
    say(f"{out}: {len(result.records)} records, {result.added} of them new, {result.seconds:.1f} s; see {names}")


def _print_estimate(plan: Any, out: Path) -> None:
    """What a dry run found."""
    rows = [(part.part, part.calibrations, part.points) for part in plan.parts]
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    print_table(f"{plan.model} -> {out}: what is left to do", ("part",), ("calibrations", "at most points"), rows)
    say(f"{plan.known_records} record(s) are there already; nothing is written in a dry run.")


def _print_targets(records: dict[str, dict[str, Any]]) -> None:
    """What every recipe and ablation of a study removes at the target accuracies."""
    found = {key.split("/")[1]: record for key, record in records.items() if key.endswith("/targets")}
    if not found:
        return
    targets = sorted({target for record in found.values() for target in record}, reverse=True)
    rows = [(name, *(_reached(record.get(target, {})) for target in targets)) for name, record in found.items()]
    title = "Compression at a target accuracy, chosen by the search split; in brackets the accuracy on the report split"
    print_table(title, ("recipe",), targets, rows)


def _reached(point: dict[str, Any]) -> str:
    if "stored" not in point:
        return "out of reach" if point else "-"
    return f"{point['stored']:.3f} ({point['report']['accuracy']:.4f})"


@command(epilog="Example: rotor report runs/demo -o report.html")
def report(folder: Path, output: Printed, out: Path | None = None) -> None:
    """Write one HTML file that shows spectra, ranks, accuracy, sizes and timings (export writes one too).

    Args:
        folder: Folder that `rotor calibrate` or `rotor export` wrote.
        out: HTML file to write; by default report.html in a run, OUT-report.html beside OUT.
    """
    from ..report.report import report as write_report

    with output.progress().task("report", None, ""):
        result = write_report(folder, out)
    if output.as_json:
        print_json({"report": str(result.path), "figures": result.figures, "absent": result.absent})
        return
    say(f"{result.path}: {len(result.figures)} figures")
    for section, why in result.absent.items():
        say(f"  {section}: {why}")
