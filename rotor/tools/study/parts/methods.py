"""The part `methods`: every bundled cache policy and the recipes at equal bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ....policies import Policy, bundled_policies, find_policy
from ..cache_part import CachePart, StudiedCache, at_bytes, cache_records
from ..caches import CacheRecord
from ..context import TARGETS, StudyContext
from ..part import Table
from ..store import StudyStore

SHARES = (0.5, 0.375, 0.28, 0.2, 0.15, 0.125, 0.1, 0.075, 0.05, 0.0375)
"""Shares of the uncompressed cache's bytes at which recipes are measured, where no list of bytes is given."""

EQUAL = (0.5, 0.28, 0.2, 0.125, 0.075, 0.05)
"""Shares of the uncompressed cache's bytes that are columns of the table at equal bytes."""

UNCOMPRESSED = "uncompressed"


class Methods(CachePart):
    name = "methods"
    csv = "methods.csv"
    title = "All methods, at their bytes"
    text = (
        "Every cache is used: a prompt, then the rest of each row in steps through it (report split, dtype of the "
        "checkpoint). Bytes per token count scales, zero points, indices, buffers, tokens that wait: of a complete "
        "row, their mean over the lengths that are scored, and of 32K tokens. KL in nats a token; the others are "
        "ratios to the uncompressed model, of tasks the mean probability of the right answers. Names are those of "
        "`--cache`, budgets of what evicts shares of the whole row; `rotor, 320 bytes` is that recipe's mildest plan "
        "at that size or below."
    )

    def caches(self, study: StudyContext) -> dict[str, StudiedCache]:
        caches = {UNCOMPRESSED: StudiedCache(UNCOMPRESSED)}
        for name, policy in policies(study.inputs.caches).items():
            caches[name] = StudiedCache(policy.method, policy)
        return caches | at_bytes(study, SHARES)

    def tables(self, store: StudyStore) -> Iterator[Table]:
        yield from super().tables(store)
        records = [record for record in cache_records(store, self.name) if not record.skipped]
        whole = [record.kv_bytes_per_token for record in records if record.name == UNCOMPRESSED]
        if whole:
            sizes = [share * whole[0] for share in EQUAL]
            header = ["method", *(f"{size:.0f} bytes" for size in sizes)]
            text = "At equal bytes: the least KL of a method whose cache takes no more, as the mean over lengths."
            yield Table(header, at_equal_bytes(records, sizes), text=text)
            header = ["accuracy", "complete row", "bytes", "32K tokens", "bytes at 32K tokens"]
            text = "The fewest bytes at an accuracy, the smallest of a row's ratios."
            yield Table(header, fewest_bytes(records), text=text)


def policies(names: Sequence[str] = ()) -> dict[str, Policy]:
    """The bundled cache policies that serve uncompressed models, and those with these names, by name."""
    chosen = bundled_policies() | {name: policy for name in names if (policy := find_policy(name)) is not None}
    return {name: policy for name, policy in chosen.items() if not policy.rows_only}


def at_equal_bytes(
    records: Sequence[CacheRecord], sizes: Sequence[float], value: Callable[[CacheRecord], float] = lambda r: r.kl_div
) -> list[list[str]]:
    """The least value (KL) of each family at each number of bytes, and which record has it where there are several."""
    rows = []
    for family in dict.fromkeys(record.family for record in records):
        of_family = [record for record in records if record.family == family]
        cells = []
        for size in sizes:
            fitting = [record for record in of_family if record.mean_kv_bytes_per_token <= size * 1.005]
            best = min(fitting, key=value, default=None)
            name = f" ({best.name})" if best is not None and best.name != family else ""
            cells.append("" if best is None else f"{value(best):.5f}{name}")
        rows.append([family, *cells])
    return [row for row in rows if any(row[1:])]


def fewest_bytes(records: Sequence[CacheRecord]) -> list[list[str]]:
    """The cache with the fewest bytes a token at each accuracy, for a complete sequence and for a long context."""
    rows = []
    for target in TARGETS:
        fitting = [record for record in records if not record.skipped and record.accuracy >= target]
        cells = [f"{target:g}"]
        for size in ("kv_bytes_per_token", "long_kv_bytes_per_token"):
            best = min(fitting, key=lambda record: getattr(record, size), default=None)
            cells += ["none measured", ""] if best is None else [best.name, f"{getattr(best, size):.1f}"]
        rows.append(cells)
    return rows
