"""Masks that are broadcast, in Triton's interpreter: one for all sequences, one row for all queries, and empty ones."""

from __future__ import annotations

import pytest
import torch
from ragged import RaggedCase, layer, random_case
from torch import Tensor

from rotor.kernels.attention import packed_attention

BATCH, KV_LEN = 3, 40


def attend(case: RaggedCase, mask: Tensor) -> Tensor:
    return packed_attention(
        case.query,
        case.key.unsqueeze(1),
        case.value.unsqueeze(1),
        case.layout,
        case.heads_per_kv,
        case.head_dim,
        case.scaling,
        case.query_basis,
        case.key_rotation,
        attention_mask=mask,
    )


@pytest.mark.parametrize("domain", ["none", "pre"])
@pytest.mark.parametrize("seq_len", [1, 5])
def test_a_broadcast_mask_is_as_the_expanded_one(domain, seq_len) -> None:
    case = random_case(layer(domain, 1, (16, 24), (16, 8)), 2, 16, BATCH, seq_len, KV_LEN)
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 1, seq_len, KV_LEN), (BATCH, 1, 1, KV_LEN), (1, 1, 1, KV_LEN), (BATCH, 1, seq_len, 1)):
        mask = torch.rand(shape, generator=generator) < 0.5
        whole = mask.expand(BATCH, 1, seq_len, KV_LEN).contiguous()
        assert torch.equal(attend(case, mask), attend(case, whole))


@pytest.mark.parametrize("seq_len", [1, 5])
def test_one_mask_for_batches_of_two_sizes(seq_len) -> None:
    """What is remembered of a mask must not serve another batch."""
    mask = torch.rand(1, 1, seq_len, KV_LEN, generator=torch.Generator().manual_seed(0)) < 0.5
    for batch_size in (1, BATCH, 2):
        case = random_case(layer("none", 1, (16, 24)), 2, 16, batch_size, seq_len, KV_LEN)
        assert torch.equal(attend(case, mask), attend(case, mask.repeat(batch_size, 1, 1, 1)))


@pytest.mark.parametrize("seq_len", [1, 5])
def test_a_mask_that_hides_everything_gives_zeros(seq_len) -> None:
    case = random_case(layer("none", 1, (16, 24)), 2, 16, BATCH, seq_len, KV_LEN)
    assert not attend(case, torch.zeros(1, 1, seq_len, KV_LEN, dtype=torch.bool)).any()
