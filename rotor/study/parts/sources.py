"""`sources`: bases of one recipe from different calibration tokens, against each other (FDC table 2, ZACK table 4)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import combinations
from typing import Any

from ...recipe import Recipe
from ..bases import SIDE_LABELS, compare_bases, first_value_variation
from ..context import StudyContext
from ..part import Part, Task
from ..records import first_candidates
from ..store import StudyStore
from ..tables import Table
from ..variants import SOURCES, compared_by_tokens, from_source, variant_folder, variant_run


class Sources(Part):
    name = "sources"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name, recipe in compared_by_tokens(study, self.name).items():
            needs = {variant_folder(name, source): from_source(study, recipe, source) for source in SOURCES}
            yield Task(f"{self.name}/{name}", partial(_measure, study, name, recipe), needs, points=0)

    def tables(self, store: StudyStore) -> Iterator[Table]:
        pairs, variation, shares = [], [], list[str]()
        for recipe, record in store.part(self.name).items():
            for pair in record["pairs"]:
                for side, label in SIDE_LABELS.items():
                    found = pair[side]
                    shares = list(found["angles_degrees"])
                    cells = [f"`{recipe}`", f"{pair['a']}, {pair['b']}", label]
                    cells += [f"{found['delta']:.2e} / {found['epsilon']:.2e}", f"{100 * found['ratio']:.2f} %"]
                    angles = (found["angles_degrees"][share] for share in shares)
                    pairs.append([*cells, *(f"{a['mean']:.2f} / {a['largest']:.2f}" for a in angles)])
            for source, variant in record["variants"].items():
                cv = (f"{100 * variant['cv'][side]:.2f} %" for side in SIDE_LABELS)
                variation.append([f"`{recipe}`", source, str(variant["tokens"]), *cv])
        if variation:
            yield Table(
                ["recipe", "tokens", "side", "delta / epsilon", "ratio"]
                + [f"angles at {100 * float(share):g} % of the channels, mean / largest" for share in shares],
                pairs,
                "Bases by source of the calibration tokens",
                "Mean absolute difference of corresponding entries (signs aligned, vectors of norm 1) over the mean "
                "absolute entry, as in FDC table 2 and ZACK tables 4 and 5; and the principal angles in degrees "
                "between the subspaces that are kept. Bases of the weights alone are equal: no tokens change them.",
            )
            yield Table(
                ["recipe", "tokens", "count", *SIDE_LABELS.values()],
                variation,
                text="Coefficient of variation of the largest singular value over all groups, as in FDC tables 3 and 4 "
                "and ZACK tables 6 and 7.",
            )


def _measure(study: StudyContext, name: str, recipe: Recipe) -> dict[str, Any]:
    runs = {source: variant_run(study, name, recipe, source) for source in SOURCES}
    bases = {source: first_candidates(run) for source, run in runs.items()}
    variants = {
        source: {
            "tokens": run.info["tokens"]["count"],
            "cv": {side: first_value_variation(bases[source], side) for side in SIDE_LABELS},
        }
        for source, run in runs.items()
    }
    pairs = [{"a": a, "b": b, **compare_bases(bases[a], bases[b])} for a, b in combinations(SOURCES, 2)]
    return {"variants": variants, "pairs": pairs}
