"""What was measured of a run, one file for each context: points by ranks, and probes apart from them.

RUN/tables/KEY.json: points. RUN/probes/KEY.json: sensitivities. RUN/tables/latest.json: which table was used last.
Each has the SHA-256 of its content in it, so that one that was edited or damaged is refused.

A context is all that a measured number depends on besides the ranks: the evaluation's tokens, dtype, kind of device,
metric and the settings of it. Its hash names the file, so that another metric, objective or text adds a table and never
wipes or reuses one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..allocation.plan import RankPlan, Sensitivity
from ..calibration.run import Run
from ..data.splits import EvaluationData
from ..errors import CheckpointError
from ..format.json_files import read_json
from ..format.layout import LayerRanks
from ..format.manifest import read_checked_json, write_checked_json
from ..policies import Policy
from ..recipe import Evaluation, Ranks
from ..recipe.metric_registry import LM_EVAL
from ..typed import Reader
from .point import Point, plan_key

TABLES, PROBES, LATEST = "tables", "probes", "latest.json"
TABLE_VERSION = 5
HINT = "Delete it, and the next export measures again."


@dataclass(frozen=True)
class Context:
    """What measured numbers depend on besides the ranks.

    metric: name. settings: of the prompts that metrics draw. data, data_sha256: the held-out text, and its tokens.
    excluded: digests of documents that were left out of it, as they were calibrated on.
    """

    metric: str
    settings: dict[str, Any]
    data: str
    data_sha256: str
    dtype: str
    device_type: str
    excluded: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        spec: Evaluation,
        data: EvaluationData,
        dtype: torch.dtype,
        device: torch.device,
        policy: Policy | None = None,
    ) -> Context:
        """policy: that the cache was kept by, if any."""
        names = ["seed", "lookup_prompts", "lookup_keys", "copy_prompts", "copy_tokens", "filler_tokens"]
        names += ["lm_eval_limit"] if spec.metric.startswith(LM_EVAL) else []
        settings = {name: getattr(spec, name) for name in names}
        settings |= {} if policy is None else {"cache": policy.as_dict()}
        kind = str(dtype).removeprefix("torch.")
        return cls(spec.metric, settings, data.description, data.sha256, kind, device.type, data.excluded)

    @property
    def key(self) -> str:
        return _hash([self.metric, self.settings, self.data_sha256, self.dtype, self.device_type])


@dataclass(frozen=True)
class Request:
    """A target that was asked for, and what it led to.

    confidence: None, or that of the interval whose lower end had to reach the target. method: what else the choice
    depended on (ranks, objective, resolution), hashed. point: key of the chosen one; None: out of reach.
    """

    target: float
    confidence: float | None
    method: str
    point: str | None


class _TableInfo(TypedDict):
    context: dict[str, Any]
    base: dict[str, dict[str, Any]]
    left_out: dict[str, dict[str, str]]
    requests: list[dict[str, Any]]
    points: list[dict[str, Any]]


class _ContextInfo(TypedDict):
    metric: str
    settings: dict[str, Any]
    data: str
    data_sha256: str
    dtype: str
    device_type: str
    excluded: list[str]


class _RequestInfo(TypedDict):
    target: float
    confidence: float | None
    method: str
    point: str | None


class _ProbesInfo(TypedDict):
    sensitivities: list[dict[str, tuple[list[tuple[int, float]], list[tuple[int, float]]]]]


@dataclass
class RankTable:
    """The measured points of a run in one context.

    base: of the uncompressed model, by split. left_out: why a ratio was not measured, by split and name.
    """

    run: Run
    context: Context
    points: list[Point] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    base: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def open(cls, run: Run, context: Context) -> RankTable:
        """The table of this context, or an empty one; raises CheckpointError if it is damaged."""
        path = _table_path(run, context.key)
        return cls.read(run, path) or cls(run, context)

    @classmethod
    def latest(cls, run: Run) -> RankTable | None:
        """The table that was used last; None if there is none."""
        path = run.folder / TABLES / LATEST
        if not path.is_file():
            return None
        data = read_checked_json(path, HINT)
        name = Reader(str(path), CheckpointError, HINT).read(dict[str, str], data).get("table", "")
        return cls.read(run, _table_path(run, Path(name).name))

    @property
    def is_latest(self) -> bool:
        """Whether it is the one that was used last."""
        path = self.run.folder / TABLES / LATEST
        return path.is_file() and read_json(path, HINT).get("table") == self.context.key

    @classmethod
    def named(cls, run: Run, key: str) -> RankTable | None:
        """The table of a context's key; None if there is none."""
        return cls.read(run, _table_path(run, Path(key).name))

    @classmethod
    def read(cls, run: Run, path: Path) -> RankTable | None:
        """A table's file; None if it is not there, or of another version.

        Raises:
            CheckpointError: damaged, or of another run.
        """
        data = _read(path)
        if data is None:
            return None
        reader = Reader(str(path), CheckpointError, HINT)
        info: Any = reader.read(_TableInfo, data)
        stored: Any = reader.read(_ContextInfo, info["context"], "context")
        context = Context(
            **{name: stored[name] for name in _ContextInfo.__annotations__} | {"excluded": tuple(stored["excluded"])}
        )
        points = [Point.from_json(p, f"points[{i}]", reader) for i, p in enumerate(info["points"])]
        for index, point in enumerate(points):
            _check_choice(point.choice, f"points[{index}].choice", run, reader)
            _check_ranks(point.ranks, f"points[{index}].ranks.stored", point.choice, run, reader)
        requests = [
            Request(**{name: found[name] for name in _RequestInfo.__annotations__})
            for found in (reader.read(_RequestInfo, r, f"requests[{i}]") for i, r in enumerate(info["requests"]))
        ]
        return cls(run, context, points, requests, info["base"], info["left_out"])

    def save(self) -> None:
        """Write the table, and that it is the last one used."""
        self.points.sort(key=lambda p: (p.stored, p.key))
        data = {
            "version": TABLE_VERSION,
            "context": asdict(self.context),
            "base": self.base,
            "left_out": self.left_out,
            "requests": [asdict(request) for request in self.requests],
            "points": [point.to_json() for point in self.points],
        }
        path = _table_path(self.run, self.context.key)
        _write(path, data)
        _write(path.with_name(LATEST), {"table": self.context.key})

    def find(self, plan: RankPlan) -> Point | None:
        """What is known of a plan."""
        return self.point(plan_key(plan.choice, plan.rounded, plan.channels))

    def point(self, key: str | None) -> Point | None:
        """By Point.key."""
        return next((point for point in self.points if point.key == key), None)

    def put(self, point: Point) -> None:
        """Add a point, in place of what was known of its plan, and save."""
        self.points = [known for known in self.points if known.key != point.key] + [point]
        self.save()

    def note(self, request: Request) -> None:
        """Keep what a request led to, and save; a run that cannot be written stays as it is."""
        if (request in self.requests and self.is_latest) or not self.run.writable:
            return
        same = request.target, request.confidence, request.method
        self.requests = [r for r in self.requests if (r.target, r.confidence, r.method) != same] + [request]
        self.save()


