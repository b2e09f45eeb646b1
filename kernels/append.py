# mypy: disable-error-code="no-untyped-def"
"""New tokens of a layer into rows: rotated, projected, floored and packed, queries rotated too, in one launch.

A program makes some words of a group's row for some tokens: with what is in the four planes of each word known from a
table of digits, the columns of the basis are gathered so that a product's columns are the nibbles, plane by plane, and
where some are cut the crumbs. A channel of several digits is so computed as often; that is nothing beside reading the
basis.

Floor: bytes of the basis, keys and rows / memory bandwidth; while decoding, the basis is nearly all of it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotor.checkpoint.channels import CRUMB_BITS, SIGNED, WORD_PLANES, Channels, Digit
from rotor.checkpoint.layout import AttentionShape, LayerLayout

from .launch import device_table, launch, padded, precision
from .rotary import Rotation

KEYS, VALUES, QUERIES = 0, 1, 2
"""What a program does: make keys, or values, of a group; rotate a query head."""

FIELDS = 7
"""Of a job: what it does, first head, first place (or column), words of a group, first word (or number) in the row,
words (or numbers) that hold something, those that are written."""

COLUMNS = 64
"""Digits, or numbers of a row, that a program makes."""

NONE, WHOLE, BLOCK = 0, 1, 2
"""How keys are rotated as they are stored: not at all, by their whole position, slow planes by their place."""

EMPTY = -1

INTEGERS = [
    "tokens", "seq_len", "table_rows", "index_batch", "block", "fast", "page", "query_batch", "query_position",
    "query_head", "key_batch", "key_position", "key_head", "value_batch", "value_position", "basis_stride",
    "table_stride", "key_page", "key_row", "value_page", "value_row", "num_heads",
]  # fmt: skip
"""Not specialised on their values: a kernel is compiled once, whatever the lengths."""

ADDRESSES = [
    "query",
    "key",
    "value",
    "key_basis",
    "key_shift",
    "cos",
    "sin",
    "index",
    "slots",
    "key_rows",
    "value_rows",
]
"""Not specialised on being multiples of 16 bytes, which a view need not be: another kernel would be compiled for it,
perhaps while a CUDA graph is captured. With strides that are not known to be multiples either, nothing is lost."""


@triton.jit
def rotation_of(cos, sin, row, valid, table_stride, block, fast, MODE: tl.constexpr, HALF: tl.constexpr,
                HALF_PADDED: tl.constexpr):  # fmt: skip
    """cos and sin of some tokens by their rows in the table, [rows, HALF_PADDED] float32; MODE as of the constants."""
    plane = tl.arange(0, HALF_PADDED)
    if MODE == 2:
        row = row % block
    inside = valid[:, None] & (plane < HALF)[None, :]
    start = row.to(tl.int64)[:, None] * table_stride + plane[None, :]
    own_cos = tl.load(cos + start, mask=inside, other=1.0).to(tl.float32)
    own_sin = tl.load(sin + start, mask=inside, other=0.0).to(tl.float32)
    if MODE == 2:
        factor = tl.load(cos + plane, mask=plane < HALF, other=1.0).to(tl.float32)
        slow = (plane >= fast)[None, :]
        own_cos = tl.where(slow, own_cos / factor[None, :], 1.0)
        own_sin = tl.where(slow, own_sin / factor[None, :], 0.0)
    return own_cos, own_sin


@triton.jit
def projected(
    key, basis, shift, cos, sin, row, valid, source, head_stride, basis_stride, table_stride, block, fast, column, some,
    SIZE: tl.constexpr, MODE: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST: tl.constexpr,
    REST_PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHIFT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys of a group, as they are stored, times columns of its basis, [ROWS, COLUMNS] float32."""
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    dim = 2 * HALF + REST
    if HALF > 0:
        plane = tl.arange(0, HALF_PADDED)
        there = valid[:, None] & (plane < HALF)[None, :]
        read = (plane < HALF)[:, None] & some[None, :]
        if MODE > 0:
            own_cos, own_sin = rotation_of(cos, sin, row, valid, table_stride, block, fast, MODE, HALF, HALF_PADDED)
        for head in range(SIZE):
            start = key + (source + head * head_stride)[:, None] + plane[None, :]
            first = tl.load(start, mask=there, other=0.0).to(tl.float32)
            second = tl.load(start + HALF, mask=there, other=0.0).to(tl.float32)
            if MODE > 0:
                rotated = first * own_cos - second * own_sin
                second = second * own_cos + first * own_sin
                first = rotated
            tile = basis + (head * dim + plane[:, None]) * basis_stride + column[None, :]
            one = tl.load(tile, mask=read, other=0.0)
            two = tl.load(tile + HALF * basis_stride, mask=read, other=0.0)
            result = tl.dot(first.to(one.dtype), one, result, input_precision=PRECISION)
            result = tl.dot(second.to(two.dtype), two, result, input_precision=PRECISION)
    if REST > 0:
        place = tl.arange(0, REST_PADDED)
        there = valid[:, None] & (place < REST)[None, :]
        read = (place < REST)[:, None] & some[None, :]
        for head in range(SIZE):
            own = tl.load(
                key + (source + head * head_stride)[:, None] + 2 * HALF + place[None, :], mask=there, other=0.0
            )
            tile = basis + (head * dim + 2 * HALF + place[:, None]) * basis_stride + column[None, :]
            numbers = tl.load(tile, mask=read, other=0.0)
            result = tl.dot(own.to(numbers.dtype), numbers, result, input_precision=PRECISION)
    if SHIFT:
        result += tl.load(shift + column, mask=some, other=0.0)[None, :]
    return result


