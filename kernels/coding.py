# mypy: disable-error-code="no-untyped-def"
"""Code the latents of joint groups: choose the scale of a row, and code the latents by it.

`append` leaves the latents of all groups in memory, since the scale depends on all of a group's. A program makes some
words of a group's row for some tokens; the scale, which all of these share, it computes itself.
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
    SCALE_LARGEST,
    SCALE_MIDDLE,
    SCALE_STEPS,
    SIGNED,
    WORD_PLANES,
    CodedRow,
    Digit,
    RowScale,
)

from .launch import device_table, launch

FIELDS = 7
"""Numbers that describe a job: the group's first channel; its channels; first entry of the digit table; words of the
group; first word in the layer's row; words with content; words to write."""

COLUMNS = 64
"""Digits that a program makes."""

CHANNELS = 64
"""Channels that a program reads at a time."""

EMPTY, SCALE_DIGIT = -1, -2
"""Entries of the digit table without a digit, and of the scale of a row."""

INTEGERS = [
    "first_token", "tokens", "seq_len", "page", "latent_start", "latent_batch", "latent_position", "row_page",
    "row_row",
]  # fmt: skip
"""Integer arguments that the kernel is not specialised on: one compiled kernel serves all lengths."""

ADDRESSES = ["latents", "slots", "rows"]
"""Pointers that the kernel is not specialised on being multiples of 16 bytes, which a view may not be."""


