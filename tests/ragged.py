"""Random compressed layers, caches and pages for the tests of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotor.format.layout import Domain, GroupLayout, LayerLayout
from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.reference import rotate


def layer(domain: Domain, group_size: int, *ranks: tuple[int, int], rope_block: int = 1) -> LayerLayout:
    """A layout with one group for each (qk_rank, v_rank), in the order given."""
    groups = tuple(
        GroupLayout(tuple(range(i * group_size, (i + 1) * group_size)), qk, v) for i, (qk, v) in enumerate(ranks)
    )
    return LayerLayout(domain, domain == "none", groups, rope_block)


def rotation_table(length: int, head_dim: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim] in float32, times the attention factor of some scaled RoPEs."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * torch.cat([frequency, frequency])
    return (factor * angle.cos()).float(), (factor * angle.sin()).float()


@dataclass
class RaggedCase:
    """Inputs of attention over a layer: packed rows, queries at the end of each sequence, a basis, a rotation."""

    layout: LayerLayout
    heads_per_kv: int
    head_dim: int
    query: Tensor
    key: Tensor
    value: Tensor
    query_basis: Tensor | None
    key_rotation: tuple[Tensor, Tensor] | None
    constant_key: None = None

    @property
    def floats(self) -> RaggedCase:
        """The case whose rows are numbers: itself."""
        return self

    @property
    def scaling(self) -> float:
        return self.head_dim**-0.5

    def parameters(self, softcap: float | None = None) -> AttentionParameters:
        return AttentionParameters(
            self.layout, self.heads_per_kv, self.scaling, self.query_basis, constant_key=None, softcap=softcap
        )

    def to(self, device: str, dtype: torch.dtype) -> RaggedCase:
        """Rounded to dtype; the rotation stays in float32."""

        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, dtype)

        rotation = None if self.key_rotation is None else tuple(t.to(device) for t in self.key_rotation)
        return RaggedCase(
            self.layout,
            self.heads_per_kv,
            self.head_dim,
            *(move(x) for x in (self.query, self.key, self.value, self.query_basis)),  # type: ignore[arg-type]
            rotation,  # type: ignore[arg-type]
        )


def random_case(
    layout: LayerLayout,
    heads_per_kv: int,
    head_dim: int,
    batch_size: int,
    seq_len: int,
    kv_len: int,
    seed: int = 0,
    factor: float = 1.0,
) -> RaggedCase:
    """Random float32 inputs with logits of a few units; queries of `pre` are rotated by their places at the end."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    num_heads = len(layout.groups) * layout.group_size * heads_per_kv
    rotation = None
    if layout.domain == "none":
        query = 2.0 * normal(batch_size, seq_len, layout.group_size * heads_per_kv * layout.qk_width)
    else:
        query = 2.0 * normal(batch_size, num_heads, seq_len, head_dim)
    if layout.domain == "pre":
        rotation = rotation_table(kv_len, head_dim, factor)
        query = rotate(query, *(table[kv_len - seq_len :] for table in rotation))
        place = torch.arange(kv_len)
        rotation = tuple(table[place - place % layout.rope_block] for table in rotation)  # stepped
    basis = None
    if layout.domain != "none":
        basis = normal(layout.group_size * head_dim, layout.qk_width) * layout.groups[0].qk_rank ** -0.5
    return RaggedCase(
        layout,
        heads_per_kv,
        head_dim,
        query,
        normal(batch_size, kv_len, layout.qk_width),
        normal(batch_size, kv_len, layout.v_width),
        basis,
        rotation,
    )


def paged(rows: Tensor, page_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """[batch_size, kv_len, width] scattered over permuted pages, every unused element NaN, of bytes 255.

    Returns:
        [num_pages, page_size, width] and the block table [batch_size, pages of a sequence], int32.
    """
    batch_size, kv_len, width = rows.shape
    count = -(-kv_len // page_size)
    order = torch.randperm(batch_size * count + 3, generator=generator)[: batch_size * count]
    table = order.view(batch_size, count).to(rows.device, torch.int32)
    poison = 255 if rows.dtype == torch.uint8 else torch.nan
    pages = torch.full((batch_size * count + 3, page_size, width), poison, dtype=rows.dtype, device=rows.device)
    padded = torch.full((batch_size, count * page_size, width), poison, dtype=rows.dtype, device=rows.device)
    padded[:, :kv_len] = rows
    pages[table.long()] = padded.unflatten(1, (count, page_size))
    return pages, table
