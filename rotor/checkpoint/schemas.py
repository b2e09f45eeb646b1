"""Types of the JSON files of runs and checkpoints, checked when a file is read.

Further keys are allowed and kept. Adding a field is one entry here, beside what writes and reads it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from ..checked import Expect, JsonObject, Reader
from ..errors import CheckpointError
from .files import read_json
from .layout import AttentionShape, RopeBlock

FORMAT_VERSION = 5
"""Version of what runs and checkpoints store; other versions are refused."""

MADE_ANEW = "Make it anew: `rotor calibrate MODEL -o RUN`, then `rotor export RUN -o OUT --accuracy 0.99`."

Ranks = list[list[Annotated[list[int], Field(min_length=2, max_length=2)]]]
"""(key rank, value rank) of every group of every layer."""

ElementBytes = Annotated[int, Field(ge=1, le=8)]


def _is_shard_name(name: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*\.safetensors", name, re.ASCII) is not None


ShardName = Annotated[str, Expect(_is_shard_name, "a plain file name, *.safetensors")]


class ModelInfo(TypedDict):
    """A source model; shards, files: SHA-256 of its shards, and of its other files.

    state_bytes: see rotor.models.outline. base_model: its id on the hub, as the export was told. card: what its card
    says of licence and language.
    """

    path: str
    name: str
    shards: dict[str, str]
    files: dict[str, str]
    state_bytes: int
    hub_id: str | None
    revision: str | None
    base_model: NotRequired[str]
    card: NotRequired[dict[str, str | list[str]]]


class SourceInfo(TypedDict):
    """Where a checkpoint without weights gets them: a folder, relative to its own, or a commit on the hub.

    shards: SHA-256 by name. sizes: bytes by name.
    """

    name: str
    path: str
    hub_id: str | None
    revision: str | None
    shards: dict[ShardName, str]
    sizes: dict[ShardName, int]


class KeyFormInfo(TypedDict):
    """Form in which a layer's keys are stored; see rotor.checkpoint.layout.KeyForm."""

    rope_block: RopeBlock | None


class FormInfo(TypedDict):
    """Form that a run's layers are compressed to; see rotor.checkpoint.layout.ModelForm."""

    keys: list[KeyFormInfo]
    group_size: int
    joint: bool


class StageInfo(TypedDict):
    """Time and memory that one stage of a command took."""

    seconds: float
    peak_bytes: int


class RunInfo(TypedDict):
    """run.json."""

    model: ModelInfo
    form: FormInfo
    format_version: int
    element_bytes: ElementBytes
    shape: dict[str, int | bool | list[int | None] | list[list[int]]]
    tokens: JsonObject
    device: str
    dtype: str
    versions: JsonObject
    stages: dict[str, StageInfo]
    fisher_top_share: NotRequired[list[float]]


class CompressionInfo(TypedDict):
    """Share of the KV cache removed: planned by unrounded ranks; stored by stored ranks, and by the cache policy where
    one is stored."""

    planned: float
    stored: float


class PlanRanks(TypedDict):
    """Ranks of a plan as the method gave them and as they are stored; channels by bits where they are coded."""

    exact: Ranks
    stored: Ranks
    channels: NotRequired[list[list[list[dict[str, int]]]]]


class SizeInfo(TypedDict):
    """Bytes of cache per token."""

    before: int
    after: int
    element_bytes: ElementBytes


class SequenceInfo(TypedDict):
    """Bytes of the cache of a sequence of so many tokens, of which a layer with a window holds no more than that.

    smaller_from: tokens from which on a cache is smaller than the uncompressed one; None where none is.
    """

    tokens: Annotated[int, Field(ge=1)]
    before: int
    after: int
    smaller_from: int | None


class AccuracyInfo(TypedDict):
    """Accuracy as measured of a checkpoint.

    base: of the uncompressed model, by split. left_out: ratios that were not measured, by split and name.
    excluded_documents: digests of held-out text that was calibrated on. documents: of each split how many there are, by
    the names of their files. table: key in the run. not_measured: why `search`, `report` and `table` are null.
    """

    target: float | None
    metric: str
    search: float | None
    report: float | None
    interval_95: tuple[float, float] | None
    data: str | None
    data_sha256: str | None
    measurements: JsonObject
    base: dict[str, JsonObject | None]
    left_out: dict[str, dict[str, str]]
    excluded_documents: list[str]
    documents: dict[str, dict[str, int]]
    table: str | None
    not_measured: NotRequired[str]


class TensorInfo(TypedDict):
    """One tensor of a checkpoint."""

    file: str
    shape: list[int]
    dtype: str
    sha256: str


class CacheInfo(TypedDict):
    """The cache policy, and bytes a token with everything counted, by the number of tokens of a prompt."""

    policy: JsonObject
    kv_bytes_per_token: dict[str, float]


class TextInfo(TypedDict):
    """Texts that the uncompressed and the compressed model write to a prompt."""

    prompt: str
    prompt_tokens: int
    before: str
    after: str


class CheckpointInfo(TypedDict):
    """rotor.json; layouts: see rotor.checkpoint.layout.LayerLayout."""

    recipe: str
    source: ModelInfo
    run: str
    compression: CompressionInfo
    kv_bytes_per_token: SizeInfo
    kv_bytes_of_sequence: SequenceInfo
    accuracy: AccuracyInfo
    ranks: PlanRanks
    format_version: int
    versions: JsonObject
    rank_method: str
    parameter: float
    removed_tensors: list[str]
    layouts: list[JsonObject]
    tensors: dict[str, TensorInfo]
    cache: NotRequired[CacheInfo]
    texts: NotRequired[list[TextInfo]]


Info = TypeVar("Info")


def check_version(path: Path, content: object) -> None:
    """Raises CheckpointError where run.json or rotor.json is of another version, whose files may have other fields."""
    if isinstance(content, dict) and content.get("format_version") != FORMAT_VERSION:
        stored = content.get("format_version", "that of an earlier rotor")
        raise CheckpointError(f"{path}: format_version is {stored}, this rotor reads {FORMAT_VERSION}.", MADE_ANEW)


def read_file(path: Path, kind: type[Info], hint: str) -> Info:
    """Read a JSON file as one of the types above.

    Raises:
        CheckpointError: missing, not JSON, of another format_version, or not of that type; names the field.
    """
    content = read_json(path, hint)
    check_version(path, content)
    info: Info = Reader(str(path), CheckpointError, hint).read(kind, content)
    return info


def check_run(info: RunInfo, reader: Reader) -> AttentionShape:
    """Check what the types of run.json cannot express; returns the model's shape."""
    shape: AttentionShape = reader.read(AttentionShape, info["shape"], "shape")
    form = info["form"]
    size = form["group_size"]
    if size < 1 or shape.shared_kv_heads % size:
        raise reader.fail("form.group_size", size, f"a divisor of {shape.shared_kv_heads} KV heads")
    if len(form["keys"]) != shape.num_layers:
        raise reader.fail("form.keys", len(form["keys"]), f"one for each of {shape.num_layers} layers")
    for layer, keys in enumerate(form["keys"]):
        block = keys["rope_block"]
        if block is not None and not shape.layer(layer).rotary_dim:
            raise reader.fail(f"form.keys[{layer}].rope_block", block, "null in a layer without RoPE")
    return shape
