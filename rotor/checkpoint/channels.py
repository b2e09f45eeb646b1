"""Rows of codes: how the channels of a latent lie in the bytes that a cache keeps for one token.

A row is made of nibbles of 4 bits, some of which are cut into two crumbs of 2. A channel of 4, 8, 12 or 16 bits is 1,
2, 3 or 4 nibbles, one of 2 bits a crumb, one of 6 bits a nibble and a crumb; its code

    u = clamp(floor((z - mean) / scale) + 2^(bits - 1), 0, 2^bits - 1) = sum_i 2^(bit_i) d_i

with digits d_i means z = mean + scale (u + 1/2 - 2^(bits - 1)). A projection puts out (z - mean) / scale, so that
floor, clamp and a fixed offset are all that is left to do. Attention multiplies with what it reads, less 8, one column
each. A nibble that is cut, n = 4 a + b, is read twice: whole, and its lower crumb b. As a = (n - b) / 4, the column of
n is a quarter of that of a's channel, and the column of b is that of b's channel less the same. So the basis that reads
the latent has for each column what a unit of it counts, and what means, halves and eights add is a constant key and a
bias of o_proj. Kernels know nibbles and crumbs, not channels.

The nibbles of a group's latent, channels most bits first and within a channel the highest first, fill the *slots* 0,
1, ...; the cut ones fill the last slots. The number of slots is rounded up to a multiple of 16 (a plane, 8 bytes), and
an empty slot between both holds the nibble 8. With W = slots / 4 little-endian 16-bit words, nibble j (bits 4 j to
4 j + 3) of word w is slot j W + w: one shift and one mask take a plane's nibbles out of the words, side by side, and
nothing is interleaved. The lower crumbs of the last W slots are read as columns 4 W to 5 W - 1, those of the W slots
before them as the next W, as far as slots are cut (`split`).

A group whose keys and values are coded together has several latents in its row, and a scale for all of them
(`Parted`): the words of each KV head's fast latent, head by head, then those of the rest, whose first slot is the
scale. The row is whole planes, its latents are whole words. With the nibble n in the scale's slot, s = 2^((n - 8) / 2),
and a channel is read as s (mean + scale (u + 1/2 - 2^(bits - 1))). The row is read as one latent of all its words:
operand j of word w is column j W + w, with W words in the row. The operand in the scale's slot is read as 1, so that
its column of a basis has what codes add as a constant to what the scale multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import PlainValidator, WithJsonSchema
from typing_extensions import NotRequired, TypedDict

from ..errors import CheckpointError

WIDTHS = (16, 12, 8, 6, 4, 2)
"""Bits of a channel, in the order of a row and of the fields of Channels."""

NIBBLE_BITS = 4
CRUMB_BITS = 2
PLANE = 16
"""Nibbles by which a row grows: 8 bytes."""

WORD_PLANES = 4
"""Nibbles of a word."""

WORD_BYTES = 2

PLANE_WORDS = PLANE // WORD_PLANES
"""Words by which a row grows."""

SPAN_WORDS = 16
"""Words of a row that kernels multiply with at a time where heads have fast latents of their own."""

SIGNED = 8
"""Subtracted from a nibble or crumb before attention multiplies with it; also the nibble of an empty slot."""

EDITED = "The folder was edited or is from another version of rotor; export it again."


class PartedInfo(TypedDict):
    """Channels by bits of a joint group, see `Parted`, as files have them."""

    fast: NotRequired[list[dict[str, int]]]
    rest: dict[str, int]


SCALE = -1
"""In place of a channel: the scale of a row."""

SCALE_MIDDLE = 8
"""Nibble of a scale of 1; a step of a scale is the square root of 2."""

SCALE_LARGEST = 15
"""Nibble of the largest scale."""

SCALE_STEPS = 2
"""Steps of a scale by which it doubles."""


class Digit(NamedTuple):
    """Part of a channel's code that a slot holds: `bits` bits from `bit` on; the channel may be SCALE."""

    channel: int
    bit: int
    bits: int


