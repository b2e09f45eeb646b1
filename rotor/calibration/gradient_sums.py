"""Sums over the gradients of one layer, added batch by batch, from which its Fisher information is made.

They can be stored between two batches: a resumed run that loads them ends with the same numbers, bit by bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoint.layout import AttentionShape
from .information import LayerFisher
from .moments import LayerStatistics
from .samples import GradientClip, SampleKeeper

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
