"""One query position of each sequence over packed rows or rows of codes, in plain PyTorch on a CPU.

Sequence by sequence and a block of keys at a time, so that what is converted or rebuilt stays in a core's cache. A
block is read once: for its logits and, where keys and values share their latents, for its values. Keys before RoPE are
rebuilt in the dtype that the CPU multiplies fastest, and turned as complex numbers by a table that all layers share.
Keys that no head attends to at either end of a sequence (padding, the empty rest of a static cache, what lies before a
window) are not read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import local

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rotor.format.columns import Columns
from rotor.format.layout import GroupClass

from .parameters import AttentionParameters
from .rows import byte_order, unpack_by_bytes

BLOCK_ELEMENTS = 1 << 19
"""Numbers of a block that are converted or rebuilt: a core's cache holds them, and an operation takes longer than its
call."""


@lru_cache(maxsize=4096)
def _byte_order(columns: Columns, element_bytes: int) -> tuple[Tensor, Tensor]:
    order, factors = byte_order(columns, element_bytes)
    return torch.tensor(order), torch.tensor(factors)


@lru_cache(maxsize=8)
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what this CPU rebuilds keys of a model's dtype fastest; all else is float32 or wider."""
    has_bfloat16 = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()  # a private name, which may go
    return dtype if dtype == torch.bfloat16 and has_bfloat16 else torch.promote_types(dtype, torch.float32)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Scratch(local):
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


_scratch = _Scratch()


