# mypy: disable-error-code="no-untyped-def, var-annotated"
"""Absorb queries before decoding: rotate them back to the beginning of each block of keys, and multiply by the basis.

Let b be the beginning of a block. Decoding multiplies latents by R^-b q times the rows of the key basis. R^-b q times
the constant key is the part of the logits that all keys of the block share; where rows have a scale there is a second
one, which the scale of a key multiplies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import excess

INTEGERS = ["groups", "max_blocks", "query_stride", "head_stride", "starts_blocks"]
"""Integer arguments that the kernel is not specialised on: one compiled kernel serves all values."""

ADDRESSES = ["begin", "until", "query_start"]
"""Pointers that the kernel is not specialised on being multiples of 16 bytes, which depends on the part of a batch."""


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ADDRESSES)
def absorb_kernel(
    query, basis, constants, starts, absorbed, constant, begin, until, query_start,
    groups, max_blocks, query_stride, head_stride, starts_blocks, scale,
    CODED: tl.constexpr, SCALED: tl.constexpr, PLANES: tl.constexpr,
    ROTARY: tl.constexpr, HEAD_DIM: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    PER_HEAD: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    COUNT: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Absorb one query head of one new token, for COUNT blocks at a time.

    Grid: programs that share the blocks of a sequence, query heads, sequences times TOKENS.

    Tensors:
        query: [tokens, num_heads, head_dim], rotated.
        basis: [groups, HEADS, ROTARY + REST, CHUNK, operands, COLUMNS], rows of the query basis as decoding reads a
            latent: of CHUNK / 2 planes both halves, so often, then of dimensions without RoPE.
        constants: [groups, HEADS, ROTARY + REST, CHUNK, 8], the same rows of the constant key, and of that which the
            scale of a key multiplies; each is the sum of two numbers, for precision. The other columns are 0.
        starts: [blocks, 2, ROTARY * CHUNK / 2], float32, cos and sin of the beginnings of blocks, times
            RoPE's attention factor; 0 behind the last plane. Those of a sequence begin starts_blocks blocks behind
            those of the one before; 0 where all have the same.
        absorbed, constant: outputs, in the form of `decode_kernel`'s arguments. Products are in the dtype
            of the first.
    Constants:
        CHUNK: dimensions that a product takes at a time. ROTARY, REST: chunks of rotary planes, and of dimensions
            without RoPE. PLANES: number of rotary planes.
        BLOCK: positions of a block; 0 for a single block at position 0.
        SCALED: whether rows have a scale. PART: columns of an operand at a time.
        ALIGN: unit of the strides of queries.
    """
    DTYPE: tl.constexpr = absorbed.dtype.element_ty
    OPERANDS: tl.constexpr = CODED if CODED else 1
    PARTS: tl.constexpr = COLUMNS // PART
    CHUNKS: tl.constexpr = ROTARY + REST
    HALF: tl.constexpr = CHUNK // 2
    STARTS: tl.constexpr = ROTARY * HALF
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
    first_start = block_0 + sequence * starts_blocks
    first_block = tl.program_id(0) * COUNT
    if first_block < blocks:
        own = query + token.to(tl.int64) * query_stride * ALIGN + head * head_stride * ALIGN
        own_basis = basis + (head // PER_HEAD).to(tl.int64) * (CHUNKS * CHUNK * OPERANDS * COLUMNS)
        own_constants = constants + head // PER_HEAD * (CHUNKS * CHUNK * 8)
        place = tl.arange(0, COUNT)
        column = tl.arange(0, PART)
        within = tl.arange(0, CHUNK)
        eight = tl.arange(0, 8)
        # What all blocks share: the basis, and the query: of rotary planes what cos and what sin is multiplied with.
        matrices = ()
        for i in tl.static_range(PARTS):
            for j in tl.static_range(OPERANDS):
                for c in tl.static_range(CHUNKS):
                    at = own_basis + ((within + c * CHUNK) * (OPERANDS * COLUMNS))[:, None] + column[None, :]
                    matrices += (tl.load(at + (j * COLUMNS + i * PART)),)
        of_constants = ()
        if CODED:
            for c in tl.static_range(CHUNKS):
                of_constants += (tl.load(own_constants + ((within + c * CHUNK) * 8)[:, None] + eight[None, :]),)
        halves = ()
        for c in tl.static_range(ROTARY):
            halves += halves_of(own, within % HALF + c * HALF, within >= HALF, PLANES)
        still = ()
        for c in tl.static_range(REST):
            dimension = within + (2 * PLANES + c * CHUNK)
            q = tl.load(own + dimension, mask=dimension < HEAD_DIM, other=0.0).to(tl.float32)
            still += ((tl.zeros((COUNT, CHUNK), tl.float32) + q[None, :]).to(DTYPE),)
        own_row = new * ROWS + head % ROWS
        for start in range(first_block, blocks, tl.num_programs(0) * COUNT):
            block = start + place
            inside = block < blocks
            of_group = (sequence * max_blocks + block) * groups + group
            index = of_group * (TOKENS * ROWS) + own_row
            # The query at the beginnings of COUNT blocks.
            at_start = starts + (first_start + tl.minimum(block, blocks - 1))[:, None] * (2 * STARTS)
            rotated = ()
            for c in tl.static_range(ROTARY):
                plane = (within % HALF + c * HALF)[None, :]
                cos = tl.load(at_start + plane)
                sin = tl.load(at_start + STARTS + plane)
                rotated += ((halves[2 * c][None, :] * cos + halves[2 * c + 1][None, :] * sin).to(DTYPE),)
            for c in tl.static_range(REST):
                rotated += (still[c],)
            # Constants of the block's logits: of the constant keys, less what operands have too much.
            shared = tl.zeros((COUNT, 8), tl.float32)
            if CODED:
                for c in tl.static_range(CHUNKS):
                    shared = tl.dot(rotated[c], of_constants[c], shared, input_precision=PRECISION)
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
                        less = tl.where((eight == 2)[None, :], -excess(j, DTYPE), tl.zeros((PART, 8), tl.float32))
                        shared = tl.dot(rounded, less.to(DTYPE), shared, input_precision=PRECISION)
            if CODED:
                of_scale = (eight // 2 == 1)[None, :]
                scaled = tl.sum(tl.where(of_scale, shared, 0.0), 1)
                unscaled = tl.sum(tl.where(of_scale, 0.0, shared), 1)
                if SCALED:
                    pair = constant + 2 * of_group * (TOKENS * ROWS) + own_row
                    tl.store(pair, unscaled * scale, mask=inside)
                    tl.store(pair + TOKENS * ROWS, scaled, mask=inside)
                else:
                    tl.store(constant + index, (unscaled + scaled) * scale, mask=inside)


@triton.jit
def halves_of(query, plane, second, PLANES: tl.constexpr):
    """What rotating a query back multiplies with cos and sin, in first or second halves of some planes, float32.

    q0 cos + q1 sin and q1 cos - q0 sin; 0 in planes from PLANES on.
    """
    there = plane < PLANES
    of_cos = tl.load(query + tl.where(second, PLANES + plane, plane), mask=there, other=0.0).to(tl.float32)
    of_sin = tl.load(query + tl.where(second, plane, PLANES + plane), mask=there, other=0.0).to(tl.float32)
    return of_cos, tl.where(second, -of_sin, of_sin)
