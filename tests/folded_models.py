"""Compressed models folded by hand, with random bases: what the runtime is tested with, whatever wrote it.

At full rank and 16 bits such a model equals its source. A model of codes equals one of numbers that are rounded as the
codes do it: in float64 both are one function.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from random_layers import write_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from rotor.format.channels import SIGNED, WIDTHS, Channels, Latent, Numbers
from rotor.format.layout import POST_ROPE, GroupLayout, KeyForm, LayerLayout
from rotor.runtime import attention
from rotor.runtime.attention import RotorAttention
from rotor.runtime.families import attention_shape, find_family
from rotor.runtime.integration import replace_attention
from rotor.runtime.projections import AttentionWeights, split_projections

Bits = Sequence[tuple[int, ...]]
"""Of each group in turn, of its channels in turn, over and over."""

MIXED: Bits = ((16, 12, 8, 4, 4, 4, 4), (8, 4, 4, 4))


@dataclass
class Folding:
    """How attention layers are compressed.

    bits: None for numbers. rank: of each latent; None: full. reach: numbers that codes reach to, either side of a mean.
    coded_layers: how many of the first layers keep codes; the others numbers.
    """

    form: KeyForm = POST_ROPE
    group_size: int = 1
    joint: bool = False
    bits: Bits | None = None
    rank: int | None = None
    reach: float = 4.0
    coded_layers: int = 99


def folded(model: Any, folding: Folding, rounded: bool = False) -> Any:
    """A copy of `model` with every attention layer compressed.

    Args:
        rounded: latents are numbers, which `rounding` rounds to what the codes of `folding` are.
    """
    shape, family = attention_shape(model.config), find_family(model.config)
    copied = copy.deepcopy(model).eval()
    layouts, weights = {}, []
    for index in range(shape.num_layers):
        coded = folding.bits is not None and not rounded and index < folding.coded_layers
        layouts[index] = layout_of(shape, folding, coded)
        parameters = dict(family.attention_module(copied, index).named_parameters())
        weights.append(split_projections(family, parameters.__getitem__, frozenset(parameters), shape))
    biases = frozenset(p for p in "qkvo" if getattr(weights[0], f"{p}_bias") is not None)
    copied.source_biases = biases
    modules: list[Any] = replace_attention(copied, family, shape, layouts, biases)
    generator = torch.Generator().manual_seed(7)
    for index, module in enumerate(modules):
        module.to(model.dtype)
        bits = folding.bits if index < folding.coded_layers else None
        tensors, module.codes = _layer(weights[index], module.layout, shape, folding, bits, generator)
        found = {name: p for name, p in module.named_parameters() if "norm" not in name}
        assert set(found) == set(tensors), set(found) ^ set(tensors)
        with torch.no_grad():
            for name, parameter in found.items():
                assert parameter.shape == tensors[name].shape, name
                parameter.copy_(tensors[name])
    return copied.eval()


@contextmanager
def rounding() -> Iterator[None]:
    """Models of `folded(..., rounded=True)` round the latents that go into the cache."""
    rows, parameters_of = attention.plain_rows, RotorAttention._parameters_of_attention
    modules: list[Any] = []

    def of_module(module: Any) -> Any:
        modules[:] = [module]
        return parameters_of(module)

    def rounded_rows(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = rows(*args)
        (module,) = modules
        if module.layout.coded or module.codes is None:
            return query, key, value
        return query, module.codes[0](key), value if module.layout.joint else module.codes[1](value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RotorAttention, "_parameters_of_attention", of_module)
        patch.setattr(attention, "plain_rows", rounded_rows)
        yield


@dataclass
class Rounded:
    """z -> mean + scale (code + 1/2) of all latents of a side, [sum of ranks] each."""

    bits: Tensor
    scale: Tensor
    mean: Tensor

    def __call__(self, latents: Tensor) -> Tensor:
        most = 2.0 ** (self.bits - 1)
        codes = torch.minimum(torch.maximum(((latents - self.mean) / self.scale).floor(), -most), most - 1)
        return (self.mean + self.scale * (codes + 0.5)).to(latents.dtype)


@dataclass
class Pair:
    """Folder of a compressed checkpoint, and the same model with numbers in place of codes."""

    coded: Path
    source: Path
    folding: Folding

    def load(self, dtype: torch.dtype = torch.float32) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.coded, dtype=dtype).eval()

    @property
    def layouts(self) -> list[LayerLayout]:
        section = json.loads((self.coded / "config.json").read_text())["quantization_config"]
        return [LayerLayout.from_dict(layer, "test") for layer in section["layers"].values()]

    @contextmanager
    def reference(self, dtype: torch.dtype = torch.float64) -> Iterator[Any]:
        """The model of numbers, rounded on their way into the cache."""
        source = AutoModelForCausalLM.from_pretrained(self.source, dtype=dtype).eval()
        with rounding():
            yield folded(source, self.folding, rounded=True)


def write_pair(source: Path, out: Path, folding: Folding) -> Pair:
    """Compress the checkpoint `source` into the folder `out`."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    write(folded(model, folding), source, out)
    return Pair(out, source, folding)


