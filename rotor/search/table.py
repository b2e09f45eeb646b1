"""Tables of what was measured of a run, one file for each context: points by ranks, and probes apart from them.

RUN/tables/KEY.json: points. RUN/probes/KEY.json: sensitivities. RUN/tables/latest.json: the last table.

A context is all that a measured number depends on besides the ranks: the evaluation's tokens, dtype, kind of device,
metric and the settings of it. Its hash names the file, so that another metric or text adds a table and never
wipes or reuses one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from ..calibration.allocation.plan import Plan, Sensitivity
from ..calibration.run import Run
from ..checked import JsonObject, Reader, plain
from ..checkpoint.files import read_json, write_json
from ..checkpoint.layout import ExactTokens
from ..errors import CheckpointError
from ..models.hardware import DevicePlan
from ..models.splits import EvaluationData
from ..recipe.sections import Evaluation, Ranks
from .evaluation.accuracy import BaseValues
from .point import Point

if TYPE_CHECKING:
    from ..policies import Policy

TABLES = "tables"
PROBES = "probes"
LATEST = "latest"
TABLE_VERSION = 10
HINT = "Delete it, and the next export measures again."
T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """Everything that measured numbers depend on besides the ranks.

    metric: name. settings: of the prompts that metrics draw. data, data_sha256: the held-out text, and its tokens;
    search_sha256: those of the search split alone.
    excluded: digests of documents that were left out of it, as they were calibrated on.
    """

    metric: str
    settings: JsonObject
    data: str
    data_sha256: str
    search_sha256: str
    dtype: str
    device_type: str
    excluded: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        spec: Evaluation,
        data: EvaluationData,
        devices: DevicePlan,
        policy: Policy | None = None,
        context_tokens: int | None = None,
        exact: ExactTokens | None = None,
    ) -> Context:
        """The context of measurements on this text.

        Args:
            policy: the policy that keeps the cache, if any. context_tokens: length of the sequence whose bytes choose
                plans, where that matters. exact: tokens that are kept exactly beside the rows.
        """
        names = ["seed", "lookup_prompts", "lookup_keys", "copy_prompts", "copy_tokens", "filler_tokens"]
        settings = {name: getattr(spec, name) for name in names} | ({"cache": policy.as_dict()} if policy else {})
        settings |= {} if context_tokens is None else {"context_tokens": context_tokens}
        settings |= {} if exact is None else {"exact": asdict(exact)}
        dtype = str(devices.dtype).removeprefix("torch.")
        hashes = data.sha256, data.search_sha256
        return cls(spec.metric, settings, data.description, *hashes, dtype, devices.device.type, data.excluded)

    @property
    def key(self) -> str:
        return _hash([self.metric, self.settings, self.data_sha256, self.dtype, self.device_type])

    def searches_alike(self, other: Context) -> bool:
        """Tell whether measurements on the search split hold for both; the report splits may differ."""
        parts = ("metric", "settings", "search_sha256", "dtype", "device_type")
        return all(getattr(self, part) == getattr(other, part) for part in parts)


@dataclass(frozen=True)
class _TableFile:
    """A RankTable in JSON."""

    version: int
    context: Context
    base: dict[str, BaseValues]
    left_out: dict[str, dict[str, str]]
    points: list[Point]


@dataclass(frozen=True)
class _Latest:
    """The name of the table that was written last, in JSON."""

    version: int
    table: str


@dataclass(frozen=True)
class _ProbesFile:
    """A ProbeTable in JSON."""

    version: int
    sensitivities: list[Sensitivity]


@dataclass
class RankTable:
    """The measured points of a run in one context.

    base: of the uncompressed model, by split. left_out: why a ratio was not measured, by split and name.
    """

    run: Run
    context: Context
    points: list[Point] = field(default_factory=list)
    base: dict[str, BaseValues] = field(default_factory=dict)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def open(cls, run: Run, context: Context) -> RankTable:
        """The table of this context, or a new one with what others have of the same search split; raises as `named`."""
        if known_table := cls.named(run, context.key):
            return known_table
        table = cls(run, context)
        for path in sorted((run.folder / TABLES).glob("*.json")):
            other = None if path.stem == LATEST else cls.named(run, path.stem)
            if other is not None and context.searches_alike(other.context):
                known = {point.key for point in table.points}
                searched = (replace(point, report=None) for point in other.points if point.search)
                table.points += [point for point in searched if point.key not in known]
                table.base |= {"search": other.base["search"]} if "search" in other.base else {}
                table.left_out |= {"search": other.left_out["search"]} if "search" in other.left_out else {}
        return table

    @classmethod
    def latest(cls, run: Run) -> RankTable | None:
        """The table that was measured into last; None if there is none."""
        newest, _ = _read(run, TABLES, LATEST, _Latest)
        return None if newest is None else cls.named(run, newest.table)

    @classmethod
    def named(cls, run: Run, key: str) -> RankTable | None:
        """The table of a context's key; None if it is not there, or of another version.

        Raises:
            CheckpointError: damaged, or of another run.
        """
        content, reader = _read(run, TABLES, key, _TableFile)
        if content is None:
            return None
        for index, point in enumerate(content.points):
            _check_point(point, f"points[{index}]", run, reader)
        return cls(run, content.context, content.points, content.base, content.left_out)

    def save(self) -> None:
        """Write the table, and name it as the latest."""
        self.points.sort(key=lambda p: (p.stored, p.key))
        content = _TableFile(TABLE_VERSION, self.context, self.base, self.left_out, self.points)
        _write(self.run, TABLES, self.context.key, content)
        _write(self.run, TABLES, LATEST, _Latest(TABLE_VERSION, self.context.key))

    def find(self, plan: Plan) -> Point | None:
        """The point of a plan that was measured before; None without one."""
        key = plan.key
        return next((point for point in self.points if point.key == key), None)

    def put(self, point: Point) -> None:
        """Add a point, or replace that of the same plan, and save."""
        self.points = [known for known in self.points if known.key != point.key] + [point]
        self.save()


def _check_point(point: Point, name: str, run: Run, reader: Reader) -> None:
    """Raises the reader's error if a point is not of this run: its layers, groups and columns."""
    sizes = run.columns
    if len(point.ranks) != len(sizes):
        raise reader.fail(f"{name}.ranks", point.ranks, f"those of {len(sizes)} layers")
    for index, (layer, (groups, columns)) in enumerate(zip(point.ranks, sizes, strict=True)):
        if len(layer) != groups or not all(1 <= rank <= columns for pair in layer for rank in pair):
            raise reader.fail(f"{name}.ranks[{index}]", layer, f"{groups} groups of at most {columns}")
    channels = [[(rows[0].rank, rows[-1].rank) for rows in layer if rows] for layer in point.channels or ()]
    if point.channels and channels != point.ranks:
        raise reader.fail(f"{name}.channels", point.channels_json, "as many as ranks says")


