"""Attention over rows in pages in plain PyTorch: a serving engine's path on a CPU and wherever a kernel does not fit.

Pages are gathered a block of keys at a time, so that no sequence is ever contiguous as a whole. Both kinds of rows are
bytes here: numbers of the model's dtype, or codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotor.format.columns import Columns
from rotor.format.layout import GroupClass

from .parameters import AttentionParameters
from .rows import unpack
from .running_softmax import attend_in_blocks


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parameters: AttentionParameters,
    block_table: Tensor,
    kv_lens: Tensor,
    longest: int,
    *,
    key_rotation: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of the last tokens of each sequence over its pages, which hold these tokens' own rows already.

    Args:
        query: domain `pre`: [batch_size, seq_len, num_heads, head_dim], rotated; else projected, [batch_size, seq_len,
            sum over query heads of qk_rank]. All sequences have seq_len new tokens.
        key, value: pages of rows, [num_pages, page_size, bytes] each, uint8; views of any strides.
        block_table: [batch_size, pages of a sequence], integers.
        kv_lens: [batch_size]: tokens of each sequence, the new ones among them.
        longest: at least the largest of these, known to the host.
        key_rotation: in domain `pre`: cos and sin by position, [positions, rotary_dim].
        window: a query attends to itself and the window - 1 keys before it.
    Returns:
        [batch_size, seq_len, sum over query heads of v_rank] in query's dtype.
    """
    page_size, seq_len = key.shape[1], query.shape[1]
    new = torch.arange(seq_len, device=query.device)
    position = kv_lens[:, None].long() - seq_len + new  # of the queries
    span, first_page = longest, None
    if window is not None:
        first_page = (position[:, 0] - window + 1).clamp(min=0) // page_size
        span = min(longest, (window + seq_len) // page_size * page_size + 2 * page_size)
    pages = _Pages(block_table, kv_lens.long(), first_page, page_size)

    def rows(cls: GroupClass) -> tuple[_PagedRows, _PagedRows]:
        qk_byte, v_byte = parameters.layout.byte_offsets(query.element_size())[cls.start]
        return (
            _PagedRows(key, pages, qk_byte, cls.count, cls.qk_rank, cls.qk_columns, query.dtype),
            _PagedRows(value, pages, v_byte, cls.count, cls.v_rank, cls.v_columns, query.dtype),
        )

    def mask(of_heads: slice, start: int, end: int) -> Tensor:
        keys = pages.positions(start, end)[:, None]
        seen = keys <= position[..., None]
        if window is not None:
            seen &= keys > position[..., None] - window
        return seen[:, None]

    rotation = None
    if key_rotation is not None:
        cos, sin = key_rotation

        def rotation(cls: GroupClass, start: int, end: int) -> tuple[Tensor, Tensor]:
            keys = pages.positions(start, end).clamp(max=len(cos) - 1)[:, None, None]
            return cos[keys], sin[keys]

    heads_first = query.transpose(1, 2) if query.dim() == 4 else query
    output, _ = attend_in_blocks(heads_first, rows, parameters, span, mask, rotation, step=page_size)
    return output.to(query.dtype)


@dataclass(frozen=True)
class _Pages:
    """Where the keys of each sequence are, from the page `first` of each on (None: from its beginning)."""

    table: Tensor
    kv_lens: Tensor
    first: Tensor | None
    size: int

    def positions(self, start: int, end: int) -> Tensor:
        """In their sequences, [batch_size, end - start]."""
        index = torch.arange(start, end, device=self.table.device).expand(len(self.table), -1)
        return index if self.first is None else index + self.first[:, None] * self.size

    def gather(self, rows: Tensor, start: int, end: int) -> Tensor:
        """[num_pages, page_size, bytes] -> [batch_size, end - start, bytes]; zeros behind a sequence's end.

        `start` is a multiple of the page size.
        """
        index = torch.arange(start // self.size, -(-end // self.size), device=self.table.device)
        index = index.expand(len(self.table), -1)
        if self.first is not None:
            index = index + self.first[:, None]
        own = self.table.gather(1, index.clamp(max=self.table.shape[1] - 1).long())
        found = rows[own.long()].flatten(1, 2)[:, : end - start]
        # Pages hold anything there, NaN too.
        return found.masked_fill_((self.positions(start, end) >= self.kv_lens[:, None])[..., None], 0)


@dataclass(frozen=True)
class _PagedRows:
    """The groups of a class in the pages of a layer: `first` bytes are before them in each row."""

    rows: Tensor
    pages: _Pages
    first: int
    count: int
    rank: int
    columns: Columns | None
    dtype: torch.dtype

    def block(self, start: int, end: int) -> Tensor:
        each = self.rank * self.dtype.itemsize
        if self.columns is not None:
            each = self.columns.row_bytes(self.dtype.itemsize)
        own = self.rows[..., self.first : self.first + self.count * each]
        groups = self.pages.gather(own, start, end).unflatten(-1, (self.count, each))
        numbers = groups.view(self.dtype) if self.columns is None else unpack(groups, self.columns, self.dtype)
        return numbers.transpose(1, 2)
