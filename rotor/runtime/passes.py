"""Results of a layer in a pass, for the later layers that are alike."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from ..kernels.remembered import version_of

Made = TypeVar("Made")

KEPT = 4
"""Results that are kept: layers of a pass are of one kind or two, which differ by their window."""


@dataclass
class _Known(Generic[Made]):
    mask: weakref.ref[Tensor] | None
    key: tuple[object, ...]
    layer: int
    made: Made


class OfPass(threading.local, Generic[Made]):
    """The latest results of a thread. The layers go through a pass in their order, and share its mask.

    A result serves a layer if the mask is the same object and was not written to since, the key is the same, and the
    layer lies behind the last one that it served. The last condition tells passes apart whose mask was made in
    inference mode, which does not count what is written to it.
    """

    def __init__(self) -> None:
        self._known: list[_Known[Made]] = []

    def __call__(self, mask: Tensor | None, key: tuple[object, ...], layer: int, make: Callable[[], Made]) -> Made:
        """The result for a layer, made if it is not known; the newest of several that fit.

        Args:
            key: all that the result depends on beside the mask, compared by ==.
        """
        key = *key, None if mask is None else version_of(mask)
        for known in reversed(self._known):
            same = known.mask is None if mask is None else known.mask is not None and known.mask() is mask
            if same and known.key == key and known.layer < layer:
                known.layer = layer
                return known.made
        made = make()
        of_mask = None if mask is None else weakref.ref(mask)
        self._known = [*self._known[1 - KEPT :], _Known(of_mask, key, layer, made)]
        return made
