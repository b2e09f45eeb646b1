"""Lengths of sequences, bounded by a model's positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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
