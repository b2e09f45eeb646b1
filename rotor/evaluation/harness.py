"""`lm-eval:TASK`: the score of a task of the lm-eval package, as a ratio to the base model's."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import DataError
from ..models.layerwise import LayerwiseModel
from ..recipe.metric_registry import LM_EVAL
from .measurement import Measurement
from .prompts import EvaluationContext
from .tasks import TaskSuite, document_scores


class LMEval:
    """Compressed score over base score: the mean over documents of a task's first metric.

    The search split takes the even documents of each subtask, the report split the odd ones, the first lm_eval_limit of
    them each. The interval is by bootstrap over documents, the same for both models.

    Args:
        name: `lm-eval:` and the name of a task or group, or the path of a task's YAML file.
    Raises:
        UsageError: lm-eval is not installed.

    It generates, so the whole model must be in memory.
    """

    def __init__(self, name: str, context: EvaluationContext) -> None:
        self.name, self.context = name, context
        what, task = f"evaluation.metric {LM_EVAL}", name.removeprefix(LM_EVAL)
        self._suite = TaskSuite([task], context.tokenizer, seed=context.spec.seed, what=what)
        self._base: dict[str, list[float]] = {}

    def measure_base(self, network: LayerwiseModel, split: str) -> dict[str, Any]:
        """Raises DataError if the score is not positive."""
        found = self._base[split] = self._scores(network, split)
        score = sum(found) / len(found)
        if score <= 0:
            raise DataError(f"{self.name}: the uncompressed model scores {score:g}, expected more than 0.")
        return {"score": score}

    def measure(self, network: LayerwiseModel, split: str) -> Measurement:
        before, after = self._base[split], self._scores(network, split)
        score = sum(after) / len(after)
        return Measurement.bootstrap(lambda a, b: b / np.maximum(a, 1e-9), before, after, compressed_score=score)

    def _documents(self, split: str) -> dict[str, list[int]]:
        """Indices of a split's documents, by task."""
        chosen = {}
        for name, task in self._suite.tasks.items():
            indices = list(range(split == "report", len(task.eval_docs), 2))[: self.context.spec.lm_eval_limit]
            if not indices:
                raise DataError(f"{self.name}: task {name} has too few documents to split in two.", "Choose another.")
            chosen[name] = indices
        return chosen

    def _scores(self, network: LayerwiseModel, split: str) -> list[float]:
        return self._read(self._suite.evaluate(network.model, {}, self._documents(split)))

    def _read(self, output: dict[str, Any]) -> list[float]:
        """Scores of documents by the first metric in what simple_evaluate returned.

        Raises:
            DataError: there is no number of each document, or less of it is better.
        """
        found = {tuple(name.rsplit(" ", 1)): own for name, own in document_scores(output["samples"]).items()}
        if not found:
            raise DataError(f"{self.name}: the task has no number for each document.", "Choose another task.")
        task, metric = next(iter(found))
        if output["higher_is_better"].get(task, {}).get(metric) is False:
            raise DataError(f"{self.name}: less {metric} is better, expected a score.", "Choose another task.")
        return [score for (_, of), own in found.items() if of == metric for score in own]
