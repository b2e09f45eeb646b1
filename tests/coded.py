"""Random layers that keep rows of codes, and the same as latents in floats, for the tests of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ragged import RaggedCase, random_case
from torch import Tensor

from rotor.format.columns import Columns
from rotor.format.layout import Domain, GroupLayout, LayerLayout
from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.rows import key_columns, pack_layer, unpack_layer, value_columns

MIXTURES = [
    Columns(n16=8, n8=8, n4=16, n2=16),
    Columns(n16=2),
    Columns(n8=12),
    Columns(n4=40),
    Columns(n2=48),
    Columns(n16=4, n2=16),
    Columns(n8=4, n4=8),
    Columns(n16=16, n8=16, n4=32, n2=64),
]
"""Every width alone and in company, segments of one word and of several, of three words too."""


def coded_layer(
    domain: Domain, group_size: int, *columns: tuple[Columns, Columns | None], rope_block: int = 1
) -> LayerLayout:
    """A layout with one group for each pair of key and value columns, in the order given; without the latter, joint."""
    groups = tuple(
        GroupLayout.coded(tuple(range(i * group_size, (i + 1) * group_size)), qk, v)
        for i, (qk, v) in enumerate(columns)
    )
    return LayerLayout(domain, domain != "post" and rope_block == 1, groups, rope_block)


def steps_of(columns: list[Columns]) -> Tensor:
    """A code step for each column of a layer: standard normal numbers then use the width, and few are clamped."""
    steps = [
        2.0 ** (s.bits - 1) / 3 if s.bits < 16 else 1.0 for c in columns for s in c.segments() for _ in range(s.count)
    ]
    return torch.tensor(steps)


@dataclass
class CodedCase:
    """Inputs of attention over rows of codes: as `RaggedCase`, and key and value as rows of bytes.

    constant_key: [num_kv_heads, head_dim], in domain `pre`.
    """

    layout: LayerLayout
    floats: RaggedCase
    key: Tensor
    value: Tensor
    query: Tensor
    query_basis: Tensor | None
    constant_key: Tensor | None

    def parameters(self, softcap: float | None = None) -> AttentionParameters:
        floats = self.floats
        return AttentionParameters(
            self.layout, floats.heads_per_kv, floats.scaling, self.query_basis, self.constant_key, softcap
        )

    def to(self, device: str) -> CodedCase:
        moved = [None if x is None else x.to(device) for x in (self.key, self.value, self.query)]
        rest = [None if x is None else x.to(device) for x in (self.query_basis, self.constant_key)]
        return CodedCase(self.layout, self.floats.to(device, self.query.dtype), *moved, *rest)  # type: ignore[arg-type]


def random_coded_case(
    layout: LayerLayout,
    heads_per_kv: int,
    head_dim: int,
    batch_size: int,
    seq_len: int,
    kv_len: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> CodedCase:
    """Random codes with logits of a few units.

    `floats` is the same problem for attention over latents: in domain `pre` each group has two columns more, the first
    of which holds ones and the constant key as its basis.
    """
    size, keys, values = layout.group_size, key_columns(layout), value_columns(layout)
    extra = 2 if layout.domain == "pre" else 0
    plain = LayerLayout(
        layout.domain,
        layout.folded_keys,
        tuple(GroupLayout(group.kv_heads, group.qk_rank + extra, group.v_rank) for group in layout.groups),
        layout.rope_block,
    )
    case = random_case(plain, heads_per_kv, head_dim, batch_size, seq_len, kv_len, seed)
    steps, generator = steps_of(keys), torch.Generator().manual_seed(seed + 1)
    query, basis, constant = case.query.to(dtype), None, None
    if layout.domain == "none":
        heads = [steps[a : a + g.qk_rank].repeat(size * heads_per_kv)
                 for g, (a, _) in zip(layout.groups, layout.offsets(), strict=True)]  # fmt: skip
        query = (case.query / torch.cat(heads)).to(dtype)
    else:
        basis = torch.randn(size * head_dim, layout.qk_width, generator=generator) * layout.groups[0].qk_rank ** -0.5
        basis = (basis / steps).to(dtype)
    if layout.domain == "pre":
        constant = torch.randn(len(layout.groups) * size, head_dim, generator=generator)
    key = torch.randn(batch_size, kv_len, layout.qk_width, generator=generator) * steps
    value = torch.randn(batch_size, kv_len, len(steps_of(values)), generator=generator) * steps_of(values)
    key_rows, value_rows = pack_layer(key.to(dtype), keys), pack_layer(value.to(dtype), values)

    latents, bases = [], []
    numbers = unpack_layer(key_rows, keys, dtype)
    for index, (group, (offset, _)) in enumerate(zip(layout.groups, layout.offsets(), strict=True)):
        latents.append(numbers[..., offset : offset + group.qk_rank])
        if basis is not None:
            bases.append(basis[:, offset : offset + group.qk_rank])
        if constant is not None:
            latents.append(torch.tensor([1.0, 0.0], dtype=dtype).expand(batch_size, kv_len, 2))
            column = constant[index * size : (index + 1) * size].reshape(-1, 1).to(dtype)
            bases += [column, torch.zeros_like(column)]
    floats = RaggedCase(
        plain,
        heads_per_kv,
        head_dim,
        query,
        torch.cat(latents, -1),
        numbers if layout.joint else unpack_layer(value_rows, values, dtype),
        torch.cat(bases, -1) if bases else None,
        case.key_rotation,
    )
    return CodedCase(layout, floats, key_rows, value_rows, query, basis, constant)
