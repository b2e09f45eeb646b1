"""`lm-eval:TASK`: the score of a task of the lm-eval package, as a ratio to the base model's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import DataError
from ...models.layerwise import LayerwiseModel
from ...recipe.metric_registry import LM_EVAL
from ..tasks import TaskSuite, document_scores
from .base import EvaluationContext, Measurement, Metric, Outputs


class LMEval(Metric):
    """Compressed score over base score (the inverse where less is better) of a task's first metric.

    The search split takes the even documents of each subtask, the report split the odd ones, the first lm_eval_limit of
    them each. The interval is by bootstrap over documents, the same for both models; None where the score is not the
    mean of documents.

    Args:
        name: `lm-eval:` and the name of a task, of a group with a score of its own, or the path of a task's YAML file.
    Raises:
        UsageError: lm-eval is not installed.

    It generates, so the whole model must be in memory.
    """

    def __init__(self, name: str, context: EvaluationContext) -> None:
        super().__init__(name, context)
        what, task = f"evaluation.metric {LM_EVAL}", name.removeprefix(LM_EVAL)
        self._suite = TaskSuite([task], context.tokenizer, seed=context.spec.seed, what=what)
        self._base: dict[str, tuple[float, list[float]]] = {}

    def measure_base(self, outputs: Outputs, split: str) -> dict[str, Any]:
        """Raises DataError if the score is not positive."""
        score, _ = self._base[split] = self._score(outputs.network, split)
        if score <= 0:
            raise DataError(f"{self.name}: the uncompressed model scores {score:g}, expected more than 0.")
        return {"score": score}

    def measure(self, outputs: Outputs, split: str) -> Measurement:
        (before, expected), (after, got) = self._base[split], self._score(outputs.network, split)
        if not expected or not got:
            return Measurement(round(after / before, 6), None, {"compressed_score": after})
        return Measurement.bootstrap(lambda a, b: b / np.maximum(a, 1e-9), expected, got, compressed_score=after)

    def _documents(self, split: str) -> dict[str, list[int]]:
        """Indices of a split's documents, by task."""
        chosen = {}
        for name, task in self._suite.tasks.items():
            indices = list(range(split == "report", len(task.eval_docs), 2))[: self.context.spec.lm_eval_limit]
            if not indices:
                raise DataError(f"{self.name}: task {name} has too few documents to split in two.", "Choose another.")
            chosen[name] = indices
        return chosen

    def _score(self, network: LayerwiseModel, split: str) -> tuple[float, list[float]]:
        return self._read(self._suite.evaluate(network.model, {}, self._documents(split)))

    def _read(self, output: dict[str, Any]) -> tuple[float, list[float]]:
        """The score in what simple_evaluate returned, of the group or of the only task, and those of documents.

        Inverted where less is better; without documents where the score is not their mean.
        """
        groups, tasks = output.get("groups") or {}, output["results"]
        found = groups if groups else tasks
        name = next(iter(found))
        if not groups and len(tasks) > 1:
            raise DataError(
                f"{self.name}: several tasks and no score over all of them.", f"Name one of {', '.join(tasks)}."
            )
        for key, value in found[name].items():
            metric, comma, _ = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            if not math.isfinite(value):
                raise DataError(f"{self.name}: {metric} is {value}.")
            if output["higher_is_better"].get(name, {}).get(metric) is False and value > 0:
                return 1 / value, []
            by_task = document_scores(output.get("samples", {})).items()
            own = [score for task, scores in by_task if task.endswith(f" {metric}") for score in scores]
            return float(value), own if own and math.isclose(sum(own) / len(own), value, abs_tol=1e-9) else []
        raise DataError(f"{self.name}: task {name} reports no number.", "Choose another task.")
