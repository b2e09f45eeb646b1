"""Layers, rows and queries to decode, at random; attention over them in float64, and in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotor.format.channels import Channels, Numbers
from rotor.format.kernel_config import Tile
from rotor.format.layout import AttentionShape, GroupLayout, LayerLayout
from rotor.kernels.decoding import BlockRotations, DecodeLayer, decode_attention
from rotor.kernels.masks import ranges_of_mask
from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.ranges import KeyRanges
from rotor.kernels.rotary import rotate, when_read
from rotor.kernels.rows import pack_layer, read_class


@dataclass
class Case:
    """A step of decoding. rows: of keys and values, [batch_size, kv_len, .]. allowed: [tokens, kv_len]."""

    layer: DecodeLayer
    query: Tensor
    rows: tuple[Tensor, Tensor]
    rotation: tuple[Tensor, Tensor] | None
    ranges: KeyRanges
    allowed: Tensor
    sequence: Tensor


def layer_of(
    widths: list[int], size: int, *, values: list[int] | None = None, coded: bool = True, block: int | None = None,
    fast: int = 0,
) -> LayerLayout:  # fmt: skip
    """Groups of `size` KV heads with latents of these widths, joint where no `values` are given."""

    def latent(width: int) -> Channels | Numbers:
        return Channels(n8=width // 4, n4=width // 2) if coded else Numbers(width)

    groups = []
    for i, width in enumerate(widths):
        heads = tuple(range(i * size, (i + 1) * size))
        groups.append(GroupLayout(heads, latent(width), None if values is None else latent(values[i])))
    return LayerLayout(tuple(groups), block, fast)


def make(
    layout: LayerLayout, lengths: list[int], *, per_head: int = 4, head_dim: int = 32, rotary: int | None = None,
    dtype: torch.dtype = torch.float16, tokens: list[int] | None = None, softcap: float | None = None,
    window: int | None = None, starts: list[int] | None = None, holes: bool = False, seed: int = 0, factor: float = 1.0,
) -> Case:  # fmt: skip
    """A step over sequences of `lengths` keys; tokens: new ones of each sequence, else one."""
    make_ = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make_)

    rotary = head_dim if rotary is None else rotary
    kv_heads = len(layout.groups) * layout.group_size
    shape = AttentionShape(1, kv_heads * per_head, kv_heads, head_dim, 64, rotary)
    scale = 0.15 / (layout.key_width / len(layout.groups)) ** 0.5 * (1.0 if layout.coded else 6.0)
    basis = constant = rotation = None
    if rotary:
        basis = (scale * normal(layout.group_size * head_dim, layout.key_width)).to(dtype)
        constant = 0.3 * normal(kv_heads, head_dim) if layout.coded else None
        angle = torch.arange(512)[:, None] * 10000.0 ** (-torch.arange(rotary // 2) / (rotary // 2))
        rotation = tuple(factor * torch.cat([f(angle), f(angle)], -1) for f in (torch.cos, torch.sin))
    parameters = AttentionParameters(layout, shape, head_dim**-0.5, basis, constant, softcap)
    layer = DecodeLayer(parameters, dtype, torch.device("cpu"))
    batch, longest = len(lengths), max(*lengths, 1) + 3
    latents = [
        normal(batch, longest, rank) * (4.0 if layout.coded else 1.0) for rank in (layout.key_rank, layout.value_rank)
    ]
    rows = tuple(pack_layer(x if layout.coded else x.to(dtype), layout, side == 0) for side, x in enumerate(latents))
    counts = tokens or [1] * batch
    total = sum(counts)
    sequence = torch.repeat_interleave(torch.arange(batch), torch.tensor(counts))
    position = torch.cat([torch.arange(n) + length - n for n, length in zip(counts, lengths, strict=True)])
    index = torch.arange(longest)
    allowed = index <= position[:, None]
    if window is not None:
        allowed &= index > position[:, None] - window
    if starts is not None:
        allowed &= index >= torch.tensor(starts)[sequence][:, None]
    kv_lens = torch.tensor(lengths, dtype=torch.int32)
    if holes:
        allowed &= torch.rand(total, longest, generator=make_) > 0.3
        ranges = ranges_of_mask(allowed.unflatten(0, (batch, -1)))
    elif tokens is None:
        ranges = KeyRanges.of_lengths(kv_lens, None if starts is None else torch.tensor(starts), window)
    else:
        query_start = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        ranges = KeyRanges.packed(query_start, kv_lens, total, max(counts), window)
    if rotary:
        query = (1.5 * normal(total, kv_heads * per_head, head_dim)).to(dtype)
    else:
        query = (0.15 * normal(total, layer.group_rows * layout.key_width)).to(dtype)
    return Case(layer, query, rows, rotation, ranges, allowed, sequence)


def run(case: Case, tiles: Tile | None = None, page: int = 0, programs: int = 5) -> Tensor:
    """By the kernels. page: keys of a page; pages then lie anywhere, what no key is in is poisoned, and the block table
    ends with the last page of the last sequence.
    """
    layout, rotations = case.layer.layout, None
    if case.rotation is not None and layout.in_blocks:
        rotations = BlockRotations.of(case.rotation, layout, case.layer.dtype)
    rows, table = case.rows, None
    if page:
        until = case.ranges.until.tolist()
        per = -(-rows[0].shape[1] // page)
        count = len(until) * per + 3
        places = torch.randperm(count, generator=torch.Generator().manual_seed(1))
        memory = torch.full((len(until) * per,), 1 << 30, dtype=torch.int32)
        paged = []
        for side in rows:
            poison = 255 if side.dtype == torch.uint8 else torch.nan
            paged.append(torch.full((count, page, side.shape[-1]), poison, dtype=side.dtype))
        for s, length in enumerate(until):
            for p in range(-(-length // page)):
                at = int(places[s * per + p])
                memory[s * per + p] = at
                for side, out in zip(rows, paged, strict=True):
                    part = side[s, p * page : min(length, (p + 1) * page)]
                    out[at, : len(part)] = part
        rows, table = (paged[0], paged[1]), memory.view(len(until), per)
    return decode_attention(
        case.query, rows[0], rows[1], case.layer, case.ranges, rotations, block_table=table, tiles=tiles,
        programs=programs,
    )  # fmt: skip


def attended(case: Case, dtype: torch.dtype) -> Tensor:
    """By the formulas, [tokens, .], in `dtype`."""
    layer, layout, parameters = case.layer, case.layer.layout, case.layer.parameters
    outputs = []
    for token, s in enumerate(case.sequence.tolist()):
        allowed, of_token = case.allowed[token], []
        for cls in layout.classes(case.layer.dtype.itemsize):
            keys = read_class(case.rows[0][s], cls.key, cls.key_byte, cls.key_stride, cls.count, layer.dtype)
            of_values = case.rows[0] if layout.joint else case.rows[1]
            values = read_class(of_values[s], cls.value, cls.value_byte, cls.value_stride, cls.count, layer.dtype)
            for g in range(cls.count):
                z, v = keys[:, g].to(dtype), values[:, g].to(dtype)
                for row in range(layer.group_rows):
                    head = (cls.start + g) * layer.group_rows + row
                    if layer.folded:
                        first = layer.group_rows * (cls.key_place + g * cls.key.width) + row * cls.key.width
                        logits = z @ case.query[token, first : first + cls.key.width].to(dtype)
                    else:
                        h = row // layer.per_head
                        k = z @ parameters.basis(cls)[g, h].to(dtype).T
                        constant = parameters.constant(cls)
                        if constant is not None:
                            k = (k.to(torch.promote_types(dtype, torch.float32)) + constant[g, h]).to(dtype)
                        if layout.in_blocks:
                            cos, sin = when_read(case.rotation, layout.form)
                            k = rotate(k, cos[: len(k)].to(dtype), sin[: len(k)].to(dtype))
                        logits = k @ case.query[token, head].to(dtype)
                    logits = logits * parameters.scaling
                    if parameters.softcap is not None:
                        logits = parameters.softcap * torch.tanh(logits / parameters.softcap)
                    logits = logits.masked_fill(~allowed, -torch.inf)
                    weights = torch.softmax(logits, -1).nan_to_num()
                    of_token.append(weights @ v)
        outputs.append(torch.cat(of_token))
    return torch.stack(outputs)


def check(case: Case, *args: object, **kwargs: object) -> None:
    """The error against float64 is at most twice that of plain PyTorch in the same dtype, by the worst row."""
    output = run(case, *args, **kwargs)  # type: ignore[arg-type]
    truth, plain = attended(case, torch.float64), attended(case, case.layer.dtype)

    def worst(x: Tensor, y: Tensor) -> float:
        return float((x.double() - y).abs().max())

    tiny = 3e-6 * float(truth.abs().max() + 1)
    assert worst(output, truth) <= 2 * worst(plain, truth) + tiny, (worst(output, truth), worst(plain, truth))
    assert bool((output[~case.allowed.any(1)] == 0).all())
