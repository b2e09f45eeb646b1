"""The rotation kernel in Triton's interpreter against RoPE and projection in PyTorch, in float32."""

from __future__ import annotations

import pytest
import torch
from coded import coded_layer, steps_of
from ragged import layer, rotation_table

from rotor.format.columns import Columns
from rotor.format.layout import LayerLayout
from rotor.kernels.projection.coded import rotate_and_pack
from rotor.kernels.projection.rotation import rotate_and_project
from rotor.kernels.reference import project_keys, rotate
from rotor.kernels.rows import key_columns, pack_layer, unpack_layer, value_columns


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 13)], ids=str)
@pytest.mark.parametrize("group", [(1, 1, 16), (1, 3, 24), (2, 2, 16), (4, 1, 16)], ids=str)
def test_equals_rotation_and_projection(group, shape) -> None:
    (size, heads_per_kv, head_dim), (batch_size, seq_len) = group, shape
    layout = layer("post", size, (40, 8), (24, 8), (16, 8))
    generator = torch.Generator().manual_seed(0)
    kv_heads = 3 * size
    query = torch.randn(batch_size, seq_len, kv_heads * heads_per_kv, head_dim, generator=generator)
    key = torch.randn(batch_size, seq_len, kv_heads, head_dim, generator=generator)
    query_basis, key_basis = torch.randn(2, size * head_dim, layout.qk_width, generator=generator)
    tables = rotation_table(50, head_dim)
    positions = torch.randint(0, 50, (batch_size, seq_len), generator=generator)
    cos, sin = (table[positions] for table in tables)
    got_query, got_key = rotate_and_project(query, key, cos, sin, layout, heads_per_kv, query_basis, key_basis)

    turned = rotate(query, cos.unsqueeze(2), sin.unsqueeze(2))
    turned_key = rotate(key, cos.unsqueeze(2), sin.unsqueeze(2)).transpose(1, 2)
    torch.testing.assert_close(got_key, project_keys(turned_key, key_basis, layout)[:, 0], atol=2e-5, rtol=1e-5)
    expected = []
    for g, (group_layout, (offset, _)) in enumerate(zip(layout.groups, layout.offsets(), strict=True)):
        for row in range(size * heads_per_kv):
            first = row // heads_per_kv * head_dim
            block = query_basis[first : first + head_dim, offset : offset + group_layout.qk_rank]
            expected.append(turned[:, :, g * size * heads_per_kv + row] @ block)
    torch.testing.assert_close(got_query, torch.cat(expected, -1), atol=2e-5, rtol=1e-5)


def coded_layout(size: int) -> LayerLayout:
    """All widths in keys and values, and a segment of more columns than one program makes."""
    wide, few = Columns(n16=8, n8=8, n4=16, n2=16), Columns(n16=2)
    return coded_layer("post", size, (wide, few), (Columns(n4=72), Columns(n2=160)), (few, wide))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 13)], ids=str)
@pytest.mark.parametrize("group", [(1, 1), (1, 3), (2, 2)], ids=str)
def test_rows_of_codes_are_those_of_the_latents(group, shape, dtype) -> None:
    """Every code is the floor of its latent in float64, or of one within the error of `dtype`."""
    (size, heads_per_kv), (batch_size, seq_len), head_dim = group, shape, 16
    layout = coded_layout(size)
    generator = torch.Generator().manual_seed(0)

    def random(*of: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*of, generator=generator)).to(dtype)

    query = random(batch_size, seq_len, 3 * size * heads_per_kv, head_dim)
    key = random(batch_size, seq_len, 3 * size, head_dim)
    steps = steps_of(key_columns(layout)), steps_of(value_columns(layout))
    bases = random(2, size * head_dim, layout.qk_width, scale=(size * head_dim) ** -0.5)
    bases[1] *= steps[0].to(dtype)
    value = random(batch_size, seq_len, layout.v_width) * steps[1].to(dtype)
    shift = 0.3 * torch.randn(layout.qk_width, generator=generator) * steps[0]
    cos, sin = (table[: seq_len + 3][None, 3:].to(dtype) for table in rotation_table(50, head_dim))
    got, *rows = rotate_and_pack(query, key, value, cos, sin, layout, heads_per_kv, *bases, shift)

    plain, _ = rotate_and_project(query, key, cos, sin, layout, heads_per_kv, *bases)
    assert torch.equal(got, plain)
    assert torch.equal(rows[1], pack_layer(value, value_columns(layout)))
    turned = rotate(key.double(), cos.double().unsqueeze(2), sin.double().unsqueeze(2)).transpose(1, 2)
    exact = project_keys(turned, bases[1].double(), layout)[:, 0] + shift.double()
    error = steps[0].double() * (2e-5 if dtype == torch.float32 else 6e-3)
    columns = key_columns(layout)
    codes = unpack_layer(rows[0], columns, dtype).double()
    low, high = (
        unpack_layer(pack_layer((exact + d).float(), columns), columns, torch.float32).double() for d in (-error, error)
    )
    assert ((low - error <= codes) & (codes <= high + error)).all()
    whole = torch.tensor([s.bits < 16 for c in columns for s in c.segments() for _ in range(s.count)])
    assert torch.equal(codes[..., whole], codes[..., whole].round())
    if dtype == torch.float32:
        assert (low == high)[..., whole].double().mean() > 0.98  # so nearly every code is one and no other


def test_one_table_for_all_sequences() -> None:
    layout = layer("post", 1, (16, 8))
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 4, 5, 1, 16, generator=generator)
    basis = torch.eye(16)
    cos, sin = (table[None] for table in rotation_table(5, 16))
    got = rotate_and_project(query, key, cos, sin, layout, 1, basis, basis)
    for rows, source in zip(got, (query, key), strict=True):
        torch.testing.assert_close(rows, rotate(source[:, :, 0], cos, sin), atol=1e-5, rtol=1e-5)
