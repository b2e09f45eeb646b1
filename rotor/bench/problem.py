"""What the benchmark's rows compute: attention of one layer on random inputs, and its value in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..format.columns import Columns
from ..format.layout import AttentionShape, GroupLayout, LayerLayout
from ..kernels.parameters import AttentionParameters, seq_len_of
from ..kernels.reference import rotate
from ..kernels.rows import key_columns, pack_layer, unpack_layer, value_columns
from ..kernels.truth import Sequence, ragged_attention
from ..prediction.cost import Work, least_work
from ..runtime.rope_blocks import block_starts

ROPE_THETA = 10000.0
CHECKED_QUERIES = 32
"""Query positions at either end of a prefill that are compared; each needs logits against all keys in float64."""


@dataclass(frozen=True)
class Problem:
    """Attention of a layer: every sequence attends to all kv_len keys, its last seq_len queries causally.

    layout: of domain `none` or `pre`. Queries of `post` come projected, as the kernels take them: it is `none`.
    query: domain `pre` [batch_size, num_heads, seq_len, head_dim], rotated; else [batch_size, seq_len, sum over query
        heads of qk_rank].
    key, value: packed rows, [batch_size, 1, kv_len, width], or rows of codes [batch_size, 1, kv_len, bytes], uint8.
    query_basis, constant_key: of domain `pre`, as in `kernels.parameters.AttentionParameters`.
    key_rotation: of domain `pre`, as in `kernels.reference.grouped_attention`.
    """

    layout: LayerLayout
    shape: AttentionShape
    scaling: float
    query: Tensor
    key: Tensor
    value: Tensor
    query_basis: Tensor | None = None
    key_rotation: tuple[Tensor, Tensor] | None = None
    constant_key: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return self.query.dtype

    @property
    def latents(self) -> tuple[Tensor, Tensor]:
        """The numbers that key and value rows stand for, [batch_size, kv_len, width]."""
        key, value = self.key[:, 0], self.value[:, 0]
        if not self.layout.coded:
            return key, value
        keys = unpack_layer(key, key_columns(self.layout), self.dtype)
        return keys, keys if self.layout.joint else unpack_layer(value, value_columns(self.layout), self.dtype)

    @property
    def batch_size(self) -> int:
        return self.key.shape[0]

    @property
    def kv_len(self) -> int:
        return self.key.shape[2]

    @property
    def seq_len(self) -> int:
        return seq_len_of(self.query)

    @property
    def parameters(self) -> AttentionParameters:
        return AttentionParameters(
            self.layout, self.shape.heads_per_kv, self.scaling, self.query_basis, self.constant_key
        )

    @property
    def mask(self) -> Tensor | None:
        """What a model passes for several queries behind cached keys, [1, 1, seq_len, kv_len], bool; else None.

        The same tensor for all problems alike, as the layers of a model share one.
        """
        if self.seq_len in (1, self.kv_len):
            return None
        return _lower_right(self.seq_len, self.kv_len, self.key.device)

    @property
    def work(self) -> Work:
        """The least bytes and FLOPs of attention over the cache; nothing of the projections."""
        past = self.kv_len - self.seq_len
        return least_work(self.layout, self.shape, self.seq_len, self.batch_size, self.dtype.itemsize, past)


def uncompressed_layout(shape: AttentionShape) -> LayerLayout:
    """Every KV head a group of full width: the cache of the uncompressed model as packed rows."""
    heads = range(shape.num_kv_heads)
    return LayerLayout("none", True, tuple(GroupLayout((h,), shape.head_dim, shape.head_dim) for h in heads))


def compressed_layout(layout: LayerLayout) -> LayerLayout:
    """A layer as the benchmark runs it: `post` is `none`, since its queries come projected."""
    return layout if layout.domain == "pre" else replace(layout, domain="none", folded_keys=True)


def rebuilt_layout(layout: LayerLayout) -> LayerLayout:
    """The same ranks in numbers, with keys compressed before RoPE, as Palu stores them."""
    groups = tuple(replace(group, qk_columns=None, v_columns=None, joint=False) for group in layout.groups)
    return replace(layout, domain="pre", groups=groups, rope_block=1)


def random_problem(
    layout: LayerLayout,
    shape: AttentionShape,
    batch_size: int,
    seq_len: int,
    kv_len: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Problem:
    """Random inputs on the generator's device, with logits of a few units, rounded to dtype."""
    device = generator.device

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype)

    rotation = basis = None
    if layout.domain == "pre":
        rotation = _rotation(kv_len, shape.turned, device)
        query = 2.0 * normal(batch_size, shape.num_heads, seq_len, shape.head_dim).float()
        query = rotate(query, *(table[kv_len - seq_len :] for table in rotation)).to(dtype)
        if layout.turned_in_blocks:
            rotation = block_starts(rotation, layout.rope_block, 0, kv_len)
        basis = normal(layout.group_size * shape.head_dim, layout.qk_width) * layout.groups[0].qk_rank ** -0.5
    else:
        rows = layout.group_size * shape.heads_per_kv
        query = 2.0 * normal(batch_size, seq_len, rows * layout.qk_width)
    key = normal(batch_size, 1, kv_len, layout.qk_width)
    value = key[..., :0] if layout.joint else normal(batch_size, 1, kv_len, layout.v_width)
    problem = Problem(layout, shape, shape.head_dim**-0.5, query, key, value, basis, rotation)
    return _coded(problem) if layout.coded else problem


