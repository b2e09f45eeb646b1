"""One query position of each sequence over packed rows or rows of codes, in plain PyTorch on a CPU.

Sequence by sequence and a block of keys at a time, so that what is converted or rebuilt stays in a core's cache. Keys
before RoPE are rebuilt for all heads of a group by one product, in the dtype that the CPU multiplies fastest, and
turned as complex numbers by a table that all layers share. Keys that no head attends to at either end of a sequence
(padding, the empty rest of a static cache, what lies before a window) are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rotor.format.columns import Columns
from rotor.format.layout import GroupClass

from .parameters import AttentionParameters
from .rows import byte_order, unpack_transposed

BLOCK_ELEMENTS = 1 << 18
"""Numbers of a block that are converted or rebuilt: a core's cache holds them, and an operation takes longer than its
call."""


@lru_cache(maxsize=4096)
def _order(columns: Columns, element_bytes: int) -> Tensor:
    return torch.tensor(byte_order(columns, element_bytes))


@lru_cache(maxsize=8)
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what this CPU rebuilds keys of a model's dtype fastest; all else is float32 or wider."""
    has_bfloat16 = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()  # a private name, which may go
    return dtype if dtype == torch.bfloat16 and has_bfloat16 else torch.promote_types(dtype, torch.float32)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


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

    @cached_property
    def order(self) -> Tensor | None:
        """The columns in the order in which `block` gives them; None where that is theirs."""
        return None if self.columns is None else _order(self.columns, self.dtype.itemsize)

    def block(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """The numbers of the keys start ... end - 1, [count, end - start, rank], of `dtype`."""
        rows = self.rows[start:end].transpose(0, 1)
        if self.columns is None:
            return rows.to(dtype)
        return unpack_transposed(rows, self.columns, self.dtype, dtype).mT


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


def plane_rows(head_dim: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """The rows of a head that are the first, and those that are the second of each plane."""
    rest = (head_dim - rotary_dim) // 2
    first = [*range(rotary_dim // 2), *range(rotary_dim, rotary_dim + rest)]
    second = [*range(rotary_dim // 2, rotary_dim), *range(rotary_dim + rest, head_dim)]
    return torch.tensor(first), torch.tensor(second)


class Rebuilding:
    """Logits of keys before RoPE, for the queries of one position of a sequence.

    A plane of a key is a complex number, which RoPE multiplies with its turn; the rows of the basis are put in such an
    order that one product of the latents gives them all.

    Args:
        queries: [count, size, heads_per_kv, head_dim], rotated; float32 or wider.
        basis: [count, size, head_dim, rank], columns as `Latents.block` gives them, in the dtype of products.
        constant: [count, size, head_dim], added to rebuilt keys before their rotation, or None; of queries' dtype.
        turns: of `turns_of`. rotary_dim: of a head.
    """

    def __init__(self, queries: Tensor, basis: Tensor, constant: Tensor | None, turns: Tensor, rotary_dim: int) -> None:
        self.count, self.size = queries.shape[:2]
        first, second = plane_rows(queries.shape[-1], rotary_dim)
        rows = torch.stack([first, second], dim=-1).flatten()
        self.queries = queries[..., rows].flatten(0, 1)
        self.basis = basis[:, :, rows].flatten(1, 2).mT  # [count, rank, size * head_dim]
        self.turns = turns
        self.of_constant: Tensor | None = None
        if constant is not None:
            # The real part of conj(query) constant turn, as a product of vectors of pairs.
            planes = [torch.complex(x[..., first], x[..., second]) for x in (queries, constant.unsqueeze(2))]
            both = (planes[0] * planes[1].conj()).resolve_conj()
            self.of_constant = torch.view_as_real(both).flatten(-2).flatten(0, 2)

    @property
    def rows(self) -> int:
        """Numbers that are rebuilt of a key."""
        return self.basis.shape[0] * self.basis.shape[2]

    def logits(self, latents: Tensor, start: int) -> Tensor:
        """[count, keys, rank] from the key `start` on -> [count * size, heads_per_kv, keys]; without the constant."""
        keys = latents.shape[1]
        rebuilt = torch.bmm(latents, self.basis).to(self.queries.dtype)
        planes = torch.view_as_complex(rebuilt.view(self.count, keys, self.size, -1, 2))
        planes *= self.turns[start : start + keys, None]
        of_heads = rebuilt.view(self.count, keys, self.size, -1).permute(0, 2, 3, 1).flatten(0, 1)
        return torch.bmm(self.queries, of_heads)

    def add_constant(self, logits: Tensor, first: int) -> None:
        """Add what the constant gives, for the keys from `first` on, to logits [count, heads of a group, keys]."""
        if self.of_constant is not None:
            turns = torch.view_as_real(self.turns[first : first + logits.shape[-1]]).flatten(1)
            logits += (self.of_constant @ turns.mT).view_as(logits)


def serves(*tensors: Tensor) -> bool:
    """Whether `decode_class` runs on such tensors: on a CPU, outside of torch.compile and of gradients."""
    if torch.compiler.is_compiling() or tensors[0].device.type != "cpu":
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


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
    rebuilt = parameters.layout.domain == "pre"
    basis, constant = (parameters.basis(cls), parameters.constant(cls)) if rebuilt else (None, None)
    if mask is not None:
        mask = mask[..., 0, :].unflatten(1, (1, 1) if mask.shape[1] == 1 else queries.shape[1:3])
    for b, of_sequence in enumerate(queries):
        keys, values = (Latents(rows[b], side, queries.dtype) for rows, side in zip((key, value), columns, strict=True))
        rebuilding = None
        if basis is not None:
            assert key_rotation is not None
            sums, rotary_dim = wide(queries.dtype), key_rotation[0].shape[-1]
            turns = turns_of(key_rotation, basis.shape[2], sums)
            rebuilding = Rebuilding(
                of_sequence.unflatten(1, (basis.shape[1], -1)).to(sums),
                (basis if keys.order is None else basis[..., keys.order]).to(product_dtype(keys.dtype)),
                None if constant is None else constant.to(sums),
                turns,
                rotary_dim,
            )
        own = None if mask is None else mask[b if len(mask) > 1 else 0]
        attended = attend_one_position(
            of_sequence, keys, values, rebuilding, parameters.scaling, own, parameters.softcap
        )
        outputs.append(attended.to(queries.dtype).flatten())
    return torch.stack(outputs).unsqueeze(1)


def attend_one_position(
    queries: Tensor,
    keys: Latents,
    values: Latents,
    rebuilding: Rebuilding | None,
    scaling: float,
    mask: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Attention of one query position of one sequence, for the groups of a class.

    Args:
        queries: [count, heads of a group, rank], projected; not read where keys are rebuilt.
        mask: [count or 1, heads of a group or 1, kv_len or 1], bool (True: attend) or added to the logits; None for all
            keys.
    Returns:
        [count, heads of a group, v_rank], float32 or wider; zeros where nothing is attended.
    """
    count, heads = queries.shape[:2]
    sums = wide(keys.dtype)
    first, end = 0, keys.rows.shape[0]
    if mask is not None and mask.shape[-1] != 1:
        first, end = _attended(mask)
    output = torch.zeros(count, heads, values.rank, dtype=sums)
    if first == end:
        return output
    if rebuilding is None:
        of_latents = (queries if keys.order is None else queries[..., keys.order]).to(sums)
        per_key = count * keys.rank
    else:
        per_key = max(rebuilding.rows, count * keys.rank)
    logits = torch.empty(count, heads, end - first, dtype=sums)
    start = first
    for until in _block_ends(first, end, per_key):
        if rebuilding is None:
            product = torch.bmm(of_latents, keys.block(start, until, sums).mT)
        else:
            latents = keys.block(start, until, rebuilding.basis.dtype)
            product = rebuilding.logits(latents, start).view(count, heads, -1)
        logits[..., start - first : until - first] = product
        start = until
    if rebuilding is not None:
        rebuilding.add_constant(logits, first)
    logits *= scaling
    if softcap is not None:
        logits = torch.tanh_(logits / softcap).mul_(softcap)
    if mask is not None:
        part = mask if mask.shape[-1] == 1 else mask[..., first:end]
        logits = logits.masked_fill_(~part, -torch.inf) if part.dtype == torch.bool else logits + part
    weights = torch.softmax(logits, dim=-1)
    if mask is not None:
        weights.nan_to_num_()  # a query that may attend to nothing
    start = first
    for until in _block_ends(first, end, count * values.rank):
        output.baddbmm_(weights[..., start - first : until - first], values.block(start, until, sums))
        start = until
    if values.order is None:
        return output
    return torch.empty_like(output).index_copy_(-1, values.order, output)


def _attended(mask: Tensor) -> tuple[int, int]:
    """The first key that some head of the last dimension's sequence attends to, and the one behind the last."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    marks = seen.flatten(0, -2).any(0).to(torch.uint8)
    if not bool(marks.any()):
        return (0, 0) if mask.dtype == torch.bool else (0, len(marks))
    return int(marks.argmax()), len(marks) - int(marks.flip(0).argmax())


def _block_ends(first: int, end: int, per_key: int) -> list[int]:
    """Where the blocks of the keys first ... end - 1 end, per_key numbers a key."""
    block = max(1, BLOCK_ELEMENTS // per_key)
    return [*range(first + block, end, block), end]
