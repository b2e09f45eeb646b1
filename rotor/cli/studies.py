"""Comparing and showing: study, report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from ..study.parts import PARTS
from . import completion
from .app import (
    AsJson,
    BatchTokens,
    Device,
    DeviceMap,
    DryRun,
    Dtype,
    Model,
    Offload,
    OwnText,
    Quiet,
    RecipeOverrides,
    Verbose,
    app,
    print_json,
    resumable,
    split,
)
from .console import print_table, say, show_progress


@app.command(epilog="Example: rotor study artifacts/demo-model --recipes fdc,rotor -o studies/demo")
def study(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Study folder; one with the same settings is continued.")],
    recipes: Annotated[
        str,
        typer.Option(
            help="Names of bundled recipes or YAML files, with commas.", autocompletion=completion.recipe_names
        ),
    ] = "fdc,rotor",
    parts: Annotated[
        str | None,
        typer.Option(
            help=f"Some of {', '.join(PARTS)}, with commas; default: curves, and ablation where there are ablations. "
            "all: all that can run (front needs a recipe in focus with ranks.method=global) but peers, which are "
            "quantised caches, and the recipes at equal bytes, and the five after it, which are cache policies. "
            "FILE.py:CLASS is a part of your own.",
            autocompletion=completion.one_of((*PARTS, "all")),
        ),
    ] = None,
    focus: Annotated[
        str | None,
        typer.Option(
            help="Recipes for the parts other than curves, ablation, peers, quantise, evict, budgets and combine; by "
            "default the first."
        ),
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
    sizes: Annotated[
        str | None,
        typer.Option(
            "--bytes", help="Bytes of cache per token at which peers measures recipes; by default ten, 3.75 % to 50 %."
        ),
    ] = None,
    text: OwnText = None,
    overrides: RecipeOverrides = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    batch_tokens: BatchTokens = 2048,
    offload: Offload = "auto",
    device_map: DeviceMap = None,
    plots: Annotated[bool, typer.Option(help="Draw the results, which needs matplotlib.")] = True,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare recipes on the same model, tokens and held-out data; writes JSON, CSV, Markdown and plots.

    Every measured point is kept at once, so that an interrupted study continues where it was with the same command;
    tables and plots are written after each part. --dry-run tells what each part takes.
    --set applies to all recipes; the number of tokens is the largest that any of them asks for, and their seed, row
    length, evaluation and search are those of the first.
    """
    from ..models.hub import check_name
    from ..recipe import load_recipe, text_overrides
    from ..recipe.settings import Compute
    from ..study.request import StudyPlan, of_recipes, parse_ablations, parse_counts

    for recipe in split(recipes):
        load_recipe(recipe, of_recipes(overrides or []))
    compute = Compute(device, dtype, offload, device_map)
    compute.check()
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
        show_progress(quiet, verbose, dry_run=True)
        plan = StudyPlan.of(split(recipes), [*text_overrides(text), *(overrides or ())], **request)
        _print_estimate(plan_study(model, out, plan, compute), out, as_json)
        return
    with resumable(lambda: f"What was measured is kept in {out}: the same command goes on."):
        request |= {"text": text, "batch_tokens": batch_tokens, "plots": plots} | dataclasses.asdict(compute)
        progress = show_progress(quiet, verbose)
        result = run_study(model, out, split(recipes), overrides or [], **request, progress=progress)
    if as_json:
        files = [str(path) for path in result.files]
        shown = {"study": str(out), "settings": result.settings, "records": result.records, "files": files}
        print_json({**shown, "measured_records": result.added, "seconds": result.seconds})
        return
    _print_targets(result.records)
    say(
        f"{out}: {len(result.records)} records, {result.added} of them new, {result.seconds:.1f} s; "
        f"see {', '.join(path.name for path in result.files)}"
    )


def _print_estimate(plan: Any, out: Path, as_json: bool) -> None:
    """What a dry run found."""
    if as_json:
        print_json(dataclasses.asdict(plan))
        return
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
    rows = []
    for name, record in found.items():
        rows.append((name, *(_reached(record.get(target, {})) for target in targets)))
    title = "Compression at a target accuracy, chosen by the search split; in brackets the accuracy on the report split"
    print_table(title, ("recipe",), targets, rows)


def _reached(point: dict[str, Any]) -> str:
    if "stored" not in point:
        return "out of reach" if point else "-"
    return f"{point['stored']:.3f} ({point['report']:.4f})"


@app.command(epilog="Example: rotor report runs/demo -o report.html")
def report(
    folder: Annotated[Path, typer.Argument(help="Folder that `rotor calibrate` or `rotor export` wrote.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="HTML file to write; by default report.html in a run, OUT-report.html beside OUT."
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write one HTML file that shows spectra, ranks, accuracy, sizes and timings (export writes one too)."""
    from ..report.report import report as write_report

    with show_progress(quiet).task("report", None, ""):
        result = write_report(folder, out)
    if as_json:
        print_json({"report": str(result.path), "figures": result.figures, "absent": result.absent})
        return
    say(f"{result.path}: {len(result.figures)} figures")
    for section, why in result.absent.items():
        say(f"  {section}: {why}")
