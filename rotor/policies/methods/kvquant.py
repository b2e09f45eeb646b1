"""KVQuant: non-uniform levels, ranges of channels and outliers that are found before, on calibration text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from ...checked import Expect
from ...errors import UsageError
from ..affine import LARGEST, pack, unpack
from ..outliers import filled, stored_index
from ..policy import LayerSample
from ..quantiser import FittedQuantiser
from ..store import Codec, Parts, Stream, heads_apart, heads_together

LOOPS = 50
"""Of K-means; it has come to rest by then, or nearly."""

LEAST_HALF = 2**-14
"""Of a range: a float16 that is not subnormal."""


@dataclass(frozen=True)
class LayerLevels:
    """What calibration finds for one layer.

    key_low, key_high: [width over all heads], each key channel's range without its outliers. key_levels, value_levels:
    [2^bits], ascending, of numbers from -1 to 1.
    """

    key_low: tuple[float, ...]
    key_high: tuple[float, ...]
    key_levels: tuple[float, ...]
    value_levels: tuple[float, ...]


@dataclass(frozen=True)
class KVQuant(FittedQuantiser):
    """x ~ middle + half * level[code], the nearest of 2^bits levels of the layer, which has its own for keys and for
    values. Keys: the range (middle, half) of a channel is fixed. Values: it is that of the token without its outliers.

    Levels minimise sum g^2 (x - its level)^2 over calibration text, g the gradient of the model's loss by x.

    Outliers are kept as they are: of keys every number beyond its channel's range, which leaves out a share of those of
    calibration; of values that share of each token's numbers.

    Args:
        bits: 4, 3 or 2. outliers: their share. first: tokens of a row that are kept whole. levels: of each layer; empty
            until calibration has found them (rotor.fit_cache_policy, or `rotor export --cache`).

    Bytes of a number: bits / 8 + 4 outliers (a float16 and an int16 index), and a token's and side's 2 / width over all
    heads (how many outliers), of values + 4 / width (its range). Levels and ranges belong to the checkpoint and are not
    counted with the cache.
    Source: Hooper et al., KVQuant (arXiv 2401.18079), sections 3.1 to 3.5, equation 2.
    """

    method: ClassVar[str] = "kvquant"
    bits: Annotated[int, Expect((4, 3, 2).__contains__, "one of 4, 3, 2")] = 4
    outliers: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    first: NonNegativeInt = 1
    levels: tuple[LayerLevels, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for found in self.levels:
            sizes = {len(found.key_levels), len(found.value_levels)}
            fits = sizes == {2**self.bits} and len(found.key_low) == len(found.key_high) > 0
            self.require(fits, "levels", f"{2**self.bits} levels, and as many lower ends of ranges as upper ones")

    def streams_of(self, found: LayerLevels) -> tuple[Stream, Stream]:
        keys = RangedCode(self.bits, self.outliers, found.key_levels, (found.key_low, found.key_high))
        values = RangedCode(self.bits, self.outliers, found.value_levels)
        return Stream(keys, first=self.first), Stream(values, first=self.first)

    def fit_layer(self, sample: LayerSample) -> LayerLevels:
        sides = sample.keys, sample.values, sample.key_gradients, sample.value_gradients
        keys, values, key_weights, value_weights = (part[:, self.first :].flatten(0, 1).double() for part in sides)
        ordered = keys.sort(0).values
        beyond = int(self.outliers / 2 * len(keys))
        low, high = ordered[beyond], ordered[len(keys) - 1 - beyond]
        middle, half = range_of(low, high)
        numbers = (keys - middle) / half
        weights = key_weights.square() * half.square() * (numbers.abs() <= 1)
        key_levels = weighted_means(numbers, weights, 2**self.bits, LOOPS)
        index, middle, half = token_ranges(values, self.outliers)
        weights = (value_weights.square() * half.square()).scatter(-1, index, 0.0)
        numbers = (filled(values, index, -1)[2] - middle) / half
        value_levels = weighted_means(numbers, weights, 2**self.bits, LOOPS)
        parts = (low, high, key_levels, value_levels)  # five digits: stored as text, and beyond a float16
        return LayerLevels(*(tuple(float(f"{number:.5g}") for number in part.tolist()) for part in parts))


@dataclass(frozen=True)
class RangedCode(Codec):
    """Codes of numbers by fixed levels inside a range, with outliers kept as they are.

    Args:
        ends: the lower and upper ends of each channel's range; empty: each token has the range of its own numbers.

    Parts, of one row: codes [1, 1, tokens, bytes] uint8; how many outliers each token has [1, 1, tokens, 1] int16;
    these and their indices, token by token, [1, 1, outliers, 1] float16 and int16; and a token's own range: middle and
    half, float16.
    """

    ragged: ClassVar[bool] = True
    bits: int
    outliers: float
    levels: tuple[float, ...]
    ends: tuple[tuple[float, ...], ...] = ()

    def encode(self, states: Tensor) -> Parts:
        rows = heads_together(states.float().clamp(-LARGEST, LARGEST))
        stored: Parts = ()
        if self.ends:
            if rows.shape[-1] != len(self.ends[0]):
                sizes = f"ranges of {len(self.ends[0])} key channels, the layer has {rows.shape[-1]}"
                raise UsageError(
                    f"cache policy kvquant: {sizes}.",
                    "They are of one checkpoint: export it with --cache, or fit the policy to it.",
                )
            middle, half = (part.to(rows.device) for part in self.key_range)
            numbers = (rows - middle) / half
            taken = numbers.abs() > 1 if self.outliers else torch.zeros_like(rows, dtype=torch.bool)
        else:
            index, *found = token_ranges(rows, self.outliers)
            taken = torch.zeros_like(rows, dtype=torch.bool).scatter(-1, index, True)
            stored = tuple(part.half() for part in found)
            numbers = (rows - stored[0].float()) / stored[1].float()
        # Outliers have codes too, which nothing reads.
        codes = pack(torch.bucketize(numbers, self._middles.to(rows.device)), self.bits)
        counts, index = taken.sum(-1, keepdim=True).to(torch.int16), taken.nonzero()[:, -1]
        sparse = rows[taken].half(), stored_index(index, rows.shape[-1])
        return codes, counts, *(part[None, None, :, None] for part in sparse), *stored

    def typical(self, states: Tensor) -> Tensor:
        """As many of normal numbers lie beyond a range as of the text that ranges were found on."""
        if not self.ends:
            return states
        middle, half = self.key_range
        farthest = torch.tensor(1 - self.outliers / 2, dtype=torch.float64)
        deviation = half / float(torch.special.ndtri(farthest)) if self.outliers else half
        return heads_apart(heads_together(states.float()) * deviation + middle, states.shape[1]).to(states.dtype)

    def decode(self, parts: Parts, num_heads: int, width: int) -> Tensor:
        codes, counts, outliers, index, *stored = parts
        middle, half = (part.to(codes.device).float() for part in (stored or self.key_range))
        numbers = self._levels.to(codes.device)[unpack(codes, self.bits, num_heads * width).long()]
        rows = numbers * half + middle
        token = torch.arange(rows.shape[2], device=rows.device).repeat_interleave(counts.flatten().long())
        rows[0, 0, token, index.flatten().long()] = outliers.flatten().float()
        return heads_apart(rows, num_heads)

    @cached_property
    def _levels(self) -> Tensor:
        return torch.tensor(self.levels)

    @cached_property
    def _middles(self) -> Tensor:
        """Between neighbouring levels; a number's code counts those that it exceeds."""
        return (self._levels[1:] + self._levels[:-1]) / 2

    @cached_property
    def key_range(self) -> tuple[Tensor, Tensor]:
        """Middle and half of each channel's."""
        low, high = (torch.tensor(ends) for ends in self.ends)
        return range_of(low, high)


