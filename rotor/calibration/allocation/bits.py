"""Path of plans of bits: the bits of every channel of every layer, for any number of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...checkpoint.layout import AttentionShape
from ...checkpoint.rows import UNIT_NIBBLES, aligned, read_alike
from ...checkpoint.sizes import share_removed, uncompressed_row_bytes
from ..codes.layer import GroupChannels, LayerCodes, channels_bytes
from .channel_bits import BitCurve, BitPath, bit_curve, bit_path
from .plan import COMPRESSION_SLACK, Plan, RankPath

PATH_RESOLUTION = 1024
"""Neighbouring plans of a path differ by at least 1/1024 of the uncompressed bytes; plans in between are made on
demand."""

UNIT_BYTES = UNIT_NIBBLES // 2
"""Bytes by which rows grow, the unit in which bytes are split."""


@dataclass(frozen=True)
class _LayerBits:
    """The best channels of a layer's latents for any number of units of bytes.

    curves: of the latents of each group, one group behind the other. latents: of a group, 1 or 2.
    """

    curves: tuple[BitCurve, ...]
    latents: int

    @classmethod
    def of(cls, codes: LayerCodes, widths: tuple[int, ...]) -> _LayerBits:
        """The curves of a layer's codes; rows of keys and values together have a scale."""
        scaled = len(codes.sides) == 1
        groups = range(len(codes.qk.weight))
        curves = [bit_curve(side.losses(g, widths), widths, scaled) for g in groups for side in codes.sides]
        return cls(tuple(curves), len(codes.sides))

    @cached_property
    def _filled(self) -> list[np.ndarray]:
        """Units that each latent can fill where its aligned row takes 0, 1, ... of them."""
        return [_fitting(len(curve.loss), len(self.curves) // self.latents) for curve in self.curves]

    @cached_property
    def path(self) -> BitPath:
        """Best loss of any number of units."""
        return bit_path([curve.loss[filled] for curve, filled in zip(self.curves, self._filled, strict=True)])

    def channels(self, units: int) -> GroupChannels:
        """Channels of each group when all of them share `units`."""
        latents = zip(self.curves, self._filled, self.path.split(units), strict=True)
        rows = iter(read_alike([curve.channels(int(filled[count])) for curve, filled, count in latents]))
        return list(zip(*[rows] * self.latents, strict=True))


def _fitting(units: int, groups: int) -> np.ndarray:
    """Units of a latent, fewer than `units`, that an aligned row of 0, 1, ... of them can hold."""
    sizes = [aligned(UNIT_BYTES * count, groups) // UNIT_BYTES for count in range(units)]
    return np.searchsorted(np.array(sizes), np.arange(sizes[-1] + 1), side="right") - 1


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
        # A unit of a layer with a window costs the bytes of its window's tokens, not of the sequence. Layers that hold
        # equally many tokens are split exactly among themselves first; at most two such kinds meet in `_plan`.
        held = shape.held_tokens(context_tokens or 1)
        row_bytes = uncompressed_row_bytes(shape, element_bytes)
        self._held, self._uncompressed_bytes = held, sum(a * b for a, b in zip(row_bytes, held, strict=True))
        self._layers = [_LayerBits.of(layer, widths) for layer in codes]
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
        """Plans with a unit less in one layer, by the loss that is predicted for each byte that it saves."""
        split = [channels_bytes([layer]) // UNIT_BYTES for layer in plan.channels or []]
        losses = [layer.path.loss for layer in self._layers]
        # What the path did not choose, but costs least for what it saves: measured losses may order them differently.
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
        ranks = [[(rows[0].rank, rows[-1].rank) for rows in layer] for layer in channels]
        kept = sum(channels_bytes([layer]) * tokens for layer, tokens in zip(channels, self._held, strict=True))
        stored = share_removed(self._uncompressed_bytes, kept)
        loss = sum(float(layer.path.loss[units]) for layer, units in zip(self._layers, split, strict=True))
        return Plan(float(sum(split)), stored, stored, ranks, ranks, channels, loss)
