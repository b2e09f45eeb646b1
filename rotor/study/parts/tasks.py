"""`tasks`: benchmarks asked of the uncompressed model, of recipes at the highest target, and of a 4-bit cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache, partial
from typing import Any

from ...evaluation.tasks import TaskSuite, paired
from ...policies import cache_policy, find_policy
from ...recipe import Recipe
from ...search.search import find_plan
from ..caches import cache_bytes
from ..context import TARGETS, StudyContext
from ..part import Part, Table, Task
from ..store import StudyStore

SOURCE, CONTROL = "uncompressed", "kivi-4"


class Tasks(Part):
    name = "tasks"
    csv = "tasks.csv"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        @cache
        def suite() -> TaskSuite:
            spec, plan = study.evaluation, study.plan
            return TaskSuite(plan.tasks, study.checkpoint.tokenizer, plan.lengths, spec.lm_eval_limit, spec.seed)

        def ask(label: str, recipe: Recipe | None) -> dict[str, Any]:
            whole, network, length = study.whole_bytes, study.network, max(study.plan.lengths)
            if recipe is not None:
                measurer, path = study.path(recipe.name, recipe)
                plan = find_plan(path, recipe.search.resolution, TARGETS[0], measurer.search)
                return asked(label, network.compress(measurer.run.bases(plan.channels), plan.rounded), plan.stored)
            if label == SOURCE:
                with network.uncompressed() as model:
                    return asked(label, model, None)
            policy = find_policy(CONTROL)
            with study.cache_network.uncompressed():
                (held,) = cache_bytes(study.cache_network, length, length, policy)
            with network.uncompressed() as model, cache_policy(model, policy):
                return asked(label, model, 1 - held / length / whole)

        def asked(label: str, model: Any, removed: float | None) -> dict[str, Any]:
            about = {"pretrained": study.store.settings["model"]["name"], "cache": label}
            folder = study.store.folder / self.name
            folder.mkdir(exist_ok=True)
            with TaskSuite.results(folder / label.replace(" ", "-")) as out:
                scores = suite().measure(model, about, out)
            return {"compression": removed or 0.0, "scores": scores}

        yield Task(f"{self.name}/{SOURCE}", partial(ask, SOURCE, None))
        for name, recipe in study.plan.recipes.items():
            label = f"{name} at {TARGETS[0]:g}"
            yield Task(f"{self.name}/{label}", partial(ask, label, recipe), {name: recipe})
        yield Task(f"{self.name}/{CONTROL}", partial(ask, CONTROL, None))

    def rows(self, store: StudyStore) -> Iterable[dict[str, Any]]:
        records = store.part(self.name)
        before = records.get(SOURCE, {}).get("scores", {})
        for label, record in records.items():
            for row in paired(before, record["scores"]) if before else ():
                yield {"cache": label, "compression": record["compression"], **asdict(row)}

    def tables(self, store: StudyStore) -> Iterator[Table]:
        """A row a task, the source's score, and of each other model its own and what it differs by."""
        records, rows = store.part(self.name), list(self.rows(store))
        others = [label for label in records if label != SOURCE]
        if not rows:
            return
        cells: dict[str, dict[str, str]] = {}
        for row in rows:
            bounds = "" if row["cache"] == SOURCE else " ({:+.3f} [{:+.3f}, {:+.3f}])"
            shown = f"{row['after']:.3f}" + bounds.format(row["difference"], *row["interval"])
            cells.setdefault(row["task"], {"documents": str(row["documents"])})[row["cache"]] = shown
        order = ["documents", SOURCE, *others]
        heads = [f"{label}, {records[label]['compression']:.3f} removed" for label in others]
        text = "Mean scores; in brackets the difference to the source and its paired 95 % interval over documents."
        yield Table(
            ["task", "documents", SOURCE, *heads],
            [[task, *(own.get(name, "") for name in order)] for task, own in cells.items()],
            "Tasks",
            text,
        )
