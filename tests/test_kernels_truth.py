"""The float64 attention over ragged groups against plain softmax attention; the CPU path against it."""

from __future__ import annotations

import pytest
import torch
from ragged import RaggedCase, layer, paged, random_case
from torch import Tensor

from rotor.kernels.reference import grouped_attention, rotate
from rotor.kernels.truth import Sequence, ragged_attention

LAYOUTS = [
    layer(domain, size, *ranks)
    for domain in ("post", "pre", "none")
    for size, ranks in ((1, ((12, 8), (12, 8), (8, 16), (4, 4))), (2, ((20, 8), (8, 28))), (4, ((24, 40),)))
]
HEADS_PER_KV, HEAD_DIM, BATCH_SIZE = 2, 16, 2


def uncompressed(case: RaggedCase) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys [batch_size, num_heads, ., qk width] and values of the same attention without latents."""
    layout, kept = case.layout, case.heads_per_kv
    queries, keys, values = [], [], []
    widest = max(g.qk_rank for g in layout.groups), max(g.v_rank for g in layout.groups)
    for g, (group, (qk_offset, v_offset)) in enumerate(zip(layout.groups, layout.offsets(), strict=True)):
        latent = case.key[:, :, qk_offset : qk_offset + group.qk_rank].double()
        for row in range(layout.group_size * kept):
            if layout.domain == "none":
                start = layout.group_size * kept * qk_offset + row * group.qk_rank
                query, key = case.query[:, :, start : start + group.qk_rank].double(), latent
                padding = (0, widest[0] - group.qk_rank)
                query, key = (torch.nn.functional.pad(x, padding) for x in (query, key))
            else:
                head = row // kept * case.head_dim
                basis = case.query_basis[head : head + case.head_dim, qk_offset : qk_offset + group.qk_rank].double()
                query, key = case.query[:, g * layout.group_size * kept + row].double(), latent @ basis.T
                if layout.domain == "pre":
                    key = rotate(key, *(table.double() for table in case.key_rotation))
            queries.append(query)
            keys.append(key)
            value = case.value[:, :, v_offset : v_offset + group.v_rank].double()
            values.append(torch.nn.functional.pad(value, (0, widest[1] - group.v_rank)))
    return torch.stack(queries, 1), torch.stack(keys, 1), torch.stack(values, 1)


def drop_padding(case: RaggedCase, output: Tensor) -> Tensor:
    """[batch_size, num_heads, seq_len, widest v_rank] -> the packed output."""
    rows = case.layout.group_size * case.heads_per_kv
    return torch.cat([output[:, h, :, : case.layout.groups[h // rows].v_rank] for h in range(output.shape[1])], -1)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.domain}-{x.group_size}")
def test_equals_plain_softmax_attention_on_the_uncompressed_equivalent(layout, window, softcap) -> None:
    case = random_case(layout, HEADS_PER_KV, HEAD_DIM, BATCH_SIZE, seq_len=7, kv_len=23)
    sequences = [Sequence(7, 0, 23), Sequence(4, 6, 19)]
    got, lse = ragged_attention(
        case.query,
        case.key,
        case.value,
        layout,
        HEADS_PER_KV,
        case.scaling,
        sequences,
        case.query_basis,
        case.key_rotation,
        window=window,
        softcap=softcap,
    )
    query, key, value = uncompressed(case)
    mask = torch.zeros(BATCH_SIZE, 1, 7, 23, dtype=torch.bool)
    for b, s in enumerate(sequences):
        for i in range(s.query_len):
            last = s.kv_end - s.query_len + i
            first = s.kv_start if window is None else max(s.kv_start, last - window + 1)
            mask[b, 0, i, first : last + 1] = True
    logits = query @ key.mT * case.scaling
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~mask, -torch.inf)
    expected = drop_padding(case, logits.softmax(-1).nan_to_num() @ value)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, logits.logsumexp(-1), atol=1e-12, rtol=1e-12)
    assert not got[1, 4:].any()
    assert torch.isinf(lse[1, :, 4:]).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.domain}-{x.group_size}")
def test_pages_permuted_and_poisoned_change_nothing(layout) -> None:
    case = random_case(layout, HEADS_PER_KV, HEAD_DIM, BATCH_SIZE, seq_len=2, kv_len=21)
    generator = torch.Generator().manual_seed(1)
    pages, table = paged(torch.cat([case.key, case.value], -1), 4, generator)
    settings = (layout, HEADS_PER_KV, case.scaling, [Sequence(2, 0, 21), Sequence(2, 3, 18)])
    basis = (case.query_basis, case.key_rotation)
    expected = ragged_attention(case.query, case.key, case.value, *settings, *basis)
    key, value = pages.split([layout.qk_width, layout.v_width], dim=-1)
    got = ragged_attention(case.query, key, value, *settings, *basis, block_table=table)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "left padding"])
@pytest.mark.parametrize("seq_len", [1, 9, 23])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.domain}-{x.group_size}")
def test_the_cpu_path_equals_the_float64_attention(layout, seq_len, masked, softcap, monkeypatch) -> None:
    monkeypatch.setattr("rotor.kernels.reference.REBUILT_ELEMENTS_CPU", 2048)  # several blocks
    kv_len = 23
    case = random_case(layout, HEADS_PER_KV, HEAD_DIM, BATCH_SIZE, seq_len, kv_len)
    starts = [0, 8 if masked else 0]
    mask = None
    if masked or 1 < seq_len < kv_len:
        index = torch.arange(kv_len)
        causal = index <= torch.arange(seq_len)[:, None] + kv_len - seq_len
        mask = torch.stack([causal & (index >= start) for start in starts])[:, None]
    expected, _ = ragged_attention(
        case.query,
        case.key,
        case.value,
        layout,
        HEADS_PER_KV,
        case.scaling,
        [Sequence(seq_len, start, kv_len) for start in starts],
        case.query_basis,
        case.key_rotation,
        softcap=softcap,
    )
    got = grouped_attention(
        case.query,
        case.key.unsqueeze(1),
        case.value.unsqueeze(1),
        case.parameters(softcap),
        case.key_rotation,
        mask,
    )
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)
