"""Rows of codes: how columns lie in them, and attention over them in plain PyTorch."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from coded import MIXTURES, coded_layer, random_coded_case, steps_of
from ragged import layer

from rotor.errors import CheckpointError
from rotor.format.columns import Columns
from rotor.format.layout import LayerLayout, kv_bytes_per_token, ordered_by_class
from rotor.kernels import running_softmax
from rotor.kernels.code_reference import coded_attention
from rotor.kernels.reference import grouped_attention
from rotor.kernels.rows import pack, pack_layer, unpack, unpack_layer


def numbers(columns: Columns, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(*shape, columns.rank, generator=generator) * steps_of([columns])).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("columns", MIXTURES, ids=str)
def test_rows_hold_the_floor_within_the_width_and_16_bits_as_they_are(columns: Columns, dtype: torch.dtype) -> None:
    latents = numbers(columns, 3, 40, dtype=dtype) * 2.0
    rows = pack(latents, columns)
    assert rows.shape == (3, 40, columns.row_bytes(dtype.itemsize))
    got = unpack(rows, columns, dtype)
    for segment in columns.segments(dtype.itemsize):
        part = slice(segment.first, segment.first + segment.count)
        expected = latents[..., part]
        if segment.bits < 16:
            most = 2 ** (segment.bits - 1)
            expected = expected.floor().clamp(-most, most - 1)
            assert expected.min() == -most
            assert expected.max() == most - 1
        assert torch.equal(got[..., part], expected)


def test_the_order_of_columns_in_a_word() -> None:
    """By hand: even columns in the lower half, odd ones in the upper, from the lowest bits; stored is n + 2^(b-1)."""

    def words(latents: list[float], columns: Columns) -> list[str]:
        return [f"{word & 0xFFFFFFFF:08x}" for word in pack(torch.tensor(latents), columns).view(torch.int32).tolist()]

    assert words([-128.0, -127.0, -126.5, 127.9], Columns(n8=4)) == ["ff010100"]
    assert words([-8.0, -7.0, -6.0, -5.0, -4.0, 0.0, 7.0, 9.0], Columns(n4=8)) == ["f831f420"]
    assert words([-2.0, 1.0] + [-1.0, -2.0] + [-2.0] * 12, Columns(n2=16)) == ["00030004"]
    whole = pack(torch.tensor([1.0, -2.0], dtype=torch.bfloat16), Columns(n16=2)).view(torch.int32)
    assert f"{whole.item() & 0xFFFFFFFF:08x}" == "c0003f80"


def test_codes_depend_on_nothing_but_their_latent() -> None:
    columns = [MIXTURES[0], MIXTURES[0], MIXTURES[3]]
    latents = torch.cat([numbers(c, 4, 9) for c in columns], -1)
    rows = pack_layer(latents, columns)
    assert torch.equal(pack_layer(latents[1:2, 3:5], columns), rows[1:2, 3:5])
    assert torch.equal(rows[..., : 2 * columns[0].row_bytes(4)].chunk(2, -1)[0], pack(latents[..., :48], columns[0]))
    assert torch.equal(
        unpack_layer(rows[2:, 1:], columns, torch.float32), unpack_layer(rows, columns, torch.float32)[2:, 1:]
    )


def test_columns_fill_words_and_say_so() -> None:
    columns = Columns(n16=2, n8=4, n4=8, n2=16)
    assert (columns.rank, columns.row_bytes(), columns.row_bytes(4)) == (30, 16, 20)
    assert [(s.bits, s.first, s.count, s.offset_bytes, s.size_bytes) for s in columns.segments(4)] == [
        (16, 0, 2, 0, 8), (8, 2, 4, 8, 4), (4, 6, 8, 12, 4), (2, 14, 16, 16, 4),
    ]  # fmt: skip
    with pytest.raises(CheckpointError, match="12 columns of 4 bits: expected a multiple of 8"):
        Columns(n4=12)
    with pytest.raises(CheckpointError, match="no columns"):
        Columns()


def test_a_layout_with_codes_passes_through_json() -> None:
    layout = coded_layer("pre", 2, (MIXTURES[0], MIXTURES[3]), (MIXTURES[4], MIXTURES[1]))
    data = json.loads(json.dumps(layout.to_dict()))
    assert LayerLayout.from_dict(data, "here") == layout
    assert data["groups"][0]["qk_columns"] == {"16": 8, "8": 8, "4": 16, "2": 16}
    assert "qk_columns" not in layer("pre", 2, (16, 16)).to_dict()["groups"][0]
    assert layout.row_bytes(2) == (36 + 12, 20 + 4)
    assert layout.byte_offsets(2) == [(0, 0), (36, 20)]
    assert kv_bytes_per_token([layout, layer("pre", 2, (16, 8))], 2) == 72 + 48
    assert [c.count for c in layout.classes()] == [1, 1]


def test_damaged_columns_are_refused() -> None:
    good = coded_layer("none", 1, (MIXTURES[3], MIXTURES[3])).to_dict()
    for change, message in [
        ({"qk_rank": 48}, "as many as the ranks"),
        ({"qk_columns": {"4": 20}}, "qk_columns: 20 columns of 4 bits"),
        ({"qk_columns": {"3": 40}}, "columns of 3 bits: expected 16, 8, 4, 2"),
    ]:
        damaged = {**good, "groups": [{**good["groups"][0], **change}]}
        with pytest.raises(CheckpointError, match=message):
            LayerLayout.from_dict(damaged, "config.json")
    one_side = dict(good["groups"][0])
    del one_side["v_columns"]
    with pytest.raises(CheckpointError, match="columns of both sides"):
        LayerLayout.from_dict({**good, "groups": [one_side]}, "config.json")
    mixed = {**good, "groups": [*good["groups"], layer("none", 1, (16, 16)).to_dict()["groups"][0]]}
    with pytest.raises(CheckpointError, match="in all groups of a layer, or in none"):
        LayerLayout.from_dict(mixed, "config.json")


def test_groups_of_equal_rank_but_other_widths_are_other_classes() -> None:
    a, b = Columns(n8=16, n4=8), Columns(n4=24)
    groups = [coded_layer("none", 1, (c, a)).groups[0] for c in (a, b, a)]
    groups = [dataclasses.replace(group, kv_heads=(i,)) for i, group in enumerate(groups)]
    layout, order = ordered_by_class("none", True, groups)
    assert sorted(order) == [0, 1, 2]
    assert [c.count for c in layout.classes()] in ([2, 1], [1, 2])


@pytest.fixture(params=[64, 5000], ids=["blocks", "one block"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_softmax, "LEAST_BLOCK", request.param)
    monkeypatch.setattr(running_softmax, "BLOCK_ELEMENTS_CPU", 1)


@pytest.mark.parametrize("domain", ["post", "pre", "none"])
@pytest.mark.parametrize("seq_len", [1, 5, 150])
@pytest.mark.parametrize("mask", ["causal", "bool", "added"])
@pytest.mark.usefixtures("block")
def test_attention_over_codes_is_that_over_their_numbers(domain: str, seq_len: int, mask: str) -> None:
    """In float64, against the attention that all latents go through as floats; masks with padding and holes."""
    pairs = [(MIXTURES[0], MIXTURES[7]), (MIXTURES[0], MIXTURES[7]), (MIXTURES[4], MIXTURES[5])]
    layout = coded_layer(domain, 2, *pairs)  # type: ignore[arg-type]
    case = random_coded_case(layout, 2, 16, 2, seq_len, 150, torch.float64)
    floats = case.floats
    rotation = None if floats.key_rotation is None else tuple(t.double() for t in floats.key_rotation)
    attention_mask = None
    if mask != "causal":
        attention_mask = torch.rand(2, 1, seq_len, 150, generator=torch.Generator().manual_seed(5)) < 0.7
        attention_mask[0, :, :, :70] = False
        attention_mask[1, :, 0] = False
    if mask == "added":
        assert attention_mask is not None
        attention_mask = torch.zeros(attention_mask.shape, dtype=torch.float64).masked_fill(~attention_mask, -torch.inf)
    for softcap in (None, 3.0):
        got = coded_attention(
            case.query, case.key[:, None], case.value[:, None], case.parameters(softcap), rotation, attention_mask
        )
        expected = grouped_attention(
            floats.query, floats.key[:, None], floats.value[:, None], floats.parameters(softcap), rotation,
            attention_mask,
        )  # fmt: skip
        # softcap's logits are in float32 in the other.
        torch.testing.assert_close(got, expected.nan_to_num(), rtol=1e-9, atol=1e-9 if softcap is None else 1e-4)