def write(model: Any, source: Path, out: Path) -> None:
    """A folded model as a checkpoint, which goes by the other files of `source`."""
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    family, shape = find_family(model.config), attention_shape(model.config)
    modules: list[Any] = [family.attention_module(model, index) for index in range(shape.num_layers)]
    write_checkpoint(source, out, tensors, [module.layout for module in modules], model.source_biases)


def layout_of(shape: Any, folding: Folding, coded: bool) -> LayerLayout:
    """Groups of neighbouring heads, the last first, so that their order is not the model's."""
    size, joint = folding.group_size, folding.joint

    def latent(index: int, width: int) -> Latent:
        own = folding.rank or width
        if not coded:
            return Numbers(own)
        of_each = _bits_of(folding.bits, index, own)
        return Channels(*(of_each.count(bits) for bits in WIDTHS))

    width = size * shape.head_dim
    groups = []
    for index, first in enumerate(range(shape.num_kv_heads - size, -1, -size)):
        heads = tuple(range(first, first + size))
        value = None if joint else latent(index + 1, width)
        groups.append(GroupLayout(heads, latent(index, 2 * width if joint else width), value))
    return LayerLayout(tuple(groups), *(folding.form if shape.rotary_dim else POST_ROPE))


def _bits_of(bits: Bits | None, index: int, rank: int) -> list[int]:
    """Most first."""
    assert bits is not None
    own = bits[index % len(bits)]
    return sorted((own[channel % len(own)] for channel in range(rank)), reverse=True)


