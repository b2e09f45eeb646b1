"""What the JSON files of runs and checkpoints hold, as types that are checked when a file is read.

Keys that are not listed are allowed and left alone; those of a class with `total=False` may be absent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from .errors import CheckpointError
from .json_files import read_json
from .layout import AttentionShape, Domain, LayoutDict
from .typed import Reader

Ranks = list[list[tuple[int, int]]]
"""(qk_rank, v_rank) of every group of every layer."""


SideSensitivity = list[tuple[int, float]]
"""Probed ranks of one side, and the KL per unit of dropped energy there."""


class SourceFiles(TypedDict, total=False):
    """SHA-256 of a source's files beside its shards; not in what an earlier rotor wrote."""

    files: dict[str, str]


class ModelInfo(SourceFiles):
    """The source model of a run."""

    path: str
    name: str
    shards: dict[str, str]


class CandidateInfo(TypedDict):
    """What one candidate of a run is."""

    domain: Domain
    group_size: int


class StageInfo(TypedDict):
    """What one stage of a command took."""

    seconds: float
    peak_bytes: float


class _RunInfo(TypedDict):
    model: ModelInfo
    candidates: dict[str, CandidateInfo]
    folded_keys: dict[str, bool]
    element_bytes: int
    shape: dict[str, int | None]


class RunInfo(_RunInfo, total=False):
    """run.json."""

    tokens: dict[str, Any]
    versions: dict[str, Any]
    stages: dict[str, StageInfo]


class CompressionInfo(TypedDict):
    """Share of the KV cache removed by unrounded and by stored ranks."""

    planned: float
    stored: float


class PointRanks(TypedDict):
    """Ranks of a point as the method gave them, and as they are stored."""

    exact: Ranks
    stored: Ranks


class Measurements(TypedDict):
    """What was measured of a point on one split; the field of the metric is among further keys."""

    token_accuracy: float
    ppl_ratio: float


class ReportMeasurements(Measurements):
    """The same on the report split."""

    interval: tuple[float, float] | None


class PointInfo(TypedDict):
    """One measured point of a rank table."""

    parameter: float
    saving: float
    compression: CompressionInfo
    choice: list[str]
    ranks: PointRanks
    search: Measurements
    report: ReportMeasurements


class BaseScores(TypedDict):
    """The uncompressed model on one split."""

    token_accuracy: float
    perplexity: float
    tokens: int


class BaseInfo(TypedDict):
    """The uncompressed model, and the data that it was measured on."""

    search: BaseScores
    report: BaseScores
    data: str
    data_sha256: str


class MetricInfo(TypedDict):
    """The evaluation settings of a rank table; the rest of them are compared as a whole."""

    metric: str


class SearchInfo(TypedDict):
    """The search settings of a rank table, likewise."""

    targets: list[float]


class RankTableInfo(TypedDict):
    """rank_table.json."""

    fingerprint: str
    evaluation: MetricInfo
    search: SearchInfo
    complete: bool
    base: BaseInfo | None
    sensitivities: list[dict[str, tuple[SideSensitivity, SideSensitivity]]] | None
    points: list[PointInfo]


class SourceInfo(SourceFiles):
    """The source model of a checkpoint."""

    name: str
    shards: dict[str, str]
    path: str


class SizeInfo(TypedDict):
    """Bytes of cache per token."""

    before: int
    after: int
    element_bytes: int


class AccuracyInfo(TypedDict):
    """What was measured of a checkpoint."""

    target: float | None
    metric: str
    search: float
    report: float
    interval_95: tuple[float, float] | None
    data_sha256: str | None


class TensorInfo(TypedDict):
    """One tensor of a checkpoint."""

    file: str
    shape: list[int]
    dtype: str
    sha256: str


class ElasticInfo(TypedDict):
    """The rank profiles of an elastic checkpoint, and the layouts of what is stored."""

    profiles: dict[str, Ranks]
    stored_layouts: list[LayoutDict]


class _CheckpointInfo(TypedDict):
    recipe: str
    source: SourceInfo
    run: str
    compression: CompressionInfo
    kv_bytes_per_token: SizeInfo
    accuracy: AccuracyInfo
    ranks: PointRanks
    layouts: list[LayoutDict]
    tensors: dict[str, TensorInfo]


class CheckpointInfo(_CheckpointInfo, total=False):
    """rotor.json."""

    elastic: ElasticInfo


def read_file(path: Path, kind: Any, hint: str) -> Any:
    """Read a JSON file as one of the types above.

    Raises:
        CheckpointError: missing, not JSON, or not of that type; names the field.
    """
    return Reader(str(path), CheckpointError, hint).read(kind, read_json(path, hint))


def check_run(info: RunInfo, reader: Reader) -> AttentionShape:
    """What the types of run.json do not express; returns its shape."""
    shape: AttentionShape = reader.read(AttentionShape, info["shape"], "shape")
    if not info["candidates"]:
        raise reader.fail("candidates", {}, "at least one domain and group size")
    for key, candidate in info["candidates"].items():
        size = candidate["group_size"]
        if size < 1 or shape.num_kv_heads % size:
            raise reader.fail(f"candidates.{key}.group_size", size, f"a divisor of {shape.num_kv_heads} KV heads")
        if key not in info["folded_keys"]:
            raise reader.fail("folded_keys", list(info["folded_keys"]), f"an entry for {key}")
    if not 1 <= info["element_bytes"] <= 8:
        raise reader.fail("element_bytes", info["element_bytes"], "1 to 8")
    return shape


def check_rank_table(table: RankTableInfo, info: RunInfo, shape: AttentionShape, field: str, reader: Reader) -> None:
    """What the types of rank_table.json do not express: that its points are of this run's groups.

    Args:
        field: where a point's measurements keep the accuracy.
    """
    candidates = info["candidates"]
    for index, layer in enumerate(table["sensitivities"] or []):
        if set(layer) != set(candidates):
            raise reader.fail(f"sensitivities[{index}]", list(layer), f"one for each of {', '.join(candidates)}")
    if len(table["sensitivities"] or []) > shape.num_layers:
        raise reader.fail("sensitivities", len(table["sensitivities"] or []), f"at most {shape.num_layers} layers")
    for index, point in enumerate(table["points"]):
        name = f"points[{index}]"
        if len(point["choice"]) != shape.num_layers or not set(point["choice"]) <= set(candidates):
            raise reader.fail(f"{name}.choice", point["choice"], f"one of {', '.join(candidates)} for every layer")
        for split in ("search", "report"):
            reader.read(float, point[split].get(field), f"{name}.{split}.{field}")  # type: ignore[literal-required]
        _check_ranks(point["ranks"]["stored"], f"{name}.ranks.stored", point["choice"], info, shape, reader)


def _check_ranks(
    ranks: Ranks, name: str, choice: list[str], info: RunInfo, shape: AttentionShape, reader: Reader
) -> None:
    if len(ranks) != shape.num_layers:
        raise reader.fail(name, len(ranks), f"{shape.num_layers} layers")
    for layer, (groups, key) in enumerate(zip(ranks, choice, strict=True)):
        size = info["candidates"][key]["group_size"]
        columns = size * shape.head_dim
        if len(groups) != shape.num_kv_heads // size:
            raise reader.fail(f"{name}[{layer}]", len(groups), f"{shape.num_kv_heads // size} groups")
        for pair in groups:
            if not all(1 <= rank <= columns for rank in pair):
                raise reader.fail(f"{name}[{layer}]", pair, f"ranks from 1 to {columns}")
