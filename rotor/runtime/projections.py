"""The projections of an attention layer as a checkpoint has them, whatever the family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import UnsupportedModelError
from ..format.layout import AttentionShape
from .families import Family

GetTensor = Callable[[str], Tensor]
"""Reads a tensor by its name."""


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

    @property
    def bias_names(self) -> frozenset[str]:
        """Names of those of q, k, v, o that have a bias."""
        return frozenset(p for p in "qkvo" if getattr(self, f"{p}_bias") is not None)


def read_attention(
    family: Family, layer: int, names: frozenset[str], get: GetTensor, shape: AttentionShape
) -> AttentionWeights:
    """Read the projections of one layer, checking that they have the shapes that the config promises.

    Args:
        names: all tensor names of the checkpoint.
        get: reads one of them.
    Raises:
        UnsupportedModelError: a projection has another shape than config.json says.
    """
    prefix = family.stored_prefix(layer, names)
    local = frozenset(name[len(prefix) :] for name in names if name.startswith(prefix))
    weights = split_projections(family, lambda name: get(prefix + name), local, shape)
    weights.prefix = prefix
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    expected = {
        "q_weight": (query, shape.hidden_size),
        "k_weight": (kv, shape.hidden_size),
        "v_weight": (kv, shape.hidden_size),
        "o_weight": (shape.hidden_size, query),
    }
    for name, want in expected.items():
        got = tuple(getattr(weights, name).shape)
        weight = getattr(weights, name)
        if not weight.is_floating_point() or weight.element_size() < 2:
            raise UnsupportedModelError(
                f"layer {layer}: {name} is {weight.dtype}, expected float16, bfloat16, float32 or float64.",
                "Give rotor the checkpoint before it was quantised.",
            )
        if got != want:
            raise UnsupportedModelError(f"layer {layer}: {name} is {list(got)}, config.json implies {list(want)}.")
    return weights


def split_projections(family: Family, get: GetTensor, names: frozenset[str], shape: AttentionShape) -> AttentionWeights:
    """The four projections of a layer, whatever the family.

    Args:
        get: reads a tensor by its name under the attention module. names: those that there are.
    """
    parts: dict[str, Any] = {}
    for kind in ("weight", "bias"):
        if family.fused is None:
            found = {p: f"{p}_proj.{kind}" for p in "qkv" if kind == "weight" or f"{p}_proj.{kind}" in names}
            parts.update({f"{p}_{kind}": get(name) for p, name in found.items()})
        elif kind == "weight" or f"{family.fused}.{kind}" in names:
            split = family.split(oriented(family, get(f"{family.fused}.{kind}")), shape)
            parts.update({f"{p}_{kind}": part for p, part in zip("qkv", split, strict=True)})
        if kind == "weight" or f"{family.output}.{kind}" in names:
            parts[f"o_{kind}"] = oriented(family, get(f"{family.output}.{kind}"))
    return AttentionWeights(**parts)


def oriented(family: Family, tensor: Tensor) -> Tensor:
    """A weight as nn.Linear has it, [out_features, in_features]; a bias as it is."""
    return tensor.mT if family.transposed and tensor.dim() == 2 else tensor
