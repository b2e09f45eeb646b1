"""What the JSON files of runs and checkpoints hold, as types that are checked when a file is read.

Keys that are not listed are allowed and left alone; those of a class with `total=False` may be absent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from ..checked import Reader
from ..errors import CheckpointError
from .json_files import read_json
from .layout import AttentionShape, LayoutDict, is_rope_block

Ranks = list[list[tuple[int, int]]]
"""(key rank, value rank) of every group of every layer."""


class SourceFiles(TypedDict, total=False):
    """SHA-256 of a source's files beside its shards; not in what an earlier rotor wrote."""

    files: dict[str, str]


class ModelInfo(SourceFiles):
    """The source model of a run."""

    path: str
    name: str
    shards: dict[str, str]


class CandidateInfo(TypedDict):
    """What one candidate of a run is; see rotor.format.layout.Candidate."""

    rope_block: int | None
    fast_planes: int
    group_size: int
    joint: bool


class StageInfo(TypedDict):
    """What one stage of a command took."""

    seconds: float
    peak_bytes: float


class _RunInfo(TypedDict):
    model: ModelInfo
    candidates: dict[str, CandidateInfo]
    element_bytes: int
    shape: dict[str, int | bool]


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
    """Ranks of a point as the method gave them, and as they are stored; channels by bits where they are codes."""

    channels: list[list[list[dict[str, int]]]]


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
        raise reader.fail("candidates", {}, "at least one")
    for key, candidate in info["candidates"].items():
        size = candidate["group_size"]
        if size < 1 or shape.num_kv_heads % size:
            raise reader.fail(f"candidates.{key}.group_size", size, f"a divisor of {shape.num_kv_heads} KV heads")
        block, planes = candidate["rope_block"], candidate["fast_planes"]
        if block is not None and not (is_rope_block(block) and shape.rotary_dim):
            raise reader.fail(f"candidates.{key}.rope_block", block, "null, or a power of two in a model with RoPE")
        most = 0 if block is None else shape.rotary_planes
        if not 0 <= planes <= most:
            raise reader.fail(f"candidates.{key}.fast_planes", planes, f"a number from 0 to {most}")
    if not 1 <= info["element_bytes"] <= 8:
        raise reader.fail("element_bytes", info["element_bytes"], "1 to 8")
    return shape
