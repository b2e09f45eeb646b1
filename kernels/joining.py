"""Attention to all keys from attention to disjoint sets of them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def join(outputs: list[Tensor], log_sums: list[Tensor], widths: list[int]) -> tuple[Tensor, Tensor]:
    """Weigh what was found in each set by its log-sum-exp.

    Args:
        outputs: [..., sum of widths] of each set. log_sums: [..., heads]; -inf where a head sees none of the set.
        widths: of each head's output.
    Returns:
        [..., sum of widths], zeros for heads that see no key at all; and the log-sum-exp over all sets, [..., heads].
    """
    stacked = torch.stack(log_sums)
    largest = stacked.amax(0)
    weights = torch.exp(stacked - largest.masked_fill(largest == -torch.inf, 0.0))
    total = weights.sum(0)
    shares = weights / total.masked_fill(total == 0.0, 1.0)
    heads = _head_of_columns(tuple(widths), shares.device)
    return (torch.stack(outputs) * shares[..., heads]).sum(0), largest + total.log()


@lru_cache(maxsize=256)
def _head_of_columns(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """[sum of widths] int64."""
    return torch.repeat_interleave(torch.tensor(widths)).to(device)
