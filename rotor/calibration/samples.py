"""Choose the tokens whose keys and values, with their gradients, are kept for fitting codes.

Few tokens carry most of the loss of a layer's codes: their keys or values are outliers, and the model is sensitive to
errors in them. So half of the samples are the heaviest tokens, by the product of the squared norms of vector and
gradient, each with a weight of one token. The other half is drawn at random and represents all remaining tokens.
Gradients are clipped to the length that one token in a hundred exceeds, so that no single token decides: two draws of
tokens then agree better (artifacts/NOTES.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .information import TokenSamples

SAMPLED_TOKENS = 4096
"""Tokens whose keys and values are kept, enough to fit the code of a channel."""

CLIPPED_SHARE = 0.01
"""Share of the tokens whose gradients are clipped."""


class SampleKeeper:
    """Chooses samples from a stream of batches; the choice does not depend on batch sizes.

    Args:
        tokens: number of tokens that will be added, in sequences of seq_len.
        count: most samples to keep; half are the heaviest, half drawn.
        seed: seed of the draw. Tokens at equal distances would contain too many first tokens of sequences.
    """

    STATE = ("added", "first", "drawn", "drawn_gradients", "scores", "indices", "vectors", "gradients")
    """Names of the tensors of `state`."""

    def __init__(self, tokens: int, seq_len: int, count: int, seed: int) -> None:
        self._tokens, self._seq_len = tokens, seq_len
        self._first: list[Tensor] = []
        self._heaviest, self._drawn_count = (count + 1) // 2, count // 2
        drawn = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))[: self._drawn_count]
        self._drawn_indices = drawn.sort().values
        self._added = 0
        self._drawn: list[tuple[Tensor, Tensor]] = []
        self._top: tuple[Tensor, Tensor, Tensor, Tensor] | None = None  # scores, indices, vectors, gradients

    def add(self, vectors: Tensor, gradients: Tensor) -> None:
        """Add the next tokens, each [tokens, num_kv_heads, head_dim]."""
        first, count = self._added, len(vectors)
        self._added += count
        here = self._drawn_indices[(self._drawn_indices >= first) & (self._drawn_indices < first + count)] - first
        here = here.to(vectors.device)
        self._drawn.append((vectors[here].float().cpu(), gradients[here].float().cpu()))
        self._first.append(vectors[:: self._seq_len].float().cpu())
        norms = (tensor.flatten(1).double().square().sum(1) for tensor in (vectors, gradients))
        scores, index = torch.topk(next(norms) * next(norms), min(count, self._heaviest))
        new = scores.cpu(), index.cpu() + first, vectors[index].float().cpu(), gradients[index].float().cpu()
        both = new if self._top is None else tuple(torch.cat(pair) for pair in zip(self._top, new, strict=True))
        kept = torch.topk(both[0], min(len(both[0]), self._heaviest)).indices
        scores, indices, top_vectors, top_gradients = (part[kept] for part in both)
        self._top = scores, indices, top_vectors, top_gradients

    def state(self) -> dict[str, Tensor]:
        """Tensors from which `load` goes on, once tokens were added."""
        assert self._top is not None
        drawn = (torch.cat(parts) for parts in zip(*self._drawn, strict=True))
        parts = torch.tensor(self._added), torch.cat(self._first), *drawn, *self._top
        return dict(zip(self.STATE, parts, strict=True))

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from the tensors of `state`, of a keeper of the same arguments."""
        added, first, drawn, drawn_gradients, scores, indices, vectors, gradients = (state[key] for key in self.STATE)
        self._added, self._first, self._drawn = int(added), [first], [(drawn, drawn_gradients)]
        self._top = scores, indices, vectors, gradients

    def samples(self) -> TokenSamples:
        """The samples, once all tokens were added."""
        assert self._top is not None
        assert self._added == self._tokens
        _, indices, vectors, gradients = self._top
        others = ~torch.isin(self._drawn_indices, indices)  # a drawn token may be among the heaviest
        drawn, drawn_gradients = (torch.cat(parts)[others] for parts in zip(*self._drawn, strict=True))
        tokens_per_draw = max(self._tokens - len(indices), len(drawn)) / max(1, len(drawn))
        share = torch.cat([torch.ones(len(indices)), torch.full((len(drawn),), tokens_per_draw)]).double()
        first = torch.cat(self._first).mean(0)
        all_gradients = torch.cat([gradients, drawn_gradients])
        return TokenSamples(torch.cat([vectors, drawn]), all_gradients, share / share.sum(), first)


class GradientClip:
    """Finds the longest gradients in a stream of batches; the result does not depend on batch sizes.

    longest: the longest so far, [at most count, num_kv_heads, n].

    Args:
        tokens: number of tokens that will be added. With fewer than 150 nothing is clipped, as only one gradient is
            kept.
    """

    def __init__(self, tokens: int) -> None:
        self._count = max(1, round(CLIPPED_SHARE * tokens))
        self._longest: Tensor | None = None

    @property
    def longest(self) -> Tensor:
        assert self._longest is not None
        return self._longest

    @longest.setter
    def longest(self, gradients: Tensor) -> None:
        self._longest = gradients

    def add(self, gradients: Tensor) -> None:
        """Add the gradients of the next tokens, [tokens, num_kv_heads, n]."""
        both = gradients if self._longest is None else torch.cat([self._longest, gradients])
        self._longest = both[torch.topk(_squares(both), min(self._count, len(both))).indices]

    def excess(self) -> Tensor:
        """Vectors whose second moment is that of all gradients minus that of the clipped ones.

        Returns:
            [at most count, num_kv_heads, n].
        """
        lost = 1 - self._shares(self.longest)
        return self.longest * lost.sqrt().to(self.longest.dtype)[:, None, None]

    def shortened(self, gradients: Tensor) -> Tensor:
        """Clip gradients that were added, [tokens, num_kv_heads, n]."""
        return gradients * self._shares(gradients).sqrt().to(gradients.dtype)[:, None, None]

    def _shares(self, gradients: Tensor) -> Tensor:
        """Share of each gradient's squared length that clipping keeps, [tokens], float64."""
        bound = _squares(self.longest).min().to(gradients.device)
        squares = _squares(gradients)
        return torch.where(squares > bound, bound / squares, 1.0)


def _squares(gradients: Tensor) -> Tensor:
    """Squared lengths, [tokens], float64."""
    return gradients.flatten(1).double().square().sum(1)
