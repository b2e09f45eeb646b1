"""The part `peers` of a study: quantisers of the cache, and recipes at a list of bytes, scored through their caches."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..calibration.run import Run
from ..errors import DataError, UsageError
from ..evaluation.cached import PREFILL_SHARE
from ..evaluation.metrics import make_metric
from ..evaluation.metrics.distance import Distance, Prompts
from ..format.atomic import write_text
from ..format.layout import uncompressed_kv_bytes_per_token
from ..recipe import Recipe
from ..rewriting.compressible import CompressibleModel
from ..runtime.families import attention_shape
from .measure import StudySubject
from .peers import PeerBench, PeerData, PeerRecord, peers
from .store import StudyStore

PART, CSV = "peers", "peers.csv"

SHARES = (0.5, 0.375, 0.28, 0.2, 0.15, 0.125, 0.1, 0.075, 0.05, 0.0375)
"""Of the uncompressed cache's bytes, at which recipes are measured where no list of bytes is given."""

TASKS = ("lookup", "copy")

LISTS = ("answers", "hits", "kl_by_step")
"""Fields of a record that are no single number."""


class UncompressedModel:
    """The uncompressed model of a network whose attention may be compressed at the moment: both share their weights.

    Called like a model, it puts the attention that was replaced back for the length of the call.
    """

    def __init__(self, network: CompressibleModel) -> None:
        self._network = network
        self.config, self.device = network.config, network.device

    def __call__(self, **arguments: Any) -> Any:
        with self._network.uncompressed() as model:
            return model(**arguments)


class PeersPart:
    """Measures what the store does not have yet.

    Args:
        sizes: bytes of cache per token at which recipes are measured; None: SHARES of the uncompressed model's.
    Raises:
        UsageError: the model's weights are not all in memory.
    """

    def __init__(self, subject: StudySubject, store: StudyStore, sizes: Sequence[int] | None) -> None:
        if subject.placement.streamed:
            raise UsageError(
                "--parts peers: caches are read step by step, which needs all weights in memory.",
                "Give --offload never on a machine that can hold them, or leave this part out.",
            )
        self.subject, self.store, self._sizes = subject, store, sizes
        self._network: CompressibleModel | None = None
        self._peers: PeerBench | None = None

    def quantisers(self) -> None:
        """A record for each cache of the uncompressed model; one that was skipped is tried again."""
        for peer in peers():
            known = self.store.get(f"{PART}/{peer.name}")
            if known is None or known["skipped"]:
                self._put(self._bench().peer(peer))

    def recipe(self, name: str, recipe: Recipe, run: Callable[[], Run]) -> None:
        """A record of a recipe's mildest plan at each number of bytes or below, compressed in memory.

        Args:
            run: gives its calibration.
        """
        sizes = {f"{name}, {size} bytes": size for size in self.sizes}
        missing = {label: size for label, size in sizes.items() if self.store.get(f"{PART}/{label}") is None}
        if not missing:
            return
        measurer = self.subject.measurer(run(), recipe)
        path = measurer.path(recipe)
        for label, size in missing.items():
            plan = path.at_compression(1 - size / self._whole)
            if plan is None:
                least = (1 - path.steps()[-1].stored) * self._whole
                self._put(PeerRecord(label, skipped=f"out of reach: the least is {least:.0f} bytes"))
                continue
            scorer, network = self._bench(), self._in_checkpoint_dtype()
            network.compress(plan.select(measurer.bases), plan.rounded)
            self._put(scorer.checkpoint(label, network.model))

    @property
    def sizes(self) -> list[int]:
        """Bytes of cache per token at which recipes are measured."""
        if self._sizes is not None:
            return list(self._sizes)
        return [round(share * self._whole) for share in SHARES]

    @property
    def _whole(self) -> int:
        """Bytes of a token in the uncompressed cache."""
        return uncompressed_kv_bytes_per_token(attention_shape(self.subject.checkpoint.config), self._dtype.itemsize)

    @property
    def _dtype(self) -> torch.dtype:
        """The checkpoint's: bytes are counted as they are served."""
        dtype: torch.dtype = self.subject.checkpoint.config.dtype or torch.float32
        return dtype

    def _in_checkpoint_dtype(self) -> CompressibleModel:
        if self._network is None:
            subject = self.subject
            same = subject.placement.dtype == self._dtype
            place = replace(subject.placement, dtype=self._dtype)
            self._network = subject.network if same else place.model(subject.checkpoint, subject.workspace)
        return self._network

    def _bench(self) -> PeerBench:
        if self._peers is None:
            text = self.subject.data.report
            data = PeerData(text, max(1, text.shape[1] // PREFILL_SHARE), self._tasks())
            model = UncompressedModel(self._in_checkpoint_dtype())
            self._peers = PeerBench(model, data, progress=self.subject.progress)
        return self._peers

    def _tasks(self) -> dict[str, Prompts]:
        """The look-up and copy prompts of the report split, where the tokenizer can make them."""
        found = {}
        for name in TASKS:
            metric = make_metric(name, self.subject.meter.context)
            assert isinstance(metric, Distance)
            try:
                found[name] = metric.prompts("report")
            except DataError as error:
                self.subject.progress.message(f"peers leave out `{name}`: {error.message}")
        return found

    def _put(self, record: PeerRecord) -> None:
        key, data = f"{PART}/{record.name}", asdict(record)
        if self.store.get(key) == data:
            return
        self.store.put(key, data)
        found = record.skipped or f"{record.mean_kv_bytes_per_token:.1f} bytes a token, KL {record.kl_div:.5f}"
        self.subject.progress.message(f"{record.name}: {found}")


def peer_records(store: StudyStore) -> list[PeerRecord]:
    """The records of a study's caches, in order of arrival."""
    return [PeerRecord(**record) for record in store.part(PART).values()]


def write_peers_csv(store: StudyStore) -> Path | None:
    """One row a cache, with why it was skipped; None without records."""
    records = peer_records(store)
    if not records:
        return None
    path = store.folder / CSV
    write_text(path, records_csv([({}, record) for record in records]))
    return path


def records_csv(rows: Sequence[tuple[Mapping[str, str], PeerRecord]]) -> str:
    """A table of records, each behind what is said of it by column; without numbers where it was skipped.

    Args:
        rows: the same columns in each.
    """
    records = [record for _, record in rows]
    tasks, said = _tasks_of(records), list(rows[0][0])
    plain = [name for name in asdict(records[0]) if name not in LISTS]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*said, *plain, *(f"{task}_{what}" for task in tasks for what in ("answers", "hits"))])
    for of_record, record in rows:
        numbers = [getattr(record, name) if name in ("name", "skipped") or not record.skipped else "" for name in plain]
        both = [found.get(task, "") for task in tasks for found in (record.answers, record.hits)]
        writer.writerow([*(of_record[name] for name in said), *numbers, *both])
    return text.getvalue()


