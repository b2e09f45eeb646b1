"""From a model to a compressed checkpoint: calibrate, export, validate."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from .app import check_folder, command, numbers, resumable, split
from .console import in_interval, print_seconds, print_table, say
from .options import NONE, Count, MemoryOptions, OptionalCount, Printed

if TYPE_CHECKING:
    from ..calibration.run import Run
    from ..search.export.export import ExportResult


@command(
    epilog="Example: rotor calibrate artifacts/demo-model -o runs/demo --recipe fdc --set tokens.count=16384. "
    "After an interruption: the same command with --resume."
)
def calibrate(
    model: str,
    out: Path,
    compute: MemoryOptions,
    output: Printed,
    recipe: str = "rotor",
    text: Path | None = None,
    revision: str | None = None,
    overrides: list[str] = NONE,
    batch_tokens: Count = 2048,
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Find the bases of the model's KV heads and write them to a run folder.

    Args:
        out: Run folder to write.
        resume: Go on with an unfinished run (RUN.partial), after its last finished layer.
    """
    from ..models.hub import check_name
    from ..recipe import text_overrides
    from ..recipe.settings import CalibrationSettings

    changed, where = (*text_overrides(text), *overrides), compute.checked()
    settings = CalibrationSettings(model, out, recipe, changed, revision, where, batch_tokens, overwrite, resume)
    check_name(model, revision)

    from ..calibration.calibrate import run_calibration
    from ..models.source import Checkpoint

    progress = output.progress()
    with resumable(lambda: _how_to_resume(out)):
        run = run_calibration(settings, progress)
    data = {"run": str(run.folder), "recipe": run.recipe.name, **run.info}
    output.show(data, lambda: _print_run(run, Checkpoint(run.model_folder).tokenizer is not None))


def _print_run(run: Run, measurable: bool) -> None:
    say(
        f"{run.folder}: {run.recipe.name}, {run.shape.num_layers} layers, {run.form.in_words(run.shape)}, "
        f"{run.info['tokens']['count']} tokens"
    )
    print_seconds({name: values["seconds"] for name, values in run.info["stages"].items()})
    if shares := run.info.get("fisher_top_share"):
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
        return "No layer was finished and nothing was written; give the same command again."
    done = partial.finished_layers
    return f"{partial.folder} holds {done} finished layer(s): the same command with --resume goes on."


@command(epilog="Example: rotor export runs/demo -o out/demo --accuracy 0.99")
def export(
    run: Path,
    out: Path,
    compute: MemoryOptions,
    output: Printed,
    accuracy: float | None = None,
    compression: float | None = None,
    removal_rate: float | None = None,
    overrides: list[str] = NONE,
    no_measure: bool = False,
    cache: str | None = None,
    without_weights: bool = False,
    context: OptionalCount = None,
    overwrite: bool = False,
) -> None:
    """Write a compressed checkpoint; give exactly one of --accuracy, --compression, --removal-rate.

    --accuracy measures the points that its search needs, and keeps them in the run; the report split is measured
    once, for the point that is written. Of the recipe, --set can still change the sections ranks, codes,
    evaluation and search.

    Args:
        run: Run folder that `rotor calibrate` wrote.
        out: Checkpoint folder to write.
        accuracy: Find the strongest compression that keeps this accuracy (a ratio to the model) on the search split.
        compression: Remove at least this share of the KV cache.
        removal_rate: Choose ranks by this removal rate of singular values.
        cache: Store a cache policy, with which accuracy is measured: a bundled one (see `rotor recipes`), a YAML file,
            or FILE.py:CLASS.
        without_weights: Write bases in place of weights, which are rewritten from the source's on loading.
        context: Tokens of the sequences that are served, whose bytes count (default: the model's longest, at most
            32768); a layer with a window holds no more than that, so that its channels cost less.
    """
    from ..recipe.settings import ExportSettings, Goal

    goal = Goal(accuracy, compression, removal_rate)
    how: dict[str, Any] = {"overwrite": overwrite, "measure": not no_measure, "cache": cache}
    how |= {"without_weights": without_weights, "context": context}
    settings = ExportSettings(run, out, goal, tuple(overrides), compute.checked(), **how)

    from ..search.export.export import run_export

    progress = output.progress()
    kept = f"Nothing was written to {out}; what was measured is kept in {run}: the same command goes on."
    with resumable(lambda: kept):
        result = run_export(settings, progress)
    shown = {k: v for k, v in result.report.items() if k not in ("tensors", "layouts")}
    more = {"digest": result.digest, "seconds": result.seconds, "measured_points": result.measured_points}
    output.show({"folder": str(out), **shown, **more}, lambda: _print_export(out, result))


