# mypy: disable-error-code="no-untyped-def"
"""Pieces of the attention kernels that work on one tile of keys: loading latents, rebuilding keys, soft cap.

Widths are powers of two, and the true one comes at run time: columns behind it are masked and cost no memory traffic.
"""

import triton
import triton.language as tl

from .codes import unpack


@triton.jit
def key_rows(index, start, valid, sequence, block_table, table_stride, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Batch row (or page) of the keys `index`, a tile from `start` on, and their rows in it.

    PAGE is 0 for a contiguous cache. Where a tile lies within one page, one entry of the block table serves it all.
    """
    if PAGE == 0:
        return sequence + 0 * index, index
    elif PAGE % TILE == 0:
        return tl.load(block_table + sequence * table_stride + start // PAGE) + 0 * index, index % PAGE
    else:
        return tl.load(block_table + sequence * table_stride + index // PAGE, mask=valid, other=0), index % PAGE


@triton.jit
def load_latents(base, block, row, block_stride, row_stride, width, valid, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """[keys, SIZE] of a packed row, columns FIRST ... FIRST + SIZE - 1 of a group; zeros where not valid."""
    column = FIRST + tl.arange(0, SIZE)
    offset = block.to(tl.int64) * block_stride + row.to(tl.int64) * row_stride
    return tl.load(base + offset[:, None] + column[None, :], mask=valid[:, None] & (column[None, :] < width), other=0.0)


@triton.jit
def load_piece(base, block, row, block_stride, row_stride, count, valid, BITS: tl.constexpr, SIZE: tl.constexpr,
               DTYPE: tl.constexpr):  # fmt: skip
    """The words of SIZE columns of BITS bits for each key, `count` of them from `base` on, or with BITS = 0 the numbers
    themselves; zeros behind them and where not valid.
    """
    return load_latents(base, block, row, block_stride, row_stride, count, valid, 0, elements_of(SIZE, BITS, DTYPE))


@triton.jit
def numbers_of(piece, BITS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr):
    """[TILE, SIZE] of DTYPE: what attention multiplies with, of a piece that was loaded; where it was not, finite."""
    if BITS == 0:
        return piece
    else:
        return unpack(piece, TILE, elements_of(SIZE, BITS, DTYPE), BITS, DTYPE)


@triton.jit
def elements_of(columns, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """What columns take in a row: words, or with BITS = 0 numbers."""
    if BITS == 0:
        return columns
    elif BITS == 16:
        return columns * DTYPE.primitive_bitwidth // 32
    else:
        return columns * BITS // 32


@triton.jit
def piece_places(counts, PIECES: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr):
    """Of each piece: its first column, its columns, its first element in the group's row, and its elements there."""
    first = 0
    offset = 0
    columns = ()
    for p in tl.static_range(len(PIECES)):
        count = tl.multiple_of(tl.load(counts + PIECES[p][1]), ALIGN)
        elements = tl.multiple_of(elements_of(count, PIECES[p][0], DTYPE), ROW_ALIGN)
        columns += ((first, count, offset, elements),)
        first = tl.multiple_of(first + count, ALIGN)
        offset = tl.multiple_of(offset + elements, ROW_ALIGN)
    return columns


@triton.jit
def load_basis(base, row_stride, first_row, row_count, width, FIRST: tl.constexpr, SIZE: tl.constexpr,
               ROWS: tl.constexpr):  # fmt: skip
    """[SIZE, ROWS], the transpose of ROWS rows of a basis and its columns from FIRST on; zeros behind both ends."""
    column = FIRST + tl.arange(0, SIZE)
    row = tl.arange(0, ROWS)
    mask = (row[:, None] < row_count) & (column[None, :] < width)
    block = tl.load(base + (first_row + row[:, None]) * row_stride + column[None, :], mask=mask, other=0.0)
    return tl.trans(block)


@triton.jit
def rebuilt_tile(
    base, block, row, block_stride, row_stride, valid, places, basis, basis_stride, basis_row, row_count,
    PIECES: tl.constexpr, HALF: tl.constexpr, FREQUENCIES: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both halves of a head's keys [TILE, FREQUENCIES], float32, rebuilt from latents of any width: COLUMNS at a time.

    `places` is as `piece_places` gives it; `basis_row` the head's first row at these frequencies, `row_count` how many
    there are. Latents and basis are loaded in one loop, and so copied ahead of the products.
    """
    key_0 = tl.zeros((TILE, FREQUENCIES), tl.float32)
    key_1 = tl.zeros((TILE, FREQUENCIES), tl.float32)
    for p in tl.static_range(len(PIECES)):
        for column in range(0, places[p][1], COLUMNS):
            place = tl.multiple_of(elements_of(column, PIECES[p][0], DTYPE), ROW_ALIGN)
            piece = load_piece(
                base + places[p][2] + place, block, row, block_stride, row_stride, places[p][3] - place, valid,
                PIECES[p][0], COLUMNS, DTYPE,
            )  # fmt: skip
            latents = numbers_of(piece, PIECES[p][0], COLUMNS, TILE, DTYPE)
            columns = basis + tl.multiple_of(places[p][0] + column, ALIGN)
            width = places[p][1] - column
            basis_0 = load_basis(columns, basis_stride, basis_row, row_count, width, 0, COLUMNS, FREQUENCIES)
            basis_1 = load_basis(columns, basis_stride, basis_row + HALF, row_count, width, 0, COLUMNS, FREQUENCIES)
            key_0 = tl.dot(latents, basis_0, key_0, input_precision=PRECISION)
            key_1 = tl.dot(latents, basis_1, key_1, input_precision=PRECISION)
    return key_0, key_1


@triton.jit
def rotate_tile(first, second, cos, sin):
    """Both halves of keys [keys, half], rotated."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def load_rotation(cos, sin, row, valid, stride, first, HALF: tl.constexpr, FREQUENCIES: tl.constexpr):
    """cos and sin [rows, FREQUENCIES] from frequency `first` on, in float32; the identity where there is none."""
    column = first + tl.arange(0, FREQUENCIES)
    offset = row[:, None] * stride + column[None, :]
    mask = valid[:, None] & (column[None, :] < HALF)
    return (
        tl.load(cos + offset, mask=mask, other=1.0).to(tl.float32),
        tl.load(sin + offset, mask=mask, other=0.0).to(tl.float32),
    )


@triton.jit
def rotate_back(first, second, cos, sin):
    """Both halves of queries [rows, half], rotated by minus the position of cos, sin [1, half].

    A table with an attention factor carries it in both; the factor is divided out, since the keys bring it.
    """
    norm = tl.rsqrt(cos * cos + sin * sin)
    return (first * cos + second * sin) * norm, (second * cos - first * sin) * norm


@triton.jit
def marked_keys(rows, start, read, TILE: tl.constexpr):
    """[rows, TILE], whether the bits of the keys from `start` on are set, in words of 64; all where not `read`.

    A word a row stays in few registers; a byte a key, at an address of its own, takes more than there are.
    """
    words = tl.load(rows + start // 64, mask=read, other=-1) >> (start % 64)
    column = tl.arange(0, TILE)
    if TILE <= 32:
        return ((words.to(tl.int32)[:, None] >> column[None, :]) & 1) > 0
    halves = tl.where((column < 32)[None, :], words.to(tl.int32)[:, None], (words >> 32).to(tl.int32)[:, None])
    return ((halves >> (column % 32)[None, :]) & 1) > 0


@triton.jit
def scaled_logits(scores, scale, softcap, SOFT_CAP: tl.constexpr):
    """Logits in base 2: times log2(e), after the soft cap."""
    log2_e = 1.4426950408889634
    if SOFT_CAP:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = softcap * (2.0 / (1.0 + tl.exp2(-2.0 * log2_e * (scores * (scale / softcap)))) - 1.0)
        return scores * log2_e
    return scores * (scale * log2_e)