@triton.jit
def packed(latents, place, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PLANES: tl.constexpr):
    """Quantise latents, given plane by plane, and pack them into words of four nibbles, [ROWS, COLUMNS / PLANES] int32.

    With 8 planes the first four have nibbles and higher crumbs, the others the lower crumbs of planes 3, 2, 1 and 0.
    place: entries of the digit table, see `digits_of`. scale: [ROWS], the nibble of each row's scale.
    """
    known = tl.maximum(place, 0)
    # The code of the channel: floor, clamped to its bits, made unsigned.
    half = (1 << tl.maximum((known >> 5) % 32 - 1, 0)).to(tl.float32)
    code = tl.minimum(tl.maximum(tl.floor(latents), -half[None, :]), half[None, :] - 1.0) + half[None, :]
    # The digit of that code; an empty place has the nibble 8, which is read as 0.
    plane = tl.arange(0, COLUMNS) // (COLUMNS // PLANES)
    crumb = known % 2
    digit = (code.to(tl.int32) >> ((known >> 1) % 16)[None, :]) & (15 - 12 * crumb)[None, :]
    digit = tl.where((place >= 0)[None, :], digit, tl.where(plane < 4, 8, 0)[None, :])
    digit = tl.where((place == -2)[None, :], scale[:, None], digit)
    digit = digit << tl.where(plane < 4, 4 * plane + 2 * crumb, 28 - 4 * plane)[None, :]
    return tl.sum(tl.reshape(digit, (ROWS, PLANES, COLUMNS // PLANES)), 1)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ADDRESSES)
def code_kernel(
    latents, shift, length, halves, slots, rows, places, jobs,
    first_token, tokens, seq_len, page, latent_start, latent_batch, latent_position, row_page, row_row,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
    FIELDS: tl.constexpr, PLANES: tl.constexpr, MIDDLE: tl.constexpr, LARGEST: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Do one job for ROWS of the tokens first_token ... tokens - 1; see `code`. Grid: blocks of ROWS tokens, jobs.

    Tensors:
        latents: of all groups, as projections put them out, less the first latent_start. shift, length: [rank] float32.
        halves: [rank], float32, half the number of codes of each channel. places: the digit table.
    Constants:
        SLOTS: `slots` is given. PLANES: planes of the digit table, 4 or 8.
        MIDDLE, LARGEST, STEPS: nibbles of a scale of 1 and of the largest one, and those by which a scale doubles.
    """
    token = first_token + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = token < tokens
    job = jobs + tl.program_id(1) * FIELDS
    first, rank = tl.load(job), tl.load(job + 1)
    start, words, first_word = tl.load(job + 2), tl.load(job + 3), tl.load(job + 4)
    held, written = tl.load(job + 5), tl.load(job + 6)
    own = latents + (token // seq_len).to(tl.int64) * latent_batch + (token % seq_len).to(tl.int64) * latent_position
    own -= latent_start
    channel = tl.arange(0, CHANNELS)

    # The scale, from the weighted mean square of all latents.
    energy = tl.zeros((ROWS,), tl.float32)
    for before in range(0, rank, CHANNELS):
        some = before + channel < rank
        latent = own[:, None] + (first + before + channel)[None, :]
        p = tl.load(latent, mask=valid[:, None] & some[None, :], other=0.0).to(tl.float32)
        energy += tl.sum(p * p * tl.load(length + first + before + channel, mask=some, other=0.0)[None, :], 1)
    doubled = tl.log2(tl.maximum(energy, 1e-30)) * (0.5 * STEPS)
    nibble = tl.minimum(tl.maximum(tl.floor(doubled + 0.5) + MIDDLE, 0.0), LARGEST)
    scale = tl.exp2((nibble - MIDDLE) / STEPS)
    # The next larger one, if what is beyond the levels costs more than steps that are so much coarser.
    larger = tl.exp2((nibble + 1 - MIDDLE) / STEPS)
    lost, lost_by_larger = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for before in range(0, rank, CHANNELS):
        some = before + channel < rank
        latent = own[:, None] + (first + before + channel)[None, :]
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

    # Latents over the scale, of which the digits are.
    plane, word = tl.arange(0, COLUMNS) // (COLUMNS // PLANES), tl.arange(0, COLUMNS) % (COLUMNS // PLANES)
    place = tl.load(places + start + plane * words + word, mask=word < held, other=-1)
    own_channel, some = place >> 10, place >= 0
    latent = own[:, None] + (first + own_channel)[None, :]
    p = tl.load(latent, mask=valid[:, None] & some[None, :], other=0.0).to(tl.float32)
    target = p / scale[:, None] + tl.load(shift + first + own_channel, mask=some, other=0.0)[None, :]

    # Write to the token's row, or to its slot in pages; a negative slot is not written.
    slot = token.to(tl.int64)
    stored = valid
    if SLOTS:
        slot = tl.load(slots + token, mask=valid, other=-1).to(tl.int64)
        stored = valid & (slot >= 0)
        slot = tl.maximum(slot, 0)
    out = tl.arange(0, COLUMNS // PLANES)
    result = tl.where((out < held)[None, :], packed(target, place, nibble.to(tl.int32), ROWS, COLUMNS, PLANES), 0)
    to = rows + (slot // page * row_page + slot % page * row_row)[:, None] + (first_word + out)[None, :]
    tl.store(to, result.to(rows.dtype.element_ty), mask=stored[:, None] & (out < written)[None, :])


def code(
    latents: Tensor,
    layout: LayerLayout,
    scale: RowScale,
    rows: Tensor,
    strides: tuple[int, int, int],
    tokens: range,
    seq_len: int,
    slots: Tensor | None = None,
) -> None:
    """Code and pack the latents of some tokens, in one launch.

    Args:
        latents: [batch_size, seq_len, rank], of all groups side by side, or those of `tokens` alone, [tokens, rank].
            The innermost stride is 1.
        rows: words to write into. strides: tokens of a page (or of a sequence), and words from one page, and from one
            token, to the next.
        tokens: which of all, counted through the sequences.
        slots: [batch_size * seq_len], see `append.append`.
    """
    plan = coding_plan(layout, rows.device)
    rows_each, warps = (16, 4) if len(tokens) <= 512 else (64, 8)  # of a program
    alone = latents.dim() == 2
    position = latents.stride(-2)
    of_latents = (tokens.start * position, seq_len * position) if alone else (0, latents.stride(0))
    grid = triton.cdiv(len(tokens), rows_each), len(plan.jobs)
    launch(
        code_kernel, grid, latents, scale.shift, scale.length, plan.halves,
        plan.jobs if slots is None else slots, rows, plan.places, plan.jobs, tokens.start, tokens.stop,
        seq_len, strides[0], *of_latents, position, *strides[1:],
        SLOTS=slots is not None, ROWS=rows_each, COLUMNS=COLUMNS, CHANNELS=CHANNELS, FIELDS=FIELDS, PLANES=plan.planes,
        MIDDLE=SCALE_MIDDLE, LARGEST=SCALE_LARGEST, STEPS=SCALE_STEPS, num_warps=warps,
    )  # fmt: skip


class CodingPlan(NamedTuple):
    """Tables of a layer on a device.

    places: the digit table, see `digits_of`. jobs: [jobs, FIELDS]. halves: as for `code_kernel`. planes: of the table.
    """

    places: Tensor
    jobs: Tensor
    halves: Tensor
    planes: int


@lru_cache(maxsize=4096)
def coding_plan(layout: LayerLayout, device: torch.device) -> CodingPlan:
    """Make the tables of a layer of joint groups of codes."""
    planes = planes_of(layout)
    places: list[int] = []
    jobs: list[list[int]] = []
    halves: list[float] = []
    channel = 0
    row_words = layout.row_bytes(2)[0] // 2
    begins = [key // 2 for key, _ in layout.byte_offsets(2)]
    for group, begin, end in zip(layout.groups, begins, [*begins[1:], row_words], strict=True):
        row, first = group.key, len(places)
        assert isinstance(row, CodedRow)
        places += [entry for plane in digits_of(row, 0, planes) for entry in plane]
        for word in range(0, end - begin, COLUMNS // planes):
            left = row.words - word
            jobs.append([channel, row.rank, first + word, row.words, begin + word, left, end - begin - word])
        halves += [2.0 ** (bits - 1) for bits in row.bits]
        channel += row.rank
    return CodingPlan(
        device_table(places, device), device_table(jobs, device), device_table(halves, device, torch.float32), planes
    )


def planes_of(layout: LayerLayout) -> int:
    """Planes of a layer's digit tables: of nibbles, and, where some are split, of lower crumbs."""
    return WORD_PLANES if layout.operands <= WORD_PLANES else 2 * WORD_PLANES


def digits_of(row: CodedRow, before: int, planes: int) -> list[list[int]]:
    """Entries of the digit table for a row, plane by plane: the highest digits, then, with 8 planes, lower crumbs.

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

    by_plane = [row.slots[i : i + row.words] for i in range(0, len(row.slots), row.words)]
    numbered = [(plane, 0) for plane in by_plane] + [(plane, 1) for plane in reversed(by_plane)]
    return [[entry(digits, number) for digits in plane] for plane, number in numbered[:planes]]


assert SIGNED == 8, "`packed` writes this nibble to empty slots"
