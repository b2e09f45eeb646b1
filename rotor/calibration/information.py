"""Fisher information of a layer's keys and values, which bases and codes are computed from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.layout import AttentionShape
from .moments import LayerStatistics, moment_shape, pack_symmetric, packed_bytes, unpack_symmetric


@dataclass(frozen=True)
class TokenSamples:
    """Keys or values of some tokens, with their gradients.

    vectors: [samples, num_kv_heads, head_dim], float32.
    gradients: gradients of the summed loss by the vectors, same shape.
    share: [samples], float64, share of all tokens that a sample represents; they sum to one.
    first: [num_kv_heads, head_dim], float32, mean over the first tokens of sequences, which are often attention sinks.
    """

    vectors: Tensor
    gradients: Tensor
    share: Tensor
    first: Tensor


def stored_bytes(shape: AttentionShape, group_size: int, name: str, samples: int) -> int:
    """Bytes that `LayerFisher.to_tensors` takes for one name, with `samples` sampled tokens."""
    moment = moment_shape(shape, group_size, name)
    blocks, width, _ = moment
    vectors_and_gradients = 2 * 4 * samples * blocks * width
    return packed_bytes(moment) + vectors_and_gradients


@dataclass(frozen=True)
class LayerFisher:
    """Fisher information of one layer and samples of its gradients, on the CPU.

    information: second moments of the gradients by keys, values or both. The gradient is that of the summed loss, so
        information / tokens is per token. The longest gradients are clipped.
    samples: keys and values of some tokens and the gradients by them, by the same names.
    top_share: share of the squared gradients, before clipping, that belongs to the tokens with the longest ones
        (`calibration.gradient_sums.TOP_TOKEN_SHARE` of all tokens).
    """

    information: LayerStatistics
    samples: dict[str, TokenSamples]
    top_share: float

    def per_token(self, name: str) -> Tensor:
        """The Fisher information of one token's keys or values, [num_groups, n, n], float64."""
        return self.information.moment(name) / self.information.tokens

    def to_tensors(self) -> dict[str, Tensor]:
        """Tensors to store: one triangle of each moment in float32, and the samples."""
        moments = {f"information.{name}": pack_symmetric(total) for name, total in self.information.sums.items()}
        samples = {
            f"{part}.{name}": tensor for name, sampled in self.samples.items() for part, tensor in vars(sampled).items()
        }
        counts = {"tokens": torch.tensor(self.information.tokens), "top_share": torch.tensor(self.top_share)}
        return moments | samples | counts

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], shape: AttentionShape, group_size: int) -> LayerFisher:
        """Rebuild the object from the tensors of `to_tensors`, for groups of `group_size` KV heads."""
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
        """Samples of each group and their gradients, [num_groups, samples, n], and shares [samples]; float64."""
        samples = self.samples[name]
        return self._stacked(samples.vectors), self._stacked(samples.gradients), samples.share

    def first(self, name: str) -> Tensor:
        """Mean over the first tokens of sequences, [num_groups, n], float64."""
        return self._stacked(self.samples[name].first[None])[:, 0]

    def _stacked(self, tensor: Tensor) -> Tensor:
        """Stack the heads of each group: [tokens, num_kv_heads, head_dim] -> [num_groups, tokens, n], float64."""
        wide = tensor.to(torch.float64).flatten(1)
        return wide.unflatten(1, (-1, self.information.group_size * tensor.shape[2])).transpose(0, 1)
