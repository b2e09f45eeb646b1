"""Steps of a serving engine over pages of a layer with exact tokens, in Triton's interpreter and in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.quick import mostly_nightly
from support.random_layers import LAYERS, random_tensors, rotation_table, row_scale_of

from rotor.checkpoint.layout import ExactTokens
from rotor.kernels.dispatch import default_layer
from rotor.kernels.parameters import AttentionParameters
from rotor.vllm.pages import ExactPages, PagedLayer, StepRequests
from rotor.vllm.shards import shard_of

PAGE, LENGTHS = 16, [70, 21, 5]
BASES = ("key_basis", "key_shift", "value_basis", "value_shift", "output_basis", "value_constant")


@pytest.mark.parametrize("most_decoded", mostly_nightly([1, 2], lambda count: count == 2))
@pytest.mark.parametrize(
    "name", mostly_nightly(["joint, T 8", "joint, T 64", "numbers, post"], lambda name: name == "joint, T 8")
)
def test_both_read_exact_tokens_in_pages(name: str, most_decoded: int) -> None:
    """Sequences longer than the newest tokens, and shorter; what belongs to no token is poisoned."""
    layout, shape = LAYERS[name]
    layout = replace(layout, exact=ExactTokens(3, 20))
    generator = torch.Generator().manual_seed(0)
    own = random_tensors(layout, shape, dtype=torch.float32)
    parameters = AttentionParameters(
        layout, shape, 0.25, own.get("query_basis"), own.get("key_constant"), None, *map(own.get, BASES)
    )
    parameters = replace(parameters, scale=row_scale_of(own) if layout.scaled else None)
    rotation = rotation_table(max(LENGTHS), shape.rotary_dim, 1.0) if layout.in_blocks else None
    shard = shard_of(layout, shape, "", 0, 1)
    plain = PagedLayer(shard, torch.float32, parameters, rotation, None, None)
    kernels = replace(plain, kernels=default_layer(layout))

    counts = [-(-length // PAGE) for length in LENGTHS]
    order = 1 + torch.randperm(sum(counts), generator=generator)  # page 0 is empty
    table = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int32)
    for request, pages in enumerate(order.split(counts)):
        table[request, : len(pages)] = pages.int()
    places = [(int(table[r, p // PAGE]) * PAGE + p % PAGE) for r, length in enumerate(LENGTHS) for p in range(length)]
    slots, tokens = torch.tensor(places), sum(LENGTHS)
    key, value = torch.randn(2, tokens, shape.num_kv_heads * shape.head_dim, generator=generator)
    rows = torch.full((len(order) + 1, PAGE, sum(layout.row_bytes(4))), 255, dtype=torch.uint8)
    plain.write(key, value, rows, slots)
    both = [torch.full((len(order) + 1, PAGE, plain.exact_bytes + 8), 255, dtype=torch.uint8) for _ in range(2)]
    plain.write_exactly(key, value, both[0], slots)
    kernels.write_exactly(key, value, both[1], slots)
    assert torch.equal(*both)

    starts = [most_decoded * request for request in range(len(LENGTHS) + 1)]
    step = StepRequests(
        len(LENGTHS), most_decoded, max(LENGTHS), starts, LENGTHS, torch.tensor(starts, dtype=torch.int32),
        torch.tensor(LENGTHS, dtype=torch.int32), table,
    )  # fmt: skip
    query = torch.randn(starts[-1], shape.num_heads * shape.head_dim, generator=generator)
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    newest = [index for end in ends for index in range(end - most_decoded, end)]
    new = tuple(side[newest].unflatten(1, (-1, shape.head_dim)).flatten(1) for side in (key, value))
    found = []
    for layer in (plain, kernels):
        output = torch.full_like(query, torch.nan)
        layer.attend_step(query, rows, step, output, ExactPages(both[0], table), new)
        found.append(output)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
