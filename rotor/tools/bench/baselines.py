"""Caches in use that a compressed one is measured beside, in a decode step: of 16 bits, of 8 bits (e4m3, as servers
keep an fp8 cache), and of 4 bits in groups (as KIVI's and KVQuant's are kept, without their outliers).

At 8 bits keys and values have a scale each. At 4 bits a token and head has two groups of half a head, each with a scale
and an offset of 16 bits: the low nibbles of its bytes and the high ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Call = Callable[[], Tensor]
"""Function that is timed; gives the attention of all queries."""

BASELINES = {16: "16 bits, flash-decoding", 8: "fp8 (e4m3), one scale", 4: "4 bits, two scales a token and head"}
"""Names of the caches, by the bits of a number."""

FP8_CAPABILITY = 89
"""Least compute capability that Triton compiles e4m3 for."""


@dataclass(frozen=True)
class Baseline:
    """A decode step of an uncompressed model, sequences of any lengths behind each other.

    query: [sequences, heads, head_dim]. key, value: [kv_heads, tokens, head_dim], at 4 bits [.., head_dim // 2], uint8.
    key_scale, value_scale: at 8 bits one number each, at 4 bits [kv_heads, tokens, 4].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    lengths: tuple[int, ...]
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def cache_bytes(self) -> int:
        held = (self.key, self.value, self.key_scale, self.value_scale)
        return sum(part.nbytes for part in held if part is not None)

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values, [kv_heads, tokens, head_dim]."""
        return _read(self.key, self.key_scale, dtype), _read(self.value, self.value_scale, dtype)

    def unrounded(self) -> Tensor:
        """[sequences, heads, head_dim], in float64."""
        key, value = self.read(torch.float64)
        per_head, start, found = self.query.shape[1] // len(key), 0, []
        for query, length in zip(self.query.double(), self.lengths, strict=True):
            own = slice(start, start + length)
            logits = query.unflatten(0, (-1, per_head)) @ key[:, own].mT * query.shape[-1] ** -0.5
            found.append((logits.softmax(-1) @ value[:, own]).flatten(0, 1))
            start += length
        return torch.stack(found)


def _read(rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scales is None:
        return rows.to(dtype)
    if not scales.dim():
        return rows.to(dtype) * scales.to(dtype)
    low, high = ((rows >> shift & 15).to(dtype) for shift in (0, 4))
    s0, z0, s1, z1 = scales.to(dtype).unsqueeze(-1).unbind(-2)
    return torch.cat([low * s0 + z0, high * s1 + z1], dim=-1)


def random_baseline(
    sizes: tuple[int, int, int], lengths: list[int], bits: int, dtype: torch.dtype, generator: torch.Generator
) -> Baseline:
    """sizes: query heads, KV heads, numbers of a head. bits: 16, 8 or 4, of a number of the cache."""
    (heads, kv_heads, head_dim), device, tokens = sizes, generator.device, sum(lengths)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    query = normal(len(lengths), heads, head_dim)
    if bits > 4:
        key, value = (normal(kv_heads, tokens, head_dim) for _ in range(2))
        if bits == 16:
            return Baseline(query, key, value, tuple(lengths))
        factors = [side.abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max for side in (key, value)]
        key, value = ((x / f).to(torch.float8_e4m3fn) for x, f in zip((key, value), factors, strict=True))
        return Baseline(query, key, value, tuple(lengths), *factors)
    size = kv_heads, tokens, head_dim // 2
    key, value = (torch.randint(256, size, generator=generator, device=device, dtype=torch.uint8) for _ in range(2))
    scales = [(0.2 + 0.05 * normal(kv_heads, tokens, 4)) for _ in range(2)]
    for each in scales:
        each[..., 1::2] *= -7.5
    return Baseline(query, key, value, tuple(lengths), *scales)


def widened(problem: Baseline) -> Call:
    """[sequences, heads, head_dim], without a kernel that reads such a cache: it is widened whole, then SDPA attends.

    Sequences are of one length.
    """
    query, sequences = problem.query, len(problem.lengths)

    def call() -> Tensor:
        key, value = (side.unflatten(1, (sequences, -1)).transpose(0, 1) for side in problem.read(query.dtype))
        of_heads = query.unflatten(1, (len(problem.key), -1))  # query heads that share keys as rows of one query
        return functional.scaled_dot_product_attention(of_heads, key, value).flatten(1, 2)

    return call
