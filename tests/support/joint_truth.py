"""Joint groups coded in float64: a reference that knows nothing of rows and of folding."""

from __future__ import annotations

import torch
from torch import Tensor

from rotor.checkpoint.bases import BasisPair


def read_numbers(numbers: Tensor, pair: BasisPair, group: int) -> tuple[Tensor, Tensor]:
    """Numbers of a joint group as they are read, and the scale of each row.

    Args:
        numbers: [..., n], each head's key as it is stored and then its value.
    """
    assert pair.mean is not None
    assert pair.lengths is not None
    code, stored = pair.codes[group], pair.codes[group].bits > 0
    weights = pair.lengths[group] * stored
    latents = (numbers.double() - pair.mean[group]) @ pair.encode[group]
    energy = (latents.square() * weights).sum(-1) / int(weights.count_nonzero())
    steps = energy.log2().round().clamp(-8, 7)

    def lost(steps: Tensor) -> Tensor:
        """A twelfth of a squared step, and the square of what is beyond the last level, of each stored channel."""
        scale = 2.0 ** (steps / 2).unsqueeze(-1)
        level = ((latents / scale - code.mean) / code.scale)[..., stored]
        beyond = (level.abs() - (2.0 ** (code.bits[stored] - 1) - 0.5)).clamp(min=0)
        return (beyond.square() + 1 / 12).sum(-1) * scale.squeeze(-1).square()

    steps = torch.where((lost(steps + 1) < lost(steps)) & (steps < 7), steps + 1, steps)
    scale = 2.0 ** (steps / 2).unsqueeze(-1)
    read = scale * code.decode(code.encode(latents / scale)) @ pair.decode[group].T
    return read + pair.mean[group], scale
