"""Bytes of caches, and the share of them that is removed: what every command says of them is computed here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from .layout import AttentionShape, ExactTokens, LayerLayout, LayerRanks
from .schemas import SequenceInfo, SizeInfo


def share_removed(before: float, after: float) -> float:
    """Share of a cache's bytes that is removed (the papers' p)."""
    return 1.0 - after / before


@dataclass(frozen=True)
class CacheSize:
    """Bytes of a token in each layer, before and after compression.

    shape: of the model. element_bytes: of a number in the uncompressed cache. before, after: bytes of a token's rows in
    each layer. exact: tokens that each layer keeps exactly beside its rows; empty: none.
    """

    shape: AttentionShape
    element_bytes: int
    before: tuple[int, ...]
    after: tuple[float, ...]
    exact: tuple[ExactTokens | None, ...] = ()

    @classmethod
    def of_rows(
        cls,
        row_bytes: Sequence[float],
        shape: AttentionShape,
        element_bytes: int,
        exact: Sequence[ExactTokens | None] = (),
    ) -> CacheSize:
        """The size of rows of so many bytes in each layer, beside what each layer keeps exactly.

        Args:
            element_bytes: of a number in the uncompressed cache.
        """
        before = tuple(uncompressed_row_bytes(shape, element_bytes))
        return cls(shape, element_bytes, before, tuple(row_bytes), tuple(exact))

    @classmethod
    def of_layouts(cls, layouts: Sequence[LayerLayout], shape: AttentionShape, element_bytes: int) -> CacheSize:
        """The size of the cache that layouts describe."""
        rows = [sum(layout.row_bytes(element_bytes)) for layout in layouts]
        return cls.of_rows(rows, shape, element_bytes, [layout.exact for layout in layouts])

    @property
    def info(self) -> SizeInfo:
        """Bytes of a token in all layers."""
        return {"before": sum(self.before), "after": int(sum(self.after)), "element_bytes": self.element_bytes}

    def removed(self, context_tokens: int | None = None) -> float:
        """Share of the rows' bytes that is removed.

        Args:
            context_tokens: of the sequence whose rows they are, of which a layer with a window holds no more than that;
                None counts all layers alike.
        """
        return share_removed(*self._rows(context_tokens))

    def of_sequence(self, tokens: int) -> SequenceInfo:
        """Bytes of the cache of a sequence of so many tokens, with those that are kept exactly."""
        before, after = self._rows(tokens)
        return {
            "tokens": tokens,
            "before": int(before),
            "after": int(after) + self.exact_bytes(tokens),
            "smaller_from": self.smaller_from(tokens),
        }

    def smaller_from(self, most: int) -> int | None:
        """Tokens of a sequence from which on its cache is smaller than the uncompressed one: short ones take more, as
        exact tokens lie beside the rows of all. None where that is not so up to `most` tokens."""

        def smaller(tokens: int) -> bool:
            before, after = self._rows(tokens)
            return after + self.exact_bytes(tokens) < before

        least = bisect_left(range(1, most + 1), True, key=smaller) + 1
        return least if least <= most else None

    def exact_bytes(self, tokens: int) -> int:
        """Bytes of what a sequence of so many tokens keeps exactly."""
        return exact_bytes_of_sequence(self.exact, self.shape, self.element_bytes, tokens) if self.exact else 0

    def _rows(self, tokens: int | None) -> tuple[float, float]:
        held = self.shape.held_tokens(tokens) if tokens else (1,) * self.shape.num_layers
        before, after = (sum(a * b for a, b in zip(rows, held, strict=True)) for rows in (self.before, self.after))
        return before, after


def compression(ranks: Sequence[LayerRanks], shape: AttentionShape, context_tokens: int | None = None) -> float:
    """Share of the KV cache removed by (key rank, value rank) of every group of every layer.

    Args:
        context_tokens: of the sequence whose cache it is; None counts all layers alike.
    Source: FDC section 5.2; 1 - sum of ranks / sum over KV heads of 2 head_dim, weighed by the tokens that each holds.
    """
    kept = [sum(key_rank + value_rank for key_rank, value_rank in layer) for layer in ranks]
    return CacheSize.of_rows(kept, shape, element_bytes=1).removed(context_tokens)


def kv_bytes_per_token(layouts: Sequence[LayerLayout], element_bytes: int) -> int:
    """Bytes of cache that one more token takes over all layers: its rows, as there is no other metadata."""
    return sum(sum(layout.row_bytes(element_bytes)) for layout in layouts)


def uncompressed_row_bytes(shape: AttentionShape, element_bytes: int) -> list[int]:
    """Bytes of a token's uncompressed keys and values in each layer."""
    return [element_bytes * 2 * layer_shape.kv_width for layer_shape in shape.layers]


def uncompressed_kv_bytes_per_token(shape: AttentionShape, element_bytes: int) -> int:
    """Bytes of a token's uncompressed keys and values in all layers."""
    return sum(uncompressed_row_bytes(shape, element_bytes))


def kv_bytes_of_sequence(row_bytes: Sequence[int], shape: AttentionShape, tokens: int) -> int:
    """Bytes of the cache of a sequence of so many tokens: of a layer with a window no more than that holds.

    Args:
        row_bytes: of a token in each layer.
    """
    return sum(size * held for size, held in zip(row_bytes, shape.held_tokens(tokens), strict=True))


def exact_bytes_of_sequence(
    exact: Sequence[ExactTokens | None], shape: AttentionShape, element_bytes: int, tokens: int
) -> int:
    """Bytes of the slots of exact keys and values that a sequence of so many tokens takes, in a cache that grows.

    Args:
        exact: of each layer.
    """
    windows = shape.windows or [None] * shape.num_layers
    layers = zip(exact, windows, uncompressed_row_bytes(shape, element_bytes), strict=True)
    return sum(kept.within(window).slots_of(tokens) * row for kept, window, row in layers if kept is not None)


def uncompressed_kv_bytes_of_sequence(shape: AttentionShape, element_bytes: int, tokens: int) -> int:
    """Bytes of the uncompressed cache of a sequence of so many tokens."""
    return kv_bytes_of_sequence(uncompressed_row_bytes(shape, element_bytes), shape, tokens)
