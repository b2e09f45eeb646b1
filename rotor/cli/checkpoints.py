"""The commands that make a compressed checkpoint and check it: calibrate, export, materialise, validate, compare."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from ..checked import JsonObject
from ..recipe.requests import (
    CalibrationRequest,
    ExportRequest,
    MaterialisationRequest,
    ValidationOptions,
    ValidationRequest,
)
from .app import check_folder, command, resumable
from .console import print_seconds, print_table, say
from .options import Json, OutputOptions

if TYPE_CHECKING:
    from ..calibration.run import Run
    from ..search.evaluation.accuracy import Accuracy
    from ..search.export.export import ExportResult
    from ..tools.compare import Compared
    from ..tools.validation.integrity import Validation


@command(
    epilog="Example: rotor calibrate artifacts/demo-model -o runs/demo --recipe fdc --set tokens.count=16384. "
    "After an interruption: the same command with --resume."
)
def calibrate(request: CalibrationRequest, output: OutputOptions) -> None:
    """Find the bases of the model's KV heads and write them to a run folder."""
    from ..models.hub import check_name

    check_name(str(request.model), request.revision)

    from ..calibration.calibrate import run_calibration
    from ..models.source import Checkpoint

    with resumable(lambda: _how_to_resume(Path(request.out))):
        run = run_calibration(replace(request, progress=output.progress()))
    data = {"run": str(run.folder), "recipe": run.recipe.name, **run.info}
    measurable = Checkpoint(run.model_folder).tokenizer is not None
    output.show(data, lambda: _print_run(run, measurable, output.verbose))


def _print_run(run: Run, measurable: bool, verbose: bool) -> None:
    say(
        f"{run.folder}: {run.recipe.name}, {run.shape.num_layers} layers, {run.form.in_words(run.shape)}, "
        f"{run.info['tokens']['count']} tokens"
    )
    print_seconds({name: values["seconds"] for name, values in run.info["stages"].items()})
    if verbose and (shares := run.info.get("fisher_top_share")):
        by_layer = ", ".join(f"{share:.2f}" for share in shares)
        say(f"Share of each layer's Fisher information in the top 0.1 % of tokens: {by_layer}")
    folder = shlex.quote(str(run.folder))
    if measurable:
        say(f"Next: rotor export {folder} -o OUT --accuracy 0.99")
    else:
        say(f"Next: rotor export {folder} -o OUT --compression 0.8")


def _how_to_resume(out: Path) -> str:
    from ..calibration.partial import PartialRun
    from ..checkpoint.output_folder import OutputFolder

    partial = PartialRun(OutputFolder.at(out, "run"))
    if not partial.exists:
        return "No layer was finished and no partial output was left; give the same command again."
    return (
        f"{partial.folder} holds {partial.holdings() or 'an unfinished run'}: the same command with --resume goes on."
    )


@command(epilog="Example: rotor export runs/demo -o out/demo --accuracy 0.99")
def export(request: ExportRequest, output: OutputOptions) -> None:
    """Write a compressed checkpoint; give exactly one of --accuracy, --compression, --removal-rate.

    --accuracy measures the points that its search needs, and keeps them in the run; the report split is measured
    once, for the point that is written. Of the recipe, --set can still change the sections ranks, codes, exact,
    evaluation and search.

    Args:
        measure: Do not measure accuracy, which needs --compression or --removal-rate; neither loads the model nor
            reads text.
    """
    from ..search.export.export import run_export

    kept = f"Nothing was written to {request.out}; what was measured is kept in {request.run}"
    with resumable(lambda: f"{kept}: the same command goes on."):
        result = run_export(replace(request, progress=output.progress()))
    shown = {k: v for k, v in result.report.items() if k not in ("tensors", "layouts")}
    more = {"digest": result.digest, "seconds": result.seconds, "measured_points": result.measured_points}
    out = Path(request.out)
    output.show({"folder": str(out), **shown, **more}, lambda: _print_export(out, result, output.verbose))


