# mypy: disable-error-code="no-untyped-def"
"""Decoding: up to 64 query rows of a group (query heads times new tokens) against the rows of a layer's cache.

Keys are the long side of the matrix products (16 keys by 8 query rows), so that a group with few query heads wastes
little. A program is one or two warps. A tile has the keys of one block of positions (or of a part of it), so it needs
one absorbed query per query row: `absorb` has multiplied the query's slow planes with the basis, and has collected the
constant parts of the logits. Fast planes of keys are rebuilt in the tile: latents times `fast_basis`, plus a constant,
rotated by the position in the block (a table), rounded, and multiplied with the query's fast planes, which `absorb` has
rotated back to the beginning of the block.

A nibble or crumb n is read as 128 + n (bfloat16) or 1024 + n (float16), which takes one or two instructions for two of
them. This offset, and the 8 that makes nibbles signed, is subtracted from the logits with the constants, and from the
weighted values after each tile. Left in the sums it would grow with the length, and so would the rounding error of
tensor cores. The rows of the next tile are loaded while this one is computed. Logits are exponents of 2.

Each program works through its slice of the line of tiles (see `ranges`) and writes one partial result for each
(sequence, group) in the slice; `join` combines them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ranges import count_tiles, sequence_at, slice_start, slices, tiles_of

NEG_INF = tl.constexpr(-1e30)
"""Logit of a masked key, and log-sum-exp of a slice without attended keys. It is finite, so that no sum or product with
it is infinite. Masked logits are scaled and shifted like others, often in a fused operation; compare them with UNSEEN,
not with this value."""

UNSEEN = tl.constexpr(-1e20)
"""Largest logit before any key is attended: far above every masked logit, however scaled, so that masked keys have
weight 0; and far below every other logit."""


@triton.jit
def operands(tile, CODED: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Unpack a tile of rows into the operands of matrix products.

    Words give CODED operands: their four planes of nibbles, then the lower crumbs of the last planes. A tile of numbers
    is its only operand.
    """
    unpacked = ()
    if CODED:
        tile = tile.to(tl.uint16, bitcast=True)
        for j in tl.static_range(CODED):
            unpacked += (digit(tile, 4 * j if j < 4 else 28 - 4 * j, 15 if j < 4 else 3, DTYPE, ASM),)
        if tl.float32 != DTYPE:
            unpacked = as_numbers(unpacked, CODED, DTYPE)
    else:
        unpacked += (tile,)
    return unpacked


