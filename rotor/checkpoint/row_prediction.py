"""The codes of a layer predicted from those of the layer before, so that their differences take fewer bytes.

A prediction is a sum of whole numbers with one rounding behind it, so that every machine makes the same one. Weights
are fitted to the tokens that are stored and lie beside them, in steps as coarse as the error with which so many tokens
determine them. A channel whose prediction does not earn its weights has none.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .row_channels import BYTE_BITS, DAMAGED, Bytes

STEPS_PER_ERROR = 4.0
"""Step of a stored weight over the error with which the tokens determine it. 2 takes as many bytes, 8 takes 1 % more
(SmolLM2 and Qwen2.5 0.5B, 8,192 tokens)."""

RIDGE = 1e-3
"""Part of its variance that is added to a channel's before weights are fitted."""

OVERHEAD_BITS = 64
"""Bits of a predicted channel's step and bias."""

COMPARED_TOKENS = 512
"""Tokens by which it is decided whether a prediction earns its weights."""


class LayerCodes:
    """The codes of a layer, [channels, tokens], of so many bits each; and what predicts those of the next layer."""

    def __init__(self, codes: Bytes, bits: npt.NDArray[np.int64]) -> None:
        self.codes, self.bits = codes, bits

    @cached_property
    def centred(self) -> npt.NDArray[np.int8]:
        """Codes from the middle of their levels, all over the same range: u becomes (2 u + 1) 2^(7 - bits) - 128."""
        shift = (BYTE_BITS - self.bits)[:, None]
        middle = np.where(shift, 1 << np.maximum(shift - 1, 0), 0)
        return (((self.codes << shift.astype(np.uint8)) + middle.astype(np.uint8)) ^ 128).view(np.int8)

    @cached_property
    def mean(self) -> npt.NDArray[np.float64]:
        """Mean of `centred`, [channels]."""
        tokens = self.codes.shape[1]
        return _product(self.centred, np.ones((tokens, 1), np.int8))[:, 0] / tokens

    @cached_property
    def covariance(self) -> npt.NDArray[np.float64]:
        """Covariance of `centred`, [channels, channels]."""
        return self.covariance_with(self)

    def covariance_with(self, other: LayerCodes) -> npt.NDArray[np.float64]:
        covariance = _product(self.centred, other.centred.T) / self.codes.shape[1]
        covariance -= np.outer(self.mean, other.mean)
        return covariance


class Prediction(NamedTuple):
    """Prediction of some channels of a layer from those of the layer before.

    used: [channels] bool, which ones. weights: [used, channels before], int8. step, bias: [used], float32.
    """

    used: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.int8]
    step: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]

    def codes(self, before: npt.NDArray[np.int8], bits: npt.NDArray[np.int64]) -> Bytes:
        """The predicted codes less the middle of their levels, modulo 256, [used, tokens]: differences lie around that
        middle, as the codes of other channels do, with which they share a Huffman code.

        Args:
            before: `LayerCodes.centred` of the layer before. bits: of all channels of this one.
        """
        sums = _product(self.weights, before).astype(np.float32)
        sums *= self.step[:, None]
        sums += self.bias[:, None]
        bits = bits[self.used]
        np.clip(sums, 0, highest(bits).astype(np.float32), out=sums)
        return sums.astype(np.uint8) - (1 << bits - 1).astype(np.uint8)[:, None]

    def stored(self) -> list[Bytes]:
        """Weights and scales as bytes."""
        return [self.weights.view(np.uint8), np.stack([self.step, self.bias]).astype("<f4").view(np.uint8)]

    @classmethod
    def read(cls, used: npt.NDArray[np.bool_], weights: Bytes, scales: Bytes) -> Prediction:
        """Read what `stored` gave; raises CheckpointError if a scale is no number."""
        step, bias = np.frombuffer(scales, "<f4").astype(np.float32).reshape(2, -1)
        if not (np.isfinite(step).all() and np.isfinite(bias).all()):
            raise CheckpointError("packed rows whose prediction is not finite.", DAMAGED)
        return cls(used, weights.view(np.int8).reshape(len(step), -1).copy(), step, bias)


def _product(a: npt.NDArray[np.int8], b: npt.NDArray[np.int8]) -> npt.NDArray[np.int32]:
    """a b, exactly; [m, k] and [k, n]."""
    import torch

    left, right = torch.from_numpy(a), torch.from_numpy(b)
    product: npt.NDArray[np.int32] = torch._int_mm(left, right).numpy()
    return product


def fitted(before: LayerCodes, layer: LayerCodes) -> Prediction | None:
    """Fit a prediction of a layer's tokens by least squares; None where no channel earns its weights."""
    from scipy import linalg

    tokens, bits = layer.codes.shape[1], layer.bits
    spread, cross = before.covariance.diagonal(), before.covariance_with(layer)
    ridge = np.diag(RIDGE * spread + 1e-6)
    weights = linalg.solve(before.covariance + ridge, cross, assume_a="pos", check_finite=False)
    error = layer.covariance.diagonal() - (weights * (cross + ridge @ weights)).sum(0)
    step = STEPS_PER_ERROR * np.sqrt(np.maximum(error, 1e-6) / tokens / np.maximum(spread.mean(), 1e-6))
    step = np.maximum(step, np.abs(weights).max(0) / 127)
    whole = np.ascontiguousarray(np.rint(weights / step).astype(np.int8).T)
    levels = 0.5 ** (BYTE_BITS - bits)  # in a unit of `centred`
    middle = np.where(bits < BYTE_BITS, 2.0 ** (bits - 1), 128.5)
    bias = (layer.mean - (whole @ before.mean) * step) * levels + middle
    every = Prediction(np.ones(len(bits), bool), whole, (step * levels).astype(np.float32), bias.astype(np.float32))

    some = slice(None, None, -(-tokens // COMPARED_TOKENS))
    codes = layer.codes[:, some]
    rest = differences(codes, every.codes(np.ascontiguousarray(before.centred[:, some]), bits), bits)
    saved_bits = tokens * (entropies(codes) - entropies(rest))
    weight_bits = 0.5 * np.log2(2 * np.pi * np.e * (whole.var(1) + 1 / 12))
    used = saved_bits > whole.shape[1] * weight_bits + OVERHEAD_BITS
    return Prediction(used, whole[used], every.step[used], every.bias[used]) if used.any() else None


def entropies(codes: Bytes) -> npt.NDArray[np.float64]:
    """Bits of a code of each channel, as its frequencies have it."""
    channels, tokens = codes.shape
    places = codes + (np.arange(channels) << BYTE_BITS)[:, None]
    counts = np.bincount(places.ravel(), minlength=channels << BYTE_BITS).reshape(channels, -1)
    return np.log2(tokens) - (counts * np.log2(np.maximum(counts, 1))).sum(1) / tokens  # type: ignore[no-any-return]


def differences(codes: Bytes, predicted: Bytes, bits: npt.NDArray[np.int64]) -> Bytes:
    """Codes less what is predicted, modulo their levels."""
    return codes - predicted & highest(bits)


def highest(bits: npt.NDArray[np.int64]) -> Bytes:
    """The highest code of each channel, [channels, 1]."""
    largest: Bytes = ((1 << bits) - 1).astype(np.uint8)[:, None]
    return largest
