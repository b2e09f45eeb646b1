"""Sums over the gradients of one layer, added batch by batch, from which its Fisher information is made.

They can be stored between two batches: a resumed run that loads them ends with the same numbers, bit by bit.

Some tokens are kept with their gradients, for fitting codes. Few tokens carry most of the loss of a layer's codes:
their keys or values are outliers, and the model is sensitive to errors in them. So half of the samples are the heaviest
tokens, by the product of the squared norms of vector and gradient, each with a weight of one token. The other half is
drawn at random and represents all remaining tokens. Gradients are clipped to the length that one token in a hundred
exceeds, so that no single token decides: two draws of tokens then agree better (artifacts/NOTES.md).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoint.layout import AttentionShape
from .information import LayerFisher, TokenSamples
from .moments import LayerStatistics

SAMPLED_TOKENS = 4096
"""Tokens whose keys and values are kept, enough to fit the code of a channel."""

CLIPPED_SHARE = 0.01
"""Share of the tokens whose gradients are clipped."""

TOP_TOKEN_SHARE = 0.001
"""Share of the tokens, those with the longest gradients, whose part of the information is reported."""


class GradientSums:
    """Second moments, samples and longest gradients of a layer's keys and values.

    batches: batches that were added.
    whole: whether every sum has all of them; False while a batch is added.

    Args:
        names: stored keys and values (`value`, or from `stored_name`).
        tokens: number of tokens that will be added, in sequences of seq_len.
        samples: most tokens whose keys and values are kept. seed: see SampleKeeper.
    """

    def __init__(
        self,
        shape: AttentionShape,
        group_size: int,
        names: frozenset[str],
        tokens: int,
        seq_len: int,
        samples: int,
        seed: int,
    ) -> None:
        self.shape, self.group_size, self.tokens = shape, group_size, tokens
        self.batches, self.whole = 0, True
        self.keepers = {name: SampleKeeper(tokens, seq_len, samples, seed) for name in sorted(names)}
        self._clips = {name: GradientClip(tokens) for name in self.keepers}
        self._information = LayerStatistics(shape, group_size)
        self._squares: list[Tensor] = []

    def add(self, vectors: dict[str, Tensor], gradients: dict[str, Tensor], squares: Tensor) -> None:
        """Add one batch.

        Args:
            vectors, gradients: by name, each [tokens, num_kv_heads, head_dim].
            squares: [tokens], float64, squared length of each token's gradient by all its keys and values.
        """
        self.whole = False
        self._squares.append(squares)
        self._information.add(gradients)
        for name, by_them in gradients.items():
            self.keepers[name].add(vectors[name], by_them)
            self._clips[name].add(by_them)
        self.batches += 1
        self.whole = True

    def result(self) -> LayerFisher:
        """The layer's information, once all tokens were added; on the CPU."""
        excess = LayerStatistics(self.shape, self.group_size)
        excess.add({name: clip.excess() for name, clip in self._clips.items()})
        total = self._information
        total.sums = {name: (total.sums[name] - excess.sums[name]).cpu() for name in self.keepers}
        samples = {}
        for name, keeper in self.keepers.items():
            kept = keeper.samples()
            samples[name] = replace(kept, gradients=self._clips[name].shortened(kept.gradients))
        by_token = torch.cat(self._squares)
        longest = by_token.topk(max(1, round(TOP_TOKEN_SHARE * self.tokens))).values
        everything = float(by_token.sum())  # 0 where the layer reaches nothing: o_proj is zero
        return LayerFisher(total, samples, float(longest.sum()) / everything if everything else 0.0)

    def to_tensors(self) -> dict[str, Tensor]:
        """Tensors to store, from which `load` goes on."""
        sums = {f"sums.{name}": total for name, total in self._information.sums.items()}
        samples = {f"{name}.{key}": part for name, kept in self.keepers.items() for key, part in kept.state().items()}
        longest = {f"{name}.longest": clip.longest for name, clip in self._clips.items()}
        counts = torch.tensor([self.batches, self._information.tokens])
        return {**sums, **samples, **longest, "squares": torch.cat(self._squares), "counts": counts}

    def load(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Go on from the tensors of `to_tensors`; `device`: where batches are computed."""
        self.batches, self._information.tokens = map(int, tensors["counts"])
        self._squares = [tensors["squares"].to(device)]
        prefix = "sums."
        self._information.sums = {
            name.removeprefix(prefix): total.to(device) for name, total in tensors.items() if name.startswith(prefix)
        }
        for name, keeper in self.keepers.items():
            keeper.load({key: tensors[f"{name}.{key}"] for key in keeper.STATE})
            self._clips[name].longest = tensors[f"{name}.longest"].to(device)


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