@triton.jit
def as_numbers(digits, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """Reinterpret 16-bit words as numbers of DTYPE."""
    numbers = ()
    for j in tl.static_range(COUNT):
        numbers += (digits[j].to(DTYPE, bitcast=True),)
    return numbers


@triton.jit
def digit(words, SHIFT: tl.constexpr, MASK: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Extract (words >> SHIFT) & MASK: minus 8 in float32, else as the bits of that digit plus 128 or 1024.

    At 128 (bfloat16) and 1024 (float16) the last bit of the mantissa counts ones, so the digit is just put there.
    """
    if tl.float32 == DTYPE:
        return (((words >> SHIFT) & MASK).to(tl.int32) - 8).to(tl.float32)
    elif not ASM:
        ONES: tl.constexpr = 0x6400 if tl.float16 == DTYPE else 0x4300
        return (((words >> SHIFT) & MASK) | ONES).to(tl.uint16)
    else:
        shift: tl.constexpr = "12" if SHIFT == 12 else "8" if SHIFT == 8 else "4" if SHIFT == 4 else "0"
        both: tl.constexpr = "0x000F000F, " if MASK == 15 else "0x00030003, "
        ones: tl.constexpr = "0x64006400" if tl.float16 == DTYPE else "0x43004300"
        text: tl.constexpr = "{ .reg .b32 t; shr.u32 t, $1, " + shift + "; lop3.b32 $0, t, " + both + ones + ", 0xEA; }"
        return tl.inline_asm_elementwise(text, "=r,r", [words], dtype=tl.uint16, is_pure=True, pack=2)


@triton.jit
def opaque_copy(tile, zero, ASM: tl.constexpr):
    """Copy a tile opaquely (`tile | zero`), so that the compiler unpacks it again instead of keeping registers."""
    if not ASM:
        return tile
    zero = tl.zeros(tile.shape, tl.int32) + zero
    return tl.inline_asm_elementwise("or.b32 $0, $1, $2;", "=r,r,r,r", [tile, zero], dtype=tl.int16, is_pure=True, pack=2)  # fmt: skip  # noqa: E501


@triton.jit
def rotated(k0, k1, cos, sin, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Round and rotate both halves of rebuilt planes: k0 cos - k1 sin, k1 cos + k0 sin, in pairs of 16 bits."""
    if tl.float32 == DTYPE:
        return k0 * cos - k1 * sin, k1 * cos + k0 * sin
    elif ASM and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise("{ .reg .b32 t, u, z; mov.b32 z, 0x80008000; fma.rn.bf16x2 t, $3, $5, z; neg.bf16x2 t, t; fma.rn.bf16x2 $0, $2, $4, t; fma.rn.bf16x2 u, $2, $5, z; fma.rn.bf16x2 $1, $3, $4, u; }", "=r,=&r,r,r,r,r", [k0.to(DTYPE), k1.to(DTYPE), cos, sin], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)  # fmt: skip  # noqa: E501
    elif ASM:
        return tl.inline_asm_elementwise("{ .reg .b32 t, u; mul.rn.f16x2 t, $3, $5; neg.f16x2 t, t; fma.rn.f16x2 $0, $2, $4, t; mul.rn.f16x2 u, $2, $5; fma.rn.f16x2 $1, $3, $4, u; }", "=r,=&r,r,r,r,r", [k0.to(DTYPE), k1.to(DTYPE), cos, sin], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)  # fmt: skip  # noqa: E501
    else:
        a = k0.to(DTYPE).to(tl.float32)
        b = k1.to(DTYPE).to(tl.float32)
        c = cos.to(tl.float32)
        d = sin.to(tl.float32)
        return (a * c - (b * d).to(DTYPE).to(tl.float32)).to(DTYPE), (b * c + (a * d).to(DTYPE).to(tl.float32)).to(
            DTYPE
        )


@triton.jit
def page_of(
    block_table, sequence, tile, begin, until, table_stride,
    STEP: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Page of a tile, or of each key if tiles may cross pages; entries behind that of the last key are not read."""
    row = block_table + sequence.to(tl.int64) * table_stride
    if PAGE == 0:
        return sequence
    elif PAGE % STEP == 0:
        return tl.load(row + tile * STEP // PAGE)
    else:
        key = tile * STEP + tl.minimum(tl.arange(0, KEYS), STEP - 1)
        return tl.load(row + tl.minimum(tl.maximum(key, begin), until - 1) // PAGE)


@triton.jit
def rows_at(
    rows, page, tile, begin, until, block_stride, row_stride, STEP: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Pointers to the rows of a tile, [KEYS].

    Keys outside begin ... until - 1 are replaced by the nearest one inside, so that everything loaded is finite.
    """
    start = tile * STEP
    place = tl.minimum(tl.maximum(tl.arange(0, KEYS), begin - start), tl.minimum(until - start, STEP) - 1)
    if PAGE == 0:
        return rows + page.to(tl.int64) * block_stride + start.to(tl.int64) * row_stride + place * row_stride
    elif PAGE % STEP == 0:
        return rows + page.to(tl.int64) * block_stride + (start % PAGE) * row_stride + place * row_stride
    else:
        return rows + page.to(tl.int64) * block_stride + (start + place) % PAGE * row_stride


@triton.jit
def load_rows(pointers, width, COLUMNS: tl.constexpr, EXACT: tl.constexpr):
    """Load a tile as [KEYS, COLUMNS]."""
    column = tl.arange(0, COLUMNS)[None, :]
    if EXACT:
        return tl.load(pointers[:, None] + column)
    else:
        return tl.load(pointers[:, None] + column, mask=column < width, other=0)


@triton.jit
def load_columns(pointers, width, COLUMNS: tl.constexpr, EXACT: tl.constexpr):
    """Load a tile as [COLUMNS, KEYS]."""
    column = tl.arange(0, COLUMNS)[:, None]
    if EXACT:
        return tl.load(pointers[None, :] + column)
    else:
        return tl.load(pointers[None, :] + column, mask=column < width, other=0)


INTEGERS = [
    "batch_size", "groups", "max_blocks", "query_stride", "key_start", "key_block", "key_row", "value_start",
    "value_block", "value_row", "table_stride", "mask_stride",
]  # fmt: skip
"""Integer arguments that the kernel is not specialised on: one compiled kernel serves all values."""

ADDRESSES = ["begin", "until", "first", "end", "query_start", "block_table", "mask", "holes"]
"""Pointers that the kernel is not specialised on being multiples of 16 bytes, which depends on the part of a batch.
Pointers to rows always are: for an unaligned view `decoding` passes an earlier address, with `key_start` and
`value_start` as offsets."""


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ADDRESSES)
def decode_kernel(
    query, constant, fast_query, key, value, fast_basis, fast_constant, rotations, partial, partial_lse, table,
    begin, until, first, end, query_start, block_table, mask, holes,
    batch_size, groups, max_blocks, query_stride, key_start, key_block, key_row, value_start, value_block, value_row,
    table_stride, mask_stride, scale, softcap,
    CODED: tl.constexpr, JOINT: tl.constexpr, FOLDED: tl.constexpr, SLOW: tl.constexpr, CONSTANT: tl.constexpr,
    FAST: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, PER_HEAD: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, EXACT: tl.constexpr,
    VALUE_EXACT: tl.constexpr, PAGE: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, RELOAD_SHARED: tl.constexpr, HEADS_PER_DOT: tl.constexpr, REUNPACK_PLANES: tl.constexpr,
    PACKED: tl.constexpr, KEY_ALIGN: tl.constexpr, VALUE_ALIGN: tl.constexpr, PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Attend to one slice of the line of tiles.

    Tensors:
        query: absorbed queries [batch_size, max_blocks, groups, rows, operands, COLUMNS], where operands are those of a
            word (1 for numbers); with FOLDED [tokens, ...].
        constant: [batch_size, max_blocks, groups, rows], part of the logits that all keys of a block share.
        fast_query: [batch_size, max_blocks, groups, rows, 2, FAST].
        fast_basis: [groups, HEADS, operands, 2, FAST, COLUMNS]. fast_constant: [groups, HEADS, 2, FAST].
        rotations: [2, BLOCK, FAST], cos and sin of positions in a block.
        partial: [slots, rows, operands, VALUE_COLUMNS], and partial_lse [slots, rows]: the results.
        table: [groups, 8]. Entries 0 and 1: columns of an operand of keys, and the first element in a row (in units of
            KEY_ALIGN); 2 and 3: the same of values (VALUE_ALIGN); 4, 5, 6: offset of the group in queries (FOLDED), in
            the basis (in units of BASIS_ALIGN) and in the output.
    Constants:
        CODED: operands of a word, 0 for numbers.
        BLOCK: positions of a block, 0 for all positions in one. FAST: fast planes, padded; 0 for none.
        RELOAD_SHARED: what every tile loads again although all share it, which frees registers: constants (1),
            rotations (2), or both (3).
        HEADS_PER_DOT: KV heads whose fast planes one product rebuilds.
        REUNPACK_PLANES: planes of joint latents that are unpacked again for values, which frees registers.
        PACKED: load a tile twice, as [keys, columns] and as [columns, keys]. Triton then copies packed words to shared
            memory, reads them as operands of products (`ldmatrix`) and unpacks them there. Otherwise a tile is
            unpacked first and takes four times the space in shared memory.
    """
    DTYPE: tl.constexpr = query.dtype.element_ty
    STEP: tl.constexpr = KEYS if BLOCK == 0 or BLOCK > KEYS else BLOCK
    OPERANDS: tl.constexpr = CODED if CODED else 1
    LIVE: tl.constexpr = TOKENS * HEADS * PER_HEAD
    OFFSET: tl.constexpr = 0.0 if not CODED or tl.float32 == DTYPE else (1032.0 if tl.float16 == DTYPE else 136.0)
    # Arguments in units of elements, and indices that all tiles share.
    program = tl.program_id(0)
    key += key_start * KEY_ALIGN
    value += value_start * VALUE_ALIGN
    key_row *= KEY_ALIGN
    value_row *= VALUE_ALIGN
    key_block = key_block.to(tl.int64) * KEY_ALIGN
    value_block = value_block.to(tl.int64) * VALUE_ALIGN
    column = tl.arange(0, COLUMNS)
    value_column = tl.arange(0, VALUE_COLUMNS)
    place = tl.arange(0, KEYS)
    row = tl.arange(0, ROWS)
    # Columns of rebuilt fast planes: HEADS_PER_DOT heads side by side.
    rebuilt = tl.arange(0, HEADS_PER_DOT * FAST if FAST else 16)
    plane = rebuilt if HEADS_PER_DOT == 1 else rebuilt % FAST
    of_head = rebuilt * 0 if HEADS_PER_DOT == 1 else rebuilt // FAST
    # Query rows: new tokens, then KV heads, then query heads; rows from LIVE on are padding.
    live = row < LIVE
    token = row // (HEADS * PER_HEAD)
    head = row % (HEADS * PER_HEAD)
    ones = tl.full((16, KEYS), 1.0, DTYPE)

    # This program's slice of the line: tiles position ... stop - 1.
    total = count_tiles(begin, until, batch_size, STEP) * groups
    programs = slices(total, tl.num_programs(0))
    position = tl.where(program < programs, slice_start(program, total, programs), total)
    stop = tl.where(program < programs, slice_start(program + 1, total, programs), total)
    while position < stop:
        # The sequence and group at this position, and the group's tiles within the slice, tile_0 ... tile_1 - 1.
        sequence, before = sequence_at(begin, until, batch_size, groups, position, STEP)
        b = tl.load(begin + sequence)
        u = tl.load(until + sequence)
        tiles = tiles_of(b, u, STEP)
        group = (position - before * groups) // tiles
        tile_0 = position - before * groups - group * tiles
        tile_1 = tl.minimum(tiles, tile_0 + stop - position)
        position += tile_1 - tile_0
        tile_0 += b // STEP
        tile_1 += b // STEP
        width = tl.load(table + group * 8)
        keys = key + tl.load(table + group * 8 + 1) * KEY_ALIGN
        value_width = tl.load(table + group * 8 + 2)
        values = value + tl.load(table + group * 8 + 3) * VALUE_ALIGN
        slot = program + sequence * groups + group  # unique: slices and (sequence, group) follow one line
        # Queries that do not depend on the block are loaded once: folded ones, or those of a single block.
        if FOLDED:
            q_token = sequence + tl.zeros_like(token) if TOKENS == 1 else tl.load(query_start + sequence) + token
            q_row = q_token.to(tl.int64) * query_stride + tl.load(table + group * 8 + 4) + head * (width * OPERANDS)
            q_live = live & (q_token < (sequence + 1 if TOKENS == 1 else tl.load(query_start + sequence + 1)))
            queries = ()
            c = tl.zeros((ROWS,), tl.float32)
            for j in tl.static_range(OPERANDS):
                some = q_live[None, :] & (column < width)[:, None]
                queries += (tl.load(query + q_row[None, :] + (j * width + column)[:, None], mask=some, other=0.0),)
                c -= OFFSET * scale * tl.sum(queries[j].to(tl.float32), 0)
        else:
            q_group = (sequence.to(tl.int64) * max_blocks * groups + group) * LIVE
            q_block = groups * LIVE
            q_row = row[None, :] * (OPERANDS * COLUMNS) + column[:, None]
            if BLOCK == 0:
                queries = ()
                for j in tl.static_range(OPERANDS):
                    pointers = query + q_group * (OPERANDS * COLUMNS) + j * COLUMNS + q_row
                    queries += (tl.load(pointers, mask=live[None, :], other=0.0),)
                c = tl.load(constant + q_group + row, mask=live, other=0.0)
        # With several new tokens each query row has a range of keys; a mask is read only for ranges with holes.
        if TOKENS > 1:
            new = tl.load(query_start + sequence) + token
            here = live & (new < tl.load(query_start + sequence + 1))
            row_first = tl.load(first + new, mask=here, other=0)
            row_end = tl.load(end + new, mask=here, other=0)
        elif MASK:
            new = sequence
        if MASK:
            if TOKENS > 1:
                open_ = tl.load(holes + new, mask=here, other=0) != 0
            else:
                open_ = tl.load(holes + new + tl.zeros_like(place)) != 0

        # State of the online softmax: largest logit, sum of weights, weighted sum of values.
        largest = tl.full((ROWS,), UNSEEN, tl.float32)
        total_weight = tl.zeros((ROWS,), tl.float32)
        weighted = ()
        for _ in tl.static_range(OPERANDS):
            weighted += (tl.zeros((VALUE_COLUMNS, ROWS), tl.float32),)
        page = page_of(block_table, sequence, tile_0, b, u, table_stride, STEP, KEYS, PAGE)
        # `ahead` has the rows of the tile that is computed next, and `page` the page of the tile after it.
        if not PACKED:
            rows_of_tile = rows_at(keys, page, tile_0, b, u, key_block, key_row, STEP, KEYS, PAGE)
            ahead = (load_rows(rows_of_tile, width, COLUMNS, EXACT),)
            if not JOINT:
                rows_of_tile = rows_at(values, page, tile_0, b, u, value_block, value_row, STEP, KEYS, PAGE)
                ahead += (load_rows(rows_of_tile, value_width, VALUE_COLUMNS, VALUE_EXACT),)
            after = tl.minimum(tile_0 + 1, tile_1 - 1)
            page = page_of(block_table, sequence, after, b, u, table_stride, STEP, KEYS, PAGE)
        for tile in tl.range(tile_0, tile_1, num_stages=STAGES):
            if PACKED:
                rows_of_tile = rows_at(keys, page, tile, b, u, key_block, key_row, STEP, KEYS, PAGE)
                now = (load_rows(rows_of_tile, width, COLUMNS, EXACT),)
                if not JOINT:
                    rows_of_tile = rows_at(values, page, tile, b, u, value_block, value_row, STEP, KEYS, PAGE)
                now += (load_columns(rows_of_tile, value_width, VALUE_COLUMNS, VALUE_EXACT),)
                after = tl.minimum(tile + 1, tile_1 - 1)
                page = page_of(block_table, sequence, after, b, u, table_stride, STEP, KEYS, PAGE)
            else:
                now = ahead
            z = operands(now[0], CODED, DTYPE, ASM)
            # 0, but unknown to the compiler, which therefore loads constants in every tile.
            zero = tile >> 30 if RELOAD_SHARED % 2 else 0
            # Slow planes: latents times absorbed queries. The constant of the block enters with the softmax.
            if BLOCK > 0:
                block = q_group + (tile * STEP // BLOCK - b // BLOCK).to(tl.int64) * q_block
                c = (
                    tl.load(constant + block + row)
                    if ROWS == LIVE
                    else tl.load(constant + block + row, mask=live, other=0.0)
                )
            logits = tl.zeros((KEYS, ROWS), tl.float32)
            if SLOW:
                for j in tl.static_range(OPERANDS):
                    if BLOCK > 0:
                        pointers = query + block * (OPERANDS * COLUMNS) + j * COLUMNS + q_row
                        q = tl.load(pointers) if ROWS == LIVE else tl.load(pointers, mask=live[None, :], other=0.0)
                    else:
                        q = queries[j]
                    logits = tl.dot(z[j], q, logits, input_precision=PRECISION)
            # Fast planes: rebuild both halves of the keys, rotate them, multiply them with the queries' fast planes.
            if FAST > 0:
                at = place + (tile >> 30 if RELOAD_SHARED // 2 else 0) if KEYS == BLOCK else tile * STEP % BLOCK + place
                if KEYS > STEP:
                    at = tl.minimum(at, BLOCK - 1)
                at_place = rotations + at[:, None] * FAST + tl.arange(0, FAST)[None, :]
                cos = tl.load(at_place)
                sin = tl.load(at_place + BLOCK * FAST)
                if HEADS_PER_DOT > 1:
                    cos = cos[:, None, :].broadcast_to((KEYS, HEADS_PER_DOT, FAST))
                    cos = cos.reshape((KEYS, HEADS_PER_DOT * FAST))
                    sin = sin[:, None, :].broadcast_to((KEYS, HEADS_PER_DOT, FAST))
                    sin = sin.reshape((KEYS, HEADS_PER_DOT * FAST))
                for h in tl.static_range(0, HEADS, HEADS_PER_DOT):
                    c_h = fast_constant + (group * HEADS + h + of_head) * (2 * FAST) + plane + zero
                    b_h = fast_basis + (group * HEADS + h + of_head)[None, :] * (OPERANDS * 2 * FAST * COLUMNS)
                    b_h += column[:, None] + plane[None, :] * COLUMNS
                    k0 = tl.zeros((KEYS, HEADS_PER_DOT * FAST), tl.float32) + tl.load(c_h)[None, :]
                    k1 = tl.zeros((KEYS, HEADS_PER_DOT * FAST), tl.float32) + tl.load(c_h + FAST)[None, :]
                    for j in tl.static_range(OPERANDS):
                        b_j = b_h + j * (2 * FAST * COLUMNS)
                        k0 = tl.dot(z[j], tl.load(b_j), k0, input_precision=PRECISION)
                        k1 = tl.dot(z[j], tl.load(b_j + FAST * COLUMNS), k1, input_precision=PRECISION)
                    k0, k1 = rotated(k0, k1, cos, sin, DTYPE, ASM)
                    # A query row reads the planes of its KV head; for other heads its query is 0.
                    own = (head // PER_HEAD)[None, :] == (h + of_head)[:, None]
                    if ROWS > LIVE:
                        own &= live[None, :]
                    f_h = fast_query + (block + row)[None, :] * (2 * FAST) + plane[:, None]
                    logits = tl.dot(k0, tl.load(f_h, mask=own, other=0.0), logits, input_precision=PRECISION)
                    logits = tl.dot(k1, tl.load(f_h + FAST, mask=own, other=0.0), logits, input_precision=PRECISION)
            # Start loading the next tile, and the page of the one after it.
            if not PACKED:
                after = tl.minimum(tile + 1, tile_1 - 1)
                rows_of_tile = rows_at(keys, page, after, b, u, key_block, key_row, STEP, KEYS, PAGE)
                ahead = (load_rows(rows_of_tile, width, COLUMNS, EXACT),)
                if not JOINT:
                    rows_of_tile = rows_at(values, page, after, b, u, value_block, value_row, STEP, KEYS, PAGE)
                    ahead += (load_rows(rows_of_tile, value_width, VALUE_COLUMNS, VALUE_EXACT),)
                after = tl.minimum(tile + 2, tile_1 - 1)
                page = page_of(block_table, sequence, after, b, u, table_stride, STEP, KEYS, PAGE)
            # Keys of this tile that each query row attends to.
            start = tile * STEP
            if TOKENS > 1:
                index = (start + place)[:, None]
                visible = (index >= row_first[None, :]) & (index < row_end[None, :])
                if KEYS > STEP:
                    visible &= (place < STEP)[:, None]
                if MASK:
                    read = visible & open_[None, :]
                    visible &= tl.load(mask + new[None, :].to(tl.int64) * mask_stride + index, mask=read, other=1) != 0
            else:
                visible = (place >= b - start) & (place < tl.minimum(u - start, STEP))
                if MASK:
                    read = visible & open_
                    bits = mask + new.to(tl.int64) * mask_stride + start + place
                    visible &= tl.load(bits, mask=read, other=1) != 0
                visible = visible[:, None]
            # Online softmax: new largest logit, and weights relative to it. tanh of the cap is written with exp2.
            if SOFTCAP:
                logits = logits * scale
                if CONSTANT:
                    logits += c[None, :]
                logits = softcap - 2.0 * softcap / (tl.exp2(logits * (2.0 * 1.4426950408889634 / softcap)) + 1.0)
                logits = tl.where(visible, logits, NEG_INF)
                now_largest = tl.maximum(largest, tl.max(logits, 0))
                weights = tl.exp2(logits - now_largest[None, :])
            else:
                logits = tl.where(visible, logits, NEG_INF)
                if CONSTANT:
                    now_largest = tl.maximum(largest, tl.max(logits, 0) * scale + c)
                    weights = tl.exp2(logits * scale + (c - now_largest)[None, :])
                else:
                    now_largest = tl.maximum(largest, tl.max(logits, 0) * scale)
                    weights = tl.exp2(logits * scale - now_largest[None, :])
            shrink = tl.exp2(largest - now_largest)
            largest = now_largest
            weights = weights.to(DTYPE)
            tile_weights = tl.dot(ones, weights, tl.zeros((16, ROWS), tl.float32), input_precision=PRECISION)
            tile_weight = tl.max(tile_weights, 0)  # all 16 rows are equal
            total_weight = total_weight * shrink + tile_weight
            # Values: the same latents if joint, else the tile's second rows. The digits' offset is subtracted here.
            if PACKED or not JOINT:
                z = operands(now[1], CODED, DTYPE, ASM)
            elif REUNPACK_PLANES > 0:
                reunpacked = operands(opaque_copy(now[0], tile >> 30, ASM), CODED, DTYPE, ASM)
            added = ()
            for j in tl.static_range(OPERANDS):
                z_j = reunpacked[j] if JOINT and j < REUNPACK_PLANES else z[j]
                if not PACKED:
                    z_j = tl.trans(z_j)
                kept = weighted[j] * shrink[None, :]
                if OFFSET > 0:
                    kept -= (OFFSET * tile_weight)[None, :]
                added += (tl.dot(z_j, weights, kept, input_precision=PRECISION),)
            weighted = added

        # The partial result of this (sequence, group). `late` is 0, but unknown to the compiler, which therefore
        # computes addresses here instead of keeping them in registers during the loop.
        late = position >> 30 if REUNPACK_PLANES else 0
        seen = largest > UNSEEN
        sums = tl.where(seen, total_weight, 1.0)
        out = partial + slot.to(tl.int64) * (LIVE * OPERANDS * VALUE_COLUMNS)
        out += (row + late)[None, :] * (OPERANDS * VALUE_COLUMNS) + (value_column + late)[:, None]
        for j in tl.static_range(OPERANDS):
            tl.store(out + j * VALUE_COLUMNS, weighted[j] / sums[None, :], mask=live[None, :])
        tl.store(partial_lse + slot * LIVE + row + late, tl.where(seen, largest + tl.log2(sums), NEG_INF), mask=live)
