"""Which tokens' keys and values are kept for fitting codes, with the gradients by them.

Few tokens carry what the codes of a layer cost: their keys or values lie far out, and the model minds their error. So
half of the samples are the tokens of the largest product of the squared norms of vector and gradient, each standing for
itself; the others are drawn, and stand for all that are left. Gradients are cut to the length that one token in a
hundred exceeds, so that no token decides alone: two draws of tokens agree better (artifacts/NOTES.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .bases.information import TokenSamples

SHARE = 0.01
"""Of the tokens, whose gradients are shortened."""


class SampleKeeper:
    """Chooses samples while batches pass by; what is chosen depends on no batch's size.

    Args:
        tokens: that will come, in rows of seq_len. count: of samples, at most; half are the heaviest, half drawn.
        seed: of the draw. Not at equal distances: first tokens of rows would be drawn too often.
    """

    def __init__(self, tokens: int, seq_len: int, count: int, seed: int) -> None:
        self._tokens, self._seq_len = tokens, seq_len
        self._first: list[Tensor] = []
        self._heaviest, self._drawn_count = (count + 1) // 2, count // 2
        drawn = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))[: self._drawn_count]
        self._drawn_places = drawn.sort().values
        self._added = 0
        self._drawn: list[tuple[Tensor, Tensor]] = []
        self._top: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # scores, places, vectors, gradients

    def add(self, vectors: Tensor, gradients: Tensor) -> None:
        """Add the next tokens, each [tokens, num_kv_heads, head_dim]."""
        first, count = self._added, len(vectors)
        self._added += count
        here = self._drawn_places[(self._drawn_places >= first) & (self._drawn_places < first + count)] - first
        here = here.to(vectors.device)
        self._drawn.append((vectors[here].float().cpu(), gradients[here].float().cpu()))
        self._first.append(vectors[:: self._seq_len].float().cpu())
        norms = (tensor.flatten(1).double().square().sum(1) for tensor in (vectors, gradients))
        scores, index = torch.topk(next(norms) * next(norms), min(count, self._heaviest))
        new = scores.cpu(), index.cpu() + first, vectors[index].float().cpu(), gradients[index].float().cpu()
        both = new if self._top is None else tuple(torch.cat(pair) for pair in zip(self._top, new, strict=True))
        kept = torch.topk(both[0], min(len(both[0]), self._heaviest)).indices
        scores, places, own, by_own = (part[kept] for part in both)
        self._top = scores, places, own, by_own

    def samples(self) -> TokenSamples:
        """Of the tokens that were added, all of which must have been."""
        assert self._top is not None
        assert self._added == self._tokens
        _, places, vectors, gradients = self._top
        others = ~torch.isin(self._drawn_places, places)
        drawn, by_drawn = (torch.cat(parts)[others] for parts in zip(*self._drawn, strict=True))
        left = max(self._tokens - len(places), len(drawn)) / max(1, len(drawn))  # tokens that each drawn one stands for
        share = torch.cat([torch.ones(len(places)), torch.full((len(drawn),), left)]).double()
        first = torch.cat(self._first).mean(0)
        return TokenSamples(torch.cat([vectors, drawn]), torch.cat([gradients, by_drawn]), share / share.sum(), first)


class GradientClip:
    """Finds the longest gradients while batches pass by; no batch's size matters.

    Args:
        tokens: that will come. Of fewer than 150 nothing is shortened: one gradient is the longest.
    """

    def __init__(self, tokens: int) -> None:
        self._count = max(1, round(SHARE * tokens))
        self._longest: Tensor | None = None  # [at most count, num_kv_heads, n]

    def add(self, gradients: Tensor) -> None:
        """Add those of the next tokens, [tokens, num_kv_heads, n]."""
        both = gradients if self._longest is None else torch.cat([self._longest, gradients])
        self._longest = both[torch.topk(_squares(both), min(self._count, len(both))).indices]

    def excess(self) -> Tensor:
        """Vectors whose second moment is what the shortened gradients' lacks, [at most count, num_kv_heads, n]."""
        assert self._longest is not None
        lost = 1 - self._shares(self._longest)
        return self._longest * lost.sqrt().to(self._longest.dtype)[:, None, None]

    def shortened(self, gradients: Tensor) -> Tensor:
        """Some of the gradients that were added, [tokens, num_kv_heads, n], of the clip's length at most."""
        return gradients * self._shares(gradients).sqrt().to(gradients.dtype)[:, None, None]

    def _shares(self, gradients: Tensor) -> Tensor:
        """What is kept of each one's square, [tokens], float64."""
        assert self._longest is not None
        bound = _squares(self._longest).min().to(gradients.device)
        squares = _squares(gradients)
        return torch.where(squares > bound, bound / squares, 1.0)


def _squares(gradients: Tensor) -> Tensor:
    """Squared lengths, [tokens], float64."""
    return gradients.flatten(1).double().square().sum(1)
