# mypy: disable-error-code="no-untyped-def"
"""Absorb queries before decoding: rotate them back to the beginning of each block of keys, and multiply by the basis.

Let b be the beginning of a block. Decoding multiplies latents by (R^-b q)_slow times the slow rows of the key basis.
(R^-b q)_slow times the constant key is the part of the logits that all keys of the block share; where rows have a scale
there is a second one, which the scale of a key multiplies. (R^-b q)_fast is multiplied with rebuilt planes. Each of
these is a sum over planes p of cos(b w_p) times one vector plus sin(b w_p) times another, and the vectors do not depend
on b. So a program computes these matrices once for a query head, and multiplies a table of the blocks' rotations with
them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import excess

INTEGERS = [
    "groups", "max_blocks", "query_stride", "head_stride", "basis_stride",
]  # fmt: skip
"""Integer arguments that the kernel is not specialised on: one compiled kernel serves all values."""

ADDRESSES = ["begin", "until", "query_start"]
"""Pointers that the kernel is not specialised on being multiples of 16 bytes, which depends on the part of a batch."""


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ADDRESSES)
def absorb_kernel(
    query, basis, key_constant, slow_starts, fast_starts, absorbed, constant, fast_query, table,
    begin, until, query_start,
    groups, max_blocks, query_stride, head_stride, basis_stride, scale,
    CODED: tl.constexpr, SCALED: tl.constexpr, SCALE_WORD: tl.constexpr, CONSTANT: tl.constexpr, FAST: tl.constexpr,
    FAST_PLANES: tl.constexpr, PLANES: tl.constexpr, SLOW: tl.constexpr, HEAD_DIM: tl.constexpr, REST: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, PER_HEAD: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED: tl.constexpr, EXACT: tl.constexpr, COUNT: tl.constexpr, ALIGN: tl.constexpr, BASIS_ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Absorb one query head of one new token, for COUNT blocks at a time.

    Grid: programs that share the blocks of a sequence, query heads, sequences times TOKENS.

    Tensors:
        query: [tokens, num_heads, head_dim], rotated.
        basis: [HEADS * HEAD_DIM, sum of widths]. key_constant: [num_kv_heads, HEAD_DIM], float32.
        slow_starts: [blocks, 2, SLOW], fast_starts: [blocks, 2, 2 * FAST]. They have cos and sin of the beginnings of
            blocks, times RoPE's attention factor, each as a rounded number and the rounding error.
        absorbed, constant, fast_query: outputs, in the form of `decode_kernel`'s arguments. The products' dtype is that
            of the first.
    Constants:
        SLOW: cos and sin of slow planes, padded. FAST: fast planes, padded. REST: dimensions without RoPE, padded.
            0 means none.
        FAST_PLANES, PLANES: number of fast planes, and of all planes.
        BLOCK: positions of a block; 0 for a single block at position 0.
        SCALED, SCALE_WORD: whether rows have a scale, and its column.
        COLUMNS, PADDED: columns of an operand, and the next power of two.
        ALIGN, BASIS_ALIGN: units of the strides of queries and bases.
    """
    DTYPE: tl.constexpr = absorbed.dtype.element_ty
    OPERANDS: tl.constexpr = CODED if CODED else 1
    ROWS: tl.constexpr = HEADS * PER_HEAD
    head = tl.program_id(1)
    sequence = tl.program_id(2) // TOKENS
    new = tl.program_id(2) % TOKENS
    token = sequence
    if TOKENS > 1:
        token = tl.load(query_start + sequence) + new
    group = head // ROWS
    # Blocks that the sequence attends to, from block_0 on; padding tokens have none.
    b = tl.load(begin + sequence)
    u = tl.load(until + sequence)
    block_0 = b // BLOCK if BLOCK else 0
    blocks = ((u + BLOCK - 1) // BLOCK - block_0) if BLOCK else tl.where(u > b, 1, 0)
    if TOKENS > 1:
        blocks = tl.where(token < tl.load(query_start + sequence + 1), blocks, 0)
    first_block = tl.program_id(0) * COUNT
    if first_block < blocks:
        width = COLUMNS if EXACT else tl.load(table + group * 8)
        own = query + token.to(tl.int64) * query_stride * ALIGN + head * head_stride * ALIGN
        const = key_constant + head // PER_HEAD * HEAD_DIM
        columns = tl.arange(0, PADDED)
        some = (columns < width)[None, :]
        basis_row = (basis_stride * BASIS_ALIGN).to(tl.int64)
        of_head = basis + tl.load(table + group * 8 + 5) * BASIS_ALIGN
        of_head += head % ROWS // PER_HEAD * HEAD_DIM * basis_row + columns[None, :]
        place = tl.arange(0, COUNT)
        # Rows of the matrices: cos of the slow planes, then sin, with q0 b0 + q1 b1 and q1 b0 - q0 b1.
        k = tl.arange(0, SLOW if SLOW else 16)
        of_sin = k >= PLANES - FAST_PLANES
        p = FAST_PLANES + tl.where(of_sin, k - (PLANES - FAST_PLANES), k)
        rotates = k < 2 * (PLANES - FAST_PLANES)
        d = tl.arange(0, REST if REST else 16)
        rest = d < HEAD_DIM - 2 * PLANES
        matrices = ()
        added = ()
        if SLOW:
            x = tl.load(own + tl.where(of_sin, PLANES + p, p), mask=rotates, other=0.0).to(tl.float32)
            y = tl.load(own + tl.where(of_sin, p, PLANES + p), mask=rotates, other=0.0).to(tl.float32)
            y = tl.where(of_sin, -y, y)
            for j in tl.static_range(OPERANDS):
                at = of_head + p[:, None] * basis_row
                b0 = of_operand(at, width, rotates[:, None] & some, j, CODED)
                b1 = of_operand(at + PLANES * basis_row, width, rotates[:, None] & some, j, CODED)
                matrices += ((x[:, None] * b0 + y[:, None] * b1).to(DTYPE),)
            if CONSTANT:
                # The same with the constant key, split into two numbers of DTYPE for an exact product, and within the
                # range of float16.
                c0 = tl.load(const + p, mask=rotates, other=0.0)
                c1 = tl.load(const + PLANES + p, mask=rotates, other=0.0)
                of_constant = (x * c0 + y * c1) * 0.015625
                high = of_constant.to(DTYPE)
                low = (of_constant - high.to(tl.float32)).to(DTYPE)
                two = tl.arange(0, 8)[None, :]
                constants = tl.where(two == 0, high[:, None], tl.where(two == 1, low[:, None], 0.0)).to(DTYPE)
        # Dimensions without RoPE add the same vector and number in every block.
        still = 0.0
        if REST:
            q = tl.load(own + 2 * PLANES + d, mask=rest, other=0.0).to(tl.float32)
            for j in tl.static_range(OPERANDS):
                at = of_head + (2 * PLANES + d)[:, None] * basis_row
                rows = of_operand(at, width, rest[:, None] & some, j, CODED)
                added += (tl.sum(q[:, None] * rows, 0),)
            if CONSTANT:
                still = tl.sum(q * tl.load(const + 2 * PLANES + d, mask=rest, other=0.0), 0)
        if FAST:
            # Matrix that rotates the query's fast planes: rows for cos and sin, columns for both halves of the planes,
            # each quadrant diagonal.
            f = tl.arange(0, 2 * FAST)
            column_plane = f % FAST
            row_sin = (f >= FAST)[:, None]
            dimension = tl.where(row_sin == (f >= FAST)[None, :], column_plane[None, :], PLANES + column_plane[None, :])
            diagonal = (column_plane[:, None] == column_plane[None, :]) & (column_plane < FAST_PLANES)[None, :]
            of_fast = tl.load(own + dimension, mask=diagonal, other=0.0).to(tl.float32)
            of_fast = tl.where(row_sin & (f >= FAST)[None, :], -of_fast, of_fast).to(DTYPE)
        own_row = new * ROWS + head % ROWS
        row = group * (TOKENS * ROWS) + own_row
        for start in range(first_block, blocks, tl.num_programs(0) * COUNT):
            # COUNT blocks: a table of their rotations times the matrices above.
            inside = start + place < blocks
            index = (sequence.to(tl.int64) * max_blocks + start + place) * groups * (TOKENS * ROWS) + row
            at_block = block_0 + start + place
            shared = tl.zeros((COUNT, 8), tl.float32)
            too_much = tl.zeros((COUNT, 8), tl.float32)
            of_scale = tl.zeros((COUNT,), tl.float32)
            if SLOW:
                starts_at = slow_starts + at_block[:, None] * (2 * SLOW) + k[None, :]
                start_rotation = tl.load(starts_at, mask=inside[:, None], other=0.0)
                if CONSTANT:
                    shared = tl.dot(start_rotation, constants, shared, input_precision=PRECISION)
                    rest_of = tl.load(starts_at + SLOW, mask=inside[:, None], other=0.0)
                    shared = tl.dot(rest_of, constants, shared, input_precision=PRECISION)
            for j in tl.static_range(OPERANDS):
                product = tl.zeros((COUNT, PADDED), tl.float32)
                if REST:
                    product += added[j][None, :]
                if SLOW:
                    product = tl.dot(start_rotation, matrices[j], product, input_precision=PRECISION)
                if SCALED and j == 0:  # what the scale multiplies as if its operand were 1
                    of_scale += tl.sum(tl.where((columns == SCALE_WORD)[None, :], product, 0.0), 1)
                    product = tl.where((columns == SCALE_WORD)[None, :], 0.0, product)
                rounded = product.to(DTYPE)
                out = absorbed + index[:, None] * (OPERANDS * COLUMNS) + j * COLUMNS + columns[None, :]
                tl.store(out, rounded, mask=inside[:, None] & (columns < COLUMNS)[None, :])
                if CODED:
                    each = tl.full((PADDED, 8), excess(j, DTYPE), DTYPE)
                    too_much = tl.dot(rounded, each, too_much, input_precision=PRECISION)
            if CODED:
                # Parts of the logits that all keys of a block share: of the constant key, and what operands have too
                # much.
                of_block = tl.sum(shared, 1) * 64.0 + still
                scaled = of_scale - tl.sum(too_much, 1) * 0.125
                if SCALED:
                    both = constant + 2 * (index - own_row) + own_row
                    tl.store(both, of_block * scale, mask=inside)
                    tl.store(both + TOKENS * ROWS, scaled, mask=inside)
                else:
                    tl.store(constant + index, (of_block + scaled) * scale, mask=inside)
            if FAST:
                # Fast planes of the query, rotated back; the second product adds the rounding error of cos and sin.
                fast_at = fast_starts + at_block[:, None] * (4 * FAST) + f[None, :]
                of_block_fast = tl.zeros((COUNT, 2 * FAST), tl.float32)
                own_start = tl.load(fast_at, mask=inside[:, None], other=0.0)
                of_block_fast = tl.dot(own_start, of_fast, of_block_fast, input_precision=PRECISION)
                own_start = tl.load(fast_at + 2 * FAST, mask=inside[:, None], other=0.0)
                of_block_fast = tl.dot(own_start, of_fast, of_block_fast, input_precision=PRECISION)
                tl.store(
                    fast_query + index[:, None] * (2 * FAST) + f[None, :], of_block_fast.to(DTYPE), mask=inside[:, None]
                )


@triton.jit
def of_operand(basis, width, some, OPERAND: tl.constexpr, CODED: tl.constexpr):
    """The columns of an operand that decoding reads, from a basis of nibbles and crumbs: see `decode.excess`."""
    found = tl.load(basis + OPERAND * width, mask=some, other=0.0).to(tl.float32)
    if CODED and OPERAND == 2:
        found -= tl.load(basis + 3 * width, mask=some, other=0.0).to(tl.float32) * 0.0625
    elif CODED and OPERAND == 3:
        found *= 0.0625
    return found
