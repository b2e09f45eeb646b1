"""Second moments of queries, keys and values: streamed sums, per layer and group of KV heads.

Everything that rotor computes from data needs only these sums, so no activation is kept. Sums are float64, can be
merged over batches and processes, and are stored as one safetensors file a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import NumericsError
from .layout import AttentionShape

MOMENTS = ("query", "key_post", "key_pre", "value")
"""query: after RoPE, per KV head, summed over its query heads. key_post, key_pre: after and before RoPE, stacked over
the heads of a group. value: stacked likewise."""


@dataclass
class LayerStatistics:
    """Second moments of one layer, float64.

    sums: `query` is [num_kv_heads, head_dim, head_dim]; the others are [num_groups, g * head_dim, g * head_dim] for
        groups of g KV heads.
    tokens: tokens that went into each sum.
    """

    shape: AttentionShape
    group_size: int
    sums: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0

    def add(self, activations: dict[str, Tensor]) -> None:
        """Add one batch.

        Args:
            activations: `query` [tokens, num_heads, head_dim]; the others [tokens, num_kv_heads, head_dim], any dtype.
        """
        counts = {name: tensor.shape[0] for name, tensor in activations.items()}
        for name, tensor in activations.items():
            self._accumulate(name, self._blocks(name, tensor))
        self.tokens += next(iter(counts.values()))

    def _blocks(self, name: str, tensor: Tensor) -> Tensor:
        """Rows to multiply, [blocks, rows, width]: a KV head's query rows together, a group's KV heads side by side."""
        tokens, _, dim = tensor.shape
        if name == "query":
            heads = self.shape.num_kv_heads
            rows = tensor.reshape(tokens, heads, -1, dim).transpose(0, 1)
            return rows.reshape(heads, -1, dim).to(torch.float64)
        width = self.group_size * dim
        return tensor.reshape(tokens, -1, width).transpose(0, 1).to(torch.float64)

    def _accumulate(self, name: str, blocks: Tensor) -> None:
        if name in self.sums:
            self.sums[name].baddbmm_(blocks.mT, blocks)
        else:
            self.sums[name] = blocks.mT @ blocks

    def moment(self, name: str) -> Tensor:
        """A sum, symmetrised; float64."""
        total = self.sums[name]
        return (total + total.mT) / 2

    def merge(self, other: LayerStatistics) -> LayerStatistics:
        """The statistics of both inputs together."""
        sums = {name: total + other.sums[name] for name, total in self.sums.items()}
        return LayerStatistics(self.shape, self.group_size, sums, self.tokens + other.tokens)

    def check_finite(self, layer: int) -> None:
        """Raises NumericsError that names the layer and the first moment with a NaN or Inf."""
        for name, total in self.sums.items():
            if not torch.isfinite(total).all():
                raise NumericsError(
                    f"layer {layer}: the second moment of {name} is not finite after {self.tokens} tokens.",
                    "The model overflows on the calibration tokens; calibrate with --dtype float32.",
                )
