"""The materialising kernel in Triton's interpreter against the formulas in float64, rows and pages."""

from __future__ import annotations

import pytest
import torch
from cases import FORMS, MIXED, Channels, Numbers, in_pages, layer, random_case, shape_of

from rotor.format.layout import KeyForm
from rotor.kernels.materialise import PagesOf, materialise
from rotor.kernels.rotary import rotate, when_read
from rotor.kernels.rows import read_class

WIDE = Channels(n8=20, n4=250)
CASES = {
    "post": layer(FORMS["post"], 2, MIXED, MIXED),
    "block": layer(FORMS["block"], 1, (MIXED, WIDE)),
    "fast": layer(FORMS["fast"], 2, WIDE, MIXED, MIXED),
    "long": layer(FORMS["long"], 1, MIXED),
    "pre": layer(FORMS["pre"], 4, MIXED),
    "numbers": layer(FORMS["long"], 2, (Numbers(40), Numbers(24)), (Numbers(8), Numbers(70))),
}


def expected(case, cls) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch_size, count * group_size, kv_len, head_dim] and [batch_size, count, kv_len, width], float64."""
    p, layout = case.parameters, case.parameters.layout
    latents = read_class(case.key, cls.key, cls.key_byte, cls.key_stride, cls.count, torch.float64).double()
    rows = p.value_rows(case.key, case.value)
    values = read_class(rows, cls.value, cls.value_byte, cls.value_stride, cls.count, torch.float64).double()
    if p.query_basis is None:
        return latents.transpose(1, 2), values.transpose(1, 2)
    keys = torch.einsum("blnr,ngdr->bngld", latents, p.basis(cls).double())
    if p.key_constant is not None:
        keys = keys + p.constant(cls).double().unsqueeze(2)
    if layout.in_blocks:
        table = when_read(tuple(t.double() for t in case.rotation), layout.form)
        keys = rotate(keys, *(t[case.first : case.first + case.key.shape[1]] for t in table))
    return keys.flatten(1, 2), values.transpose(1, 2)


@pytest.mark.parametrize("first, kv_len", [(0, 1), (0, 150), (7, 130)])
@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize("name", CASES)
def test_rows(name, head_dim, first, kv_len) -> None:
    layout = CASES[name]
    shape = shape_of(layout.group_size * len(layout.groups), 2, head_dim, 16)
    case = random_case(layout, shape, 2, 1, kv_len, first=first, factor=1.2)
    least = 0 if first else 40
    for cls in layout.classes(4):
        got = materialise(
            case.key, case.value, case.parameters, cls, torch.float32, case.rotation, first=first, least=least
        )
        for side, exact in zip(got, expected(case, cls), strict=True):
            width = exact.shape[-1]
            assert side.shape[-1] == max(width, least)
            torch.testing.assert_close(side[..., :width].double(), exact, atol=2e-5, rtol=1e-5)
            assert not side[..., width:].any()


def test_without_rope_keys_are_latents() -> None:
    layout = layer(KeyForm(), 2, MIXED, MIXED, WIDE)
    case = random_case(layout, shape_of(6, 2, 16, 0), 2, 1, 33)
    for cls in layout.classes():
        got = materialise(case.key, case.value, case.parameters, cls, torch.float32)
        for side, exact in zip(got, expected(case, cls), strict=True):
            assert torch.equal(side.double(), exact)


@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize("name", ["fast", "numbers"])
def test_pages(name, page_size) -> None:
    """Sequences of several lengths, one of them empty; nothing is read or written behind their ends."""
    layout, lengths = CASES[name], [37, 0, 160, 16]
    case = random_case(layout, shape_of(layout.group_size * len(layout.groups), 2, 24, 16), 4, 1, 160)
    pages = in_pages(case, lengths, page_size)
    start = torch.tensor([0, 37, 37, 197, 213], dtype=torch.int32)
    of = PagesOf(pages.block_table, pages.kv_lens, start, 213, 160)
    for cls in layout.classes(4):
        got = materialise(pages.key, pages.value, case.parameters, cls, torch.float32, case.rotation, pages=of)
        for side, exact in zip(got, expected(case, cls), strict=True):
            packed = torch.cat([exact[b, :, :length].transpose(0, 1) for b, length in enumerate(lengths)])
            torch.testing.assert_close(side.double(), packed, atol=2e-5, rtol=1e-5)
