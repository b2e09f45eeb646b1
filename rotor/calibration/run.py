"""The run folder: results of calibration, and measurements of searches.

RUN/  recipe.yaml  run.json  bases/layer-0000.safetensors ...  codes/layer-0000.safetensors ...  fisher.safetensors
       tables/KEY.json ...  probes/KEY.json ...  log.txt

A layer's files are written when the layer is done and read when they are needed, so that no command holds those of all
layers.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..checked import JsonObject, Reader
from ..checkpoint.bases import BasisPair, LayerBases, check_stored, latent_size
from ..checkpoint.files import INFO, RECIPE, ROTOR_JSON, replacing
from ..checkpoint.layout import AttentionShape, KeyForm, LayerForm, ModelForm
from ..checkpoint.manifest import Manifest
from ..checkpoint.publishing import write_tensors
from ..checkpoint.schemas import RunInfo, check_run, read_file
from ..errors import CheckpointError, MissingError, UsageError
from ..models.hub import find_model
from ..recipe.reading import load_stored_recipe
from ..recipe.recipe import Recipe
from .codes.layer import GroupChannels, LayerCodes, coded_bases
from .codes.side import FITTED_BITS, SideCodes
from .moments import pack_symmetric, unpack_symmetric

WEIGHT_FISHER = "fisher.safetensors"
CALIBRATE_AGAIN = "Run `rotor calibrate` again."


def layer_path(folder: Path, kind: str, layer: int) -> Path:
    """File of a layer's `bases` or `codes`."""
    return folder / kind / f"layer-{layer:04d}.safetensors"


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as temporary:
        write_tensors(temporary, tensors)


class _Stored(dict[str, Tensor]):
    """Tensors of a safetensors file of the run: those of `names`, or all.

    Raises:
        CheckpointError: the file cannot be read, or a tensor that is asked for is missing.
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
        """A tensor whose shape and values were checked; see check_stored."""
        check_stored(self[name], shape, f"{self.path}: {name}")
        return self[name]


def write_weight_fisher(folder: Path, information: Tensor) -> None:
    """Write the Fisher information of W_k and W_v, see `weight_fisher`, after checking that it is finite."""
    check_stored(information, tuple(information.shape), "the Fisher information of the weights")
    _write(folder / WEIGHT_FISHER, {"information": information})


def read_weight_fisher(folder: Path, shape: AttentionShape) -> list[Tensor]:
    """Read the Fisher information that `write_weight_fisher` wrote, of each layer [2, num_kv_heads].

    Raises:
        UsageError: the run has none.
    """
    path = folder / WEIGHT_FISHER
    if not path.is_file():
        raise UsageError(
            f"{folder}: this run has no Fisher information.", "Calibrate again with --set ranks.method=fisher."
        )
    heads = [layer_shape.num_kv_heads for layer_shape in shape.layers]
    information = _Stored(path).checked("information", (shape.num_layers, 2, max(heads)))
    return [layer[:, :count] for layer, count in zip(information, heads, strict=True)]


def write_bases(folder: Path, layer: int, bases: LayerBases) -> None:
    """Write all columns of a layer's bases, float64, with singular values and the output moments for refitting W_o."""
    _write(layer_path(folder, "bases", layer), _bases_tensors(bases))


def write_codes(folder: Path, layer: int, codes: LayerCodes, form: LayerForm) -> None:
    """Write the fitted codes of each channel of a layer, float64."""
    tensors = {
        f"{side}.{name}": tensor.contiguous()
        for side, side_codes in zip(form.latent_names, codes.sides, strict=True)
        for name, tensor in vars(side_codes).items()
    }
    _write(layer_path(folder, "codes", layer), tensors)


def _bases_tensors(bases: LayerBases) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for side, pair in zip(bases.layer_form.latent_names, bases.latents, strict=True):
        for name in ("encode", "decode", "singular_values", "mean"):
            tensor = getattr(pair, name)
            if tensor is not None and not (name == "decode" and torch.equal(pair.encode, tensor)):
                tensors[f"{side}.{name}"] = tensor.contiguous()
    if bases.outputs is not None:
        tensors["outputs"] = pack_symmetric(bases.outputs)
    return tensors


def read_bases(path: Path, form: LayerForm, shape: AttentionShape, refit: bool = False) -> LayerBases:
    """Read the bases that `write_bases` wrote.

    Args:
        refit: also read the output moments for refitting W_o.
    Raises:
        CheckpointError: the file is missing, damaged or does not fit the layer.
    """
    tensors = _Stored(path)

    def pair(side: str) -> BasisPair:
        encode = tensors[f"{side}.encode"]
        decode = tensors.get(f"{side}.decode", encode)
        mean = tensors[f"{side}.mean"] if form.joint else None
        return BasisPair(encode, decode, tensors[f"{side}.singular_values"], mean=mean)

    outputs = unpack_symmetric(tensors["outputs"]) if refit else None
    latents = tuple(pair(name) for name in form.latent_names)
    bases = LayerBases(form.keys, form.group_size, latents, outputs)
    bases.check(shape, str(path))
    return bases


def read_codes(path: Path, form: LayerForm, shape: AttentionShape) -> LayerCodes:
    """Read the codes that `write_codes` wrote; raises the same errors as `read_bases`."""
    tensors = _Stored(path)
    size, sides = latent_size(form, shape), []
    for side in form.latent_names:
        parts = {}
        for part in (attribute.name for attribute in fields(SideCodes)):
            widths = () if part in ("weight", "variance", "length") else (len(FITTED_BITS),)
            parts[part] = tensors.checked(f"{side}.{part}", (*widths, *size))
        sides.append(SideCodes(**parts))
    return LayerCodes(tuple(sides))


