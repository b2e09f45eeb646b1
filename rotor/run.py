"""The run folder: what calibration found, and what searches measured.

RUN/  recipe.yaml  run.json  statistics/layer-0000.safetensors ...  bases/layer-0000.safetensors ...
      fisher.safetensors  rank_table.json  log.txt

Files of a layer are written when it is done and read when it is needed, so that no command holds those of all layers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .bases import BasisPair, LayerBases
from .checkpoint import read_json, sync, write_json
from .errors import CheckpointError, UsageError
from .layout import AttentionShape, Domain
from .recipe import Recipe, load_recipe
from .statistics import LayerStatistics, pack_symmetric, unpack_symmetric

RECIPE, INFO, FISHER, RANK_TABLE, LOG = "recipe.yaml", "run.json", "fisher.safetensors", "rank_table.json", "log.txt"
CALIBRATE_AGAIN = "Run `rotor calibrate` again."


def statistics_path(folder: Path, layer: int) -> Path:
    return folder / "statistics" / f"layer-{layer:04d}.safetensors"


def bases_path(folder: Path, layer: int) -> Path:
    return folder / "bases" / f"layer-{layer:04d}.safetensors"


def write_statistics(folder: Path, layer: int, statistics: LayerStatistics) -> None:
    """One layer's moments, float64; those of the attention outputs as pack_symmetric keeps them."""
    # One key, since safetensors writes several in any order, and equal runs are to have equal files.
    metadata = {"rotor": json.dumps({"tokens": statistics.tokens, "group_size": statistics.group_size})}
    tensors = {n: pack_symmetric(t) if n == "output" else t.contiguous() for n, t in sorted(statistics.sums.items())}
    _write(statistics_path(folder, layer), tensors, metadata)


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """To a temporary name first, and to disk before it gets its own."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata=metadata)
    sync(temporary)
    temporary.replace(path)


def read_statistics(folder: Path, layer: int, shape: AttentionShape) -> LayerStatistics:
    """Raises CheckpointError if the layer's file is missing or damaged."""
    path = statistics_path(folder, layer)
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = json.loads(handle.metadata()["rotor"])
        sums = {n: unpack_symmetric(t) if n == "output" else t for n, t in load_file(path).items()}
        return LayerStatistics(shape, metadata["group_size"], sums, metadata["tokens"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable ({error}).", CALIBRATE_AGAIN) from error


def write_fisher(folder: Path, information: list[tuple[Tensor, Tensor]]) -> None:
    """Fisher information of keys and of values in each layer."""
    tensors = {
        f"layers.{i}.{side}": t for i, pair in enumerate(information) for side, t in zip("kv", pair, strict=True)
    }
    _write(folder / FISHER, tensors)


def read_fisher(folder: Path, layer: int) -> tuple[Tensor, Tensor]:
    """Fisher information of keys and of values, each [num_kv_heads]; raises UsageError if the run has none."""
    if not (folder / FISHER).is_file():
        raise UsageError(
            f"{folder}: this run has no Fisher information.", "Calibrate again with --set ranks.method=fisher."
        )
    tensors = load_file(folder / FISHER)
    return tensors[f"layers.{layer}.k"], tensors[f"layers.{layer}.v"]


def write_bases(folder: Path, layer: int, bases: dict[str, LayerBases]) -> None:
    """All columns of the bases of a layer's candidates, float64, with their singular values."""
    tensors: dict[str, Tensor] = {}
    for key, candidate in bases.items():
        for side, pair in (("qk", candidate.qk), ("vo", candidate.vo)):
            tensors[f"{key}.{side}.encode"] = pair.encode.contiguous()
            if not pair.is_orthonormal:
                tensors[f"{key}.{side}.decode"] = pair.decode.contiguous()
            tensors[f"{key}.{side}.singular_values"] = pair.singular_values.contiguous()
    _write(bases_path(folder, layer), tensors)


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
        info = read_json(path / INFO, "Give a folder that `rotor calibrate` wrote.")
        for key in ("model", "candidates", "shape"):
            if key not in info:
                raise CheckpointError(f"{path / INFO}: {key} is missing.", CALIBRATE_AGAIN)
        return cls(path, load_recipe(str(path / RECIPE)), info)

    @property
    def shape(self) -> AttentionShape:
        try:
            return AttentionShape(**self.info["shape"])
        except TypeError as error:
            raise CheckpointError(f"{self.folder / INFO}: shape: {error}.", CALIBRATE_AGAIN) from error

    @property
    def model_folder(self) -> Path:
        return Path(self.info["model"]["path"])

    def bases(self) -> RunBases:
        """The bases of each layer's candidates (a domain and a group size) by key, read when they are asked for."""
        return RunBases(self)

    def layer_bases(self, layer: int) -> dict[str, LayerBases]:
        """The bases of one layer's candidates, by key.

        Raises:
            CheckpointError: the layer's file is missing, damaged or does not fit run.json.
        """
        path = bases_path(self.folder, layer)
        try:
            tensors = load_file(path)
            outputs = None
            if self.recipe.bases.refit:
                outputs = read_statistics(self.folder, layer, self.shape)
            return {key: self._candidate(tensors, key, outputs) for key in self.info["candidates"]}
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(f"{path}: not readable ({error}).", CALIBRATE_AGAIN) from error

    def _candidate(self, tensors: dict[str, Tensor], key: str, statistics: LayerStatistics | None) -> LayerBases:
        domain: Domain = self.info["candidates"][key]["domain"]
        group_size = int(self.info["candidates"][key]["group_size"])
        pairs = {}
        for side in ("qk", "vo"):
            encode = tensors[f"{key}.{side}.encode"]
            decode = tensors.get(f"{key}.{side}.decode", encode)
            pairs[side] = BasisPair(encode, decode, tensors[f"{key}.{side}.singular_values"])
        outputs = None if statistics is None else statistics.moment("output", group_size)
        return LayerBases(domain, group_size, pairs["qk"], pairs["vo"], outputs)

    def read_rank_table(self) -> dict[str, Any] | None:
        path = self.folder / RANK_TABLE
        return read_json(path, "Delete it, and the next export measures again.") if path.is_file() else None

    def write_rank_table(self, table: dict[str, Any]) -> None:
        """Written to a temporary name first, so that an interrupted write keeps the old table."""
        temporary = self.folder / f"{RANK_TABLE}.tmp"
        write_json(temporary, table)
        temporary.replace(self.folder / RANK_TABLE)


class RunBases(Sequence[dict[str, LayerBases]]):
    """The bases of a run's layers; each is read when it is asked for, and not kept."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __len__(self) -> int:
        return self.run.shape.num_layers

    @overload
    def __getitem__(self, index: int) -> dict[str, LayerBases]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, LayerBases]]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self.run.layer_bases(range(len(self))[index])

    def spectra(self, layer: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Singular values of qk and of vo of one layer's candidates, each [num_groups, columns]; raises likewise."""
        path = bases_path(self.run.folder, layer)
        try:
            with safe_open(path, framework="pt") as handle:
                return {
                    key: (
                        handle.get_tensor(f"{key}.qk.singular_values"),
                        handle.get_tensor(f"{key}.vo.singular_values"),
                    )
                    for key in self.run.info["candidates"]
                }
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not readable ({error}).", CALIBRATE_AGAIN) from error

    def select(self, choice: Sequence[str]) -> ChosenBases:
        """The chosen candidate of each layer."""
        return ChosenBases(self, choice)


class ChosenBases(Sequence[LayerBases]):
    """One candidate of each layer; read when it is asked for, and not kept."""

    def __init__(self, bases: RunBases, choice: Sequence[str]) -> None:
        self.bases, self.choice = bases, tuple(choice)

    def __len__(self) -> int:
        return len(self.bases)

    @overload
    def __getitem__(self, index: int) -> LayerBases: ...
    @overload
    def __getitem__(self, index: slice) -> list[LayerBases]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        return self.bases[index][self.choice[index]]
