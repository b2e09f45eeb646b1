"""Divide the tokens of a prompt among processes: two runs each, one from either end, so that the causal mask leaves all
the same amount of work."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def token_runs(tokens: int, processes: int) -> list[list[range]]:
    """The tokens of each process: one run from the beginning and one from the end, as even as can be.

    Args:
        tokens: at least two a process.
    """
    edges = [tokens * i // (2 * processes) for i in range(2 * processes + 1)]
    runs = [range(start, end) for start, end in pairwise(edges)]
    return [[runs[process], runs[-1 - process]] for process in range(processes)]


def own_indices(tokens: int, processes: int, device: torch.device) -> list[Tensor]:
    """Indices of each process's tokens of a prompt."""
    return [torch.tensor([*head, *tail], device=device) for head, tail in token_runs(tokens, processes)]
