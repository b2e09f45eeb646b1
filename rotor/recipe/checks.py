"""Checks of a recipe's values, beyond their types: ranges, sizes, names, and what fields ask of each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Literal

from ..allocation.registry import CHOOSING, OF_ONE_WIDTH, RANK_METHODS, RankMethod
from ..bases.registry import QK_METHODS, VO_METHODS, BasisMethod
from ..errors import RecipeError
from ..format.channels import WIDTHS
from ..format.layout import MOST_ROPE_BLOCK, is_rope_block
from ..typed import Reader, nearest_name
from .metric_registry import LM_EVAL, METRICS
from .recipe import Recipe

FIELDS_HINT = "`rotor recipes --fields` has every field, what it may be and what it decides."

LARGEST: dict[str, int] = {
    **dict.fromkeys(
        (
            "tokens.count",
            "ranks.probe_tokens",
            "ranks.fisher_tokens",
            "codes.tokens",
            "evaluation.search_tokens",
            "evaluation.report_tokens",
            "cache.tiers_tokens",
        ),
        1 << 26,
    ),
    **dict.fromkeys(("tokens.seq_len", "evaluation.seq_len"), 1 << 20),
    **dict.fromkeys(("groups.size", "groups.fast_planes", "ranks.multiple_of", "objective.batch_size"), 1 << 16),
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
"""Entries of ranks.probe_shares; each is measured."""

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
    "tokens.seed": (_seed, "a number from 0"),
    "evaluation.seed": (_seed, "a number from 0"),
    "groups.size": (_unless_word(_positive), "all, auto, any or a positive number of KV heads"),
    "groups.rope_block": (
        is_rope_block,
        f"a power of two from 2 to {MOST_ROPE_BLOCK}",
    ),
    "groups.fast_planes": (_unless_word(lambda planes: planes >= 0), "quarter, all, auto or a number of planes"),
    "ranks.multiple_of": (_positive, "a positive number"),
    "ranks.probe_shares": (lambda shares: len(shares) > 0 and all(map(_share, shares)), "shares between 0 and 1"),
    "ranks.probe_tokens": (_positive, "a positive number of tokens"),
    "ranks.fisher_tokens": (_positive, "a positive number of tokens"),
    "codes.bits": (
        lambda bits: set(bits) <= {0, *WIDTHS} and len(set(bits)) == len(bits) > 1 and 0 in bits,
        "0 and at least one of 4, 8, 12, 16, each once",
    ),
    "codes.tokens": (_positive, "a positive number of tokens"),
    "codes.repeats": (lambda share: 0 <= share <= 1, "a share from 0 to 1"),
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
    "objective.kind": (
        _unless_word(lambda weight: 0 <= weight <= 1),
        "memory, latency or a number from 0 (memory) to 1 (latency)",
    ),
    "cache.tiers": (_unless_null(_positive), "null or a positive number"),
    "cache.tiers_repeats": (lambda share: 0 < share <= 1, "a share above 0, at most 1"),
    "cache.tiers_tokens": (_positive, "a positive number of tokens"),
    "objective.context_tokens": (_positive, "a positive number"),
    "objective.batch_size": (_positive, "a positive number"),
}
"""Values that a field may have, where its type does not express them."""


def _domains(recipe: Recipe) -> set[str]:
    """Domains in which the recipe may compress keys, on a model with RoPE."""
    if recipe.groups.domain == "any":
        return {"pre", "post"}
    return {"pre" if recipe.groups.domain == "block" else recipe.groups.domain}


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
        "ranks.method",
        lambda r: r.coded or r.ranks.rule.chooses or not r.groups.left_open,
        lambda r: f"{CHOOSING}, as only it, or bits of codes, chooses where groups says any, or auto of fast_planes",
    ),
    (
        "ranks.rows",
        lambda r: not r.ranks.uniform_rows or r.coded or r.ranks.rule.uniform_rows,
        lambda r: f"ragged, as ranks.method is {r.ranks.method}: {OF_ONE_WIDTH}, or bits of codes, can do uniform",
    ),
    (
        "ranks.rows",
        lambda r: not r.ranks.uniform_rows or r.objective.weight == 0,
        lambda r: f"ragged, as objective.kind is {r.objective.kind}: of uniform rows bytes are what is saved",
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


def check(recipe: Recipe, where: str) -> None:
    """Check what the types do not express."""
    reader = Reader(f"recipe {where}", hint=FIELDS_HINT)

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
    if len(recipe.ranks.probe_shares) > LONGEST_LIST:
        raise reader.fail("ranks.probe_shares", recipe.ranks.probe_shares, f"at most {LONGEST_LIST} values")
    for name, fits, expectation in CONDITIONS:
        if not fits(recipe):
            raise reader.fail(name, value(name), expectation(recipe))
    evaluation = recipe.evaluation
    metric, task = evaluation.metric, evaluation.metric.removeprefix(LM_EVAL)
    if metric not in METRICS and (not metric.startswith(LM_EVAL) or not task.strip()):
        raise RecipeError(
            f"recipe {where}: evaluation.metric: got {metric!r}, expected one of {', '.join(METRICS)} "
            f"or {LM_EVAL}TASK{nearest_name(metric, [*METRICS, LM_EVAL])}",
            FIELDS_HINT,
        )
