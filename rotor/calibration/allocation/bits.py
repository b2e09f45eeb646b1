"""Bits of every channel of every layer, for any number of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...checkpoint.channels import PLANE, aligned, read_alike
from ...checkpoint.layout import AttentionShape, uncompressed_kv_bytes_per_token
from ..codes.layer import GroupChannels, LayerCodes, as_pair, channels_bytes
from .channel_bits import BitCurve, BitPath, bit_curve, bit_path
from .plan import SLACK, Plan, RankPath

STEPS = 1024
"""Plans of a path lie at least one part in so many of the uncompressed bytes apart; others are made on demand."""

UNIT_BYTES = PLANE // 2
"""What rows grow by: the unit in which bytes are split."""


@dataclass(frozen=True)
class _LayerBits:
    """The curves of a layer, the latents of each group in turn, and their best split.

    latents: of a group: that of keys and that of values, or one of both.
    """

    curves: tuple[BitCurve, ...]
    latents: int

    @cached_property
    def planes(self) -> tuple[np.ndarray, ...]:
        """Of each latent: the most planes in 0, 1, ... units of bytes."""
        groups, found = len(self.curves) // self.latents, []
        for curve in self.curves:
            sizes = np.array([aligned(UNIT_BYTES * planes, groups) // UNIT_BYTES for planes in range(len(curve.loss))])
            found.append(np.searchsorted(sizes, np.arange(sizes[-1] + 1), side="right") - 1)
        return tuple(found)

    @cached_property
    def path(self) -> BitPath:
        return bit_path([curve.loss[planes] for curve, planes in zip(self.curves, self.planes, strict=True)])

    def channels(self, units: int) -> GroupChannels:
        """The channels of each group when there are so many units for all of them."""
        split = self.path.split(units)
        sides = [
            curve.channels(int(planes[own])) for curve, planes, own in zip(self.curves, self.planes, split, strict=True)
        ]
        sides = read_alike(sides)
        return [as_pair(sides[i : i + self.latents]) for i in range(0, len(sides), self.latents)]


@dataclass(frozen=True)
class _Alike:
    """Layers that hold equally many tokens, and their best split.

    layers: their indices. tokens: that each holds.
    """

    layers: tuple[int, ...]
    tokens: int
    path: BitPath

    @property
    def least_units(self) -> int:
        return int(np.isfinite(self.path.loss).argmax())

    @property
    def unit_cost(self) -> int:
        """Bytes of a sequence that a unit takes."""
        return UNIT_BYTES * self.tokens


class BitsPath(RankPath):
    """Path of the plans of least predicted loss for each number of bytes.

    The predicted loss of a plan is the sum over all channels of Fisher information times squared error of the code, so
    that no probe is needed, and layers and sides compare. Bytes are those of a sequence: a channel of a layer with a
    window takes its bits for the tokens of the window alone.

    Args:
        codes: of each layer.
        widths: bits that a channel may have, 0 among them.
        element_bytes: of one number of the model's dtype: what is compressed.
        context_tokens: of the sequence; None counts all layers alike.
    Source: docs/design.md, Mathematics, Codes; reverse water-filling (Cover and Thomas, section 10.3.3).
    """

    step = f"at least {UNIT_BYTES} bytes a latent", "calibrate with larger groups.size"

    def __init__(
        self,
        codes: Sequence[LayerCodes],
        shape: AttentionShape,
        widths: tuple[int, ...],
        element_bytes: int,
        context_tokens: int | None = None,
    ) -> None:
        held = shape.held_tokens(context_tokens or 1)
        row_bytes = uncompressed_kv_bytes_per_token(shape, element_bytes) // shape.num_layers
        self._held, self._uncompressed_bytes = held, row_bytes * sum(held)
        self._layers = []
        for layer in codes:
            groups = range(len(layer.qk.weight))
            curves = [bit_curve(side.losses(group, widths), widths) for group in groups for side in layer.sides]
            self._layers.append(_LayerBits(tuple(curves), len(layer.sides)))
        self._alike = []
        for tokens in dict.fromkeys(held):
            layers = tuple(index for index, own in enumerate(held) if own == tokens)
            path = bit_path([self._layers[index].path.loss for index in layers])
            self._alike.append(_Alike(layers, tokens, path))
        assert len(self._alike) <= 2, "a model's layers have one window, or none"

    def at_compression(self, target: float) -> Plan | None:
        """The plan of the most bytes that removes at least `target` of them, or None if there is none."""
        return self._plan((1 - target + SLACK) * self._uncompressed_bytes)

    def _plans(self) -> list[Plan]:
        finest = min(alike.unit_cost for alike in self._alike)
        step = finest * max(1, self._uncompressed_bytes // (finest * STEPS))
        most = sum(alike.unit_cost * (len(alike.path.loss) - 1) for alike in self._alike)
        least = sum(alike.unit_cost * alike.least_units for alike in self._alike)
        plans = (self._plan(budget) for budget in range(most, least - 1, -step))
        return [plan for plan in plans if plan is not None]

    def lighter(self, plan: Plan) -> list[Plan]:
        """Plans with a plane less in one layer, by the loss that is predicted for each byte that it saves."""
        split = [channels_bytes([layer]) // UNIT_BYTES for layer in plan.channels or []]
        losses = [layer.path.loss for layer in self._layers]
        lost = [
            float(loss[own - 1] - loss[own]) / tokens
            for loss, own, tokens in zip(losses, split, self._held, strict=True)
        ]
        order = [index for index in np.argsort(lost) if np.isfinite(lost[index])]
        return [self._of([own - (place == index) for place, own in enumerate(split)]) for index in order]

    def _plan(self, budget: float) -> Plan | None:
        """The plan of least predicted loss of at most so many bytes of a sequence, None if there is none.

        Of layers that hold as many tokens the best split of every number of units is known; where there are two kinds
        of layers, every share of the first kind is tried with what it leaves to the other.
        """
        first, *others = self._alike
        units = np.arange(len(first.path.loss))
        rest, loss = budget - first.unit_cost * units, first.path.loss
        shares = [units]
        for other in others:
            left = np.minimum(np.floor(rest / other.unit_cost), len(other.path.loss) - 1).astype(np.int64)
            loss = loss + np.where(left >= 0, other.path.loss[left], np.inf)
            shares.append(left)
        loss = np.where(rest >= 0, loss, np.inf)
        best = len(loss) - 1 - int(loss[::-1].argmin())  # of equal losses the most bytes
        if not np.isfinite(loss[best]):
            return None
        split = [0] * len(self._layers)
        for alike, share in zip(self._alike, shares, strict=True):
            for layer, own in zip(alike.layers, alike.path.split(int(share[best])), strict=True):
                split[layer] = own
        return self._of(split)

    def _of(self, split: Sequence[int]) -> Plan:
        """The plan of so many units of bytes in each layer."""
        channels = [layer.channels(own) for layer, own in zip(self._layers, split, strict=True)]
        ranks = [[(qk.rank, (v or qk).rank) for qk, v in layer] for layer in channels]
        kept = sum(channels_bytes([layer]) * tokens for layer, tokens in zip(channels, self._held, strict=True))
        stored = 1.0 - kept / self._uncompressed_bytes
        return Plan(float(sum(split)), stored, stored, ranks, ranks, channels)
