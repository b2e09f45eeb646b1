# mypy: disable-error-code="no-untyped-def"
"""A trial kernel: decoding over rows in which each KV head has a latent of its own for its fast planes.

A group's row is whole planes of 16 nibbles, four planes to 16 words: first HEADS latents of LATENT planes each, from
which nothing but that head's fast planes is rebuilt, then the rest. Slow planes and values are linear in the whole row,
so that logits of slow planes, softmax and values go as in `rotor.kernels.decode`, whose slices, rows and results these
are. No pages, masks, soft caps or several new tokens: they cost the kernel in use little.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rotor.kernels.decode import NEG_INF, UNSEEN, opaque_copy, operands, rotated
from rotor.kernels.ranges import count_tiles, sequence_at, slice_start, slices, tiles_of

NOT_SPECIALISED = ["batch_size", "groups", "max_blocks", "row_sequence"]


@triton.jit
def load_rows(
    rows, sequence, tile, begin, until, row_sequence,
    ROW: tl.constexpr, STEP: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """[KEYS, COLUMNS] of a tile; in place of keys outside begin ... until - 1 the nearest inside, so all is finite."""
    start = tile * STEP
    place = tl.minimum(tl.maximum(tl.arange(0, KEYS), begin - start), tl.minimum(until - start, STEP) - 1)
    rows += sequence.to(tl.int64) * row_sequence + start.to(tl.int64) * ROW
    return tl.load(rows + place[:, None] * ROW + tl.arange(0, COLUMNS)[None, :])


@triton.jit
def load_words(
    rows, sequence, tile, begin, until, row_sequence, part_of_output, PARTS: tl.constexpr, PART: tl.constexpr,
    BLOCKS: tl.constexpr, SPLIT: tl.constexpr, SCALE_WORDS: tl.constexpr, ROW: tl.constexpr, STEP: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """The words of a tile: PARTS of PART columns; if these are wider than 16, BLOCKS of 16 columns that hold the fast
    latents; if values are split over programs, this program's parts; words of scales, the last one first.
    """
    found = ()
    for i in tl.static_range(PARTS):
        found += (load_rows(rows + i * PART, sequence, tile, begin, until, row_sequence, ROW, STEP, KEYS, PART),)  # fmt: skip  # noqa: E501
    for i in tl.static_range(BLOCKS):
        found += (load_rows(rows + i * 16, sequence, tile, begin, until, row_sequence, ROW, STEP, KEYS, 16),)  # fmt: skip  # noqa: E501
    if SPLIT > 1:
        for i in tl.static_range(PARTS // SPLIT):
            own = rows + (part_of_output + i) * PART
            found += (load_rows(own, sequence, tile, begin, until, row_sequence, ROW, STEP, KEYS, PART),)
    start = tile * STEP
    place = tl.minimum(tl.maximum(tl.arange(0, KEYS), begin - start), tl.minimum(until - start, STEP) - 1)
    for i in tl.static_range(SCALE_WORDS):
        own = rows + sequence.to(tl.int64) * row_sequence + start.to(tl.int64) * ROW + place * ROW
        found += (tl.load(own + (PARTS * PART - 1 - i)),)
    return found


@triton.jit
def scale_of(words, INDEX: tl.constexpr):
    """2^(n / 2 - 4) of a scale's 4 bits."""
    n = (words.to(tl.uint16, bitcast=True) >> (4 * INDEX)) & 15
    return tl.exp2(n.to(tl.float32) * 0.5 - 4.0)


