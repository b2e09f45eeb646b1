"""Tables of a study's parts about caches: what was measured, and in the shape of the papers' own tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..format.atomic import write_text
from .cache_plans import BUDGET_SHARES, budget_methods
from .caches_part import COSINES, SENSITIVITY, of_budget, of_share, shares_of_layers
from .peers import PeerRecord
from .peers_part import LISTS, peer_rows
from .request import CACHE_PARTS

CSV = "caches.csv"
TARGETS = (0.99, 0.95, 0.90)
CLOSE = 0.9
"""Of the full cache's accuracy, at which budgets are compared (SqueezeAttention table 2)."""

Table = tuple[str, list[str], list[list[str]]]
"""Title, header, cells."""


def cache_records(store: Any, part: str) -> list[PeerRecord]:
    """The records of a part, in order of arrival."""
    others = (SENSITIVITY, COSINES)
    return [PeerRecord(**record) for key, record in store.part(part).items() if not key.startswith(others)]


def accuracy(record: PeerRecord) -> float:
    """The smallest ratio to the uncompressed model: next tokens, perplexity, and each task's answers."""
    return min(record.token_accuracy, record.ppl_ratio, *record.answers.values())


def best_mixtures(records: Sequence[PeerRecord]) -> list[list[str]]:
    """At each accuracy what takes fewest bytes a token, of a complete row and of a long context."""
    rows = []
    for target in TARGETS:
        fitting = [record for record in records if not record.skipped and accuracy(record) >= target]
        cells = [f"{target:g}"]
        for size in ("kv_bytes_per_token", "long_kv_bytes_per_token"):
            best = min(fitting, key=lambda record: getattr(record, size), default=None)
            cells += ["none measured", ""] if best is None else [best.name, f"{getattr(best, size):.1f}"]
        rows.append(cells)
    return rows


def cache_tables(store: Any) -> list[Table]:
    """A table for each of the four parts, those of the papers in shape, and the best mixtures over all of them."""
    titles = {
        "quantise": "Quantised caches",
        "evict": "Evicted tokens",
        "budgets": "Budgets of layers",
        "combine": "Compressed rows and a policy on top (FDC and ZACK: 1 - p = (1 - p_dim)(1 - p_tok))",
    }
    found = {part: records for part in CACHE_PARTS if (records := cache_records(store, part))}
    tables = [(titles[part], *peer_rows(records)) for part, records in found.items()]
    named = {record.name: record for records in found.values() for record in records if not record.skipped}
    tables += [table for table in (*_gear_tables(named), _squeeze_table(named), _shares_table(store)) if table[2]]
    if found:
        header = ["accuracy", "fewest bytes, complete row", "bytes", "fewest bytes, 32K tokens", "bytes at 32K tokens"]
        every = [record for records in found.values() for record in records]
        title = "Of all these, the fewest bytes at an accuracy: the smallest of a row's ratios"
        tables.append((title, header, best_mixtures(every)))
    return tables


def _gear_tables(named: Mapping[str, PeerRecord]) -> list[Table]:
    """In the shape of GEAR's: sizes and accuracies as shares of the uncompressed model's."""
    tables = {
        "GEAR tables 1, 2 and 9 in shape": [
            *(f"{name}-4" for name in ("KCVT", "KIVI", "GEAR-L KCVT", "GEAR KCVT")),
            *(f"{name}-2" for name in ("KIVI", "GEAR-L KIVI", "GEAR KIVI")),
        ],
        "GEAR table 8 in shape: outliers alone": ["KIVI-2", "Outlier-A. KIVI-2", "GEAR-L KIVI-2", "GEAR KIVI-2"],
        "GEAR table 10 in shape: dropping tokens": [of_share(name, 0.5) for name in ("H2O", "random")]
        + ["GEAR KCVT-4"],
    }
    first = next(iter(tables))
    tables[first][:0] = ["per token, 4 bits"]
    tables[first].insert(5, "per token, 2 bits")
    tasks = list(dict.fromkeys(task for record in named.values() for task in record.answers))
    header = ["cache", "KV size", "at 32K tokens", "KL", "token accuracy", *tasks]
    return [
        (title, header, [_sizes(named[name], tasks) for name in names if name in named])
        for title, names in tables.items()
    ]


def _sizes(record: PeerRecord, tasks: Sequence[str]) -> list[str]:
    whole = record.kv_bytes_per_token / (1 - record.compression)
    shares = record.kv_bytes_per_token / whole, record.long_kv_bytes_per_token / whole
    answers = (f"{record.answers[task]:.3f}" if task in record.answers else "" for task in tasks)
    sizes = (f"{100 * share:.1f} %" for share in shares)
    return [record.name, *sizes, f"{record.kl_div:.4f}", f"{record.token_accuracy:.3f}", *answers]


def _squeeze_table(named: Mapping[str, PeerRecord]) -> Table:
    """In the shape of SqueezeAttention's table 2: the smallest measured budget that is close to the full cache."""
    rows = []
    for method in budget_methods(BUDGET_SHARES[0]):
        cells = [method]
        for how in ("alike", "SqueezeAttention"):
            points = [(share, named.get(of_budget(method, how, share))) for share in BUDGET_SHARES]
            found = [(share, record.token_accuracy) for share, record in points if record is not None]
            cells.append(", ".join(f"{accuracy:.3f} / {share:.0%}" for share, accuracy in found))
            close = [share for share, accuracy in found if accuracy >= CLOSE]
            cells.append(f"{min(close):.0%}" if close else "none" if found else "")
        rows += [cells] if any(cells[1:]) else []
    header = ["method", "alike: token accuracy / budget", f"least for {CLOSE:g}", "SqueezeAttention", "least"]
    return "SqueezeAttention table 2 in shape", header, rows


def _shares_table(store: Any) -> Table:
    """What budgets by measured sensitivity are, to be put into a policy's file."""
    records = {key: r for key, r in store.part("budgets").items() if key.startswith(SENSITIVITY)}
    rows = [
        [key.partition("/")[2], f"[{', '.join(f'{share:.3f}' for share in shares_of_layers(record['kl_div']))}]"]
        for key, record in records.items()
    ]
    return "Budgets by measured sensitivity", ["method", "`layer_shares`"], rows


def write_caches_csv(store: Any) -> Path | None:
    """One row a record of the four parts; None without any."""
    parts = {part: cache_records(store, part) for part in CACHE_PARTS}
    tasks = list(dict.fromkeys(task for records in parts.values() for record in records for task in record.answers))
    if not any(parts.values()):
        return None
    plain = [name for name in asdict(PeerRecord("")) if name not in LISTS]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["part", *plain, *(f"{task}_answers" for task in tasks)])
    for part, records in parts.items():
        for record in records:
            own = [getattr(record, name) for name in plain]
            writer.writerow([part, *own, *(record.answers.get(task, "") for task in tasks)])
    path = store.folder / CSV
    write_text(path, text.getvalue())
    return path
