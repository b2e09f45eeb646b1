"""The tensors of a compressed checkpoint, made from its source and from bases when they are asked for.

An export writes them to shards. A checkpoint without weights has the bases in place of shards, and the source's SHA-256
in config.json: loading finds the source, verifies it, and rewrites a layer at a time. The source is only read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, MissingError
from .bases import FoldedBases
from .families import Family, attention_shape, family_of
from .files import file_sha256
from .folding import rewrite
from .layout import AttentionShape, LayerLayout
from .projections import GetTensor, read_attention
from .schemas import SourceInfo
from .section import CompressedSection
from .tensors import layer_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

BASES = "model.safetensors"
"""The file of a checkpoint without weights that holds the bases: under this name all programs look for weights."""

SOURCE = "ROTOR_SOURCE"
"""Environment variable that names the folder, or the hub id, of the source of checkpoints without weights."""

HELD = 2
"""Rewritten layers that are kept until all of their tensors have been asked for."""


class RewrittenTensors:
    """The tensors of a compressed checkpoint by name.

    The new tensors of a layer's attention are where its value projection (or fused projection) was.

    Args:
        biases: which of q, k, v, o have a bias in the source.
        file_of: the shard of each of the source's tensors. read: reads one of them; on the meta device (with bases
            there too) where only shapes and dtypes are wanted.
        bases: gives those of a layer.
        read_replaced: reads a tensor that is rewritten, in place of `read`.

    file_of: the shard of each tensor of the compressed checkpoint.
    """

    def __init__(
        self,
        family: Family,
        shape: AttentionShape,
        layouts: Sequence[LayerLayout],
        biases: frozenset[str],
        file_of: Mapping[str, str],
        read: GetTensor,
        bases: Callable[[int], FoldedBases],
        read_replaced: GetTensor | None = None,
    ) -> None:
        self.family, self.shape, self.layouts, self.biases = family, shape, layouts, biases
        self._read, self._read_replaced, self.bases = read, read_replaced or read, bases
        self._source_names, self.file_of = frozenset(file_of), dict(file_of)
        self._layer_of: dict[str, int] = {}
        self._held: dict[int, dict[str, Tensor]] = {}
        self._lock = Lock()
        self._shapes: dict[str, tuple[int, ...]] = {}
        for layer, layout in enumerate(layouts):
            prefix = family.stored_prefix(layer, self._source_names)
            files = {name: self.file_of.pop(prefix + name, None) for name in family.consumed}
            home = next((files[name] for name in family.value_weights if files[name] is not None), None)
            if home is None:
                raise CheckpointError(
                    f"tensor {prefix}{family.value_weights[0]} is missing.",
                    "Check that config.json belongs to these weights.",
                )
            for name, spec in layer_tensors(layout, shape.layer(layer), biases).items():
                self._layer_of[prefix + name], self.file_of[prefix + name] = layer, home
                self._shapes[prefix + name] = spec.shape

    def shape_of(self, name: str) -> list[int]:
        return list(self._shapes[name] if name in self._shapes else self._read(name).shape)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor. Its layer is rewritten, and the layer's other tensors kept until they are asked for."""
        layer = self._layer_of.get(name)
        if layer is None:
            return self._read(name)
        with self._lock:
            if name not in self._held.get(layer, {}):
                for old in list(self._held)[: 1 - HELD]:
                    del self._held[old]
                self._held[layer] = self._layer(layer)
            tensor = self._held[layer].pop(name)
            if not self._held[layer]:
                del self._held[layer]
            return tensor

    def items(self, file: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Tensors of all shards or of one, layer by layer; unchanged ones come from the source's memory map."""
        for name in sorted(self.file_of):
            if file in (None, self.file_of[name]):
                yield name, self.tensor(name)

    def _layer(self, index: int) -> dict[str, Tensor]:
        weights = read_attention(self.family, index, self._source_names, self._read_replaced, self.shape)
        tensors = rewrite(weights, self.bases(index), self.layouts[index], self.shape.layer(index))
        return {weights.prefix + name: tensor for name, tensor in tensors.items()}


class _Opened:
    """Safetensors files of a folder, whose tensors are read by name."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        try:
            self.files: dict[str, safe_open] = {file: safe_open(folder / file, framework="pt") for file in files}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: {' '.join(str(error).split())}", "Get the folder again.") from error
        self.folder = folder
        self.file_of = {name: file for file, opened in self.files.items() for name in opened.keys()}  # noqa: SIM118

    def tensor(self, name: str) -> Tensor:
        if name not in self.file_of:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing.", "Get the folder again.")
        return self.files[self.file_of[name]].get_tensor(name)

    def unmapped_tensor(self, name: str) -> Tensor:
        """Read a tensor through a map that is closed with it, so that its memory is freed."""
        return (_Opened(self.folder, [self.file_of[name]]) if name in self.file_of else self).tensor(name)


def open_rewritten(bases: Path, config: PreTrainedConfig, section: CompressedSection) -> RewrittenTensors:
    """Open the tensors of a checkpoint without weights.

    Args:
        bases: its file BASES. config: transformers' config of the model.
    Raises:
        MissingError: the source is not to be had. CheckpointError: a file of it, or of the checkpoint, is another.
    """
    assert section.source is not None
    shape, family = attention_shape(config), family_of(config)
    layouts = section.layouts(shape)
    folder = find_source(section.source, bases.parent)
    source, stored = _Opened(folder, sorted(section.source["shards"])), _Opened(bases.parent, [bases.name])

    def bases_of(layer: int) -> FoldedBases:
        where, layer_shape = f"{bases}, layer {layer}", shape.layer(layer)
        return FoldedBases.read(
            lambda name: stored.unmapped_tensor(f"{layer}.{name}"), layouts[layer], layer_shape, where
        )

    biases = frozenset(section.biases)
    return RewrittenTensors(
        family, shape, layouts, biases, source.file_of, source.tensor, bases_of, source.unmapped_tensor
    )


def find_source(source: SourceInfo, folder: Path) -> Path:
    """Find the folder of the source and verify every shard by its size and SHA-256.

    ROTOR_SOURCE comes first, then the folder at `path`. The hub is asked only if ROTOR_SOURCE names one of its ids: a
    checkpoint alone makes nothing be fetched.

    Args:
        folder: the checkpoint's; `path` is relative to it.
    Raises:
        MissingError: there is none. CheckpointError: a shard is missing or is another one.
    """
    given, recorded = os.environ.get(SOURCE), folder.resolve() / source["path"]
    if given:
        source_folder = Path(given) if Path(given).is_dir() else _fetched(given, source)
    elif recorded.is_dir():
        source_folder = recorded
    else:
        model = source["hub_id"] or "MODEL"
        raise MissingError(
            f"{folder} holds no weights but bases for those of {source['name']}, which is not at "
            f"{os.path.normpath(recorded)}.",
            f"Give its folder or hub id: --source {model}, or {SOURCE}={model} for other programs.",
        )
    for file, digest in source["shards"].items():
        path = source_folder / file
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file.", f"Give the source as it was{_revision(source)}.")
        about = path.stat()
        hint = f"Give the source as it was{_revision(source)}: --source MODEL, or {SOURCE}=MODEL."
        size = source["sizes"].get(file, about.st_size)
        if about.st_size != size:
            raise CheckpointError(
                f"{path}: is not the {file} that {folder} was made of ({about.st_size} bytes, expected {size}).", hint
            )
        if _sha256(path.resolve(), about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino) != digest:
            raise CheckpointError(f"{path}: is not the {file} that {folder} was made of (its SHA-256 differs).", hint)
    return source_folder


@lru_cache(maxsize=4096)
def _sha256(path: Path, size: int, modified: int, changed: int, inode: int) -> str:
    """SHA-256 of a file, computed once in a process as long as the file is neither written to nor replaced.

    A program can set the time of modification, but not that of the last change of the inode.
    """
    return file_sha256(path)


def _fetched(hub_id: str, source: SourceInfo) -> Path:
    """Fetch the shards of a hub repository, its configuration and tokenizer, at the commit that was compressed."""
    from huggingface_hub import snapshot_download

    revision = source["revision"] if hub_id == source["hub_id"] else None
    patterns = [*sorted(source["shards"]), "*.json", "*.model"]
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # what the hub's own errors are
        raise MissingError(
            f"{hub_id}: no such folder, and not to be had from the hub: {' '.join(str(error).split())[:300]}",
            f"Give the folder of {source['name']}: --source MODEL, or {SOURCE}=MODEL.",
        ) from error


def _revision(source: SourceInfo) -> str:
    return f" at revision {source['revision']} of {source['hub_id']}" if source["hub_id"] else ""


@contextmanager
def source_at(model: str | Path | None) -> Iterator[None]:
    """Within a `with`, checkpoints without weights take them from `model`, in child processes too; None: no change."""
    before = os.environ.get(SOURCE)
    if model is not None:
        os.environ[SOURCE] = str(model)
    try:
        yield
    finally:
        if model is not None:
            os.environ.pop(SOURCE)
            if before is not None:
                os.environ[SOURCE] = before