@dataclass(frozen=True, order=True)
class Channels:
    """A latent of codes: how many channels it has at each of WIDTHS.

    split: planes of nibbles that attention reads a second time for their lower crumbs; at least those that are cut.
    scaled: the first slot holds the scale of the row. own_words: words of a latent that shares its row with others;
    None: as many whole planes as channels take.

    Raises:
        CheckpointError: a count is negative; there is no channel; more planes are split than there are.
    """

    n16: int = 0
    n12: int = 0
    n8: int = 0
    n6: int = 0
    n4: int = 0
    n2: int = 0
    split: int = 0
    scaled: bool = False
    own_words: int | None = None

    def __post_init__(self) -> None:
        if min(self.counts) < 0 or not self.rank:
            raise CheckpointError(f"a latent of {self.counts} channels at {WIDTHS} bits: expected some.", EDITED)
        cut = -(-(self.n6 + self.n2) // 2)
        object.__setattr__(self, "split", max(self.split, -(-cut // self.words)))
        if self.split > WORD_PLANES:
            raise CheckpointError(f"{self.split} planes are split: expected at most {WORD_PLANES}.", EDITED)

    @classmethod
    def of_bits(cls, bits: Sequence[int]) -> Channels:
        """Channels of these widths; those of 0 bits are not stored."""
        n16, n12, n8, n6, n4, n2 = (bits.count(width) for width in WIDTHS)
        return cls(n16, n12, n8, n6, n4, n2)

    coded = True
    planes = WORD_PLANES
    """Nibbles of a word."""

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Channels of each width, in the order of WIDTHS."""
        return tuple(getattr(self, f"n{bits}") for bits in WIDTHS)

    @property
    def rank(self) -> int:
        """Number of channels: what a projection into the latent puts out."""
        return sum(self.counts)

    @cached_property
    def words(self) -> int:
        """Words of 16 bits in a row."""
        return whole_planes(self.fewest_words) if self.own_words is None else self.own_words

    @cached_property
    def fewest_words(self) -> int:
        """Words that the channels, and the scale, take."""
        bits = sum(bits * count for bits, count in zip(WIDTHS, self.counts, strict=True)) + NIBBLE_BITS * self.scaled
        return -(-bits // (WORD_PLANES * NIBBLE_BITS))

    @property
    def operands(self) -> int:
        """How many numbers attention reads out of a word: its nibbles, and the lower crumbs of split ones."""
        return WORD_PLANES + self.split

    @property
    def width(self) -> int:
        """Columns of the basis that reads a row."""
        return self.operands * self.words

    @cached_property
    def bits(self) -> tuple[int, ...]:
        """Bits of each channel, most first."""
        return tuple(bits for bits, count in zip(WIDTHS, self.counts, strict=True) for _ in range(count))

    @cached_property
    def slots(self) -> tuple[tuple[Digit, ...], ...]:
        """What each slot holds: the scale, a nibble, a higher and a lower crumb (which may be missing), or nothing."""
        crumbs = [Digit(channel, 0, CRUMB_BITS) for channel, bits in enumerate(self.bits) if bits % NIBBLE_BITS]
        cut = [tuple(crumbs[i : i + 2]) for i in range(0, len(crumbs), 2)]
        whole: list[tuple[Digit, ...]] = [(Digit(SCALE, 0, NIBBLE_BITS),)] * self.scaled
        whole += [
            (Digit(channel, bit, NIBBLE_BITS),)
            for channel, bits in enumerate(self.bits)
            for bit in range(bits - NIBBLE_BITS, -1, -NIBBLE_BITS)
        ]
        return (*whole, *[()] * (WORD_PLANES * self.words - len(whole) - len(cut)), *cut)

    @cached_property
    def columns(self) -> tuple[dict[int, float], ...]:
        """{channel: levels} of each column: how many levels of which channels a unit of it counts."""
        nibbles, crumbs = [], []
        for digits in self.slots:
            cut = bool(digits) and digits[0].bits == CRUMB_BITS
            channels = [digit for digit in digits[:1] if digit.channel != SCALE]
            nibbles.append({digit.channel: 0.25 if cut else 2.0**digit.bit for digit in channels})
            crumbs.append({digits[0].channel: -0.25, digits[1].channel: 1.0} if len(digits) > 1 else {})
        planes = [crumbs[i * self.words : (i + 1) * self.words] for i in reversed(range(WORD_PLANES))]
        return tuple(nibbles + [column for plane in planes[: self.split] for column in plane])

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
        """Bytes from one group to the next in the row of a layer of so many groups."""
        return aligned(self.row_bytes(), groups)

    def to_dict(self) -> dict[str, int]:
        """{bits: channels} of the widths in use, and `split`."""
        counts = {str(bits): count for bits, count in zip(WIDTHS, self.counts, strict=True) if count}
        return counts | ({"split": self.split} if self.split else {})


@dataclass(frozen=True, order=True)
class Parted:
    """The latents of a group that codes keys and values together, with a scale; the same interface as `Channels`.

    rest: slow planes of the keys and all values of the group's KV heads, coded last; it holds the scale, and fills the
        row up to whole planes.
    fast: one latent for each KV head's fast planes; none where no plane is fast. All are filled up to as many words.

    Channels are numbered in the order of the row: those of each fast latent, head by head, then those of the rest.
    """

    rest: Channels
    fast: tuple[Channels, ...] = ()

    coded = True
    planes = WORD_PLANES
    """Nibbles of a word."""

    def __post_init__(self) -> None:
        words = max((max(latent.own_words or 0, latent.fewest_words) for latent in self.fast), default=0)
        before = len(self.fast) * words
        rest = replace(self.rest, scaled=True, own_words=None)
        rest = replace(rest, own_words=whole_planes(before + rest.fewest_words) - before)
        *fast, rest = read_alike([*(replace(x, own_words=words) for x in self.fast), rest])
        object.__setattr__(self, "fast", tuple(fast))
        object.__setattr__(self, "rest", rest)

    @property
    def parts(self) -> tuple[Channels, ...]:
        """The latents, in the order of the row."""
        return (*self.fast, self.rest)

    @cached_property
    def rank(self) -> int:
        """Channels of all latents: what projections put out."""
        return sum(part.rank for part in self.parts)

    @property
    def fast_rank(self) -> int:
        """Channels of all fast latents."""
        return self.rank - self.rest.rank

    @cached_property
    def words(self) -> int:
        """Words of 16 bits in a row."""
        return sum(part.words for part in self.parts)

    @property
    def fast_words(self) -> int:
        """Words of the fast latent of a KV head."""
        return self.fast[0].words if self.fast else 0

    @property
    def scale_word(self) -> int:
        """The word whose lowest nibble is the scale, which is also its column."""
        return self.words - self.rest.words

    @property
    def split(self) -> int:
        """Planes of nibbles that are read a second time for their lower crumbs, the same of all latents."""
        return self.rest.split

    @property
    def operands(self) -> int:
        """How many numbers attention reads out of a word."""
        return self.rest.operands

    @property
    def width(self) -> int:
        """Columns of the basis that reads a row."""
        return self.operands * self.words

    @property
    def word_operands(self) -> int:
        """Operands of a word of codes; numbers have 0."""
        return self.operands

    @cached_property
    def bits(self) -> tuple[int, ...]:
        """Bits of each channel."""
        return tuple(bits for part in self.parts for bits in part.bits)

    @cached_property
    def columns(self) -> tuple[dict[int, float], ...]:
        """{channel: levels} of each column, see `Channels`; the scale's has none."""
        found: list[dict[int, float]] = [{} for _ in range(self.width)]
        word = channel = 0
        for part in self.parts:
            for place, levels in enumerate(part.columns):
                operand, own = divmod(place, part.words)
                found[operand * self.words + word + own] = {channel + c: count for c, count in levels.items()}
            word, channel = word + part.words, channel + part.rank
        return tuple(found)

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
        """Bytes from one group to the next in the row of a layer of so many groups."""
        return aligned(self.row_bytes(), groups)

    def to_dict(self) -> PartedInfo:
        """Each latent as `Channels.to_dict` has it."""
        rest: PartedInfo = {"rest": self.rest.to_dict()}
        return {"fast": [latent.to_dict() for latent in self.fast], **rest} if self.fast else rest


@dataclass(frozen=True, order=True)
class Numbers:
    """A latent of so many numbers in the model's dtype, `model_bytes` each; the same interface as `Channels`."""

    rank: int

    coded = False
    planes = 1
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


Latent = Channels | Parted | Numbers
"""What the cache holds of a token for the keys or the values of a group, or for both (`Parted`)."""


MAX_RANK = 1 << 24
"""Upper bound of the channels of a latent; a larger number comes from a damaged file."""


def _stored_latent(data: object) -> Latent:
    """Read what `to_dict` gave."""
    if type(data) is int and 0 < data <= MAX_RANK:
        return Numbers(data)
    if isinstance(data, dict) and "rest" in data and data.keys() <= {"fast", "rest"}:
        parts = [_stored_latent(part) for part in (*data.get("fast", ()), data["rest"])]
        *fast, rest = (part for part in parts if isinstance(part, Channels))
        if len(fast) + 1 == len(parts):
            return Parted(rest, tuple(fast))
    names = [*map(str, WIDTHS), "split"]
    if isinstance(data, dict) and data.keys() <= set(names):
        counts = [data.get(name, 0) for name in names]
        if all(type(count) is int and 0 <= count <= MAX_RANK for count in counts) and any(counts[:-1]):
            return Channels(*counts)
    raise ValueError


StoredLatent = Annotated[
    Latent,
    PlainValidator(_stored_latent),
    WithJsonSchema(
        {
            "expected": f"a number of channels, channels by bits ({', '.join(map(str, WIDTHS))}), or a rest of such "
            "channels with fast latents of such"
        }
    ),
]
"""A latent as `to_dict` writes it to a file."""


AnyLatent = TypeVar("AnyLatent", bound=Latent)


def read_alike(latents: Sequence[AnyLatent]) -> list[AnyLatent]:
    """Give all latents of a layer as many split planes, and fast ones as many words: one kernel reads them all."""
    most = max((latent.split for latent in latents if not isinstance(latent, Numbers)), default=0)
    words = max((latent.fast_words for latent in latents if isinstance(latent, Parted)), default=0)

    def alike(latent: Latent) -> Any:
        if isinstance(latent, Parted):
            return Parted(replace(latent.rest, split=most), tuple(replace(x, own_words=words) for x in latent.fast))
        return replace(latent, split=most) if isinstance(latent, Channels) else latent

    return [alike(latent) for latent in latents]


def whole_planes(words: int) -> int:
    """Words of as many planes as hold so many."""
    return -(-words // PLANE_WORDS) * PLANE_WORDS


@lru_cache(maxsize=4096)
def aligned(size_bytes: int, groups: int) -> int:
    """Bytes from one group of codes to the next, rounded up so that a group begins at a sector of memory."""
    if groups == 1:
        return size_bytes
    unit = 32 if size_bytes >= 32 else 16
    return -(-size_bytes // unit) * unit
