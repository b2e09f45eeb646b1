"""Attention over pages in plain PyTorch, against the same rows in one piece; unused bytes are poisoned."""

from __future__ import annotations

import pytest
import torch
from support.random_layers import LAYERS, random_tensors, rotation_table, row_scale_of
from torch import Tensor

from rotor.kernels.parameters import AttentionParameters, pack_layer
from rotor.kernels.reference.attention import attention
from rotor.kernels.rotary import when_read
from rotor.vllm.pages import PagedLayer
from rotor.vllm.shards import shard_of

KV_LEN, PAGE = 150, 16


def in_pages(rows: Tensor, table: Tensor) -> Tensor:
    """Rows [kv_len, *] in the pages of a table; the rest holds the largest byte, or NaN."""
    poison = 255 if rows.dtype == torch.uint8 else torch.nan
    cache = torch.full((len(table) + 1, PAGE, rows.shape[-1]), poison, dtype=rows.dtype)
    for place in range(KV_LEN):
        cache[table[place // PAGE], place % PAGE] = rows[place]
    return cache


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("seq_len", [1, 37])
@pytest.mark.parametrize("window", [None, 20])
def test_pages_give_what_rows_in_one_piece_give(name: str, seq_len: int, window: int | None) -> None:
    layout, shape = LAYERS[name]
    generator = torch.Generator().manual_seed(1)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    tensors = random_tensors(layout, shape)
    key = pack_layer(4 * normal(KV_LEN, layout.key_rank), layout, True, row_scale_of(tensors))
    value = key if layout.joint else pack_layer(4 * normal(KV_LEN, layout.value_rank), layout, False)
    heads = shape.num_heads // len(layout.groups)
    sizes = (shape.num_heads, shape.head_dim) if shape.rotary_dim else (heads * layout.key_width,)
    query = normal(seq_len, *sizes)
    rotation = rotation_table(KV_LEN, shape.rotary_dim, 1.25) if layout.in_blocks else None
    index = torch.arange(KV_LEN)
    position = index[-seq_len:, None]
    mask = (index <= position) & (index > position - (window or KV_LEN))
    of_keys = None if rotation is None else when_read(rotation, layout.form)
    table = torch.randperm(-(-KV_LEN // PAGE), generator=generator).int()
    for softcap in (None, 3.0):
        parameters = AttentionParameters(
            layout, shape, 0.25, tensors.get("query_basis"), tensors.get("key_constant"), softcap
        )
        together = query.transpose(0, 1) if shape.rotary_dim else query
        expected = attention(together[None], key[None, None], value[None, None], parameters, of_keys, mask[None, None])
        shard = shard_of(layout, shape, "", 0, 1)
        layer = PagedLayer(shard, torch.float64, parameters, rotation, window, None)
        got = layer.attend_sequence(query, (in_pages(key, table), in_pages(value, table)), table, KV_LEN)
        torch.testing.assert_close(got, expected[0], rtol=1e-9, atol=1e-9 if softcap is None else 1e-4)