@dataclass(frozen=True)
class Run:
    """An opened run folder."""

    folder: Path
    recipe: Recipe
    info: JsonObject
    manifest: Manifest
    _verified: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Open a finished run; raises CheckpointError if it is unfinished or not as calibrate wrote it."""
        path = Path(folder)
        if not path.is_dir():
            raise MissingError(f"{path}: no such folder.", "Give a folder that `rotor calibrate` wrote.")
        if (path / "config.json").is_file() and not (path / INFO).exists():
            given = shlex.quote(str(path))
            if (path / ROTOR_JSON).is_file():
                raise UsageError(
                    f"{path} is a checkpoint that `rotor export` wrote, not a run.", "Give the run of its rotor.json."
                )
            raise UsageError(
                f"{path} is a model, not a run of `rotor calibrate`.",
                f"Calibrate first: rotor calibrate {given} -o RUN, then rotor export RUN -o OUT --accuracy 0.99",
            )
        info: Any = read_file(path / INFO, RunInfo, "Give a folder that `rotor calibrate` wrote.")
        check_run(info, Reader(str(path / INFO), CheckpointError, CALIBRATE_AGAIN))
        run = cls(path, load_stored_recipe(path), info, Manifest.read(path, CALIBRATE_AGAIN))
        for name in run.manifest.added():
            raise CheckpointError(f"{path / name}: is unexpected; rotor did not write it.", "Move it elsewhere.")
        for name in (INFO, RECIPE, WEIGHT_FISHER):
            if name in run.manifest.files or (path / name).exists():
                run.verify(path / name)
        return run

    def verify(self, path: Path) -> None:
        """Raise CheckpointError if a file is not as calibrate wrote it; each file is checked once."""
        name = path.relative_to(self.folder).as_posix()
        if name in self._verified:
            return
        problem = self.manifest.problem(name)
        if problem:
            raise CheckpointError(f"{path}: {problem}.", CALIBRATE_AGAIN)
        self._verified.add(name)

    @property
    def writable(self) -> bool:
        """Tell whether measurements can be stored in the folder, which may belong to somebody else."""
        return os.access(self.folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)

    @property
    def has_codes(self) -> bool:
        """Tell whether calibration fitted codes, which bits are allocated by."""
        return layer_path(Path(), "codes", 0).as_posix() in self.manifest.files

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(**self.info["shape"])

    @property
    def calibrated_documents(self) -> frozenset[str]:
        """Digests of the documents that were calibrated on; empty if the tokens were no text."""
        return frozenset(map(str, self.info["tokens"]["documents_sha256"]))

    @property
    def model_folder(self) -> Path:
        """Folder of the model at calibration."""
        return Path(self.info["model"]["path"])

    def fetch_model(self) -> Path:
        """The folder of the calibrated model; a model from the hub is fetched again if the cache was emptied.

        Raises:
            CheckpointError: the model is not available.
        """
        model, folder = self.info["model"], self.model_folder
        if not folder.is_dir() and model["hub_id"]:
            return find_model(model["hub_id"], model["revision"]).folder
        if not folder.exists():
            raise MissingError(
                f"{folder}: no such folder; {self.folder} was calibrated on the model in it.",
                f"Put the model back, or link it there: ln -s MODEL {shlex.quote(str(folder))}",
            )
        return folder

    def bases(self, channels: Sequence[GroupChannels] | None = None) -> RunBases:
        """The bases of each layer, read on access; see RunBases."""
        return RunBases(self, channels)

    def layer_bases(self, layer: int) -> LayerBases:
        """Read the bases of one layer.

        Raises:
            CheckpointError: the layer's file is missing, damaged or does not fit run.json.
        """
        path = layer_path(self.folder, "bases", layer)
        self.verify(path)
        return read_bases(path, self.form.layer(layer), self.shape.layer(layer), self.recipe.bases.refit)

    def layer_codes(self, layer: int) -> LayerCodes:
        """Read the codes of one layer; raises like `layer_bases`."""
        path = layer_path(self.folder, "codes", layer)
        codes = read_codes(path, self.form.layer(layer), self.shape.layer(layer))
        self.verify(path)
        return codes

    def spectra(self, layer: int) -> dict[str, Tensor]:
        """Read the singular values of a layer's latents by name, each [number, columns]; raises like `layer_bases`."""
        path = layer_path(self.folder, "bases", layer)
        form = self.form.layer(layer)
        size = latent_size(form, self.shape.layer(layer))
        tensors = _Stored(path, [f"{name}.singular_values" for name in form.latent_names])
        self.verify(path)
        return {name: tensors.checked(f"{name}.singular_values", size) for name in form.latent_names}

    @property
    def form(self) -> ModelForm:
        """The form that the layers are compressed to."""
        form = self.info["form"]
        return ModelForm(tuple(KeyForm(**keys) for keys in form["keys"]), form["group_size"], form["joint"])

    @property
    def columns(self) -> list[tuple[int, int]]:
        """The number of groups of each layer, and the numbers that a row of a group is made of."""
        form = self.form.layer(0)  # layers differ in their keys alone
        return [
            (layer_shape.num_kv_heads // form.group_size, form.columns(layer_shape.head_dim))
            for layer_shape in self.shape.layers
        ]


class RunBases(Sequence[LayerBases]):
    """The bases of a run's layers; each is read on access and not kept.

    channels: the channels of a plan, by which the columns are ordered and coded; None for bases without codes.
    """

    def __init__(self, run: Run, channels: Sequence[GroupChannels] | None = None) -> None:
        self.run, self.channels = run, channels

    def __len__(self) -> int:
        return self.run.shape.num_layers

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        if self.channels is None:
            return self.run.layer_bases(index)
        return coded_bases(self.run.layer_bases(index), self.run.layer_codes(index), self.channels[index])
