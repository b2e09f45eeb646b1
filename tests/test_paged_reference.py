"""Attention over pages in plain PyTorch, against the same rows in one piece; unused bytes are poisoned."""

from __future__ import annotations

import pytest
import torch
from coded import MIXTURES, coded_layer, random_coded_case
from ragged import layer, paged, random_case

from rotor.format.layout import LayerLayout
from rotor.kernels import running_softmax
from rotor.kernels.code_reference import coded_attention
from rotor.kernels.paged_reference import paged_attention
from rotor.kernels.parameters import AttentionParameters
from rotor.kernels.reference import grouped_attention, project_queries

HEADS_PER_KV, HEAD_DIM, BATCH, KV_LEN, PAGE = 2, 16, 3, 150, 16
NUMBERS = [(24, 8), (24, 8), (8, 16)]
CODES = [(MIXTURES[0], MIXTURES[7]), (MIXTURES[0], MIXTURES[7]), (MIXTURES[4], MIXTURES[5])]


def layout_of(domain: str, coded: bool) -> LayerLayout:
    return coded_layer(domain, 2, *CODES) if coded else layer(domain, 2, *NUMBERS)  # type: ignore[arg-type]


@pytest.fixture(params=[16, 5000], ids=["blocks of a page", "one block"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_softmax, "LEAST_BLOCK", request.param)
    monkeypatch.setattr(running_softmax, "BLOCK_ELEMENTS_CPU", 1)


@pytest.mark.parametrize("coded", [False, True], ids=["numbers", "codes"])
@pytest.mark.parametrize("domain", ["post", "pre", "none"])
@pytest.mark.parametrize("seq_len", [1, 37])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.usefixtures("block")
def test_pages_give_what_rows_in_one_piece_give(coded: bool, domain: str, seq_len: int, window: int | None) -> None:
    layout = layout_of(domain, coded)
    if coded:
        case = random_coded_case(layout, HEADS_PER_KV, HEAD_DIM, BATCH, seq_len, KV_LEN, torch.float64)
        query, basis, constant, table = case.query, case.query_basis, case.constant_key, case.floats.key_rotation
        key, value = case.key, case.value
    else:
        plain = random_case(layout, HEADS_PER_KV, HEAD_DIM, BATCH, seq_len, KV_LEN).to("cpu", torch.float64)
        query, basis, constant, table = plain.query, plain.query_basis, None, plain.key_rotation
        key, value = plain.key, plain.value
    rotation = None if table is None else (table[0].double(), table[1].double())
    index = torch.arange(KV_LEN)
    position = index[-seq_len:, None]
    mask = (index <= position) & (index > position - (window or KV_LEN))
    attention = coded_attention if coded else grouped_attention
    for softcap in (None, 3.0):
        parameters = AttentionParameters(layout, HEADS_PER_KV, 0.25, basis, constant, softcap)
        expected = attention(query, key[:, None], value[:, None], parameters, rotation, mask[None, None])

        generator = torch.Generator().manual_seed(0)
        rows = torch.cat([x.contiguous().view(torch.uint8) for x in (key, value)], -1)
        pages, block_table = paged(rows, PAGE, generator)
        pages = torch.cat([pages, pages], -1)  # rows wider than what they hold
        split = sum(layout.row_bytes(8)[:1])
        own = query
        if domain == "pre":
            own = query.transpose(1, 2)
        elif domain == "post":
            assert basis is not None
            flat = query.transpose(1, 2).flatten(0, 1)
            own = project_queries(flat, basis, layout, HEADS_PER_KV).unflatten(0, (BATCH, seq_len))
        got = paged_attention(
            own, pages[..., :split], pages[..., split : rows.shape[-1]], parameters, block_table,
            torch.full((BATCH,), KV_LEN), KV_LEN, key_rotation=rotation, window=window,
        )  # fmt: skip
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9 if softcap is None else 1e-4)


@pytest.mark.parametrize("coded", [False, True], ids=["numbers", "codes"])
@pytest.mark.parametrize("window", [None, 20])
def test_sequences_of_a_batch_may_differ_in_length(coded: bool, window: int | None) -> None:
    """Each as if alone, whatever is known to the host of the longest, and whatever lies in their pages behind them."""
    layout = layout_of("pre", coded)
    case = random_coded_case(layout, HEADS_PER_KV, HEAD_DIM, BATCH, 1, KV_LEN) if coded else None
    plain = random_case(layout, HEADS_PER_KV, HEAD_DIM, BATCH, 1, KV_LEN) if case is None else case.floats
    key, value = (plain.key, plain.value) if case is None else (case.key, case.value)
    basis, constant = (plain.query_basis, None) if case is None else (case.query_basis, case.constant_key)
    pages, table = paged(
        torch.cat([x.contiguous().view(torch.uint8) for x in (key, value)], -1), PAGE, torch.Generator().manual_seed(1)
    )
    split = layout.row_bytes(4)[0]
    lengths = torch.tensor([3, 97, KV_LEN])

    def attended(rows: slice, longest: int) -> torch.Tensor:
        return paged_attention(
            plain.query.transpose(1, 2)[rows], pages[..., :split], pages[..., split:],
            AttentionParameters(layout, HEADS_PER_KV, 0.25, basis, constant), table[rows], lengths[rows], longest,
            key_rotation=plain.key_rotation, window=window,
        )  # fmt: skip

    together = attended(slice(None), KV_LEN)
    assert together.isfinite().all()
    for i, length in enumerate(lengths.tolist()):
        alone = attended(slice(i, i + 1), length)
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-5, atol=1e-5)
