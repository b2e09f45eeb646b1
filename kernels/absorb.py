# mypy: disable-error-code="no-untyped-def"
"""Absorb queries before decoding: rotate them back to the beginning of each block of keys, and multiply by the basis.

Let b be the beginning of a block. Decoding multiplies latents by (R^-b q)_slow times the slow rows of the key basis.
(R^-b q)_slow times the constant key is the part of the logits that all keys of the block share; where rows have a scale
there is a second one, which the scale of a key multiplies. (R^-b q)_fast is multiplied with rebuilt planes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import excess

INTEGERS = ["groups", "max_blocks", "query_stride", "head_stride"]
"""Integer arguments that the kernel is not specialised on: one compiled kernel serves all values."""

ADDRESSES = ["begin", "until", "query_start"]
"""Pointers that the kernel is not specialised on being multiples of 16 bytes, which depends on the part of a batch."""

CHUNK = tl.constexpr(16)
"""Planes, or dimensions without RoPE, that a product takes at a time."""


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ADDRESSES)
def absorb_kernel(
    query, basis, key_constant, scaled_constant, starts, absorbed, constant, fast_query, begin, until, query_start,
    groups, max_blocks, query_stride, head_stride, scale,
    CODED: tl.constexpr, SCALED: tl.constexpr, CONSTANT: tl.constexpr, FAST: tl.constexpr, FAST_PLANES: tl.constexpr,
    PLANES: tl.constexpr, SLOW: tl.constexpr, HEAD_DIM: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, PER_HEAD: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr,
    COUNT: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Absorb one query head of one new token, for COUNT blocks at a time.

    Grid: programs that share the blocks of a sequence, query heads, sequences times TOKENS.

    Tensors:
        query: [tokens, num_heads, head_dim], rotated.
        basis: [groups, HEADS, 2 * SLOW + REST, CHUNK, operands, COLUMNS], rows of the query basis as decoding reads a
            latent: both halves of each chunk of slow planes, then dimensions without RoPE.
        key_constant: [num_kv_heads, HEAD_DIM], float32. scaled_constant: likewise, which the scale of a key multiplies.
        starts: [blocks, 2, PLANES], float32, cos and sin of the beginnings of blocks, times RoPE's attention factor.
        absorbed, constant, fast_query: outputs, in the form of `decode_kernel`'s arguments. Products are in the dtype
            of the first.
    Constants:
        SLOW, REST: chunks of slow planes, and of dimensions without RoPE. FAST: fast planes, padded. 0 means none.
        FAST_PLANES, PLANES: number of fast planes, and of all planes.
        BLOCK: positions of a block; 0 for a single block at position 0.
        SCALED: whether rows have a scale. PART: columns of an operand at a time.
        ALIGN: unit of the strides of queries.
    """
    DTYPE: tl.constexpr = absorbed.dtype.element_ty
    OPERANDS: tl.constexpr = CODED if CODED else 1
    PARTS: tl.constexpr = COLUMNS // PART
    CHUNKS: tl.constexpr = 2 * SLOW + REST
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
        own = query + token.to(tl.int64) * query_stride * ALIGN + head * head_stride * ALIGN
        of_head = key_constant + head // PER_HEAD * HEAD_DIM
        scaled_of_head = scaled_constant + head // PER_HEAD * HEAD_DIM
        own_basis = basis + (head // PER_HEAD).to(tl.int64) * (CHUNKS * CHUNK * OPERANDS * COLUMNS)
        place = tl.arange(0, COUNT)
        column = tl.arange(0, PART)
        within = tl.arange(0, CHUNK)
        matrices = ()
        for i in tl.static_range(PARTS):
            for j in tl.static_range(OPERANDS):
                for c in tl.static_range(CHUNKS):
                    at = own_basis + ((within + c * CHUNK) * (OPERANDS * COLUMNS))[:, None] + column[None, :]
                    matrices += (tl.load(at + (j * COLUMNS + i * PART)),)
        own_row = new * ROWS + head % ROWS
        for start in range(first_block, blocks, tl.num_programs(0) * COUNT):
            inside = start + place < blocks
            of_group = (sequence.to(tl.int64) * max_blocks + start + place) * groups + group
            index = of_group * (TOKENS * ROWS) + own_row
            at_start = starts + (block_0 + start + place).to(tl.int64)[:, None] * (2 * PLANES)
            # The query's slow planes and the rest of it at the beginnings of blocks, and what constant keys share.
            rotated = ()
            shared = tl.zeros((COUNT,), tl.float32)
            scaled = tl.zeros((COUNT,), tl.float32)
            for c in tl.static_range(SLOW):
                plane = within + (FAST_PLANES + c * CHUNK)
                q0, q1 = at_starts(own, at_start, plane, inside, PLANES)
                rotated += (q0.to(DTYPE), q1.to(DTYPE))
                if CONSTANT:
                    shared += of_planes(q0, q1, of_head, plane, PLANES)
                if SCALED:
                    scaled += of_planes(q0, q1, scaled_of_head, plane, PLANES)
            for c in tl.static_range(REST):
                dimension = within + (2 * PLANES + c * CHUNK)
                q = tl.load(own + dimension, mask=dimension < HEAD_DIM, other=0.0).to(tl.float32)
                rotated += ((tl.zeros((COUNT, CHUNK), tl.float32) + q[None, :]).to(DTYPE),)
                if CONSTANT:
                    shared += tl.sum(q * tl.load(of_head + dimension, mask=dimension < HEAD_DIM, other=0.0), 0)
                if SCALED:
                    scaled += tl.sum(q * tl.load(scaled_of_head + dimension, mask=dimension < HEAD_DIM, other=0.0), 0)
            # Times the basis; what operands have too much is summed by a product with a column of it.
            too_much = tl.zeros((COUNT, 8), tl.float32)
            for i in tl.static_range(PARTS):
                for j in tl.static_range(OPERANDS):
                    product = tl.zeros((COUNT, PART), tl.float32)
                    for c in tl.static_range(CHUNKS):
                        matrix = matrices[(i * OPERANDS + j) * CHUNKS + c]
                        product = tl.dot(rotated[c], matrix, product, input_precision=PRECISION)
                    rounded = product.to(DTYPE)
                    out = absorbed + index[:, None] * (OPERANDS * COLUMNS) + (j * COLUMNS + i * PART) + column[None, :]
                    tl.store(out, rounded, mask=inside[:, None])
                    if CODED:
                        each = tl.full((PART, 8), excess(j, DTYPE), DTYPE)
                        too_much = tl.dot(rounded, each, too_much, input_precision=PRECISION)
            if CODED:
                scaled -= tl.max(too_much, 1)  # all columns are equal
                if SCALED:
                    both = constant + 2 * of_group * (TOKENS * ROWS) + own_row
                    tl.store(both, shared * scale, mask=inside)
                    tl.store(both + TOKENS * ROWS, scaled, mask=inside)
                else:
                    tl.store(constant + index, (shared + scaled) * scale, mask=inside)
            if FAST:
                fast = tl.arange(0, FAST)
                q0, q1 = at_starts(own, at_start, tl.where(fast < FAST_PLANES, fast, PLANES), inside, PLANES)
                out = fast_query + index[:, None] * (2 * FAST) + fast[None, :]
                tl.store(out, q0.to(DTYPE), mask=inside[:, None])
                tl.store(out + FAST, q1.to(DTYPE), mask=inside[:, None])


@triton.jit
def at_starts(query, starts, plane, inside, PLANES: tl.constexpr):
    """Both halves of some planes of a query, rotated back to the beginnings of blocks: [blocks, planes] float32.

    Planes from PLANES on are 0.
    """
    there = plane < PLANES
    x = tl.load(query + plane, mask=there, other=0.0).to(tl.float32)[None, :]
    y = tl.load(query + PLANES + plane, mask=there, other=0.0).to(tl.float32)[None, :]
    some = inside[:, None] & there[None, :]
    cos = tl.load(starts + plane[None, :], mask=some, other=0.0)
    sin = tl.load(starts + PLANES + plane[None, :], mask=some, other=0.0)
    return x * cos + y * sin, y * cos - x * sin


@triton.jit
def of_planes(q0, q1, key, plane, PLANES: tl.constexpr):
    """Products of both halves of some planes with a constant key's, summed: [blocks]."""
    there = plane < PLANES
    k0 = tl.load(key + plane, mask=there, other=0.0)
    k1 = tl.load(key + PLANES + plane, mask=there, other=0.0)
    return tl.sum(q0 * k0[None, :] + q1 * k1[None, :], 1)
