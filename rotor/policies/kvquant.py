"""KVQuant: non-uniform levels, ranges of channels and outliers that are found before, on calibration text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ..errors import UsageError
from .layer import PolicyLayer
from .levels import weighted_means
from .policy import LayerSample
from .quantiser import CodedLayer, Quantiser
from .ranged_codes import ChannelCode, TokenCode, of_channels, of_tokens
from .store import Stream

LOOPS = 50
"""Of K-means; it has come to rest by then, or nearly."""


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
class KVQuant(Quantiser):
    """x ~ middle + half * level[code], the nearest of 2^bits levels of the layer, which has its own for keys and for
    values. Keys: the range (middle, half) of a channel is fixed. Values: it is that of the token without its outliers.

    Levels minimise sum g^2 (x - its level)^2 over calibration text, g the gradient of the model's loss by x.

    Args:
        bits: 4, 3 or 2. outliers: share of a token's numbers that are kept as they are. first: tokens of a row that are
            kept whole. levels: of each layer; empty until calibration has found them (rotor.fit_cache_policy, or
            `rotor export --cache`).

    Bytes of a number: bits / 8 + 4 outliers (a float16 and an int16 index), of values + 4 / width over all heads.
    Levels and ranges belong to the checkpoint and are not counted with the cache.
    Limits: KVQuant takes out every key beyond its channel's range; here each token has as many places, for those
        farthest beyond it, so that rows are of equal size. Keys are coded as the cache gets them: before RoPE, as
        KVQuant wants it, on compressed rows of domain `pre`.
    Source: Hooper et al., KVQuant (arXiv 2401.18079), sections 3.1 to 3.5, equation 2.
    """

    method: ClassVar[str] = "kvquant"
    bits: int = 4
    outliers: float = 0.01
    first: int = 1
    levels: tuple[LayerLevels, ...] = ()

    def __post_init__(self) -> None:
        self.require(self.bits in (4, 3, 2), "bits", "one of (4, 3, 2)")
        self.require(0 <= self.outliers < 0.5, "outliers", "a share below 0.5")
        self.require(self.first >= 0, "first", "0 or more")
        for found in self.levels:
            sizes = {len(found.key_levels), len(found.value_levels)}
            fits = sizes == {2**self.bits} and len(found.key_low) == len(found.key_high) > 0
            self.require(fits, "levels", f"{2**self.bits} levels, and as many lower ends of ranges as upper ones")

    @property
    def needs_samples(self) -> bool:
        return not self.levels

    def fitted(self, samples: Sequence[LayerSample]) -> KVQuant:
        return replace(self, levels=tuple(self._levels(sample) for sample in samples))

    def streams(self) -> tuple[Stream, Stream]:
        """How the first layer's keys and values are coded: which tokens wait is the same in all layers."""
        return self._streams(self.levels[0] if self.levels else LayerLevels((), (), (), ()))

    def layers(self, count: int) -> list[PolicyLayer]:
        if len(self.levels) != count:
            raise UsageError(
                f"cache policy kvquant: levels of {len(self.levels)} layers, the model has {count}.",
                "They are found on calibration text: `rotor export RUN -o OUT --accuracy 0.99 --cache kvquant-4` "
                "stores them, and rotor.fit_cache_policy(model, policy, rows) gives a policy that has them.",
            )
        return [CodedLayer(self._streams(levels)) for levels in self.levels]

    @property
    def key_widths(self) -> tuple[int, ...]:
        return tuple(len(found.key_low) for found in self.levels)

    def _streams(self, levels: LayerLevels) -> tuple[Stream, Stream]:
        key = ChannelCode(self.bits, self.outliers, self.first, levels.key_levels, levels.key_low, levels.key_high)
        return Stream(key), Stream(TokenCode(self.bits, self.outliers, self.first, levels.value_levels))

    def _levels(self, sample: LayerSample) -> LayerLevels:
        keys, values = (part[:, self.first :].flatten(0, 1).double() for part in (sample.keys, sample.values))
        key_weights, value_weights = (
            part[:, self.first :].flatten(0, 1).double().square()
            for part in (sample.key_gradients, sample.value_gradients)
        )
        ordered = keys.sort(0).values
        beyond = int(self.outliers / 2 * len(keys))
        low, high = ordered[beyond], ordered[len(keys) - 1 - beyond]
        numbers, half = of_channels(keys, low, high)
        key_weights = key_weights * half.square() * (numbers.abs() <= 1)
        found = of_tokens(values, self.outliers)
        value_weights = (value_weights * found.half.square()).scatter(-1, found.index, 0.0)
        key_levels = weighted_means(numbers, key_weights, 2**self.bits, LOOPS)
        value_levels = weighted_means(found.numbers, value_weights, 2**self.bits, LOOPS)
        return LayerLevels(*(_short(part) for part in (low, high, key_levels, value_levels)))


def _short(numbers: Tensor) -> tuple[float, ...]:
    """Five digits: what is stored as text, and is beyond a float16."""
    return tuple(float(f"{number:.5g}") for number in numbers.tolist())