@dataclass
class ProbeTable:
    """The sensitivities of a run's first layers in one context of probes."""

    run: Run
    key: str
    sensitivities: list[Sensitivity]

    @classmethod
    def open(cls, run: Run, ranks: Ranks, rows: Tensor, dtype: torch.dtype, device: torch.device) -> ProbeTable:
        """The probes of these rows and settings, or none.

        Args:
            rows: [n, seq_len], the tokens that probes run on.
        Raises:
            CheckpointError: damaged, or of another run.
        """
        tokens = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
        key = _hash([tokens, list(rows.shape), str(dtype), device.type, ranks.multiple_of, list(ranks.probe_shares)])
        return cls(run, key, read_probes(run, key) or [])

    @property
    def complete(self) -> bool:
        return len(self.sensitivities) == self.run.shape.num_layers

    def save(self) -> None:
        _write(self.run.folder / PROBES / f"{self.key}.json", probes_json(self.sensitivities))


def probes_json(sensitivities: list[Sensitivity]) -> dict[str, Any]:
    """What read_probes reads."""
    return {"version": TABLE_VERSION, "sensitivities": sensitivities}


def read_probes(run: Run, key: str) -> list[Sensitivity] | None:
    """Sensitivities by their context's key; None if there are none.

    Raises:
        CheckpointError: damaged, or of another run.
    """
    path = run.folder / PROBES / f"{Path(key).name}.json"
    data = _read(path)
    if data is None:
        return None
    reader = Reader(str(path), CheckpointError, HINT)
    found: list[Sensitivity] = reader.read(_ProbesInfo, data)["sensitivities"]
    _check_sensitivities(found, run, reader)
    return found


def any_probes(run: Run) -> list[Sensitivity] | None:
    """Complete sensitivities of a run, for a report: of the first file that has them."""
    for path in sorted((run.folder / PROBES).glob("*.json")):
        found = read_probes(run, path.stem)
        if found is not None and len(found) == run.shape.num_layers:
            return found
    return None


# What the types do not express: that a file is of this run.


def _check_sensitivities(found: Sequence[Mapping[str, Any]], run: Run, reader: Reader) -> None:
    """What the types of a probes file do not express: that it is of this run's layers and candidates."""
    candidates = run.info["candidates"]
    for index, layer in enumerate(found):
        if set(layer) != set(candidates):
            raise reader.fail(f"sensitivities[{index}]", list(layer), f"one for each of {', '.join(candidates)}")
    if len(found) > run.shape.num_layers:
        raise reader.fail("sensitivities", len(found), f"at most {run.shape.num_layers} layers")


def _check_choice(choice: Sequence[str], name: str, run: Run, reader: Reader) -> None:
    """One of the run's candidates for every layer."""
    candidates = run.info["candidates"]
    if len(choice) != run.shape.num_layers or not set(choice) <= set(candidates):
        raise reader.fail(name, list(choice), f"one of {', '.join(candidates)} for every layer")


def _check_ranks(ranks: list[LayerRanks], name: str, choice: Sequence[str], run: Run, reader: Reader) -> None:
    """Ranks of the groups that the choice has."""
    shape, candidates = run.shape, run.candidates
    if len(ranks) != shape.num_layers:
        raise reader.fail(name, len(ranks), f"{shape.num_layers} layers")
    for layer, (groups, key) in enumerate(zip(ranks, choice, strict=True)):
        count, columns = run.columns(candidates[key])
        if len(groups) != count:
            raise reader.fail(f"{name}[{layer}]", len(groups), f"{count} groups")
        for pair in groups:
            if not all(1 <= rank <= columns for rank in pair):
                raise reader.fail(f"{name}[{layer}]", pair, f"ranks from 1 to {columns}")


def _table_path(run: Run, key: str) -> Path:
    return run.folder / TABLES / f"{key}.json"


def _hash(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any] | None:
    """What `_write` wrote; None if it is not there, or of another version; raises CheckpointError if it was edited."""
    if not path.is_file() or read_json(path, HINT).get("version") != TABLE_VERSION:
        return None
    return read_checked_json(path, HINT)


def _write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    write_checked_json(path, data)
