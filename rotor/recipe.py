"""Recipes: what to sample, which bases to compute, how ranks are chosen, and how accuracy is measured.

A recipe is a YAML file read into frozen dataclasses. Every key is checked: an unknown one is an error that names the
nearest known key. Any field can be overridden by its dotted name (`tokens.count=16384`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from .errors import RecipeError
from .metric_registry import LM_EVAL, METRICS
from .typed import Reader, nearest_name, read_yaml


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
    """Which calibration data is left out, and whether centroids stand for the rest (ZDC section 5.1).

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
    """How many KV heads of a layer share a latent (a number, or `all`), and where keys are compressed.

    `any` leaves it to the ranks' method `global` to choose, for each layer, among all divisors, or both domains.
    """

    size: int | Literal["all", "any"] = 1
    domain: Literal["post", "pre", "any"] = "post"


@dataclass(frozen=True)
class Bases:
    """Methods of the query/key basis and of the value/output basis (see rotor/bases).

    refit: least-squares refit of each query head's slice of W_o at the rank that it gets.
    """

    qk: Literal["svd", "kq", "kq-centred", "rope-pairs", "palu", "whitened"] = "svd"
    vo: Literal["palu", "whitened", "svd", "kq", "kq-output"] = "palu"
    refit: bool = False


@dataclass(frozen=True)
class Ranks:
    """How singular values become ranks (see rotor/ranks).

    method: `removal-rate` is one rate shared by all groups and both sides (FDC equation 1); `uniform` the same share
        everywhere; `fisher` in proportion to squared gradients (Palu); `global` water-filling by measured sensitivity.
    spectrum: whether the removal rate is a share of the sum of singular values (the papers) or of their squares.
    multiple_of: stored ranks are multiples of this; 8 keeps 16-byte alignment in bfloat16, tiles are 16 wide.
    probe_shares: shares of columns kept in the probes of `global`; each layer and side is probed at each.
    probe_tokens: tokens of the search split that the probes run on.
    fisher_tokens: calibration tokens whose gradients `fisher` sums.
    """

    method: Literal["removal-rate", "uniform", "fisher", "global"] = "removal-rate"
    spectrum: Literal["values", "squares"] = "values"
    multiple_of: int = 16
    probe_shares: tuple[float, ...] = (0.35, 0.125)
    probe_tokens: int = 4096
    fisher_tokens: int = 4096


@dataclass(frozen=True)
class Evaluation:
    """Held-out text and the metric that accuracy means.

    source: `stdlib` reads modules of the running Python's standard library; `text` reads the file or folder `path`.
    metric: one of METRICS (rotor/metric_registry.py), or `lm-eval:TASK`. `default` is the smallest of the next-token
        accuracy ratio, the perplexity ratio, and look-up over a distance (of keys, and of random tokens to be copied).
    lookup_prompts, lookup_keys: look-up rows in each split, and the most keys in each.
    copy_prompts, copy_tokens: copying rows in each split, and the most random tokens in each.
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
    copy_tokens: int = 64
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
    """What a rank costs when ranks are chosen, and the serving load for which decode time is predicted.

    kind: `memory` (bytes of cache), `latency` (predicted attention time of a decode step), or a number between 0
        (memory) and 1 (latency) that weighs the two.
    device: a device that comes with rotor, or one of `device_file`, a YAML file of devices (rotor/devices.yaml is one).
    context_tokens: tokens in the cache of each sequence. batch_size: sequences decoded together.
    """

    kind: Literal["memory", "latency"] | float = "memory"
    device: str = "h200"
    device_file: str | None = None
    context_tokens: int = 32768
    batch_size: int = 8


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result of a run, apart from the model."""

    name: str
    summary: str
    tokens: Tokens = field(default_factory=Tokens)
    prune: Prune = field(default_factory=Prune)
    groups: Groups = field(default_factory=Groups)
    bases: Bases = field(default_factory=Bases)
    ranks: Ranks = field(default_factory=Ranks)
    evaluation: Evaluation = field(default_factory=Evaluation)
    search: Search = field(default_factory=Search)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_yaml(self) -> str:
        data = self.to_dict()
        data["search"]["targets"] = list(data["search"]["targets"])
        data["ranks"]["probe_shares"] = list(data["ranks"]["probe_shares"])
        return yaml.safe_dump(data, sort_keys=False, width=120)


POST_ONLY, PRE_ONLY = ("svd", "rope-pairs"), ("palu", "whitened")
"""Query/key bases that work in one domain only; on a model without RoPE all but rope-pairs do."""

EXPORT_SECTIONS = ("ranks", "evaluation", "search", "objective")
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


