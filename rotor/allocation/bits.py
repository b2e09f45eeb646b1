"""Bits of every column, domain and group size of every layer, for any number of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..codes.allocation import BitCurve, BitPath, bit_curve, bit_path, equal_path
from ..codes.layer import GroupColumns, LayerCodes, as_pair, columns_bytes
from ..errors import RecipeError
from ..format.columns import WIDTHS, WORD_BYTES, Columns
from ..format.layout import AttentionShape, uncompressed_kv_bytes_per_token
from .plan import SLACK, RankPath, RankPlan

STEPS = 1024
"""Plans of a path lie at least one part in so many of the uncompressed bytes apart; others are made on demand."""

GRAIN = f"at least one word of {WORD_BYTES} bytes a latent", "calibrate with larger groups.size"
"""What plans of codes are made of, and what makes that finer."""


@dataclass(frozen=True)
class _Candidate:
    """The curves of one candidate of a layer, the latents of each group in turn, and their best split.

    latents: of a group: that of keys and that of values, or one of both. exact: of words that are all filled.
    """

    curves: tuple[BitCurve, ...]
    latents: int
    exact: bool

    @cached_property
    def path(self) -> BitPath:
        return bit_path([curve.exact_loss if self.exact else curve.loss for curve in self.curves])

    def columns(self, words: int) -> GroupColumns:
        """The columns of each group when there are so many words for all of them."""
        split = self.path.split(min(words, len(self.path.loss) - 1))
        sides = [_columns(curve, own) for curve, own in zip(self.curves, split, strict=True)]
        return [as_pair(sides[i : i + self.latents]) for i in range(0, len(sides), self.latents)]


class BitsPath(RankPath):
    """Path of the plans of least predicted loss for each number of bytes.

    The predicted loss of a plan is the sum over all columns of Fisher information times squared error of the code, so
    that neither a price nor a probe is needed, and layers, sides, domains and group sizes compare.

    Args:
        codes: per layer, by candidate.
        widths: bits that a column may have, 0 among them.
        element_bytes: of one number of the model's dtype: what is compressed, and columns of 16 bits.
        uniform_rows: all layers store rows of as many bytes.
    Raises:
        RecipeError: groups have too few columns for a word of the narrowest width.
    Source: docs/design.md, Mathematics, Codes; reverse water-filling (Cover and Thomas, section 10.3.3).
    """

    def __init__(
        self,
        codes: Sequence[dict[str, LayerCodes]],
        shape: AttentionShape,
        widths: tuple[int, ...],
        element_bytes: int,
        uniform_rows: bool = False,
    ) -> None:
        super().__init__((), shape, 1)
        self.element_bytes = element_bytes
        element_words = max(1, element_bytes // 2)
        self._layers = [
            {
                key: _Candidate(
                    tuple(
                        bit_curve(side.losses(group, widths), widths, element_words=element_words)
                        for group in range(len(found.qk.weight))
                        for side in found.sides
                    ),
                    latents=len(found.sides),
                    exact=uniform_rows,
                )
                for key, found in layer.items()
            }
            for layer in codes
        ]
        self._best = [
            least_loss([candidate.path.loss for candidate in layer.values()], exact=uniform_rows)
            for layer in self._layers
        ]
        self._path = (equal_path if uniform_rows else bit_path)([loss for loss, _ in self._best])
        self._least_words = int(np.isfinite(self._path.loss).argmax())
        if not np.isfinite(self._path.loss[self._least_words]):
            raise no_word(widths, shape)

    @property
    def grain(self) -> tuple[str, str]:
        return GRAIN

    def full(self) -> RankPlan:
        """The plan of most bytes."""
        return self._plan(len(self._path.loss) - 1)

    def at_compression(self, target: float) -> RankPlan | None:
        """The plan of the most bytes that removes at least `target` of them, or None if there is none."""
        words = int((1 - target + SLACK) * self._uncompressed_bytes / WORD_BYTES)
        return None if words < self._least_words else self._plan(min(words, len(self._path.loss) - 1))

    @property
    def _uncompressed_bytes(self) -> int:
        return uncompressed_kv_bytes_per_token(self.shape, self.element_bytes)

    def _plans(self) -> list[RankPlan]:
        step = max(1, self._uncompressed_bytes // (WORD_BYTES * STEPS))
        return [self._plan(words) for words in range(len(self._path.loss) - 1, self._least_words - 1, -step)]

    def _plan(self, words: int) -> RankPlan:
        choice, columns = [], []
        for layer, (_, best), own in zip(self._layers, self._best, self._path.split(words), strict=True):
            choice.append(list(layer)[int(best[own])])
            columns.append(layer[choice[-1]].columns(own))
        return coded_plan(float(words), tuple(choice), columns, self.shape, self.element_bytes)


def coded_plan(
    parameter: float,
    choice: tuple[str, ...],
    columns: list[GroupColumns],
    shape: AttentionShape,
    element_bytes: int,
    saving: float | None = None,
) -> RankPlan:
    """The plan of these columns of every layer's groups; `saving` is None where what is saved are bytes."""
    ranks = [[(qk.rank, (v or qk).rank) for qk, v in layer] for layer in columns]
    stored_bytes = columns_bytes(columns, element_bytes)
    stored = 1.0 - stored_bytes / uncompressed_kv_bytes_per_token(shape, element_bytes)
    return RankPlan(parameter, choice, ranks, ranks, stored, stored, stored if saving is None else saving, columns)


def no_word(widths: tuple[int, ...], shape: AttentionShape) -> RecipeError:
    """That the groups of no candidate fill a word of the narrowest width."""
    return RecipeError(
        f"codes.bits {list(widths)}: a group of {shape.head_dim} columns a head fills no whole word.",
        "Give wider ones too, or larger groups.",
    )


def least_loss(losses: list[np.ndarray], exact: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The least loss of several candidates for each number of words, and which of them gives it.

    Args:
        exact: of words that are all filled; else more words than a candidate can fill are as good as its most.
    """
    size = max(map(len, losses))
    beyond = [np.full(size - len(loss), np.inf if exact else loss[-1]) for loss in losses]
    padded = np.stack([np.concatenate(parts) for parts in zip(losses, beyond, strict=True)])
    best = padded.argmin(0)
    return padded[best, np.arange(size)], best


def _columns(curve: BitCurve, words: int) -> Columns:
    counts = dict(zip(curve.widths, curve.counts[words].tolist(), strict=True))
    return Columns(*(counts.get(bits, 0) for bits in WIDTHS))
