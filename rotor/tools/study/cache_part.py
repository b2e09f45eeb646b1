"""The base of the parts about caches: measurements, tables, and plots of fidelity against bytes.

A part names its caches (`CachePart.caches`); records, table, CSV and plot follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ...policies import PerToken, Policy
from .caches import CacheBench, CacheRecord
from .context import StudyContext
from .part import CsvRow, Part, Table, Task, number
from .plots import KL_LABEL, draw_line
from .store import StudyStore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUP = 64
"""Numbers in a group, and tokens in the exact residual, of every method that has them (GEAR section 4)."""


@dataclass(frozen=True)
class StudiedCache:
    """One cache that a part measures: of the uncompressed model, or of a recipe's mildest plan that removes a share.

    family: name of what has one colour in plots. policy: the policy that keeps the cache, if any.
    """

    family: str
    policy: Policy | None = None
    recipe: str | None = None
    removed: float = 0.0

    def task(self, study: StudyContext, key: str, name: str) -> Task:
        """The task that measures the cache on the report split and its prompts."""
        return Task(key, partial(self.measure, study, name))

    def measure(self, study: StudyContext, name: str, bench: CacheBench | None = None) -> CacheRecord:
        bench = bench or study.bench
        if self.recipe:
            path = study.path(self.recipe, study.inputs.recipes[self.recipe])
            record = bench.of_plan(name, *path, self.removed, self.policy)
        else:
            record = bench.of_policy(name, self.policy)
        return replace(record, family=self.family)


CONTROL = {"per token, 4 bits": StudiedCache("per token", PerToken(4, GROUP))}
"""The control for bytes, which every part measures: plain codes of four bits."""


def at_bytes(study: StudyContext, shares: Sequence[float]) -> dict[str, StudiedCache]:
    """Each recipe at the bytes that were asked for, or else at shares of the uncompressed model's."""
    whole = study.whole_bytes
    caches = {}
    for name in study.inputs.recipes:
        for size in study.inputs.sizes or [round(share * whole) for share in shares]:
            caches[f"{name}, {size} bytes"] = StudiedCache(name, recipe=name, removed=1 - size / whole)
    return caches


class CachePart(Part):
    """A part about caches.

    title, text: of its table.
    """

    csv = "caches.csv"
    title: ClassVar[str]
    text: ClassVar[str] = ""

    def caches(self, study: StudyContext) -> Mapping[str, StudiedCache]:
        """Caches by the name of their records."""
        raise NotImplementedError

    def tasks(self, study: StudyContext) -> Iterator[Task]:
        for name, cache in self.caches(study).items():
            yield cache.task(study, f"{self.name}/{name}", name)

    def tables(self, store: StudyStore) -> Iterator[Table]:
        records = cache_records(store, self.name)
        if records:
            yield cache_table(records, self.title, self.text)

    def rows(self, store: StudyStore) -> Iterable[CsvRow]:
        return [{"part": self.name, **_csv_row(record)} for record in cache_records(store, self.name)]

    def plots(self, store: StudyStore) -> dict[str, Callable[[Figure], None]]:
        records = [record for record in cache_records(store, self.name) if not record.skipped]
        return {self.name: partial(draw_fidelity, records, self.title)} if records else {}


def cache_records(store: StudyStore, part: str) -> list[CacheRecord]:
    """The records of caches of a part, in order of arrival; what older versions measured beside is left out."""
    known = {column.name for column in fields(CacheRecord)}
    records = [record for record in store.part(part).values() if "skipped" in record]
    return [CacheRecord(**{name: record[name] for name in record.keys() & known}) for record in records]


def _csv_row(record: CacheRecord) -> CsvRow:
    """One row of the CSV file by column; without numbers where the cache was skipped."""
    plain = {key: value for key, value in asdict(record).items() if not isinstance(value, (dict, list))}
    if record.skipped:
        plain |= {key: "" for key in plain if key not in ("name", "family", "skipped")}
    return plain | {f"{task}_answers": value for task, value in record.answers.items()}


