"""The run folder: what calibration found, and what searches measured.

RUN/  recipe.yaml  run.json  statistics/layer-0000.safetensors ...  bases.safetensors  rank_table.json  log.txt
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .bases import BasisPair, LayerBases
from .checkpoint import read_json, write_json
from .errors import CheckpointError, NumericsError, UsageError
from .formats import RankTableInfo, RunInfo, check_rank_table, check_run, read_file
from .layout import AttentionShape, Domain
from .recipe import Recipe, accuracy_field, load_recipe
from .statistics import LayerStatistics
from .typed import Reader

RECIPE, INFO, BASES, RANK_TABLE, LOG = "recipe.yaml", "run.json", "bases.safetensors", "rank_table.json", "log.txt"
TABLE_VERSION = 1
CALIBRATE_AGAIN = "Run `rotor calibrate` again."


def statistics_path(folder: Path, layer: int) -> Path:
    return folder / "statistics" / f"layer-{layer:04d}.safetensors"


def write_statistics(
    folder: Path, layer: int, statistics: LayerStatistics, fisher: tuple[Tensor, Tensor] | None = None
) -> None:
    """One layer's moments and, where the recipe needs it, its Fisher information of keys and values."""
    path = statistics_path(folder, layer)
    path.parent.mkdir(exist_ok=True)
    metadata = {"tokens": str(statistics.tokens), "group_size": str(statistics.group_size)}
    if fisher is not None:
        _check_fisher(fisher, f"layer {layer}")
    extra = {} if fisher is None else {"fisher_key": fisher[0], "fisher_value": fisher[1]}
    save_file(dict(sorted({**statistics.sums, **extra}.items())), path, metadata=metadata)


def read_statistics(folder: Path, layer: int, shape: AttentionShape) -> LayerStatistics:
    """Raises CheckpointError if the layer's file is missing or damaged."""
    path = statistics_path(folder, layer)
    tensors, metadata = _load(path)
    try:
        tokens, group_size = int(metadata["tokens"][:20]), int(metadata["group_size"][:20])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable ({error!r}).", CALIBRATE_AGAIN) from error
    sums = {name: tensor for name, tensor in tensors.items() if not name.startswith("fisher_")}
    statistics = LayerStatistics(shape, group_size, sums, tokens)
    statistics.check_shapes(str(path))
    statistics.check_finite(f"{path}: layer {layer}", CALIBRATE_AGAIN)
    return statistics


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a safetensors file of the run, and its metadata."""
    try:
        with safe_open(path, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}, handle.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: not readable ({error}).", CALIBRATE_AGAIN) from error


def read_fisher(folder: Path, layer: int) -> tuple[Tensor, Tensor]:
    """Fisher information of keys and of values, each [num_kv_heads]; raises UsageError if the run has none."""
    path = statistics_path(folder, layer)
    tensors, _ = _load(path)
    if "fisher_key" not in tensors or "fisher_value" not in tensors:
        raise UsageError(
            f"{folder}: this run has no Fisher information.", "Calibrate again with --set ranks.method=fisher."
        )
    found = tensors["fisher_key"], tensors["fisher_value"]
    _check_fisher(found, f"{path}: layer {layer}")
    return found


def _check_fisher(found: tuple[Tensor, Tensor], where: str) -> None:
    for side, values in zip(("keys", "values"), found, strict=True):
        if not torch.isfinite(values).all():
            raise NumericsError(f"{where}: Fisher information of {side} is not finite.", CALIBRATE_AGAIN)


def write_bases(folder: Path, bases: list[dict[str, LayerBases]]) -> None:
    """All columns of the bases of every layer's candidates, float64, with their singular values."""
    tensors: dict[str, Tensor] = {}
    for index, key, candidate in ((i, k, c) for i, layer in enumerate(bases) for k, c in layer.items()):
        for side, pair in (("qk", candidate.qk), ("vo", candidate.vo)):
            prefix = f"layers.{index}.{key}.{side}."
            tensors[prefix + "encode"] = pair.encode.contiguous()
            if not pair.is_orthonormal:
                tensors[prefix + "decode"] = pair.decode.contiguous()
            tensors[prefix + "singular_values"] = pair.singular_values.contiguous()
    save_file(tensors, folder / BASES)


@dataclass(frozen=True)
class Run:
    """An opened run folder."""

    folder: Path
    recipe: Recipe
    info: dict[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Raises CheckpointError if the folder is not a finished run."""
        path = Path(folder)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such folder.", "Give a folder that `rotor calibrate` wrote.")
        info: Any = read_file(path / INFO, RunInfo, "Give a folder that `rotor calibrate` wrote.")
        check_run(info, Reader(str(path / INFO), CheckpointError, CALIBRATE_AGAIN))
        return cls(path, load_recipe(str(path / RECIPE)), info)

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(**self.info["shape"])

    @property
    def model_folder(self) -> Path:
        return Path(self.info["model"]["path"])

    def bases(self) -> list[dict[str, LayerBases]]:
        """The bases of each layer's candidates (a domain and a group size) by key.

        Raises:
            CheckpointError: the file is damaged or does not fit run.json.
        """
        path = self.folder / BASES
        tensors, _ = _load(path)
        try:
            return [
                {key: self._candidate(tensors, i, key) for key in self.info["candidates"]}
                for i in range(self.shape.num_layers)
            ]
        except KeyError as error:
            raise CheckpointError(f"{path}: tensor {error} is missing.", CALIBRATE_AGAIN) from error

    def _candidate(self, tensors: dict[str, Tensor], index: int, key: str) -> LayerBases:
        domain: Domain = self.info["candidates"][key]["domain"]
        group_size = int(self.info["candidates"][key]["group_size"])
        pairs = {}
        for side in ("qk", "vo"):
            prefix = f"layers.{index}.{key}.{side}."
            encode = tensors[prefix + "encode"]
            decode = tensors.get(prefix + "decode", encode)
            pairs[side] = BasisPair(encode, decode, tensors[prefix + "singular_values"])
        outputs = None
        if self.recipe.bases.refit:
            outputs = read_statistics(self.folder, index, self.shape).moment("output", group_size)
        bases = LayerBases(domain, group_size, pairs["qk"], pairs["vo"], outputs)
        bases.check(self.shape, f"{self.folder / BASES}: layer {index}, {key}")
        return bases

    def read_rank_table(self) -> dict[str, Any] | None:
        """rank_table.json; None if there is none, or one of another version.

        Raises:
            CheckpointError: damaged, or of another run.
        """
        path, hint = self.folder / RANK_TABLE, "Delete it, and the next export measures again."
        if not path.is_file() or read_json(path, hint).get("version") != TABLE_VERSION:
            return None
        table: Any = read_file(path, RankTableInfo, hint)
        field = accuracy_field(table["evaluation"]["metric"])
        info: Any = self.info
        check_rank_table(table, info, self.shape, field, Reader(str(path), CheckpointError, hint))
        return table

    def write_rank_table(self, table: dict[str, Any]) -> None:
        """Written to a temporary name first, so that an interrupted write keeps the old table."""
        temporary = self.folder / f"{RANK_TABLE}.tmp"
        write_json(temporary, table)
        temporary.replace(self.folder / RANK_TABLE)
