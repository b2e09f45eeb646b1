"""`context`: losses of recipes by position, in rows as long as the model reads, on the text and on one of another kind.

Rows are read as decoding reads them: each token sees the first and newest tokens exactly and all others through codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from ....models.sequences import bounded_seq_len
from ....models.splits import evaluation_data
from ....recipe.sections import Evaluation
from ....search.evaluation.fidelity import FidelityMeter
from ....search.evaluation.prompts import EvaluationContext
from ..part import CsvRow, Part, Table, Task, number

if TYPE_CHECKING:
    from ..context import StudyContext
    from ..store import StudyStore

LONGEST = 8192
"""Tokens of a row, where the model has positions for them."""

QUICK_LONGEST = 4096
"""The same with --quick."""

SHARES = (0.2, 0.12)
"""Shares of the uncompressed bytes at which recipes are measured where no list of bytes is given."""

COLUMNS = {
    "kl_div": ("KL in nats a token", 5),
    "ppl_ratio": ("perplexity's ratio", 4),
    "top1_agreement": ("share of equal most likely tokens", 4),
}
"""Measurements of a range of positions: in words, and digits that are shown."""


@dataclass(frozen=True)
class ContextRecord:
    """A recipe at one size on one text; `skipped` says why nothing was measured.

    text: what was read, in words. bytes: of a token's rows, in the mean over a sequence of the served context.
    positions: by range, as "512-1024", the values of COLUMNS, KL in nats a token.
    """

    name: str
    text: str
    skipped: str = ""
    bytes: int = 0
    positions: dict[str, dict[str, float]] = field(default_factory=dict)


class Context(Part):
    """Records: each recipe at a list of bytes, on each text."""

    name = "context"
    csv = "context.csv"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        # One meter at a time: each keeps the uncompressed model's states of a text.
        for text, spec in texts_of(study).items():
            meter = cache(partial(_meter, study, spec))
            for recipe in study.inputs.recipes:
                for size in study.inputs.sizes or [round(share * study.mean_bytes) for share in SHARES]:
                    key = f"{self.name}/{text}/{recipe}, {size} bytes"
                    yield Task(key, partial(_record, study, meter, text, recipe, size))

    def tables(self, store: StudyStore) -> Iterator[Table]:
        records = context_records(store)
        text = "Of each range of positions in rows: " + ", ".join(words for words, _ in COLUMNS.values()) + "."
        ranges = list(dict.fromkeys(name for record in records for name in record.positions))
        if records:
            header = ["text", "recipe", *(name.replace("-", " to ") for name in ranges)]
            yield Table(header, [_cells(record, ranges) for record in records], "By position", text)

    def rows(self, store: StudyStore) -> Iterable[CsvRow]:
        for record in context_records(store):
            plain = {"part": self.name, "name": record.name, "text": record.text, "bytes": record.bytes}
            for positions, values in record.positions.items():
                yield {**plain, "positions": positions, **{key: values[key] for key in COLUMNS}}


def context_records(store: StudyStore) -> list[ContextRecord]:
    """The records of the part, in order of arrival."""
    return [ContextRecord(**stored) for stored in store.part(Context.name).values()]


def texts_of(study: StudyContext) -> dict[str, Evaluation]:
    """Settings by which each text is read, by its name: the study's own, and beside one that was given the Python
    standard library's. No document is read that calibrated."""
    longest = QUICK_LONGEST if study.request.quick else LONGEST
    length = bounded_seq_len(longest, study.checkpoint.config)
    spec = study.evaluation
    own = replace(
        spec,
        metric="text",
        seq_len=length,
        search_tokens=length,
        report_tokens=max(length, spec.report_tokens),
    )
    if spec.source == "stdlib":
        return {"Python": own}
    return {"your text": own, "Python": replace(own, source="stdlib", path=None)}


def _meter(study: StudyContext, spec: Evaluation) -> FidelityMeter:
    """Meter of one text, by which the uncompressed model has been measured."""
    checkpoint, recipes = study.checkpoint, study.inputs.recipes.items()
    calibrated = set().union(*(study.run(name, recipe).calibrated_documents for name, recipe in recipes))
    data = evaluation_data(spec, checkpoint.config, checkpoint.tokenizer, calibrated)
    context = EvaluationContext.of(spec, data, checkpoint.tokenizer, checkpoint.config)
    meter = FidelityMeter(context, study.progress)
    with study.network.uncompressed():
        meter.measure_base(study.network, "report")
    return meter


def _record(
    study: StudyContext, meter: Callable[[], FidelityMeter], text: str, recipe: str, size: int
) -> ContextRecord:
    """The losses of a recipe's plan of at most so many bytes a token (see StudyContext.plan_of) on one text."""
    name = f"{recipe}, {size} bytes"
    evaluator, plan = study.plan_of(recipe, size)
    if isinstance(plan, str):
        return ContextRecord(name, text, skipped=plan)
    compare = meter()
    evaluator.compress(plan)
    measured = compare.measure(study.network, "report")
    length = compare.context.rows["report"].shape[1]
    whole = {key: value for key, value in measured.values.items() if value is not None}
    positions = measured.positions or {f"0-{length}": whole}  # a short row is one range
    shown = {name: {key: part[key] for key in COLUMNS} for name, part in positions.items()}
    return ContextRecord(name, text, "", round((1 - plan.stored) * study.mean_bytes), shown)


def _cells(record: ContextRecord, ranges: list[str]) -> list[str]:
    if record.skipped:
        return [record.text, record.name, f"not measured: {record.skipped}"]
    parts = [record.positions.get(name) for name in ranges]
    cells = [
        "" if values is None else ", ".join(number(values[key], digits) for key, (_, digits) in COLUMNS.items())
        for values in parts
    ]
    return [record.text, record.name, *cells]
