"""Random compressed layers, rows and pages for the tests of kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rotor.checkpoint.layout import POST_ROPE, PRE_ROPE, AttentionShape, ExactTokens, GroupLayout, KeyForm, LayerLayout
from rotor.checkpoint.rows import CodedRow, NumberRow, Row, RowScale
from rotor.kernels.exact_slots import ExactSlots
from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.rotary import rotate
from rotor.tools.bench.attention import with_scales
from support import kernel_truth as truth

MIXED = CodedRow(n16=2, n12=1, n8=5, n6=6, n4=24, n2=5)
"""A latent with every width, and places left over."""

WIDE = CodedRow(n8=20, n4=250)

FORMS = {"post": POST_ROPE, "block": KeyForm(16), "long": KeyForm(64), "pre": PRE_ROPE}
"""For heads with 16 dimensions that RoPE rotates."""


def shape_of(
    kv_heads: int, heads_per_kv: int, head_dim: int, rotary_dim: int, key_norm: bool = False
) -> AttentionShape:
    return AttentionShape(1, kv_heads * heads_per_kv, kv_heads, head_dim, 64, rotary_dim, key_norm)


def layer(form: KeyForm, size: int, *latents: Row | tuple[Row, Row]) -> LayerLayout:
    """One group of `size` KV heads for each: two latents are keys' and values', one is of both."""
    groups = []
    for number, of in enumerate(latents):
        key, value = of if isinstance(of, tuple) else (of, None)
        if isinstance(key, CodedRow) and value is None:
            key = replace(key, scaled=True)
        groups.append(GroupLayout(tuple(range(number * size, (number + 1) * size)), key, value))
    return LayerLayout(tuple(groups), *form)


LAYERS = {
    "post": layer(FORMS["post"], 2, MIXED, MIXED),
    "apart": layer(FORMS["block"], 1, (MIXED, WIDE), (MIXED, WIDE)),
    "block": layer(FORMS["block"], 2, WIDE, MIXED, MIXED),
    "long": layer(FORMS["long"], 1, MIXED, MIXED),
    "pre": layer(FORMS["pre"], 2, MIXED),
    "numbers": layer(FORMS["long"], 2, (NumberRow(40), NumberRow(24)), (NumberRow(8), NumberRow(70))),
    "no rope": layer(POST_ROPE, 2, (MIXED, WIDE), (MIXED, WIDE), (WIDE, MIXED)),
}


def random_scale(layout: LayerLayout, generator: torch.Generator) -> RowScale | None:
    """Scales of latents of joint groups: of all sizes, some larger than by the length of their row."""
    if not layout.scaled:
        return None
    shift, length = torch.randn(2, layout.key_rank, generator=generator)
    return RowScale(shift, length.abs() / 300)


def rotation_table(length: int, rotary_dim: int, factor: float = 1.0, base: float = 100.0) -> tuple[Tensor, Tensor]:
    """cos and sin [length, rotary_dim] in float32, times the attention factor of some scaled RoPEs."""
    frequency = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / max(1, rotary_dim))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * torch.cat([frequency, frequency])
    return (factor * angle.cos()).float(), (factor * angle.sin()).float()


@dataclass
class Case:
    """Inputs of attention: rows [batch_size, kv_len, .], queries rotated to the last positions of kv_len."""

    parameters: AttentionParameters
    query: Tensor
    key: Tensor
    value: Tensor
    rotation: tuple[Tensor, Tensor] | None
    first: int = 0

    def to(self, device: str, dtype: torch.dtype) -> Case:
        """Numbers rounded to dtype; constants and the rotation stay in float32."""

        def moved(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, dtype if x.is_floating_point() else x.dtype)

        p = self.parameters
        constant = None if p.key_constant is None else p.key_constant.to(device)
        of_values = None if p.value_constant is None else p.value_constant.to(device)
        parameters = replace(
            p, query_basis=moved(p.query_basis), key_constant=constant, output_basis=moved(p.output_basis),
            value_constant=of_values,
        )  # fmt: skip
        rotation = None if self.rotation is None else (self.rotation[0].to(device), self.rotation[1].to(device))
        return Case(parameters, moved(self.query), moved(self.key), moved(self.value), rotation, self.first)  # type: ignore[arg-type]

    def exact(self, allowed: Tensor) -> tuple[Tensor, Tensor]:
        return truth.attention(self.query, self.key, self.value, self.parameters, allowed, self.rotation, self.first)


def random_case(
    layout: LayerLayout,
    shape: AttentionShape,
    batch_size: int,
    seq_len: int,
    kv_len: int,
    *,
    seed: int = 0,
    softcap: float | None = None,
    first: int = 0,
    factor: float = 1.0,
) -> Case:
    """Rows of random codes or numbers, bases that make keys of about unit size."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*size, generator=generator)

    rows = []
    for side, width in zip(layout.row_bytes(4), (layout.key_width, layout.value_width), strict=True):
        if layout.coded:
            made = torch.randint(0, 256, (batch_size, kv_len, side), generator=generator, dtype=torch.uint8)
            rows.append(with_scales(made, layout, generator) if side else made)
        else:
            rows.append(random(batch_size, kv_len, width if side else 0))
    constant = query_basis = rotation = None
    if layout.folds_queries(shape):
        heads = layout.group_size * shape.heads_per_kv
        query = random(batch_size, seq_len, heads * layout.key_width, scale=0.1)
    else:
        scale = (4.0 if layout.coded else 1.0) * max(group.key.width for group in layout.groups) ** 0.5
        query_basis = random(layout.group_size * shape.head_dim, layout.key_width, scale=1 / scale)
        if layout.coded:
            constant = random(shape.num_kv_heads, shape.head_dim, scale=0.5)
        query = random(batch_size, shape.num_heads, seq_len, shape.head_dim)
    if shape.rotary_dim:
        rotation = rotation_table(first + kv_len + 80, shape.rotary_dim, factor)
        start = max(0, first + kv_len - seq_len)
        query = rotate(query, *(table[start : start + seq_len] for table in rotation))
    if not layout.in_blocks:
        rotation = None
    parameters = AttentionParameters(layout, shape, shape.head_dim**-0.5, query_basis, constant, softcap)
    return Case(parameters, query, rows[0], rows[1], rotation, first)


