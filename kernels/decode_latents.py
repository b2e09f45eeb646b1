"""Latents of one sequence as the PyTorch decode path on a CPU reads them: blocks of keys, in the dtypes of products."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from threading import local

import torch
from torch import Tensor

from rotor.format.columns import Columns

from .rows import byte_order, unpack_by_bytes


@lru_cache(maxsize=4096)
def byte_order_of(columns: Columns, element_bytes: int) -> tuple[Tensor, Tensor]:
    order, factors = byte_order(columns, element_bytes)
    return torch.tensor(order), torch.tensor(factors)


@lru_cache(maxsize=8)
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what this CPU rebuilds keys of a model's dtype fastest; all else is float32 or wider."""
    has_bfloat16 = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()  # a private name, which may go
    return dtype if dtype == torch.bfloat16 and has_bfloat16 else torch.promote_types(dtype, torch.float32)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Scratch(local):
    """Memory of a thread, by name, for what one block of keys leaves to the next.

    New memory costs the system a page at a time, which for a block takes as long as what is done to it.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with anything in it; what the name gave before is overwritten."""
        size_bytes = math.prod(shape) * dtype.itemsize
        memory = self._memory.get(name)
        if memory is None or len(memory) < size_bytes:
            with torch.inference_mode(False):  # it serves calls in and out of that mode
                memory = self._memory[name] = torch.empty(size_bytes, dtype=torch.uint8)
        return memory[:size_bytes].view(dtype).view(shape)


scratch = Scratch()


def in_dtype(x: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """[count, keys, .] itself, or in the dtype in memory of that name; groups that lie side by side do so again."""
    if x.dtype == dtype:
        return x
    if x.stride(0) < x.stride(1):
        return in_dtype(x.transpose(0, 1), dtype, name).transpose(0, 1)
    return scratch(name, tuple(x.shape), dtype).copy_(x)


@dataclass(frozen=True)
class Latents:
    """The groups of a class in the rows of one sequence.

    rows: [kv_len, count, rank], or of codes [kv_len, count, bytes], uint8. columns: of codes. dtype: of the model.
    """

    rows: Tensor
    columns: Columns | None
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return self.rows.shape[1]

    @property
    def rank(self) -> int:
        return self.rows.shape[2] if self.columns is None else self.columns.rank

    def block(self, start: int, end: int) -> Tensor:
        """The numbers of the keys start ... end - 1, [count, end - start, rank]: a view of the rows; or what
        `unpack_by_bytes` makes of codes, float32 or wider, until the next block is asked for.
        """
        rows = self.rows[start:end]
        # Of one group with the strides that a product takes without a copy.
        rows = rows.squeeze(1).unsqueeze(0) if self.count == 1 else rows.transpose(0, 1)
        if self.columns is None:
            return rows
        numbers = scratch("numbers", (*rows.shape[:2], self.rank), wide(self.dtype))
        return unpack_by_bytes(rows, self.columns, self.dtype, numbers)

    def of_columns(self, sums: Tensor) -> Tensor:
        """Sums over keys of what `block` gives, [..., rank], as sums of the columns in their order."""
        if self.columns is None:
            return sums
        order, factors = byte_order_of(self.columns, self.dtype.itemsize)
        return torch.empty_like(sums).index_copy_(-1, order, sums / factors)
