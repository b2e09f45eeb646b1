"""The part `fair` of a study: quantisers as their authors set them, and recipes at a list of bytes.

rotor study MODEL --recipes rotor --parts artifacts/studies/fair.py:Fair --bytes 200,256 -o STUDY
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rotor.policies import KIVI, KVQuant, PerToken
from rotor.study.cache_part import CachePart
from rotor.study.context import StudyContext
from rotor.study.part import Task

QUANTISERS = {
    "KIVI-4": KIVI(4, 32, 128),
    "KIVI-2": KIVI(2, 32, 128),
    "KVQuant-4": KVQuant(4),
    "per token, 4 bits": PerToken(4, 64),
    "per token, 3 bits": PerToken(3, 64),
}
"""KIVI with its authors' groups of 32 and 128 exact tokens; KVQuant with 1 % outliers and the first token exact."""

SHARES = (0.3125, 0.125, 0.1)
"""Of the uncompressed bytes, where no list of bytes is given; the first is what KIVI-4 takes at 32 K tokens."""


class Fair(CachePart):
    name = "fair"
    title = "Caches at their bytes"
    size = "mean_kv_bytes_per_token"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        yield from self.of_policies(study, dict(QUANTISERS))
        for name, recipe in study.plan.recipes.items():
            for size in study.plan.sizes or [round(share * study.whole_bytes) for share in SHARES]:
                label = f"{name}, {size} bytes"
                measure = partial(self.of_recipe, study, label, recipe, 1 - size / study.whole_bytes)
                yield Task(f"{self.name}/{label}", measure, {name: recipe})
