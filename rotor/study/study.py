"""The study: recipes side by side on the same model, tokens and held-out data, resumable, with tables and plots.

STUDY/  results.json  results.csv  summary.md  plots/*.png, *.svg  runs/NAME/ ...  text/
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..data.readiness import describe_evaluation
from ..errors import UsageError
from ..evaluation.placement import Placement
from ..format.hashes import file_sha256
from ..format.locks import exclusive
from ..format.places import check_apart
from ..logs import log_file
from ..models.checkpoint import Checkpoint
from ..models.source import find_source
from ..progress import Progress
from ..recipe import Recipe, text_overrides
from ..recipe.settings import Compute
from .cache_tables import write_caches_csv
from .measure import StudySubject
from .outlook import Outlook, StudyOutlook, Tally, Timer, part_outlook
from .parts import StudyParts
from .peers_part import write_peers_csv
from .plots import require_matplotlib, write_plots
from .request import CACHE_PARTS, PARTS, StudyPlan
from .store import StudyStore
from .tables import SUMMARY, write_csv, write_summary
from .tiers_tables import write_tiers_csv

TOKEN_COUNTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


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
    parts: Iterable[str] | None = None,
    focus: Iterable[str] | None = None,
    ablations: Mapping[str, list[str]] | None = None,
    ablation_base: str = "rotor",
    at: float = 0.5,
    counts: Iterable[int] = TOKEN_COUNTS,
    sizes: Iterable[int] | None = None,
    device: str = "auto",
    dtype: str = "auto",
    batch_tokens: int = 2048,
    offload: str = "auto",
    device_map: str | None = None,
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
        parts: which of PARTS to run; by default `curves`, and `ablation` where there are ablations. `all` stands for
            all that can run but ON_REQUEST, which take longest.
            `ablation` needs `ablations`, `front` takes those recipes in focus whose ranks are by method `global`.
        focus: names of the recipes for all parts but `curves`, `ablation`, `peers` and CACHE_PARTS; by default the
            first.
        ablations: overrides of the recipe `ablation_base` by name.
        at: compression at which `tokens` is measured.
        counts: numbers of calibration tokens for `tokens`.
        sizes: bytes of cache per token at which `peers` measures the recipes; by default shares of the uncompressed
            model's.
        device, dtype, batch_tokens, offload, device_map: as for calibrate.
        plots: draw them, which needs matplotlib.
    Raises:
        UsageError: contradicting requests, other settings than in `out`, or no matplotlib.
        RotorError: see rotor.errors; what was measured before stays in `out`.
    """
    start = time.perf_counter()
    if plots:
        require_matplotlib()
    check_compression(at)
    request = StudyPlan.of(
        list(recipes),
        [*text_overrides(text), *overrides],
        parts,
        focus,
        ablations or {},
        ablation_base,
        tuple(counts),
        None if sizes is None else tuple(sizes),
    )
    progress = progress or Progress()
    source = find_source(model)
    check_apart(Path(out), [source.folder])
    with ExitStack() as held:
        held.enter_context(exclusive(Path(out), "study"))
        checkpoint = Checkpoint(source.folder)
        compute = Compute(device, dtype, offload, device_map)
        placement = Placement.choose(checkpoint, request.first, compute, progress)
        progress.message(f"text: {describe_evaluation(request.first.evaluation, checkpoint.tokenizer)}")
        subject = StudySubject(checkpoint, request.first.evaluation, placement, Path(out), progress)
        store = StudyStore.open(Path(out), _settings(request, source.name, checkpoint, placement))
        held.enter_context(log_file(Path(out), "study"))
        options = {**dataclasses.asdict(compute), "batch_tokens": batch_tokens, "progress": progress}
        driver = StudyParts(subject, store, progress, options, at)
        files: list[Path] = []
        for part in request.parts:
            progress.message(f"study: {part}")
            _PARTS[part](driver, request)
            files = _write(store, plots)
            progress.message(f"study: {part} is done, in {out}/{SUMMARY}{' and plots/' if plots else ''}")
    seconds = round(time.perf_counter() - start, 3)
    return Study(Path(out), store.settings, store.records, store.added, tuple(files), seconds)


def check_compression(at: float) -> None:
    """Raises UsageError if it is none."""
    if not 0 < at < 1:
        raise UsageError(f"--at {at}: expected a compression between 0 and 1.")


def plan_study(model: str | Path, out: str | Path, request: StudyPlan, at: float, compute: Compute) -> StudyOutlook:
    """What `study` would do with the same arguments, without writing anything.

    Raises: as study would before it measures anything.
    """
    check_compression(at)
    source = find_source(model)
    check_apart(Path(out), [source.folder])
    checkpoint = Checkpoint(source.folder)
    placement = Placement.choose(checkpoint, request.first, compute, Progress())
    store = StudyStore.read(Path(out), _settings(request, source.name, checkpoint, placement))
    outlook, timer = Outlook(store.records, Path(out), at), Timer(checkpoint, placement, request.first)
    return StudyOutlook(
        source.name,
        str(out),
        list(request.recipes),
        [part_outlook(part, timer, partial(_OUTLOOKS[part], outlook, request)) for part in request.parts],
        [part for part in PARTS if part not in request.parts],
        len(store.records),
        str(placement.device),
        str(placement.dtype).removeprefix("torch."),
    )


