"""Reading a layer's projections from a checkpoint, and its activations, whatever the family."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import UnsupportedModelError
from ..format.layout import AttentionShape
from ..runtime.families import AttentionWeights, Family, GetTensor


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
    weights = family.read(lambda name: get(prefix + name), local, shape)
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


def longest_row(seq_len: int, config: Any) -> int:
    """Bound `seq_len` by the model's positions."""
    return min(seq_len, getattr(config, "max_position_embeddings", None) or seq_len)
