"""Text as rows of tokens of equal length: documents joined and cut, and some of the rows taken.

A row begins as the model is served: with what its tokenizer puts before a text (see `text_start`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .documents import require_tokenizer
from .tokenizer import encode, text_start


def separator_token(tokenizer: Any) -> int | None:
    """The token that documents are kept apart by: BOS, or EOS without one; None where nothing is known of either."""
    if tokenizer is None:
        return None
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id


def prompt_start(tokenizer: Any) -> list[int]:
    """Tokens that a prompt of ours begins with: those that the tokenizer puts before a text, else the separator."""
    separator = separator_token(tokenizer)
    return text_start(tokenizer) or ([] if separator is None else [separator])


def text_rows(documents: list[str], tokenizer: Any, seq_len: int, most: int | None = None) -> Tensor:
    """Documents joined by the model's separator token and cut into rows: [rows, seq_len], the rest dropped.

    Every row begins with what the tokenizer puts before a text; a separator that comes right behind it is left out.

    Args:
        most: rows that are wanted; no more is read than what makes them.
    """
    require_tokenizer(tokenizer)
    separator, start = separator_token(tokenizer), text_start(tokenizer)[: seq_len - 1]
    ids = list[int]()
    for text in documents:
        ids += [] if separator is None else [separator]
        ids += encode(tokenizer, text)
        if most is not None and len(ids) >= most * seq_len:
            break
    rows, place, length = list[list[int]](), 0, seq_len - len(start)
    while most is None or len(rows) < most:
        place += bool(start) and ids[place : place + 1] == [separator]
        if place + length > len(ids):
            break
        rows.append(start + ids[place : place + length])
        place += length
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), seq_len)


def evenly_spaced(rows: Tensor, count: int, what: str) -> Tensor:
    """`count` rows at equal distances.

    Raises:
        DataError: there are fewer; names `what`.
    """
    if rows.shape[0] < count:
        raise DataError(
            f"{what}: {rows.shape[0]} rows of {rows.shape[1]} tokens, expected {count}.",
            "Give a longer text, or ask for fewer or shorter rows with --set.",
        )
    return rows[torch.arange(count) * len(rows) // max(count, 1)]