def case_of(name: str, batch_size: int, seq_len: int, kv_len: int, heads_per_kv: int = 3, **rest: Any) -> Case:
    """A case of one of LAYERS."""
    layout = LAYERS[name]
    shape = shape_of(layout.group_size * len(layout.groups), heads_per_kv, 24, 0 if name == "no rope" else 16)
    return random_case(layout, shape, batch_size, seq_len, kv_len, **rest)


def with_values(case: Case) -> Case:
    """The case in a layer with exact tokens: with a basis and constants of values, which are of about unit size."""
    layout, shape = replace(case.parameters.layout, exact=ExactTokens(4, 20)), case.parameters.shape
    generator = torch.Generator().manual_seed(4)
    scale = (4.0 if layout.coded else 1.0) * max(group.values.width for group in layout.groups) ** 0.5
    basis = torch.randn(layout.group_size * shape.head_dim, layout.value_width, generator=generator) / scale
    constant = torch.randn(shape.num_kv_heads, shape.head_dim, generator=generator) if layout.coded else None
    return replace(
        case, parameters=replace(case.parameters, layout=layout, output_basis=basis, value_constant=constant)
    )


def exact_keys(
    case: Case, lengths: list[int], counts: list[int], starts: list[int], first: int, newest: int
) -> ExactSlots:
    """The first and the newest keys of each sequence, and those that are new in the pass, in slots of any order; what
    is in no slot, and slots of no key, are poisoned."""
    generator = torch.Generator().manual_seed(5)
    shape, slots = case.parameters.shape, first + newest + max(counts) + 3
    sides = torch.full((2, len(lengths), shape.num_kv_heads, slots, shape.head_dim), float("nan"))
    index = torch.full((len(lengths), slots), -1, dtype=torch.int32)
    until = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for s, (length, count, start) in enumerate(zip(lengths, counts, starts, strict=True)):
        old = length - count
        rows = sorted({*range(start, min(start + first, length)), *range(max(start, old + 1 - newest), length)})
        places = torch.randperm(slots, generator=generator)[: len(rows)]
        index[s, places] = torch.tensor(rows, dtype=torch.int32)
        sides[:, s, :, places] = torch.randn(2, shape.num_kv_heads, len(rows), shape.head_dim, generator=generator)
        until[s, :count] = torch.arange(count) + old + 1 - newest
    begins = torch.tensor([start + first for start in starts], dtype=torch.int32)
    key, value = sides.to(case.query.dtype)
    return ExactSlots(2 * key, value, index, begins, until)


