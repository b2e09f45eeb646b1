"""Text as rows of tokens of equal length: documents joined and cut, and some of the rows taken."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .documents import require_tokenizer
from .tokenizer import encode


def separator_token(tokenizer: Any) -> int | None:
    """The token that a text starts with, or is kept apart from the next by; None where nothing is known of one."""
    if tokenizer is None:
        return None
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id


def text_rows(documents: list[str], tokenizer: Any, seq_len: int, most: int | None = None) -> Tensor:
    """Documents joined by the model's separator token and cut into rows: [rows, seq_len], the rest dropped.

    Args:
        most: rows that are wanted; no more is read than what makes them.
    """
    require_tokenizer(tokenizer)
    separator = separator_token(tokenizer)
    ids = list[int]()
    for text in documents:
        ids += [] if separator is None else [separator]
        ids += encode(tokenizer, text)
        if most is not None and len(ids) >= most * seq_len:
            break
    count = len(ids) // seq_len if most is None else min(most, len(ids) // seq_len)
    return torch.tensor(ids[: count * seq_len], dtype=torch.int64).reshape(count, seq_len)


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
