"""What of a checkpoint's recipe may be followed: a task or a text that a checkpoint names is never opened.

A task of lm-eval is code, and a text is any file of this machine. Only what the user names is opened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from ..checked import shorten
from ..recipe import Evaluation, Recipe, load_recipe, override
from ..recipe.metric_registry import LM_EVAL


@dataclass(frozen=True)
class TrustedEvaluation:
    """How to evaluate a checkpoint of unknown origin.

    spec: with the running Python's own text and the default metric in place of what the checkpoint names.
    withheld: what was not opened and how to give it, or nothing; the accuracy that the checkpoint claims cannot be
        measured then.
    """

    spec: Evaluation
    withheld: str = ""


def trusted_evaluation(stored: Recipe, given: str | Recipe | None, overrides: Iterable[str]) -> TrustedEvaluation:
    """The evaluation that a checkpoint's recipe asks for, without what only the checkpoint names.

    Args:
        stored: the checkpoint's recipe. given: the user's, which is followed in its place.
        overrides: the user's `evaluation.field=value`.
    Raises:
        RecipeError: the user's recipe or an override is not valid.
    """
    overrides = list(overrides)
    recipe = override(stored if given is None else load_recipe(given), overrides, ("evaluation",))
    spec = recipe.evaluation
    if given is not None:
        return TrustedEvaluation(spec)
    named = {item.partition("=")[0].strip() for item in overrides}
    withheld: dict[str, str | None] = {}
    if spec.metric.startswith(LM_EVAL):
        withheld["evaluation.metric"] = spec.metric
    if spec.source == "text":
        withheld["evaluation.path"] = spec.path
    for name in withheld.keys() - named:
        trusted = dataclasses.replace(spec, metric="default", source="stdlib", path=None)
        value = shorten(withheld[name])
        return TrustedEvaluation(
            trusted, f"recipe.yaml names {value}, which is opened only if you do: --set {name}=..."
        )
    return TrustedEvaluation(spec)
