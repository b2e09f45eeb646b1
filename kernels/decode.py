# mypy: disable-error-code="no-untyped-def, var-annotated"
"""Decoding: up to 64 query rows of a group (query heads times new tokens) against the rows of a layer's cache.

Keys are the long side of the matrix products (16 keys by 8 query rows), so that a group with few query heads wastes
little. A program is one or a few warps. A tile has the keys of one block of positions (or of a part of it), so it needs
one absorbed query per query row: `absorb` has multiplied the query with the basis, and has collected the constant parts
of the logits. Nothing of a key is rebuilt.

Codes are multiplied in float16 whatever the model's dtype: bits of a digit are read as they are, as the smallest
numbers of float16 (`UNIT`), which takes four instructions for two words. The two nibbles of a byte are read as the
lower one and as the byte. So absorbed queries have the higher nibble's column less for the lower one, and the end of a
slice takes the higher nibble out of the byte. What an operand has too much (`excess`) is subtracted from the logits
with the constants, and from the weighted values every few tiles. Left in the sums it would grow with the length, and so
would the rounding error of tensor cores.

Rows of joint groups have a scale in their first nibble, which multiplies a key's logits before constants are added, and
its weight before values are summed: a product with a column of ones spreads its nibble over the query rows. The operand
in its place is read as 1.

Weights are relative to a reference, which is the largest logit of the first tile and is seldom moved: where a weight
would overflow, and every few tiles (`MOVES`). So a tile asks for no maximum, and rescales nothing. Nor does it ask
which keys are visible, unless a sequence begins or ends in it, or query rows differ in what they see.

A tile is loaded twice, as [keys, columns] and as [columns, keys]: Triton then copies packed words to shared memory,
reads them as operands of products (`ldmatrix`) and unpacks them in registers. The second are read after the softmax, so
that they take no registers before. The next tiles are loaded while one is computed. Logits are exponents of 2.

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


MOST_HALF = tl.constexpr(2.0**12)
"""A weight up to here is finite in float16, whatever scale of a key multiplies it: the largest is 2^3.5."""

MOST = tl.constexpr(1e30)
"""A weight up to here is finite in other dtypes."""

MOVES = 16
"""Tiles after which a reference moves at the latest, and what operands have too much is subtracted."""

UNIT = tl.constexpr(2.0**-24)
"""Value that a digit of 1 is read as: the smallest float16, so that its bits are the digit."""


@triton.constexpr_function
def excess(operand):
    """Excess of an operand of codes, in digits: 8 of each nibble or crumb.

    Operands are the lower nibble of a word's lower byte, this byte, the lower nibble of the higher byte, and this byte;
    then the lower crumbs of nibble 3, 2, 1 and 0, those of a byte's higher nibble 16 times.
    """
    return 8.0 if sixteenth(operand) == 0 else 136.0 if operand < 4 else 128.0


@triton.constexpr_function
def sixteenth(operand):
    """Tell whether an operand counts sixteenths of a unit: a byte, or a crumb of a byte's higher nibble."""
    return operand in (1, 3, 4, 6)


