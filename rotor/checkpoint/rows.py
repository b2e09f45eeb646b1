"""Rows: what a cache keeps of a token for a group of KV heads, codes of a latent's channels or numbers.

A row of codes is made of nibbles of 4 bits, some of which are cut into two crumbs of 2. A channel of 4, 8, 12 or 16
bits is 1, 2, 3 or 4 nibbles, one of 2 bits a crumb, one of 6 bits a nibble and a crumb; its code

    u = clamp(floor((z - mean) / scale) + 2^(bits - 1), 0, 2^bits - 1) = sum_i 2^(bit_i) d_i

with digits d_i means z = mean + scale (u + 1/2 - 2^(bits - 1)). A projection puts out (z - mean) / scale, so that
floor, clamp and a fixed offset are all that is left to do. Attention multiplies with what it reads, less 8, one column
each. A nibble that is cut, n = 4 a + b, is read twice: whole, and its lower crumb b. As a = (n - b) / 4, the column of
n is a quarter of that of a's channel, and the column of b is that of b's channel less the same. So the basis that reads
the latent has for each column what a unit of it counts, and what means, halves and eights add is a constant key and a
bias of o_proj. Kernels know nibbles and crumbs, not channels.

The nibbles of a group's latent, channels most bits first and within a channel the highest first, fill the *slots* 0,
1, ...; the cut ones fill the last slots. The number of slots is rounded up to a multiple of 16 (a unit, 8 bytes), and
an empty slot between both holds the nibble 8. With W = slots / 4 little-endian 16-bit words, nibble j (bits 4 j to
4 j + 3) of word w is slot j W + w: one shift and one mask take *lane* j, the nibbles j of all words, side by side, and
nothing is interleaved. The lower crumbs of the last W slots are read as columns 4 W to 5 W - 1, those of the W slots
before them as the next W, as far as slots are cut (`split`). `unpack` below, `kernels.decode.operands` and
`kernels.expand` read rows in this order, `pack` and `kernels.quantise.packed` write them.

The row of a joint group, whose latent is that of keys and values together, has a scale: its first slot holds a nibble
n that means s = 2^((n - 8) / 2), and a channel is read as s (mean + scale (u + 1/2 - 2^(bits - 1))). What is read in
the scale's place counts as 1, so that its column of a basis has what codes add as a constant to what s multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, TypeVar

from pydantic import PlainValidator, WithJsonSchema

from ..errors import CheckpointError

if TYPE_CHECKING:  # commands check their arguments by these types before they import torch
    import torch
    from torch import Tensor

WIDTHS = (16, 12, 8, 6, 4, 2)
"""Bits of a channel, in the order of a row and of the fields of CodedRow."""

NIBBLE_BITS = 4
CRUMB_BITS = 2
UNIT_NIBBLES = 16
"""Nibbles by which a row grows: 8 bytes."""

WORD_NIBBLES = 4
"""Nibbles of a word."""

WORD_BYTES = 2

UNIT_WORDS = UNIT_NIBBLES // WORD_NIBBLES
"""Words by which a row grows."""

SIGNED = 8
"""Subtracted from a nibble or crumb before attention multiplies with it; also the nibble of an empty slot."""

SIGN_BITS = 0x8888 - (1 << 16)
"""The highest bit of each nibble of a word."""

EDITED = "The folder was edited or is from another version of rotor; export it again."

SCALE = -1
"""Number that stands for the scale of a row in place of a channel."""

SCALE_SLOT = 0
"""Slot of the scale, and its column among those that read a row."""

SCALE_MIDDLE = 8
"""Nibble of a scale of 1; a step of a scale is the square root of 2."""

SCALE_LARGEST = 15
"""Nibble of the largest scale."""

SCALE_STEPS = 2
"""Steps of a scale by which it doubles."""


Level = Literal["none", "fast", "small"]
"""Levels at which a file packs rows, see `row_codec`."""


class Digit(NamedTuple):
    """Part of a channel's code that a slot holds: `bits` bits from `bit` on; the channel may be SCALE."""

    channel: int
    bit: int
    bits: int


