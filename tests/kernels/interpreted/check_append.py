"""The append kernel in Triton's interpreter: the rows of plain PyTorch, bit for bit where the latents are given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.absorbed import check_absorbing
from support.kernel_cases import FORMS, MIXED, CodedRow, NumberRow, layer, random_scale, rotation_table, shape_of
from support.quick import mostly_nightly

from rotor.checkpoint.layout import PRE_ROPE, AttentionShape, ExactTokens, GroupLayout, LayerLayout
from rotor.checkpoint.rows import RowScale
from rotor.kernels import append as append_module
from rotor.kernels import decode_launch
from rotor.kernels.append import append
from rotor.kernels.exact_slots import SlotsToFill
from rotor.kernels.parameters import pack_layer
from rotor.kernels.reference.attention import project_keys
from rotor.kernels.rotary import rotate, within_blocks

SMALL = CodedRow(n8=1, n4=5)
CASES = {
    "joint": layer(FORMS["block"], 2, MIXED, MIXED, SMALL),
    "apart": layer(FORMS["post"], 1, (MIXED, SMALL), (MIXED, SMALL), (SMALL, MIXED)),
    "blocks": layer(FORMS["block"], 1, MIXED),
    "pre": layer(FORMS["pre"], 2, MIXED, SMALL),
    "numbers": layer(FORMS["long"], 2, (NumberRow(40), NumberRow(24)), (NumberRow(8), NumberRow(70))),
    "joint numbers": layer(FORMS["post"], 1, NumberRow(40)),
}


def stored(key: torch.Tensor, layout: LayerLayout, rotation: tuple, index: torch.Tensor) -> torch.Tensor:
    """[batch_size, num_kv_heads, seq_len, head_dim], rotated as the cache keeps them."""
    cos, sin = rotation
    if layout.rope_block is None:
        tables = cos[index], sin[index]
    else:
        tables = within_blocks((cos, sin), index, layout.form)
    return rotate(key.transpose(1, 2), *(table.unsqueeze(1) for table in tables))


def moved(scale: RowScale | None, by: float) -> RowScale | None:
    return scale and scale._replace(shift=scale.shift + by)


EVERY = [(name, *size) for name in CASES for size in ((3, 1), (2, 19))]
QUICK = {(name, *((3, 1), (2, 19))[index % 2]) for index, name in enumerate(CASES)}


@pytest.mark.parametrize("name, batch_size, seq_len", mostly_nightly(EVERY, lambda case: case in QUICK))
def test_rows_are_those_of_plain_pytorch(name, batch_size, seq_len) -> None:
    layout, generator = CASES[name], torch.Generator().manual_seed(0)
    head_dim, rotary_dim = 16 if seq_len == 1 else 24, 16
    kv_heads = layout.group_size * len(layout.groups)
    shape = shape_of(kv_heads, 3, head_dim, rotary_dim, key_norm=True)
    rotation = rotation_table(90, rotary_dim, factor=1.3)
    index = torch.randint(0, 90, (batch_size, seq_len), generator=generator)
    key = torch.randn(batch_size, seq_len, kv_heads, head_dim, generator=generator)
    query = torch.randn(batch_size, seq_len, 3 * kv_heads, head_dim, generator=generator)
    basis = torch.randn(layout.group_size * head_dim, layout.key_rank, generator=generator)
    shift = torch.randn(layout.key_rank, generator=generator) if layout.coded else None
    value = 3 * torch.randn(batch_size, seq_len, layout.value_rank, generator=generator)
    scale = random_scale(layout, generator)
    got = append(
        key, value, layout, shape, query=query, key_basis=basis, key_shift=shift, rotation=rotation, index=index,
        scale=scale,
    )  # fmt: skip
    rotated = rotate(query.transpose(1, 2), *(table[index].unsqueeze(1) for table in rotation))
    torch.testing.assert_close(got.query, rotated, atol=1e-5, rtol=1e-5)
    part = value.unsqueeze(1) if layout.joint else None
    exact = project_keys(
        stored(key.double(), layout, tuple(t.double() for t in rotation), index), basis.double(), layout,
        None if shift is None else shift.double(), None if part is None else part.double(),
    )  # fmt: skip
    if not layout.coded:
        torch.testing.assert_close(got.key.double(), exact, atol=1e-4, rtol=1e-5)
        assert layout.joint or torch.equal(got.value[:, 0], value)
        return
    # A latent within rounding of a whole number may be floored to either side.
    either = [pack_layer(exact + error, layout, True, moved(scale, error)) for error in (-1e-4, 1e-4)]
    assert ((got.key == either[0]) | (got.key == either[1])).all()
    assert (either[0] == either[1]).float().mean() > 0.95
    assert layout.joint or torch.equal(got.value, pack_layer(value.unsqueeze(1), layout, keys=False))


@pytest.mark.parametrize(
    ("name", "dtype"), [("apart", torch.float32), ("pre", torch.float16), ("numbers", torch.float16)]
)
def test_latents_into_pages(name, dtype) -> None:
    """Folded keys are packed bit for bit, into slots in any order; slots below zero are no place."""
    layout, generator = CASES[name], torch.Generator().manual_seed(1)
    layout = LayerLayout(layout.groups, *PRE_ROPE)
    kv_heads = layout.group_size * len(layout.groups)
    shape = AttentionShape(1, kv_heads, kv_heads, 16, 64, 16)
    tokens, page_size = 21, 16
    key = (20 * torch.randn(tokens, 1, layout.key_rank + 3, generator=generator)).to(dtype)[..., 3:]
    value = (3 * torch.randn(tokens, 1, layout.value_rank, generator=generator)).to(dtype)
    slots = torch.randperm(4 * page_size, generator=generator)[:tokens]
    slots[5] = -1
    sizes = layout.row_bytes(dtype.itemsize)
    made = (torch.uint8, 1) if layout.coded else (dtype, dtype.itemsize)
    pages = [torch.full((4, page_size, 8 + size // made[1]), 9, dtype=made[0])[..., 8:] for size in sizes]
    before = [side.clone() for side in pages]
    scale = random_scale(layout, generator)
    rows = append(
        key, None if layout.joint else value, layout, shape, scale=scale, out=(pages[0], pages[1]), slots=slots
    )
    assert rows.query is None
    assert rows.key is pages[0]
    for side, latents, keys, old in zip(pages, (key, value), (True, False), before, strict=True):
        expected = pack_layer(latents[:, 0], layout, keys, scale)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0 and side.numel():
                assert torch.equal(side[slot // page_size, slot % page_size], expected[token])
                old[slot // page_size, slot % page_size] = expected[token]
        assert torch.equal(side, old)


def test_rows_of_a_table_by_token() -> None:
    """Without an index, token t of a sequence has row t of a table of seq_len rows, or its own."""
    layout, generator = layer(FORMS["post"], 1, MIXED), torch.Generator().manual_seed(2)
    shape = shape_of(1, 2, 16, 16)
    cos, sin = rotation_table(10, 16)
    key, basis = torch.randn(2, 5, 1, 16, generator=generator), torch.randn(16, MIXED.rank, generator=generator)
    part = torch.randn(2, 5, MIXED.rank, generator=generator)
    scale = random_scale(layout, generator)
    every = append(key, part, layout, shape, key_basis=basis, scale=scale, rotation=(cos[:5], sin[:5]))
    twice = append(
        key, part, layout, shape, key_basis=basis, scale=scale, rotation=(cos[:5].repeat(2, 1), sin[:5].repeat(2, 1))
    )
    index = append(key, part, layout, shape, key_basis=basis, scale=scale, rotation=(cos, sin), index=torch.arange(5))
    assert torch.equal(every.key, twice.key)
    assert torch.equal(every.key, index.key)


@pytest.mark.parametrize("name", mostly_nightly(["joint", "pre"], lambda name: name == "pre"))
def test_many_tokens_are_appended_in_parts(name, monkeypatch) -> None:
    """Of which each leaves its latents in memory."""
    layout, generator = CASES[name], torch.Generator().manual_seed(3)
    kv_heads = layout.group_size * len(layout.groups)
    shape = shape_of(kv_heads, 1, 16, 16, key_norm=True)
    cos, sin = rotation_table(20, 16)
    key = torch.randn(2, 10, kv_heads, 16, generator=generator)
    basis = torch.randn(layout.group_size * 16, layout.key_rank, generator=generator)
    value = torch.randn(2, 10, layout.value_rank, generator=generator)
    scale = random_scale(layout, generator)
    made = []
    for each in (append_module.LATENT_BYTES, 7 * 4 * layout.key_rank):
        monkeypatch.setattr(append_module, "LATENT_BYTES", each)
        made.append(append(key, value, layout, shape, key_basis=basis, rotation=(cos, sin), scale=scale).key)
    assert torch.equal(*made)


@pytest.mark.parametrize("name, batch_size, seq_len", mostly_nightly(EVERY, lambda case: case not in QUICK))
def test_exact_tokens_beside_rows(name, batch_size, seq_len) -> None:
    """Values are given as heads and projected here; keys are also rotated as attention takes them."""
    layout, generator = replace(CASES[name], exact=ExactTokens(4, 20)), torch.Generator().manual_seed(2)
    kv_heads, head_dim, rotary_dim = layout.group_size * len(layout.groups), 24, 16
    shape = shape_of(kv_heads, 3, head_dim, rotary_dim, key_norm=True)
    rotation = rotation_table(90, rotary_dim, factor=1.3)
    index = torch.randint(0, 90, (batch_size, seq_len), generator=generator)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    key, value = random(2, batch_size, seq_len, kv_heads, head_dim)
    query = random(batch_size, seq_len, 3 * kv_heads, head_dim)
    bases = [random(layout.group_size * head_dim, rank) for rank in (layout.key_rank, layout.value_rank)]
    shift = random(layout.key_rank) if layout.coded else None
    value_shift = random(layout.value_rank) if layout.coded and not layout.joint else None
    scale = random_scale(layout, generator)
    got = append(
        key, value, layout, shape, query=query, key_basis=bases[0], key_shift=shift, value_basis=bases[1],
        value_shift=value_shift, rotation=rotation, index=index, scale=scale,
    )  # fmt: skip
    tables = [table[index].unsqueeze(1) for table in rotation]
    torch.testing.assert_close(got.query, rotate(query.transpose(1, 2), *tables), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.exact_key, rotate(key.transpose(1, 2), *tables), atol=1e-5, rtol=1e-5)
    assert torch.equal(got.exact_value, value.transpose(1, 2))
    alike = LayerLayout(tuple(GroupLayout(g.kv_heads, g.values, g.values) for g in layout.groups), *layout.form)
    of_values = project_keys(
        value.double().transpose(1, 2), bases[1].double(), alike, None if value_shift is None else value_shift.double()
    )
    part = of_values if layout.joint else None
    of_keys = project_keys(
        stored(key.double(), layout, tuple(t.double() for t in rotation), index), bases[0].double(), layout,
        None if shift is None else shift.double(), part,
    )  # fmt: skip
    for keys, rows, exact in ((True, got.key, of_keys), (False, got.value, of_values)):
        if not keys and layout.joint:
            continue
        if not layout.coded:
            torch.testing.assert_close(rows.double(), exact, atol=1e-4, rtol=1e-5)
            continue
        # A latent within rounding of a whole number may be floored to either side.
        either = [pack_layer(exact + error, layout, keys, moved(scale, error)) for error in (-1e-4, 1e-4)]
        assert ((rows == either[0]) | (rows == either[1])).all()
        assert (either[0] == either[1]).float().mean() > 0.95


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("offset", [0, 8, 9, 40])
@pytest.mark.parametrize("rotary_dim", mostly_nightly([16, 0], lambda dim: dim == 16))
def test_a_token_is_stored_in_its_slots(offset: int, on_device: bool, rotary_dim: int) -> None:
    """Among 3 first and 8 newest tokens, of sequences that begin at 0 and, where the device says so, at 7."""
    layout, begins = replace(CASES["joint"], exact=ExactTokens(3, 8)), [0, 7 if on_device else 0]
    generator = torch.Generator().manual_seed(0)
    kv_heads = layout.group_size * len(layout.groups)
    shape = shape_of(kv_heads, 2, 24, rotary_dim)
    layout = layout if rotary_dim else replace(layout, rope_block=None)
    rotation, index = rotation_table(90, 16), torch.tensor([[offset], [offset]])
    key, value = torch.randn(2, 2, 1, kv_heads, 24, generator=generator)
    query = torch.randn(2, 1, 2 * kv_heads, 24, generator=generator)
    bases = [torch.randn(layout.group_size * 24, layout.key_rank, generator=generator) for _ in range(2)]
    slots = torch.zeros(2, 2, kv_heads, 11, 24)
    expected = slots.clone()
    fill = SlotsToFill(
        *slots, 3, 8, torch.tensor(offset) if on_device else offset, torch.tensor(begins) if on_device else 0
    )
    made = append(
        key, value, layout, shape, query=query if rotary_dim else None, key_basis=bases[0],
        key_shift=torch.zeros(layout.key_rank), value_basis=bases[1], rotation=rotation if rotary_dim else None,
        index=index if rotary_dim else None, scale=random_scale(layout, generator), fill=fill,
    )  # fmt: skip
    assert made.exact_key is not None
    assert made.exact_value is not None
    for sequence, begin in enumerate(begins):
        for slot in {3 + offset % 8} | {offset - begin} & {0, 1, 2}:
            expected[0, sequence, :, slot] = made.exact_key[sequence, :, 0]
            expected[1, sequence, :, slot] = made.exact_value[sequence, :, 0]
    assert torch.equal(slots, expected)
    assert torch.equal(made.exact_value[:, :, 0], value[:, 0])


@pytest.mark.parametrize("dtype", mostly_nightly([torch.float16, torch.float32], lambda dtype: dtype == torch.float16))
@pytest.mark.parametrize("name", mostly_nightly(["joint", "pre", "numbers", "blocks"], lambda name: name == "joint"))
@pytest.mark.parametrize("memory", [99 << 10, 1 << 10], ids=["the basis held", "the basis loaded anew"])
def test_queries_are_absorbed_beside_rows(
    name: str, dtype: torch.dtype, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a launch of their own absorbs the rotated ones."""
    monkeypatch.setattr(decode_launch, "shared_bytes", lambda capability: memory)
    layout = CASES[name]
    shape = shape_of(layout.group_size * len(layout.groups), 2, 24, 16)
    check_absorbing(layout, shape, dtype, torch.device("cpu"))


def test_a_step_that_absorbs_is_one_launch_whatever_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though as many tokens of a prompt are appended in parts."""
    monkeypatch.setattr(append_module, "LATENT_BYTES", 1)
    check_absorbing(CASES["joint"], shape_of(6, 2, 24, 16), torch.float16, torch.device("cpu"))
