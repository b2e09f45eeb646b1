"""Reading a layer's projections from a checkpoint, and its activations, whatever the family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..bases.weights import AttentionWeights
from ..errors import UnsupportedModelError
from ..format.layout import AttentionShape
from ..runtime.families import Family, attention_shape

GetTensor = Callable[[str], Tensor]
"""Reads a tensor by its name."""


def keys_before_rope(family: Family, output: Tensor, shape: AttentionShape) -> Tensor:
    """The output of `family.key_source` as keys before RoPE, [batch_size * seq_len, num_kv_heads * head_dim]."""
    if family.has_key_norm:
        output = output.transpose(1, 2) if family.norms_heads_first else output
    elif family.fused is not None:
        output = split_activations(family, output, shape)[1]
    return output.reshape(-1, shape.num_kv_heads * shape.head_dim)


def split_activations(family: Family, output: Tensor, shape: AttentionShape) -> tuple[Tensor, ...]:
    """Queries, keys and values, [..., heads * head_dim] each, from the output [..., features] of a fused projection."""
    return tuple(part.movedim(0, -1) for part in family.split(output.movedim(-1, 0), shape))


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
            split = family.split(_oriented(family, get(f"{family.fused}.{kind}")), shape)
            parts.update({f"{p}_{kind}": part for p, part in zip("qkv", split, strict=True)})
        if kind == "weight" or f"{family.output}.{kind}" in names:
            parts[f"o_{kind}"] = _oriented(family, get(f"{family.output}.{kind}"))
    return AttentionWeights(**parts)


def kv_parameters(family: Family, model: nn.Module, layer: int) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """The parameters of the key and of the value projection, and for each how to get [num_kv_heads * d, hidden]."""
    module = family.attention_module(model, layer)
    if family.fused is None:
        return [(module.get_parameter(f"{p}_proj.weight"), lambda g: g) for p in "kv"]
    weight, shape = module.get_parameter(f"{family.fused}.weight"), attention_shape(model.config)
    return [
        (weight, lambda g: family.split(_oriented(family, g), shape)[1]),
        (weight, lambda g: family.split(_oriented(family, g), shape)[2]),
    ]


def _oriented(family: Family, tensor: Tensor) -> Tensor:
    """A weight as nn.Linear has it, [out_features, in_features]; a bias as it is."""
    return tensor.mT if family.transposed and tensor.dim() == 2 else tensor


def longest_row(seq_len: int, config: Any) -> int:
    """Bound `seq_len` by the model's positions."""
    return min(seq_len, getattr(config, "max_position_embeddings", None) or seq_len)