@dataclass
class ProbeTable:
    """The sensitivities of a run's first layers in one context of probes."""

    run: Run
    key: str
    rows: Tensor
    sensitivities: list[Sensitivity]

    @classmethod
    def open(cls, run: Run, ranks: Ranks, rows: Tensor, devices: DevicePlan) -> ProbeTable:
        """The probes of these rows and settings, or none.

        Args:
            rows: [n, seq_len], the tokens of the search split that probes run on.
        Raises:
            CheckpointError: damaged, or of another run.
        """
        tokens = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
        where = str(devices.dtype), devices.device.type
        key = _hash([tokens, list(rows.shape), *where, ranks.multiple_of, list(ranks.probe_shares)])
        content, reader = _read(run, PROBES, key, _ProbesFile)
        known = [] if content is None else content.sensitivities
        if len(known) > run.shape.num_layers:
            raise reader.fail("sensitivities", f"{len(known)} layers", f"at most {run.shape.num_layers}")
        return cls(run, key, rows, known)

    @property
    def complete(self) -> bool:
        return len(self.sensitivities) == self.run.shape.num_layers

    def save(self) -> None:
        _write(self.run, PROBES, self.key, _ProbesFile(TABLE_VERSION, self.sensitivities))


def _path(run: Run, kind: str, key: str) -> Path:
    return run.folder / kind / f"{Path(key).name}.json"


def _hash(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _read(run: Run, kind: str, key: str, content: type[T]) -> tuple[T | None, Reader]:
    """The content of a file, None if it is missing or of another version; and the reader that names it in errors."""
    path = _path(run, kind, key)
    data = read_json(path, HINT) if path.is_file() else {}
    reader = Reader(str(path), CheckpointError, HINT)
    return (reader.read(content, data) if data.get("version") == TABLE_VERSION else None), reader


def _write(run: Run, kind: str, key: str, content: _TableFile | _ProbesFile | _Latest) -> None:
    path = _path(run, kind, key)
    path.parent.mkdir(exist_ok=True)
    write_json(path, plain(content))
