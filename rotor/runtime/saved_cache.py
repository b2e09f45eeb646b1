"""Save the cache of a compressed checkpoint to a file, and load it again: rows, exact tokens, positions, padding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.utils import cached_file

from ..checkpoint.cache_file import CACHE_VERSION, CacheFile, CacheInfo, check_place, write_cache_file
from ..checkpoint.files import file_sha256
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.row_channels import DAMAGED, spots_of
from ..checkpoint.row_codec import RowCodec, Zstandard, pack_numbers, unpack_numbers
from ..checkpoint.rows import Level
from ..errors import CheckpointError, UsageError
from .exact_rows import FAR, ExactState, with_exact_rows
from .positions import BEGINNINGS, SHIFTS, Kept
from .rope import BlocksAsGiven
from .saved_layers import Held, SavedLayer, held_by, layers_of

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

CHUNK_TOKENS = 8192
"""Tokens whose rows are packed together, and unpacked together where the beginning of a cache is wanted."""


def save_cache(
    cache: Cache,
    file: str | Path,
    model: PreTrainedModel,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    level: Level = "none",
) -> None:
    """Save the cache of a compressed checkpoint to a file, in place of an older one.

    The file appears whole or not at all.

    Args:
        cache: transformers' DynamicCache or StaticCache, as `generate` or a forward pass of the model filled it.
        input_ids, attention_mask: [batch_size, tokens], of the tokens in the cache, or of more; `saved_inputs` gives
            them back.
        level: none: rows as they are. fast, small: packed without loss, which needs the extra `store`; small takes
            longer, and pays from some thousand tokens on.
    Raises:
        UsageError: the model is no compressed checkpoint of a folder or a hub, it follows a cache policy, or the cache
            is empty, of another kind or of another model. CheckpointError: the disk is too small or fails.
    """
    layers = layers_of(model)
    if getattr(cache, "offloading", False) and torch.cuda.is_available():
        torch.cuda.synchronize()  # copies to the host do not wait
    held = [held_by(cache, layer) for layer in layers]
    tokens, sequences = held[0].tokens, len(held[0].keys)
    if any((one.tokens, len(one.keys)) != (tokens, sequences) for one in held):
        raise UsageError(
            "layers of the cache hold different numbers of tokens or sequences.", "Save it between passes of the model."
        )
    packer = _Packer(level)
    tensors = packer.rows(layers, held)
    for layer, one in zip(layers, held, strict=True):
        if one.exact is not None:
            tensors[f"exact.{layer.place}.keys"] = packer.numbers(one.exact.keys)
            tensors[f"exact.{layer.place}.values"] = packer.numbers(one.exact.values)
            tensors[f"exact.{layer.place}.begin"] = one.exact.begin
    shifts = getattr(cache, SHIFTS, None)
    if shifts is not None:
        tensors["shifts"] = shifts[:, :tokens]
    for (kind, block), rotations in getattr(cache, BEGINNINGS, {}).items():
        tensors[_name_of_beginnings(kind, block)] = rotations[:, : -(-tokens // block)]
    for name, given in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if given is not None:
            tensors[name] = _of_tokens(given, name, sequences, tokens)
    info: CacheInfo = {
        "version": CACHE_VERSION,
        "checkpoint": _digest_of(model),
        "dtype": _name_of(layers[0].dtype),
        "level": level,
        "tokens": tokens,
        "sequences": sequences,
        "chunk": CHUNK_TOKENS,
        "held": [one.keys.shape[2] for one in held],
        "until": [0 if one.exact is None else one.exact.until for one in held],
        "sha256": {},
    }
    write_cache_file(Path(file), info, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()})


def check_saving(file: str | Path, model: PreTrainedModel, level: Level) -> None:
    """Check that a cache of the model can be saved there, before it is filled; raises UsageError as `save_cache`."""
    layers_of(model)
    _digest_of(model)
    check_place(Path(file))
    if level != "none":
        Zstandard()


def load_cache(file: str | Path, model: PreTrainedModel, tokens: int | None = None) -> DynamicCache:
    """Load a cache that `save_cache` wrote, for the same checkpoint; it goes on as the cache that was saved would.

    Args:
        tokens: how many of the first tokens to load, padding among them; default: all. Those of fewer are read from
            their rows but for the first ones, as after `crop`.
    Raises:
        MissingError: there is no such file. CheckpointError: it is damaged, or another checkpoint filled it.
        UsageError: the model is no compressed checkpoint or was loaded in another dtype; there are not so many tokens,
            or a layer with a sliding window no longer holds the first ones.
    """
    layers, saved = layers_of(model), CacheFile(Path(file))
    info = saved.info
    _check_model(saved, model, layers)
    count = info["tokens"] if tokens is None else tokens
    if not 1 <= count <= info["tokens"]:
        raise UsageError(f"{file}: tokens={count}: it has 1 to {info['tokens']}.", "Ask for some of these.")
    for layer, held in zip(layers, info["held"], strict=True):
        _check_held(saved, layer, held, count)
    cache, reader = DynamicCache(config=model.config), _Reader(saved)
    for number, layer in enumerate(layers):
        keys, values = reader.rows(layer, number, count)
        target: Any = cache.layers[layer.place]
        if layer.exact is not None:
            target = with_exact_rows(cache, layer.place, layer.exact)
            target.exact_rows.restore(reader.exact(layer, number, count))
        target.lazy_initialization(keys, values)
        target.keys, target.values = keys, values
        if layer.window is not None:
            target.cumulative_length = count
    if saved.has("shifts"):
        shifts = saved.tensor("shifts")
        if shifts.dim() != 2 or not 1 <= shifts.shape[1] <= info["tokens"]:
            raise CheckpointError(f"{file}: shifts of {list(shifts.shape)}.", DAMAGED)
        setattr(cache, SHIFTS, reader.checked("shifts", (info["sequences"], shifts.shape[1]), torch.int64)[:, :count])
    beginnings = reader.beginnings(layers, count)
    if beginnings:
        setattr(cache, BEGINNINGS, beginnings)
    return cache


def saved_inputs(file: str | Path) -> dict[str, Tensor]:
    """The `input_ids` and the `attention_mask` that a cache was saved with, [batch_size, tokens].

    Raises:
        MissingError: there is no such file. CheckpointError: it is damaged.
    """
    saved = CacheFile(Path(file))
    shape = saved.info["sequences"], saved.info["tokens"]
    names = [name for name in ("input_ids", "attention_mask") if saved.has(name)]
    return {name: _Reader(saved).checked(name, shape, torch.int64) for name in names}


def _of_tokens(given: Tensor, name: str, sequences: int, tokens: int) -> Tensor:
    """Ids or mask of the tokens in a cache; raises UsageError if there are fewer."""
    if given.dim() != 2 or len(given) != sequences or given.shape[1] < tokens:
        raise UsageError(
            f"{name} of {list(given.shape)}, and the cache has {tokens} tokens of {sequences} sequences.",
            f"Give those of all tokens in the cache, [{sequences}, {tokens}].",
        )
    return given[:, :tokens].long()


def _digest_of(model: PreTrainedModel) -> str:
    """The digest of a model's checkpoint; raises UsageError where no manifest is found."""
    name = model.config.name_or_path or ""
    path = Path(name) / MANIFEST
    if not path.is_file() and name and not Path(name).is_dir():
        fetched = cached_file(
            name,
            MANIFEST,
            revision=getattr(model.config, "_commit_hash", None),
            local_files_only=True,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        path = path if fetched is None else Path(fetched)
    if not path.is_file():
        raise UsageError(
            f"{name or 'the model'}: no {MANIFEST} is found there, by whose digest saved caches know their checkpoint.",
            "Load the folder as `rotor export` wrote it: from_pretrained(FOLDER).",
        )
    return file_sha256(path)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name_of_beginnings(kind: str | None, block: int) -> str:
    return f"beginnings.{kind or ''}.{block}"


def _check_model(saved: CacheFile, model: PreTrainedModel, layers: list[SavedLayer]) -> None:
    """Check that a file is of the checkpoint that a model is of; raises CheckpointError or UsageError."""
    info, digest = saved.info, _digest_of(model)
    if info["checkpoint"] != digest:
        raise CheckpointError(
            f"{saved.path}: of the checkpoint {info['checkpoint'][:16]}, and this one is {digest[:16]}.",
            "Load it with the checkpoint that filled it, or read the prompt anew.",
        )
    dtype = _name_of(layers[0].dtype)
    if info["dtype"] != dtype:
        raise UsageError(
            f"{saved.path}: of the model in {info['dtype']}, and this one is in {dtype}.",
            f"Load the model in {info['dtype']}: from_pretrained(FOLDER, dtype=...), or --dtype.",
        )
    if not len(info["held"]) == len(info["until"]) == len(layers):
        counts = len(info["held"]), len(info["until"])
        raise CheckpointError(f"{saved.path}: {counts} layers, expected {len(layers)}.", DAMAGED)


def _check_held(saved: CacheFile, layer: SavedLayer, held: int, count: int) -> None:
    """Check that a layer holds what it should, and so many of the first tokens."""
    tokens = saved.info["tokens"]
    if held != layer.held_tokens(tokens):
        expected = layer.held_tokens(tokens)
        raise CheckpointError(f"{saved.path}: layer {layer.place} holds {held} tokens, expected {expected}.", DAMAGED)
    if count < tokens and held < tokens:
        raise UsageError(
            f"{saved.path}: tokens={count}: layer {layer.place} has a sliding window, and holds the "
            f"newest {held} of {tokens} tokens.",
            "Load all tokens, or save a cache of the beginning alone.",
        )


class _Packer:
    """Packs what a cache holds into bytes."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self._zstandard = None if level == "none" else Zstandard()

    def rows(self, layers: list[SavedLayer], held: list[Held]) -> dict[str, Tensor]:
        """The rows of all layers, by chunks of tokens; those of as many tokens may follow from each other."""
        packed, codecs = {}, dict[tuple[int, int], RowCodec]()
        for layer, one in zip(layers, held, strict=True):
            spots = spots_of(layer.module.layout) if layer.module.layout.coded else None
            for chunk, start in enumerate(range(0, one.keys.shape[2], CHUNK_TOKENS)):
                sides = [side[:, 0, start : start + CHUNK_TOKENS] for side in (one.keys, one.values)]
                rows = torch.cat(sides, dim=-1).flatten(0, 1).cpu()
                if spots is None:
                    data = self.numbers(rows)
                else:
                    codec = codecs.setdefault((one.keys.shape[2], chunk), RowCodec(self.level))
                    data = _as_tensor(codec.pack(rows.numpy(), spots))
                packed[f"rows.{layer.place}.{chunk}"] = data
        return packed

    def numbers(self, numbers: Tensor) -> Tensor:
        plain = numbers.detach().cpu().contiguous().flatten().view(torch.uint8)
        if self._zstandard is None:
            return plain
        return _as_tensor(pack_numbers(plain.view(-1, numbers.itemsize).numpy(), self._zstandard))


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class _Reader:
    """Reads what `_Packer` packed, each checked against the sizes that the model has."""

    def __init__(self, saved: CacheFile) -> None:
        self.saved, self.info = saved, saved.info
        self._codecs: dict[tuple[int, int], RowCodec] = {}
        self._zstandard: Zstandard | None = None

    def checked(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor that is not packed; raises CheckpointError if it has another shape or dtype."""
        tensor = self.saved.tensor(name)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            got = f"{_name_of(tensor.dtype)} {list(tensor.shape)}"
            raise CheckpointError(
                f"{self.saved.path}: {name} is {got}, expected {_name_of(dtype)} {list(shape)}.", DAMAGED
            )
        return tensor

    def rows(self, layer: SavedLayer, number: int, count: int) -> tuple[Tensor, Tensor]:
        """Key rows and value rows of the first `count` tokens, [batch_size, 1, tokens, elements]."""
        held, chunk_tokens, sequences = self.info["held"][number], self.info["chunk"], self.info["sequences"]
        wanted, width = min(held, count), sum(layer.widths)
        spots = spots_of(layer.module.layout) if layer.module.layout.coded else None
        parts = []
        for chunk, start in enumerate(range(0, wanted, chunk_tokens)):
            name, tokens = f"rows.{layer.place}.{chunk}", min(chunk_tokens, held - start)
            shape = sequences * tokens, width
            if spots is None:
                rows = self.numbers(name, shape, layer.dtype)
            else:
                codec = self._codecs.setdefault((held, chunk), RowCodec())
                with self._named(name):
                    rows = torch.from_numpy(codec.unpack(self._bytes(name), spots, *shape))
            parts.append(rows.view(sequences, 1, tokens, width))
        every = torch.cat(parts, dim=2)[:, :, :wanted].to(layer.device)
        keys, values = every.split(layer.widths, dim=-1)
        return keys.contiguous(), values.contiguous()

    def numbers(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Numbers of this shape."""
        data, count = self._bytes(name), math.prod(shape)
        with self._named(name):
            if self.info["level"] != "none":
                self._zstandard = self._zstandard or Zstandard()
                plain = unpack_numbers(data, self._zstandard, (count, dtype.itemsize))
            else:
                plain = np.frombuffer(data, np.uint8).copy()
        if plain.size != count * dtype.itemsize:
            raise CheckpointError(
                f"{self.saved.path}: {name} has {plain.size} bytes, expected {count * dtype.itemsize}.", DAMAGED
            )
        return torch.from_numpy(plain).flatten().view(dtype).view(shape)

    def exact(self, layer: SavedLayer, number: int, count: int) -> ExactState:
        """Exact tokens of a layer of which so many of the first tokens are loaded."""
        assert layer.exact is not None
        tokens, sequences, shape = self.info["tokens"], self.info["sequences"], layer.module.shape
        name, until = f"exact.{layer.place}", self.info["until"][number]
        sizes = sequences, shape.num_kv_heads, layer.exact.slots_of(tokens), shape.head_dim
        keys, values = (self.numbers(f"{name}.{side}", sizes, layer.dtype) for side in ("keys", "values"))
        begin = self.checked(f"{name}.begin", (sequences,), torch.int64)
        if bool(((begin < 0) | (begin >= tokens) & (begin != FAR)).any()) or until > tokens:
            raise CheckpointError(f"{self.saved.path}: {name} is of tokens beyond {tokens}.", DAMAGED)
        begin = torch.where(begin < count, begin, FAR)
        return ExactState(keys.to(layer.device), values.to(layer.device), begin, until)

    def beginnings(self, layers: list[SavedLayer], count: int) -> Kept:
        """Rotations of the beginnings of blocks, of layers that need them."""
        rotations: Kept = {}
        for layer in layers:
            rope = layer.module.rope
            if not isinstance(rope, BlocksAsGiven) or (rope.layer_type, rope.block) in rotations:
                continue
            name, blocks = _name_of_beginnings(rope.layer_type, rope.block), -(-self.info["tokens"] // rope.block)
            tensor = self.saved.tensor(name)
            sequences = len(tensor) if tensor.dim() == 4 and len(tensor) == 1 else self.info["sequences"]
            shape = sequences, blocks, 2, layer.module.shape.rotary_planes
            known = self.checked(name, shape, tensor.dtype if tensor.is_floating_point() else layer.dtype)
            rotations[rope.layer_type, rope.block] = known[:, : -(-count // rope.block)].to(layer.device)
        return rotations

    def _bytes(self, name: str) -> memoryview:
        tensor = self.saved.tensor(name)
        if tensor.dtype != torch.uint8 or tensor.dim() != 1:
            raise CheckpointError(f"{self.saved.path}: {name} is {_name_of(tensor.dtype)}, expected bytes.", DAMAGED)
        data: Any = tensor.numpy()
        return memoryview(data)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Let errors of packed data name the tensor."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{self.saved.path}: {name}: {error.message}", error.hint) from error
