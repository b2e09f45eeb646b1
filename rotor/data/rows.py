"""Text as rows of tokens of equal length: documents joined and cut, and some of the rows taken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..models.tokenizer import encode
from .documents import Document, require_tokenizer


@dataclass(frozen=True)
class CalibrationTokens:
    """Rows of tokens to calibrate on.

    rows: [num_rows, seq_len], int64.
    topics: one label a row; the same for all rows where the source has no topics.
    documents: the texts that they were taken from; empty where the source is no text.
    """

    rows: Tensor
    topics: tuple[str, ...]
    documents: tuple[str, ...] = ()

    def topic_counts(self) -> dict[str, int]:
        """Rows of each topic, sorted by name."""
        return dict(sorted(Counter(self.topics).items()))


def separator_token(tokenizer: Any) -> int | None:
    """The token that a text starts with, or is kept apart from the next by; None where nothing is known of one."""
    if tokenizer is None:
        return None
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id


def text_rows(documents: list[str], tokenizer: Any, seq_len: int) -> Tensor:
    """Documents joined by the model's separator token and cut into rows: [rows, seq_len], the rest dropped."""
    return topic_rows([Document(text, "") for text in documents], tokenizer, seq_len).rows


def topic_rows(documents: list[Document], tokenizer: Any, seq_len: int) -> CalibrationTokens:
    """Documents joined by the model's separator token and cut into rows, the rest dropped.

    A row may run over the end of a document; its topic is the one that most of its tokens come from.
    """
    require_tokenizer(tokenizer)
    separator = separator_token(tokenizer)
    names = sorted({document.topic for document in documents})
    number = {name: i for i, name in enumerate(names)}
    ids: list[int] = []
    lengths, owners = [], []
    for text, topic in documents:
        before = len(ids)
        if separator is not None:
            ids.append(separator)
        ids += encode(tokenizer, text)
        lengths.append(len(ids) - before)
        owners.append(number[topic])
    count = len(ids) // seq_len
    rows = torch.tensor(ids[: count * seq_len], dtype=torch.int64).reshape(count, seq_len)
    owner = torch.tensor(owners, dtype=torch.int64).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    most = owner[: count * seq_len].reshape(count, seq_len).mode(dim=1).values if count else owner[:0]
    return CalibrationTokens(rows, tuple(names[i] for i in most.tolist()))


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
    return rows[spread_indices(rows, count, what)]


def spread_indices(rows: Tensor, count: int, what: str) -> Tensor:
    """Indices of `count` rows at equal distances; DataError that names `what` if there are fewer."""
    if rows.shape[0] < count:
        raise DataError(
            f"{what}: {rows.shape[0]} rows of {rows.shape[1]} tokens, expected {count}.",
            "Give a longer text, or ask for fewer or shorter rows with --set.",
        )
    return torch.arange(count) * rows.shape[0] // max(count, 1)
