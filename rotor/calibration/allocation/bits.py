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
from .plan import SLACK, RankPath, RankPlan

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


class BitsPath(RankPath):
    """Path of the plans of least predicted loss for each number of bytes.

    The predicted loss of a plan is the sum over all channels of Fisher information times squared error of the code, so
    that no probe is needed, and layers and sides compare.

    Args:
        codes: of each layer.
        widths: bits that a channel may have, 0 among them.
        element_bytes: of one number of the model's dtype: what is compressed.
    Source: docs/design.md, Mathematics, Codes; reverse water-filling (Cover and Thomas, section 10.3.3).
    """

    step = f"at least {UNIT_BYTES} bytes a latent", "calibrate with larger groups.size"

    def __init__(
        self, codes: Sequence[LayerCodes], shape: AttentionShape, widths: tuple[int, ...], element_bytes: int
    ) -> None:
        self._uncompressed_bytes = uncompressed_kv_bytes_per_token(shape, element_bytes)
        self._layers = []
        for layer in codes:
            groups = range(len(layer.qk.weight))
            curves = [bit_curve(side.losses(group, widths), widths) for group in groups for side in layer.sides]
            self._layers.append(_LayerBits(tuple(curves), len(layer.sides)))
        self._path = bit_path([layer.path.loss for layer in self._layers])
        self._least_units = int(np.isfinite(self._path.loss).argmax())

    def at_compression(self, target: float) -> RankPlan | None:
        """The plan of the most bytes that removes at least `target` of them, or None if there is none."""
        units = int((1 - target + SLACK) * self._uncompressed_bytes / UNIT_BYTES)
        return None if units < self._least_units else self._plan(min(units, len(self._path.loss) - 1))

    def _plans(self) -> list[RankPlan]:
        step = max(1, self._uncompressed_bytes // (UNIT_BYTES * STEPS))
        return [self._plan(units) for units in range(len(self._path.loss) - 1, self._least_units - 1, -step)]

    def lighter(self, plan: RankPlan) -> list[RankPlan]:
        """Plans with a plane less in one layer, by the loss that is predicted."""
        split = [channels_bytes([layer]) // UNIT_BYTES for layer in plan.channels or []]
        losses = [layer.path.loss for layer in self._layers]
        lost = [float(loss[own - 1] - loss[own]) for loss, own in zip(losses, split, strict=True)]
        order = [index for index in np.argsort(lost) if np.isfinite(lost[index])]
        return [self._of([own - (place == index) for place, own in enumerate(split)]) for index in order]

    def _plan(self, units: int) -> RankPlan:
        return self._of(self._path.split(units))

    def _of(self, split: Sequence[int]) -> RankPlan:
        """The plan of so many units of bytes in each layer."""
        channels = [layer.channels(own) for layer, own in zip(self._layers, split, strict=True)]
        ranks = [[(qk.rank, (v or qk).rank) for qk, v in layer] for layer in channels]
        stored = 1.0 - channels_bytes(channels) / self._uncompressed_bytes
        return RankPlan(float(sum(split)), ranks, ranks, stored, stored, channels)