def _print_export(out: Path, result: ExportResult) -> None:
    from ..progress import in_bytes
    from ..search.export.model_card import below_target

    report = result.report
    size, value, stored = report["kv_bytes_per_token"], report["accuracy"], report["compression"]["stored"]
    held = report["kv_bytes_of_sequence"]
    sizes = f"{size['before']} -> {size['after']} KV bytes per token"
    if round(held["tokens"] * size["before"]) != held["before"]:  # some layers have a window
        sizes += f", {in_bytes(held['before'])} -> {in_bytes(held['after'])} at {held['tokens']} tokens"
    written = f"{out}: compression {stored:.3f} ({sizes}), accuracy"
    if value["report"] is None:
        say(f"{written} not measured: {value['not_measured']}")
    else:
        say(
            f"{written} {value['report']:.4f}{in_interval(value)} on the report split ({value['search']:.4f} on the "
            f"search split) of {value['data']}, {result.measured_points} measurement(s)"
        )
        if below := below_target(value):
            say(f"On the report split {below} ({value['target']:g}).")
    for tokens, found in report.get("cache", {}).get("kv_bytes_per_token", {}).items():
        name = report["cache"]["policy"]["method"]
        say(f"Cache policy {name}: {found:.1f} KV bytes per token of a prompt of {tokens}, everything counted")
    print_seconds(result.seconds)
    say(f"Digest: {result.digest} (of every file: what `sha256sum {shlex.quote(str(out))}/manifest.json` prints)")
    say(f"Next: rotor validate {shlex.quote(str(out))}")


@command(epilog="Example: rotor materialise out/demo -o out/full")
def materialise(folder: Path, out: Path, output: Printed, source: str | None = None, overwrite: bool = False) -> None:
    """Write a checkpoint without weights with them: the folder that an export with weights writes.

    Args:
        folder: What `rotor export --without-weights` wrote.
        out: Checkpoint folder to write.
    """
    check_folder(folder)

    from ..search.export.materialise import materialise as run_materialise

    digest = run_materialise(folder, out, source=source, overwrite=overwrite, progress=output.progress())

    def text() -> None:
        say(f"{out}: written. Digest: {digest}")
        say(f"Next: rotor validate {shlex.quote(str(out))}")

    output.show({"folder": str(out), "digest": digest}, text)


@dataclass
class ValidateOptions(MemoryOptions):
    """What a checkpoint is compared with, and how; by the names of `rotor.validate`."""

    model: Path | None = None
    run: Path | None = None
    recipe: str | None = None
    text: Path | None = None
    overrides: list[str] = NONE
    cache: str | None = None
    distance: OptionalCount = None
    tasks: str | None = None
    lengths: str = "4096"


@command(epilog="Example: rotor validate out/demo")
def validate(folders: list[Path], options: ValidateOptions, output: Printed, no_measure: bool = False) -> None:
    """Check integrity, numerics against the source, accuracy on the report split, and measured KV bytes per token.

    A text that only the checkpoint names is not opened; name it with --text, --set or --recipe.
    Exit code 3: everything is sound, but the interval of the accuracy lies below the stored target.

    Args:
        folders: One or more folders that `rotor export` wrote; with --cache also uncompressed models.
        model: Source model, if it is not where it was; checkpoints without weights take them from it.
        run: Run folder, if it is not where it was.
        recipe: Recipe whose section evaluation says how accuracy is measured.
        text: Text to measure accuracy on, as for `rotor calibrate`: a file or a folder.
    """
    options.checked()
    for folder in folders:
        check_folder(folder)

    from ..tools.validation.validate import validate as run_validate

    how: dict[str, Any] = vars(options) | {"measure": not no_measure, "progress": output.progress()}
    how |= {"tasks": split(options.tasks or ""), "lengths": numbers("--lengths", options.lengths), "shared": {}}
    results = [run_validate(folder, **how) for folder in folders]

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


def _print_checks(result: Any) -> None:
    colours = {"pass": "green", "fail": "red", "skipped": "yellow"}
    rows = [(check.name, Text(check.status, style=colours[check.status]), check.detail) for check in result.checks]
    print_table(str(result.folder), ("check", "result", "detail"), (), rows)


def _print_tasks(rows: list[dict[str, Any]], folder: str) -> None:
    cells = []
    for row in rows:
        bounds = "[{:+.3f}, {:+.3f}]".format(*row["interval"])
        shown = *(f"{row[name]:.3f}" for name in ("before", "after")), f"{row['difference']:+.3f} {bounds}"
        cells.append((row["task"], row["documents"], *shown))
    right = "documents", "source", "compressed", "difference [95 % interval]"
    print_table(f"Tasks, the same documents for both; files in {folder}", ("task",), right, cells)


def _print_summary(results: list[Any]) -> None:
    """One row for each folder, below one for the uncompressed model."""
    found = [result.summary.get("accuracy") for result in results]
    before = {result.summary["kv_bytes_per_token"]["before"] for result in results}
    rows: list[tuple[Any, ...]] = [("uncompressed", "-", "-", "1", "0", "-", "0", *before)] if len(before) == 1 else []
    for result, accuracy in zip(results, found, strict=True):
        summary, measured = result.summary, ("-", "not measured", "-")
        if accuracy:
            target = "-" if accuracy["target"] is None else f"{accuracy['target']:g}"
            measured = target, f"{accuracy['value']:.4f}{in_interval(accuracy)}", f"{accuracy['kl_div']:.4f}"
        share = f"{summary['measured_compression']:.3f}" if "measured_compression" in summary else "-"
        size = summary.get("measured_kv_bytes_per_token", summary["kv_bytes_per_token"]["after"])
        stored = f"{summary['compression']['stored']:.3f}"
        rows.append((result.folder, summary["recipe"], *measured, stored, share, f"{size:g}"))
    left = "folder", "recipe", "target", "report accuracy [95 % interval]", "KL"
    texts = dict.fromkeys(accuracy["data"] for accuracy in found if accuracy)
    title = "KV cache compression" + (f"; accuracy on the report split of {' and of '.join(texts)}" if texts else "")
    print_table(title, left, ("stored", "measured", "bytes/token"), rows)
