"""Ranges of a mask against the mask."""

from __future__ import annotations

import pytest
import torch

from rotor.kernels.ranges import KeyRanges


@pytest.mark.parametrize("kv_len", [70, 2100])
@pytest.mark.parametrize(("shape", "share"), [((3, 1), 0.05), ((2, 5), 0.0), ((2, 5), 0.5), ((1, 1), 1.0)])
def test_ranges_are_those_of_the_mask(shape, share, kv_len) -> None:
    mask = torch.rand(*shape, kv_len, generator=torch.Generator().manual_seed(kv_len)) < share
    keys = KeyRanges.of_mask(mask.transpose(0, 2).contiguous().transpose(0, 2) if kv_len == 70 else mask)
    for row, own in enumerate(mask.flatten(0, 1)):
        found = own.nonzero().flatten().tolist()
        first, end = (found[0], found[-1] + 1) if found else (0, 0)
        assert (int(keys.first[row]), int(keys.end[row])) == (first, end)
        assert bool(keys.holes[row]) == (len(found) != end - first)
        assert torch.equal(keys.mask[row].bool(), own)
    assert keys.batch_size == shape[0]
    for b, own in enumerate(mask.any(1)):
        found = own.nonzero().flatten().tolist()
        if found:
            assert (int(keys.begin[b]), int(keys.until[b])) == (found[0], found[-1] + 1)
        else:
            assert int(keys.until[b]) == 0
    assert (keys.query_start is None) == (shape[1] == 1)