def _check(recipe: Recipe, where: str) -> None:
    """Ranges that the types do not express."""
    tokens, prune, groups, ranks = recipe.tokens, recipe.prune, recipe.groups, recipe.ranks
    evaluation, search, objective = recipe.evaluation, recipe.search, recipe.objective
    rules = [
        (tokens.count > 0, "tokens.count", tokens.count, "a positive number of tokens"),
        (tokens.seq_len > 1, "tokens.seq_len", tokens.seq_len, "at least 2 tokens"),
        (tokens.source != "text" or tokens.path, "tokens.path", tokens.path, "a file or folder, as source is text"),
        (
            tokens.source != "dataset" or tokens.dataset,
            "tokens.dataset",
            tokens.dataset,
            "a name on the hub or a folder, as source is dataset",
        ),
        (0 <= prune.share < 1, "prune.share", prune.share, "a share from 0 to below 1"),
        (prune.kmeans is None or prune.kmeans > 0, "prune.kmeans", prune.kmeans, "null or a positive number"),
        (0 <= prune.seed < 2**63, "prune.seed", prune.seed, "a number from 0"),
        (
            isinstance(groups.size, str) or groups.size > 0,
            "groups.size",
            groups.size,
            "all, any or a positive number of KV heads",
        ),
        (ranks.multiple_of > 0, "ranks.multiple_of", ranks.multiple_of, "a positive number"),
        (
            len(ranks.probe_shares) > 0 and all(0 < share < 1 for share in ranks.probe_shares),
            "ranks.probe_shares",
            ranks.probe_shares,
            "shares between 0 and 1",
        ),
        (
            recipe.bases.qk != "rope-pairs" or ranks.multiple_of % 2 == 0,
            "ranks.multiple_of",
            ranks.multiple_of,
            "an even number, as rope-pairs keeps whole planes",
        ),
        (ranks.probe_tokens > 0, "ranks.probe_tokens", ranks.probe_tokens, "a positive number of tokens"),
        (ranks.fisher_tokens > 0, "ranks.fisher_tokens", ranks.fisher_tokens, "a positive number of tokens"),
        (
            ranks.method == "global" or "any" not in (groups.size, groups.domain),
            "ranks.method",
            ranks.method,
            "global, as only it chooses where groups says any",
        ),
        (evaluation.seq_len > 1, "evaluation.seq_len", evaluation.seq_len, "at least 2 tokens"),
        (evaluation.search_tokens > 0, "evaluation.search_tokens", evaluation.search_tokens, "a positive number"),
        (evaluation.report_tokens > 0, "evaluation.report_tokens", evaluation.report_tokens, "a positive number"),
        (
            evaluation.source != "text" or evaluation.path,
            "evaluation.path",
            evaluation.path,
            "a file or folder, as source is text",
        ),
        (evaluation.lookup_prompts > 0, "evaluation.lookup_prompts", evaluation.lookup_prompts, "a positive number"),
        (evaluation.lookup_keys > 1, "evaluation.lookup_keys", evaluation.lookup_keys, "at least 2"),
        (evaluation.copy_prompts > 0, "evaluation.copy_prompts", evaluation.copy_prompts, "a positive number"),
        (evaluation.copy_tokens > 1, "evaluation.copy_tokens", evaluation.copy_tokens, "at least 2"),
        (
            evaluation.lm_eval_limit is None or evaluation.lm_eval_limit > 0,
            "evaluation.lm_eval_limit",
            evaluation.lm_eval_limit,
            "null or a positive number of documents",
        ),
        (0 < search.resolution < 1, "search.resolution", search.resolution, "a share between 0 and 1"),
        (all(0 < t <= 1 for t in search.targets), "search.targets", search.targets, "accuracies above 0, at most 1"),
        (
            isinstance(objective.kind, str) or 0 <= objective.kind <= 1,
            "objective.kind",
            objective.kind,
            "memory, latency or a number from 0 (memory) to 1 (latency)",
        ),
        (objective.context_tokens > 0, "objective.context_tokens", objective.context_tokens, "a positive number"),
        (objective.batch_size > 0, "objective.batch_size", objective.batch_size, "a positive number"),
        (
            groups.domain != "pre" or recipe.bases.qk not in POST_ONLY,
            "bases.qk",
            recipe.bases.qk,
            f"none of {', '.join(POST_ONLY)}, as groups.domain is pre",
        ),
        (
            groups.domain != "post" or recipe.bases.qk not in PRE_ONLY,
            "bases.qk",
            recipe.bases.qk,
            f"none of {', '.join(PRE_ONLY)}, as groups.domain is post",
        ),
        (
            groups.domain != "any" or recipe.bases.qk in ("kq", "kq-centred"),
            "bases.qk",
            recipe.bases.qk,
            "kq or kq-centred, as groups.domain is any",
        ),
    ]
    for ok, name, got, expected in rules:
        if not ok:
            raise Reader(f"recipe {where}").fail(name, got, expected)
    metric, task = evaluation.metric, evaluation.metric.removeprefix(LM_EVAL)
    if metric not in METRICS and (not metric.startswith(LM_EVAL) or not task.strip()):
        raise RecipeError(
            f"recipe {where}: evaluation.metric: got {metric!r}, expected one of {', '.join(METRICS)} "
            f"or {LM_EVAL}TASK{nearest_name(metric, [*METRICS, LM_EVAL])}"
        )