def _print_export(out: Path, result: ExportResult, verbose: bool) -> None:
    from ..progress import in_bytes

    report, accuracy = result.report, result.accuracy
    size = report["kv_bytes_per_token"]
    stored = report["compression"]["stored"]
    held = report["kv_bytes_of_sequence"]
    sizes = f"{size['before']} -> {size['after']} KV bytes per token"
    if round(held["tokens"] * size["before"]) != held["before"]:  # some layers have a window
        sizes += f", {in_bytes(held['before'])} -> {in_bytes(held['after'])} at {held['tokens']} tokens"
    smaller = held["smaller_from"]
    if smaller is None:
        sizes += f", smaller at no length up to {held['tokens']} tokens"
    elif smaller > 1:
        sizes += f", smaller from {smaller} tokens on"
    written = f"{out}: compression {stored:.3f} ({sizes}), accuracy"
    if accuracy.report is None:
        say(f"{written} not measured: {accuracy.not_measured}")
    else:
        say(
            f"{written} {accuracy.report} on the report split ({accuracy.measured['search'].accuracy:.4f} on the "
            f"search split) of {accuracy.data}, {result.measured_points} measurement(s)"
        )
        if accuracy.base.get("report", {}).get("at_chance"):
            say("The uncompressed model is at chance on this text, where ratios to it mean nothing.")
        elif below := accuracy.below_target:
            say(f"On the report split {below} ({accuracy.target:g}). {how_to_keep_more(out, accuracy)}")
    for tokens, size_bytes in report.get("cache", {}).get("kv_bytes_per_token", {}).items():
        name = report["cache"]["policy"]["method"]
        say(f"Cache policy {name}: {size_bytes:.1f} KV bytes per token of a prompt of {tokens}, everything counted")
    print_seconds(result.seconds)
    if verbose:
        say(f"Digest: {result.digest} (of every file: what `sha256sum {shlex.quote(str(out))}/manifest.json` prints)")
    say(f"Next: {_how_to_validate(out)}")


def how_to_keep_more(out: Path, accuracy: Accuracy) -> str:
    """Hint where the report is below the target: ask for as much more as is missing, or measure more."""
    from ..recipe.reading import load_stored_recipe

    assert accuracy.target is not None
    least = min(one.accuracy for split, one in accuracy.measured.items() if split != "search")
    stricter = min(0.999, round(accuracy.target + max(0.0, accuracy.target - least) + 0.0005, 3))
    quick = load_stored_recipe(out).evaluation.quick
    return f"To keep more, export with --accuracy {stricter:g}{', or calibrate without --quick' if quick else ''}."


def _how_to_validate(out: Path) -> str:
    """The command, with the text that accuracy was measured on: validate opens none that only a checkpoint names."""
    from ..recipe.reading import load_stored_recipe

    spec = load_stored_recipe(out).evaluation
    text = "".join(f" --text {shlex.quote(str(path))}" for path in spec.paths) if spec.source == "text" else ""
    return f"rotor validate {shlex.quote(str(out))}{text}"


@command(epilog="Example: rotor materialise out/demo -o out/full")
def materialise(request: MaterialisationRequest, output: OutputOptions) -> None:
    """Write a checkpoint without weights with them: the folder that an export with weights writes."""
    check_folder(Path(request.folder))

    from ..search.export.materialise import run_materialisation

    digest = run_materialisation(replace(request, progress=output.progress()))
    out = str(request.out)

    def text() -> None:
        say(f"{out}: written.{f' Digest: {digest}' if output.verbose else ''}")
        say(f"Next: {_how_to_validate(Path(out))}")

    output.show({"folder": out, "digest": digest}, text)


@command(epilog="Example: rotor validate out/demo")
def validate(folders: list[Path], options: ValidationOptions, output: OutputOptions) -> None:
    """Check integrity, numerics against the source, accuracy on the report split, and measured KV bytes per token.

    A text that only the checkpoint names is not opened; name it with --text, --set or --recipe.
    Exit code 3: everything is sound, but the interval of the accuracy lies below the stored target.

    Args:
        folders: One or more folders that `rotor export` wrote; with --cache also uncompressed models.
        measure: Do not measure accuracy; numerics are compared on random tokens.
    """
    for folder in folders:
        check_folder(folder)

    from ..tools.validation.validate import run_validation

    progress = output.progress()
    shared = dict[str, tuple[object, object]]()
    results = [
        run_validation(ValidationRequest(folder, shared=shared, progress=progress, **vars(options)))
        for folder in folders
    ]

    def text() -> None:
        for result in results:
            if result.checks:
                _print_checks(result)
            if asked := result.summary.get("tasks"):
                _print_tasks(asked["results"], asked["folder"])
            print_seconds(result.seconds)
        _print_summary(results)

    objects = [result.to_dict() for result in results]
    output.show(objects[0] if len(objects) == 1 else {"folders": objects}, text)
    if any(result.damaged for result in results):
        raise typer.Exit(1)
    if not all(result.target_met for result in results):
        raise typer.Exit(3)


