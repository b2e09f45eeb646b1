"""What a report advises to do next: commands that can be given as they stand, but for names in capitals."""

from __future__ import annotations

import math
import shlex

from ..format.file_names import RECIPE
from ..recipe import Recipe
from ..recipe.settings import CONFIDENCE

Step = tuple[str, str]
"""A command, and why."""


def steps_of_run(
    recipe: Recipe, name: str, target: float | None, missed: list[str], stored: float | None
) -> list[Step]:
    """After a calibration. A target that was out of reach is not asked for again.

    Args:
        target: of the point that is shown, if it has one. missed: targets that were out of reach. stored: compression
            of the point that is shown; None if nothing was measured.
    """
    quoted, steps = shlex.quote(name), []
    if stored is None or target is not None or not missed:
        goal = "0.99" if target is None else f"{target:g}"
        steps.append(
            (f"rotor export {quoted} -o OUT --accuracy {goal}", "writes the checkpoint; a measured table is read again")
        )
    elif share := math.floor(1000 * stored) / 1000:
        why = "writes the best point that was measured, as no target was reached"
        steps.append((f"rotor export {quoted} -o OUT --compression {share:g}", why))
    if missed:
        own, count = shlex.quote(f"{name}/{RECIPE}"), 2 * recipe.tokens.count
        why = f"{missed[0]} is out of reach: more tokens, or another recipe, may bring it nearer"
        steps.append((f"rotor calibrate MODEL -o RUN --recipe {own} --set tokens.count={count}", why))
    return [*steps, (f"rotor validate OUT{_same_text(recipe)}", "proves what the checkpoint claims")]


def steps_of_checkpoint(recipe: Recipe, name: str, short_of: float | None) -> list[Step]:
    """After an export.

    Args:
        short_of: the target, if the interval on the report split reaches below it.
    """
    quoted = shlex.quote(name)
    steps = [
        (
            f"rotor validate {quoted}{_same_text(recipe)}",
            "checks every tensor, the numbers against the source, and the accuracy again",
        ),
        (f'rotor generate {quoted} "PROMPT"', "a first look at what it writes"),
    ]
    if short_of is not None:
        why = "the interval on the report split reaches below the target: this asks for more on the search split"
        steps.append((f"rotor export RUN -o OUT --accuracy {short_of:g} --confidence {CONFIDENCE}", why))
    return steps


def _same_text(recipe: Recipe) -> str:
    """The option of `rotor validate` for text of the user's: it opens none that only a checkpoint names."""
    return " --text FILE" if recipe.evaluation.source == "text" else ""
