# mypy: disable-error-code="no-untyped-def"
"""Prefill: many query positions a sequence, against the packed rows of a layer that hold the new keys already.

Floor: FLOPs of the attended pairs of queries and keys, 2 (d_qk + d_v) each (and 2 qk_rank head_dim a key and KV head
for keys rebuilt in domain `pre`) / the matrix rate. One launch a class of groups, compiled for its widths as sums of
two powers of two (80 = 64 + 16).

In domain `pre` keys are rebuilt once, in memory, before the attention (`rebuild`); where there are few row blocks, or
no memory for it, by each row block for itself, in registers.

Rows of a tile are (position, query head) pairs of the heads that share keys, positions slowest, so that a chunk of few
positions still fills a tile. Rows know the range of keys that they attend to: causal, windows, padding, chunks
against an existing cache and sequences of different lengths are all ranges. The longest row blocks are launched first,
and those of a last round that would not fill the GPU in pieces, by a launch of their own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotor.format.columns import WORD_BYTES
from rotor.format.kernel_config import LayerKernels
from rotor.format.layout import LayerLayout

from ..ahead import Variant
from ..key_ranges import PrefillKeys
from ..launch import launch
from ..schedule import last_round
from ..strides import alignment_of, as_words, check_page
from ..tile_sizes import (
    HOPPER,
    Gpu,
    can_be_cut,
    gpu_of,
    pieces_of,
    prefill_constants,
    prefill_workers,
    rebuilding_pays,
    sm_count,
)
from ..tiles import (
    key_rows,
    load_basis,
    load_piece,
    load_rotation,
    marked_keys,
    numbers_of,
    rebuilt_tile,
    rotate_tile,
    scaled_logits,
)
from .rebuild import rebuild_keys, rebuild_variant

INTEGERS = [
    "batch_size", "units", "blocks", "seq_len", "query_offset", "query_batch", "query_head", "query_position",
    "key_offset", "key_block", "key_row", "value_offset", "value_block", "value_row", "output_offset", "output_batch",
    "output_position", "lse_offset", "lse_batch", "lse_head", "table_stride", "mask_batch", "mask_query",
    "rotation_stride", "basis_stride", "basis_offset", "constant_offset", "first_task",
]  # fmt: skip
"""Not specialised on their values, as in the decode kernel."""


@triton.jit
def _load_queries(base, rows, head_stride, position_stride, valid, WIDTH: tl.constexpr, PACK: tl.constexpr,
                  FIRST: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """[rows, SIZE] of the queries, columns from FIRST on of WIDTH; zeros where there is none."""
    column = FIRST + tl.arange(0, SIZE)
    offset = (rows // PACK).to(tl.int64) * position_stride + (rows % PACK) * head_stride
    return tl.load(base + offset[:, None] + column[None, :], mask=valid[:, None] & (column[None, :] < WIDTH), other=0.0)


@triton.jit(do_not_specialize=INTEGERS)
def prefill_kernel(
    query, key, value, output, lse, first_key, end_key, holes, block_table, mask, cos, sin, basis, constant, batch_size,
    units, blocks, seq_len, query_offset, query_batch, query_head, query_position, key_offset, key_block, key_row,
    value_offset, value_block, value_row, output_offset, output_batch, output_position, lse_offset, lse_batch,
    lse_head, table_stride, mask_batch, mask_query, rotation_stride, basis_stride, basis_offset, constant_offset,
    first_task, scale, softcap,
    QK: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, QK_ROW: tl.constexpr,
    V_ROW: tl.constexpr, PRE: tl.constexpr, CONSTANT: tl.constexpr, HEADS: tl.constexpr, PACK: tl.constexpr,
    HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, MASK: tl.constexpr,
    SOFT_CAP: tl.constexpr, ALIGN: tl.constexpr, KEY_ALIGN: tl.constexpr, VALUE_ALIGN: tl.constexpr,
    PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS of the ROWS * SPLIT of a task, a row block of one unit of one sequence; see `prefill_attention`. Offsets and
    strides in units of ALIGN, of the key and value rows in KEY_ALIGN and VALUE_ALIGN.

    A unit is a group, or in domain `pre` one of the HEADS KV heads of a group; PACK query heads share its keys. PRE:
    keys are rebuilt here; else `key` has them, QK columns a unit. KEYS and VALUES are the pieces of a unit (see
    `shapes.static_pieces`), QK_ROW and V_ROW its elements in the rows.
    """
    task = first_task + tl.program_id(0) // SPLIT
    row_block = blocks - 1 - task // (units * batch_size)
    unit = task // batch_size % units
    sequence = task % batch_size
    group = unit // HEADS
    rows = (row_block * SPLIT + tl.program_id(0) % SPLIT) * ROWS + tl.arange(0, ROWS)
    in_range = rows < seq_len * PACK
    place = sequence * seq_len + rows // PACK
    first = tl.load(first_key + place, mask=in_range, other=0)
    end = tl.load(end_key + place, mask=in_range, other=0)
    attends = first < end
    tile_begin = tl.min(tl.where(attends, first, 2147483647), 0) // TILE
    tile_end = (tl.max(tl.where(attends, end, 0), 0) + TILE - 1) // TILE

    # Of 64 bits: a large cache, or a long prompt, has more than 2^31 elements.
    key_block = key_block.to(tl.int64) * KEY_ALIGN
    key_row = key_row.to(tl.int64) * KEY_ALIGN
    value_block = value_block.to(tl.int64) * VALUE_ALIGN
    value_row = value_row.to(tl.int64) * VALUE_ALIGN
    head_stride = query_head.to(tl.int64) * ALIGN
    position_stride = query_position.to(tl.int64) * ALIGN
    query_base = query + sequence * (query_batch.to(tl.int64) * ALIGN)
    query_base += unit * PACK * head_stride + query_offset.to(tl.int64) * ALIGN
    # Latents are a group's, rebuilt keys a head's.
    key_base = key + (key_offset * KEY_ALIGN + (group if PRE else unit) * QK_ROW)
    value_base = value + (value_offset * VALUE_ALIGN + group * V_ROW)
    DTYPE: tl.constexpr = query.dtype.element_ty
    if PRE:
        width: tl.constexpr = 2 * HALF
        # A pad of the first half would be the second: load each by itself.
        query_0 = _load_queries(query_base, rows, head_stride, position_stride, in_range, HALF, PACK, 0, HALF_PADDED)
        query_1 = _load_queries(
            query_base + HALF, rows, head_stride, position_stride, in_range, HALF, PACK, 0, HALF_PADDED
        )
        basis_base = basis + basis_offset * ALIGN + group * QK
        basis_row = (unit % HEADS) * width
        constant_base = constant + (constant_offset + unit) * width
        frequency = tl.arange(0, HALF_PADDED)
    else:
        queries = ()
        for p in tl.static_range(len(KEYS)):
            queries += (
                _load_queries(
                    query_base + KEYS[p][1], rows, head_stride, position_stride, in_range, KEYS[p][2], PACK, 0,
                    KEYS[p][5],
                ),
            )  # fmt: skip
    if MASK:
        has_holes = tl.load(holes + place, mask=in_range, other=0) > 0
        mask_rows = mask + sequence.to(tl.int64) * mask_batch + (rows // PACK).to(tl.int64) * mask_query
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = ()
    for p in tl.static_range(len(VALUES)):
        weighted += (tl.zeros((ROWS, VALUES[p][5]), tl.float32),)

    for tile in range(tile_begin, tile_end):
        start = tile * TILE
        index = start + tl.arange(0, TILE)
        # Rows behind the last key of the tile's rows may hold anything, pages behind it may not exist.
        valid = (index < tl.max(end, 0)) & (index >= tl.min(tl.where(attends, first, 2147483647), 0))
        block, row = key_rows(index, start, valid, sequence, block_table, table_stride, PAGE, TILE)
        latents = ()
        if COLUMNS == 0:
            for p in tl.static_range(len(KEYS)):
                piece = load_piece(
                    key_base + KEYS[p][3], block, row, key_block, key_row, KEYS[p][4], valid, KEYS[p][0], KEYS[p][5],
                    DTYPE,
                )  # fmt: skip
                latents += (numbers_of(piece, KEYS[p][0], KEYS[p][5], TILE, DTYPE),)
        if PRE:
            stride = basis_stride * ALIGN
            if COLUMNS > 0:
                places = ()
                for p in tl.static_range(len(KEYS)):
                    places += ((KEYS[p][1], KEYS[p][2], KEYS[p][3], KEYS[p][4]),)
                key_0, key_1 = rebuilt_tile(
                    key_base, block, row, key_block, key_row, valid, places, basis_base, stride, basis_row, HALF, KEYS,
                    HALF, HALF_PADDED, COLUMNS, TILE, ALIGN, KEY_ALIGN, DTYPE, PRECISION,
                )  # fmt: skip
            else:
                key_0 = tl.zeros((TILE, HALF_PADDED), tl.float32)
                key_1 = tl.zeros((TILE, HALF_PADDED), tl.float32)
                for p in tl.static_range(len(KEYS)):
                    columns = basis_base + KEYS[p][1]
                    basis_0 = load_basis(columns, stride, basis_row, HALF, KEYS[p][2], 0, KEYS[p][5], HALF_PADDED)
                    basis_1 = load_basis(
                        columns, stride, basis_row + HALF, HALF, KEYS[p][2], 0, KEYS[p][5], HALF_PADDED
                    )
                    key_0 = tl.dot(latents[p], basis_0, key_0, input_precision=PRECISION)
                    key_1 = tl.dot(latents[p], basis_1, key_1, input_precision=PRECISION)
            if CONSTANT:
                some = frequency < HALF
                key_0 += tl.load(constant_base + frequency, mask=some, other=0.0).to(tl.float32)[None, :]
                key_1 += tl.load(constant_base + HALF + frequency, mask=some, other=0.0).to(tl.float32)[None, :]
            turn = (start + tl.zeros((), tl.int64)) * (rotation_stride * ALIGN)
            place_in_tile = tl.arange(0, TILE)
            tile_cos, tile_sin = load_rotation(
                cos + turn, sin + turn, place_in_tile, valid, rotation_stride * ALIGN, 0, HALF, HALF_PADDED
            )
            key_0, key_1 = rotate_tile(key_0, key_1, tile_cos, tile_sin)
            scores = tl.dot(query_0, tl.trans(key_0.to(query_0.dtype)), input_precision=PRECISION)
            scores = tl.dot(query_1, tl.trans(key_1.to(query_0.dtype)), scores, input_precision=PRECISION)
        else:
            scores = tl.zeros((ROWS, TILE), tl.float32)
            for p in tl.static_range(len(KEYS)):
                scores = tl.dot(queries[p], tl.trans(latents[p]), scores, input_precision=PRECISION)
        scores = scaled_logits(scores, scale, softcap, SOFT_CAP)
        attended = (index[None, :] >= first[:, None]) & (index[None, :] < end[:, None])
        if MASK:
            attended = attended & marked_keys(mask_rows, start, has_holes, TILE)
        scores = tl.where(attended, scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(largest - reference)
        total = total * shrink + tl.sum(weight, 1)
        largest = new_largest
        weight = weight.to(DTYPE)
        added = ()
        for p in tl.static_range(len(VALUES)):
            piece = load_piece(
                value_base + VALUES[p][3], block, row, value_block, value_row, VALUES[p][4], valid, VALUES[p][0],
                VALUES[p][5], DTYPE,
            )  # fmt: skip
            values = numbers_of(piece, VALUES[p][0], VALUES[p][5], TILE, DTYPE)
            added += (tl.dot(weight, values, weighted[p] * shrink[:, None], input_precision=PRECISION),)
        weighted = added

    safe_total = tl.where(total == 0.0, 1.0, total)
    head = unit * PACK + rows % PACK
    natural = (largest + tl.log2(safe_total)) * 0.6931471805599453
    lse_place = lse + sequence.to(tl.int64) * lse_batch + (lse_offset + head).to(tl.int64) * lse_head + rows // PACK
    tl.store(lse_place, natural, mask=in_range)
    offset = sequence * (output_batch.to(tl.int64) * ALIGN) + rows // PACK * (output_position.to(tl.int64) * ALIGN)
    out = output + (offset + output_offset * ALIGN + head * V)[:, None]
    for p in tl.static_range(len(VALUES)):
        column = tl.arange(0, VALUES[p][5])[None, :]
        some = in_range[:, None] & (column < VALUES[p][2])
        result = (weighted[p] / safe_total[:, None]).to(output.dtype.element_ty)
        tl.store(out + VALUES[p][1] + column, result, mask=some)


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: LayerLayout,
    keys: PrefillKeys,
    heads_per_kv: int,
    scaling: float,
    *,
    query_basis: Tensor | None = None,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    constant_key: Tensor | None = None,
    block_table: Tensor | None = None,
    softcap: float | None = None,
    rebuilt: bool | None = None,
    kernels: LayerKernels | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of several query positions of each sequence over a layer's packed rows.

    Args:
        query: domain `pre`: [batch_size, num_heads, seq_len, head_dim], rotated; else [batch_size, seq_len, width],
            projected, the rows of a group beside each other. The innermost stride is 1.
        key, value: packed rows, [batch_size, kv_len, qk_width] and [batch_size, kv_len, v_width], or rows of codes
            [batch_size, kv_len, bytes], uint8; with a block table [num_pages, page_size, .]. They hold the new keys.
        keys: which keys each query attends to.
        query_basis, key_rotation: domain `pre`: [group_size * head_dim, qk_width], and cos and sin by index in the
            cache, [at least kv_len, head_dim].
        constant_key, block_table, softcap: as in `decode_attention`.
        rebuilt: domain `pre`, contiguous: whether keys are rebuilt in memory first; by default where that pays.
        kernels: the classes, one launch each, and their blocks; by default by rule.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank] in query's dtype, and the natural log-sum-exp of the
        logits [batch_size, num_heads, seq_len], float32. Queries without keys give zeros and minus infinity.
    """
    pre, head_dim = layout.domain == "pre", query.shape[-1]
    batch_size, seq_len = keys.first.shape
    if rebuilt is None:
        tokens = key.shape[0] * key.shape[1]
        rebuilt = block_table is None and rebuilding_pays(
            layout, heads_per_kv, head_dim, seq_len, tokens, query.element_size()
        )
    page = check_page(key, block_table)
    if layout.coded:
        key, value = as_words(key), as_words(value)
    if rebuilt:
        assert query_basis is not None
        assert key_rotation is not None
        first, end = keys.union
        key = rebuild_keys(key, layout, query_basis, key_rotation, first, end, constant_key)
    group_rows = layout.group_size * heads_per_kv
    num_heads = group_rows * len(layout.groups)
    output = torch.empty(batch_size, seq_len, group_rows * layout.v_width, dtype=query.dtype, device=query.device)
    lse = torch.empty(batch_size, num_heads, seq_len, dtype=torch.float32, device=query.device)
    cos, sin = key_rotation if key_rotation is not None else (query, query)
    basis = query if query_basis is None else query_basis
    constant = lse if constant_key is None else constant_key
    empty = keys.first
    for cls, constants in prefill_constants(
        layout, heads_per_kv, query.element_size(), head_dim, rebuilt, gpu_of(query.device), kernels
    ):
        units = cls.count * constants["HEADS"]
        if pre:
            strides = [cls.start * group_rows * query.stride(1), query.stride(0), query.stride(1), query.stride(2)]
        else:
            strides = [group_rows * cls.qk_offset, query.stride(0), cls.qk_rank, query.stride(1)]
        strides += [group_rows * cls.v_offset, output.stride(0), output.stride(1)]
        strides += [cos.stride(0), basis.stride(0), cls.qk_offset] if constants["PRE"] else [0, 0, 0]
        places = row_places(layout, cls.start, query.element_size(), head_dim if rebuilt else 0)
        key_strides, value_strides = [places[0], *key.stride()[:2]], [places[1], *value.stride()[:2]]
        align, key_align, value_align = prefill_alignment(constants, strides, key_strides, value_strides)
        blocks = triton.cdiv(seq_len * constants["PACK"], constants["ROWS"])
        arguments: list[Any] = [
            query, key, value, output, lse, keys.first, keys.end, empty if keys.holes is None else keys.holes,
            empty if block_table is None else block_table, lse if keys.mask is None else keys.mask, cos, sin, basis,
            constant, batch_size, units, blocks, seq_len, *(stride // align for stride in strides[:4]),
            *(stride // key_align for stride in key_strides), *(stride // value_align for stride in value_strides),
            *(stride // align for stride in strides[4:7]), cls.start * group_rows, lse.stride(0), lse.stride(1),
            0 if block_table is None else block_table.stride(0),
            *((0, 0) if keys.mask is None else (keys.mask.stride(0), keys.mask.stride(1))),
            *(stride // align for stride in strides[7:]), cls.start * layout.group_size,
        ]  # fmt: skip
        real = scaling, 1.0 if softcap is None else softcap
        flags = {"PAGE": page, "MASK": keys.mask is not None, "SOFT_CAP": softcap is not None, "ALIGN": align}
        flags |= {"KEY_ALIGN": key_align, "VALUE_ALIGN": value_align}
        flags["CONSTANT"] = constants["PRE"] and constant_key is not None
        tasks, workers = blocks * units * batch_size, prefill_workers(constants, sm_count(query.device))
        whole, cut = tasks, False
        if can_be_cut(constants):
            rows, pack = constants["ROWS"], constants["PACK"]
            whole, cut = last_round(seq_len, keys.past, rows, pack, units * batch_size, workers)
        if whole:
            launch(prefill_kernel, (whole,), *arguments, 0, *real, **constants, **flags)
        if cut:
            pieces = pieces_of(constants)
            grid = ((tasks - whole) * pieces["SPLIT"],)
            launch(prefill_kernel, grid, *arguments, whole, *real, **pieces, **flags)
    return output, lse


def row_elements(layout: LayerLayout, element_bytes: int) -> tuple[int, int]:
    """Elements of the key and value rows of a layer: numbers, or words of codes."""
    if not layout.coded:
        return layout.qk_width, layout.v_width
    qk_bytes, v_bytes = layout.row_bytes(element_bytes)
    return qk_bytes // WORD_BYTES, v_bytes // WORD_BYTES


def row_places(layout: LayerLayout, group: int, element_bytes: int, rebuilt_dim: int = 0) -> tuple[int, int]:
    """Elements before a group in the key and value rows; of keys that were rebuilt, heads of rebuilt_dim numbers."""
    if layout.coded:
        qk_byte, v_byte = layout.byte_offsets(element_bytes)[group]
        place = qk_byte // WORD_BYTES, v_byte // WORD_BYTES
    else:
        place = layout.offsets()[group]
    return (group * layout.group_size * rebuilt_dim, place[1]) if rebuilt_dim else place


def prefill_alignment(
    constants: dict[str, Any], strides: list[int], key_strides: list[int], value_strides: list[int]
) -> tuple[int, int, int]:
    """ALIGN, KEY_ALIGN and VALUE_ALIGN: what divides widths and strides of queries, bases and outputs, and those of the
    rows. In rows of the model's dtype all are one, so that fewer kernels are compiled.
    """
    counts = [piece[2] for name in ("KEYS", "VALUES") for piece in constants[name]]
    keys = alignment_of(*key_strides, constants["QK_ROW"], *(piece[4] for piece in constants["KEYS"]))
    values = alignment_of(*value_strides, constants["V_ROW"], *(piece[4] for piece in constants["VALUES"]))
    both = alignment_of(*strides, constants["QK"], constants["V"])
    if constants["VALUES"][0][0] == 0:
        return (math.gcd(both, keys, values),) * 3
    return math.gcd(both, *counts), keys, min(values, 4)


def prefill_variants(
    layout: LayerLayout,
    heads_per_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    page: int = 0,
    mask: bool = False,
    softcap: bool = False,
    gpu: Gpu = HOPPER,
    kernels: LayerKernels | None = None,
) -> list[Variant]:
    """What `prefill_attention` compiles for a layer whose widths and strides are multiples of 8 elements."""
    pointers = {
        **dict.fromkeys(("query", "output", "basis"), dtype),
        **dict.fromkeys(("cos", "sin"), torch.float32 if layout.domain == "pre" else dtype),
        **dict.fromkeys(("first_key", "end_key", "holes", "block_table"), torch.int32),
        **dict.fromkeys(("lse", "constant"), torch.float32),
        "mask": torch.int64 if mask else torch.float32,
    }
    groups = len(layout.groups)
    row_widths = row_elements(layout, dtype.itemsize)
    once = layout.domain == "pre" and page == 0
    variants = [rebuild_variant(layout, head_dim, dtype)] if once else []
    for rebuilt in (True, False) if once else (False,):
        for cls, constants in prefill_constants(layout, heads_per_kv, dtype.itemsize, head_dim, rebuilt, gpu, kernels):
            places = [list(row_places(layout, g, dtype.itemsize, head_dim if rebuilt else 0)) for g in range(groups)]
            widths = [head_dim if rebuilt else row_widths[0], row_widths[1]]
            align, key_align, value_align = prefill_alignment(
                constants,
                [cls.qk_offset, cls.v_offset],
                *([place[side] for place in places] + [widths[side]] for side in (0, 1)),
            )
            flags = {"PAGE": page, "MASK": mask, "SOFT_CAP": softcap, "ALIGN": align}
            flags |= {"KEY_ALIGN": key_align, "VALUE_ALIGN": value_align}
            flags["CONSTANT"] = constants["PRE"] and layout.coded
            row = torch.int32 if layout.coded else dtype
            pointers |= {"key": dtype if rebuilt else row, "value": row}
            keys = f"{cls.qk_rank} rebuilt" if rebuilt else str(cls.qk_rank)
            name = f"prefill {layout.domain} {constants['HEADS']}x{constants['PACK']} rows {keys}+{cls.v_rank}"
            for shape in (constants, pieces_of(constants)) if can_be_cut(constants) else (constants,):
                options = {option: shape[option] for option in ("num_warps", "num_stages")}
                fixed = {k: v for k, v in shape.items() if k not in options} | flags
                pieces = ", pieces" if shape["SPLIT"] > 1 else ""
                variants.append(
                    Variant(name + pieces, prefill_kernel, dict(pointers), fixed, ("scale", "softcap"), options)
                )
    return variants