def peer_rows(records: Sequence[PeerRecord]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of a table, by falling mean bytes; what was skipped, with its reason, at the end."""
    tasks = _tasks_of(records)
    header = ["cache", "bytes", "mean", "at 32K tokens", "removed", "KL", "token accuracy", "perplexity", "top-1"]
    greedy = any(record.greedy_agreement is not None for record in records)
    header += ["greedy"] if greedy else []
    measured = sorted((r for r in records if not r.skipped), key=lambda r: -r.mean_kv_bytes_per_token)
    rows = [
        [
            record.name,
            f"{record.kv_bytes_per_token:.1f}",
            f"{record.mean_kv_bytes_per_token:.1f}",
            f"{record.long_kv_bytes_per_token:.1f}",
            f"{record.compression:.3f}",
            f"{record.kl_div:.5f}",
            *(f"{value:.4f}" for value in (record.token_accuracy, record.ppl_ratio, record.top1_agreement)),
            *([] if not greedy else [_number(record.greedy_agreement)]),
            *(_ratio(record.answers, task) for task in tasks),
        ]
        for record in measured
    ]
    blank = [""] * (len(header) + len(tasks) - 2)
    rows += [[record.name, f"not measured: {record.skipped}", *blank] for record in records if record.skipped]
    return [*header, *tasks], rows


def _tasks_of(records: Sequence[PeerRecord]) -> list[str]:
    return list(dict.fromkeys(task for record in records for task in record.answers))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _ratio(found: Mapping[str, float], task: str) -> str:
    return f"{found[task]:.4f}" if task in found else ""
