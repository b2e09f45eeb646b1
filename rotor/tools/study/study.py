"""The study: recipes side by side on the same model, tokens and held-out data, resumable, with tables and plots.

STUDY/  results.json  results.csv  summary.md  plots/*.png, *.svg  runs/NAME/ ...
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.files import file_sha256
from ...checkpoint.locks import exclusive
from ...checkpoint.output_folder import check_apart
from ...errors import UsageError
from ...logs import log_file
from ...models.hardware import DevicePlan
from ...models.hub import find_source
from ...models.readiness import describe_evaluation
from ...models.source import Checkpoint
from ...options import with_fields_of
from ...progress import Progress
from ...recipe.requests import StudyRequest
from ...search.evaluation.estimate import evaluation_plan
from .context import StudyContext
from .inputs import StudyInputs, same_conditions
from .output import SUMMARY, write_tables
from .part import Part, find_part
from .parts import PARTS
from .plots import require_matplotlib, write_plots
from .store import Record, StudyStore


@dataclass(frozen=True)
class Study:
    """The result: `records` by key (see results.json), how many are new, and the files written."""

    folder: Path
    settings: Record
    records: dict[str, Record]
    added: int
    files: tuple[Path, ...]
    seconds: float


def run_study(request: StudyRequest) -> Study:
    """Compare recipes on one model and write the results to a folder; a second start continues the first.

    All recipes get the same number of tokens (the largest that any of them asks for) and the seed, row length,
    evaluation and search settings of the first, unless `overrides` say otherwise.

    Raises:
        UsageError: contradicting requests, other settings than in `out`, or no matplotlib.
        RotorError: see rotor.errors; what was measured before stays in `out`.
    """
    start = time.perf_counter()
    out = Path(request.out)
    progress = request.progress or Progress()
    chosen = [find_part(name) for name in dict.fromkeys(request.parts)]
    if not chosen:
        raise UsageError(f"--parts is empty: expected some of {', '.join(PARTS)}, or FILE.py:CLASS.")
    recipes = same_conditions(request.recipes, request.all_overrides, request.context)
    inputs = StudyInputs(recipes, tuple(request.sizes), tuple(request.caches))
    if request.plots:
        require_matplotlib()
    source = find_source(request.model)
    check_apart(out, [source.folder])
    checkpoint = Checkpoint(source.folder)
    with exclusive(out):
        devices = evaluation_plan(checkpoint, inputs.first, request, progress)
        store = StudyStore.read(out, _settings(inputs, source.name, checkpoint, devices, request.context))
        context = StudyContext(inputs, store, checkpoint, devices, progress, request)
        _ = context.context_tokens  # raises where the model has fewer positions
        store.save()
        with log_file(out, "study"):
            progress.message(f"text: {describe_evaluation(context.evaluation, checkpoint.tokenizer)}")
            files = _measure(context, chosen, request.plots)
    seconds = round(time.perf_counter() - start, 3)
    return Study(out, store.settings, store.records, store.added, tuple(files), seconds)


study = with_fields_of(StudyRequest, run_study, "study")


def _measure(study: StudyContext, chosen: Sequence[Part], plots: bool) -> list[Path]:
    """Run the parts; returns the files of tables and plots, which are written after each."""
    store = study.store
    progress = study.progress
    files = list[Path]()
    shown = list({part.name: part for part in (*map(find_part, PARTS), *chosen)}.values())
    for part in chosen:
        progress.message(f"study: {part.name}")
        known = store.added
        for task in part.tasks(study):
            if task.key not in store.records:
                measured = task.measure()
                record = store.put(task.key, measured if isinstance(measured, dict) else dataclasses.asdict(measured))  # type: ignore[call-overload]
                progress.message(f"{task.key}: {_in_words(record)}")
        if store.added > known or part is chosen[-1]:
            files = [*write_tables(store, shown), *(write_plots(store, shown) if plots else ())]
        progress.message(f"study: {part.name} is done, in {store.folder}/{SUMMARY}{' and plots/' if plots else ''}")
    return files


def _in_words(record: Record) -> str:
    """The first thing to say of a record, for the log."""
    if record.get("skipped"):
        return f"skipped: {record['skipped']}"
    if "kl_div" in record.get("report", {}):
        return f"accuracy {record['report']['accuracy']:.4f}, KL {record['report']['kl_div']:.5f} (report split)"
    if "mean_kv_bytes_per_token" in record:
        return f"{record['mean_kv_bytes_per_token']:.1f} bytes a token, KL {record['kl_div']:.5f}"
    return "measured"


def _settings(
    inputs: StudyInputs, name: str, checkpoint: Checkpoint, devices: DevicePlan, context: int | None
) -> Record:
    """The settings that make records comparable: a study continues only with the same."""
    first = inputs.first
    shared = ("summary", "evaluation", "search", "cache")
    recipes = {name: recipe.to_dict() for name, recipe in inputs.recipes.items()}
    return {
        "model": {"name": name, "shards": {f: file_sha256(checkpoint.folder / f) for f in checkpoint.files}},
        "dtype": str(devices.dtype).removeprefix("torch."),
        "tokens": {key: getattr(first.tokens, key) for key in ("count", "seq_len", "seed")},
        "evaluation": dataclasses.asdict(first.evaluation),
        "search": dataclasses.asdict(first.search),
        "recipes": {name: {key: of[key] for key in of if key not in shared} for name, of in recipes.items()},
        **({} if context is None else {"context": context}),
    }