def _print_checks(result: Validation) -> None:
    colours = {"pass": "green", "fail": "red", "skipped": "yellow"}
    rows = [(check.name, Text(check.status, style=colours[check.status]), check.detail) for check in result.checks]
    print_table(str(result.folder), ("check", "result", "detail"), (), rows)


def _print_tasks(rows: list[JsonObject], folder: str) -> None:
    cells = []
    for row in rows:
        bounds = "[{:+.3f}, {:+.3f}]".format(*row["interval"])
        shown = *(f"{row[name]:.3f}" for name in ("before", "after")), f"{row['difference']:+.3f} {bounds}"
        cells.append((row["task"], row["documents"], *shown))
    right = "documents", "source", "compressed", "difference [95 % interval]"
    print_table(f"Tasks, the same documents for both; files in {folder}", ("task",), right, cells)


def _print_summary(results: list[Validation]) -> None:
    """Print one row for each folder, below one for the uncompressed model."""
    before = {result.summary["kv_bytes_per_token"]["before"] for result in results}
    rows: list[tuple[object, ...]] = []
    if len(before) == 1:
        rows.append(("uncompressed", "-", "-", "1", "0", "-", "0", *before))
    for result in results:
        summary = result.summary
        accuracy = result.accuracy
        measured = ("-", "not measured", "-")
        if accuracy is not None and accuracy.report is not None:
            target = "-" if accuracy.target is None else f"{accuracy.target:g}"
            measured = target, str(accuracy.report), f"{accuracy.report.values['kl_div']:.4f}"
        share = f"{summary['measured_compression']:.3f}" if "measured_compression" in summary else "-"
        size = summary.get("measured_kv_bytes_per_token", summary["kv_bytes_per_token"]["after"])
        stored = f"{summary['compression']['stored']:.3f}"
        rows.append((result.folder, summary["recipe"], *measured, stored, share, f"{size:g}"))
    left = "folder", "recipe", "target", "report accuracy [95 % interval]", "KL"
    texts = dict.fromkeys(str(result.accuracy.data) for result in results if result.accuracy)
    title = "KV cache compression" + (f"; accuracy on the report split of {' and of '.join(texts)}" if texts else "")
    print_table(title, left, ("stored", "measured", "bytes/token"), rows)


@command(epilog="Example: rotor compare out/demo out/demo-smaller")
def compare(folders: list[Path], output: Json) -> None:
    """Show compressed checkpoints side by side: sizes, accuracy by ratio and position, and what they wrote.

    All of it is what export measured and stored in the folders; `rotor validate` measures again.

    Args:
        folders: Folders that `rotor export` wrote.
    """
    for folder in folders:
        check_folder(folder)

    from ..tools import compare as tool

    compared = tool.compare(folders)
    output.show([one.to_dict() for one in compared], lambda: _print_compared(compared, tool.measured_alike(compared)))


def _print_compared(compared: list[Compared], alike: bool) -> None:
    """A column for each checkpoint, a row for each thing that is known of one."""
    columns = [_facts(one) for one in compared]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "-") for column in columns)) for name in names]
    print_table(None, ("", *(str(one.folder) for one in compared)), (), rows)
    if not alike:
        say("Measured on different texts or by different metrics: these accuracies cannot be compared.")
    for index, text in enumerate(compared[0].texts):
        say(f"\nPrompt {index + 1}, uncompressed: {text['before'].strip()}")
        for one in compared:
            if index < len(one.texts):
                say(f"{one.folder}: {one.texts[index]['after'].strip()}")


def _facts(one: Compared) -> dict[str, str]:
    from ..progress import in_bytes

    info, held, size = one.info, one.info["kv_bytes_of_sequence"], one.info["kv_bytes_per_token"]
    return {
        "source": info["source"]["name"],
        "recipe": info["recipe"],
        "removed": f"{info['compression']['stored']:.3f}",
        "bytes per token": f"{size['before']:,} -> {size['after']:,}",
        f"cache at {held['tokens']:,} tokens": f"{in_bytes(held['before'])} -> {in_bytes(held['after'])}",
        **dict(one.accuracy.rows()),
    }
