"""Compressed models folded by hand, with random bases of full rank: what the runtime is tested with, whatever wrote it.

At full rank and 16 bits such a model equals its source.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from rotor.format.channels import SIGNED, Channels, Latent, Numbers
from rotor.format.layout import GroupLayout, KeyForm, LayerLayout
from rotor.runtime.families import AttentionWeights, attention_shape, find_family
from rotor.runtime.integration import replace_attention


def folded(
    model: Any,
    form: KeyForm = KeyForm(),
    group_size: int = 1,
    joint: bool = False,
    bits: tuple[int, ...] | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> Any:
    """A copy of `model` with every attention layer compressed.

    Args:
        bits: of a latent's channels, over and over; None: numbers.
        rank: of each latent; by default full.
    """
    shape, family = attention_shape(model.config), find_family(model.config)
    copied = copy.deepcopy(model).eval()
    layouts = {i: layout_of(shape, form, group_size, joint, bits, rank) for i in range(shape.num_layers)}
    weights = {}
    for index in layouts:
        module = family.attention_module(copied, index)
        parameters = dict(module.named_parameters())
        weights[index] = family.read(parameters.__getitem__, frozenset(parameters), shape)
    biases = frozenset(p for p in "qkvo" if getattr(weights[0], f"{p}_bias") is not None)
    modules = replace_attention(copied, family, shape, layouts, biases)
    generator = torch.Generator().manual_seed(seed)
    for index, module in enumerate(modules):
        module.to(model.dtype)
        tensors = _layer(weights[index], module.layout, shape, generator)
        found = {name: p for name, p in module.named_parameters() if "norm" not in name}
        assert set(found) == set(tensors), set(found) ^ set(tensors)
        with torch.no_grad():
            for name, parameter in found.items():
                assert parameter.shape == tensors[name].shape, name
                parameter.copy_(tensors[name])
    return copied.eval()


def layout_of(
    shape: Any, form: KeyForm, group_size: int, joint: bool, bits: tuple[int, ...] | None, rank: int | None = None
) -> LayerLayout:
    """Groups of neighbouring heads, the last first, so that their order is not the model's."""

    def latent(width: int) -> Latent:
        own = rank or width
        if bits is None:
            return Numbers(own)
        of_each = [bits[i % len(bits)] for i in range(own)]
        return Channels(*(of_each.count(b) for b in (16, 12, 8, 4)))

    width = group_size * shape.head_dim
    groups = [
        GroupLayout(
            tuple(range(first, first + group_size)),
            latent(2 * width if joint else width),
            None if joint else latent(width),
        )
        for first in range(0, shape.num_kv_heads, group_size)
    ]
    return LayerLayout(tuple(groups[::-1]), *(form if shape.rotary_dim else KeyForm()))


def _layer(w: AttentionWeights, layout: LayerLayout, shape: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """The tensors of `format.tensors.layer_tensors`, in float64."""
    dim, size, each = shape.head_dim, layout.group_size, shape.heads_per_kv
    weight = {p: getattr(w, f"{p}_weight").double() for p in "qkvo"}
    bias = {p: (b.double() if (b := getattr(w, f"{p}_bias")) is not None else None) for p in "qkvo"}
    parts: dict[str, list[Tensor]] = {}
    folds_keys, rotary = layout.folds_keys(shape), bool(shape.rotary_dim)
    o_bias = bias["o"] if bias["o"] is not None else torch.zeros(shape.hidden_size, dtype=torch.float64)

    def add(name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            parts.setdefault(name, []).append(tensor)

    for group in layout.groups:
        kv = torch.cat([torch.arange(h * dim, (h + 1) * dim) for h in group.kv_heads])
        heads = [h * each + i for h in group.kv_heads for i in range(each)]
        q_rows = torch.cat([torch.arange(h * dim, (h + 1) * dim) for h in heads])
        bases = _random_bases(group, size * dim, generator)
        key, value = _Coded(group.key, *bases[0]), _Coded(group.values, *bases[1])
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
    return tensors


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
    group: GroupLayout, columns: int, generator: torch.Generator
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(encode, decode, scale, mean) of keys and of values; those of a joint latent are halves of one."""

    def one(width: int, latent: Latent) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        square = torch.linalg.qr(torch.randn(width, width, generator=generator).double())[0]
        stretch = 1 + torch.rand(latent.rank, generator=generator).double()
        encode, decode = square[:, : latent.rank] * stretch, square[:, : latent.rank] / stretch
        if not isinstance(latent, Channels):
            return encode, decode, stretch, stretch
        reach = 32.0  # of the latents of small random models
        scale = torch.tensor([2 * reach / 2**bits for bits in latent.bits]).double()
        return encode, decode, scale, 0.1 * torch.randn(latent.rank, generator=generator).double()

    if group.joint:
        encode, decode, scale, mean = one(2 * columns, group.key)
        return [(encode[part], decode[part], scale, mean) for part in (slice(columns), slice(columns, None))]
    assert group.value is not None
    return [one(columns, group.key), one(columns, group.value)]
