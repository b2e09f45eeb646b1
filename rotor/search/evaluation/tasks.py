"""Tasks of lm-eval, loaded once and asked of several models.

Results go to the files that lm-eval writes, so that tools for its results read these too.

Source: https://github.com/EleutherAI/lm-evaluation-harness
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ...checked import JsonObject
from ...errors import CheckpointError, DataError, RotorError, UsageError
from ...models.tokenizer import text_start
from ...versions import pip_install
from .measurement import Measurement

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH_SIZE = 8

DocumentScores = dict[str, list[float]]
"""Score of each document, by task and metric."""


@dataclass(frozen=True)
class Paired:
    """Mean scores of two models over the same documents, and the 95 % interval of the difference by bootstrap."""

    task: str
    documents: int
    before: float
    after: float
    difference: float
    interval: tuple[float, float]


def paired(before: DocumentScores, after: DocumentScores) -> list[Paired]:
    """Pair every metric of both; the same documents are resampled for both."""
    pairs = []
    for task, second in after.items():
        first, count = before[task], len(second)
        difference = Measurement.bootstrap(lambda a, b: (b - a) / count, first, second)  # noqa: B023
        pairs.append(
            Paired(task, count, sum(first) / count, sum(second) / count, difference.value, difference.interval)
        )
    return pairs


class TaskSuite:
    """Tasks of lm-eval, by name or YAML file.

    Args:
        names: names or files of the tasks. tokenizer: the model's.
        lengths: tokens of the documents of lm-eval's tasks of RULER.
        limit: documents of a task; None is all.
    Raises:
        UsageError: a package is not installed. DataError: a task cannot be loaded, or there is no tokenizer.
    """

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        lengths: Sequence[int] = (4096,),
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        self.what = f"--tasks {','.join(names)}"
        self._tokenizer = tokenizer
        self._limit = limit
        self._seed = seed
        if tokenizer is None:
            raise DataError(f"{self.what}: needs a tokenizer, and the model's folder has none.", "Add tokenizer.json.")
        try:
            import lm_eval.models.huggingface
            import lm_eval.tasks
        except ImportError as error:
            what = f"{self.what}: the lm-eval package cannot be imported ({error})."
            raise UsageError(what, pip_install("eval")) from error
        known = any(not Path(name).expanduser().is_file() for name in names)
        metadata = {"pretrained": tokenizer.name_or_path, "max_seq_lengths": list(lengths)}
        hint = "Give a name that `lm-eval ls tasks` lists, or the path of a task's YAML file."
        with _in_one_line(f"{self.what}: lm-eval cannot load the task", hint):
            self._manager = lm_eval.tasks.TaskManager(include_defaults=known, metadata=metadata)
            loaded: Any = self._manager.load(list(names))
        inner = {name for group in loaded["groups"].values() for name in group.child_names}
        every = {**loaded["groups"], **loaded["tasks"]}
        self.tasks = loaded["tasks"]
        self._asked = [task for name, task in every.items() if name not in inner]

    @staticmethod
    @contextmanager
    def results(out: Path) -> Iterator[Path]:
        """A folder for `measure` that appears whole or not at all.

        Raises:
            UsageError: it is there. CheckpointError: the disk fails.
        """
        if out.exists():
            raise UsageError(f"{out}: exists.", "Give another folder, or remove it.")
        try:
            with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as staging:
                (made := Path(staging) / "made").mkdir()
                yield made
                made.rename(out)
        except OSError as error:
            raise CheckpointError(f"{out}: cannot be written ({error.strerror}).", "Choose another place.") from error

    def measure(self, model: PreTrainedModel, about: Mapping[str, Any], out: Path) -> DocumentScores:
        """Ask a model of transformers everything, and write what lm-eval writes, into a folder of the model's name.

        Args:
            about: the model in lm-eval's words, such as `pretrained`.
        Raises:
            CheckpointError: the files cannot be written.
        """
        import lm_eval
        from lm_eval.loggers import EvaluationTracker
        from lm_eval.models.huggingface import HFLM

        # A copy, because the wrapper sets a padding token.
        tokenizer = copy.deepcopy(self._tokenizer)
        begins = bool(text_start(self._tokenizer))
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH_SIZE, add_bos_token=begins)
        chosen = None
        tracker = EvaluationTracker(output_path=str(out))
        if self._limit:
            chosen = {name: list(range(min(self._limit, len(task.eval_docs)))) for name, task in self.tasks.items()}
        with _in_one_line(f"{self.what}: lm-eval cannot run the task"):
            results: Any = lm_eval.simple_evaluate(
                wrapped,
                model_args=dict(about),
                tasks=self._asked,
                samples=chosen,
                bootstrap_iters=1000,
                fewshot_random_seed=self._seed,
                task_manager=self._manager,
                evaluation_tracker=tracker,
            )
        samples = results.pop("samples")
        tracker.save_results_aggregated(results=results, samples=samples)
        for task in results["configs"]:
            tracker.save_results_samples(task_name=task, samples=samples[task])
        folder = out / str(tracker.general_config_tracker.model_name_sanitized)
        if len(list(folder.glob("samples_*.jsonl"))) < len(self.tasks):  # lm-eval only logs that it failed
            raise CheckpointError(f"{folder}: lm-eval could not write its results.", "Is the disk full?")
        return document_scores(samples)


def document_scores(samples: Mapping[str, list[JsonObject]]) -> DocumentScores:
    """Scores from lm-eval's samples: every metric that is one number for each document."""
    scores: DocumentScores = {}
    for task, of_task in samples.items():
        for sample in of_task:
            for metric in sample["metrics"]:
                if isinstance(sample[metric], (int, float)):
                    scores.setdefault(f"{task} {metric}", []).append(float(sample[metric]))
    return scores


@contextmanager
def _in_one_line(what: str, hint: str = "") -> Iterator[None]:
    """Whatever a task's code and data raise becomes a DataError; lm-eval's bars, for which it has no option, go."""
    try:
        with redirect_stderr(StringIO()):
            yield
    except RotorError:
        raise
    except Exception as error:
        line = " ".join(str(error).split())[:200]
        raise DataError(f"{what}: {type(error).__name__}: {line}", hint) from error
