"""What the benchmark's rows compute: attention of one layer on random inputs, and its value in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..format.channels import Numbers
from ..format.layout import AttentionShape, GroupLayout, LayerLayout, pre_rope
from ..kernels.parameters import AttentionParameters, seq_len_of
from ..kernels.rotary import rotate
from . import truth as float64

ROPE_THETA = 10000.0
CHECKED_QUERIES = 32
"""Query positions at either end of a prefill that are compared; each needs logits against all keys in float64."""


@dataclass(frozen=True)
class Problem:
    """Attention of a layer: every sequence attends to all kv_len keys, its last seq_len queries causally.

    query: [batch_size, num_heads, seq_len, head_dim], rotated; in a model without RoPE [batch_size, seq_len, sum over
        query heads of width].
    key, value: rows, [batch_size, 1, kv_len, bytes] uint8, or of numbers [batch_size, 1, kv_len, width].
    query_basis, key_constant: as in `kernels.parameters.AttentionParameters`.
    rotation: of layers in blocks: cos and sin by index, [kv_len, rotary_dim], float32.
    """

    layout: LayerLayout
    shape: AttentionShape
    scaling: float
    query: Tensor
    key: Tensor
    value: Tensor
    query_basis: Tensor | None = None
    key_constant: Tensor | None = None
    rotation: tuple[Tensor, Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return self.query.dtype

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
        return AttentionParameters(self.layout, self.shape, self.scaling, self.query_basis, self.key_constant)

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


@dataclass(frozen=True)
class Work:
    """The least that attention reads and multiplies, whatever computes it: what measured times are compared with."""

    cache_bytes: float
    flops: float

    def seconds(self, bandwidth_bytes_per_s: float, matmul_flops_per_s: float) -> float:
        return max(self.cache_bytes / bandwidth_bytes_per_s, self.flops / matmul_flops_per_s)


def least_work(
    layout: LayerLayout, shape: AttentionShape, seq_len: int, batch_size: int, element_bytes: int = 2, past: int = 0
) -> Work:
    """Attention of a layer over new tokens: the cache once, and products of each query with the keys up to its own.

    Keys whose planes are all fast are counted as rebuilt once; projections are not counted.

    Args:
        seq_len: new tokens of a sequence. past: cached ones before them.
    """
    pairs = batch_size * (seq_len * (seq_len + 1) / 2 + seq_len * past)
    tokens = batch_size * (seq_len + past)
    rebuilt = bool(shape.rotary_dim) and layout.fast_planes == shape.rotary_planes
    flops = 0.0
    for group in layout.groups:
        heads, width = len(group.kv_heads), shape.head_dim if rebuilt else group.key.width
        flops += 2 * heads * shape.heads_per_kv * (width + group.values.width) * pairs
        flops += 2 * heads * group.key.width * shape.head_dim * tokens if rebuilt else 0
    return Work(tokens * float(sum(layout.row_bytes(element_bytes))), flops)


def uncompressed_layout(shape: AttentionShape) -> LayerLayout:
    """Every KV head a group of full width: the cache of the uncompressed model as rows of numbers.

    Of a model without RoPE (`without_rope`): what the cache holds is what queries meet.
    """
    width = Numbers(shape.head_dim)
    return LayerLayout(tuple(GroupLayout((head,), width, width) for head in range(shape.num_kv_heads)))


def without_rope(shape: AttentionShape) -> AttentionShape:
    return replace(shape, rotary_dim=0)


def rebuilt_layout(layout: LayerLayout, shape: AttentionShape) -> LayerLayout:
    """The same ranks in numbers, with keys compressed before RoPE, as Palu stores them."""
    groups = tuple(replace(g, key=Numbers(g.key.rank), value=Numbers(g.values.rank)) for g in layout.groups)
    return LayerLayout(groups, *pre_rope(shape))


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

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(size, generator=generator, device=device, dtype=torch.float32)

    rotation = basis = constant = None
    if shape.rotary_dim:
        rotation = _rotation(kv_len, shape.rotary_dim, device)
        query = normal(batch_size, shape.num_heads, seq_len, shape.head_dim, scale=2.0)
        query = rotate(query, *(table[kv_len - seq_len :] for table in rotation))
        step = 4.6 if layout.coded else 1.0  # the size of a random signed nibble
        width = max(group.key.width for group in layout.groups)
        basis = normal(layout.group_size * shape.head_dim, layout.key_width, scale=width**-0.5 / step).to(dtype)
        if layout.coded:
            constant = normal(shape.num_kv_heads, shape.head_dim, scale=0.5)
    else:
        query = normal(batch_size, seq_len, layout.group_size * shape.heads_per_kv * layout.key_width, scale=2.0)
    rows = []
    for size, width in zip(layout.row_bytes(dtype.itemsize), (layout.key_width, layout.value_width), strict=True):
        if layout.coded:
            own = (batch_size, 1, kv_len, size)
            rows.append(torch.randint(256, own, generator=generator, device=device, dtype=torch.uint8))
        else:
            rows.append(normal(batch_size, 1, kv_len, width if size else 0).to(dtype))
    rotation = rotation if layout.in_blocks else None
    scaling, (key, value) = shape.head_dim**-0.5, rows
    return Problem(layout, shape, scaling, query.to(dtype), key, value, basis, constant, rotation)


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
    chosen, absorbed = checked_sequences(problem), problem.query.dim() == 3

    def moved(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.cpu()

    parameters = replace(
        problem.parameters, query_basis=moved(problem.query_basis), key_constant=moved(problem.key_constant)
    )
    rotation = None if problem.rotation is None else (problem.rotation[0].cpu(), problem.rotation[1].cpu())
    found = []
    for part, kv_end in checked_parts(problem):
        query = (problem.query[chosen][:, part] if absorbed else problem.query[chosen][:, :, part]).cpu()
        count = query.shape[1 if absorbed else 2]
        allowed = torch.ones(count, kv_end, dtype=torch.bool).tril(kv_end - count).expand(len(chosen), -1, -1)
        key, value = (side[chosen, 0, :kv_end].cpu() for side in (problem.key, problem.value))
        found.append(float64.attention(query, key, value, parameters, allowed, rotation)[0])
    return torch.cat(found, dim=1)


def _rotation(length: int, rotary_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [length, rotary_dim], float32, as the kernels and the models' own tables have them."""
    frequency = ROPE_THETA ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * torch.cat([frequency, frequency])
    return angle.cos().float().to(device), angle.sin().float().to(device)
