"""Which keys a query sees exactly, against the rule in words; where sequences begin, and which rows are read."""

from __future__ import annotations

import torch

from rotor.checkpoint.layout import ExactTokens
from rotor.kernels.passes import TokenSpan
from rotor.runtime.exact_rows import FAR, _rows_seen, first_real

EXACT = ExactTokens(first=2, newest=3)


def test_the_rule_of_exact_keys() -> None:
    """Numbers and tensors alike: the newest of a query that the ring still has, and the first of its sequence."""
    for begin, until in ((0, 0), (1, 4)):
        query, key = torch.arange(8)[:, None], torch.arange(8)
        got = EXACT.is_exact(query, key, begin, until)
        for i in range(8):
            for j in range(8):
                wanted = (i - j < 3 and j >= until) or j - begin < 2
                assert got[i, j] == wanted == EXACT.is_exact(i, j, begin, until)
                assert EXACT.is_newest(i, j, until) == (i - j < 3 and j >= until)


def test_sequences_begin_at_their_first_token_that_is_no_padding() -> None:
    """In a batch each for itself; FAR where nothing but padding has come."""
    span = TokenSpan(query_offset=4, seq_len=3, kv_offset=1, kv_len=6)  # keys 1 to 6, of which 4 to 6 are new
    mask = torch.ones(3, 1, 3, 6, dtype=torch.bool)
    mask[1, :, :, :4] = False  # up to key 4
    mask[2] = False
    assert first_real(mask, span).tolist() == [4, 5, FAR]
    assert first_real(None, span) == 4
    of_all = torch.ones(3, 1, 1, 6, dtype=torch.bool)  # one row of queries, as a mask of padding has
    of_all[1, :, :, :5] = False
    assert first_real(of_all, span).tolist() == [4, 6, 4]


def test_rows_are_read_from_the_beginning_of_the_largest_block_on() -> None:
    shown = torch.zeros(2, 1, 1, 200, dtype=torch.bool)
    assert _rows_seen(shown) == range(0)
    shown[0, :, :, 150] = True
    assert _rows_seen(shown) == range(128, 151)
    shown[1, :, :, 128] = True
    assert _rows_seen(shown) == range(128, 151)
    shown[1, :, :, 127] = True
    assert _rows_seen(shown) == range(0, 151)
