"""What the JSON files of runs and checkpoints hold, as types that are checked when a file is read.

Keys that are not listed are allowed and left alone; those of a class with `total=False` may be absent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from ..errors import CheckpointError
from ..typed import Reader
from .json_files import read_json
from .layout import AttentionShape, Domain, LayoutDict

Ranks = list[list[tuple[int, int]]]
"""(qk_rank, v_rank) of every group of every layer."""


class SourceFiles(TypedDict, total=False):
    """SHA-256 of a source's files beside its shards; not in what an earlier rotor wrote."""

    files: dict[str, str]


class ModelInfo(SourceFiles):
    """The source model of a run."""

    path: str
    name: str
    shards: dict[str, str]


class _CandidateInfo(TypedDict):
    domain: Domain
    group_size: int


class CandidateInfo(_CandidateInfo, total=False):
    """What one candidate of a run is; see rotor.format.layout.Candidate. Older runs have the first two alone."""

    joint: bool
    rope_block: int


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


class _PointRanks(TypedDict):
    exact: Ranks
    stored: Ranks


class PointRanks(_PointRanks, total=False):
    """Ranks of a point as the method gave them, and as they are stored; columns by bits where they are codes."""

    columns: list[list[list[dict[str, int]]]]


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


class _AccuracyInfo(TypedDict):
    target: float | None
    metric: str
    search: float | None
    report: float | None
    interval_95: tuple[float, float] | None
    data_sha256: str | None
    measurements: dict[str, Any]


class AccuracyInfo(_AccuracyInfo, total=False):
    """What was measured of a checkpoint.

    confidence: of the interval whose lower end had to reach the target. base: of the uncompressed model, by split.
    left_out: ratios that were not measured, by split and name. excluded_documents: digests of held-out text that was
    calibrated on. table: key in the run.
    not_measured: why `search`, `report` and `table` are null.
    """

    confidence: float | None
    base: dict[str, dict[str, Any] | None]
    left_out: dict[str, dict[str, str]]
    excluded_documents: list[str]
    table: str | None
    not_measured: str


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


class CacheInfo(TypedDict):
    """The policy of the cache, and bytes of a token, everything counted, by the tokens of a prompt."""

    policy: dict[str, Any]
    kv_bytes_per_token: dict[str, float]


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
    cache: CacheInfo


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
        if candidate.get("joint") and candidate["domain"] == "post":
            raise reader.fail(f"candidates.{key}.joint", True, "false, as keys are compressed after RoPE")
        if key not in info["folded_keys"]:
            raise reader.fail("folded_keys", list(info["folded_keys"]), f"an entry for {key}")
    if not 1 <= info["element_bytes"] <= 8:
        raise reader.fail("element_bytes", info["element_bytes"], "1 to 8")
    return shape
