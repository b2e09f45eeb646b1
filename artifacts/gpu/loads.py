"""Loads that attention is measured at: cached tokens of each sequence of a batch."""

from __future__ import annotations

import random

RAGGED = "64 ragged"
PROMPT = "prompt of 8K"
PROMPT_TOKENS = 8192


def _ragged() -> list[int]:
    """64 lengths from 256 to 16384, all orders of magnitude alike; always the same."""
    draw = random.Random(0)
    return [int(256 * 64 ** draw.random()) for _ in range(64)]


LOADS: dict[str, list[int]] = {
    "8 x 32K": [32768] * 8,
    "1 x 32K": [32768],
    "32 x 8K": [8192] * 32,
    "1 x 128K": [131072],
    RAGGED: _ragged(),
}
"""Lengths of the sequences of a decode step: one new token a sequence, the last of its keys."""

FLASH_ROWS = {16: "Triton flash-decoding", 8: "Triton, fp8 (e4m3)", 4: "Triton, 4 bits in groups"}
"""Rows of flash-decoding in Triton, by the bits of a number of its cache; see `rotor.tools.bench.baselines`."""

CUDA_ROWS = {"llama3-8b-64x2": 64, "llama3-8b-128x2": 128, "llama3-8b-256x2": 256}
"""Layouts that the study in CUDA C++ reads, and bytes of a group's row; see `cuda_decode`."""

APPENDED_TOGETHER = ("llama3-8b-128x2", "llama3-8b-128x4", "smollm2-64x3")
"""Layouts whose groups several programs append, see `arrived`."""