def _layer(
    w: AttentionWeights,
    layout: LayerLayout,
    shape: Any,
    folding: Folding,
    bits: Bits | None,
    generator: torch.Generator,
) -> tuple[dict[str, Tensor], tuple[Rounded, Rounded] | None]:
    """The tensors of `format.tensors.layer_tensors`, in float64, and how their latents are rounded."""
    dim, size, each = shape.head_dim, layout.group_size, shape.heads_per_kv
    weight = {p: getattr(w, f"{p}_weight").double() for p in "qkvo"}
    bias = {p: (b.double() if (b := getattr(w, f"{p}_bias")) is not None else None) for p in "qkvo"}
    parts: dict[str, list[Tensor]] = {}
    folds_keys, rotary = layout.folds_keys(shape), bool(shape.rotary_dim)
    o_bias = bias["o"] if bias["o"] is not None else torch.zeros(shape.hidden_size, dtype=torch.float64)

    def add(name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            parts.setdefault(name, []).append(tensor)

    codes: tuple[list[Rounded], list[Rounded]] = [], []
    for number, group in enumerate(layout.groups):
        kv = torch.cat([torch.arange(h * dim, (h + 1) * dim) for h in group.kv_heads])
        heads = [h * each + i for h in group.kv_heads for i in range(each)]
        q_rows = torch.cat([torch.arange(h * dim, (h + 1) * dim) for h in heads])
        of_each = [
            None if bits is None else _bits_of(bits, number + side, latent.rank)
            for side, latent in ((0, group.key), (0 if group.joint else 1, group.values))
        ]
        bases = _random_bases(group, size * dim, folding.reach, of_each, generator)
        key, value = _Coded(group.key, *bases[0]), _Coded(group.values, *bases[1])
        for found, own, (_, _, scale, mean) in zip(codes, of_each, bases, strict=True):
            if own is not None:
                found.append(Rounded(torch.tensor(own), scale, mean))
        k_bias = None if bias["k"] is None else bias["k"][kv]
        v_bias = torch.zeros(len(kv)).double() if bias["v"] is None else bias["v"][kv]
        k_weight, v_weight = weight["k"][kv], weight["v"][kv]
        # queries
        if rotary:
            add("q_proj.weight", weight["q"][q_rows])
            add("q_proj.bias", None if bias["q"] is None else bias["q"][q_rows])
            add("query_basis", key.decode)
        else:
            for place, head in enumerate(heads):
                rows, own = slice(head * dim, (head + 1) * dim), key.decode[place // each * dim :][:dim]
                add("q_proj.weight", own.mT @ weight["q"][rows])
                add("q_proj.bias", None if bias["q"] is None else own.mT @ bias["q"][rows])
        # keys
        if folds_keys:
            latents, added = key.encode.mT @ k_weight, key.shift.clone()
            if k_bias is not None:
                added += key.encode.mT @ k_bias
            if group.joint:
                latents, added = latents + value.encode.mT @ v_weight, added + value.encode.mT @ v_bias
            add("k_proj.weight", latents)
            if layout.coded or bias["k"] is not None:
                add("k_proj.bias", added)
        else:
            add("k_proj.weight", k_weight)
            add("k_proj.bias", k_bias)
            add("key_basis", key.encode)
            if layout.coded:
                add("key_shift", key.shift)
        if rotary and layout.coded:
            add("key_constant", (key.decode_mean @ key.mean).view(size, dim))
        # values
        if not (group.joint and folds_keys):
            add("v_proj.weight", value.encode.mT @ v_weight)
            added = value.encode.mT @ v_bias + (0 if group.joint else value.shift)
            if (layout.coded and not group.joint) or bias["v"] is not None:
                add("v_proj.bias", added)
        for place, head in enumerate(heads):
            own = weight["o"][:, head * dim : (head + 1) * dim]
            p = slice(place // each * dim, (place // each + 1) * dim)
            add("o_proj.weight", own @ value.decode[p])
            o_bias = o_bias + own @ value.decode_mean[p] @ value.mean
    along = {"key_basis": 1, "query_basis": 1, "o_proj.weight": 1}
    tensors = {name: torch.cat(found, dim=along.get(name, 0)) for name, found in parts.items()}
    if layout.coded or bias["o"] is not None:
        tensors["o_proj.bias"] = o_bias
    if bits is None:
        return tensors, None
    both = [
        Rounded(*(torch.cat([getattr(one, name) for one in side]) for name in ("bits", "scale", "mean")))
        for side in codes
    ]
    return tensors, (both[0], both[1])


class _Coded:
    """A side of a latent: encode [columns, rank] and shift [rank] to what is floored; decode [columns, width].

    mean [rank]: what signed nibbles of 0 mean, in latents that `decode_mean` [columns, rank] decodes.
    """

    def __init__(self, latent: Latent, encode: Tensor, decode: Tensor, scale: Tensor, mean: Tensor) -> None:
        self.decode_mean = decode
        if not isinstance(latent, Channels):
            self.encode, self.decode = encode, decode
            self.shift, self.mean = torch.zeros(latent.rank).double(), torch.zeros(latent.rank).double()
            return
        self.encode, self.shift = encode / scale, -mean / scale
        columns = [
            torch.zeros(len(decode)).double()
            if place is None
            else decode[:, place[0]] * scale[place[0]] * 16 ** place[1]
            for place in latent.nibbles
        ]
        self.decode = torch.stack(columns, dim=1)
        middle = [SIGNED * sum(16**i for i in range(bits // 4)) + 0.5 - 2 ** (bits - 1) for bits in latent.bits]
        self.mean = mean + scale * torch.tensor(middle).double()


def _random_bases(
    group: GroupLayout, columns: int, reach: float, bits: list[list[int] | None], generator: torch.Generator
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(encode, decode, scale, mean) of keys and of values; those of a joint latent are halves of one."""

    def one(width: int, latent: Latent, bits: list[int] | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        square = torch.linalg.qr(torch.randn(width, width, generator=generator).double())[0]
        stretch = 1 + torch.rand(latent.rank, generator=generator).double()
        mean = 0.1 * torch.randn(latent.rank, generator=generator).double()
        encode, decode = square[:, : latent.rank] * stretch, square[:, : latent.rank] / stretch
        scale = torch.tensor([2 * reach / 2**width for width in bits or [1] * latent.rank]).double()
        return encode, decode, scale, mean

    if group.joint:
        encode, decode, scale, mean = one(2 * columns, group.key, bits[0])
        return [(encode[part], decode[part], scale, mean) for part in (slice(columns), slice(columns, None))]
    assert group.value is not None
    return [one(columns, group.key, bits[0]), one(columns, group.value, bits[1])]
