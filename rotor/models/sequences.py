"""Lengths of sequences, and text as sequences of one length: documents are joined and cut, some are taken evenly.

Every sequence begins as the model is served: with the tokens that its tokenizer puts before a text (see `text_start`).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import DataError, UsageError
from .documents import require_tokenizer
from .tokenizer import encode, text_start

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


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


def separator_token(tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """The token that separates documents: BOS, else EOS; None if the tokenizer has neither."""
    if tokenizer is None:
        return None
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id


def prompt_start(tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """First tokens of a generated prompt: those that the tokenizer puts before a text, else the separator."""
    separator = separator_token(tokenizer)
    return text_start(tokenizer) or ([] if separator is None else [separator])


def text_sequences(
    documents: list[str], tokenizer: PreTrainedTokenizerBase, seq_len: int, most: int | None = None
) -> Tensor:
    """Join documents by the separator token and cut them into sequences: [num_sequences, seq_len].

    Every sequence begins with the tokens that the tokenizer puts before a text; a separator right behind them is left
    out. A shorter rest at the end is dropped.

    Args:
        most: number of sequences wanted; no more text is tokenized than they need.
    """
    return sequences_by_document(documents, tokenizer, seq_len, most)[0]


def sequences_by_document(
    documents: list[str], tokenizer: PreTrainedTokenizerBase, seq_len: int, most: int | None = None
) -> tuple[Tensor, list[int]]:
    """Result of text_sequences, and of each sequence the index of the document that it begins in."""
    require_tokenizer(tokenizer)
    separator = separator_token(tokenizer)
    start = text_start(tokenizer)[: seq_len - 1]
    ids, ends = list[int](), list[int]()
    for text in documents:
        encoded = encode(tokenizer, text)
        ids += (
            [] if separator is None or encoded[:1] == [separator] else [separator]
        )  # a rendered chat may have its BOS
        ids += encoded
        ends.append(len(ids))
        if most is not None and len(ids) >= most * seq_len:
            break
    sequences, begun_in = list[list[int]](), list[int]()
    position = 0
    length = seq_len - len(start)
    while most is None or len(sequences) < most:
        position += bool(start) and ids[position : position + 1] == [separator]
        if position + length > len(ids):
            break
        sequences.append(start + ids[position : position + length])
        begun_in.append(bisect_right(ends, position))
        position += length
    return torch.tensor(sequences, dtype=torch.int64).reshape(len(sequences), seq_len), begun_in


def evenly_spaced(sequences: Tensor, count: int, what: str) -> Tensor:
    """Take `count` sequences at equal distances.

    Raises:
        DataError: there are fewer; names `what`.
    """
    if sequences.shape[0] < count:
        raise DataError(
            f"{what}: {sequences.shape[0]} sequences of {sequences.shape[1]} tokens, expected {count}.",
            "Give a longer text, or ask for fewer or shorter sequences with --set.",
        )
    return sequences[even_places(len(sequences), count)]


def even_places(available: int, count: int) -> Tensor:
    """`count` of the numbers below `available`, at equal distances: [count], int64."""
    return torch.arange(count) * available // max(count, 1)
