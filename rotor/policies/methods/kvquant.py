"""KVQuant: non-uniform levels, ranges of channels and outliers, fitted to calibration text."""

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
"""Steps of K-means, after which it has converged or nearly so."""

LEAST_HALF = 2**-14
"""Least half width of a range: a float16 that is not subnormal."""


@dataclass(frozen=True)
class LayerLevels:
    """The fit of one layer.

    key_low, key_high: [width over all heads], each key channel's range without its outliers. key_levels, value_levels:
    [2^bits], ascending, of numbers from -1 to 1.
    """

    key_low: tuple[float, ...]
    key_high: tuple[float, ...]
    key_levels: tuple[float, ...]
    value_levels: tuple[float, ...]


@dataclass(frozen=True)
class KVQuant(FittedQuantiser):
    """x ~ middle + half * level[code], the nearest of 2^bits levels; each layer has levels for keys and for values.
    Keys: the range (middle, half) of a channel is fixed. Values: the range is the token's, without its outliers.

    Levels minimise sum g^2 (x - its level)^2 over calibration text, g the gradient of the model's loss by x.

    Outliers are stored unquantised. In keys they are the numbers beyond their channel's range, which was set to leave
    out a share of the calibration text; in values they are that share of each token's numbers.

    Args:
        bits: 4, 3 or 2. outliers: their share. first: first tokens of a sequence that stay uncoded. levels: of each
            layer; empty until they are fitted (rotor.fit_cache_policy, or `rotor export --cache`).

    Bytes of a number: bits / 8 + 4 outliers (a float16 and an int16 index) + 2 / width over all heads (the number of
    outliers of a token), and in values + 4 / width (the token's range). Levels and ranges belong to the checkpoint and
    are not counted with the cache.
    Source: Hooper et al., KVQuant (arXiv 2401.18079), sections 3.1 to 3.5, equation 2.
    """

    method: ClassVar[str] = "kvquant"
    needs_gradients: ClassVar[bool] = True
    bits: Annotated[int, Expect((4, 3, 2).__contains__, "one of 4, 3, 2")] = 4
    outliers: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    first: NonNegativeInt = 1
    levels: tuple[LayerLevels, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for fit in self.levels:
            sizes = {len(fit.key_levels), len(fit.value_levels)}
            fits = sizes == {2**self.bits} and len(fit.key_low) == len(fit.key_high) > 0
            self.require(fits, "levels", f"{2**self.bits} levels, and as many lower ends of ranges as upper ones")

    def streams_of(self, fit: LayerLevels) -> tuple[Stream, Stream]:
        keys = RangedCode(self.bits, self.outliers, fit.key_levels, (fit.key_low, fit.key_high))
        values = RangedCode(self.bits, self.outliers, fit.value_levels)
        return Stream(keys, first=self.first), Stream(values, first=self.first)

    def fit_layer(self, sample: LayerSample) -> LayerLevels:
        assert sample.key_gradients is not None
        assert sample.value_gradients is not None
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
    """Codes numbers by fixed levels inside a range, and stores outliers unquantised.

    Args:
        ends: the lower and upper ends of each channel's range; empty: each token has the range of its numbers.

    Parts, of one sequence: codes [1, 1, tokens, bytes] uint8; number of outliers of each token [1, 1, tokens, 1] int16;
    outliers and their indices, token by token, [1, 1, outliers, 1] float16 and int16; without `ends` middle and half of
    each token's range, float16.
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
            index, *ranges = token_ranges(rows, self.outliers)
            taken = torch.zeros_like(rows, dtype=torch.bool).scatter(-1, index, True)
            stored = tuple(part.half() for part in ranges)
            numbers = (rows - stored[0].float()) / stored[1].float()
        # Outliers have codes too, which nothing reads.
        codes = pack(torch.bucketize(numbers, self._middles.to(rows.device)), self.bits)
        counts, index = taken.sum(-1, keepdim=True).to(torch.int16), taken.nonzero()[:, -1]
        sparse = rows[taken].half(), stored_index(index, rows.shape[-1])
        return codes, counts, *(part[None, None, :, None] for part in sparse), *stored

    def typical(self, states: Tensor) -> Tensor:
        """Scale normal numbers so that as many lie beyond a range as in the text that ranges were fitted to."""
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
        """Middles between neighbouring levels; a number's code is how many of them it exceeds."""
        return (self._levels[1:] + self._levels[:-1]) / 2

    @cached_property
    def key_range(self) -> tuple[Tensor, Tensor]:
        """Middle and half of each channel's range."""
        low, high = (torch.tensor(ends) for ends in self.ends)
        return range_of(low, high)


def range_of(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Middle and half of ranges."""
    return (low + high) / 2, ((high - low) / 2).clamp(min=LEAST_HALF)


def token_ranges(rows: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Indices of the `share` of a token's numbers, [..., width], that are farthest from its mean (at least one, unless
    share is 0), and middle and half of the range of the other numbers."""
    count = max(1, round(share * rows.shape[-1])) if share > 0 else 0
    index = (rows - rows.mean(-1, keepdim=True)).abs().topk(count, dim=-1).indices
    rest = filled(rows, index, -1)[2]
    return index, *range_of(rest.amin(-1, keepdim=True), rest.amax(-1, keepdim=True))


def weighted_means(numbers: Tensor, weights: Tensor, count: int, loops: int) -> Tensor:
    """K-means in float64: levels [count], ascending, that make the sum of weight * (number - nearest level)^2 small.

    Levels start at the quantiles of the numbers with a weight. A level stays where it is if no number with a weight is
    nearest to it.

    Args:
        numbers, weights: [n], of any number of dimensions; weights are 0 or more.
    """
    numbers, weights = numbers.flatten().double(), weights.flatten().double()
    weighed = weights > 0
    if not bool(weighed.any()):  # all numbers count alike
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