def range_of(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Middle and half of ranges."""
    return (low + high) / 2, ((high - low) / 2).clamp(min=LEAST_HALF)


def token_ranges(rows: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows [..., width]: indices of the `share` of numbers that is farthest from the mean, at least one where there
    is to be any, and middle and half of the range of the others."""
    count = max(1, round(share * rows.shape[-1])) if share > 0 else 0
    index = (rows - rows.mean(-1, keepdim=True)).abs().topk(count, dim=-1).indices
    rest = filled(rows, index, -1)[2]
    return index, *range_of(rest.amin(-1, keepdim=True), rest.amax(-1, keepdim=True))


def weighted_means(numbers: Tensor, weights: Tensor, count: int, loops: int) -> Tensor:
    """Levels [count], ascending, that make the sum of weight * (number - nearest level)^2 small: K-means, float64.

    They begin at the quantiles of the numbers with a weight; a level that nothing with a weight is nearest to stays
    where it is.

    Args:
        numbers, weights: [n], of any number of dimensions; weights are 0 or more.
    """
    numbers, weights = numbers.flatten().double(), weights.flatten().double()
    weighed = weights > 0
    if not bool(weighed.any()):  # nothing reads them: all count alike
        weights, weighed = torch.ones_like(numbers), torch.ones_like(weighed)
    ordered, order = numbers[weighed].sort()
    weights = weights[weighed][order]
    zero = weights.new_zeros(1)
    mass, moment = (torch.cat([zero, part.cumsum(0)]) for part in (weights, weights * ordered))
    n = len(ordered)
    levels = ordered[((torch.arange(count, device=ordered.device) + 0.5) / count * n).long().clamp(max=n - 1)]
    for _ in range(loops):
        ends = torch.searchsorted(ordered, (levels[1:] + levels[:-1]) / 2, right=True)
        bounds = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), n)])
        held = mass[bounds[1:]] - mass[bounds[:-1]]
        sums = moment[bounds[1:]] - moment[bounds[:-1]]
        levels = torch.where(held > 0, sums / held.clamp(min=torch.finfo(held.dtype).tiny), levels)
    return levels
