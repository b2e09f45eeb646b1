"""The study: recipes side by side on the same model, tokens and held-out data, resumable, with tables and plots.

STUDY/  results.json  results.csv  summary.md  plots/*.png, *.svg  runs/NAME/ ...  text/
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.readiness import describe_evaluation
from ..evaluation.placement import Placement
from ..format.hashes import file_sha256
from ..format.locks import exclusive
from ..format.places import check_apart
from ..logs import log_file
from ..models.checkpoint import Checkpoint
from ..models.hub import find_source
from ..progress import Progress
from ..recipe import Recipe, text_overrides
from ..recipe.settings import Compute
from .context import StudyContext
from .output import SUMMARY, write_plots, write_tables
from .part import find_part
from .parts import PARTS
from .plots import require_matplotlib
from .request import TOKEN_COUNTS, StudyPlan
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


@dataclass(frozen=True)
class PartEstimate:
    """What one part still needs. points: measurements of compressed models, at most."""

    part: str
    calibrations: int
    points: int


@dataclass(frozen=True)
class StudyEstimate:
    """What a study would do. known_records: that are there already."""

    model: str
    parts: list[PartEstimate]
    known_records: int


def study(
    model: str | Path,
    out: str | Path,
    recipes: Iterable[str] = ("fdc", "rotor"),
    overrides: Iterable[str] = (),
    *,
    text: str | Path | None = None,
    parts: Iterable[str] | None = None,
    focus: Iterable[str] | None = None,
    ablations: Mapping[str, list[str]] | None = None,
    ablation_base: str = "rotor",
    at: float = 0.5,
    counts: Iterable[int] = TOKEN_COUNTS,
    sizes: Iterable[int] | None = None,
    tasks: Iterable[str] = (),
    lengths: Iterable[int] = (4096,),
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
        overrides: `section.field=value` for all recipes, and settings of the study: rotor.study.request.StudySettings.
        text: calibrate on and measure accuracy on this file or folder, as for calibrate.
        parts: which to run, of rotor.study.parts.PARTS, of installed packages, or `FILE.py:CLASS`; by default `curves`,
            and `ablation` where there are ablations. `all` stands for all but ON_REQUEST, which take
            longest. `ablation` needs `ablations`.
        focus: names of the recipes for `tokens`, `pruning` and `tiers`; by default the first.
        ablations: overrides of the recipe `ablation_base` by name.
        at: compression at which `tokens`, `pruning` and `overhead` are measured.
        counts: numbers of calibration tokens for `tokens`.
        sizes: bytes of cache per token at which `methods` and `shift` measure the recipes; by default shares of the
            uncompressed model's.
        tasks, lengths: benchmarks of the part `tasks`, which they add, and tokens of their documents, as of validate.
        device, dtype, batch_tokens, offload: as for calibrate.
        plots: draw them, which needs matplotlib.
    Raises:
        UsageError: contradicting requests, other settings than in `out`, or no matplotlib.
        RotorError: see rotor.errors; what was measured before stays in `out`.
    """
    start = time.perf_counter()
    if plots:
        require_matplotlib()
    asked: dict[str, Any] = {"parts": parts, "focus": focus, "ablations": ablations, "ablation_base": ablation_base}
    asked |= {"at": at, "counts": counts, "sizes": sizes, "tasks": tasks, "lengths": lengths}
    plan = StudyPlan.of(recipes, [*text_overrides(text), *overrides], **asked)
    chosen, progress, out = [find_part(name) for name in plan.parts], progress or Progress(), Path(out)
    with ExitStack() as held:
        context = _context(model, out, plan, Compute(device, dtype, offload), batch_tokens, progress, held)
        store = context.store
        store.save()
        held.enter_context(log_file(out, "study"))
        progress.message(f"text: {describe_evaluation(context.evaluation, context.checkpoint.tokenizer)}")
        files: list[Path] = []
        shown = list({part.name: part for part in (*map(find_part, PARTS), *chosen)}.values())
        for part in chosen:
            progress.message(f"study: {part.name}")
            known = store.added
            for task in part.tasks(context):
                if not task.is_done(store):
                    found = task.measure()
                    record = store.put(task.key, found if isinstance(found, dict) else dataclasses.asdict(found))
                    progress.message(f"{task.key}: {_in_words(record)}")
            if store.added > known or part is chosen[-1]:
                files = [*write_tables(store, shown), *(write_plots(store, shown) if plots else ())]
            progress.message(f"study: {part.name} is done, in {out}/{SUMMARY}{' and plots/' if plots else ''}")
    seconds = round(time.perf_counter() - start, 3)
    return Study(out, store.settings, store.records, store.added, tuple(files), seconds)


def plan_study(model: str | Path, out: str | Path, plan: StudyPlan, compute: Compute) -> StudyEstimate:
    """What `study` would do with the same arguments, without writing anything.

    Raises: as study would before it measures anything.
    """
    chosen, known = [find_part(name) for name in plan.parts], set[str]()
    study = _context(model, Path(out), plan, compute, 0, Progress())
    found = []
    for part in chosen:
        tasks = [task for task in part.tasks(study) if task.key not in known and not task.is_done(study.store)]
        runs = {name for task in tasks for name in task.calibrations if name not in known}
        known |= {task.key for task in tasks} | runs
        calibrations = sum(not study.folder(name).is_dir() for name in runs)
        found.append(PartEstimate(part.name, calibrations, sum(task.points for task in tasks)))
    return StudyEstimate(study.store.settings["model"]["name"], found, len(study.store.records))


def _context(
    model: str | Path,
    out: Path,
    plan: StudyPlan,
    compute: Compute,
    batch_tokens: int,
    progress: Progress,
    held: ExitStack | None = None,
) -> StudyContext:
    """held: keeps a lock on `out`; without it nothing is locked."""
    source = find_source(model)
    check_apart(out, [source.folder])
    if held is not None:
        held.enter_context(exclusive(out))
    checkpoint = Checkpoint(source.folder)
    placement = Placement.choose(checkpoint, plan.first, compute, progress)
    store = StudyStore.read(out, _settings(plan, source.name, checkpoint, placement))
    options = {**dataclasses.asdict(compute), "batch_tokens": batch_tokens, "progress": progress}
    return StudyContext(plan, store, checkpoint, placement, progress, options)


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

    def own(recipes: Mapping[str, Recipe]) -> dict[str, Any]:
        """What they do not share with the others of the study."""
        found = {name: recipe.to_dict() for name, recipe in recipes.items()}
        return {name: {key: value for key, value in of.items() if key not in shared} for name, of in found.items()}

    compared = plan.recipes | ({plan.base.name: plan.base} if plan.base else {})
    benchmarks = {"tasks": {"names": list(plan.tasks), "lengths": list(plan.lengths)}} if plan.tasks else {}
    return {
        **benchmarks,
        "model": {"name": name, "shards": {f: file_sha256(checkpoint.folder / f) for f in checkpoint.files}},
        "dtype": str(placement.dtype).removeprefix("torch."),
        "tokens": {key: getattr(first.tokens, key) for key in ("count", "seq_len", "seed")},
        "evaluation": dataclasses.asdict(first.evaluation),
        "search": dataclasses.asdict(first.search),
        "recipes": own(compared),
        "ablations": own(plan.variants),
        "prompt_share": plan.settings.prompt_share,
    }
