"""Recipes: what to sample, which bases to compute, how ranks are chosen, and how accuracy is measured.

A recipe is a YAML file read into frozen dataclasses. Every key is checked: an unknown one is an error that names the
nearest known key. Any field can be overridden by its dotted name (`tokens.count=16384`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import yaml

from ..allocation import CHOOSING, RANK_METHODS, RankMethod
from ..allocation.plan import Need
from ..bases import QK_METHODS, VO_METHODS, BasisMethod
from ..codes.quantiser import EXACT_BITS
from ..errors import RecipeError
from ..format.columns import WIDTHS
from ..typed import Reader, nearest_name, read_yaml
from .metric_registry import LM_EVAL, METRICS


@dataclass(frozen=True)
class Tokens:
    """Calibration tokens.

    source: `random` draws uniformly from the vocabulary without its special tokens (FDC section 5.1: at least 8K);
        `synthetic` samples text from the model itself, from random starts (ZACK: at least 16K);
        `text` reads the file or folder `path`; in a folder, each sub-folder is a topic, and each file beside them;
        `dataset` reads `column` of a `split` of `dataset`, which is the name of a data set on the hub (NAME or
        NAME:CONFIG) or a local folder; `topic_column`, if any, gives the topics.
    count: tokens in all, before any are pruned. seq_len: tokens in a row.
    """

    source: Literal["random", "synthetic", "text", "dataset"] = "random"
    path: str | None = None
    dataset: str | None = None
    split: str = "train"
    column: str = "text"
    topic_column: str | None = None
    count: int = 8192
    seq_len: int = 512
    seed: int = 0


@dataclass(frozen=True)
class Prune:
    """Pruning of calibration data, and centroids that stand for the rest (ZDC section 5.1).

    share: share of the sequences dropped within each topic, at random (ZDC: 0.5).
    kmeans: centroids that replace queries, keys and values, of each KV head or group apart; null for the exact moments,
        which are both better and cheaper.
    weighted: each centroid counts as often as there are vectors in its cluster, instead of each alike.
    """

    share: float = 0.0
    kmeans: int | None = None
    weighted: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Groups:
    """Number of KV heads of a layer that share a latent (or `all`), and the domain in which keys are compressed.

    `any` leaves it to the ranks' method `global` to choose, for each layer, among all divisors, or both domains.
    """

    size: int | Literal["all", "any"] = 1
    domain: Literal["post", "pre", "any"] = "post"


@dataclass(frozen=True)
class Bases:
    """Methods of the query/key basis and of the value/output basis: names in rotor.bases (`rotor recipes` lists them).

    refit: least-squares refit of each query head's slice of W_o at the rank that it gets.
    """

    qk: str = "svd"
    vo: str = "palu"
    refit: bool = False

    @property
    def methods(self) -> tuple[BasisMethod, BasisMethod]:
        """The methods registered under `qk` and `vo`."""
        return QK_METHODS[self.qk], VO_METHODS[self.vo]


@dataclass(frozen=True)
class Ranks:
    """Ranks from singular values.

    method: a name in rotor.ranks (`rotor recipes` lists them).
    spectrum: whether the removal rate is a share of the sum of singular values (the papers) or of their squares.
    multiple_of: stored ranks are multiples of this; 8 keeps 16-byte alignment in bfloat16, tiles are 16 wide.
    probe_shares: shares of columns kept in the probes of `global`; each layer and side is probed at each.
    probe_tokens: tokens of the search split that the probes run on.
    fisher_tokens: calibration tokens whose gradients `fisher` sums.
    """

    method: str = "removal-rate"
    spectrum: Literal["values", "squares"] = "values"
    multiple_of: int = 16
    probe_shares: tuple[float, ...] = (0.35, 0.125)
    probe_tokens: int = 4096
    fisher_tokens: int = 4096

    @property
    def rule(self) -> RankMethod:
        """The method registered under `method`."""
        return RANK_METHODS[self.method]


@dataclass(frozen=True)
class Codes:
    """Bits of the columns of a latent, and what they are allocated by.

    bits: widths that a column may have; 0 drops it. [0, 16] stores numbers of the model's dtype, and `ranks` says how
        many. With 8, 4 or 2 among them, columns are codes: bits are allocated in bytes over all layers, sides and
        candidates by what an error in each column costs the model's own loss, and `ranks` is not used.
    tokens: calibration tokens, the first ones, whose gradients say that.
    """

    bits: tuple[int, ...] = (0, 16)
    tokens: int = 16384


@dataclass(frozen=True)
class Evaluation:
    """Held-out text and the metric that accuracy means.

    source: `stdlib` reads modules of the running Python's standard library; `text` reads the file or folder `path`.
    metric: one of METRICS (see metric_registry), or `lm-eval:TASK`. `default` is the smallest of the next-token
        accuracy ratio, the perplexity ratio, and look-up over a distance (of keys, and of random tokens to be copied).
    lookup_prompts, lookup_keys: look-up rows in each split, and the most keys in each.
    copy_prompts, copy_tokens: copying rows in each split, and the most random tokens in each.
    filler_tokens: held-out text between what is stated and what asks for it, in both, as far as seq_len has room.
    lm_eval_limit: documents of the task in each split; null takes half of them all.
    """

    source: Literal["stdlib", "text"] = "stdlib"
    path: str | None = None
    seq_len: int = 512
    search_tokens: int = 16384
    report_tokens: int = 24576
    metric: str = "default"
    seed: int = 0
    lookup_prompts: int = 64
    lookup_keys: int = 16
    copy_prompts: int = 32
    copy_tokens: int = 32
    filler_tokens: int = 200
    lm_eval_limit: int | None = 200


@dataclass(frozen=True)
class Search:
    """How the point of an accuracy is searched.

    resolution: bisection ends when what reaches the target and what does not are this much of compression apart.
    targets: accuracies whose points become the profiles of an elastic checkpoint.
    """

    targets: tuple[float, ...] = (0.995, 0.99, 0.98, 0.95, 0.9)
    resolution: float = 0.01


@dataclass(frozen=True)
class ObjectiveSettings:
    """Cost of a rank when ranks are chosen, and the serving load for which decode time is predicted.

    kind: `memory` (bytes of cache), `latency` (predicted attention time of a decode step), or a number between 0
        (memory) and 1 (latency) that weighs the two.
    device: a device that comes with rotor, or one of `device_file`, a YAML file of devices
        (rotor/prediction/devices.yaml is one).
    context_tokens: tokens in the cache of each sequence. batch_size: sequences decoded together.
    """

    kind: Literal["memory", "latency"] | float = "memory"
    device: str = "h200"
    device_file: str | None = None
    context_tokens: int = 32768
    batch_size: int = 8


@dataclass(frozen=True)
class Recipe:
    """All that decides the result of a run, apart from the model."""

    name: str
    summary: str
    tokens: Tokens = field(default_factory=Tokens)
    prune: Prune = field(default_factory=Prune)
    groups: Groups = field(default_factory=Groups)
    bases: Bases = field(default_factory=Bases)
    ranks: Ranks = field(default_factory=Ranks)
    codes: Codes = field(default_factory=Codes)
    evaluation: Evaluation = field(default_factory=Evaluation)
    search: Search = field(default_factory=Search)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)

    @property
    def coded(self) -> bool:
        """Whether columns are codes, allocated by bits."""
        return any(0 < bits < EXACT_BITS for bits in self.codes.bits)

    @property
    def needs_gradients(self) -> bool:
        """Whether calibration takes gradients by keys and values."""
        return self.coded or any(method.gradients for method in self.bases.methods)

    @property
    def rank_needs(self) -> frozenset[Need]:
        """What the ranks' method needs; nothing where bits are allocated instead."""
        return frozenset() if self.coded else self.ranks.rule.needs

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        data = self.to_dict()
        data["search"]["targets"] = list(data["search"]["targets"])
        data["ranks"]["probe_shares"] = list(data["ranks"]["probe_shares"])
        data["codes"]["bits"] = list(data["codes"]["bits"])
        return yaml.safe_dump(data, sort_keys=False, width=120)


