"""Questions of kvpress' benchmarks, answered as its pipeline answers them.

A parquet file has the columns context, question, answer_prefix, answer (strings expected), max_new_tokens and task.
The context is read first, by itself; the question and the answer go through the cache that is left of it. Scored as
RULER is there: the share of the expected strings in the answer; of tasks `qa_*` whether one is.

Source: https://github.com/NVIDIA/kvpress
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from ..errors import DataError, MissingError, UsageError
from ..installing import pip_install

COLUMNS = ("context", "question", "answer_prefix", "answer", "max_new_tokens", "task")


@dataclass(frozen=True)
class Questions:
    """Rows of a parquet file, a table of pandas."""

    path: Path
    table: Any

    @classmethod
    def read(cls, path: Path, limit: int | None = None) -> Questions:
        """Raises MissingError, DataError, or UsageError where pandas or what it reads parquet with is missing."""
        if not path.is_file():
            raise MissingError(f"{path}: no such file.", "Give a parquet file of kvpress' columns.")
        try:
            import pandas

            table = pandas.read_parquet(path)
        except ImportError as error:
            raise UsageError(f"{path}: cannot be read ({error}).", pip_install("eval")) from error
        except Exception as error:  # pyarrow's own
            raise DataError(f"{path}: is no parquet file: {' '.join(str(error).split())[:200]}") from error
        missing = [name for name in COLUMNS if name not in table]
        if missing or not len(table):
            what = f"has no column {', '.join(missing)}" if missing else "has no rows"
            raise DataError(f"{path}: {what}; expected {', '.join(COLUMNS)}.", "Give a data set as kvpress has them.")
        return cls(path, table if limit is None else table.groupby("task").head(limit))

    def ask(self, model: Any, tokenizer: Any, out: Path) -> dict[str, list[float]]:
        """Answer all questions, write them to a CSV file, and return the scores by task."""
        table = self.table.copy()
        table["predicted_answer"] = [answer(model, tokenizer, row) for row in table.itertuples()]
        table.drop(columns="context").to_csv(out, index=False)
        scores = [score(row) for row in table.itertuples()]
        by_task = table.groupby("task").indices.items()
        return {f"{self.path.stem} {task}": [scores[i] for i in rows] for task, rows in by_task}


@torch.no_grad()
def answer(model: Any, tokenizer: Any, row: Any) -> str:
    """What a model writes, choosing the likeliest: the context is read before the question, in a step of its own."""
    context, end = (tokenizer.bos_token or "") + row.context, "\n"
    if tokenizer.chat_template is not None:
        mark = "#" * (len(row.context) + 10)
        turn = [{"role": "user", "content": row.context + mark}]
        context, end = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False).split(mark)
    parts = (context, row.question + end + row.answer_prefix)
    ids = [tokenizer.encode(part, add_special_tokens=False, return_tensors="pt").to(model.device) for part in parts]
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[0], past_key_values=cache, logits_to_keep=1)
    whole = torch.cat(ids, dim=1)
    options = {"do_sample": False, "max_new_tokens": int(row.max_new_tokens), "past_key_values": cache}
    written = model.generate(input_ids=whole, attention_mask=torch.ones_like(whole), **options)
    return str(tokenizer.decode(written[0, whole.shape[1] :], skip_special_tokens=True))


def score(row: Any) -> float:
    """The share of the expected strings in the answer; of a task `qa_*`, whether one is."""
    said = re.sub(r"[\x00-\x1f]", "", row.predicted_answer.strip()).strip().lower()
    hits = [str(text).lower() in said for text in row.answer]
    return float(any(hits)) if row.task.startswith("qa") else sum(hits) / len(hits)
