"""The rotation kernel in Triton's interpreter against RoPE and projection in PyTorch, in float32."""

from __future__ import annotations

import pytest
import torch
from ragged import layer, rotation_table

from rotor.kernels.projection.rotation import rotate_and_project
from rotor.kernels.reference import project_keys, rotate


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


def test_a_shift_is_added_to_keys_alone() -> None:
    layout = layer("post", 2, (40, 8), (24, 8))
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 5, 8, 16, generator=generator)
    key = torch.randn(2, 5, 4, 16, generator=generator)
    basis, key_basis = torch.randn(2, 32, 64, generator=generator)
    shift = 100 * torch.randn(64, generator=generator)
    cos, sin = (table[None] for table in rotation_table(5, 16))
    plain = rotate_and_project(query, key, cos, sin, layout, 2, basis, key_basis)
    shifted = rotate_and_project(query, key, cos, sin, layout, 2, basis, key_basis, shift)
    assert torch.equal(shifted[0], plain[0])
    torch.testing.assert_close(shifted[1], plain[1] + shift)


def test_one_table_for_all_sequences() -> None:
    layout = layer("post", 1, (16, 8))
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 4, 5, 1, 16, generator=generator)
    basis = torch.eye(16)
    cos, sin = (table[None] for table in rotation_table(5, 16))
    got = rotate_and_project(query, key, cos, sin, layout, 1, basis, basis)
    for rows, source in zip(got, (query, key), strict=True):
        torch.testing.assert_close(rows, rotate(source[:, :, 0], cos, sin), atol=1e-5, rtol=1e-5)
