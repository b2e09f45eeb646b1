"""The Fisher information of a layer's keys and values, as calibration finds it and bases and codes read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...checkpoint.layout import AttentionShape
from .moments import LayerStatistics, pack_symmetric, unpack_symmetric


@dataclass(frozen=True)
class TokenSamples:
    """Keys or values of some tokens.

    vectors, gradients: [samples, num_kv_heads, head_dim], float32; of the summed loss by the vector.
    share: [samples], float64, of all tokens, that a sample stands for; they sum to one.
    first: [num_kv_heads, head_dim], float32, mean of the first tokens of rows, often attention sinks.
    """

    vectors: Tensor
    gradients: Tensor
    share: Tensor
    first: Tensor


@dataclass(frozen=True)
class LayerFisher:
    """Fisher information of one layer and samples of its gradients, on the CPU.

    information: second moments of the gradients by what was wanted of keys, values and both; the gradient of the summed
        loss, so that information / tokens is per token. Those of few tokens are shortened.
    samples: keys and values themselves, and the gradients by them, of some tokens, by the same names.
    top_share: of the squared gradients by keys and values, before any is shortened, what the tokens have whose
        gradients are longest, `calibration.gradients.TOP` of all.
    """

    information: LayerStatistics
    samples: dict[str, TokenSamples]
    top_share: float

    def per_token(self, name: str) -> Tensor:
        """The Fisher information of one token's keys or values, [num_groups, n, n], float64."""
        return self.information.moment(name) / self.information.tokens

    def to_tensors(self) -> dict[str, Tensor]:
        """What `from_tensors` reads: one triangle of each moment in float32, and the samples."""
        moments = {f"information.{name}": pack_symmetric(total) for name, total in self.information.sums.items()}
        samples = {
            f"{part}.{name}": tensor for name, found in self.samples.items() for part, tensor in vars(found).items()
        }
        counts = {"tokens": torch.tensor(self.information.tokens), "top_share": torch.tensor(self.top_share)}
        return moments | samples | counts

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], shape: AttentionShape, group_size: int) -> LayerFisher:
        """Read what `to_tensors` gave, for groups of `group_size` KV heads."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, _, of = name.partition(".")
            if of:
                parts.setdefault(kind, {})[of] = unpack_symmetric(tensor) if kind == "information" else tensor
        statistics = LayerStatistics(shape, group_size, parts.pop("information"), int(tensors["tokens"]))
        names = next(iter(parts.values()))
        samples = {name: TokenSamples(**{kind: parts[kind][name] for kind in parts}) for name in names}
        return cls(statistics, samples, float(tensors["top_share"]))

    def sampled(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Each group's samples and the gradients by them, [num_groups, samples, n], and shares [samples]; float64."""
        found = self.samples[name]
        return self._stacked(found.vectors), self._stacked(found.gradients), found.share

    def first(self, name: str) -> Tensor:
        """The mean of the first tokens of rows, of each group, [num_groups, n], float64."""
        return self._stacked(self.samples[name].first[None])[:, 0]

    def _stacked(self, tensor: Tensor) -> Tensor:
        """[tokens, num_kv_heads, head_dim] -> [num_groups, tokens, n], float64."""
        wide = tensor.to(torch.float64).flatten(1)
        return wide.unflatten(1, (-1, self.information.group_size * tensor.shape[2])).transpose(0, 1)