LARGEST: dict[str, int] = {
    **dict.fromkeys(
        (
            "tokens.count",
            "ranks.probe_tokens",
            "ranks.fisher_tokens",
            "codes.tokens",
            "evaluation.search_tokens",
            "evaluation.report_tokens",
        ),
        1 << 26,
    ),
    **dict.fromkeys(("tokens.seq_len", "evaluation.seq_len", "prune.kmeans"), 1 << 20),
    **dict.fromkeys(("groups.size", "ranks.multiple_of", "objective.batch_size"), 1 << 16),
    **dict.fromkeys(
        ("evaluation.lookup_prompts", "evaluation.lookup_keys", "evaluation.copy_prompts", "evaluation.copy_tokens"),
        1 << 14,
    ),
    "evaluation.lm_eval_limit": 1 << 24,
    "objective.context_tokens": 1 << 32,
}
"""The most that a count of a recipe may be: far more than anybody needs, and less than what fills a machine's memory
before anything is said."""

LONGEST_LIST = 256
"""Entries of search.targets and of ranks.probe_shares; each is measured."""

EXPORT_SECTIONS = ("ranks", "codes", "evaluation", "search", "objective")
"""Sections that may still be overridden on export, because calibration does not depend on them."""


def bundled_recipes() -> dict[str, Recipe]:
    """The recipes that come with rotor, by name."""
    folder = resources.files("rotor.recipes")
    names = sorted(item.name for item in folder.iterdir() if item.name.endswith(".yaml"))
    return {name[:-5]: parse_recipe((folder / name).read_text("utf-8"), name) for name in names}


