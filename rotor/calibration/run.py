"""The run folder: what calibration found, and what searches measured.

RUN/  recipe.yaml  run.json  bases/layer-0000.safetensors ...  codes/layer-0000.safetensors ...  fisher.safetensors
       distilled/layer-0000.safetensors ...
       tables/KEY.json ...  probes/KEY.json ...  log.txt

Files of a layer are written when it is done and read when it is needed, so that no command holds those of all layers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..checked import Reader
from ..checkpoint.atomic import replacing
from ..checkpoint.bases import BasisPair, LayerBases, check_stored, stacked_pair
from ..checkpoint.file_names import RECIPE
from ..checkpoint.layout import AttentionShape, KeyForm, LayerForm, ModelForm
from ..checkpoint.manifest import Manifest
from ..checkpoint.publishing import write_tensors
from ..checkpoint.schemas import RunInfo, check_run, read_file
from ..errors import CheckpointError, MissingError, UsageError
from ..models.hub import find_model
from ..recipe import Recipe, load_stored_recipe
from .bases.moments import pack_symmetric, unpack_symmetric
from .codes.layer import MEASURED, GroupChannels, LayerCodes, SideCodes, coded_bases

INFO, FISHER = "run.json", "fisher.safetensors"
SIDES = ("qk", "vo")
DISTILLED = "distilled"
CALIBRATE_AGAIN = "Run `rotor calibrate` again."


def layer_path(folder: Path, kind: str, layer: int) -> Path:
    """The file of a layer's `bases` or `codes`, or of what became of both when they were `distilled`."""
    return folder / kind / f"layer-{layer:04d}.safetensors"


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as temporary:
        write_tensors(temporary, tensors)


class _Stored(dict[str, Tensor]):
    """The tensors of those names, or all, of a safetensors file of the run; asking for others is an error.

    Raises:
        CheckpointError: it cannot be read, or lacks a tensor.
    """

    def __init__(self, path: Path, names: list[str] | None = None) -> None:
        self.path = path
        try:
            with safe_open(path, framework="pt") as handle:
                self.update({name: handle.get_tensor(name) for name in (handle.keys() if names is None else names)})
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path}: not readable ({error}).", CALIBRATE_AGAIN) from error

    def __missing__(self, name: str) -> Tensor:
        raise CheckpointError(f"{self.path}: tensor {name!r} is missing.", CALIBRATE_AGAIN)

    def checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of that shape; see check_stored."""
        check_stored(self[name], shape, f"{self.path}: {name}")
        return self[name]


def write_fisher(folder: Path, information: Tensor) -> None:
    """Fisher information of the weights of keys and of values, [num_layers, 2, num_kv_heads], if it is finite."""
    check_stored(information, tuple(information.shape), "the Fisher information of the weights")
    _write(folder / FISHER, {"information": information})


def read_fisher(folder: Path, shape: AttentionShape) -> Tensor:
    """As `write_fisher` had it; raises UsageError if the run has none."""
    path = folder / FISHER
    if not path.is_file():
        raise UsageError(
            f"{folder}: this run has no Fisher information.", "Calibrate again with --set ranks.method=fisher."
        )
    return _Stored(path).checked("information", (shape.num_layers, 2, shape.num_kv_heads))


def write_bases(folder: Path, layer: int, bases: LayerBases) -> None:
    """Write all columns of the bases of a layer, float64, with their singular values, and what W_o is refitted by."""
    _write(layer_path(folder, "bases", layer), _bases_tensors(bases))


def write_codes(folder: Path, layer: int, codes: LayerCodes) -> None:
    """Write what is known of the codes of each channel of a layer, float64."""
    _write(layer_path(folder, "codes", layer), _codes_tensors(codes))


def write_distilled(folder: Path, layer: int, bases: LayerBases, codes: LayerCodes) -> None:
    """Write what became of a layer's bases and codes when they were trained, beside those."""
    _write(layer_path(folder, DISTILLED, layer), _bases_tensors(bases) | _codes_tensors(codes))


def _bases_tensors(bases: LayerBases) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for side, pair in zip(SIDES, bases.sides, strict=True):
        for name in ("encode", "decode", "singular_values", "shift", "constant"):
            tensor = getattr(pair, name)
            if tensor is not None and not (name == "decode" and torch.equal(pair.encode, tensor)):
                tensors[f"{side}.{name}"] = tensor.contiguous()
    if bases.outputs is not None:
        tensors["outputs"] = pack_symmetric(bases.outputs)
    return tensors


def _codes_tensors(codes: LayerCodes) -> dict[str, Tensor]:
    return {
        f"{side}.{name}": tensor.contiguous()
        for side, found in zip(SIDES, codes.sides, strict=False)  # values may share the latent of keys
        for name, tensor in vars(found).items()
    }


def read_bases(path: Path, form: LayerForm, shape: AttentionShape, refit: bool = False) -> LayerBases:
    """What `write_bases` or `write_distilled` wrote.

    Args:
        refit: W_o is refitted.
    Raises:
        CheckpointError: the file is missing, damaged or not of such a layer.
    """
    tensors = _Stored(path)

    def pair(side: str) -> BasisPair:
        encode = tensors[f"{side}.encode"]
        decode = tensors.get(f"{side}.decode", encode)
        shift, constant = (tensors.get(f"{side}.{name}") for name in ("shift", "constant"))
        return BasisPair(encode, decode, tensors[f"{side}.singular_values"], shift, constant)

    outputs = unpack_symmetric(tensors["outputs"]) if refit else None
    sides = pair("qk"), pair("vo")
    latents = (stacked_pair(*sides, form.group_size),) if form.joint else sides
    found = LayerBases(form.keys, form.group_size, latents, outputs)
    found.check(shape, str(path))
    return found


