"""Attention over pages in plain PyTorch, against the same rows in one piece; unused bytes are poisoned."""

from __future__ import annotations

import pytest
import torch
from random_layers import LAYERS, random_tensors, rotation_table
from torch import Tensor

from rotor.format.layout import AttentionShape, LayerLayout
from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.reference import attention
from rotor.kernels.rotary import Rotation, when_read
from rotor.kernels.rows import pack_layer
from rotor.plugins.vllm.pages import PagedLayer
from rotor.plugins.vllm.shards import shard_of

BATCH, KV_LEN, PAGE = 3, 150, 16
GENERATOR = torch.Generator().manual_seed(1)


def rows_of(layout: LayerLayout) -> tuple[Tensor, Tensor]:
    """Random rows of keys and values, [batch, kv_len, *]."""
    latents = (
        torch.randn(BATCH, KV_LEN, rank, generator=GENERATOR, dtype=torch.float64) * 4
        for rank in (layout.key_rank, layout.value_rank)
    )
    key, value = (pack_layer(own, layout, keys) for own, keys in zip(latents, (True, False), strict=True))
    return key, key if layout.joint else value


def in_pages(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in pages that are not in order, and the table of these; the rest holds the largest byte, or NaN."""
    pages = -(-KV_LEN // PAGE)
    poison = 255 if rows.dtype == torch.uint8 else torch.nan
    cache = torch.full((BATCH * pages + 1, PAGE, rows.shape[-1]), poison, dtype=rows.dtype)
    table = torch.randperm(BATCH * pages, generator=torch.Generator().manual_seed(2)).view(BATCH, pages)
    for sequence in range(BATCH):
        for place in range(KV_LEN):
            cache[table[sequence, place // PAGE], place % PAGE] = rows[sequence, place]
    return cache, table.int()


def parameters_of(layout: LayerLayout, shape: AttentionShape, softcap: float | None = None) -> AttentionParameters:
    tensors = random_tensors(layout, shape)
    return AttentionParameters(layout, shape, 0.25, tensors.get("query_basis"), tensors.get("key_constant"), softcap)


def queries(layout: LayerLayout, shape: AttentionShape, seq_len: int) -> Tensor:
    heads = shape.num_heads // len(layout.groups)
    absorbed = BATCH, seq_len, heads * layout.key_width
    sizes = (BATCH, shape.num_heads, seq_len, shape.head_dim) if shape.rotary_dim else absorbed
    return torch.randn(sizes, generator=GENERATOR, dtype=torch.float64)


def layer_of(parameters: AttentionParameters, rotation: Rotation | None, window: int | None) -> PagedLayer:
    shard = shard_of(parameters.layout, parameters.shape, "", 0, 1)
    return PagedLayer(shard, torch.float64, parameters, None, None, rotation, window, None)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("seq_len", [1, 37])
@pytest.mark.parametrize("window", [None, 20])
def test_pages_give_what_rows_in_one_piece_give(name: str, seq_len: int, window: int | None) -> None:
    layout, shape = LAYERS[name]
    key, value = rows_of(layout)
    query = queries(layout, shape, seq_len)
    rotation = rotation_table(KV_LEN, shape.rotary_dim, 1.25) if layout.in_blocks else None
    index = torch.arange(KV_LEN)
    position = index[-seq_len:, None]
    mask = (index <= position) & (index > position - (window or KV_LEN))
    of_keys = None if rotation is None else when_read(rotation, layout.form)
    (pages, table), (value_pages, _) = in_pages(key), in_pages(value)
    for softcap in (None, 3.0):
        parameters = parameters_of(layout, shape, softcap)
        expected = attention(query, key[:, None], value[:, None], parameters, of_keys, mask[None, None])
        lengths = torch.full((BATCH,), KV_LEN)
        packed = query.transpose(1, 2) if shape.rotary_dim else query
        layer = layer_of(parameters, rotation, window)
        got = layer.attend_alike(packed, (pages, value_pages), table, lengths, KV_LEN)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9 if softcap is None else 1e-4)


@pytest.mark.parametrize("name", ["joint, T 8, F 3", "numbers, post"])
@pytest.mark.parametrize("window", [None, 20])
def test_sequences_of_a_batch_may_differ_in_length(name: str, window: int | None) -> None:
    """Each as if alone, whatever is known to the host of the longest, and whatever lies in their pages behind them."""
    layout, shape = LAYERS[name]
    key, value = rows_of(layout)
    (pages, table), (value_pages, _) = in_pages(key), in_pages(value)
    query, parameters = queries(layout, shape, 1), parameters_of(layout, shape)
    rotation = rotation_table(KV_LEN, shape.rotary_dim) if layout.in_blocks else None
    lengths, layer = torch.tensor([3, 97, KV_LEN]), layer_of(parameters, rotation, window)

    def attended(rows: slice, longest: int) -> Tensor:
        own = query[rows].transpose(1, 2)
        return layer.attend_alike(own, (pages, value_pages), table[rows], lengths[rows], longest)

    together = attended(slice(None), KV_LEN)
    assert together.isfinite().all()
    for i, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(together[i : i + 1], attended(slice(i, i + 1), length), rtol=1e-9, atol=1e-9)
