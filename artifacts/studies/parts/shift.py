"""The part `shift` of a study: other text than was calibrated on: what recipes and a 4-bit cache lose on each kind.

rotor study MODEL --recipes rotor --parts artifacts/studies/parts/shift.py:Shift --bytes 192,320 -o STUDY
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rotor.errors import DataError
from rotor.models.sequences import prompt_start, text_sequences
from rotor.models.splits import held_out_documents
from rotor.models.tokenizer import text_start
from rotor.tools.study.cache_part import CONTROL, CachePart, StudiedCache, at_bytes, cache_records
from rotor.tools.study.caches import CacheBench, CacheRecord
from rotor.tools.study.context import StudyContext
from rotor.tools.study.part import Table, Task, number
from rotor.tools.study.plots import KL_LABEL, LEAST_KL, draw_line
from rotor.tools.study.store import StudyStore

SHARES = (0.125, 0.075)
"""Of the uncompressed cache's bytes, at which recipes are measured where no list of bytes is given."""

CALIBRATED, HELD_OUT, NO_FIRST = "text calibrated on", "held-out text", "no first token"
RANDOM, REPEATED = "random tokens", "one token repeated"
LONGEST = 400_000
"""Characters of a kind of text: more are not encoded."""


class Shift(CachePart):
    name = "shift"
    csv = "shift.csv"
    title = "Other text than was calibrated on"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        @cache
        def bench(kind: str) -> CacheBench:
            return study.bench_on(rows_of(study, kind))

        def measure(kind: str, name: str, case: StudiedCache) -> CacheRecord:
            try:
                return case.measure(study, f"{kind}: {name}", bench(kind))
            except DataError as error:
                return CacheRecord(f"{kind}: {name}", skipped=error.message, family=case.family)

        for name, case in {**CONTROL, **at_bytes(study, SHARES)}.items():
            for kind in kinds():
                yield Task(f"{self.name}/{kind}: {name}", partial(measure, kind, name, case))

    def tables(self, store: StudyStore) -> Iterator[Table]:
        records = {tuple(r.name.split(": ", 1)): r for r in cache_records(store, self.name)}
        control, rows = next(iter(CONTROL)), []
        for (kind, name), r in sorted(records.items(), key=lambda item: kinds().index(item[0][0])):
            base = records.get((kind, control))
            share = number(r.kl_div / base.kl_div, 2) if base and base.kl_div else ""
            cells = [number(r.kv_bytes_per_token, 1), number(r.kl_div, 5), share]
            cells += [number(value) for value in (r.token_accuracy, r.ppl_ratio, r.top1_agreement)]
            rows.append([kind, name, *([f"not measured: {r.skipped}", *[""] * 5] if r.skipped else cells)])
        if rows:
            header = [
                "text",
                "cache",
                "bytes",
                "KL",
                f"KL over that of {control}",
                "token accuracy",
                "perplexity",
                "top-1",
            ]
            text = (
                "Every row begins with the token that begins a text, where the model has one, but for the last kind: "
                "held-out text without it. Prose is the documentation that Python ships, C its headers; JSON, numbers "
                "and tokens are drawn. `text calibrated on` is of the split that recipes may calibrate on."
            )
            yield Table(header, rows, self.title, text)

    def plots(self, store: StudyStore) -> dict[str, Callable[[Any], None]]:
        records = [record for record in cache_records(store, self.name) if not record.skipped]
        return {self.name: partial(_draw, records)} if records else {}


def _draw(records: list[CacheRecord], figure: Any) -> None:
    figure.suptitle("KL by kind of text")
    axes, series = figure.subplots(), dict[str, list[tuple[Any, float]]]()
    for record in records:
        kind, name = record.name.split(": ", 1)
        label = name if "bytes" in name else f"{name}, {record.kv_bytes_per_token:.0f} bytes"
        series.setdefault(label, []).append((kind, max(record.kl_div, LEAST_KL)))
    for index, (name, points) in enumerate(series.items()):
        draw_line(axes, index, points, name, linestyle="")
    axes.set(ylabel=KL_LABEL, yscale="log")
    axes.tick_params(axis="x", labelrotation=20)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)


def kinds() -> list[str]:
    return [CALIBRATED, HELD_OUT, *TEXTS, RANDOM, REPEATED, NO_FIRST]


def rows_of(study: StudyContext, kind: str) -> Tensor:
    """As many rows of a kind, and as long, as the report split has.

    Raises:
        DataError: there is too little text of it, or no tokenizer.
    """
    count, length = study.data.report.shape
    tokenizer, draw = study.checkpoint.tokenizer, torch.Generator().manual_seed(0)
    if kind in (RANDOM, REPEATED):
        width = length if kind == RANDOM else 1
        vocab_size = study.checkpoint.config.get_text_config().vocab_size
        rows = torch.randint(vocab_size, (count, width), generator=draw).expand(-1, length)
    else:
        held_out = held_out_documents(study.evaluation)
        own = held_out.texts("calibration" if kind == CALIBRATED else "report")
        documents, begun = [TEXTS[kind]()[:LONGEST]] if kind in TEXTS else own, len(text_start(tokenizer))
        rows = text_sequences(documents, tokenizer, length + begun)[:count, begun:]
    if len(rows) < count:
        raise DataError(f"{kind}: {len(rows)} rows of {length} tokens, expected {count}.")
    start = torch.tensor([] if kind == NO_FIRST else prompt_start(tokenizer), dtype=torch.int64)
    return torch.cat([start.expand(count, -1), rows[:, : length - len(start)]], dim=1)


def _prose() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _headers() -> str:
    folder = Path(sysconfig.get_path("include"))
    return "\n".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.h")))


def _json() -> str:
    draw, names = random.Random(0), ("alpha", "beta", "gamma", "delta", "omega")
    items = [
        {"id": draw.randrange(10**6), "name": draw.choice(names), "tags": draw.sample(names, 2), "price": draw.random()}
        for _ in range(3000)
    ]
    return json.dumps(items, indent=1)


def _numbers() -> str:
    draw = random.Random(0)
    return "\n".join(",".join(f"{draw.gauss(0, 100):.3f}" for _ in range(6)) for _ in range(8000))


TEXTS: dict[str, Callable[[], str]] = {"prose": _prose, "C": _headers, "JSON": _json, "numbers": _numbers}
"""Generated, or of what Python ships."""