def read_codes(path: Path, form: LayerForm, shape: AttentionShape) -> LayerCodes:
    """What `write_codes` or `write_distilled` wrote; raises likewise."""
    tensors, sides = _Stored(path), []
    for side in SIDES[: form.latents_per_group]:
        found = {}
        for part in (own.name for own in fields(SideCodes)):
            widths = () if part in ("weight", "variance") else (len(MEASURED),)
            found[part] = tensors.checked(f"{side}.{part}", (*widths, *_columns(form, shape)))
        sides.append(SideCodes(**found))
    return LayerCodes(*sides)


def _columns(form: LayerForm, shape: AttentionShape) -> tuple[int, int]:
    return shape.num_kv_heads // form.group_size, form.columns(shape.head_dim)


@dataclass(frozen=True)
class Run:
    """An opened run folder."""

    folder: Path
    recipe: Recipe
    info: dict[str, Any]
    manifest: Manifest
    _verified: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Raises CheckpointError if the folder is not a finished run, or not as calibrate wrote it."""
        path = Path(folder)
        if not path.is_dir():
            raise MissingError(f"{path}: no such folder.", "Give a folder that `rotor calibrate` wrote.")
        info: Any = read_file(path / INFO, RunInfo, "Give a folder that `rotor calibrate` wrote.")
        check_run(info, Reader(str(path / INFO), CheckpointError, CALIBRATE_AGAIN))
        run = cls(path, load_stored_recipe(path), info, Manifest.read(path, CALIBRATE_AGAIN))
        for name in run.manifest.added():
            raise CheckpointError(f"{path / name}: is unexpected; rotor did not write it.", "Move it elsewhere.")
        for name in (INFO, RECIPE, FISHER):
            if name in run.manifest.files or (path / name).exists():
                run.verify(path / name)
        return run

    def verify(self, path: Path) -> None:
        """Raises CheckpointError if a file is not as calibrate wrote it; looks at each once."""
        name = path.relative_to(self.folder).as_posix()
        if name in self._verified:
            return
        problem = self.manifest.problem(name)
        if problem:
            raise CheckpointError(f"{path}: {problem}.", CALIBRATE_AGAIN)
        self._verified.add(name)

    @property
    def writable(self) -> bool:
        """Whether what is measured can be kept in it; of a colleague's it cannot."""
        return os.access(self.folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)

    @property
    def has_codes(self) -> bool:
        """Whether calibration took what bits are allocated by."""
        return layer_path(Path(), "codes", 0).as_posix() in self.manifest.files

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(**self.info["shape"])

    @property
    def calibrated_documents(self) -> frozenset[str]:
        """Digests of the documents that were calibrated on; empty where that was no text."""
        return frozenset(map(str, self.info.get("tokens", {}).get("documents_sha256", ())))

    @property
    def model_folder(self) -> Path:
        """Where the calibrated model was."""
        return Path(self.info["model"]["path"])

    def fetch_model(self) -> Path:
        """The folder of the calibrated model; one from the hub is fetched again if its cache was emptied since.

        Raises:
            CheckpointError: it is not to be had.
        """
        model = self.info["model"]
        if not self.model_folder.is_dir() and model.get("hub_id"):
            return find_model(model["hub_id"], model["revision"]).folder
        return self.model_folder

    def bases(self, channels: Sequence[GroupChannels] | None = None) -> RunBases:
        """The bases of each layer, read when they are asked for; see RunBases."""
        return RunBases(self, channels)

    def layer_bases(self, layer: int, kind: str = "bases") -> LayerBases:
        """The bases of one layer, or what they were trained to: those of `distilled`.

        Raises:
            CheckpointError: the layer's file is missing, damaged or does not fit run.json.
        """
        path = layer_path(self.folder, kind, layer)
        self.verify(path)
        return read_bases(path, self.form.layer(layer), self.shape, self.recipe.bases.refit)

    def layer_codes(self, layer: int, kind: str = "codes") -> LayerCodes:
        """What is known of the codes of one layer, or what they were trained to; raises likewise."""
        path = layer_path(self.folder, kind, layer)
        found = read_codes(path, self.form.layer(layer), self.shape)
        self.verify(path)
        return found

    def spectra(self, layer: int) -> tuple[Tensor, Tensor]:
        """Singular values of qk and of vo of one layer, each [num_groups, columns]; raises likewise."""
        path, names = layer_path(self.folder, "bases", layer), [f"{side}.singular_values" for side in SIDES]
        tensors = _Stored(path, names)
        self.verify(path)
        return tensors.checked(names[0], self.columns), tensors.checked(names[1], self.columns)

    @property
    def form(self) -> ModelForm:
        """What the layers are compressed to."""
        form = self.info["form"]
        return ModelForm(tuple(KeyForm(**keys) for keys in form["keys"]), form["group_size"], form["joint"])

    @property
    def columns(self) -> tuple[int, int]:
        """Groups of a layer, and the columns of each of their latents."""
        return _columns(self.form.layer(0), self.shape)


class RunBases(Sequence[LayerBases]):
    """The bases of a run's layers; each is read when it is asked for, and not kept.

    channels: where columns are codes: those of a plan, by which they are ordered and coded.
    """

    def __init__(self, run: Run, channels: Sequence[GroupChannels] | None = None) -> None:
        self.run, self.channels = run, channels

    def __len__(self) -> int:
        return self.run.shape.num_layers

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        if self.channels is None:
            return self.run.layer_bases(index)
        kinds = (DISTILLED, DISTILLED) if self.run.recipe.distil.steps else ("bases", "codes")
        bases, codes = self.run.layer_bases(index, kinds[0]), self.run.layer_codes(index, kinds[1])
        return coded_bases(bases, codes, self.channels[index])
