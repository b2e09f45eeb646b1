"""Activations, gradients and sequence lengths of a model, independent of its family."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..checkpoint.families import Family, attention_shape
from ..checkpoint.layout import AttentionShape
from ..checkpoint.projections import oriented
from ..errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def keys_before_rope(family: Family, output: Tensor, shape: AttentionShape) -> Tensor:
    """Turn the output of `family.key_source` into keys before RoPE, [batch_size * seq_len, num_kv_heads, head_dim]."""
    if family.has_key_norm:
        output = output.transpose(1, 2) if family.norms_heads_first else output
    elif family.fused is not None:
        output = split_activations(family, output, shape)[1]
    return family.in_halves(output.reshape(-1, shape.num_kv_heads, shape.head_dim), shape)


def split_activations(family: Family, output: Tensor, shape: AttentionShape) -> tuple[Tensor, ...]:
    """Split the output [..., features] of a fused projection into query, key, value, [..., heads * head_dim] each."""
    return tuple(part.movedim(0, -1) for part in family.split(output.movedim(-1, 0), shape))


def kv_parameters(family: Family, model: nn.Module, layer: int) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Parameters of the key and value projections, each with a function that takes its part of the parameter's tensor.

    The part is [num_kv_heads * head_dim, hidden_size].
    """
    module = family.attention_module(model, layer)
    if family.fused is None:
        there = dict(module.named_parameters())
        names = ["k_proj.weight", next(name for name in family.value_weights if name in there)]
        return [(there[name], lambda g: g) for name in names]
    weight = module.get_parameter(f"{family.fused}.weight")
    shape = attention_shape(model.config).layer(layer)
    return [
        (weight, lambda g: family.split(oriented(family, g), shape)[1]),
        (weight, lambda g: family.split(oriented(family, g), shape)[2]),
    ]


LONG_CONTEXT = 32768
"""Tokens of a sequence whose cache is counted if no --context is given."""


def context_tokens(config: PreTrainedConfig, asked: int | None = None) -> int:
    """Tokens of a served sequence: as asked for, else the model's longest sequence, at most LONG_CONTEXT.

    Raises:
        UsageError: more tokens are asked for than the model has positions.
    """
    if asked is not None and bounded_seq_len(asked, config) < asked:
        longest = bounded_seq_len(asked, config)
        raise UsageError(
            f"--context {asked}: the model's longest sequence has {longest} tokens.", f"Give at most {longest}."
        )
    return asked or bounded_seq_len(LONG_CONTEXT, config)


def bounded_seq_len(seq_len: int, config: PreTrainedConfig) -> int:
    """Bound `seq_len` by the model's positions."""
    return min(seq_len, getattr(config.get_text_config(), "max_position_embeddings", None) or seq_len)