@triton.jit
def rotate_head(
    query, query_out, cos, sin, row, valid, source, target, table_stride, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    REST: tl.constexpr, REST_PADDED: tl.constexpr,
):  # fmt: skip
    """A query head of some tokens, rotated by their whole position."""
    plane = tl.arange(0, HALF_PADDED)
    there = valid[:, None] & (plane < HALF)[None, :]
    own_cos, own_sin = rotation_of(cos, sin, row, valid, table_stride, 1, 0, 1, HALF, HALF_PADDED)
    start = query + source[:, None] + plane[None, :]
    first = tl.load(start, mask=there, other=0.0).to(tl.float32)
    second = tl.load(start + HALF, mask=there, other=0.0).to(tl.float32)
    kind = query_out.dtype.element_ty
    out = query_out + target[:, None] + plane[None, :]
    tl.store(out, (first * own_cos - second * own_sin).to(kind), mask=there)
    tl.store(out + HALF, (second * own_cos + first * own_sin).to(kind), mask=there)
    if REST > 0:
        place = tl.arange(0, REST_PADDED)
        there = valid[:, None] & (place < REST)[None, :]
        own = tl.load(query + source[:, None] + 2 * HALF + place[None, :], mask=there, other=0.0)
        tl.store(query_out + target[:, None] + 2 * HALF + place[None, :], own, mask=there)