class RowScale(NamedTuple):
    """Choice of the scale of a row and of the codes by it, see `tensors.layer_tensors`.

    shift, length: [rank], float32.
    """

    shift: Tensor
    length: Tensor


@dataclass(frozen=True, order=True)
class CodedRow:
    """A row of codes: how many channels it has at each of WIDTHS.

    split: lanes of nibbles that attention reads a second time for their lower crumbs; at least those that are cut.
    scaled: the first slot holds the scale of the row.

    Raises:
        CheckpointError: a count is negative; there is no channel; more lanes are split than there are.
    """

    n16: int = 0
    n12: int = 0
    n8: int = 0
    n6: int = 0
    n4: int = 0
    n2: int = 0
    split: int = 0
    scaled: bool = False

    def __post_init__(self) -> None:
        if min(self.counts) < 0 or not self.rank:
            raise CheckpointError(f"a latent of {self.counts} channels at {WIDTHS} bits: expected some.", EDITED)
        cut = -(-(self.n6 + self.n2) // 2)
        object.__setattr__(self, "split", max(self.split, -(-cut // self.words)))
        if self.split > WORD_NIBBLES:
            raise CheckpointError(f"{self.split} nibbles of a word are split: expected at most {WORD_NIBBLES}.", EDITED)

    @classmethod
    def of_bits(cls, bits: Sequence[int], scaled: bool = False) -> CodedRow:
        """Channels of these widths; those of 0 bits are not stored."""
        n16, n12, n8, n6, n4, n2 = (bits.count(width) for width in WIDTHS)
        return cls(n16, n12, n8, n6, n4, n2, scaled=scaled)

    coded = True
    word_nibbles = WORD_NIBBLES
    """Nibbles of a word."""

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Channels of each width, in the order of WIDTHS."""
        return tuple(getattr(self, f"n{bits}") for bits in WIDTHS)

    @cached_property
    def rank(self) -> int:
        """Number of channels: what a projection into the latent puts out."""
        return sum(self.counts)

    @cached_property
    def words(self) -> int:
        """Words of 16 bits in a row: whole units."""
        bits = sum(bits * count for bits, count in zip(WIDTHS, self.counts, strict=True)) + NIBBLE_BITS * self.scaled
        return UNIT_WORDS * -(-bits // (UNIT_NIBBLES * NIBBLE_BITS))

    @cached_property
    def operands(self) -> int:
        """Count of numbers that attention reads out of a word: its nibbles, and the lower crumbs of split ones."""
        return WORD_NIBBLES + self.split

    @cached_property
    def width(self) -> int:
        """Columns of the basis that reads a row."""
        return self.operands * self.words

    @cached_property
    def bits(self) -> tuple[int, ...]:
        """Bits of each channel, most first."""
        return tuple(bits for bits, count in zip(WIDTHS, self.counts, strict=True) for _ in range(count))

    @cached_property
    def slots(self) -> tuple[tuple[Digit, ...], ...]:
        """Content of each slot: the scale, a nibble, a higher and a lower crumb (which may be missing), or nothing."""
        crumbs = [Digit(channel, 0, CRUMB_BITS) for channel, bits in enumerate(self.bits) if bits % NIBBLE_BITS]
        cut = [tuple(crumbs[i : i + 2]) for i in range(0, len(crumbs), 2)]
        whole: list[tuple[Digit, ...]] = [(Digit(SCALE, 0, NIBBLE_BITS),)] * self.scaled
        whole += [
            (Digit(channel, bit, NIBBLE_BITS),)
            for channel, bits in enumerate(self.bits)
            for bit in range(bits - NIBBLE_BITS, -1, -NIBBLE_BITS)
        ]
        return (*whole, *[()] * (WORD_NIBBLES * self.words - len(whole) - len(cut)), *cut)

    @cached_property
    def columns(self) -> tuple[dict[int, float], ...]:
        """{channel: levels} of each column: how many levels of which channels a unit of it counts; none of a scale."""
        nibbles, crumbs = [], []
        for digits in self.slots:
            cut = bool(digits) and digits[0].bits == CRUMB_BITS
            channels = [digit for digit in digits[:1] if digit.channel != SCALE]
            nibbles.append({digit.channel: 0.25 if cut else 2.0**digit.bit for digit in channels})
            crumbs.append({digits[0].channel: -0.25, digits[1].channel: 1.0} if len(digits) > 1 else {})
        lanes = [crumbs[i * self.words : (i + 1) * self.words] for i in reversed(range(WORD_NIBBLES))]
        return tuple(nibbles + [column for lane in lanes[: self.split] for column in lane])

    @property
    def word_operands(self) -> int:
        """Operands of a word of codes; numbers have 0."""
        return self.operands

    def element_bytes(self, model_bytes: int) -> int:
        """Bytes of an element of a row as tensors hold it: uint8."""
        return 1

    def word_bytes(self, model_bytes: int) -> int:
        """Bytes of what a kernel loads as one element of a row."""
        return WORD_BYTES

    def row_bytes(self, model_bytes: int = 2) -> int:
        """Bytes of a token's row, whatever the model's dtype."""
        return WORD_BYTES * self.words

    def stride(self, groups: int, model_bytes: int) -> int:
        """Bytes from one group to the next in the rows of a layer of so many groups."""
        return aligned(self.row_bytes(), groups)

    def to_dict(self) -> dict[str, int]:
        """{bits: channels} of the widths in use, `split`, and `scaled`."""
        counts = {str(bits): count for bits, count in zip(WIDTHS, self.counts, strict=True) if count}
        return counts | {name: int(getattr(self, name)) for name in ("split", "scaled") if getattr(self, name)}

    def pack(self, latents: Tensor, scale: RowScale | None = None) -> Tensor:
        """Code the latents of a group and pack them.

        Args:
            latents: [..., rank], as projections put them out: (z - mean) / scale of each channel, or what `scale` says.
            scale: of a scaled row.
        Returns:
            [..., bytes], uint8.
        """
        import torch

        wide = latents.to(torch.promote_types(latents.dtype, torch.float32))
        return self.pack_codes(*self.codes(wide, scale))

    def codes(self, latents: Tensor, scale: RowScale | None = None) -> tuple[Tensor, Tensor | None]:
        """Codes [..., rank], and the nibble of the scale [..., 1] of a scaled row, int32; arguments as `pack` has."""
        half = _slots_of(self, latents.device).half.to(latents.dtype)
        nibble = None
        if scale is not None:
            shift, length = (tensor.to(latents.dtype) for tensor in scale)

            def lost(by: Tensor) -> Tensor:
                return lost_by(latents / by.to(latents.dtype) + shift, half).unsqueeze(-1)

            nibble = chosen_nibble((latents.square() * length).sum(-1, keepdim=True), lost)
            latents = latents / scale_of(nibble).to(latents.dtype) + shift
        return (latents.floor().clamp(-half, half - 1) + half).int(), nibble

    def pack_codes(self, codes: Tensor, nibble: Tensor | None = None) -> Tensor:
        """Pack what `codes` gave into rows, [..., bytes] uint8."""
        import torch

        slots = _slots_of(self, codes.device)
        empty = codes.new_tensor([SIGNED, 0]).expand(*codes.shape[:-1], 2)
        codes = torch.cat([codes, empty] if nibble is None else [codes, empty, nibble], dim=-1)
        nibbles = (codes[..., slots.channel] >> slots.bit).bitwise_and_(slots.mask)
        if slots.crumb is not None:
            first = slots.first
            nibbles[..., first:] = nibbles[..., first:] << 2 | codes[..., slots.crumb].bitwise_and_(3)
        lanes = nibbles.unflatten(-1, (WORD_NIBBLES, -1))
        low, high = (lanes[..., byte, :] | lanes[..., byte + 1, :] << 4 for byte in (0, 2))
        return torch.stack([low, high], dim=-1).to(torch.uint8).flatten(-2)

    def unpack_codes(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Unpack what `pack_codes` packed."""
        import torch

        words = rows.contiguous().view(torch.int16).to(torch.int32)
        nibbles = torch.cat([words >> 4 * lane & 15 for lane in range(WORD_NIBBLES)], dim=-1)
        codes = nibbles.new_zeros(*rows.shape[:-1], self.rank)
        for slot, digits in enumerate(self.slots):
            nibble = nibbles[..., slot]
            for number, digit in enumerate(digits):
                if digit.channel == SCALE:
                    continue
                bits = nibble if digit.bits == NIBBLE_BITS else nibble >> 2 if number == 0 else nibble & 3
                codes[..., digit.channel] += bits << digit.bit
        return codes, nibbles[..., SCALE_SLOT : SCALE_SLOT + 1] if self.scaled else None

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Unpack rows, [..., bytes] uint8, to what attention multiplies with, [..., width].

        That is nibbles and the crumbs of split lanes, less 8; of a scaled row times its scale, which stands in its own
        place.
        """
        import torch

        words = rows.contiguous().view(torch.int16)
        signed = words ^ SIGN_BITS  # a nibble less 8 in two's complement
        lanes = [signed << 12 - 4 * lane >> 12 for lane in range(WORD_NIBBLES)]
        lanes += [(words >> 4 * lane & 3) - SIGNED for lane in reversed(range(WORD_NIBBLES - self.split, WORD_NIBBLES))]
        operands = torch.cat(lanes, dim=-1)
        if not self.scaled:
            return operands.to(dtype)
        operands = operands.to(torch.promote_types(dtype, torch.float32))
        scale = scale_of(operands[..., SCALE_SLOT : SCALE_SLOT + 1] + SIGNED).to(operands.dtype)
        operands[..., SCALE_SLOT] = 1.0
        return operands.mul_(scale).to(dtype)

    def resized(self, rows: Tensor, to: Row) -> Tensor:
        """Rows cut to the first channels, or filled up with the middle of further ones, [..., bytes of `to`]."""
        import torch

        assert isinstance(to, CodedRow)
        codes, nibble = self.unpack_codes(rows)
        half = torch.tensor([1 << bits - 1 for bits in to.bits[self.rank :]], device=codes.device, dtype=codes.dtype)
        filled = torch.cat([codes[..., : to.rank], half.expand(*codes.shape[:-1], -1)], dim=-1)
        return to.pack_codes(filled, nibble)


@dataclass(frozen=True, order=True)
class NumberRow:
    """A row of so many numbers in the model's dtype, `model_bytes` each; the same interface as `CodedRow`."""

    rank: int

    coded = False
    scaled = False
    word_nibbles = 1
    operands = 1
    word_operands = 0

    @property
    def width(self) -> int:
        return self.rank

    def element_bytes(self, model_bytes: int) -> int:
        return model_bytes

    def word_bytes(self, model_bytes: int) -> int:
        return model_bytes

    def row_bytes(self, model_bytes: int = 2) -> int:
        return self.rank * model_bytes

    def stride(self, groups: int, model_bytes: int) -> int:
        return self.row_bytes(model_bytes)

    def to_dict(self) -> int:
        return self.rank

    def pack(self, latents: Tensor, scale: RowScale | None = None) -> Tensor:
        return latents

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return rows

    def resized(self, rows: Tensor, to: Row) -> Tensor:
        from torch.nn.functional import pad

        return pad(rows, (0, to.width - self.width))


Row = CodedRow | NumberRow
"""Row that the cache holds of a token for the keys or the values of a group, or for both."""


MAX_RANK = 1 << 24
"""Upper bound of the channels of a latent; a larger number comes from a damaged file."""


def _stored_row(data: object) -> Row:
    """Read what `to_dict` gave."""
    if type(data) is int and 0 < data <= MAX_RANK:
        return NumberRow(data)
    names = [*map(str, WIDTHS), "split", "scaled"]
    if isinstance(data, dict) and data.keys() <= set(names):
        counts = [data.get(name, 0) for name in names]
        if all(type(count) is int and 0 <= count <= MAX_RANK for count in counts) and any(counts[:-2]):
            n16, n12, n8, n6, n4, n2, split, scaled = counts
            if scaled <= 1:
                return CodedRow(n16, n12, n8, n6, n4, n2, split, bool(scaled))
    raise ValueError


StoredRow = Annotated[
    Row,
    PlainValidator(_stored_row),
    WithJsonSchema({"expected": f"a number of channels, or channels by bits ({', '.join(map(str, WIDTHS))})"}),
]
"""A row as `to_dict` writes it to a file."""


AnyRow = TypeVar("AnyRow", bound=Row)


def read_alike(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Give all rows of a layer as many split lanes: one kernel reads them all."""
    most = max((row.split for row in rows if isinstance(row, CodedRow)), default=0)
    return [replace(row, split=most) if isinstance(row, CodedRow) else row for row in rows]


@lru_cache(maxsize=4096)
def aligned(size_bytes: int, groups: int) -> int:
    """Bytes from one group of codes to the next, rounded up so that a group begins at a sector of memory."""
    if groups == 1:
        return size_bytes
    unit = 32 if size_bytes >= 32 else 16
    return -(-size_bytes // unit) * unit


def chosen_nibble(energy: Tensor, lost: Callable[[Tensor], Tensor]) -> Tensor:
    """The nibble of the scale of a row, int32: by its length, or the next larger one if codes lose less by it.

    A few latents far beyond their levels can cost more than coarser steps of all.

    Args:
        energy: see `scale_nibble`. lost: squared error of a row's codes by a scale, in squared steps, see `lost_by`.
    """
    nibble = scale_nibble(energy)

    def cost(nibble: Tensor) -> Tensor:
        scale = scale_of(nibble)
        return scale.square() * lost(scale)

    return nibble + ((cost(nibble + 1) < cost(nibble)) & (nibble < SCALE_LARGEST)).int()


def lost_by(levels: Tensor, half: Tensor) -> Tensor:
    """Squared error of codes, in squared steps: a twelfth of each, and the square of what is beyond the last level.

    Args:
        levels: [..., channels], latents in steps from the middle of all levels. half: [channels], half the number of
            levels.
    Returns:
        [...].
    """
    return ((levels.abs() - half + 0.5).clamp(min=0).square() + 1 / 12).sum(-1)


def scale_nibble(energy: Tensor) -> Tensor:
    """The nibble of the scale of a row whose latents have this weighted mean square, int32: the scale by its length."""
    steps = energy.clamp(min=2.0**-SCALE_MIDDLE).log2().mul(SCALE_STEPS / 2).round() + SCALE_MIDDLE
    return steps.clamp(0, SCALE_LARGEST).int()


def scale_of(nibble: Tensor) -> Tensor:
    """The scale of a nibble, float32."""
    return ((nibble - SCALE_MIDDLE).float() / SCALE_STEPS).exp2()


class _Slots(NamedTuple):
    """The slots of a row as tensors.

    half: half the number of codes of each channel. channel, bit, mask: of the digit in each slot; the channel of an
    empty slot is `rank`, of the scale `rank + 2`. first: the first slot that is cut. crumb: channels of the lower
    crumbs from there on, `rank + 1` where one is missing; None if no slot is cut.
    """

    half: Tensor
    channel: Tensor
    bit: Tensor
    mask: Tensor
    first: int
    crumb: Tensor | None


@lru_cache(maxsize=4096)
def _slots_of(row: CodedRow, device: torch.device) -> _Slots:
    import torch

    half = torch.tensor([2.0 ** (bits - 1) for bits in row.bits], device=device)
    highest = [digits[0] if digits else Digit(row.rank, 0, NIBBLE_BITS) for digits in row.slots]
    highest = [digit._replace(channel=row.rank + 2) if digit.channel == SCALE else digit for digit in highest]
    digits = torch.tensor([(digit.channel, digit.bit, 2**digit.bits - 1) for digit in highest], device=device)
    cut = [slot for slot in row.slots if slot and slot[0].bits < NIBBLE_BITS]
    crumb = [slot[1].channel if len(slot) > 1 else row.rank + 1 for slot in cut]
    channel, bit, mask = digits.unbind(1)
    lower = torch.tensor(crumb, device=device) if crumb else None
    return _Slots(half, channel, bit.int(), mask.int(), len(highest) - len(cut), lower)
