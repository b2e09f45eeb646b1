# mypy: disable-error-code="no-untyped-def, var-annotated"
"""Absorb queries before decoding: rotate them back to the beginning of each block of keys, and multiply by the basis.

Let b be the beginning of a block. Decoding multiplies latents by R^-b q times the rows of the key basis. R^-b q times
the constant key is the part of the logits that all keys of the block share; where rows have a scale there is a second
one, which the scale of a key multiplies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode import UNIT, excess

INTEGERS = ["max_blocks", "query_stride", "head_stride", "starts_blocks"]
"""Integer arguments that the kernel is not specialised on: one compiled kernel serves all values."""

ADDRESSES = ["begin", "until", "query_start"]
"""Pointers that the kernel is not specialised on being multiples of 16 bytes, which depends on the part of a batch."""


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ADDRESSES)
def absorb_kernel(
    query, basis, constants, starts, absorbed, constant, begin, until, query_start,
    max_blocks, query_stride, head_stride, starts_blocks, scale,
    GROUPS: tl.constexpr, CODED: tl.constexpr, SCALED: tl.constexpr, PLANES: tl.constexpr,
    ROTARY: tl.constexpr, HEAD_DIM: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    PER_HEAD: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    COUNT: tl.constexpr, STAGES: tl.constexpr, HELD: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Absorb one query head of one new token, for COUNT blocks at a time.

    Grid: programs that share the blocks of a sequence, query heads, sequences times TOKENS.

    query: [tokens, num_heads, head_dim], rotated; ALIGN: unit of its strides. query_start: of `ranges.KeyRanges`. All
    else is as in `absorb_head`.
    """
    head = tl.program_id(1)
    sequence = tl.program_id(2) // TOKENS
    new = tl.program_id(2) % TOKENS
    token = sequence
    b = tl.load(begin + sequence)
    u = tl.load(until + sequence)
    if TOKENS > 1:
        token = tl.load(query_start + sequence) + new
        u = tl.where(token < tl.load(query_start + sequence + 1), u, 0)  # padding tokens attend to nothing
    absorb_head(
        query + token.to(tl.int64) * query_stride * ALIGN + head * head_stride * ALIGN, query, query, basis, constants,
        starts, absorbed, constant, b, u, head, sequence, new, tl.program_id(0), tl.num_programs(0), max_blocks,
        starts_blocks, scale, False, GROUPS, CODED, SCALED, PLANES, ROTARY, HEAD_DIM, REST, BLOCK, HEADS, PER_HEAD,
        TOKENS, COLUMNS, PART, CHUNK, COUNT, STAGES, HELD, PRECISION, ASM,
    )  # fmt: skip


