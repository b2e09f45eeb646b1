# mypy: disable-error-code="no-untyped-def"
"""Expand rows of the cache into keys and values in the model's dtype, for stock attention.

This serves prompts, and decoding of layers with keys before RoPE.

Lower bound of the time: reading the rows once and writing keys and values once, at memory bandwidth. The basis comes
from the L2 cache, once for each block of keys and KV head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotor.checkpoint.layout import AttentionShape, GroupClass, LayerLayout
from rotor.checkpoint.rows import SCALE_MIDDLE, SCALE_STEPS

from .launch import launch, padded, precision
from .parameters import AttentionParameters, as_loaded
from .rotary import Rotation, beginnings_of

KEYS = 64
"""Keys that a program expands."""

INTEGERS = [
    "kv_len", "first", "block", "table_stride", "table_blocks", "table_pages", "page", "key_batch", "key_row",
    "value_batch", "value_row", "basis_stride", "key_start", "key_group", "value_start", "value_group", "key_words",
    "value_words", "first_head", "first_column", "keys_batch", "keys_token", "keys_head", "keys_width", "values_batch",
    "values_token", "values_head", "values_width",
]  # fmt: skip
"""Integer arguments that the kernel is not specialised on, as in the append kernel."""

ADDRESSES = ["key", "value", "basis", "constant", "cos", "sin", "block_table", "kv_lens", "kv_start", "keys", "values"]
"""Pointers that the kernel is not specialised on being multiples of 16 bytes, which a view of a cache may not be."""


@triton.jit
def lane_of(words, word, LANE: tl.constexpr, CODED: tl.constexpr, SCALED: tl.constexpr, kind: tl.constexpr):
    """Extract signed nibbles of a lane, or lower crumbs, as an operand of attention; numbers stay as they are.

    word: which words these are. SCALED: the first one has the scale, whose nibble is read as 1.
    """
    if not CODED:
        return words.to(kind)
    elif LANE >= 4:
        return (((words.to(tl.int32) >> (28 - 4 * LANE)) & 3) - 8).to(kind)
    else:
        nibble = ((words.to(tl.int32) >> (4 * LANE)) & 15) - 8
        if LANE == 0 and SCALED:
            nibble = tl.where((word == 0)[None, :], 1, nibble)
        return nibble.to(kind)


@triton.jit
def scales_of(rows, place, there, first, SCALED: tl.constexpr, MIDDLE: tl.constexpr, STEPS: tl.constexpr):
    """The scales of some keys of a group, [KEYS, 1] float32; 1 for rows without one.

    Loaded in this shape: Triton 3.6 fails to compile one that is made of [KEYS].
    """
    if not SCALED:
        return tl.full((place.shape[0], 1), 1.0, tl.float32)
    else:
        nibble = tl.load(rows + (place + first)[:, None], mask=there[:, None], other=0).to(tl.int32) & 15
        return tl.exp2((nibble - MIDDLE).to(tl.float32) / STEPS)


@triton.jit
def copy_latents(
    rows, place, there, scales, first, words, out, target, width, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    CODED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Copy a group's signed nibbles (or numbers) of some keys, times scales, and fill up to `width` with zeros."""
    kind: tl.constexpr = out.dtype.element_ty
    column = tl.arange(0, BLOCK)
    lanes: tl.constexpr = CODED if CODED else 1
    # A word is loaded once and gives all of its lanes, which lie side by side in what is written.
    for start in range(0, words, BLOCK):
        held = there[:, None] & (start + column < words)[None, :]
        tile = tl.load(rows + (place + first + start)[:, None] + column[None, :], mask=held, other=0)
        for lane in tl.static_range(lanes):
            to = out + (target + lane * words + start)[:, None] + column[None, :]
            latents = lane_of(tile, start + column, lane, CODED, SCALED, kind)
            if SCALED:
                latents = (latents.to(tl.float32) * scales).to(kind)
            tl.store(to, latents, mask=held)
    # Zeros up to the width that stock attention wants of keys and values alike.
    for start in range(lanes * words, width, BLOCK):
        held = there[:, None] & (start + column < width)[None, :]
        tl.store(out + (target + start)[:, None] + column[None, :], tl.zeros((KEYS, BLOCK), kind), mask=held)


