"""Decoding in plain PyTorch on a CPU, block by block, against the float64 attention."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from coded import MIXTURES, coded_layer, random_coded_case
from ragged import RaggedCase, layer, random_case
from torch import Tensor

from rotor.kernels import code_reference, decode_reference, rebuilding, reference
from rotor.kernels.code_reference import coded_attention
from rotor.kernels.reference import grouped_attention
from rotor.kernels.rows import byte_order, pack, unpack, unpack_by_bytes
from rotor.kernels.truth import Sequence, ragged_attention
from rotor.kernels.turned_queries import begins_a_block
from rotor.runtime.rope_blocks import block_starts
from rotor.runtime.rotary_table import RotaryTable

HEADS_PER_KV, HEAD_DIM, KV_LEN = 3, 16, 90
PRE = {
    "heads": layer("pre", 1, (12, 8), (12, 8), (8, 16)),
    "pairs": layer("pre", 2, (20, 8), (20, 8), (8, 28)),
    "one latent": layer("pre", 4, (300, 40)),
}
CODED = [coded_layer("pre", 1, *zip(MIXTURES[:3], MIXTURES[3:6], strict=True))]
CODED += [coded_layer(domain, 2, (MIXTURES[0], MIXTURES[7]), (MIXTURES[0], MIXTURES[7])) for domain in ("pre", "none")]
CODED += [coded_layer("pre", size, (MIXTURES[0], None), (MIXTURES[7], None)) for size in (1, 2)]
FLOORS = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def plain(case: RaggedCase, mask: Tensor | None, softcap: float | None) -> Tensor:
    """The formula in the case's dtype, all keys at once."""
    rotation = None if case.key_rotation is None else tuple(t.to(case.key.dtype) for t in case.key_rotation)
    with patch.object(reference, "serves", return_value=False):
        return grouped_attention(
            case.query, case.key.unsqueeze(1), case.value.unsqueeze(1), case.parameters(softcap), rotation, mask
        )


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def check(case: RaggedCase, got: Tensor, mask: Tensor | None = None, softcap: float | None = None) -> None:
    """At most twice the error of PyTorch in the same dtype; `mask` is [batch_size, 1, 1, kv_len]."""
    sequences = [Sequence(1, 0, KV_LEN)] * len(case.query)
    exact, _ = ragged_attention(
        case.query, case.key, case.value, case.layout, HEADS_PER_KV, case.scaling, sequences, case.query_basis,
        case.key_rotation, softcap=softcap, mask=None if mask is None else mask[:, 0],
    )  # fmt: skip
    limit = 2 * error(plain(case, mask, softcap), exact)
    assert error(got, exact) <= max(limit, FLOORS[case.query.dtype])


def masks(batch_size: int) -> Tensor:
    """Left padding, a window, and holes."""
    mask = torch.ones(batch_size, 1, 1, KV_LEN, dtype=torch.bool)
    mask[0, ..., :37] = False
    mask[1, ..., 70:] = False
    mask[2, ..., 3::5] = False
    return mask


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_reference, "BLOCK_ELEMENTS", 1 << 10)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("name", PRE)
def test_keys_before_rope(name: str, dtype: torch.dtype) -> None:
    case = random_case(PRE[name], HEADS_PER_KV, HEAD_DIM, 3, 1, KV_LEN).to("cpu", dtype)
    for mask, softcap in ((None, None), (masks(3), None), (masks(3), 3.0)):
        got = grouped_attention(
            case.query, case.key.unsqueeze(1), case.value.unsqueeze(1), case.parameters(softcap), case.key_rotation,
            mask,
        )  # fmt: skip
        check(case, got, mask, softcap)


