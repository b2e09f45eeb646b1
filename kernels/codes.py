# mypy: disable-error-code="no-untyped-def"
"""Codes out of words and into them, inside kernels: see `rotor.columns` for how columns lie in a word.

Numbers are made without a conversion from integers: a code's bits go into the mantissa of a constant large enough that
its last places count ones, and the constant is subtracted, which is exact. In 16 bits one shift, one mask and one
subtraction serve two columns.
"""

import triton
import triton.language as tl


@triton.jit
def _spread(words, BITS: tl.constexpr):
    """Each word once for each pair of its columns, their codes in the lowest bits of both halves; new axes last."""
    spread = words
    if BITS <= 8:
        spread = tl.join(spread, spread >> 8)
    if BITS <= 4:
        spread = tl.join(spread, spread >> 4)
    if BITS <= 2:
        spread = tl.join(spread, spread >> 2)
    return spread


@triton.jit
def _halves(words, DTYPE: tl.constexpr):
    """Both halves of words as 16-bit numbers, along a new last axis."""
    low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def unpack(words, ROWS: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """[ROWS, WORDS] words -> [ROWS, columns] of DTYPE: code - 2^(BITS - 1), or at 16 bits the numbers themselves."""
    middle: tl.constexpr = 1 << (BITS - 1)
    mask: tl.constexpr = (1 << BITS) - 1
    if DTYPE.primitive_bitwidth == 32:
        if BITS == 16:
            numbers = words.to(DTYPE, bitcast=True)
        else:
            spread = _spread(words, BITS)
            codes = tl.join(spread & mask, (spread >> 16) & mask)
            # 2^23 + code: from 2^23 on ones are the last place.
            numbers = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + middle)
    elif BITS == 16:
        numbers = _halves(words, DTYPE)
    elif tl.float16 == DTYPE:
        # 1024 + code: from 1024 on ones are the last place.
        numbers = _halves((_spread(words, BITS) & (mask * 0x10001)) | 0x64006400, DTYPE) - (1024.0 + middle)
    elif BITS < 8:
        # 128 + code, as above.
        numbers = _halves((_spread(words, BITS) & (mask * 0x10001)) | 0x43004300, DTYPE) - (128.0 + middle)
    else:
        # 128 + the lowest seven bits, minus 256, or 128 where the eighth bit is set.
        spread = _spread(words, BITS)
        numbers = _halves((spread & 0x007F007F) | 0x43004300, DTYPE)
        numbers -= _halves((spread & 0x00800080) ^ 0x43804380, DTYPE)
    return tl.reshape(numbers, (ROWS, WORDS * (1 if BITS == 16 and DTYPE.primitive_bitwidth == 32 else 32 // BITS)))
