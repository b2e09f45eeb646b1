"""The part `overhead` of a study: what compressing without overhead and even schedules are worth, in predicted time.

ZACK section 6.5.

    rotor study MODEL --recipes fdc --parts artifacts/studies/parts/overhead.py:Overhead -o STUDY
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from fdc import SHAPE_8B, like_8b
from simulation import simulate

from rotor.calibration.prediction.cost import DecodeStep, decode_seconds, uncompressed_decode_seconds
from rotor.calibration.prediction.devices import find_device
from rotor.checkpoint.families import attention_shape
from rotor.checkpoint.folding import model_layouts
from rotor.errors import UsageError
from rotor.recipe.recipe import Recipe
from rotor.tools.study.context import StudyContext
from rotor.tools.study.part import Part, Table, Task
from rotor.tools.study.store import StudyStore

AT = 0.5
"""Of the cache, that a recipe removes."""

SEQUENCES, STRIDE = 64, 29
"""Sequences of different lengths in a batch, and the steps in which they are taken."""

TEXT = (
    "Attention of a decode step on `objective.device` over the uncompressed model's, predicted from bytes and "
    "instructions. /OE reads rows, and writes and reads keys and values of full width in every step; computing the "
    "bases online is not in it. /KE is the simulator's: tasks go to SMs in order where the papers' schedule gives the "
    "longest first, for sequences of 64 lengths up to the objective's and an 8B's heads with this plan's shares of "
    "their channels (at equal lengths and with few heads both schedules are the same). Equal slices, which the kernels "
    "take, are in the last column. "
    "/AC, one rate for all heads, is combine.py with `--recipes fdc,artifacts/studies/recipes/fdc-uniform.yaml`."
)


class Overhead(Part):
    name = "overhead"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name, recipe in study.inputs.recipes.items():
            key = f"{self.name}/{name}"
            yield Task(key, partial(_measure, study, name, recipe))

    def tables(self, store: StudyStore) -> Iterator[Table]:
        rows = [
            [
                f"`{key}`",
                *(f"{record[column]:.3f}" for column in ("stored", "time", "rebuilt", "unbalanced", "sliced")),
            ]
            for key, record in store.part(self.name).items()
        ]
        if rows:
            yield Table(
                [
                    "recipe",
                    "removed",
                    "time",
                    "/OE: keys and values rebuilt",
                    "/KE: no schedule over longest first",
                    "equal slices over longest first",
                ],
                rows,
                "Overheads, predicted (ZACK figures 16 and 17 in shape)",
                TEXT,
            )


def _measure(study: StudyContext, name: str, recipe: Recipe) -> dict[str, Any]:
    evaluator, path = study.path(name, recipe)
    plan, settings = path.at_compression(AT), recipe.objective
    if plan is None:
        raise UsageError(f"{name} cannot remove {AT:g} of the rows.", "Set a smaller AT in this part.")
    shape, element_bytes = attention_shape(study.checkpoint.config), study.cache_dtype.itemsize
    device = find_device(settings.device)
    if device.sms is None:
        raise UsageError(f"device {settings.device}: its number of SMs is not known.", "Name another objective.device.")
    step = DecodeStep(settings.context_tokens, settings.batch_size, element_bytes)
    layouts = model_layouts(evaluator.run.bases(plan.channels), plan.ranks)
    lengths = ragged_lengths(settings.context_tokens)
    balances = {
        b.schedule: b.largest_over_mean
        for b in simulate(like_8b(layouts, shape), SHAPE_8B, lengths, device, device.sms, element_bytes)
    }
    whole = uncompressed_decode_seconds(shape, device, step)
    share = decode_seconds(layouts, shape, device, step) / whole
    rebuilt = device.read_seconds(2 * study.whole_bytes * step.keys) / whole
    return {
        "stored": plan.stored,
        "time": share,
        "rebuilt": share + rebuilt,
        "unbalanced": balances["none"] / balances["lpt"],
        "sliced": balances["stream"] / balances["lpt"],
    }


def ragged_lengths(longest: int) -> list[int]:
    """Lengths of SEQUENCES sequences, in equal ratios from a 64th of the longest on, in an order that is not theirs."""
    lengths = [round(longest * 64 ** (i / (SEQUENCES - 1) - 1)) for i in range(SEQUENCES)]
    return [max(1, lengths[i * STRIDE % SEQUENCES]) for i in range(SEQUENCES)]