@triton.jit
def absorb_head(
    query_row, query_cos, query_sin, basis, constants, starts, absorbed, constant, begin, until, head, sequence, new,
    program, programs, max_blocks, starts_blocks, scale, ROTATE: tl.constexpr,
    GROUPS: tl.constexpr, CODED: tl.constexpr, SCALED: tl.constexpr, PLANES: tl.constexpr,
    ROTARY: tl.constexpr, HEAD_DIM: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    PER_HEAD: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    COUNT: tl.constexpr, STAGES: tl.constexpr, HELD: tl.constexpr, PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Absorb one query head of one new token for the blocks of its sequence that a program has, COUNT at a time.

    Tensors:
        query_row: [head_dim], rotated; with ROTATE before RoPE, and query_cos, query_sin are those of its position,
            [planes].
        basis: [groups, HEADS, ROTARY + REST, CHUNK, operands, COLUMNS], rows of the query basis as decoding reads a
            latent: of CHUNK / 2 planes both halves as neighbours, so often, then of dimensions without RoPE.
        constants: [groups, HEADS, ROTARY + REST, CHUNK, 8], the same rows of the constant key, and of that which the
            scale of a key multiplies; each is the sum of two numbers, for precision. The other columns are 0.
        starts: [blocks and at least COUNT more, 2, ROTARY * CHUNK / 2], float32, cos and sin of the beginnings of
            blocks, times RoPE's attention factor; 0 behind the last plane. Those of a sequence begin starts_blocks
            blocks behind those of the one before; 0 where all have the same.
        absorbed, constant: outputs, in the form of `decode_kernel`'s arguments. Products are in the dtype
            of the first.
    begin, until: the keys that the sequence attends to. new: which of its TOKENS new tokens. program, programs: which
    of those that share the blocks.
    Constants:
        CHUNK: dimensions that a product takes at a time. ROTARY, REST: chunks of rotary planes, and of dimensions
            without RoPE. PLANES: number of rotary planes.
        BLOCK: positions of a block; 0 for a single block at position 0.
        SCALED: whether rows have a scale. PART: columns at a time, of all operands side by side.
        HELD: keep the basis in shared memory; else each COUNT blocks load it anew. STAGES: of copies. ASM: see `once`.
    """
    DTYPE: tl.constexpr = absorbed.dtype.element_ty
    OPERANDS: tl.constexpr = CODED if CODED else 1
    WIDTH: tl.constexpr = OPERANDS * COLUMNS
    PARTS: tl.constexpr = WIDTH // PART
    CHUNKS: tl.constexpr = ROTARY + REST
    HALF: tl.constexpr = CHUNK // 2
    STARTS: tl.constexpr = ROTARY * HALF
    ROWS: tl.constexpr = HEADS * PER_HEAD
    group = head // ROWS
    # Blocks that the sequence attends to, from block_0 on.
    block_0 = begin // BLOCK if BLOCK else 0
    blocks = ((until + BLOCK - 1) // BLOCK - block_0) if BLOCK else tl.where(until > begin, 1, 0)
    first_start = block_0 + sequence * starts_blocks
    first_block = program * COUNT
    if first_block < blocks:
        own_basis = basis + (head // PER_HEAD).to(tl.int64) * (CHUNKS * CHUNK * OPERANDS * COLUMNS)
        own_constants = constants + head // PER_HEAD * (CHUNKS * CHUNK * 8)
        place = tl.arange(0, COUNT)
        column = tl.arange(0, PART)
        within = tl.arange(0, CHUNK)
        half = tl.arange(0, HALF)
        eight = tl.arange(0, 8)
        # What all blocks share: the basis, [CHUNK, PART]; what the operands of columns have too much, [PART, 8]; the
        # constants, [CHUNK, 8]; the query, in halves of its planes, [1, HALF], and without RoPE, [COUNT, CHUNK].
        matrices = ()
        of_excess = ()
        at_basis = own_basis + (within * WIDTH)[:, None] + column[None, :]
        for i in tl.static_range(PARTS):
            if HELD:
                for c in tl.static_range(CHUNKS):
                    matrices += (tl.load(at_basis + (c * CHUNK * WIDTH + i * PART)),)
            less = tl.zeros((PART,), tl.float32)
            for j in tl.static_range(OPERANDS):
                less = tl.where((i * PART + column) // COLUMNS == j, -excess(j), less)
            of_excess += (tl.where((eight == 2)[None, :], less[:, None], 0.0).to(DTYPE),)
        of_constants = ()
        if CODED:
            for c in tl.static_range(CHUNKS):
                of_constants += (tl.load(own_constants + ((within + c * CHUNK) * 8)[:, None] + eight[None, :]),)
        planes = ()
        for c in tl.static_range(ROTARY):
            plane = half + c * HALF
            own = tl.load(query_row + plane, mask=plane < PLANES, other=0.0)
            other = tl.load(query_row + PLANES + plane, mask=plane < PLANES, other=0.0)
            if ROTATE:
                own, other = rotated_planes(own, other, query_cos, query_sin, plane, plane < PLANES)
            planes += (own.to(tl.float32)[None, :], other.to(tl.float32)[None, :])
        still = ()
        for c in tl.static_range(REST):
            dimension = within + (2 * PLANES + c * CHUNK)
            q = tl.load(query_row + dimension, mask=dimension < HEAD_DIM, other=0.0).to(tl.float32)
            still += ((tl.zeros((COUNT, CHUNK), tl.float32) + q[None, :]).to(DTYPE),)
        # Places of COUNT blocks behind the first, in starts and among the results.
        at_start = starts + (place * (2 * STARTS))[:, None] + half[None, :]
        at_block = place * (GROUPS * TOKENS * ROWS)
        out = absorbed + (at_block * WIDTH)[:, None] + column[None, :]
        # COUNT blocks are the rows of one product: the basis, which is the larger operand, is loaded once for all.
        for start in tl.range(first_block, blocks, programs * COUNT, num_stages=STAGES):
            inside = start + place < blocks
            of_group = ((sequence * max_blocks + start) * GROUPS + group).to(tl.int64)
            index = of_group * (TOKENS * ROWS) + (new * ROWS + head % ROWS)
            # The query at the beginnings of COUNT blocks: both halves of its planes rotated back.
            rotated = ()
            for c in tl.static_range(ROTARY):
                # [COUNT, HALF]
                cos = tl.load(at_start + ((first_start + start) * (2 * STARTS) + c * HALF))
                sin = tl.load(at_start + ((first_start + start) * (2 * STARTS) + STARTS + c * HALF))
                first = planes[2 * c] * cos + planes[2 * c + 1] * sin
                second = planes[2 * c + 1] * cos - planes[2 * c] * sin
                rotated += (once(tl.reshape(tl.join(first, second), (COUNT, CHUNK)).to(DTYPE), ASM),)
            rotated += still
            # Constants of the block's logits: of the constant keys, less what operands have too much.
            shared = tl.zeros((COUNT, 8), tl.float32)
            if CODED:
                for c in tl.static_range(CHUNKS):
                    shared = tl.dot(rotated[c], of_constants[c], shared, input_precision=PRECISION)
            # Absorbed queries, PART columns at a time. What decoding reads too much is counted of the rounded numbers,
            # with which it multiplies.
            for i in tl.static_range(PARTS):
                product = tl.zeros((COUNT, PART), tl.float32)
                for c in tl.static_range(CHUNKS):
                    if HELD:
                        matrix = matrices[i * CHUNKS + c]
                    else:
                        matrix = tl.load(at_basis + (c * CHUNK * WIDTH + i * PART))
                    product = tl.dot(rotated[c], matrix, product, input_precision=PRECISION)
                rounded = product.to(DTYPE)
                tl.store(out + (index * WIDTH + i * PART), rounded, mask=inside[:, None])
                if CODED:
                    shared = tl.dot(rounded, of_excess[i], shared, input_precision=PRECISION)
            # Two numbers for each constant, for precision; those that a scale multiplies are stored apart.
            if CODED:
                of_scale = (eight // 2 == 1)[None, :]
                scaled = tl.sum(tl.where(of_scale, shared, 0.0), 1)
                unscaled = tl.sum(tl.where(of_scale, 0.0, shared), 1)
                if SCALED:
                    pair = constant + (2 * of_group * (TOKENS * ROWS) + (new * ROWS + head % ROWS)) + 2 * at_block
                    tl.store(pair, unscaled * scale, mask=inside)
                    tl.store(pair + TOKENS * ROWS, scaled * UNIT, mask=inside)
                else:
                    tl.store(constant + index + at_block, (unscaled + scaled) * scale, mask=inside)


@triton.jit
def rotated_planes(first, second, cos, sin, plane, there):
    """Both halves of rotary planes, rotated by cos and sin, and rounded as the rotated query is stored."""
    own_cos = tl.load(cos + plane, mask=there, other=1.0).to(tl.float32)
    own_sin = tl.load(sin + plane, mask=there, other=0.0).to(tl.float32)
    kind = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    return (first * own_cos - second * own_sin).to(kind), (second * own_cos + first * own_sin).to(kind)


@triton.jit
def once(numbers, ASM: tl.constexpr):
    """The same numbers, of 16 bits, which the compiler does not compute twice for two products."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [numbers], dtype=numbers.dtype, is_pure=False, pack=2
        )
    else:
        return numbers