def _in_dtype(x: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """[count, keys, .] itself, or in the dtype in memory of that name; groups that lie side by side do so again."""
    if x.dtype == dtype:
        return x
    if x.stride(0) < x.stride(1):
        return _in_dtype(x.transpose(0, 1), dtype, name).transpose(0, 1)
    return _scratch(name, tuple(x.shape), dtype).copy_(x)


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
        numbers = _scratch("numbers", (*rows.shape[:2], self.rank), wide(self.dtype))
        return unpack_by_bytes(rows, self.columns, self.dtype, numbers)

    def of_columns(self, sums: Tensor) -> Tensor:
        """Sums over keys of what `block` gives, [..., rank], as sums of the columns in their order."""
        if self.columns is None:
            return sums
        order, factors = _byte_order(self.columns, self.dtype.itemsize)
        return torch.empty_like(sums).index_copy_(-1, order, sums / factors)


_turns: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Cosines -> the turns made of them: all layers of a step share one table."""


def turns_of(key_rotation: tuple[Tensor, Tensor], head_dim: int, dtype: torch.dtype) -> Tensor:
    """The turns of all planes of a head, [kv_len, head_dim / 2], complex of the precision of `dtype`.

    Planes are those of RoPE, then pairs of the dimensions that it leaves as they are (`plane_rows`).
    """
    cos, sin = key_rotation
    known = _turns.get(cos)
    if known is None or known[0] is not sin or known[1] != (head_dim, dtype):
        half = cos.shape[-1] // 2
        turns = torch.ones(len(cos), head_dim // 2, dtype=torch.promote_types(dtype, torch.complex64))
        turns[:, :half] = torch.complex(cos[:, :half].to(dtype), sin[:, :half].to(dtype))
        known = _turns[cos] = sin, (head_dim, dtype), turns
    return known[2]


@lru_cache(maxsize=64)
def plane_rows(head_dim: int, rotary_dim: int) -> Tensor:
    """The rows of a head, both of a plane side by side."""
    rest = (head_dim - rotary_dim) // 2
    first = [*range(rotary_dim // 2), *range(rotary_dim, rotary_dim + rest)]
    second = [*range(rotary_dim // 2, rotary_dim), *range(rotary_dim + rest, head_dim)]
    return torch.tensor([first, second]).T.flatten()


class Rebuilding:
    """Logits of keys before RoPE, for queries of one position.

    A plane of a key is a complex number, which RoPE multiplies with its turn. For that, and for the product with the
    queries, the keys of a head lie side by side.

    Args:
        basis: [count, size, head_dim, rank]. columns, dtype: of the latents.
        constant: [count, size, head_dim], added to rebuilt keys before their rotation, or None.
        key_rotation: cos and sin [kv_len, rotary_dim].
    """

    def __init__(
        self,
        basis: Tensor,
        columns: Columns | None,
        dtype: torch.dtype,
        constant: Tensor | None,
        key_rotation: tuple[Tensor, Tensor],
    ) -> None:
        self.dtype = wide(dtype)
        self.turns = turns_of(key_rotation, basis.shape[2], self.dtype)
        self.plane_rows = plane_rows(basis.shape[2], key_rotation[0].shape[-1])
        basis, factors = basis.transpose(0, 1), None
        if columns is not None:
            order, factors = _byte_order(columns, dtype.itemsize)
            basis = basis.index_select(3, order)
        basis = basis.index_select(2, self.plane_rows).to(product_dtype(dtype))
        if factors is not None:
            basis /= factors
        self.basis = basis.mT  # [size, count, rank, head_dim]
        self.shape = basis.shape[:3]
        self.constant = None
        if constant is not None:
            self.constant = constant[..., self.plane_rows].transpose(0, 1).unsqueeze(2).to(self.dtype)

    @cached_property
    def basis_of_all(self) -> Tensor:
        """[count, rank, size * head_dim]."""
        size, count, head_dim = self.shape
        return self.basis.mT.transpose(0, 1).reshape(count, size * head_dim, -1).mT

    def queries(self, queries: Tensor) -> Tensor:
        """[count, heads of a group, head_dim], rotated -> as `logits` takes them."""
        return queries[..., self.plane_rows].unflatten(1, (self.shape[0], -1)).transpose(0, 1).flatten(0, 1)

    @property
    def rows(self) -> int:
        """Numbers that are rebuilt of a key."""
        return math.prod(self.shape)

    def logits(self, queries: Tensor, latents: Tensor, start: int) -> Tensor:
        """Of the keys from `start` on.

        Args:
            queries: [size * count, heads_per_kv, head_dim], of `queries`. latents: [count, keys, rank].
        Returns:
            [count, heads of a group, keys].
        """
        size, count, head_dim = self.shape
        keys, dtype = latents.shape[1], self.basis.dtype
        factor = _in_dtype(latents, dtype, "factor")
        rebuilt = _scratch("rebuilt", (size, count, keys, head_dim), self.dtype)
        if dtype == self.dtype:
            for of_head, basis in zip(rebuilt.unbind(0), self.basis.unbind(0), strict=True):
                torch.bmm(factor, basis, out=of_head)
        else:  # what is converted may change its order
            product = _scratch("product", (count, keys, size * head_dim), dtype)
            torch.bmm(factor, self.basis_of_all, out=product)
            rebuilt.copy_(product.unflatten(-1, (size, head_dim)).permute(2, 0, 1, 3))
        if self.constant is not None:
            rebuilt += self.constant
        planes = torch.view_as_complex(rebuilt.view(size, count, keys, -1, 2))
        planes *= self.turns[start : start + keys]
        logits = torch.bmm(queries, rebuilt.flatten(0, 1).mT)
        return logits.unflatten(0, (size, count)).transpose(0, 1).flatten(1, 2)


def serves(query: Tensor, *others: Tensor | None) -> bool:
    """Whether `decode_class` runs on such tensors: on a CPU, outside of torch.compile and of gradients."""
    if torch.compiler.is_compiling() or query.device.type != "cpu":
        return False
    tensors = (query, *others)
    return not (torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors))


def decode_class(
    queries: Tensor,
    key: Tensor,
    value: Tensor,
    columns: tuple[Columns | None, Columns | None],
    parameters: AttentionParameters,
    cls: GroupClass,
    mask: Tensor | None,
    key_rotation: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of one query position of each sequence, for the groups of a class.

    Args:
        queries: [batch_size, count, heads of a group, 1, width], in the model's dtype, of `parameters.queries`.
        key, value: [batch_size, kv_len, count, rank], or of codes [batch_size, kv_len, count, bytes], uint8.
        columns: of keys and values, of codes.
        mask: of the class: [batch_size or 1, heads of the class or 1, 1, kv_len or 1], bool (True: attend) or added to
            the logits; None for all keys.
        key_rotation: cos and sin [kv_len, rotary_dim], in domain `pre`.
    Returns:
        [batch_size, 1, count * heads of a group * v_rank], in the model's dtype.
    """
    queries, outputs = queries.squeeze(3), []
    if mask is not None:
        mask = mask[..., 0, :].unflatten(1, (1, 1) if mask.shape[1] == 1 else queries.shape[1:3])
    rebuilding = None
    if parameters.layout.domain == "pre":
        assert key_rotation is not None
        rebuilding = Rebuilding(
            parameters.basis(cls), columns[0], queries.dtype, parameters.constant(cls), key_rotation
        )
    scaled = queries.to(wide(queries.dtype)) * parameters.scaling
    if rebuilding is None and columns[0] is not None:
        order, factors = _byte_order(columns[0], queries.dtype.itemsize)
        scaled = scaled[..., order] / factors
    for b, of_sequence in enumerate(scaled):
        keys, values = (Latents(rows[b], side, queries.dtype) for rows, side in zip((key, value), columns, strict=True))
        own = None if mask is None else mask[b if len(mask) > 1 else 0]
        attended = attend_one_position(
            of_sequence, keys, None if parameters.layout.joint else values, rebuilding, own, parameters.softcap
        )
        outputs.append(attended.to(queries.dtype).flatten())
    return torch.stack(outputs).unsqueeze(1)


def attend_one_position(
    queries: Tensor,
    keys: Latents,
    values: Latents | None,
    rebuilding: Rebuilding | None,
    mask: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Attention of one query position of one sequence, for the groups of a class.

    Args:
        queries: [count, heads of a group, width], scaled, float32 or wider: rotated where keys are rebuilt, else
            projected, for what `Latents.block` gives.
        values: None where they are the latents of the keys.
        mask: [count or 1, heads of a group or 1, kv_len or 1], bool (True: attend) or added to the logits; None for all
            keys.
    Returns:
        [count, heads of a group, v_rank], float32 or wider; zeros where nothing is attended.
    """
    count, heads = queries.shape[:2]
    first, end = 0, keys.rows.shape[0]
    if mask is not None and mask.shape[-1] != 1:
        first, end = _attended(mask)
        if mask.dtype == torch.bool and bool(mask[..., first:end].all()):
            mask = None  # padding, or the rest of a static cache
    read = keys if values is None else values
    if first == end:
        return queries.new_zeros(count, heads, read.rank)
    per_key = count * max(keys.rank, read.rank)
    if rebuilding is not None:
        per_key, queries = max(per_key, rebuilding.rows), rebuilding.queries(queries)
    attended = []
    for start, until in _blocks(first, end, per_key):
        latents = keys.block(start, until)
        if rebuilding is None:
            logits = torch.bmm(queries, _in_dtype(latents, queries.dtype, "factor").mT)
        else:
            logits = rebuilding.logits(queries, latents, start)
        if softcap is not None:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            part = mask if mask.shape[-1] == 1 else mask[..., start:until]
            logits = logits.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else logits + part
        weights = torch.softmax(logits, dim=-1)
        if mask is not None:
            weights.nan_to_num_()  # a query that may attend to nothing
        numbers = latents if values is None else values.block(start, until)
        output = torch.bmm(weights, _in_dtype(numbers, weights.dtype, "factor"))
        attended.append((output, logits.amax(-1), weights.amax(-1)))
    return read.of_columns(_joined(*map(torch.stack, zip(*attended, strict=True))))


def _joined(outputs: Tensor, logits: Tensor, weights: Tensor) -> Tensor:
    """Attention over all keys from that over each block of them.

    The largest weight of a block is one over the sum of the exponentials of its logits less the largest: what the block
    is worth, without the rounding of a logarithm.

    Args:
        outputs: [blocks, ..., v_rank]. logits, weights: the largest of each block, [blocks, ...]; of keys that nothing
            attends to -inf and 0.
    """
    if len(outputs) == 1:
        return outputs[0]
    worth = (torch.exp(logits - logits.amax(0)) / weights).masked_fill_(weights == 0.0, 0.0)
    total = worth.sum(0)
    shares = worth / total.masked_fill_(total == 0.0, 1.0)
    return (outputs * shares.unsqueeze(-1)).sum(0)


def _attended(mask: Tensor) -> tuple[int, int]:
    """The first key that some head of the last dimension's sequence attends to, and the one behind the last."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    marks = seen.flatten(0, -2).any(0).to(torch.uint8)
    if not bool(marks.any()):
        return (0, 0) if mask.dtype == torch.bool else (0, len(marks))
    return int(marks.argmax()), len(marks) - int(marks.flip(0).argmax())


def _blocks(first: int, end: int, per_key: int) -> list[tuple[int, int]]:
    """The blocks of the keys first ... end - 1, per_key numbers a key: as few as there can be, of one size."""
    count = -(-(end - first) // max(1, BLOCK_ELEMENTS // per_key))
    block = -(-(end - first) // count)
    return [(start, min(start + block, end)) for start in range(first, end, block)]
