"""The projections of an attention layer, as they are rewritten."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class AttentionWeights:
    """The projections of one attention layer in nn.Linear's orientation, [out_features, in_features]; biases or None.

    q_weight: [num_heads * head_dim, hidden_size]; k_weight, v_weight: [num_kv_heads * head_dim, hidden_size];
    o_weight: [hidden_size, num_heads * head_dim]. prefix: of their names in the checkpoint, for errors.
    """

    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    o_weight: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    prefix: str = ""
