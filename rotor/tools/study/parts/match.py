"""`match`: the bytes at which a recipe is as good as what is in use now, in KL and in each task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial

from ....checkpoint.families import attention_shape
from ....checkpoint.sizes import exact_bytes_of_sequence, kv_bytes_of_sequence
from ....errors import UnsupportedModelError
from ....policies import FP8, KIVI, KVTC, PerToken
from ....policies.quantiser import Quantiser
from ..caches import CacheBench, mean_sequence_bytes
from ..context import StudyContext
from ..part import CsvRow, Part, Table, Task, number
from ..store import StudyStore

CONTEXTS = (2048, 32768)
"""Tokens of the sequences whose bytes are compared: in the shorter one exact newest tokens weigh, in the longer not."""

SHARES = (0.45, 0.36, 0.29, 0.23, 0.18, 0.14, 0.1)
"""Shares of the uncompressed bytes at which recipes are measured where no list of bytes is given."""

TEXT = "KL"
TASKS = {"lookup": "look-ups", "copy": "copies"}


@dataclass(frozen=True)
class MatchRecord:
    """A measured cache; `skipped` says why nothing was measured.

    recipe: the name of the recipe, or nothing of a cache in use. answers: by task, the mean probability of the right
    answers over the uncompressed model's. sizes: mean bytes a token of a sequence of each of CONTEXTS, as text.
    """

    name: str
    recipe: str = ""
    skipped: str = ""
    kl_div: float = 0.0
    answers: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)


def in_use(head_dim: int) -> dict[str, Quantiser]:
    """The caches that recipes are compared with, by name."""
    return {
        "fp8, one scale": FP8("tensor"),
        "4 bits a token and head": PerToken(4, head_dim),
        "KIVI-4": KIVI(4, 32, 128),
        "KIVI-2": KIVI(2, 32, 128),
        "KVTC-4": KVTC(4),
    }


class Match(Part):
    """Records: each cache in use, and each recipe at a list of bytes."""

    name = "match"
    csv = "match.csv"

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        measured = _Measured(study)
        for name, policy in in_use(max(sizes.head_dim for sizes in measured.shape.sizes)).items():
            yield Task(f"{self.name}/{name}", partial(measured.of_policy, name, policy))
        for recipe in study.inputs.recipes:
            for size in study.inputs.sizes or [round(share * measured.whole) for share in SHARES]:
                yield Task(f"{self.name}/{recipe}, {size} bytes", partial(measured.of_recipe, recipe, size))

    def tables(self, store: StudyStore) -> Iterator[Table]:
        records = match_records(store)
        title = "Bytes to match"
        for recipe in dict.fromkeys(record.recipe for record in records if record.recipe):
            for context in CONTEXTS:
                text = (
                    f"At which bytes a token `{recipe}` is as good, over a sequence of {context:,} tokens: by KL, and "
                    "by the answers of each task. Between two of its sizes KL is taken as exponential, answers as "
                    "linear; `<` and `>`: less, or more, than all that were measured."
                )
                yield Table(header(records), match_rows(records, recipe, str(context)), title, text)
                title = ""
        if records:
            yield points_table(records)

    def rows(self, store: StudyStore) -> Iterable[CsvRow]:
        for record in match_records(store):
            plain = {key: value for key, value in asdict(record).items() if not isinstance(value, dict)}
            answers = {f"{task}_answers": value for task, value in record.answers.items()}
            sizes = {f"kv_bytes_per_token_at_{context}": value for context, value in record.sizes.items()}
            yield {"part": self.name, **plain, **answers, **sizes}


class _Measured:
    """The measurements of the part: the model runs in the study's dtype, caches are counted in the checkpoint's."""

    def __init__(self, study: StudyContext) -> None:
        self.study, config = study, study.checkpoint.config
        self.shape = attention_shape(config)
        self.whole = study.mean_bytes

    @cached_property
    def bench(self) -> CacheBench:
        return self.study.bench_in(self.study.network)

    def of_policy(self, name: str, policy: Quantiser) -> MatchRecord:
        bench = self.bench
        try:
            with bench.network.uncompressed():
                fitted = bench.fitted(policy.beyond_windows())
                values = bench.measure(fitted)
        except UnsupportedModelError as error:
            return MatchRecord(name, skipped=error.message)
        assert isinstance(fitted, Quantiser)
        sizes = {n: mean_sequence_bytes(self.shape, self.study.cache_dtype, n, fitted) for n in CONTEXTS}
        return self._record(name, "", values, sizes)

    def of_recipe(self, recipe: str, size: int) -> MatchRecord:
        """The mildest plan of at most so many bytes a token, in the mean over a sequence of the served context.

        Tokens that are kept exactly come on top.
        """
        name = f"{recipe}, {size} bytes"
        evaluator, plan = self.study.plan_of(recipe, size)
        if isinstance(plan, str):
            return MatchRecord(name, recipe, skipped=plan)
        bench = self.bench
        evaluator.compress(plan, bench.network)
        rows = plan.row_bytes(self.study.cache_dtype.itemsize)
        kept = [evaluator.recipe.exact.tokens] * self.shape.num_layers
        exact = {n: exact_bytes_of_sequence(kept, self.shape, self.study.cache_dtype.itemsize, n) for n in CONTEXTS}
        sizes = {n: (kv_bytes_of_sequence(rows, self.shape, n) + exact[n]) / n for n in CONTEXTS}
        return self._record(name, recipe, bench.measure(), sizes)

    def _record(
        self, name: str, recipe: str, values: Mapping[str, float | None], sizes: dict[int, float]
    ) -> MatchRecord:
        kl_div = values["kl_div"]
        assert kl_div is not None
        answers = {task: float(value) for task in TASKS if (value := values.get(task)) is not None}
        return MatchRecord(name, recipe, "", kl_div, answers, {str(n): size for n, size in sizes.items()})


def match_records(store: StudyStore) -> list[MatchRecord]:
    """The records of the part, in order of arrival."""
    return [MatchRecord(**record) for record in store.part(Match.name).values()]


def header(records: Sequence[MatchRecord]) -> list[str]:
    """Columns of the table of bytes to match."""
    return ["cache", "bytes", *(cell for name in (TEXT, *_tasks(records)) for cell in (TASKS.get(name, name), "at"))]


def match_rows(records: Sequence[MatchRecord], recipe: str, context: str) -> list[list[str]]:
    """Bytes and values of each cache in use, each value with the bytes at which the recipe has it."""
    of_recipe = [record for record in records if record.recipe == recipe and not record.skipped]
    rows = []
    for record in (record for record in records if not record.recipe):
        if record.skipped:
            rows.append([record.name, f"not measured: {record.skipped}"])
            continue
        cells = [record.name, number(record.sizes[context], 0), number(record.kl_div, 5)]
        cells.append(bytes_of_kl(of_recipe, record.kl_div, context))
        for task in _tasks(records):
            cells += [number(record.answers[task], 3), bytes_of_answers(of_recipe, record.answers[task], task, context)]
        rows.append(cells)
    return rows


def points_table(records: Sequence[MatchRecord]) -> Table:
    """Table of all measured caches, in order of arrival."""
    tasks = _tasks(records)
    rows = []
    for r in records:
        sizes = [number(r.sizes.get(str(context)), 0) for context in CONTEXTS]
        rows.append([r.name, *sizes, number(r.kl_div, 5), *(number(r.answers.get(task), 3) for task in tasks)])
        if r.skipped:
            rows[-1] = [r.name, f"not measured: {r.skipped}"]
    sizes = [f"bytes at {context:,} tokens" for context in CONTEXTS]
    return Table(["cache", *sizes, TEXT, *(TASKS[task] for task in tasks)], rows, text="What was measured:")


def bytes_of_kl(records: Sequence[MatchRecord], wanted: float, context: str) -> str:
    """Bytes a token at which a recipe's KL is as low as wanted."""
    return _crossing(records, context, lambda record: -math.log(max(record.kl_div, 1e-9)), -math.log(max(wanted, 1e-9)))


