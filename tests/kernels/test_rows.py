"""Rows of nibbles in plain PyTorch, against the words of their definition."""

from __future__ import annotations

import pytest
import torch
from support.kernel_cases import FORMS, MIXED, CodedRow, layer

from rotor.checkpoint.bases import levels_of
from rotor.checkpoint.rows import NIBBLE_BITS, SIGNED
from rotor.kernels.parameters import pack_layer, read_class

LATENTS = [
    MIXED,
    CodedRow(n4=16),
    CodedRow(n16=3),
    CodedRow(n12=5, n4=1),
    CodedRow(n8=8, n4=48),
    CodedRow(n6=13, n4=1, n2=12),
    CodedRow(n2=3),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("channels", LATENTS, ids=str)
def test_codes_are_those_of_the_floors(channels, dtype) -> None:
    latents = (40 * torch.randn(7, channels.rank, generator=torch.Generator().manual_seed(0))).to(dtype)
    latents[0, 0], latents[1, 0] = 1e4 if dtype != torch.float16 else 6e4, -3.0
    rows = channels.pack(latents)
    words, (codes, scale) = rows.view(torch.int16).int(), channels.unpack_codes(rows)
    assert scale is None
    read = (channels.unpack(rows, torch.float64) + SIGNED) @ levels_of(channels).T
    for row, numbers in enumerate(latents.tolist()):
        found = dict.fromkeys(range(channels.rank), 0)
        for place, digits in enumerate(channels.slots):
            lane, word = divmod(place, channels.words)
            nibble = int(words[row, word]) >> 4 * lane & 15
            if not digits:
                assert nibble == SIGNED
            elif digits[0].bits == NIBBLE_BITS:
                found[digits[0].channel] += nibble << digits[0].bit
            else:
                for crumb, digit in zip((nibble >> 2, nibble & 3), digits, strict=False):
                    found[digit.channel] += crumb
        for channel, bits in enumerate(channels.bits):
            code = min(max(int(torch.tensor(numbers[channel]).floor()), -(2 ** (bits - 1))), 2 ** (bits - 1) - 1)
            assert found[channel] == codes[row, channel] == read[row, channel] == code + 2 ** (bits - 1)


def test_groups_lie_where_the_layout_says() -> None:
    layout = layer(FORMS["post"], 1, (MIXED, CodedRow(n4=20)), (CodedRow(n4=16), CodedRow(n4=64)))
    generator = torch.Generator().manual_seed(0)
    sides = torch.randn(2, 3, layout.key_rank, generator=generator), torch.randn(2, 3, layout.value_rank)
    rows = [pack_layer(4 * side, layout, keys=keys) for side, keys in zip(sides, (True, False), strict=True)]
    assert tuple(row.shape[-1] for row in rows) == layout.row_bytes(2)
    for cls in layout.classes():
        keys = read_class(rows[0], cls.key, cls.key_byte, cls.key_stride, cls.count, torch.float32)
        own = 4 * sides[0][..., cls.key_rank : cls.key_rank + cls.key.rank]
        assert torch.equal(keys[..., 0, :], cls.key.unpack(cls.key.pack(own), torch.float32))
        assert cls.key_byte % 16 == cls.value_byte % 16 == 0