@triton.jit
def operands(words, CODED: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Unpack a tile of rows into the operands of matrix products, digits in units of UNIT.

    Words give CODED operands, as in `excess`. A tile of numbers is its only operand.
    """
    if CODED:
        return unpacked(words.to(tl.uint16, bitcast=True), CODED, DTYPE, ASM)
    else:
        return (words,)


@triton.jit
def unpacked(words, CODED: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Operands of words of codes."""
    if ASM:
        digits = tl.inline_asm_elementwise("{ prmt.b32 $3, $4, 0, 0x4341; and.b32 $1, $4, 0x00FF00FF; and.b32 $0, $4, 0x000F000F; and.b32 $2, $3, 0x000F000F; }", "=&r,=&r,=&r,=&r,r", [words], dtype=(tl.uint16, tl.uint16, tl.uint16, tl.uint16), is_pure=True, pack=2)  # fmt: skip  # noqa: E501
    else:
        low = (words & 0xFF).to(tl.uint16)
        high = (words >> 8).to(tl.uint16)
        digits = (low & 0xF, low, high & 0xF, high)
    found = (as_number(digits[0], DTYPE), as_number(digits[1], DTYPE), as_number(digits[2], DTYPE))
    found += (as_number(digits[3], DTYPE),)
    for j in tl.static_range(4, CODED):
        found += (as_number(crumb(digits[3] if j < 6 else digits[1], sixteenth(j), ASM), DTYPE),)
    return found


@triton.jit
def as_number(digits, DTYPE: tl.constexpr):
    """Digits in units of UNIT: reinterpreted as float16."""
    numbers = digits.to(tl.uint16).to(tl.float16, bitcast=True)
    return numbers if tl.float16 == DTYPE else numbers.to(DTYPE)


@triton.jit
def of_a_lane(number):
    """A number that all lanes share, in a register of each: what is compared with it is then a predicate of each lane,
    as copies need, and not one of the warp that is turned into one for each copy."""
    return tl.inline_asm_elementwise("{ .reg .b32 none; mov.u32 none, %laneid; shr.u32 none, none, 5; add.s32 $0, $1, none; }", "=r,r", [number], dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip  # noqa: E501


@triton.jit
def crumb(byte, HIGHER: tl.constexpr, ASM: tl.constexpr):
    """The lower crumb of a byte's lower nibble, or 16 times that of its higher one."""
    if not ASM:
        return byte & (0x30 if HIGHER else 0x3)
    elif HIGHER:
        return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00300030;", "=r,r", [byte], dtype=tl.uint16, is_pure=True, pack=2)  # fmt: skip  # noqa: E501
    else:
        return tl.inline_asm_elementwise("and.b32 $0, $1, 0x00030003;", "=r,r", [byte], dtype=tl.uint16, is_pure=True, pack=2)  # fmt: skip  # noqa: E501


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
    rows, page, tile, begin, until, block_stride, ROW: tl.constexpr, STEP: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Pointers to the rows of a tile, [KEYS].

    Keys outside begin ... until - 1 are replaced by the nearest one inside: what is loaded exists, and is finite.
    Codes always are finite, and pages always whole: there these keys are read.
    """
    start = tile * STEP
    # By eights, so that the compiler sees that rows of a thread are constants apart.
    place = tl.reshape(tl.arange(0, KEYS // 8)[:, None] * 8 + tl.arange(0, 8)[None, :], (KEYS,))
    WHOLE: tl.constexpr = CODED and KEYS == STEP and PAGE and PAGE % STEP == 0
    if not WHOLE:
        place = tl.minimum(tl.maximum(place, begin - start), tl.minimum(until - start, STEP) - 1)
    if PAGE == 0:
        return rows + page.to(tl.int64) * block_stride + start.to(tl.int64) * ROW + place * ROW
    elif PAGE % STEP == 0:
        return rows + page.to(tl.int64) * block_stride + (start % PAGE) * ROW + place * ROW
    else:
        return rows + page.to(tl.int64) * block_stride + (start + place) % PAGE * ROW


@triton.jit
def load_rows(pointers, width, FIRST: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr):
    """Load COLUMNS columns of a tile, from FIRST on, as [KEYS, COLUMNS]."""
    column = FIRST + tl.arange(0, COLUMNS)[None, :]
    if FULL:
        return tl.load(pointers[:, None] + column)
    else:
        return tl.load(pointers[:, None] + column, mask=column < width, other=0)


@triton.jit
def load_columns(pointers, width, FIRST: tl.constexpr, COLUMNS: tl.constexpr, FULL: tl.constexpr):
    """Load COLUMNS columns of a tile, from FIRST on, as [COLUMNS, KEYS]."""
    column = FIRST + tl.arange(0, COLUMNS)[:, None]
    if FULL:
        return tl.load(pointers[None, :] + column)
    else:
        return tl.load(pointers[None, :] + column, mask=column < width, other=0)


INTEGERS = [
    "batch_size", "groups", "max_blocks", "query_stride", "key_start", "key_block", "value_start", "value_block",
    "table_stride", "mask_stride",
]  # fmt: skip
"""Integer arguments that the kernel is not specialised on: one compiled kernel serves all values."""

ADDRESSES = ["begin", "until", "first", "end", "query_start", "block_table", "mask", "holes"]
"""Pointers that the kernel is not specialised on being multiples of 16 bytes, which depends on the part of a batch.
Pointers to rows always are: for an unaligned view `decode_launch` passes an earlier address, with `key_start` and
`value_start` as offsets."""


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ADDRESSES)
def decode_kernel(
    query, constant, key, value, partial, partial_lse, table, begin, until, first, end, query_start, block_table, mask,
    holes,
    batch_size, groups, max_blocks, query_stride, key_start, key_block, value_start, value_block, table_stride,
    mask_stride, scale, softcap,
    DTYPE: tl.constexpr, CODED: tl.constexpr, JOINT: tl.constexpr, SCALED: tl.constexpr,
    FOLDED: tl.constexpr, CONSTANT: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, PER_HEAD: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PART: tl.constexpr, VALUE_COLUMNS: tl.constexpr, VALUE_PART: tl.constexpr, FULL: tl.constexpr,
    VALUE_FULL: tl.constexpr, PAGE: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, SPREAD: tl.constexpr, MOVE: tl.constexpr, KEY_ALIGN: tl.constexpr, VALUE_ALIGN: tl.constexpr,
    KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr,
    PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend to one slice of the line of tiles.

    Tensors:
        query: absorbed queries [batch_size, max_blocks, groups, rows, operands, COLUMNS], where operands are those of a
            word (1 for numbers); with FOLDED [tokens, ...], of nibbles and crumbs.
        constant: [batch_size, max_blocks, groups, 2, rows], part of the logits that all keys of a block share; and the
            part that the scale of a key multiplies, in units of 1 / `scale`.
        partial: [slots, rows, operands, VALUE_COLUMNS], and partial_lse [slots, rows]: the results, of nibbles.
        table: [groups, 8]. Entries 0 and 1: columns of an operand of keys, and the first element in a row (in units of
            KEY_ALIGN); 2 and 3: the same of values (VALUE_ALIGN); 4, 5, 6: offset of the group in queries (FOLDED), in
            the basis (in units of BASIS_ALIGN) and in the output.
    Constants:
        DTYPE: of the products. CODED: operands of a word, 0 for numbers.
        JOINT: values are read from the rows of keys. SCALED: the first nibble of rows is their scale.
        BLOCK: positions of a block, 0 for all positions in one.
        PART, VALUE_PART: columns that are loaded at a time.
        FULL, VALUE_FULL: every group has COLUMNS of keys, VALUE_COLUMNS of values.
    """
    STEP: tl.constexpr = KEYS if BLOCK == 0 or BLOCK > KEYS else BLOCK
    OPERANDS: tl.constexpr = CODED if CODED else 1
    LIVE: tl.constexpr = TOKENS * HEADS * PER_HEAD
    PARTS: tl.constexpr = COLUMNS // PART
    VALUE_PARTS: tl.constexpr = (VALUE_COLUMNS + VALUE_PART - 1) // VALUE_PART
    WHOLE: tl.constexpr = VALUE_COLUMNS % VALUE_PART == 0
    CONSTANTS: tl.constexpr = 2 if SCALED else 1
    HIDDEN: tl.constexpr = NEG_INF * UNIT if CODED else NEG_INF
    # Arguments in units of elements, and indices that all tiles share.
    program = tl.program_id(0)
    key += key_start * KEY_ALIGN
    value += value_start * VALUE_ALIGN
    key_block = key_block.to(tl.int64) * KEY_ALIGN
    value_block = value_block.to(tl.int64) * VALUE_ALIGN
    column = tl.arange(0, PART)
    value_column = tl.arange(0, VALUE_PART)
    place = tl.arange(0, KEYS)
    row = tl.arange(0, ROWS)
    # Query rows: new tokens, then KV heads, then query heads; rows from LIVE on are padding.
    live = row < LIVE
    token = row // (HEADS * PER_HEAD)
    head = row % (HEADS * PER_HEAD)
    ones = tl.full((16, KEYS), 1.0, DTYPE)
    # Logits are in units of 1 / `factor` before they meet the softmax. Where a key has a scale, this is multiplied by
    # `factor`, also as it weighs values: the reference is higher by `unit`, so that weights are as much smaller.
    factor = scale / UNIT if CODED else scale
    unit = 0.0
    most = MOST_HALF if tl.float16 == DTYPE else MOST
    if SCALED:
        unit = tl.log2(factor)
        most /= factor
        # Spreads what is in the scale's place over all query rows.
        spread = tl.where((column == 0)[:, None], 1.0, tl.zeros((PART, ROWS), tl.float32)).to(DTYPE)

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
        if ASM:
            tile_1 = of_a_lane(tile_1)
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
            scaled_c = tl.zeros((ROWS,), tl.float32)
            for i in tl.static_range(PARTS):
                for j in tl.static_range(OPERANDS):
                    folded = folded_query(query + q_row, q_live, width, column + i * PART, j, CODED)
                    if SCALED and j == 0 and i == 0:
                        # In place of the scale is read what stands for 1.
                        of_one = tl.load(query + q_row, mask=q_live, other=0.0).to(tl.float32)
                        scaled_c += of_one
                        folded -= tl.where((column == 0)[:, None], of_one[None, :], 0.0)
                    queries += (folded.to(DTYPE),)
                    if CODED:
                        scaled_c -= excess(j) * tl.sum(folded.to(DTYPE).to(tl.float32), 0)
            if SCALED:
                scaled_c *= UNIT
            else:
                c = scaled_c * scale
        else:
            q_group = (sequence.to(tl.int64) * max_blocks * groups + group) * LIVE
            q_block = groups * LIVE
            q_row = row[None, :] * (OPERANDS * COLUMNS) + column[:, None]
            if BLOCK > 0:
                block = q_group + (tile_0 * STEP // BLOCK - b // BLOCK).to(tl.int64) * q_block
                block_constant = constant + CONSTANTS * block
                block_query = query + block * (OPERANDS * COLUMNS)
            if BLOCK == 0:
                queries = ()
                for i in tl.static_range(PARTS):
                    for j in tl.static_range(OPERANDS):
                        pointers = query + q_group * (OPERANDS * COLUMNS) + (j * COLUMNS + i * PART) + q_row
                        queries += (tl.load(pointers, mask=live[None, :], other=0.0),)
                c = tl.load(constant + CONSTANTS * q_group + row, mask=live, other=0.0)
                scaled_c = c
                if SCALED:
                    scaled_c = tl.load(constant + CONSTANTS * q_group + LIVE + row, mask=live, other=0.0)
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

        # State of the softmax: the reference of weights; sums of weights, [SPREAD, ROWS]; sums of weights times scales,
        # which weigh values, before the last move, [ROWS], and since, [16, ROWS] of which all are equal; and weighted
        # values, of which those since the last move still have what operands have too much.
        reference = tl.full((ROWS,), UNSEEN, tl.float32)
        total_weight = tl.zeros((SPREAD, ROWS), tl.float32)
        before_move = tl.zeros((ROWS,), tl.float32)
        since_move = tl.zeros((16, ROWS), tl.float32)
        weighted = ()
        for _ in tl.static_range(VALUE_PARTS * OPERANDS):
            weighted += (tl.zeros((VALUE_PART, ROWS), tl.float32),)
        page = page_of(block_table, sequence, tile_0, b, u, table_stride, STEP, KEYS, PAGE)
        for tile in tl.range(tile_0, tile_1, num_stages=STAGES):
            rows_of_tile = rows_at(keys, page, tile, b, u, key_block, KEY_ROW, STEP, KEYS, PAGE, CODED)  # [KEYS]
            z = ()
            for i in tl.static_range(PARTS):
                words = load_rows(rows_of_tile, width, i * PART, PART, FULL)  # [KEYS, PART]
                z += operands(words, CODED, DTYPE, ASM)
            if not JOINT:
                rows_of_tile = rows_at(values, page, tile, b, u, value_block, VALUE_ROW, STEP, KEYS, PAGE, CODED)
            # Loads of the next tile wait for its page: it is asked for while this tile is computed.
            after = tl.minimum(tile + 1, tile_1 - 1)
            page = page_of(block_table, sequence, after, b, u, table_stride, STEP, KEYS, PAGE)  # of the next tile
            # Keys of this tile that each query row attends to, [KEYS, 1 or ROWS].
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
                low = tl.maximum(b - start, 0)
                visible = (place - low).to(tl.uint32) < (tl.minimum(u - start, STEP) - low).to(tl.uint32)
                if MASK:
                    read = visible & open_
                    bits = mask + new.to(tl.int64) * mask_stride + start + place
                    visible &= tl.load(bits, mask=read, other=1) != 0
                visible = visible[:, None]
            # Queries and constants of the tile's block, and where those of the next tile are.
            if BLOCK > 0:
                c = of_rows(block_constant + row, live, ROWS == LIVE)  # [ROWS]
                scaled_c = c
                if SCALED:
                    scaled_c = of_rows(block_constant + LIVE + row, live, ROWS == LIVE)  # [ROWS]
                queries = ()
                for i in tl.static_range(PARTS):
                    for j in tl.static_range(OPERANDS):
                        pointers = block_query + (j * COLUMNS + i * PART) + q_row
                        queries += (of_rows(pointers, live[None, :], ROWS == LIVE),)  # [PART, ROWS]
                if BLOCK == STEP:
                    passed = q_block
                else:
                    passed = tl.where((tile + 1) * STEP % BLOCK == 0, q_block, 0)
                block_constant += CONSTANTS * passed
                block_query += passed * (OPERANDS * COLUMNS)
            # Logits and scales, [KEYS, ROWS]. What is added to all logits of a row stays apart.
            logits = logits_of_tile(z, queries, scaled_c, KEYS, ROWS, SCALED, PRECISION)
            if not SOFTCAP:  # which would lift hidden keys
                partly = (start < b) | (start + STEP > u)  # a sequence begins or ends in this tile
                if TOKENS > 1 or MASK or KEYS > STEP:
                    partly = True
                if partly:
                    logits = tl.where(visible, logits, HIDDEN)
            scales = 1.0
            if SCALED:
                # A product with a column of ones gives each thread the nibbles of its keys, for its query rows.
                of_key = tl.dot(z[0], spread, tl.zeros((KEYS, ROWS), tl.float32), input_precision=PRECISION)
                scales = scales_of_keys(of_key, unit, KEYS, ROWS)
                logits = logits * scales
            else:
                logits = logits * factor
            added_to_all = tl.zeros((ROWS,), tl.float32)
            if SOFTCAP:
                if CONSTANT:
                    logits += c[None, :]
                # tanh, written with exp2.
                logits = softcap - 2.0 * softcap / (tl.exp2(logits * (2.0 * 1.4426950408889634 / softcap)) + 1.0)
                logits = tl.where(visible, logits, NEG_INF)
            elif CONSTANT:
                added_to_all = c
            # Softmax: weights relative to the reference. An overflow shows in their sums.
            sums, rounded = softmax_of_tile(logits, added_to_all - reference, scales, SPREAD, DTYPE)
            # Seldom: take the largest logit of the tile as the reference, and weigh what was summed by it anew.
            if (largest(sums) > most) | (tile % MOVE == MOVE - 1):
                higher = tl.maximum(reference, tl.max(logits, 0) + (added_to_all + unit))
                shrink = tl.exp2(reference - higher)
                weight_since = tl.max(since_move, 0)
                weighted = settled(weighted, weight_since, shrink, CODED)
                before_move = (before_move + weight_since) * shrink
                total_weight = total_weight * shrink[None, :]
                since_move = tl.zeros((16, ROWS), tl.float32)
                reference = higher
                sums, rounded = softmax_of_tile(logits, added_to_all - reference, scales, SPREAD, DTYPE)
            if SCALED:
                total_weight += sums
            since_move = tl.dot(ones, rounded, since_move, input_precision=PRECISION)
            # Values: the same words again, as [columns, keys], times the weights. What operands have too much stays in
            # the sums, and is taken out by `settled`.
            added = ()
            for i in tl.static_range(VALUE_PARTS):
                words = load_columns(  # [VALUE_PART, KEYS]
                    rows_of_tile, value_width, i * VALUE_PART, VALUE_PART, VALUE_FULL and WHOLE
                )
                v = operands(words, CODED, DTYPE, ASM)
                for j in tl.static_range(OPERANDS):
                    added += (tl.dot(v[j], rounded, weighted[i * OPERANDS + j], input_precision=PRECISION),)
            weighted = added

        # The partial result of this (sequence, group), of nibbles: a byte's higher one is what it has beside the lower.
        # In place of the scale stands 1, by its weights.
        seen = reference > UNSEEN
        weight_since = tl.max(since_move, 0)
        weighted = settled(weighted, weight_since, tl.full((ROWS,), 1.0, tl.float32), CODED)
        total_scaled = before_move + weight_since
        sums_of_rows = tl.where(seen, tl.sum(total_weight, 0) if SCALED else total_scaled, 1.0)
        share = 1.0 / (sums_of_rows * (scale if SCALED else UNIT if CODED else 1.0))
        out = partial + slot.to(tl.int64) * (LIVE * OPERANDS * VALUE_COLUMNS)
        out += row[None, :] * (OPERANDS * VALUE_COLUMNS) + value_column[:, None]
        for i in tl.static_range(VALUE_PARTS):
            for j in tl.static_range(OPERANDS):
                result = weighted[i * OPERANDS + j]
                if CODED and sixteenth(j):
                    result = (result - weighted[i * OPERANDS + j - 1] if j < 4 else result) * 0.0625
                if SCALED and j == 0 and i == 0:
                    result = tl.where((value_column == 0)[:, None], (total_scaled * UNIT)[None, :], result)
                stored = (
                    live[None, :] if WHOLE else live[None, :] & (i * VALUE_PART + value_column < VALUE_COLUMNS)[:, None]
                )
                tl.store(out + j * VALUE_COLUMNS + i * VALUE_PART, result * share[None, :], mask=stored)
        log_sums = tl.where(seen, reference + tl.log2(sums_of_rows), NEG_INF)
        tl.store(partial_lse + slot * LIVE + row, log_sums, mask=live)


@triton.jit
def logits_of_tile(
    z, queries, scaled_c, KEYS: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Latents times absorbed queries, [KEYS, ROWS] in digits.

    z: operands, [KEYS, PART] each. queries: of each, [PART, ROWS]. scaled_c: what scales multiply, [ROWS].
    """
    logits = tl.zeros((KEYS, ROWS), tl.float32)
    if SCALED:
        logits = tl.broadcast_to(scaled_c[None, :], (KEYS, ROWS))
    for i in tl.static_range(len(z)):
        logits = tl.dot(z[i], queries[i], logits, input_precision=PRECISION)
    return logits


@triton.jit
def scales_of_keys(nibbles, unit, KEYS: tl.constexpr, ROWS: tl.constexpr):
    """The scales of keys by their nibbles, times 2^unit, [KEYS, ROWS] of which all in a row are equal: one is computed
    for two query rows, as a thread has them."""
    pairs = tl.split(tl.reshape(nibbles, (KEYS, ROWS // 2, 2)))
    scales = tl.exp2(pairs[0] * (0.5 / UNIT) + (unit - 4.0))
    return tl.reshape(tl.join(scales, scales), (KEYS, ROWS))


@triton.jit
def softmax_of_tile(logits, more, scales, SPREAD: tl.constexpr, DTYPE: tl.constexpr):
    """Weights 2^(logits + more), [KEYS, ROWS], summed to [SPREAD, ROWS]; and these times scales, [KEYS, ROWS], in
    DTYPE."""
    weights = tl.exp2(logits + more[None, :])
    sums = tl.sum(tl.reshape(weights, (logits.shape[0] // SPREAD, SPREAD, logits.shape[1])), 0)
    return sums, (weights * scales).to(DTYPE)


@triton.jit
def largest(sums):
    """The largest of sums that are not negative: as integers, which take one instruction for a warp."""
    return tl.max(sums.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def settled(weighted, weight_since, shrink, CODED: tl.constexpr):
    """Weighted values, [VALUE_PART, ROWS] each, without what operands have too much since the last move, shrunk."""
    kept_values = ()
    for i in tl.static_range(len(weighted)):
        kept = weighted[i]
        if CODED:
            kept -= (weight_since * (excess(i % CODED) * UNIT))[None, :]
        kept_values += (kept * shrink[None, :],)
    return kept_values


@triton.jit
def of_rows(pointers, live, ALL: tl.constexpr):
    """Load numbers of query rows, of which those that are padding have 0."""
    if ALL:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=live, other=0.0)


@triton.jit
def folded_query(rows, live, width, column, OPERAND: tl.constexpr, CODED: tl.constexpr):
    """An operand's part of absorbed queries, [PART, ROWS] float32, from those of nibbles: see `excess`."""
    some = live[None, :] & (column < width)[:, None]
    at = rows[None, :] + column[:, None]
    q = tl.load(at + OPERAND * width, mask=some, other=0.0).to(tl.float32)
    if CODED and sixteenth(OPERAND):
        q *= 0.0625
    elif CODED and OPERAND < 4:
        q -= tl.load(at + (OPERAND + 1) * width, mask=some, other=0.0).to(tl.float32) * 0.0625
    return q
