"""The study: recipes side by side on the same model, tokens and held-out data, resumable, with tables and plots.

STUDY/  results.json  results.csv  summary.md  plots/*.png, *.svg  runs/NAME/ ...
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.hashes import file_sha256
from ...checkpoint.locks import exclusive
from ...checkpoint.output_folder import check_apart
from ...errors import UsageError
from ...logs import log_file
from ...models.hub import find_source
from ...models.readiness import describe_evaluation
from ...models.source import Checkpoint
from ...progress import Progress
from ...recipe import distance_overrides, text_overrides
from ...recipe.settings import Compute
from ...search.evaluation.placement import Placement
from .context import StudyContext
from .output import SUMMARY, write_tables
from .part import Part, find_part
from .parts import PARTS
from .plots import require_matplotlib, write_plots
from .request import StudyPlan, same_conditions
from .store import StudyStore


@dataclass(frozen=True)
class Study:
    """The result: `records` by key (see results.json), how many are new, and the files written."""

    folder: Path
    settings: dict[str, Any]
    records: dict[str, dict[str, Any]]
    added: int
    files: tuple[Path, ...]
    seconds: float


def study(
    model: str | Path,
    out: str | Path,
    recipes: Iterable[str] = ("fdc", "rotor"),
    overrides: Iterable[str] = (),
    *,
    text: str | Path | None = None,
    parts: Iterable[str] = ("curves",),
    sizes: Iterable[int] = (),
    caches: Iterable[str] = (),
    distance: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    batch_tokens: int = 2048,
    offload: str = "auto",
    plots: bool = True,
    progress: Progress | None = None,
) -> Study:
    """Compare recipes on one model and write what was found to a folder; a second start continues the first.

    All recipes get the same number of tokens (the largest that any of them asks for) and the seed, row length,
    evaluation and search settings of the first, unless `overrides` say otherwise.

    Args:
        model: folder of a transformers checkpoint, only read; or a hub id.
        out: the study's folder; one that holds a study with the same settings is continued.
        recipes: names of bundled recipes or paths of YAML files.
        overrides: `section.field=value` for all recipes.
        text: calibrate on and measure accuracy on this file or folder, as for calibrate.
        parts: which to run, of rotor.tools.study.parts.PARTS or `FILE.py:CLASS`.
        sizes: bytes of cache per token at which `methods` and `match` measure the recipes; by default shares of the
            uncompressed model's.
        caches: policies of your own for `methods`, as `--cache` takes them.
        distance: tokens of other text between what look-ups and copies state and what asks for it, in rows with room
            for that; by default as evaluation.filler_tokens says.
        device, dtype, batch_tokens, offload: as for calibrate.
        plots: draw them, which needs matplotlib.
    Raises:
        UsageError: contradicting requests, other settings than in `out`, or no matplotlib.
        RotorError: see rotor.errors; what was measured before stays in `out`.
    """
    start, out, progress = time.perf_counter(), Path(out), progress or Progress()
    overrides = [*text_overrides(text), *distance_overrides(distance), *overrides]
    chosen = [find_part(name) for name in dict.fromkeys(parts)]
    if not chosen:
        raise UsageError(f"--parts is empty: expected some of {', '.join(PARTS)}, or FILE.py:CLASS.")
    plan = StudyPlan(same_conditions(recipes, overrides), tuple(sizes), tuple(caches))
    if plots:
        require_matplotlib()
    compute, source = Compute(device, dtype, offload), find_source(model)
    check_apart(out, [source.folder])
    checkpoint = Checkpoint(source.folder)
    with exclusive(out):
        placement = Placement.choose(checkpoint, plan.first, compute, progress)
        store = StudyStore.read(out, _settings(plan, source.name, checkpoint, placement))
        options = {**dataclasses.asdict(compute), "batch_tokens": batch_tokens, "progress": progress}
        context = StudyContext(plan, store, checkpoint, placement, progress, options)
        store.save()
        with log_file(out, "study"):
            progress.message(f"text: {describe_evaluation(context.evaluation, checkpoint.tokenizer)}")
            files = _measure(context, chosen, plots)
    seconds = round(time.perf_counter() - start, 3)
    return Study(out, store.settings, store.records, store.added, tuple(files), seconds)


def _measure(study: StudyContext, chosen: Sequence[Part], plots: bool) -> list[Path]:
    """Run the parts; returns the files of tables and plots, which are written after each."""
    store, progress, files = study.store, study.progress, list[Path]()
    shown = list({part.name: part for part in (*map(find_part, PARTS), *chosen)}.values())
    for part in chosen:
        progress.message(f"study: {part.name}")
        known = store.added
        for task in part.tasks(study):
            if task.key not in store.records:
                found = task.measure()
                record = store.put(task.key, found if isinstance(found, dict) else dataclasses.asdict(found))
                progress.message(f"{task.key}: {_in_words(record)}")
        if store.added > known or part is chosen[-1]:
            files = [*write_tables(store, shown), *(write_plots(store, shown) if plots else ())]
        progress.message(f"study: {part.name} is done, in {store.folder}/{SUMMARY}{' and plots/' if plots else ''}")
    return files


def _in_words(record: dict[str, Any]) -> str:
    """What a record says first, for the log."""
    if record.get("skipped"):
        return f"skipped: {record['skipped']}"
    if "kl_div" in record.get("report", {}):
        return f"accuracy {record['report']['accuracy']:.4f}, KL {record['report']['kl_div']:.5f} (report split)"
    if "mean_kv_bytes_per_token" in record:
        return f"{record['mean_kv_bytes_per_token']:.1f} bytes a token, KL {record['kl_div']:.5f}"
    return "measured"


def _settings(plan: StudyPlan, name: str, checkpoint: Checkpoint, placement: Placement) -> dict[str, Any]:
    """Settings that make records comparable: a study continues only with the same."""
    first, shared = plan.first, ("summary", "evaluation", "search", "cache")
    recipes = {name: recipe.to_dict() for name, recipe in plan.recipes.items()}
    return {
        "model": {"name": name, "shards": {f: file_sha256(checkpoint.folder / f) for f in checkpoint.files}},
        "dtype": str(placement.dtype).removeprefix("torch."),
        "tokens": {key: getattr(first.tokens, key) for key in ("count", "seq_len", "seed")},
        "evaluation": dataclasses.asdict(first.evaluation),
        "search": dataclasses.asdict(first.search),
        "recipes": {name: {key: of[key] for key in of if key not in shared} for name, of in recipes.items()},
    }
