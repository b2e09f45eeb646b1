"""Path of plans of bits: the bits of every channel of every layer, for any number of bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...checkpoint.channels import (
    NIBBLE_BITS,
    PLANE,
    PLANE_WORDS,
    SPAN_WORDS,
    WORD_PLANES,
    Parted,
    aligned,
    read_alike,
    whole_planes,
)
from ...checkpoint.layout import AttentionShape
from ...checkpoint.sizes import share_removed, uncompressed_row_bytes
from ..codes.layer import GroupChannels, LayerCodes, channels_bytes
from ..codes.side import SideCodes
from .channel_bits import BitCurve, BitPath, bit_curve, bit_path
from .plan import COMPRESSION_SLACK, Plan, RankPath

PATH_RESOLUTION = 1024
"""Neighbouring plans of a path differ by at least 1/1024 of the uncompressed bytes; plans in between are made on
demand."""

WORD_BITS = WORD_PLANES * NIBBLE_BITS

MOST_FAST_BITS = 10
"""Most bits a number of a fast latent, on average."""

FAST_COST = 2.0
"""Factor on the predicted loss of fast latents. Measured losses of fast latents of few bits are larger than predicted,
those of look-ups above all; see artifacts/NOTES.md."""

MOST_SPLIT = 2
"""Most planes that fast latents may split that are not whole planes of words. Each split plane adds an eighth to the
instructions of a row, and most rows have as many."""

UNIT_BYTES = PLANE // 2
"""Bytes by which rows grow, the unit in which bytes are split."""


class _LayerBits(ABC):
    """The best channels of a layer's latents for any number of units of bytes."""

    @property
    @abstractmethod
    def path(self) -> BitPath:
        """Best loss of any number of units."""

    @abstractmethod
    def channels(self, units: int) -> GroupChannels:
        """Channels of each group when all of them share `units`."""


@dataclass(frozen=True)
class _ApartBits(_LayerBits):
    """Curves of the latents of keys and of values, group by group."""

    curves: tuple[tuple[BitCurve, ...], ...]

    @cached_property
    def _each(self) -> list[BitCurve]:
        return [curve for of_group in zip(*self.curves, strict=True) for curve in of_group]

    @cached_property
    def _planes(self) -> list[np.ndarray]:
        """Most planes of each latent that fit in 0, 1, ... units of bytes."""
        return [_fitting(len(curve.loss), 0, len(self.curves[0])) for curve in self._each]

    @cached_property
    def path(self) -> BitPath:
        return bit_path([curve.loss[planes] for curve, planes in zip(self._each, self._planes, strict=True)])

    def channels(self, units: int) -> GroupChannels:
        latents = zip(self._each, self._planes, self.path.split(units), strict=True)
        sides = read_alike([curve.channels(int(planes[count])) for curve, planes, count in latents])
        return list(zip(sides[::2], sides[1::2], strict=True))


@dataclass(frozen=True)
class _JointBits(_LayerBits):
    """Curves of the latents of joint groups.

    fast: of each KV head by words, empty where no plane is fast. rest: by the words of a fast latent (0 without any),
    of each group by planes, given those fast codes; the first plane has what fast latents leave of their last one. Fast
    latents of a layer have the same number of words, since one kernel reads them all; all in `rest` are tried.

    Below two bits a number a plane is more than a fast latent's share, so sizes in between are tried too.
    """

    fast: tuple[BitCurve, ...]
    rest: dict[int, tuple[BitCurve, ...]]

    @cached_property
    def _of_words(self) -> dict[int, tuple[float, list[np.ndarray], BitPath]]:
        """What each number of words of a fast latent leads to: the loss of all fast latents, planes of the rest of each
        group that fit in 0, 1, ... units of its row, and the best split of units among groups."""
        found = {}
        for words, rest in self.rest.items():
            groups = len(rest)
            loss = FAST_COST * sum(float(curve.loss[min(words, len(curve.loss) - 1)]) for curve in self.fast)
            before = words * len(self.fast) // groups // PLANE_WORDS
            fitting = [_fitting(len(curve.loss), before, groups) for curve in rest]
            losses = [np.where(own < 0, np.inf, curve.loss[own]) for curve, own in zip(rest, fitting, strict=True)]
            found[words] = loss, fitting, bit_path(losses)
        return found

    @cached_property
    def _best(self) -> tuple[np.ndarray, np.ndarray]:
        """Least loss of 0, 1, ... units, and the words of a fast latent that reach it."""
        size = max(len(path.loss) for _, _, path in self._of_words.values())
        least, chosen = np.full(size, np.inf), np.zeros(size, dtype=np.int64)
        for words, (loss, _, path) in self._of_words.items():
            total = np.full(size, path.loss[-1] + loss)
            total[: len(path.loss)] = path.loss + loss
            better = total < least
            least[better], chosen[better] = total[better], words
        return least, chosen

    @cached_property
    def path(self) -> BitPath:
        return BitPath(self._best[0], ())

    def channels(self, units: int) -> GroupChannels:
        words = int(self._best[1][units])
        _, fitting, path = self._of_words[words]
        split = path.split(min(units, len(path.loss) - 1))
        rest = self.rest[words]
        size = len(self.fast) // len(rest)
        found: list[Parted] = []
        for index, (curve, own, count) in enumerate(zip(rest, fitting, split, strict=True)):
            fast = tuple(head.channels(words) for head in self.fast[index * size : (index + 1) * size])
            found.append(Parted(curve.channels(int(own[count])), fast))
        return [(key, None) for key in read_alike(found)]


