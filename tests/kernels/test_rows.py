"""Rows of nibbles in plain PyTorch, against the words of their definition."""

from __future__ import annotations

import pytest
import torch
from cases import FORMS, MIXED, Channels, layer

from rotor.format.channels import SIGNED
from rotor.kernels.rows import pack, pack_layer, read_class, unpack

LATENTS = [MIXED, Channels(n4=16), Channels(n16=3), Channels(n12=5, n4=1), Channels(n8=8, n4=48)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("channels", LATENTS, ids=str)
def test_nibbles_are_those_of_the_floors(channels, dtype) -> None:
    latents = (40 * torch.randn(7, channels.rank, generator=torch.Generator().manual_seed(0))).to(dtype)
    latents[0, 0], latents[1, 0] = 1e4 if dtype != torch.float16 else 6e4, -3.0
    signed = unpack(pack(latents, channels), torch.float64)
    for row, numbers in enumerate(latents.tolist()):
        found = dict.fromkeys(range(channels.rank), 0)
        for place, of in enumerate(channels.nibbles):
            if of is None:
                assert signed[row, place] == 0
            else:
                found[of[0]] += int(signed[row, place] + SIGNED) * 16 ** of[1]
        for channel, bits in enumerate(channels.bits):
            code = min(max(int(torch.tensor(numbers[channel]).floor()), -(2 ** (bits - 1))), 2 ** (bits - 1) - 1)
            assert found[channel] == code + 2 ** (bits - 1)


def test_groups_lie_where_the_layout_says() -> None:
    layout = layer(FORMS["post"], 1, (MIXED, Channels(n4=20)), (Channels(n4=16), Channels(n4=64)))
    generator = torch.Generator().manual_seed(0)
    sides = torch.randn(2, 3, layout.key_rank, generator=generator), torch.randn(2, 3, layout.value_rank)
    rows = [pack_layer(4 * side, layout, keys=keys) for side, keys in zip(sides, (True, False), strict=True)]
    assert tuple(row.shape[-1] for row in rows) == layout.row_bytes(2)
    for cls in layout.classes():
        keys = read_class(rows[0], cls.key, cls.key_byte, cls.key_stride, cls.count, torch.float32)
        own = 4 * sides[0][..., cls.key_rank : cls.key_rank + cls.key.rank]
        assert torch.equal(keys[..., 0, :], unpack(pack(own, cls.key), torch.float32))
        assert cls.key_byte % 16 == cls.value_byte % 16 == 0
