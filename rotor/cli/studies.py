"""Comparing and showing: study, report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from ..study.parts import PARTS
from .app import command, resumable, split
from .console import print_table, say
from .options import NONE, Count, MemoryOptions, Printed

ABOUT_PARTS = (
    "Default: curves, and ablation where there are ablations. all: all but methods (every cache policy, and "
    "recipes at equal bytes) and those behind it, which take longest (tasks needs --tasks). FILE.py:CLASS is a "
    "part of your own."
)


@command(epilog="Example: rotor study artifacts/demo-model --recipes fdc,rotor -o studies/demo")
def study(
    model: str,
    out: Path,
    compute: MemoryOptions,
    output: Printed,
    recipes: str = "fdc,rotor",
    parts: Annotated[str | None, typer.Option(help=f"Some of {', '.join(PARTS)}, with commas. {ABOUT_PARTS}")] = None,
    focus: str | None = None,
    ablation: list[str] = NONE,
    ablations: Path | None = None,
    ablation_base: str = "rotor",
    at: float = 0.5,
    counts: str = "512,1024,2048,4096,8192,16384,32768",
    sizes: str | None = None,
    tasks: str | None = None,
    lengths: str = "4096",
    text: Path | None = None,
    overrides: list[str] = NONE,
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

    names = split(recipes)
    for recipe in names:
        load_recipe(recipe, split_overrides(overrides)[1])
    where = compute.checked()
    check_name(model)

    from ..study.study import plan_study
    from ..study.study import study as run_study

    request: dict[str, Any] = {
        "parts": None if parts is None else split(parts),
        "focus": None if focus is None else split(focus),
        "ablations": parse_ablations(ablation, ablations),
        "ablation_base": ablation_base,
        "at": at,
        "counts": parse_counts(split(counts)),
        "sizes": None if sizes is None else parse_counts(split(sizes), "--bytes", "bytes"),
        "tasks": split(tasks or ""),
        "lengths": parse_counts(split(lengths), "--lengths"),
    }
    if dry_run:
        output.progress(dry_run=True)
        plan = StudyPlan.of(names, [*text_overrides(text), *overrides], **request)
        estimate = plan_study(model, out, plan, where)
        output.show(dataclasses.asdict(estimate), lambda: _print_estimate(estimate, out))
        return
    with resumable(lambda: f"What was measured is kept in {out}: the same command goes on."):
        request |= {"text": text, "batch_tokens": batch_tokens, "plots": plots} | vars(compute)
        result = run_study(model, out, names, overrides, **request, progress=output.progress())
    shown: dict[str, Any] = {"study": str(out), "settings": result.settings, "records": result.records}
    shown |= {"files": [*map(str, result.files)], "measured_records": result.added, "seconds": result.seconds}
    output.show(shown, lambda: _print_study(out, result))


def _print_estimate(plan: Any, out: Path) -> None:
    """What a dry run found."""
    rows = [(part.part, part.calibrations, part.points) for part in plan.parts]
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    print_table(f"{plan.model} -> {out}: what is left to do", ("part",), ("calibrations", "at most points"), rows)
    say(f"{plan.known_records} record(s) are there already; nothing is written in a dry run.")


def _print_study(out: Path, result: Any) -> None:
    """What every recipe and ablation removes at the target accuracies, and where all of it is."""
    found = {key.split("/")[1]: record for key, record in result.records.items() if key.endswith("/targets")}
    targets = sorted({target for record in found.values() for target in record}, reverse=True)
    rows = [(name, *(_reached(record.get(target, {})) for target in targets)) for name, record in found.items()]
    title = "Compression at a target accuracy, chosen by the search split; in brackets the accuracy on the report split"
    if found:
        print_table(title, ("recipe",), targets, rows)
    names = ", ".join(path.name for path in result.files)
    say(f"{out}: {len(result.records)} records, {result.added} of them new, {result.seconds:.1f} s; see {names}")


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
    lines = [f"{result.path}: {len(result.figures)} figures"]
    lines += [f"  {section}: {why}" for section, why in result.absent.items()]
    data = {"report": str(result.path), "figures": result.figures, "absent": result.absent}
    output.show(data, lambda: say("\n".join(lines)))