def _fitting(planes: int, before: int, groups: int) -> np.ndarray:
    """Most planes of a latent that fit in 0, 1, ... units of a row that begins with `before` others; -1: none."""
    sizes = [aligned(UNIT_BYTES * (before + own), groups) // UNIT_BYTES for own in range(planes)]
    return np.searchsorted(np.array(sizes), np.arange(sizes[-1] + 1), side="right") - 1


def _layer_bits(codes: LayerCodes, widths: tuple[int, ...]) -> _LayerBits:
    def curves(side: SideCodes, unit: int = PLANE) -> tuple[BitCurve, ...]:
        return tuple(bit_curve(side.losses(index, widths), widths, unit=unit) for index in range(len(side.weight)))

    if not codes.joint:
        return _ApartBits(tuple(curves(side) for side in codes.sides))
    *fast_sides, rest = codes.sides

    def of_rest(ratio: Tensor, before: int) -> tuple[BitCurve, ...]:
        """Curves of the rest behind so many words of fast latents; the scale takes a nibble."""
        taken = WORD_PLANES * (before % PLANE_WORDS) + 1
        groups = range(len(rest.weight))
        losses = [ratio[index] * rest.losses(index, widths) for index in groups]
        return tuple(bit_curve(losses[index], widths, rest.order(index), taken=taken) for index in groups)

    if not fast_sides:
        return _JointBits((), {0: of_rest(torch.ones_like(rest.weight), 0)})
    fast = curves(fast_sides[0], WORD_PLANES)
    size = len(fast) // len(rest.weight)
    most = min(len(fast[0].loss) - 1, -(-MOST_FAST_BITS * fast_sides[0].weight.shape[1] // WORD_BITS))
    sizes = [count for count in range(1, whole_planes(most) + 1) if _is_tried(fast, size, count)]
    ratios = {count: codes.ratio([curve.channels(count) for curve in fast]) for count in sizes}
    return _JointBits(fast, {count: of_rest(ratio, size * count) for count, ratio in ratios.items()})


def _is_tried(fast: Sequence[BitCurve], size: int, words: int) -> bool:
    """Whether fast latents of so many words, `size` in a group, are tried.

    Whole planes are. Others are where kernels read a group's fast latents as one span of words, and where they split at
    most MOST_SPLIT planes, or no more than whole planes would.
    """

    def split(words: int) -> int:
        return max(replace(curve.channels(words), own_words=words).split for curve in fast)

    whole = whole_planes(words)
    return words == whole or (size * words <= SPAN_WORDS and split(words) <= max(MOST_SPLIT, split(whole)))


@dataclass(frozen=True)
class _LayersOfOneLength:
    """Layers whose caches hold the same number of tokens, and the best split among them.

    layers: indices of the layers.
    tokens: tokens that each holds.
    """

    layers: tuple[int, ...]
    tokens: int
    path: BitPath

    @property
    def least_units(self) -> int:
        """Fewest units that a plan needs."""
        return int(np.isfinite(self.path.loss).argmax())

    @property
    def unit_cost(self) -> int:
        """Bytes of a sequence that one unit takes."""
        return UNIT_BYTES * self.tokens


class BitsPath(RankPath):
    """Path of the plans with the least predicted loss for each number of bytes.

    The predicted loss of a plan is the sum over all channels of Fisher information times squared error of the code. No
    probe is needed, and losses of layers and sides are comparable. Bytes are those of a sequence: in a layer with a
    sliding window, a channel takes its bits only for the tokens of the window.

    Args:
        codes: codes of each layer.
        widths: bits that a channel may have, 0 among them.
        element_bytes: bytes of one number in the uncompressed cache.
        context_tokens: length of the sequence; None counts all layers alike.
    Source: docs/design.md, Mathematics, Codes; reverse water-filling (Cover and Thomas, section 10.3.3).
    """

    granularity = f"at least {UNIT_BYTES} bytes a latent", "calibrate with larger groups.size"

    def __init__(
        self,
        codes: Sequence[LayerCodes],
        shape: AttentionShape,
        widths: tuple[int, ...],
        element_bytes: int,
        context_tokens: int | None = None,
    ) -> None:
        held = shape.held_tokens(context_tokens or 1)
        row_bytes = uncompressed_row_bytes(shape, element_bytes)
        self._held, self._uncompressed_bytes = held, sum(a * b for a, b in zip(row_bytes, held, strict=True))
        self._layers = [_layer_bits(layer, widths) for layer in codes]
        self._by_length = []
        for tokens in dict.fromkeys(held):
            layers = tuple(index for index, count in enumerate(held) if count == tokens)
            path = bit_path([self._layers[index].path.loss for index in layers])
            self._by_length.append(_LayersOfOneLength(layers, tokens, path))
        assert len(self._by_length) <= 2, "a model's layers have one window, or none"

    def at_compression(self, target: float) -> Plan | None:
        """The largest plan that removes at least `target` of the bytes, or None."""
        return self._plan((1 - target + COMPRESSION_SLACK) * self._uncompressed_bytes)

    def _plans(self) -> list[Plan]:
        finest = min(alike.unit_cost for alike in self._by_length)
        spacing = finest * max(1, self._uncompressed_bytes // (finest * PATH_RESOLUTION))
        most = sum(alike.unit_cost * (len(alike.path.loss) - 1) for alike in self._by_length)
        least = sum(layers.unit_cost * layers.least_units for layers in self._by_length)
        plans = (self._plan(budget) for budget in range(most, least - 1, -spacing))
        return [plan for plan in plans if plan is not None]

    def lighter(self, plan: Plan) -> list[Plan]:
        """Plans with a plane less in one layer, by the loss that is predicted for each byte that it saves."""
        split = [channels_bytes([layer]) // UNIT_BYTES for layer in plan.channels or []]
        losses = [layer.path.loss for layer in self._layers]
        lost_per_byte = [
            float(loss[units - 1] - loss[units]) / tokens
            for loss, units, tokens in zip(losses, split, self._held, strict=True)
        ]
        order = [layer for layer in np.argsort(lost_per_byte) if np.isfinite(lost_per_byte[layer])]
        return [self._of([units - (layer == smaller) for layer, units in enumerate(split)]) for smaller in order]

    def _plan(self, budget: float) -> Plan | None:
        """The plan with the least predicted loss within `budget` bytes of a sequence, or None.

        The best split among layers that hold equally many tokens is known for every number of units. If there are two
        kinds of layers, every number of units of the first kind is tried, with the remaining budget for the second.
        """
        first, *others = self._by_length
        units = np.arange(len(first.path.loss))
        rest, loss = budget - first.unit_cost * units, first.path.loss
        shares = [units]
        for other in others:
            left = np.minimum(np.floor(rest / other.unit_cost), len(other.path.loss) - 1).astype(np.int64)
            loss = loss + np.where(left >= 0, other.path.loss[left], np.inf)
            shares.append(left)
        loss = np.where(rest >= 0, loss, np.inf)
        best = len(loss) - 1 - int(loss[::-1].argmin())  # among equal losses the one with the most bytes
        if not np.isfinite(loss[best]):
            return None
        split = [0] * len(self._layers)
        for kind, share in zip(self._by_length, shares, strict=True):
            for layer, units_of_layer in zip(kind.layers, kind.path.split(int(share[best])), strict=True):
                split[layer] = units_of_layer
        return self._of(split)

    def _of(self, split: Sequence[int]) -> Plan:
        """Make the plan with these units of bytes in each layer."""
        channels = [layer.channels(units) for layer, units in zip(self._layers, split, strict=True)]
        ranks = [[(qk.rank, (v or qk).rank) for qk, v in layer] for layer in channels]
        kept = sum(channels_bytes([layer]) * tokens for layer, tokens in zip(channels, self._held, strict=True))
        stored = share_removed(self._uncompressed_bytes, kept)
        loss = sum(float(layer.path.loss[units]) for layer, units in zip(self._layers, split, strict=True))
        return Plan(float(sum(split)), stored, stored, ranks, ranks, channels, loss)
