"""The run folder: what calibration found, and what searches measured.

RUN/  recipe.yaml  run.json  statistics/layer-0000.safetensors ...  bases.safetensors  rank_table.json  log.txt
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .bases import BasisPair, LayerBases
from .checkpoint import read_json, write_json
from .errors import CheckpointError, UsageError
from .layout import AttentionShape, Domain
from .recipe import Recipe, load_recipe
from .statistics import LayerStatistics

RECIPE, INFO, BASES, RANK_TABLE, LOG = "recipe.yaml", "run.json", "bases.safetensors", "rank_table.json", "log.txt"
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
    extra = {} if fisher is None else {"fisher_key": fisher[0], "fisher_value": fisher[1]}
    save_file(dict(sorted({**statistics.sums, **extra}.items())), path, metadata=metadata)


def read_statistics(folder: Path, layer: int, shape: AttentionShape) -> LayerStatistics:
    """Raises CheckpointError if the layer's file is missing or damaged."""
    path = statistics_path(folder, layer)
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata()
        sums = {name: tensor for name, tensor in load_file(path).items() if not name.startswith("fisher_")}
        return LayerStatistics(shape, int(metadata["group_size"]), sums, int(metadata["tokens"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable ({error}).", CALIBRATE_AGAIN) from error


def read_fisher(folder: Path, layer: int) -> tuple[Tensor, Tensor]:
    """Fisher information of keys and of values, each [num_kv_heads]; raises UsageError if the run has none."""
    tensors = load_file(statistics_path(folder, layer))
    if "fisher_key" not in tensors:
        raise UsageError(
            f"{folder}: this run has no Fisher information.", "Calibrate again with --set ranks.method=fisher."
        )
    return tensors["fisher_key"], tensors["fisher_value"]


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

    def bases(self) -> list[dict[str, LayerBases]]:
        """The bases of each layer's candidates (a domain and a group size) by key.

        Raises:
            CheckpointError: the file is damaged or does not fit run.json.
        """
        path = self.folder / BASES
        try:
            tensors = load_file(path)
            return [
                {key: self._candidate(tensors, i, key) for key in self.info["candidates"]}
                for i in range(self.shape.num_layers)
            ]
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(f"{path}: not readable ({error}).", CALIBRATE_AGAIN) from error

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
        whole_planes = self.recipe.bases.qk == "rope-pairs"
        return LayerBases(domain, group_size, pairs["qk"], pairs["vo"], outputs, whole_planes)

    def read_rank_table(self) -> dict[str, Any] | None:
        path = self.folder / RANK_TABLE
        return read_json(path, "Delete it, and the next export measures again.") if path.is_file() else None

    def write_rank_table(self, table: dict[str, Any]) -> None:
        """Written to a temporary name first, so that an interrupted write keeps the old table."""
        temporary = self.folder / f"{RANK_TABLE}.tmp"
        write_json(temporary, table)
        temporary.replace(self.folder / RANK_TABLE)