def bytes_of_answers(records: Sequence[MatchRecord], wanted: float, task: str, context: str) -> str:
    """Bytes a token from which on a recipe's answers are at least as probable as wanted."""
    return _crossing(records, context, lambda record: record.answers[task], wanted)


def _crossing(
    records: Sequence[MatchRecord], context: str, value: Callable[[MatchRecord], float], wanted: float
) -> str:
    """Fewest bytes at which `value`, higher is better, reaches `wanted`, linear between records.

    Values are samples and may fall where bytes grow: the best of fewer bytes counts for more of them.
    """
    ordered = sorted(records, key=lambda record: record.sizes[context])
    if not ordered:
        return ""
    size, best = ordered[0].sizes[context], value(ordered[0])
    if best >= wanted:
        return f"< {size:.0f}"
    for record in ordered[1:]:
        next_size = record.sizes[context]
        next_best = max(best, value(record))
        if next_best >= wanted:
            return f"{size + (next_size - size) * (wanted - best) / (next_best - best):.0f}"
        size, best = next_size, next_best
    return f"> {size:.0f}"


def _tasks(records: Sequence[MatchRecord]) -> list[str]:
    """Tasks that every measured record has answers of."""
    measured = [record for record in records if not record.skipped]
    return [task for task in TASKS if measured and all(task in record.answers for record in measured)]