def cache_table(records: Sequence[CacheRecord], title: str, text: str = "") -> Table:
    """Table of caches by falling mean bytes; skipped ones, with the reason, at the end."""
    tasks = _tasks_of(records)
    header = [
        "cache",
        "bytes",
        "mean",
        "at 32K tokens",
        "removed",
        "KL",
        "token accuracy",
        "perplexity",
        "top-1",
        *tasks,
    ]
    rows = []
    for r in sorted(records, key=lambda record: -record.mean_kv_bytes_per_token):
        if not r.skipped:
            sizes = (r.kv_bytes_per_token, r.mean_kv_bytes_per_token, r.long_kv_bytes_per_token)
            ratios = [r.token_accuracy, r.ppl_ratio, r.top1_agreement, *(r.answers.get(task) for task in tasks)]
            cells = [*(number(size, 1) for size in sizes), number(r.compression, 3), number(r.kl_div, 5)]
            rows.append([r.name, *cells, *map(number, ratios)])
    blank = [""] * (len(header) - 2)
    rows += [[record.name, f"not measured: {record.skipped}", *blank] for record in records if record.skipped]
    return Table(header, rows, title, text)


def draw_fidelity(records: Sequence[CacheRecord], title: str, figure: Figure) -> None:
    """KL and each ratio against bytes, a line a method, a colour a family, with the Pareto front.

    Bytes are means of the lengths that were scored: tokens that are not yet coded count where they help.
    """
    from matplotlib import colormaps

    values: dict[str, Callable[[CacheRecord], float | None]] = {
        KL_LABEL: lambda r: max(r.kl_div, 1e-5),
        "next-token accuracy (ratio)": lambda r: r.token_accuracy,
        "perplexity (ratio)": lambda r: r.ppl_ratio,
        **{f"{t}: probability of answers (ratio)": lambda r, t=t: r.answers.get(t) for t in _tasks_of(records)},  # type: ignore[misc]
    }
    columns = 2 if len(values) <= 4 else 3
    figure.suptitle(title)
    figure.set_size_inches(max(11.0, 5.5 * columns), 4.5 * -(-len(values) // columns))
    grid = figure.subplots(-(-len(values) // columns), columns, squeeze=False).flatten()
    look = colormaps["tab10" if len({record.family for record in records}) <= 10 else "tab20"]
    families = list(dict.fromkeys(record.family for record in records))
    methods = dict.fromkeys((families.index(record.family), method_of(record.name)) for record in records)
    for axes, (label, value) in zip(grid, values.items(), strict=False):
        points = [(r, r.mean_kv_bytes_per_token, y) for r in records if (y := value(r)) is not None]
        for marker, (family, method) in enumerate(sorted(methods)):
            line = sorted((x, y) for r, x, y in points if (r.family, method_of(r.name)) == (families[family], method))
            draw_line(axes, marker, line, method, linestyle=":", color=look(family % 20))
        front = pareto_front([(x, y) for _, x, y in points], label != KL_LABEL)
        axes.step(*zip(*front, strict=True), where="post", color="0.3", linewidth=1, label="Pareto front", zorder=0)
        axes.set(xlabel="bytes of cache per token", ylabel=label, yscale="log" if label == KL_LABEL else "linear")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
    for axes in grid[len(values) :]:
        axes.set_axis_off()
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)


def method_of(name: str) -> str:
    """The part of the name that records of one method share: `KIVI-2` and `KIVI-4` are KIVI, at every budget.

    A recipe's own number stays: `rotor-16, 320 bytes` is rotor-16.
    """
    short = re.sub(r", [\d.]+ (bits|bytes|of the tokens|removed)", "", name)
    return short if short != name else re.sub(r"(-\d+)+$", "", name)


def pareto_front(points: Sequence[tuple[float, float]], higher: bool) -> list[tuple[float, float]]:
    """The points (bytes, value) that no other equals or beats in both, in ascending order of bytes.

    Args:
        higher: whether a higher value is better.
    """
    front: list[tuple[float, float]] = []
    for size, value in sorted(points, key=lambda point: (point[0], -point[1] if higher else point[1])):
        if not front or (value > front[-1][1] if higher else value < front[-1][1]):
            front.append((size, value))
    return front


def _tasks_of(records: Iterable[CacheRecord]) -> list[str]:
    return list(dict.fromkeys(task for record in records for task in record.answers))