def paged_rows(problem: Problem, page: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of a problem in permuted pages of `page` keys, which divides its keys.

    Returns:
        Keys and values [num_pages, page, width], and the block table [batch_size, pages of a sequence], int32.
    """
    batch_size, count = problem.batch_size, problem.kv_len // page
    order = torch.randperm(batch_size * count, generator=generator, device=generator.device)
    table = order.view(batch_size, count).to(torch.int32)

    def pages(rows: Tensor) -> Tensor:
        found = torch.empty(batch_size * count, page, rows.shape[-1], dtype=rows.dtype, device=rows.device)
        found[order] = rows[:, 0].reshape(batch_size * count, page, -1)
        return found

    return pages(problem.key), pages(problem.value), table


@lru_cache(maxsize=2)
def _lower_right(seq_len: int, kv_len: int, device: torch.device) -> Tensor:
    every = torch.ones(seq_len, kv_len, dtype=torch.bool, device=device)
    return every.tril(kv_len - seq_len)[None, None]


def copied(problem: Problem) -> Problem:
    """The same problem over a cache of its own."""
    return replace(problem, key=problem.key.clone(), value=problem.value.clone())


def _coded(problem: Problem) -> Problem:
    """The same problem over rows of codes, whose steps are thirds of what a width reaches."""
    layout, shape, dtype = problem.layout, problem.shape, problem.dtype
    keys, values = key_columns(layout), value_columns(layout)
    of_keys, of_values = (_largest_codes(side).to(problem.key.device) / 3 for side in (keys, values))
    query, basis, constant = problem.query, problem.query_basis, None
    if basis is not None:
        basis = (basis / of_keys).to(dtype)
        constant = torch.zeros(shape.num_kv_heads, shape.head_dim, device=query.device)
    else:
        rows = layout.group_size * shape.heads_per_kv
        heads = [part.repeat(rows) for part in of_keys.split([group.qk_rank for group in layout.groups])]
        query = (query / torch.cat(heads)).to(dtype)
    key = pack_layer((problem.key * of_keys).to(dtype), keys)
    value = pack_layer((problem.value * of_values).to(dtype), values)
    return replace(problem, query=query, key=key, value=value, query_basis=basis, constant_key=constant)


def _largest_codes(columns: list[Columns]) -> Tensor:
    """For each column of a layer 2^(bits - 1), or 3 where it holds numbers."""
    parts = [
        torch.full((s.count,), 3.0 if s.bits == 16 else 2.0 ** (s.bits - 1)) for c in columns for s in c.segments()
    ]
    return torch.cat(parts) if parts else torch.empty(0)


def checked_parts(problem: Problem) -> list[tuple[slice, int]]:
    """(query positions, keys that they may see) that are compared with float64: all, or both ends of a prefill."""
    seq_len, kv_len = problem.seq_len, problem.kv_len
    if seq_len <= 2 * CHECKED_QUERIES:
        return [(slice(0, seq_len), kv_len)]
    before = kv_len - seq_len
    return [
        (slice(0, CHECKED_QUERIES), before + CHECKED_QUERIES),
        (slice(seq_len - CHECKED_QUERIES, seq_len), kv_len),
    ]


def checked_sequences(problem: Problem) -> list[int]:
    """The first and the last sequence of the batch."""
    return sorted({0, problem.batch_size - 1})


def checked_output(problem: Problem, output: Tensor) -> Tensor:
    """What of a row's output [batch_size, seq_len, width] is compared, on the CPU in float64."""
    chosen = output[checked_sequences(problem)]
    return torch.cat([chosen[:, part] for part, _ in checked_parts(problem)], dim=1).cpu().double()


def truth(problem: Problem) -> Tensor:
    """The float64 value of `checked_output`."""
    chosen, pre = checked_sequences(problem), problem.layout.domain == "pre"
    key, value = problem.latents
    found = []
    for part, kv_end in checked_parts(problem):
        query = problem.query[chosen][:, :, part] if pre else problem.query[chosen][:, part]
        count = query.shape[2] if pre else query.shape[1]
        output, _ = ragged_attention(
            query,
            key[chosen],
            value[chosen],
            problem.layout,
            problem.shape.heads_per_kv,
            problem.scaling,
            [Sequence(count, 0, kv_end)] * len(chosen),
            problem.query_basis,
            problem.key_rotation,
        )
        found.append(output)
    return torch.cat(found, dim=1)


def _rotation(length: int, rotary_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [length, rotary_dim], float32, as the kernels and the models' own tables have them."""
    frequency = ROPE_THETA ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * torch.cat([frequency, frequency])
    return angle.cos().float().to(device), angle.sin().float().to(device)
