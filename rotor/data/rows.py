"""Text as rows of tokens of equal length: documents joined and cut, and some of the rows taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..models.tokenizer import encode
from .documents import Document, require_tokenizer


def separator_token(tokenizer: Any) -> int | None:
    """The token that a text starts with, or is kept apart from the next by; None where nothing is known of one."""
    if tokenizer is None:
        return None
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id


def text_rows(documents: list[str], tokenizer: Any, seq_len: int) -> Tensor:
    """Documents joined by the model's separator token and cut into rows: [rows, seq_len], the rest dropped."""
    return topic_rows([Document(text, "") for text in documents], tokenizer, seq_len)[0]


def topic_rows(documents: Sequence[Document], tokenizer: Any, seq_len: int) -> tuple[Tensor, list[str]]:
    """Rows as of `text_rows`, and the topic of each: the one that most of its tokens come from."""
    require_tokenizer(tokenizer)
    separator = separator_token(tokenizer)
    topics = sorted({document.topic for document in documents})
    ids, owners = list[int](), list[int]()
    for text, topic in documents:
        ids += [] if separator is None else [separator]
        ids += encode(tokenizer, text)
        owners += [topics.index(topic)] * (len(ids) - len(owners))
    count = len(ids) // seq_len
    rows, owner = (torch.tensor(x[: count * seq_len], dtype=torch.int64).reshape(count, seq_len) for x in (ids, owners))
    return rows, [topics[i] for i in owner.mode(1).values.tolist()]


def rows_in(documents: list[str], tokenizer: Any, seq_len: int, enough: int) -> int:
    """How many rows `text_rows` would cut documents into; no more is read than what makes `enough` of them."""
    count, own = 0, separator_token(tokenizer) is not None
    for text in documents:
        count += own + len(encode(tokenizer, text))
        if count >= enough * seq_len:
            return enough
    return count // seq_len


def spread_rows(rows: Tensor, count: int, what: str) -> Tensor:
    """`count` rows at equal distances.

    Raises:
        DataError: there are fewer; names `what`.
    """
    if rows.shape[0] < count:
        raise DataError(
            f"{what}: {rows.shape[0]} rows of {rows.shape[1]} tokens, expected {count}.",
            "Give a longer text, or ask for fewer or shorter rows with --set.",
        )
    return rows[spread_indices(len(rows), count)]


def spread_indices(there: int, count: int) -> Tensor:
    """Of `count` rows at equal distances among those that are there."""
    return torch.arange(count) * there // max(count, 1)