@triton.jit
def packed(latents, place, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr):
    """Latents of digits, plane by plane, into words of four nibbles, [ROWS, COLUMNS / PLANES] int32.

    Of 8 planes the first four hold nibbles and higher crumbs, the others the lower crumbs of the last four places, from
    the last one on.
    """
    known = tl.maximum(place, 0)
    half = (1 << tl.maximum((known >> 5) % 32 - 1, 0)).to(tl.float32)
    code = tl.minimum(tl.maximum(tl.floor(latents), -half[None, :]), half[None, :] - 1.0) + half[None, :]
    plane = tl.arange(0, COLUMNS) // (COLUMNS // PLANES)
    crumb = known % 2
    digit = (code.to(tl.int32) >> ((known >> 1) % 16)[None, :]) & (15 - 12 * crumb)[None, :]
    digit = tl.where((place >= 0)[None, :], digit, tl.where(plane < 4, 8, 0)[None, :])
    digit = digit << tl.where(plane < 4, 4 * plane + 2 * crumb, 28 - 4 * plane)[None, :]
    return tl.sum(tl.reshape(digit, (ROWS, PLANES, COLUMNS // PLANES)), 1)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ADDRESSES)
def append_kernel(
    query, key, value, key_basis, key_shift, cos, sin, index, slots, query_out, key_rows, value_rows, places, jobs,
    tokens, seq_len, table_rows, index_batch, block, fast, page, query_batch, query_position, query_head, key_batch,
    key_position, key_head, value_batch, value_position, basis_stride, table_stride, key_page, key_row, value_page,
    value_row, num_heads,
    SIZE: tl.constexpr, MODE: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, REST: tl.constexpr,
    REST_PADDED: tl.constexpr, CODED: tl.constexpr, FOLDED: tl.constexpr, PART: tl.constexpr, SHIFT: tl.constexpr,
    QUERY: tl.constexpr, INDEX: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FIELDS: tl.constexpr, PRECISION: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of ROWS tokens, jobs); see `append`.

    MODE: how keys are rotated. FOLDED: they come as latents. PART: `value` is added to the keys' latents.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = token < tokens
    job = jobs + tl.program_id(1) * FIELDS
    kind, head, start = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    sequence, position = (token // seq_len).to(tl.int64), (token % seq_len).to(tl.int64)
    row = token % table_rows
    if INDEX:
        row = tl.load(index + sequence * index_batch + position, mask=valid, other=0)
    done = False
    if QUERY:  # noqa: SIM102
        if kind == 2:
            rotate_head(
                query, query_out, cos, sin, row, valid,
                sequence * query_batch + position * query_position + head * query_head,
                (token.to(tl.int64) * num_heads + head) * (2 * HALF + REST), table_stride, HALF, HALF_PADDED, REST,
                REST_PADDED,
            )  # fmt: skip
            done = True
    if not done:
        words, first_word = tl.load(job + 3), tl.load(job + 4)
        held, written = tl.load(job + 5), tl.load(job + 6)
        if CODED:
            plane, word = tl.arange(0, COLUMNS) // (COLUMNS // PLANES), tl.arange(0, COLUMNS) % (COLUMNS // PLANES)
            place = tl.load(places + start + plane * words + word, mask=word < held, other=-1)
            column, some = place >> 10, place >= 0
        else:
            column = start + tl.arange(0, COLUMNS)
            some = tl.arange(0, COLUMNS) < held
            place = column
        whole = valid[:, None] & some[None, :]
        from_key = sequence * key_batch + position * key_position
        from_value = (sequence * value_batch + position * value_position)[:, None] + column[None, :]
        if kind == 0:
            if FOLDED:
                latents = tl.load(key + from_key[:, None] + column[None, :], mask=whole, other=0.0).to(tl.float32)
            else:
                latents = projected(
                    key, key_basis, key_shift, cos, sin, row, valid, from_key + head * key_head, key_head, basis_stride,
                    table_stride, block, fast, column, some, SIZE, MODE, HALF, HALF_PADDED, REST, REST_PADDED, ROWS,
                    COLUMNS, SHIFT, PRECISION,
                )  # fmt: skip
                if PART:
                    latents += tl.load(value + from_value, mask=whole, other=0.0).to(tl.float32)
        else:
            latents = tl.load(value + from_value, mask=whole, other=0.0).to(tl.float32)
        slot = token.to(tl.int64)
        stored = valid
        if SLOTS:
            slot = tl.load(slots + token, mask=valid, other=-1).to(tl.int64)
            stored = slot >= 0
            slot = tl.maximum(slot, 0)
        if CODED:
            out = first_word + tl.arange(0, COLUMNS // PLANES)
            full = tl.arange(0, COLUMNS // PLANES) < held
            result = tl.where(full[None, :], packed(latents, place, ROWS, COLUMNS, PLANES), 0)
            mask = stored[:, None] & (tl.arange(0, COLUMNS // PLANES) < written)[None, :]
        else:
            out = first_word + tl.arange(0, COLUMNS)
            result = latents
            mask = stored[:, None] & some[None, :]
        if kind == 0:
            target = (slot // page * key_page + slot % page * key_row)[:, None] + out[None, :]
            tl.store(key_rows + target, result.to(key_rows.dtype.element_ty), mask=mask)
        else:
            target = (slot // page * value_page + slot % page * value_row)[:, None] + out[None, :]
            tl.store(value_rows + target, result.to(value_rows.dtype.element_ty), mask=mask)


class Appended(NamedTuple):
    """query: rotated, [batch_size, num_heads, seq_len, head_dim], a view; None without one.

    key, value: rows, [batch_size, 1, seq_len, bytes] uint8, or of numbers [batch_size, 1, seq_len, width]; those that
    were given where `out` was.
    """

    query: Tensor | None
    key: Tensor
    value: Tensor


def append(
    key: Tensor,
    value: Tensor | None,
    layout: LayerLayout,
    shape: AttentionShape,
    *,
    query: Tensor | None = None,
    key_basis: Tensor | None = None,
    key_shift: Tensor | None = None,
    rotation: Rotation | None = None,
    index: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
) -> Appended:
    """The rows of new tokens, and their queries rotated, in one launch.

    Args:
        key: where the key basis is folded (`layout.folds_keys`), latents [batch_size, seq_len, key_rank] as k_proj puts
            them out; else keys that are normed and not rotated, [batch_size, seq_len, num_kv_heads, head_dim], heads in
            the order of the layout. Any strides with an innermost one of 1.
        value: [batch_size, seq_len, value_rank] as v_proj puts it out: the values' latents; of joint latents their part
            of the key's; None, or of no numbers, where there is none (joint and folded).
        query: not rotated, [batch_size, seq_len, num_heads, head_dim]; None for none (a model without RoPE, or an
            engine that rotates them itself).
        key_basis: [group_size * head_dim, key_rank], key_shift: [key_rank] float32; None where folded, without codes.
        rotation: cos and sin, [positions, rotary_dim] each, float32 or the model's dtype, with RoPE's attention factor;
            None in a model without RoPE, and where keys come as they are stored.
        index: integers, [seq_len] or [batch_size, seq_len]: the row of `rotation` of each token. Row 0 is at the
            beginning of a block of positions: row i is at place i mod rope_block. None: token t of sequence b has row
            b * seq_len + t, or t in a table of seq_len rows.
        out: rows to write into, in place of new ones: [batch_size, 1, seq_len, bytes] each, or with `slots` pages
            [num_pages, page_size, bytes]; of numbers in the model's dtype. The second is not read of a joint layer.
        slots: [batch_size * seq_len], integers: page * page_size + place in the page of each token; negative: none.
    """
    batch_size, seq_len = key.shape[:2]
    if value is not None and not value.shape[-1]:
        value = None
    as_it_is = out is None and not layout.coded
    plan = tables_of(layout, shape, key.dtype, query is not None, as_it_is, rotation is not None, key.device)
    rows = _new_rows(key, value, layout, shape) if out is None else out
    sides = [
        side.view(torch.int16) if layout.coded else side for side in (rows[0], rows[0] if layout.joint else rows[1])
    ]
    rotated = None if query is None else query.new_empty(query.shape)
    tokens = batch_size * seq_len
    if tokens and len(plan.jobs):
        cos, sin = (key, key) if rotation is None else rotation
        if index is not None and index.dim() == 2 and index.stride(1) != 1:
            index = index.contiguous()
        at = 1 if slots is None else 0  # rows are [batch_size, 1, seq_len, .], pages [num_pages, page_size, .]
        row_strides = [stride for side in sides for stride in (side.stride(0), side.stride(1 + at))]
        source = key if value is None else value
        asked = query if query is not None else key.unsqueeze(2)
        rows_each, warps = (16, 4) if tokens <= 512 else (64, 8)  # of a program
        grid = (triton.cdiv(tokens, rows_each), len(plan.jobs))
        launch(
            append_kernel, grid, asked, key, source, key if key_basis is None else key_basis,
            key if key_shift is None else key_shift, cos, sin, plan.jobs if index is None else index,
            plan.jobs if slots is None else slots, key if rotated is None else rotated, *sides, plan.places, plan.jobs,
            tokens, seq_len, tokens if rotation is None else len(cos),
            index.stride(0) if index is not None and index.dim() == 2 and len(index) > 1 else 0,
            layout.rope_block or 1, layout.fast_planes, seq_len if slots is None else sides[0].shape[1],
            *asked.stride()[:3], key.stride(0), key.stride(1), key.stride(2) if key.dim() == 4 else 0,
            source.stride(0), source.stride(1), 0 if key_basis is None else key_basis.stride(0), cos.stride(0),
            *row_strides, shape.num_heads, **plan.constants, PART=layout.joint and value is not None,
            SHIFT=key_shift is not None, QUERY=query is not None, INDEX=index is not None, SLOTS=slots is not None,
            ROWS=rows_each, num_warps=warps,
        )  # fmt: skip
    return Appended(None if rotated is None else rotated.transpose(1, 2), *rows)


def _new_rows(key: Tensor, value: Tensor | None, layout: LayerLayout, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """Memory for rows; of numbers what the projections put out is a row already."""
    size = key.element_size()
    unit, dtype = (1, torch.uint8) if layout.coded else (size, key.dtype)
    made = [key.new_empty(key.shape[0], 1, key.shape[1], own // unit, dtype=dtype) for own in layout.row_bytes(size)]
    if not layout.coded and layout.folds_keys(shape):
        made[0] = key.unsqueeze(1)
    if value is not None and not (layout.coded or layout.joint):
        made[1] = value.unsqueeze(1)
    return made[0], made[1]


class Plan(NamedTuple):
    """places: of each digit of the layer's key rows and then its value rows: 1024 times its column, plus 32 times its
    channel's bits, plus twice the digit's first bit, plus 1 of a crumb; EMPTY. jobs: [jobs, FIELDS].
    """

    places: Tensor
    jobs: Tensor
    constants: dict[str, int | bool | str]


@lru_cache(maxsize=4096)
def tables_of(
    layout: LayerLayout,
    shape: AttentionShape,
    dtype: torch.dtype,
    query: bool,
    as_it_is: bool,
    rotated: bool,
    device: torch.device,
) -> Plan:
    """as_it_is: what projections put out is not copied. rotated: keys are, here."""
    folded = layout.folds_keys(shape)
    planes = WORD_PLANES if layout.operands <= WORD_PLANES else 2 * WORD_PLANES
    places: list[int] = []
    jobs: list[list[int]] = []
    size, unit = dtype.itemsize, 2 if layout.coded else dtype.itemsize
    sides = [keys for keys in (True, False) if not (as_it_is and (folded or not keys)) and (keys or not layout.joint)]
    for keys in sides:
        column = 0
        for number, (group, offsets) in enumerate(zip(layout.groups, layout.byte_offsets(size), strict=True)):
            latent, dest = (group.key, offsets[0] // unit) if keys else (group.values, offsets[1] // unit)
            kind, head = (KEYS if keys else VALUES), number * layout.group_size
            if isinstance(latent, Channels):
                first, words = len(places), latent.words
                places += _digits(latent, column, planes)
                following = layout.byte_offsets(size)[number + 1 :]
                end = following[0][not keys] if following else layout.read_bytes(size)[not keys]
                written = end // unit - dest
                for word in range(0, written, COLUMNS // planes):
                    jobs.append([kind, head, first + word, words, dest + word, words - word, written - word])
            else:
                for done in range(0, latent.rank, COLUMNS):
                    left = latent.rank - done
                    jobs.append([kind, head, column + done, 0, dest + done, left, left])
            column += latent.rank
    if query:
        jobs += [[QUERIES, head] + [0] * (FIELDS - 2) for head in range(shape.num_heads)]
    half, rest = shape.rotary_planes, shape.head_dim - shape.rotary_dim
    mode = WHOLE if layout.rope_block is None else NONE if layout.fast_planes == half else BLOCK
    constants = {
        "SIZE": layout.group_size, "MODE": mode if half and rotated else NONE, "HALF": half,
        "HALF_PADDED": padded(half or 1), "REST": rest, "REST_PADDED": padded(rest or 1), "CODED": layout.coded,
        "FOLDED": folded, "COLUMNS": COLUMNS, "FIELDS": FIELDS, "PRECISION": precision(dtype), "PLANES": planes,
    }  # fmt: skip
    return Plan(device_table(places or [EMPTY], device), device_table(jobs, device), constants)


def _digits(latent: Channels, before: int, planes: int) -> list[int]:
    """Plane by plane, the highest digit of each place, and with more planes the lower crumbs of the last places."""

    def entry(digits: tuple[Digit, ...], number: int) -> int:
        if len(digits) <= number:
            return EMPTY
        channel, bit, bits = digits[number]
        return ((before + channel) * 32 + latent.bits[channel]) * 32 + 2 * bit + (bits == CRUMB_BITS)

    rows = [latent.slots[i : i + latent.words] for i in range(0, len(latent.slots), latent.words)]
    found = [(row, 0) for row in rows] + [(row, 1) for row in reversed(rows)]
    return [entry(digits, number) for row, number in found[:planes] for digits in row]


assert SIGNED == 8, "the nibble of an empty place, which `packed` writes"


def prepare(layout: LayerLayout, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> None:
    """Put a layer's tables on the device, before a CUDA graph is captured."""
    for query in (False, True):
        for as_it_is in (False, not layout.coded):
            for rotated in (False, True):
                tables_of(layout, shape, dtype, query, as_it_is, rotated, device)
