"""A layer's activations and gradients, whatever the family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..checkpoint.families import Family, attention_shape
from ..checkpoint.layout import AttentionShape
from ..checkpoint.projections import oriented
from ..errors import UsageError


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


def kv_parameters(family: Family, model: nn.Module, layer: int) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """The parameters of the key and of the value projection, and for each how to get [num_kv_heads * d, hidden]."""
    module = family.attention_module(model, layer)
    if family.fused is None:
        return [(module.get_parameter(f"{p}_proj.weight"), lambda g: g) for p in "kv"]
    weight, shape = module.get_parameter(f"{family.fused}.weight"), attention_shape(model.config)
    return [
        (weight, lambda g: family.split(oriented(family, g), shape)[1]),
        (weight, lambda g: family.split(oriented(family, g), shape)[2]),
    ]


LONG_CONTEXT = 32768
"""Tokens of a sequence whose cache is counted, where nobody says how many are served."""


def context_tokens(config: Any, asked: int | None = None) -> int:
    """Tokens of the sequences that are served: those asked for, or the model's longest, at most LONG_CONTEXT.

    Raises:
        UsageError: more are asked for than the model has positions.
    """
    if asked is not None and longest_row(asked, config) < asked:
        longest = longest_row(asked, config)
        raise UsageError(
            f"--context {asked}: the model's longest sequence has {longest} tokens.", f"Give at most {longest}."
        )
    return asked or longest_row(LONG_CONTEXT, config)


LONG_ROW = 2048
"""Tokens of a long row of the report split."""


def long_row_count(report_tokens: int, seq_len: int, config: Any) -> int:
    """Long rows that a report split has: half as many tokens, where the model has room and other rows are shorter."""
    fits = longest_row(LONG_ROW, config) == LONG_ROW and longest_row(seq_len, config) < LONG_ROW
    return report_tokens // (2 * LONG_ROW) if fits else 0


def longest_row(seq_len: int, config: Any) -> int:
    """Bound `seq_len` by the model's positions."""
    return min(seq_len, getattr(config, "max_position_embeddings", None) or seq_len)
