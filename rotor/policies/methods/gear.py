"""GEAR: a quantised backbone with a low-rank and a sparse correction of what it loses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor
from torch.nn import functional

from ..affine import LARGEST
from ..outliers import stored_index, take_out
from ..policy import Bits
from ..quantiser import Quantiser
from ..store import Codec, Parts, Stream, heads_apart, heads_together
from .kcvt import KCVT
from .kivi import KIVI

BACKBONE_PARTS = 3


@dataclass(frozen=True)
class GEAR(Quantiser):
    """x ~ D + L + S. S: the largest and smallest s/2 of a channel's keys and of a token's values, unquantised. D: the
    backbone's code of the rest. L = A B^T: the first singular vectors of the remaining error of each head, which in a
    compressed checkpoint is a group's latent.

    Args:
        bits: 8, 4, 3 or 2. backbone: `kcvt`, or `kivi` with groups. group: of kivi, tokens of a channel of keys and
            channels of a token's values.
        sparsity: s, the share of outliers; 0 is GEAR-L. rank, new_rank: of L in the prompt and in a later run.
        buffer: tokens that wait, uncoded, until they make a run (n_b); a multiple of `group` for kivi. loops: of the
            power iteration.

    Bytes, above the backbone's: 2 rank (1 / width + 1 / run) and 4 s a number (a float16 and an int16 index; int32 in
    runs of more than 32767 tokens).
    Limits: in a short run s/2 may be less than one number, and then nothing is taken out. Padding must be known.
    Source: GEAR section 3, equations 3 to 6, algorithms 1 and 2; in equation 5 outliers leave zeros, here the mean of
        the other numbers of their vector.
    """

    method: ClassVar[str] = "gear"
    bits: Bits = 4
    backbone: Literal["kcvt", "kivi"] = "kcvt"
    sparsity: Annotated[float, Field(ge=0, lt=1)] = 0.02
    rank: NonNegativeInt = 4
    new_rank: NonNegativeInt = 2
    buffer: PositiveInt = 20
    group: PositiveInt = 64
    loops: Annotated[int, Field(ge=1, le=100)] = 2  # it converges long before the bound

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.backbone == "kcvt" or self.buffer % self.group == 0
        self.require(fits, "buffer", f"a multiple of the group, {self.group}")

    def streams(self) -> tuple[Stream, Stream]:
        kcvt = self.backbone == "kcvt"
        codecs = (KCVT(self.bits) if kcvt else KIVI(self.bits, self.group, self.buffer)).codecs()

        def stream(backbone: Codec, per_channel: bool) -> Stream:
            codec = GEARCode(backbone, self.sparsity, self.new_rank, self.loops, per_channel)
            return Stream(codec, self.buffer, whole_prompt=kcvt, prompt_codec=replace(codec, rank=self.rank))

        return stream(codecs[0], per_channel=True), stream(codecs[1], per_channel=False)


@dataclass(frozen=True)
class GEARCode(Codec):
    """Parts: the backbone's; A [batch_size, num_heads, tokens, rank] and B [batch_size, num_heads, runs, width, rank]
    float16; outliers, float16, and their indices: along the run [batch_size, num_heads, runs, outliers, width] for
    per_channel, along the heads of a token [batch_size, 1, tokens, outliers] otherwise.

    spans: where the latent of each group lies in a compressed layer's rows, which come as one head. A is then
    [batch_size, groups, tokens, rank] and B [batch_size, 1, runs, width, rank], a latent's columns after another's.
    """

    backbone: Codec
    sparsity: float
    rank: int
    loops: int
    per_channel: bool
    spans: tuple[slice, ...] = ()

    def of_rows(self, spans: tuple[slice, ...]) -> Codec:
        return replace(self, spans=spans)

    def encode(self, states: Tensor) -> Parts:
        numbers = states.float().clamp(-LARGEST, LARGEST)
        heads, vectors = numbers.shape[1], self._vectors(numbers)
        outliers, index, rest = take_out(vectors, self.sparsity, self._dim)
        rest = self._numbers(rest, heads)
        parts = self.backbone.encode(rest)
        lost = self._vectors(rest - self.backbone.decode(parts, heads, numbers.shape[-1]))
        lost = self._numbers(lost.scatter(self._dim, index, 0.0), heads)  # S holds these
        left, right = self._factors(lost)
        sparse = [outliers.half(), stored_index(index, vectors.shape[self._dim])]
        if self.per_channel:
            sparse = [part.unsqueeze(2) for part in sparse]
        return *parts, left.half(), right.half().unsqueeze(2), *sparse

    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        left, right, outliers, index = parts[BACKBONE_PARTS:]
        numbers = self.backbone.decode(parts[:BACKBONE_PARTS], num_heads, width)
        runs = right.shape[2]
        numbers = numbers + self._product(left.float().unflatten(2, (runs, -1)), right.float()).flatten(2, 3)
        if self.per_channel:
            whole = numbers.unflatten(2, (runs, -1)).scatter(3, index.long(), outliers.float())
            return whole.flatten(2, 3)
        return self._numbers(self._vectors(numbers).scatter(3, index.long(), outliers.float()), num_heads)

    def _factors(self, lost: Tensor) -> tuple[Tensor, Tensor]:
        """A and B of what is lost, B [batch_size, num_heads, width, rank]."""
        if not self.spans:
            return low_rank(lost, self.rank, self.loops)
        latents = [lost[..., span] for span in self.spans]
        widths = [latent.shape[-1] for latent in latents]
        # All latents at once: zeros behind the narrow ones change no singular vector.
        stacked = [functional.pad(latent, (0, max(widths) - latent.shape[-1])) for latent in latents]
        left, right = low_rank(torch.cat(stacked, dim=1), self.rank, self.loops)
        columns = [right[:, group : group + 1, :width] for group, width in enumerate(widths)]
        return left, torch.cat(columns, dim=2)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """A B^T of each run, [batch_size, num_heads, runs, tokens of a run, width].

        Args:
            left: A, its tokens by run. right: B.
        """
        if not self.spans:
            return left @ right.mT
        columns = (right[:, 0, :, span].mT for span in self.spans)
        latents = [left[:, group] @ group_columns for group, group_columns in enumerate(columns)]
        return torch.cat(latents, dim=-1).unsqueeze(1)

    @property
    def _dim(self) -> int:
        """Dimension of a vector: the tokens of a channel, or the numbers of a token."""
        return 2 if self.per_channel else 3

    def _vectors(self, numbers: Tensor) -> Tensor:
        return numbers if self.per_channel else heads_together(numbers)

    def _numbers(self, vectors: Tensor, num_heads: int) -> Tensor:
        return vectors if self.per_channel else heads_apart(vectors, num_heads)


def low_rank(matrix: Tensor, rank: int, loops: int) -> tuple[Tensor, Tensor]:
    """Factors A and B, matrix ~ A B^T, by power iteration from a fixed start, made orthonormal in the last loop.

    Args:
        matrix: [..., n, width], float32. rank: at most n and width are used; 0 gives empty factors.
    Returns:
        [..., n, rank] orthonormal, [..., width, rank].
    Limits: columns are made orthogonal in the last loop only, so that with many loops they become too alike for it.
    Source: GEAR algorithm 2 (PowerSGD's iteration).
    """
    rank = min(rank, *matrix.shape[-2:])
    right = torch.randn(matrix.shape[-1], rank, generator=torch.Generator().manual_seed(0)).to(matrix)
    for _ in range(loops - 1):  # normalised against overflow; its span stays
        right = functional.normalize(matrix.mT @ (matrix @ right), dim=-2)
    left = torch.linalg.qr(matrix @ torch.linalg.qr(right).Q).Q
    return left, matrix.mT @ left