def load_recipe(recipe: str | Recipe, overrides: Iterable[str] = ()) -> Recipe:
    """Read a bundled recipe by name, or any recipe by path, and apply overrides `section.field=value`.

    Args:
        recipe: a name, a path, or a recipe that is there already.

    Raises:
        RecipeError: no such recipe, not valid YAML, an unknown key or a value of the wrong type.
    """
    return override(recipe if isinstance(recipe, Recipe) else _find_recipe(recipe), overrides)


def _find_recipe(name_or_path: str) -> Recipe:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"recipe {name_or_path}: cannot be read ({error}).", "Give a YAML file.") from error
        return parse_recipe(text, name_or_path)
    recipes = bundled_recipes()
    if name_or_path not in recipes:
        raise RecipeError(
            f"recipe {name_or_path!r} is neither bundled nor a file{nearest_name(name_or_path, recipes)}",
            f"Bundled recipes: {', '.join(recipes)}; or give the path of a YAML file.",
        )
    return recipes[name_or_path]


def parse_recipe(text: str, where: str) -> Recipe:
    """Parse a recipe's YAML text; `where` names it in errors."""
    data = read_yaml(text, f"recipe {where}")
    recipe: Recipe = Reader(f"recipe {where}").read(Recipe, data)
    _check(recipe, where)
    return recipe


def override(recipe: Recipe, overrides: Iterable[str], sections: tuple[str, ...] | None = None) -> Recipe:
    """Apply `section.field=value` overrides; values are YAML.

    Args:
        sections: the only sections that may be changed, or None for all.
    """
    data = recipe.to_dict()
    overrides = list(overrides)
    for item in overrides:
        name, equals, value = item.partition("=")
        keys = name.strip().split(".")
        if not equals or not all(keys):
            raise RecipeError(f"--set {item}: expected section.field=value.", "Example: --set tokens.count=16384")
        if sections is not None and keys[0] not in sections:
            raise RecipeError(
                f"--set {item}: only {', '.join(sections)} can be changed after calibration.",
                "Calibrate again with this setting.",
            )
        target: Any = data
        for depth, key in enumerate(keys):
            if not isinstance(target, dict) or key not in target:
                known = target if isinstance(target, dict) else {}
                prefix = ".".join(keys[:depth])
                raise RecipeError(
                    f"--set {item}: unknown key {key!r}{f' in {prefix}' if prefix else ''}{nearest_name(key, known)}",
                    f"Known keys: {', '.join(known) or 'none'}.",
                )
            if depth < len(keys) - 1:
                target = target[key]
        target[keys[-1]] = read_yaml(value, f"--set {item}")
    where = "--set" if overrides else recipe.name
    result: Recipe = Reader(f"recipe {where}").read(Recipe, data)
    _check(result, where)
    return result


Test = Callable[[Any], bool]


def _above(bound: int) -> Test:
    return lambda value: value > bound


def _share(value: float) -> bool:
    return 0 < value < 1


def _seed(value: int) -> bool:
    return 0 <= value < 2**63


