"""`lm-eval:TASK`: the score of a task of the lm-eval package, as a ratio to the base model's.

Source: https://github.com/EleutherAI/lm-evaluation-harness
"""

from __future__ import annotations

import copy
import math
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from ...errors import DataError, RotorError, UsageError
from ...installing import pip_install
from ...models.layerwise import LayerwiseModel
from ...recipe.metric_registry import LM_EVAL
from .base import EvaluationContext, Measurement, Metric, Outputs

BATCH_SIZE = 8


class LMEval(Metric):
    """Compressed score over base score (the inverse where less is better) of a task's first metric.

    The search split takes the even documents of each subtask, the report split the odd ones, the first lm_eval_limit of
    them each. The interval comes from lm-eval's standard errors as if the two models had been scored on different
    documents, so it is wider than a paired one; None where lm-eval gives no standard error.

    Args:
        name: `lm-eval:` and the name of a task, of a group with a score of its own, or the path of a task's YAML file.
    Raises:
        UsageError: lm-eval is not installed.

    It generates, so the whole model must be in memory.
    """

    def __init__(self, name: str, context: EvaluationContext) -> None:
        super().__init__(name, context)
        try:
            import lm_eval.models.huggingface
            import lm_eval.tasks
        except ImportError as error:
            raise UsageError(
                f"evaluation.metric {name}: the lm-eval package cannot be imported ({error}).",
                pip_install("eval"),
            ) from error
        if context.tokenizer is None:
            raise DataError(f"{name}: needs a tokenizer, and the model's folder has none.", "Add tokenizer.json to it.")
        self._spec, self._tokenizer = context.spec, context.tokenizer
        task = name.removeprefix(LM_EVAL)
        manager = lm_eval.tasks.TaskManager(include_defaults=not Path(task).expanduser().is_file())
        try:
            with redirect_stderr(StringIO()):  # lm-eval has no option for its bars
                self._loaded = manager.load([task])
        except Exception as error:  # whatever a task's loader and its data set may raise
            raise DataError(
                f"{name}: lm-eval cannot load the task: {_one_line(error)}",
                "Give a name that `lm-eval ls tasks` lists, or the path of a task's YAML file.",
            ) from error
        self._base: dict[str, tuple[float, float | None]] = {}

    def measure_base(self, outputs: Outputs, split: str) -> dict[str, Any]:
        """Raises DataError if the score is not positive."""
        score, stderr = self._base[split] = self._score(outputs.network, split)
        if score <= 0:
            raise DataError(f"{self.name}: the uncompressed model scores {score:g}, expected more than 0.")
        return {"score": score, "score_stderr": stderr}

    def measure(self, outputs: Outputs, split: str) -> Measurement:
        (before, before_error), (after, after_error) = self._base[split], self._score(outputs.network, split)
        value = round(after / before, 6)
        bounds = None
        if before_error is not None and after_error is not None:
            error = 1.96 * math.hypot(after_error / before, after * before_error / before**2)
            bounds = (round(max(0.0, value - error), 6), round(value + error, 6))
        fields = {"compressed_score": after, "compressed_score_stderr": after_error}
        return Measurement(value, bounds, fields)

    def _documents(self, split: str) -> dict[str, list[int]]:
        """Indices of a split's documents, by task."""
        chosen = {}
        for name, task in self._loaded["tasks"].items():
            indices = list(range(split == "report", len(task.eval_docs), 2))[: self._spec.lm_eval_limit]
            if not indices:
                raise DataError(f"{self.name}: task {name} has too few documents to split in two.", "Choose another.")
            chosen[name] = indices
        return chosen

    def _score(self, model: LayerwiseModel, split: str) -> tuple[float, float | None]:
        """The task's first metric, inverted where less is better, and its standard error."""
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        # A copy, because the wrapper sets a padding token.
        wrapped = HFLM(pretrained=model.model, tokenizer=copy.deepcopy(self._tokenizer), batch_size=BATCH_SIZE)
        try:
            with redirect_stderr(StringIO()):
                output = lm_eval.simple_evaluate(
                    wrapped,
                    tasks=list(self._loaded["groups"].values()) or list(self._loaded["tasks"].values()),
                    samples=self._documents(split),
                    log_samples=False,
                    bootstrap_iters=1000,
                    fewshot_random_seed=self._spec.seed,
                )
        except RotorError:
            raise
        except Exception as error:  # whatever a task may raise
            raise DataError(f"{self.name}: lm-eval cannot run the task: {_one_line(error)}") from error
        return self._read(output)

    def _read(self, output: Any) -> tuple[float, float | None]:
        """The score in what simple_evaluate returned: of the group, or of the only task."""
        groups, tasks = output.get("groups") or {}, output["results"]
        found = groups if groups else tasks
        name = next(iter(found))
        if not groups and len(tasks) > 1:
            raise DataError(
                f"{self.name}: several tasks and no score over all of them.", f"Name one of {', '.join(tasks)}."
            )
        for key, value in found[name].items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            stderr = found[name].get(f"{metric}_stderr,{filter_name}")
            stderr = float(stderr) if isinstance(stderr, (int, float)) and math.isfinite(stderr) else None
            if not math.isfinite(value):
                raise DataError(f"{self.name}: {metric} is {value}.")
            if output["higher_is_better"].get(name, {}).get(metric) is False and value > 0:
                return 1 / value, None if stderr is None else stderr / value**2
            return float(value), stderr
        raise DataError(f"{self.name}: task {name} reports no number.", "Choose another task.")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
