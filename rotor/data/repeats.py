"""Rows of calibration tokens in which something is stated again, so that what a model does to look it up counts."""

from __future__ import annotations

import torch
from torch import Tensor

SPAN, TIMES = 32, 2
"""Tokens that are stated again, and how often."""


def with_repeats(rows: Tensor, share: float, seed: int, vocabulary: Tensor) -> Tensor:
    """State a span early in a row, and again further on, in a share of the rows, the last ones.

    Text seldom asks for what stands far back, so that its gradients say little of the columns by which a model finds
    it: those look cheap, and go first. A span that is repeated is predicted by looking back for it. Every second span
    is of the text; the others are tokens drawn at random, as what is looked up is often rare.

    Args:
        rows: [n, seq_len]. Spans of text come from places drawn in all rows; one is written over the first quarter of
            a row and, TIMES times, over equal parts of the rest, at drawn places. First tokens of rows stay. Rows that
            are too short for it stay as they are.
        vocabulary: [m], the tokens to draw from; with none all spans are of the text.
    Returns:
        [n, seq_len], new.
    """
    count, seq_len = rows.shape
    generator = torch.Generator().manual_seed(seed)

    def drawn(below: int) -> int:
        return int(torch.randint(below, (1,), generator=generator))

    found, early, part = rows.clone(), seq_len // 4, (seq_len - seq_len // 4) // TIMES
    span = min(SPAN, early - 1)
    if span < 2 or part < span:
        return found
    for row in range(count - round(share * count), count):
        source, start = drawn(count), drawn(seq_len - span + 1)
        text = rows[source, start : start + span]
        if row % 2 and len(vocabulary):
            text = vocabulary[torch.randint(len(vocabulary), (span,), generator=generator)]
        places = [1 + drawn(early - span)]
        places += [early + time * part + drawn(part - span + 1) for time in range(TIMES)]
        for place in places:
            found[row, place : place + span] = text
    return found