def _unless_null(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _unless_word(test: Test) -> Test:
    return lambda value: isinstance(value, str) or test(value)


_positive, _at_least_two = _above(0), _above(1)

RANGES: dict[str, tuple[Test, str]] = {
    "tokens.count": (_positive, "a positive number of tokens"),
    "tokens.seq_len": (_at_least_two, "at least 2 tokens"),
    "prune.share": (lambda share: 0 <= share < 1, "a share from 0 to below 1"),
    "prune.kmeans": (_unless_null(_positive), "null or a positive number"),
    "prune.seed": (_seed, "a number from 0"),
    "tokens.seed": (_seed, "a number from 0"),
    "evaluation.seed": (_seed, "a number from 0"),
    "groups.size": (_unless_word(_positive), "all, any or a positive number of KV heads"),
    "ranks.multiple_of": (_positive, "a positive number"),
    "ranks.probe_shares": (lambda shares: len(shares) > 0 and all(map(_share, shares)), "shares between 0 and 1"),
    "ranks.probe_tokens": (_positive, "a positive number of tokens"),
    "ranks.fisher_tokens": (_positive, "a positive number of tokens"),
    "codes.bits": (
        lambda bits: set(bits) <= {0, *WIDTHS} and len(set(bits)) == len(bits) > 1 and 0 in bits,
        "0 and at least one of 2, 4, 8, 16, each once",
    ),
    "codes.tokens": (_positive, "a positive number of tokens"),
    "evaluation.seq_len": (_at_least_two, "at least 2 tokens"),
    "evaluation.search_tokens": (_positive, "a positive number"),
    "evaluation.report_tokens": (_positive, "a positive number"),
    "evaluation.lookup_prompts": (_positive, "a positive number"),
    "evaluation.lookup_keys": (_at_least_two, "at least 2"),
    "evaluation.copy_prompts": (_positive, "a positive number"),
    "evaluation.copy_tokens": (_at_least_two, "at least 2"),
    "evaluation.filler_tokens": (_positive, "a positive number of tokens"),
    "evaluation.lm_eval_limit": (_unless_null(_positive), "null or a positive number of documents"),
    "search.resolution": (_share, "a share between 0 and 1"),
    "search.targets": (lambda targets: all(0 < t <= 1 for t in targets), "accuracies above 0, at most 1"),
    "objective.kind": (
        _unless_word(lambda weight: 0 <= weight <= 1),
        "memory, latency or a number from 0 (memory) to 1 (latency)",
    ),
    "objective.context_tokens": (_positive, "a positive number"),
    "objective.batch_size": (_positive, "a positive number"),
}
"""Values that a field may have, where its type does not express them."""


def _domains(recipe: Recipe) -> set[str]:
    """Domains in which the recipe may compress keys, on a model with RoPE."""
    return {"pre", "post"} if recipe.groups.domain == "any" else {recipe.groups.domain}


def _qk_methods(recipe: Recipe) -> list[str]:
    """Query/key bases that work wherever the recipe may compress keys."""
    return [name for name, method in QK_METHODS.items() if _domains(recipe) <= set(method.domains)]


CONDITIONS: tuple[tuple[str, Callable[[Recipe], bool], Callable[[Recipe], str]], ...] = (
    (
        "tokens.path",
        lambda r: r.tokens.source != "text" or bool(r.tokens.path),
        lambda r: "a file or folder, as source is text",
    ),
    (
        "tokens.dataset",
        lambda r: r.tokens.source != "dataset" or bool(r.tokens.dataset),
        lambda r: "a name on the hub or a folder, as source is dataset",
    ),
    (
        "evaluation.path",
        lambda r: r.evaluation.source != "text" or bool(r.evaluation.path),
        lambda r: "a file or folder, as source is text",
    ),
    (
        "ranks.multiple_of",
        lambda r: not r.bases.methods[0].whole_planes or r.ranks.multiple_of % 2 == 0,
        lambda r: f"an even number, as {r.bases.qk} keeps whole planes",
    ),
    (
        "ranks.method",
        lambda r: r.coded or r.ranks.rule.chooses or "any" not in (r.groups.size, r.groups.domain),
        lambda r: f"{CHOOSING}, as only it, or bits of codes, chooses where groups says any",
    ),
    (
        "objective.kind",
        lambda r: not r.coded or r.objective.kind == "memory",
        lambda r: f"memory, as codes.bits {list(r.codes.bits)} are allocated by bytes alone",
    ),
    (
        "bases.qk",
        lambda r: r.bases.qk in _qk_methods(r),
        lambda r: f"one of {', '.join(_qk_methods(r))}, as groups.domain is {r.groups.domain}",
    ),
)
"""What fields ask of each other: the field that is named, whether it fits, and what was expected of it."""

NAMES: dict[str, Mapping[str, BasisMethod | RankMethod]] = {
    "bases.qk": QK_METHODS,
    "bases.vo": VO_METHODS,
    "ranks.method": RANK_METHODS,
}
"""Fields that name something registered."""


def _check(recipe: Recipe, where: str) -> None:
    """Check what the types do not express."""
    reader = Reader(f"recipe {where}")

    def value(name: str) -> Any:
        return attrgetter(name)(recipe)

    for name, known in NAMES.items():
        reader.read(Literal[tuple(known)], value(name), name)  # type: ignore[misc]
    for name, (test, expected) in RANGES.items():
        if not test(value(name)):
            raise reader.fail(name, value(name), expected)
    for name, most in LARGEST.items():
        if isinstance(value(name), int) and value(name) > most:
            raise reader.fail(name, value(name), f"at most {most}")
    for name in ("search.targets", "ranks.probe_shares"):
        if len(value(name)) > LONGEST_LIST:
            raise reader.fail(name, value(name), f"at most {LONGEST_LIST} values")
    for name, fits, expectation in CONDITIONS:
        if not fits(recipe):
            raise reader.fail(name, value(name), expectation(recipe))
    evaluation = recipe.evaluation
    metric, task = evaluation.metric, evaluation.metric.removeprefix(LM_EVAL)
    if metric not in METRICS and (not metric.startswith(LM_EVAL) or not task.strip()):
        raise RecipeError(
            f"recipe {where}: evaluation.metric: got {metric!r}, expected one of {', '.join(METRICS)} "
            f"or {LM_EVAL}TASK{nearest_name(metric, [*METRICS, LM_EVAL])}"
        )
