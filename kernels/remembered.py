"""Results computed from a tensor, kept here for as long as the tensor lives and is not written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Made = TypeVar("Made")


class Remembered(Generic[Made]):
    """Results by the tensor that they were made of. They must not hold that tensor itself, or it lives for ever.

    most: results that are kept of a tensor; the oldest goes.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def get(self, tensor: Tensor, key: tuple[object, ...], make: Callable[[], Made], keep: bool = True) -> Made:
        """The result for a tensor and a key; made if it is not known.

        Args:
            keep: remember what is made.
        """
        version = version_of(tensor)
        of_version, results = self._made.get(tensor, (version, {}))
        if of_version == version and key in results:
            known: Made = results[key]
            return known
        made = make()
        if keep:
            kept = results if of_version == version else {}
            while len(kept) >= self.most:
                del kept[next(iter(kept))]
            kept[key] = made
            self._made[tensor] = version, kept
        return made


def version_of(tensor: Tensor) -> int | None:
    """Number of times that a tensor was written to; an inference tensor does not count that."""
    return None if tensor.is_inference() else tensor._version