@triton.jit
def rebuilt(
    tile, basis, basis_stride, dim, latent_column, held, result, D: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to `result` the product of latents [KEYS, BLOCK] with the rows dim ... dim + D - 1 of their basis columns."""
    out = tl.arange(0, PADDED)
    start = basis + (dim + out[None, :]) * basis_stride + latent_column[:, None]
    numbers = tl.load(start, mask=held[:, None] & (out < D)[None, :], other=0.0)
    return tl.dot(tile, numbers, result, input_precision=PRECISION)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ADDRESSES)
def expand_kernel(
    key, value, basis, constant, cos, sin, block_table, kv_lens, kv_start, keys, values, kv_len, first, block,
    table_stride, table_blocks, table_pages, page, key_batch, key_row, value_batch, value_row, basis_stride, key_start,
    key_group, value_start, value_group, key_words, value_words, first_head, first_column, keys_batch, keys_token,
    keys_head, keys_width, values_batch, values_token, values_head, values_width,
    SIZE: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    LATENTS: tl.constexpr, CONSTANT: tl.constexpr, CODED: tl.constexpr, PAGED: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, SCALED: tl.constexpr, MIDDLE: tl.constexpr,
    STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Expand KEYS keys of one KV head, or the values of a group; see `expand`.

    Grid: blocks of KEYS keys, groups x (KV heads + 1 for values), sequences.

    CODED: operands of a word, 0 for numbers. LATENTS: keys stay latents (a model without RoPE). HALF: rotary planes, 0
    if stored keys are not rotated when they are read. REST: dimensions without RoPE. PAGED: rows are in pages.
    SCALED: the lowest nibble of a group's row is its scale. MIDDLE, STEPS: the nibble of a scale of 1, and nibbles by
    which it doubles.
    """
    sequence = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) % (SIZE + 1)
    group = tl.program_id(1) // (SIZE + 1)
    index = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    target = sequence
    if PAGED:
        kv_len = tl.load(kv_lens + sequence)
        target = tl.load(kv_start + sequence).to(tl.int64)
    there = index < kv_len
    # Where the rows of these keys begin, in a cache of sequences or in pages.
    row = index.to(tl.int64)
    key_place, value_place = sequence * key_batch + row * key_row, sequence * value_batch + row * value_row
    if PAGED:
        unit = tl.load(block_table + sequence * table_pages + index // page, mask=there, other=0).to(tl.int64)
        row = (index % page).to(tl.int64)
        key_place, value_place = unit * key_batch + row * key_row, unit * value_batch + row * value_row
    kind: tl.constexpr = keys.dtype.element_ty
    # Sequences of a batch differ in length; programs behind the end of a shorter one have nothing to do.
    if tl.program_id(0) * KEYS < kv_len:
        scales = scales_of(key, key_place, there, key_start + group * key_group, SCALED, MIDDLE, STEPS)
        if head == SIZE:
            begin = target * values_batch + index.to(tl.int64) * values_token + group * values_head
            copy_latents(
                value, value_place, there, scales, value_start + group * value_group, value_words, values, begin,
                values_width, KEYS, VALUE_BLOCK, CODED, SCALED,
            )  # fmt: skip
        elif LATENTS:
            begin = target * keys_batch + index.to(tl.int64) * keys_token + group * keys_head
            copy_latents(
                key, key_place, there, scales, key_start + group * key_group, key_words, keys, begin, keys_width, KEYS,
                BLOCK, CODED, SCALED,
            )  # fmt: skip
        else:
            # A key: latents times the rows of the basis, for both halves of the rotary planes and for the rest.
            lanes: tl.constexpr = CODED if CODED else 1
            dim: tl.constexpr = 2 * HALF + REST
            word = tl.arange(0, BLOCK)
            own = basis + head * dim * basis_stride + first_column + group * lanes * key_words
            one = tl.zeros((KEYS, HALF_PADDED), tl.float32)
            two = tl.zeros((KEYS, HALF_PADDED), tl.float32)
            rest = tl.zeros((KEYS, REST_PADDED), tl.float32)
            for start in range(0, key_words, BLOCK):
                within = start + word < key_words
                place = (key_place + key_start + group * key_group + start)[:, None] + word[None, :]
                tile = tl.load(key + place, mask=there[:, None] & within[None, :], other=0)
                for lane in tl.static_range(lanes):
                    latents = lane_of(tile, start + word, lane, CODED, SCALED, kind)
                    at = lane * key_words + start + word
                    if HALF > 0:
                        one = rebuilt(latents, own, basis_stride, 0, at, within, one, HALF, HALF_PADDED, PRECISION)
                        two = rebuilt(latents, own, basis_stride, HALF, at, within, two, HALF, HALF_PADDED, PRECISION)
                    if REST > 0:
                        rest = rebuilt(
                            latents, own, basis_stride, 2 * HALF, at, within, rest, REST, REST_PADDED, PRECISION
                        )
            kv_head = group * SIZE + head
            out = keys + (target * keys_batch + index.to(tl.int64) * keys_token + kv_head * keys_head)[:, None]
            added = constant + (first_head + kv_head) * dim
            if HALF > 0:
                plane = tl.arange(0, HALF_PADDED)
                if SCALED:
                    one, two = one * scales, two * scales
                if CONSTANT:
                    one += tl.load(added + plane, mask=plane < HALF, other=0.0)[None, :]
                    two += tl.load(added + HALF + plane, mask=plane < HALF, other=0.0)[None, :]
                # Keys are rotated by the beginning of their block: they were stored rotated within it.
                own_block = (first + index) // block + tl.program_id(2) * table_blocks
                held = there[:, None] & (plane < HALF)[None, :]
                place = own_block.to(tl.int64)[:, None] * table_stride + plane[None, :]
                own_cos = tl.load(cos + place, mask=held, other=1.0).to(tl.float32)
                own_sin = tl.load(sin + place, mask=held, other=0.0).to(tl.float32)
                tl.store(out + plane[None, :], (one * own_cos - two * own_sin).to(kind), mask=held)
                tl.store(out + HALF + plane[None, :], (two * own_cos + one * own_sin).to(kind), mask=held)
            if REST > 0:
                place = tl.arange(0, REST_PADDED)
                if SCALED:
                    rest = rest * scales
                if CONSTANT:
                    rest += tl.load(added + 2 * HALF + place, mask=place < REST, other=0.0)[None, :]
                held = there[:, None] & (place < REST)[None, :]
                tl.store(out + 2 * HALF + place[None, :], rest.to(kind), mask=held)
            # Zeros behind the key's numbers, up to keys_width.
            for start in range(dim, keys_width, 16):
                behind = start + tl.arange(0, 16)
                empty = there[:, None] & (behind < keys_width)[None, :]
                tl.store(out + behind[None, :], tl.zeros((KEYS, 16), kind), mask=empty)


class PagesOf(NamedTuple):
    """Pages with the rows of packed sequences.

    block_table: [batch_size, pages], int32; only entries of pages that a sequence uses are read.
    kv_lens: [batch_size], int32, rows of each sequence.
    kv_start: [batch_size + 1], int32, first key of each sequence among all.
    tokens, longest: upper bounds, known to the host, of the rows of all sequences and of the longest one.
    """

    block_table: Tensor
    kv_lens: Tensor
    kv_start: Tensor
    tokens: int
    longest: int


def expand(
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    cls: GroupClass,
    dtype: torch.dtype,
    rotation: Rotation | None = None,
    *,
    first: int = 0,
    pages: PagesOf | None = None,
    least: int = 0,
    latents: bool = False,
) -> tuple[Tensor, Tensor]:
    """Expand the rows of a class of groups into keys after RoPE, and values.

    Args:
        key, value: rows, [batch_size, kv_len, bytes] uint8 each (views of any strides), or with `pages`
            [num_pages, page_size, bytes]; rows of numbers are in `dtype`. Values of joint latents are read from `key`.
        dtype: dtype of the model, in which keys and values are returned.
        rotation: for layers in blocks, cos and sin by index, [positions, rotary_dim]; row 0 is the start of a block.
            Or of the beginnings of blocks, of each sequence, [batch_size or 1, blocks, rotary_dim].
        first: positions from the first of `rotation` to the first row.
        least: minimum width of keys and values, filled with zeros, because some attention functions need equal widths.
        latents: keys stay as they are stored (see `AttentionParameters.meets_latents`), as in a model without RoPE.
    Returns:
        [batch_size, count * group_size, kv_len, head_dim] and [batch_size, count, kv_len, width]; keys that stay
        latents are [batch_size, count, kv_len, width]. With pages [tokens, count * group_size, head_dim]
        and [tokens, count, width].
    """
    layout, shape = parameters.layout, parameters.shape
    value = parameters.value_rows(key, value)
    latents = latents or parameters.query_basis is None
    size = 1 if latents else layout.group_size
    heads = cls.count * size
    widths = max(least, cls.key.width if latents else shape.head_dim), max(least, cls.value.width)
    if pages is None:
        batch_size, kv_len = key.shape[:2]
        keys = torch.empty(batch_size, heads, kv_len, widths[0], dtype=dtype, device=key.device)
        values = torch.empty(batch_size, cls.count, kv_len, widths[1], dtype=dtype, device=key.device)
        strides = [side.stride(place) for side in (keys, values) for place in (0, 2, 1)]
    else:
        batch_size, kv_len = len(pages.kv_lens), pages.longest
        keys = torch.empty(pages.tokens, heads, widths[0], dtype=dtype, device=key.device)
        values = torch.empty(pages.tokens, cls.count, widths[1], dtype=dtype, device=key.device)
        strides = [side.stride(place) for side in (keys, values) for place in (0, 0, 1)]
    if not (batch_size and kv_len):
        return keys, values
    rows = [as_loaded(side, layout) for side in (key, value)]
    unit, lanes = layout.word_bytes(dtype.itemsize), layout.operands
    starts = [byte // unit for byte in (cls.key_byte, cls.key_stride, cls.value_byte, cls.value_stride)]
    words = cls.key.width // lanes, cls.value.width // lanes
    basis, constant = parameters.query_basis, parameters.key_constant
    rotates = layout.in_blocks and not latents
    assert not rotates or rotation is not None
    cos, sin = keys, keys  # stands for a table that is not read
    if rotates and rotation is not None:
        cos, sin = (beginnings_of(table, layout.rope_block) for table in rotation)
    launch(
        expand_kernel, (triton.cdiv(kv_len, KEYS), cls.count * (size + 1), batch_size), *rows,
        keys if basis is None else basis, keys if constant is None else constant, cos, sin,
        *((keys, keys, keys) if pages is None else pages[:3]), keys, values, kv_len, first, layout.rope_block or 1,
        cos.stride(-2), cos.shape[1] if cos.dim() == 3 and len(cos) > 1 else 0,
        0 if pages is None else pages.block_table.stride(0),
        1 if pages is None else key.shape[1], rows[0].stride(0), rows[0].stride(1), rows[1].stride(0),
        rows[1].stride(1), 0 if basis is None else basis.stride(0), *starts, *words, cls.start * layout.group_size,
        cls.key_column, *strides[:3], widths[0], *strides[3:], widths[1],
        **constants_of(layout, shape, cls, dtype, pages is not None, latents),
    )  # fmt: skip
    return keys, values


def constants_of(
    layout: LayerLayout, shape: AttentionShape, cls: GroupClass, dtype: torch.dtype, paged: bool, latents: bool
) -> dict[str, object]:
    """Constexpr arguments of the kernel for a class of groups."""
    lanes = layout.operands
    half = shape.rotary_planes if layout.in_blocks else 0
    rest = shape.head_dim - 2 * half
    return {
        "SIZE": 1 if latents else layout.group_size, "HALF": half, "HALF_PADDED": padded(half or 1), "REST": rest,
        "REST_PADDED": padded(rest or 1), "LATENTS": latents, "CONSTANT": layout.coded and not latents,
        "CODED": layout.word_operands, "PAGED": paged, "KEYS": KEYS, "BLOCK": min(64, padded(cls.key.width // lanes)),
        "VALUE_BLOCK": min(64, padded(cls.value.width // lanes)),
        "SCALED": layout.scaled, "MIDDLE": SCALE_MIDDLE,
        "STEPS": SCALE_STEPS, "PRECISION": precision(dtype), "num_warps": 8, "num_stages": 1,
    }  # fmt: skip
