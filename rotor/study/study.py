"""The study: recipes side by side on the same model, tokens and held-out data, resumable, with tables and plots.

STUDY/  results.json  results.csv  summary.md  plots/*.png, *.svg  runs/NAME/ ...  text/
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..allocation import CHOOSING
from ..data.readiness import judged_on
from ..errors import RecipeError, UsageError
from ..evaluation.placement import Placement
from ..format.hashes import file_sha256
from ..format.locks import exclusive
from ..format.places import check_apart
from ..logs import log_file
from ..models.checkpoint import Checkpoint
from ..models.hub import find_model
from ..progress import Progress
from ..recipe import Recipe, load_recipe, override
from ..recipe.settings import Compute
from ..typed import read_yaml
from .measure import StudySubject
from .parts import StudyParts
from .peers_part import write_peers_csv
from .plots import require_matplotlib, write_plots
from .store import StudyStore
from .tables import write_csv, write_summary

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
        parts: which of PARTS to run; by default all that can run, without `peers`, which takes longest.
            `ablation` needs `ablations`, `front` takes those recipes in focus whose ranks are by method `global`.
        focus: names of the recipes for all parts but `curves`, `ablation` and `peers`; by default the first.
        ablations: overrides of the recipe `ablation_base` by name.
        at: compression at which `tokens` and `pruning` are measured.
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
    if not 0 < at < 1:
        raise UsageError(f"--at {at}: expected a compression between 0 and 1.")
    request = StudyPlan.of(
        list(recipes),
        list(overrides),
        parts,
        focus,
        ablations or {},
        ablation_base,
        tuple(counts),
        None if sizes is None else tuple(sizes),
    )
    progress = progress or Progress()
    source = find_model(model)
    check_apart(Path(out), [source.folder])
    with ExitStack() as held:
        held.enter_context(exclusive(Path(out), "study"))
        checkpoint = Checkpoint(source.folder)
        compute = Compute(device, dtype, offload, device_map)
        placement = Placement.choose(checkpoint, request.first, compute, progress)
        progress.message(f"text: {judged_on(request.first.evaluation, checkpoint.tokenizer)}")
        subject = StudySubject(checkpoint, request.first.evaluation, placement, Path(out), progress)
        store = StudyStore.open(Path(out), _settings(request, source.name, checkpoint, placement))
        held.enter_context(log_file(Path(out), "study"))
        options = {**dataclasses.asdict(compute), "batch_tokens": batch_tokens, "progress": progress}
        driver = StudyParts(subject, store, progress, options, at)
        for part in request.parts:
            progress.message(f"study: {part}")
            _PARTS[part](driver, request)
        store.save()
        peers_csv = write_peers_csv(store)
        files = [write_csv(store), *([peers_csv] if peers_csv else []), write_summary(store)]
        if plots:
            files += write_plots(store)
    seconds = round(time.perf_counter() - start, 3)
    return Study(Path(out), store.settings, store.records, store.added, tuple(files), seconds)


@dataclass(frozen=True)
class StudyPlan:
    """A study request, checked before anything is measured.

    parts: those to run, in the order of PARTS. recipes: by name, under the same conditions. focus: names of those that
    all parts but `curves`, `ablation` and `peers` are about; allocating: of these, the ones whose ranks choose domain
    and group size. base: what the ablations change, or None without them; variants: its ablations by name.
    counts: numbers of calibration tokens. sizes: bytes of cache per token, or None for the default.
    """

    parts: tuple[str, ...]
    recipes: dict[str, Recipe]
    focus: tuple[str, ...]
    allocating: tuple[str, ...]
    base: Recipe | None
    variants: dict[str, Recipe]
    counts: tuple[int, ...]
    sizes: tuple[int, ...] | None

    @classmethod
    def of(
        cls,
        recipes: list[str],
        overrides: list[str],
        parts: Iterable[str] | None,
        focus: Iterable[str] | None,
        ablations: Mapping[str, list[str]],
        ablation_base: str,
        counts: tuple[int, ...],
        sizes: tuple[int, ...] | None,
    ) -> StudyPlan:
        """Raises UsageError where the requests contradict each other; the arguments are those of `study`."""
        chosen = _chosen_parts(None if parts is None else list(parts), ablations)
        found = same_conditions([load_recipe(name, overrides) for name in recipes], overrides)
        names = tuple(focus) if focus is not None else tuple(found)[:1]
        for name in names:
            if name not in found:
                raise UsageError(
                    f"--focus {name}: not among the recipes of the study.", f"They are {', '.join(found)}."
                )
        allocating = tuple(name for name in names if found[name].ranks.rule.chooses)
        if "front" in chosen and not allocating and parts is not None:
            raise UsageError(
                f"--parts front: the ranks of {', '.join(names)} do not choose domain and group size.",
                f"Give --focus a recipe with ranks.method={CHOOSING}, as rotor has.",
            )
        base: Recipe | None = None
        variants: dict[str, Recipe] = {}
        if "ablation" in chosen:
            base, variants = _ablated(ablation_base, ablations, found, overrides)
        return cls(chosen, found, names, allocating, base, variants, counts, sizes)

    @property
    def first(self) -> Recipe:
        """The recipe whose conditions are those of all."""
        return next(iter(self.recipes.values()))


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
    "pruning": _each(StudyParts.pruning),
    "ablation": _ablation,
    "front": _front,
    "peers": _peers,
}
PARTS = tuple(_PARTS)
"""What a study can measure, in the order in which it does."""

ON_REQUEST = ("peers",)


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


def parse_ablations(items: Iterable[str], path: Path | None) -> dict[str, list[str]]:
    """Parse overrides by name, of `NAME:KEY=VALUE ...` items and of a YAML file that maps names to lists of KEY=VALUE.

    Raises:
        RecipeError: not of that form, or a name given twice.
    """
    found: list[tuple[str, list[str]]] = []
    for item in items:
        name, colon, changes = item.partition(":")
        if not colon or not name.strip() or not changes.split():
            raise RecipeError(
                f"--ablation {item}: expected NAME:KEY=VALUE ...", 'Example: --ablation "per-head:groups.size=1"'
            )
        found.append((name.strip(), changes.split()))
    if path is not None:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"--ablations {path}: cannot be read ({' '.join(str(error).split())}).") from error
        data = read_yaml(text, f"--ablations {path}")
        if not isinstance(data, dict):
            raise RecipeError(f"--ablations {path}: expected a mapping from names to lists of KEY=VALUE.")
        for name, changes in data.items():
            if not isinstance(changes, list) or not changes or not all(isinstance(c, str) for c in changes):
                raise RecipeError(f"--ablations {path}: {name}: expected a list of KEY=VALUE.")
            found.append((str(name), changes))
    names = [_file_name(name) for name, _ in found]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"ablation {name!r} is given twice.", "Give every ablation a name of its own.")
    return dict(found)


def parse_counts(items: Iterable[str], option: str = "--counts", unit: str = "tokens") -> tuple[int, ...]:
    """Parse positive numbers of tokens, or of what `unit` says.

    Raises:
        UsageError: not such numbers; names the option.
    """
    items = list(items)
    if not items or not all(item.isdecimal() and int(item) > 0 for item in items):
        raise UsageError(f"{option} {','.join(items)}: expected positive numbers of {unit}.", "Example: 512,4096")
    return tuple(int(item) for item in items)


def same_conditions(recipes: list[Recipe], overrides: list[str]) -> dict[str, Recipe]:
    """Put the recipes, by name, under one number of tokens, seed, row length, evaluation and search for all.

    Raises:
        UsageError: no recipes, or two of one name.
    """
    if not recipes:
        raise UsageError("--recipes: no recipes to compare.", "Give names or YAML files: --recipes fdc,rotor")
    first, count = recipes[0], max(recipe.tokens.count for recipe in recipes)
    specs: dict[str, Recipe] = {}
    for recipe in map(_named, recipes):
        if recipe.name in specs:
            raise UsageError(f"--recipes: two recipes are named {recipe.name!r}.", "Change `name` in one of the files.")
        specs[recipe.name] = _under_conditions(recipe, first, count, overrides)
    return specs


def _under_conditions(recipe: Recipe, first: Recipe, count: int, overrides: list[str]) -> Recipe:
    tokens = replace(recipe.tokens, count=count, seq_len=first.tokens.seq_len, seed=first.tokens.seed)
    same = replace(recipe, tokens=tokens, evaluation=first.evaluation, search=first.search)
    return override(same, overrides)


def _ablated(
    base: str, ablations: Mapping[str, list[str]], specs: dict[str, Recipe], overrides: list[str]
) -> tuple[Recipe, dict[str, Recipe]]:
    """The recipe `base` under the study's conditions, and with the overrides of each ablation."""
    first = next(iter(specs.values()))
    for change in (change for changes in ablations.values() for change in changes):
        if change.split(".")[0] in ("evaluation", "search"):
            raise UsageError(
                f"ablation {change}: all are measured the same way.", "Give it with --set, for all of them."
            )
    recipe = specs.get(base)
    if recipe is None:
        loaded = _named(load_recipe(base, overrides))
        recipe = specs.get(loaded.name) or _under_conditions(loaded, first, first.tokens.count, overrides)
    changed = {_file_name(f"{recipe.name}-{name}"): override(recipe, changes) for name, changes in ablations.items()}
    return recipe, changed


def _chosen_parts(parts: list[str] | None, ablations: Mapping[str, list[str]]) -> tuple[str, ...]:
    """The parts to run, in the order of PARTS; by default those that can run, without ON_REQUEST."""
    wanted = [part for part in PARTS if part not in ON_REQUEST] if parts is None else parts
    unknown = [part for part in wanted if part not in PARTS]
    if unknown or not wanted:
        raise UsageError(f"--parts {','.join(unknown) or 'is empty'}: expected some of {', '.join(PARTS)}.")
    if not ablations:
        if parts is not None and "ablation" in parts:
            raise UsageError("--parts ablation: there are no ablations; give --ablation or --ablations.")
        wanted = [part for part in wanted if part != "ablation"]
    return tuple(part for part in PARTS if part in wanted)


def _own_settings(recipe: Recipe) -> dict[str, Any]:
    """What a recipe does not share with the others of the study."""
    return {key: value for key, value in recipe.to_dict().items() if key not in ("summary", "evaluation", "search")}


def _named(recipe: Recipe) -> Recipe:
    """With a name that can be a folder's."""
    return replace(recipe, name=_file_name(recipe.name))


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "recipe"