@triton.jit(do_not_specialize=NOT_SPECIALISED, do_not_specialize_on_alignment=["begin", "until"])
def parted_kernel(
    query, constant, offsets, fast_query, rows, fast_basis, fast_constant, tail_basis, tail_constant, places,
    constant_keys, partial, partial_lse, begin, until, batch_size, groups, max_blocks, row_sequence, scale,
    HEADS: tl.constexpr, PER_HEAD: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, ROW: tl.constexpr,
    COLUMNS: tl.constexpr, PART: tl.constexpr, LATENT: tl.constexpr, FAST: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    SCALES: tl.constexpr, AHEAD: tl.constexpr, AGAIN: tl.constexpr, LEAN: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One slice of the line of tiles; program_id(1): which of SPLIT parts of the values.

    query: absorbed, [batch_size, max_blocks, groups, rows, 4, COLUMNS]. constant: [.., rows], logits that all keys of
    a block share. offsets: [.., SCALES, rows], what nibbles read too large add to the logits of each scale.
    fast_query: [.., rows, 2, FAST]. rows: words [batch_size, kv_len, ROW], groups of WORDS. fast_basis: [groups, HEADS,
    CHUNKS, LATENT, 2, CHUNK, 16]. fast_constant: [groups, HEADS, CHUNKS, 2, CHUNK]. places: [2, BLOCK, FAST].
    constant_keys: [groups, HEADS, BLOCK, 2, FAST], the fast planes of the constant key at each place.
    partial: [slots, rows, 4, COLUMNS]. CHUNK: fast planes that are rebuilt at once, CHUNKS times; TAIL: eight more, of
    tail_basis [groups, HEADS, LATENT, 2, 16, 16] and tail_constant [groups, HEADS, 2, 16]. SCALES of a row: none, one,
    or one for each latent. AHEAD: load the next tile before this one's softmax. AGAIN: words are unpacked again for
    values (1), and transposed as words (2). LEAN: load constants (1), places (2) with each tile.
    """
    DTYPE: tl.constexpr = query.dtype.element_ty
    OFFSET: tl.constexpr = 0.0 if tl.float32 == DTYPE else (1032.0 if tl.float16 == DTYPE else 136.0)
    LIVE: tl.constexpr = HEADS * PER_HEAD
    PARTS: tl.constexpr = WORDS // PART
    OUTPUTS: tl.constexpr = PARTS // SPLIT
    BLOCKS: tl.constexpr = 0 if PART == 16 else (HEADS * LATENT + 3) // 4
    SCALE_WORDS: tl.constexpr = (SCALES + 3) // 4
    LATENTS: tl.constexpr = SCALES if SCALES > 1 else 1
    program = tl.program_id(0)
    part_of_output = tl.program_id(1) * OUTPUTS
    place = tl.arange(0, KEYS)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, PART)
    sixteen = tl.arange(0, 16)
    live = row < LIVE
    ones = tl.full((16, KEYS), 1.0, DTYPE)
    q_block = groups * LIVE
    q_row = row[None, :] * (4 * COLUMNS) + column[:, None]

    total = count_tiles(begin, until, batch_size, KEYS) * groups
    programs = slices(total, tl.num_programs(0))
    position = tl.where(program < programs, slice_start(program, total, programs), total)
    stop = tl.where(program < programs, slice_start(program + 1, total, programs), total)
    while position < stop:
        sequence, before = sequence_at(begin, until, batch_size, groups, position, KEYS)
        b = tl.load(begin + sequence)
        u = tl.load(until + sequence)
        tiles = tiles_of(b, u, KEYS)
        group = (position - before * groups) // tiles
        tile_0 = position - before * groups - group * tiles
        tile_1 = tl.minimum(tiles, tile_0 + stop - position)
        position += tile_1 - tile_0
        tile_0 += b // KEYS
        tile_1 += b // KEYS
        slot = program + sequence * groups + group
        q_group = (sequence.to(tl.int64) * max_blocks * groups + group) * LIVE
        own_rows = rows + group * WORDS

        largest = tl.full((ROWS,), UNSEEN, tl.float32)
        total_weight = tl.zeros((16, ROWS), tl.float32)
        weighted = ()
        for _ in tl.static_range(4 * OUTPUTS):
            weighted += (tl.zeros((PART, ROWS), tl.float32),)
        if AHEAD:
            ahead = load_words(own_rows, sequence, tile_0, b, u, row_sequence, part_of_output, PARTS, PART, BLOCKS, SPLIT, SCALE_WORDS, ROW, KEYS, KEYS)  # fmt: skip  # noqa: E501
        for tile in tl.range(tile_0, tile_1, num_stages=STAGES):
            if AHEAD:
                now = ahead
            else:
                now = load_words(own_rows, sequence, tile, b, u, row_sequence, part_of_output, PARTS, PART, BLOCKS, SPLIT, SCALE_WORDS, ROW, KEYS, KEYS)  # fmt: skip  # noqa: E501
            zero = tile >> 30 if LEAN % 2 else 0  # which no compiler knows
            z = ()
            for i in tl.static_range(PARTS):
                z += operands(now[i], 4, DTYPE, ASM)
            block = q_group + (tile * KEYS // BLOCK - b // BLOCK).to(tl.int64) * q_block
            if ROWS == LIVE:
                c = tl.load(constant + block + row)
            else:
                c = tl.load(constant + block + row, mask=live, other=0.0)

            # Logits of slow planes: one sum, or one for each latent that has a scale.
            logits = ()
            for _ in tl.static_range(LATENTS):
                logits += (tl.zeros((KEYS, ROWS), tl.float32),)
            for i in tl.static_range(PARTS):
                for j in tl.static_range(4):
                    pointers = query + block * (4 * COLUMNS) + (j * COLUMNS + i * PART) + q_row
                    q = tl.load(pointers) if ROWS == LIVE else tl.load(pointers, mask=live[None, :], other=0.0)
                    logits = add_product(logits, latent_of(4 * i + j, LATENT, LATENTS), z[4 * i + j], q, PRECISION)

            # Fast planes of each head, from its own latent alone.
            if BLOCKS > 0:
                narrow = ()
                for i in tl.static_range(BLOCKS):
                    narrow += operands(now[PARTS + i], 4, DTYPE, ASM)
            else:
                narrow = z
            of_constant = tl.zeros((KEYS, ROWS), tl.float32)
            at = place + (tile >> 30 if LEAN // 2 else 0) if KEYS == BLOCK else tile * KEYS % BLOCK + place
            for h in tl.static_range(HEADS):
                own = ((row // PER_HEAD) == h) & live
                f_h = fast_query + (block + row)[None, :] * (2 * FAST)
                k_h = constant_keys + ((group * HEADS + h) * BLOCK + at)[:, None] * (2 * FAST)
                for chunk in tl.static_range(CHUNKS):
                    which = (group * HEADS + h) * CHUNKS + chunk
                    of_chunk = tl.arange(0, CHUNK)
                    plane = chunk * CHUNK + of_chunk
                    f0 = tl.load(f_h + plane[:, None], mask=own[None, :], other=0.0)
                    f1 = tl.load(f_h + FAST + plane[:, None], mask=own[None, :], other=0.0)
                    c_h = fast_constant + which * (2 * CHUNK) + of_chunk + zero
                    k0 = tl.zeros((KEYS, CHUNK), tl.float32) + tl.load(c_h)[None, :]
                    k1 = tl.zeros((KEYS, CHUNK), tl.float32) + tl.load(c_h + CHUNK)[None, :]
                    b_h = fast_basis + which * (LATENT * 2 * CHUNK * 16) + sixteen[:, None] + of_chunk[None, :] * 16
                    for p in tl.static_range(LATENT):
                        z_p = narrow[h * LATENT + p]
                        b_p = b_h + p * (2 * CHUNK * 16) + zero
                        k0 = tl.dot(z_p, tl.load(b_p), k0, input_precision=PRECISION)
                        k1 = tl.dot(z_p, tl.load(b_p + CHUNK * 16), k1, input_precision=PRECISION)
                    at_place = places + at[:, None] * FAST + plane[None, :]
                    cos = tl.load(at_place)
                    sin = tl.load(at_place + BLOCK * FAST)
                    k0, k1 = rotated(k0, k1, cos, sin, DTYPE, ASM)
                    logits = add_product(logits, h if LATENTS > 1 else 0, k0, f0, PRECISION)
                    logits = add_product(logits, h if LATENTS > 1 else 0, k1, f1, PRECISION)
                    if SCALES > 0:
                        of_constant = tl.dot(tl.load(k_h + plane[None, :]), f0, of_constant, input_precision=PRECISION)
                        of_constant = tl.dot(tl.load(k_h + FAST + plane[None, :]), f1, of_constant, input_precision=PRECISION)  # fmt: skip  # noqa: E501
                if TAIL:
                    # Eight planes, both halves side by side: k, and what sin multiplies, (-k1, k0).
                    plane = CHUNKS * CHUNK + sixteen % 8
                    half_and_plane = sixteen // 8 * FAST + plane
                    f0 = tl.load(f_h + half_and_plane[:, None], mask=own[None, :], other=0.0)
                    c_h = tail_constant + (group * HEADS + h) * 32 + sixteen + zero
                    k0 = tl.zeros((KEYS, 16), tl.float32) + tl.load(c_h)[None, :]
                    k1 = tl.zeros((KEYS, 16), tl.float32) + tl.load(c_h + 16)[None, :]
                    b_h = tail_basis + (group * HEADS + h) * (LATENT * 512) + sixteen[:, None] + sixteen[None, :] * 16
                    for p in tl.static_range(LATENT):
                        z_p = narrow[h * LATENT + p]
                        k0 = tl.dot(z_p, tl.load(b_h + p * 512 + zero), k0, input_precision=PRECISION)
                        k1 = tl.dot(z_p, tl.load(b_h + p * 512 + 256 + zero), k1, input_precision=PRECISION)
                    at_place = places + at[:, None] * FAST + plane[None, :]
                    k0 = of_both(k0, k1, tl.load(at_place), tl.load(at_place + BLOCK * FAST), DTYPE, ASM)
                    logits = add_product(logits, h if LATENTS > 1 else 0, k0, f0, PRECISION)
                    if SCALES > 0:
                        fixed = tl.load(k_h + half_and_plane[None, :])
                        of_constant = tl.dot(fixed, f0, of_constant, input_precision=PRECISION)
            scales = ()
            if SCALES > 0:
                sum_of = of_constant
                for s in tl.static_range(SCALES):
                    scales += (scale_of(now[PARTS + BLOCKS + (OUTPUTS if SPLIT > 1 else 0) + s // 4], s % 4),)
                    o = offsets + (block * SCALES + s * LIVE) + row
                    o = tl.load(o) if ROWS == LIVE else tl.load(o, mask=live, other=0.0)
                    sum_of += scales[s][:, None] * (logits[s] - o[None, :])
            else:
                sum_of = logits[0]
            if AHEAD:
                after = tl.minimum(tile + 1, tile_1 - 1)
                ahead = load_words(own_rows, sequence, after, b, u, row_sequence, part_of_output, PARTS, PART, BLOCKS, SPLIT, SCALE_WORDS, ROW, KEYS, KEYS)  # fmt: skip  # noqa: E501

            start = tile * KEYS
            visible = (place >= b - start) & (place < tl.minimum(u - start, KEYS))
            sum_of = tl.where(visible[:, None], sum_of, NEG_INF)
            now_largest = tl.maximum(largest, tl.max(sum_of, 0) * scale + c)
            weights = tl.exp2(sum_of * scale + (c - now_largest)[None, :])
            shrink = tl.exp2(largest - now_largest)[None, :]
            largest = now_largest
            rounded = weights.to(DTYPE)
            tile_weight = tl.dot(ones, rounded, tl.zeros((16, ROWS), tl.float32), input_precision=PRECISION)
            total_weight = total_weight * shrink + tile_weight
            by_latent = ()
            offset_of = ()
            if SCALES > 0:
                for s in tl.static_range(SCALES):
                    by_latent += ((weights * scales[s][:, None]).to(DTYPE),)
                    own_weight = tl.dot(ones, by_latent[s], tl.zeros((16, ROWS), tl.float32), input_precision=PRECISION)
                    offset_of += (OFFSET * tl.max(own_weight, 0)[None, :],)
            else:
                by_latent += (rounded,)
                offset_of += (OFFSET * tl.max(tile_weight, 0)[None, :],)
            added = ()
            for i in tl.static_range(OUTPUTS):
                words = now[PARTS + BLOCKS + i] if SPLIT > 1 else now[i]
                if AGAIN == 2:
                    z_i = operands(tl.trans(words), 4, DTYPE, ASM)
                elif AGAIN == 1:
                    z_i = operands(opaque_copy(words, tile >> 30, ASM), 4, DTYPE, ASM)
                elif SPLIT > 1:
                    z_i = operands(words, 4, DTYPE, ASM)
                for j in tl.static_range(4):
                    if AGAIN == 2:
                        z_j = z_i[j]
                    elif AGAIN == 1 or SPLIT > 1:
                        z_j = tl.trans(z_i[j])
                    else:
                        z_j = tl.trans(z[4 * i + j])
                    kept = weighted[4 * i + j] * shrink
                    if OFFSET > 0:
                        kept -= offset_of[latent_of(4 * i + j, LATENT, LATENTS)]
                    of_key = by_latent[latent_of(4 * i + j, LATENT, LATENTS)]
                    added += (tl.dot(z_j, of_key, kept, input_precision=PRECISION),)
            weighted = added

        seen = largest > UNSEEN
        sums = tl.where(seen, tl.max(total_weight, 0), 1.0)
        out = partial + slot.to(tl.int64) * (LIVE * 4 * COLUMNS) + row[None, :] * (4 * COLUMNS) + column[:, None]
        out += part_of_output * PART
        for i in tl.static_range(OUTPUTS):
            for j in tl.static_range(4):
                tl.store(out + (j * COLUMNS + i * PART), weighted[4 * i + j] / sums[None, :], mask=live[None, :])
        tl.store(partial_lse + slot * LIVE + row, tl.where(seen, largest + tl.log2(sums), NEG_INF), mask=live)


@triton.jit
def of_both(k, other, cos, sin, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """k cos + other sin, rounded first, in pairs of 16 bits."""
    if tl.float32 == DTYPE:
        return k * cos + other * sin
    elif ASM and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise("{ .reg .b32 t, z; mov.b32 z, 0x80008000; fma.rn.bf16x2 t, $2, $4, z; fma.rn.bf16x2 $0, $1, $3, t; }", "=r,r,r,r,r", [k.to(DTYPE), other.to(DTYPE), cos, sin], dtype=tl.bfloat16, is_pure=True, pack=2)  # fmt: skip  # noqa: E501
    else:
        a = k.to(DTYPE).to(tl.float32) * cos.to(tl.float32)
        return (a + other.to(DTYPE).to(tl.float32) * sin.to(tl.float32)).to(DTYPE)


@triton.constexpr_function
def latent_of(plane, latent_planes, latents):
    """The scale that a plane of a row has: its latent's, the last one of the rest."""
    return min(plane // latent_planes, latents - 1)


@triton.jit
def add_product(sums, INDEX: tl.constexpr, a, b, PRECISION: tl.constexpr):
    """A tuple of sums with a b added to one of them."""
    found = ()
    for i in tl.static_range(len(sums)):
        if i == INDEX:
            found += (tl.dot(a, b, sums[i], input_precision=PRECISION),)
        else:
            found += (sums[i],)
    return found