def exact_in_pages(exact: ExactSlots, page_size: int) -> ExactSlots:
    """The same in permuted pages; what belongs to no slot is poisoned, and entries of no page are far out."""
    rows = exact.index.long() // page_size
    table = torch.full((len(rows), int(rows.max()) + 1), 1 << 30, dtype=torch.int32)
    held = torch.stack([torch.zeros_like(table).index_fill_(1, own[own >= 0], 1)[0] for own in rows]) > 0
    table[held] = torch.randperm(int(held.sum()), generator=torch.Generator().manual_seed(6)).int()
    sides = []
    for side in (exact.key, exact.value):
        pages = torch.full((int(held.sum()), page_size, side.shape[1], side.shape[3]), float("nan"), dtype=side.dtype)
        for sequence, slot in (exact.index >= 0).nonzero().tolist():
            row = int(exact.index[sequence, slot])
            pages[table[sequence, row // page_size], row % page_size] = side[sequence, :, slot]
        sides.append(pages.transpose(1, 2))
    return replace(exact, key=sides[0], value=sides[1], block_table=table)


def causal(batch_size: int, seq_len: int, kv_len: int, window: int | None = None) -> Tensor:
    """[batch_size, seq_len, kv_len]: the last seq_len of kv_len keys are the queries' own."""
    position = torch.arange(seq_len)[:, None] + kv_len - seq_len
    index = torch.arange(kv_len)
    seen = index <= position
    if window is not None:
        seen &= index > position - window
    return seen.expand(batch_size, seq_len, kv_len)


@dataclass
class Pages:
    """Rows of sequences of several lengths in permuted pages; what is behind a sequence's end is poisoned."""

    key: Tensor
    value: Tensor
    block_table: Tensor
    kv_lens: Tensor


def in_pages(case: Case, kv_lens: list[int], page_size: int, seed: int = 0) -> Pages:
    """A block table that ends where the longest sequence does, and whose other entries are of no page."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in kv_lens]
    order = torch.randperm(sum(counts) + 2, generator=generator)
    poison = 255 if case.parameters.layout.coded else float("nan")
    sides = [side.new_full((len(order), page_size, side.shape[-1]), poison) for side in (case.key, case.value)]
    table = torch.full((len(kv_lens), max(counts)), 1 << 30, dtype=torch.int32)
    taken = 0
    for sequence, (length, count) in enumerate(zip(kv_lens, counts, strict=True)):
        own = order[taken : taken + count]
        table[sequence, :count] = own.int()
        for place in range(length):
            for pages, rows in zip(sides, (case.key, case.value), strict=True):
                pages[own[place // page_size], place % page_size] = rows[sequence, place]
        taken += count
    return Pages(sides[0], sides[1], table, torch.tensor(kv_lens, dtype=torch.int32))


def packed_queries(case: Case, lengths: list[int], news: list[int], window: int | None) -> tuple[Tensor, Tensor]:
    """Queries of the last tokens of each sequence, behind each other, and exact attention of them."""
    packed, exact = [], []
    for b, (length, new) in enumerate(zip(lengths, news, strict=True)):
        at = slice(length - new, length)
        own = case.query[b : b + 1, at] if case.query.dim() == 3 else case.query[b : b + 1, :, at]
        packed.append(own[0] if own.dim() == 3 else own[0].transpose(0, 1))
        part = Case(case.parameters, own, case.key[b : b + 1, :length], case.value[b : b + 1, :length], case.rotation)
        exact.append(part.exact(causal(1, new, length, window))[0][0])
    return torch.cat(packed), torch.cat(exact)