def _write(store: StudyStore, plots: bool) -> list[Path]:
    """Tables, and pictures, of what there is so far."""
    store.save()
    tables = [write_csv(store), write_peers_csv(store), write_caches_csv(store), write_tiers_csv(store)]
    tables.append(write_summary(store))
    files = [path for path in tables if path is not None]
    return files + (write_plots(store) if plots else [])


def _curves(driver: StudyParts, plan: StudyPlan) -> None:
    for name, recipe in plan.recipes.items():
        driver.curve("curves", name, recipe, name)


def _ablation(driver: StudyParts, plan: StudyPlan) -> None:
    assert plan.base is not None
    driver.curve("curves", plan.base.name, plan.base, plan.base.name)
    for name, recipe in plan.variants.items():
        driver.curve("ablation", name, recipe, f"ablations/{name}")


def _tokens(driver: StudyParts, plan: StudyPlan) -> None:
    for name in plan.focus:
        driver.tokens(name, plan.recipes[name], plan.counts)


def _front(driver: StudyParts, plan: StudyPlan) -> None:
    for name in plan.allocating:
        driver.front(name, plan.recipes[name])


def _peers(driver: StudyParts, plan: StudyPlan) -> None:
    driver.peers(plan.recipes, plan.sizes)


def _cache_part(part: str) -> Callable[[StudyParts, StudyPlan], None]:
    return lambda driver, plan: driver.caches(part, plan.recipes)


def _each(part: Callable[[StudyParts, str, Recipe], None]) -> Callable[[StudyParts, StudyPlan], None]:
    """A part that is measured for each recipe in focus by itself."""

    def run(driver: StudyParts, plan: StudyPlan) -> None:
        for name in plan.focus:
            part(driver, name, plan.recipes[name])

    return run


_PARTS: dict[str, Callable[[StudyParts, StudyPlan], None]] = {
    "curves": _curves,
    "sources": _each(StudyParts.sources),
    "tokens": _tokens,
    "degradation": _each(StudyParts.degradation),
    "ablation": _ablation,
    "front": _front,
    "peers": _peers,
    **{part: _cache_part(part) for part in CACHE_PARTS},
    "tiers": _each(StudyParts.tiers),
}


def _outlook_curves(outlook: Outlook, plan: StudyPlan, tally: Tally) -> None:
    for name, recipe in plan.recipes.items():
        outlook.curve(tally, "curves", name, recipe, name)


def _outlook_ablation(outlook: Outlook, plan: StudyPlan, tally: Tally) -> None:
    assert plan.base is not None
    if not ("curves" in plan.parts and plan.base.name in plan.recipes):
        outlook.curve(tally, "curves", plan.base.name, plan.base, plan.base.name)
    for name, recipe in plan.variants.items():
        outlook.curve(tally, "ablation", name, recipe, f"ablations/{name}")


def _outlook_tokens(outlook: Outlook, plan: StudyPlan, tally: Tally) -> None:
    for name in plan.focus:
        outlook.tokens(tally, name, plan.recipes[name], plan.counts)


def _outlook_front(outlook: Outlook, plan: StudyPlan, tally: Tally) -> None:
    for name in plan.allocating:
        outlook.front(tally, name, plan.recipes[name])


def _outlook_each(
    count: Callable[[Outlook, Tally, str, Recipe], None],
) -> Callable[[Outlook, StudyPlan, Tally], None]:
    def run(outlook: Outlook, plan: StudyPlan, tally: Tally) -> None:
        for name in plan.focus:
            count(outlook, tally, name, plan.recipes[name])

    return run


def _outlook_caches(part: str) -> Callable[[Outlook, StudyPlan, Tally], None]:
    return lambda outlook, plan, tally: outlook.caches(tally, part, plan.recipes)


_OUTLOOKS: dict[str, Callable[[Outlook, StudyPlan, Tally], None]] = {
    "curves": _outlook_curves,
    "sources": _outlook_each(Outlook.sources),
    "tokens": _outlook_tokens,
    "degradation": _outlook_each(Outlook.degradation),
    "ablation": _outlook_ablation,
    "front": _outlook_front,
    "peers": lambda outlook, plan, tally: outlook.peers(tally, plan.recipes, plan.sizes),
    **{part: _outlook_caches(part) for part in CACHE_PARTS},
    "tiers": _outlook_each(Outlook.tiers),
}
"""How each of _PARTS is counted."""


def _settings(plan: StudyPlan, name: str, checkpoint: Checkpoint, placement: Placement) -> dict[str, Any]:
    """Settings that make records comparable: a study continues only with the same."""
    first, base = plan.first, plan.base
    compared = plan.recipes if base is None else {base.name: base, **plan.recipes}
    return {
        "model": {"name": name, "shards": {f: file_sha256(checkpoint.folder / f) for f in checkpoint.files}},
        "dtype": str(placement.dtype).removeprefix("torch."),
        "tokens": {key: getattr(first.tokens, key) for key in ("count", "seq_len", "seed")},
        "evaluation": dataclasses.asdict(first.evaluation),
        "search": dataclasses.asdict(first.search),
        "recipes": {name: _own_settings(recipe) for name, recipe in compared.items()},
        "ablations": {name: _own_settings(recipe) for name, recipe in plan.variants.items()},
    }


def _own_settings(recipe: Recipe) -> dict[str, Any]:
    """What a recipe does not share with the others of the study."""
    return {
        key: value for key, value in recipe.to_dict().items() if key not in ("summary", "evaluation", "search", "cache")
    }
