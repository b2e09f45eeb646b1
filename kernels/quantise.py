# mypy: disable-error-code="no-untyped-def"
"""Code the latents of joint groups: choose the scale of a row, and code the latents by it.

The scale depends on all latents of a group, which therefore lie in memory; `append` calls this once they do.
`rotor.checkpoint.tensors.layer_tensors` has the formula.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotor.checkpoint.layout import LayerLayout
from rotor.checkpoint.rows import (
    CRUMB_BITS,
    SCALE,
    SIGNED,
    WORD_NIBBLES,
    CodedRow,
    Digit,
)

from .launch import device_table

GROUP_FIELDS = 6
"""Numbers that describe a group: its first channel; its channels; first entry of the digit table; its words; first word
in the layer's row; words to write."""

COLUMNS = 64
"""Digits that are made at a time, and channels that are read."""

EMPTY, SCALE_DIGIT = -1, -2
"""Entries of the digit table without a digit, and of the scale of a row."""


@triton.jit
def packed(latents, place, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr):
    """Quantise latents, given lane by lane, and pack them into words of four nibbles, [ROWS, COLUMNS / LANES] int32.

    With 8 lanes the first four have nibbles and higher crumbs, the others the lower crumbs of lanes 3, 2, 1 and 0.
    place: entries of the digit table, see `digits_of`. scale: [ROWS], the nibble of each row's scale.
    """
    known = tl.maximum(place, 0)
    # The code of the channel: floor, clamped to its bits, made unsigned.
    half = (1 << tl.maximum((known >> 5) % 32 - 1, 0)).to(tl.float32)
    code = tl.minimum(tl.maximum(tl.floor(latents), -half[None, :]), half[None, :] - 1.0) + half[None, :]
    # The digit of that code; an empty place has the nibble 8, which is read as 0.
    lane = tl.arange(0, COLUMNS) // (COLUMNS // LANES)
    crumb = known % 2
    digit = (code.to(tl.int32) >> ((known >> 1) % 16)[None, :]) & (15 - 12 * crumb)[None, :]
    digit = tl.where((place >= 0)[None, :], digit, tl.where(lane < 4, 8, 0)[None, :])
    digit = tl.where((place == -2)[None, :], scale[:, None], digit)
    digit = digit << tl.where(lane < 4, 4 * lane + 2 * crumb, 28 - 4 * lane)[None, :]
    return tl.sum(tl.reshape(digit, (ROWS, LANES, COLUMNS // LANES)), 1)


@triton.jit
def code_group(
    first_latent, shift, length, halves, rows, places, group, valid, stored,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, MIDDLE: tl.constexpr, LARGEST: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Code the latents of a group of ROWS tokens, and write its words.

    Tensors:
        first_latent, rows: [ROWS], pointers to the first latent of all groups, and to the first word of the row, of
            each token.
        shift, length, halves: [rank] float32; halves: half the number of codes of each channel. places: the digit
            table. group: [GROUP_FIELDS].
        valid: whether a token is there; stored: and its row is written.
    Constants:
        LANES: lanes of the digit table, 4 or 8.
        MIDDLE, LARGEST, STEPS: nibbles of a scale of 1 and of the largest one, and those by which a scale doubles.
    """
    first, rank, start = tl.load(group), tl.load(group + 1), tl.load(group + 2)
    words, first_word, written = tl.load(group + 3), tl.load(group + 4), tl.load(group + 5)
    channel = tl.arange(0, COLUMNS)

    # The scale, from the weighted mean square of all latents: half of its logarithm, rounded to a nibble.
    energy = tl.zeros((ROWS,), tl.float32)
    for before in range(0, rank, COLUMNS):
        some = before + channel < rank
        latent = first_latent[:, None] + (first + before + channel)[None, :]
        p = tl.load(latent, mask=valid[:, None] & some[None, :], other=0.0).to(tl.float32)
        energy += tl.sum(p * p * tl.load(length + first + before + channel, mask=some, other=0.0)[None, :], 1)
    doubled = tl.log2(tl.maximum(energy, 1e-30)) * (0.5 * STEPS)
    nibble = tl.minimum(tl.maximum(tl.floor(doubled + 0.5) + MIDDLE, 0.0), LARGEST)
    scale = tl.exp2((nibble - MIDDLE) / STEPS)
    # One scale serves all channels, so an outlier may lie beyond the levels; a larger scale makes every step coarser.
    # Both cost a squared error, of which 1/12 of a squared step is that of rounding. The second pass compares them:
    # the next larger one, if what is beyond the levels costs more than steps that are so much coarser.
    larger = tl.exp2((nibble + 1 - MIDDLE) / STEPS)
    lost, lost_by_larger = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for before in range(0, rank, COLUMNS):
        some = before + channel < rank
        latent = first_latent[:, None] + (first + before + channel)[None, :]
        p = tl.load(latent, mask=valid[:, None] & some[None, :], other=0.0).to(tl.float32)
        moved_by = tl.load(shift + first + before + channel, mask=some, other=0.0)[None, :]
        most = tl.load(halves + first + before + channel, mask=some, other=0.0)[None, :] - 0.5
        beyond = tl.maximum(tl.abs(p / scale[:, None] + moved_by) - most, 0.0)
        lost += tl.sum(tl.where(some[None, :], beyond * beyond + 1 / 12, 0.0), 1)
        beyond = tl.maximum(tl.abs(p / larger[:, None] + moved_by) - most, 0.0)
        lost_by_larger += tl.sum(tl.where(some[None, :], beyond * beyond + 1 / 12, 0.0), 1)
    is_larger = (larger * larger * lost_by_larger < scale * scale * lost) & (nibble < LARGEST)
    nibble = tl.where(is_larger, nibble + 1, nibble)
    scale = tl.where(is_larger, larger, scale)

    # Words, of latents over the scale that are gathered by the digit table; latents come from cache, read here again.
    WORDS: tl.constexpr = COLUMNS // LANES
    lane, word = channel // WORDS, channel % WORDS
    out = tl.arange(0, WORDS)
    for before in range(0, written, WORDS):
        place = tl.load(places + start + lane * words + before + word, mask=before + word < words, other=-1)
        source, some = place >> 10, place >= 0
        latent = first_latent[:, None] + (first + source)[None, :]
        p = tl.load(latent, mask=valid[:, None] & some[None, :], other=0.0).to(tl.float32)
        target = p / scale[:, None] + tl.load(shift + first + source, mask=some, other=0.0)[None, :]
        made = packed(target, place, nibble.to(tl.int32), ROWS, COLUMNS, LANES)
        made = tl.where((before + out < words)[None, :], made, 0)
        to = rows[:, None] + (first_word + before + out)[None, :]
        tl.store(to, made.to(rows.dtype.element_ty), mask=stored[:, None] & (before + out < written)[None, :])


class CodingPlan(NamedTuple):
    """Tables of a layer on a device.

    places: the digit table, see `digits_of`. groups: [groups, GROUP_FIELDS]. halves: as for `code_group`.
    """

    places: Tensor
    groups: Tensor
    halves: Tensor


@lru_cache(maxsize=4096)
def coding_plan(layout: LayerLayout, device: torch.device) -> CodingPlan:
    """Make the tables of a layer of joint groups of codes."""
    lanes = lanes_of(layout)
    places: list[int] = []
    groups: list[list[int]] = []
    halves: list[float] = []
    channel = 0
    row_words = layout.row_bytes(2)[0] // 2
    begins = [key // 2 for key, _ in layout.byte_offsets(2)]
    for group, begin, end in zip(layout.groups, begins, [*begins[1:], row_words], strict=True):
        row, first = group.key, len(places)
        assert isinstance(row, CodedRow)
        places += [entry for lane in digits_of(row, 0, lanes) for entry in lane]
        groups.append([channel, row.rank, first, row.words, begin, end - begin])
        halves += [2.0 ** (bits - 1) for bits in row.bits]
        channel += row.rank
    return CodingPlan(
        device_table(places, device), device_table(groups, device), device_table(halves, device, torch.float32)
    )


def lanes_of(layout: LayerLayout) -> int:
    """Lanes of a layer's digit tables: of nibbles, and, where some are split, of lower crumbs."""
    return WORD_NIBBLES if layout.operands <= WORD_NIBBLES else 2 * WORD_NIBBLES


def digits_of(row: CodedRow, before: int, lanes: int) -> list[list[int]]:
    """Entries of the digit table for a row, lane by lane: the highest digits, then, with 8 lanes, lower crumbs.

    An entry is 1024 times the digit's channel, plus 32 times the channel's bits, plus 2 times the digit's first bit,
    plus 1 for a crumb; or EMPTY; or SCALE_DIGIT.

    Args:
        before: channels before those of this row.
    """

    def entry(digits: tuple[Digit, ...], number: int) -> int:
        if len(digits) <= number:
            return EMPTY
        channel, bit, bits = digits[number]
        if channel == SCALE:
            return SCALE_DIGIT
        return ((before + channel) * 32 + row.bits[channel]) * 32 + 2 * bit + (bits == CRUMB_BITS)

    by_lane = [row.slots[i : i + row.words] for i in range(0, len(row.slots), row.words)]
    numbered = [(lane, 0) for lane in by_lane] + [(lane, 1) for lane in reversed(by_lane)]
    return [[entry(digits, number) for digits in lane] for lane, number in numbered[:lanes]]


assert SIGNED == 8, "`packed` writes this nibble to empty slots"