@pytest.mark.parametrize("has_products", [False, True])
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("layout", CODED, ids=lambda x: f"{x.domain} {x.group_size} {'joint' * x.joint}")
def test_codes(layout, dtype: torch.dtype, has_products: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    product = dtype if has_products else torch.float32
    monkeypatch.setattr(rebuilding, "product_dtype", lambda dtype: product)
    case = random_coded_case(layout, HEADS_PER_KV, HEAD_DIM, 3, 1, KV_LEN, dtype)
    for mask, softcap in ((None, None), (masks(3), None), (masks(3), 3.0)):
        got = coded_attention(
            case.query, case.key.unsqueeze(1), case.value.unsqueeze(1), case.parameters(softcap),
            case.floats.key_rotation, mask,
        )  # fmt: skip
        check(case.floats, got, mask, softcap)


def in_blocks(case: RaggedCase, rope_block: int) -> RaggedCase:
    """The case with keys that turn to the beginning of their block alone."""
    layout = replace(case.layout, folded_keys=False, rope_block=rope_block)
    return replace(case, layout=layout, key_rotation=block_starts(case.key_rotation, rope_block, 0, KV_LEN))


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("layout", [*PRE.values(), CODED[1], CODED[4]], ids=lambda x: f"{x.group_size} {x.coded}")
def test_keys_in_blocks(layout, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key is rebuilt, whatever is masked; 90 keys do not fill the last of their blocks."""
    monkeypatch.setattr(decode_reference, "Rebuilding", None)
    for rope_block in (4, 16):
        if layout.coded:
            coded = random_coded_case(layout, HEADS_PER_KV, HEAD_DIM, 3, 1, KV_LEN, dtype)
            case = in_blocks(coded.floats, rope_block)
            coded = replace(coded, floats=case, layout=replace(coded.layout, folded_keys=False, rope_block=rope_block))
            key, value, own, attend = coded.key, coded.value, coded.parameters, coded_attention
        else:
            case = in_blocks(random_case(layout, HEADS_PER_KV, HEAD_DIM, 3, 1, KV_LEN).to("cpu", dtype), rope_block)
            key, value, own, attend = case.key, case.value, case.parameters, grouped_attention
        for mask, softcap in ((None, None), (masks(3), None), (masks(3), 3.0)):
            got = attend(case.query, key.unsqueeze(1), value.unsqueeze(1), own(softcap), case.key_rotation, mask)
            check(case, got, mask, softcap)


def test_keys_that_begin_within_a_block_are_rebuilt() -> None:
    """As behind a window, which lets go of keys one by one."""
    case = in_blocks(random_case(PRE["pairs"], HEADS_PER_KV, HEAD_DIM, 2, 1, KV_LEN), 8)
    assert begins_a_block(case.key_rotation, 8)
    rows = tuple(table[3:] for table in case.key_rotation)
    assert not begins_a_block(rows, 8)
    key, value = case.key[:, 3:].unsqueeze(1), case.value[:, 3:].unsqueeze(1)
    got = grouped_attention(case.query, key, value, case.parameters(), rows)
    with patch.object(reference, "serves", return_value=False):
        expected = grouped_attention(case.query, key, value, case.parameters(), rows)
    assert error(got, expected.double()) < 1e-6


@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, 8])
@pytest.mark.parametrize("kind", ["per head", "added", "broadcast", "hole"])
def test_any_mask_and_partial_rotary_as_in_one_piece(kind: str, rotary_dim: int) -> None:
    """Masks of each head, masks that are added, and those of one row for all; keys that nothing attends to."""
    case = random_case(PRE["pairs"], HEADS_PER_KV, HEAD_DIM, 3, 1, KV_LEN)
    case = replace(case, key_rotation=tuple(t[:, : rotary_dim // 2].repeat(1, 2) for t in case.key_rotation))
    heads = case.query.shape[1]
    mask = torch.rand(3, heads, 1, KV_LEN, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[..., 60:], mask[1] = False, False
    if kind == "added":
        mask[1] = True
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    elif kind == "broadcast":
        mask = mask[:1, :1]
    elif kind == "hole":  # wider than a block; one head sees nothing before it either
        mask[0, ..., 10:60] = False
        mask[0, 0, :, :60], mask[0, :, :, 60:] = False, True
    got = grouped_attention(
        case.query, case.key.unsqueeze(1), case.value.unsqueeze(1), case.parameters(), case.key_rotation, mask
    )
    assert error(got, plain(case, mask, None).double()) < 1e-6
    assert kind != "per head" or not got[1].any()


def test_what_nothing_attends_to_is_not_read() -> None:
    """The empty rest of a static cache may hold what is no number."""
    case = random_coded_case(CODED[1], HEADS_PER_KV, HEAD_DIM, 2, 1, KV_LEN)
    mask = (torch.arange(KV_LEN) < 50).expand(2, 1, 1, -1)

    def attend(key: Tensor, value: Tensor) -> Tensor:
        return coded_attention(
            case.query, key.unsqueeze(1), value.unsqueeze(1), case.parameters(), case.floats.key_rotation, mask
        )

    expected, poison = attend(case.key, case.value), (~mask[:, 0, 0]).unsqueeze(-1)
    assert torch.equal(attend(case.key.masked_fill(poison, 255), case.value.masked_fill(poison, 255)), expected)


def test_float64_stays_float64() -> None:
    case = random_case(PRE["one latent"], HEADS_PER_KV, HEAD_DIM, 2, 1, KV_LEN)
    case = RaggedCase(
        case.layout, HEADS_PER_KV, HEAD_DIM, case.query.double(), case.key.double(), case.value.double(),
        case.query_basis.double(), tuple(t.double() for t in case.key_rotation),
    )  # fmt: skip
    got = grouped_attention(
        case.query, case.key.unsqueeze(1), case.value.unsqueeze(1), case.parameters(), case.key_rotation
    )
    exact, _ = ragged_attention(
        case.query, case.key, case.value, case.layout, HEADS_PER_KV, case.scaling, [Sequence(1, 0, KV_LEN)] * 2,
        case.query_basis, case.key_rotation,
    )  # fmt: skip
    assert got.dtype == torch.float64
    assert error(got, exact) < 1e-13


def test_gradients_go_the_other_way() -> None:
    case = random_case(PRE["heads"], HEADS_PER_KV, HEAD_DIM, 2, 1, KV_LEN)
    query = case.query.requires_grad_()
    output = grouped_attention(
        query, case.key.unsqueeze(1), case.value.unsqueeze(1), case.parameters(), case.key_rotation
    )
    output.sum().backward()
    assert query.grad is not None
    assert bool(query.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", MIXTURES, ids=str)
def test_unpacking_by_bytes(columns, dtype: torch.dtype) -> None:
    latents = 100.0 * torch.randn(2, 9, columns.rank, generator=torch.Generator().manual_seed(0))
    rows = pack(latents.to(dtype), columns)
    order, factors = byte_order(columns, dtype.itemsize)
    assert sorted(order) == list(range(columns.rank))
    for rows_of_more in (rows, torch.cat([rows, rows], dim=-1)[..., : rows.shape[-1]]):  # a row may go on behind them
        got = unpack_by_bytes(rows_of_more, columns, dtype, torch.empty(latents.shape))
        assert torch.equal(got / torch.tensor(factors), unpack(rows, columns, dtype)[..., list(order)].float())


def test_turns_are_made_once_for_all_layers_of_a_step() -> None:
    """The table of a length is one pair of tensors, and the turns go by it."""

    class Rotary(torch.nn.Module):
        rope_type = "default"

        def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            angle = positions[..., None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
            return angle.cos(), angle.sin()

    table = RotaryTable(Rotary())

    def step(length: int) -> tuple[Tensor, Tensor]:
        return table(0, length, length, torch.device("cpu"), torch.float32)

    first = rebuilding.turns_of(step(5), 4, torch.float32)
    assert rebuilding.turns_of(step(5), 4, torch.float32) is first
    longer = rebuilding.turns_of(step(6), 4, torch.float32)
    assert len(longer) == 6
    assert torch.equal(longer[:5], first)


def test_only_one_position_on_a_cpu_goes_block_by_block() -> None:
    assert code_reference.serves is reference.serves is decode_reference.serves
    assert not decode_reference.serves(torch.empty(1, device="meta"))
