"""Fold the code of a latent into the projections around it, in float64; the caller casts once.

With z = constant + scale sum_i 16^i (n_i - 8), n_i the nibbles of a code, as rows are read (see rotor.format.channels):
- what puts out the latent (W_k, W_v, or the key basis) is divided by the scale and shifted by the mean, so that its
  output only has to be floored and clamped;
- what reads the latent (the query's basis, which rebuilds keys too, W_o) has a column for each nibble, multiplied by
  16^i and the scale, and a zero for each empty place;
- the constants become one key or value of each head, together with the means of the channels that are left out. The
  constant key is added to keys as they are read; without RoPE it adds the same to all logits of a query, which softmax
  does not see, and is dropped. Attention weights sum to one, so the constant value is a bias of o_proj.

Source: docs/design.md, Mathematics, Codes: "Steps and means are folded".
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ..errors import NumericsError
from ..format.channels import SIGNED, Channels
from .quantiser import ChannelCode


@dataclass(frozen=True)
class FoldedCode:
    """The channels of one group's latent that are stored, most bits first, and what is around them.

    encode: [n, rank]; keys or values x of the group, side by side, give x @ encode + shift, which is floored and
        packed. shift: [rank].
    read: [n, rank], columns of the channels, times their scales. nibbles: [rank, width], the power of 16 that a
        channel's nibble at a place counts, zero elsewhere.
    offset: [rank], what the signed nibbles of a channel lack of the middle of a level and of the mean, in scales.
        dropped: [n], the mean of the channels that are not stored.
    """

    encode: Tensor
    shift: Tensor
    read: Tensor
    nibbles: Tensor
    offset: Tensor
    dropped: Tensor

    @property
    def decode(self) -> Tensor:
        """[n, width]; the signed nibbles of a row @ decode^T + constant is x as it is read."""
        return self.read @ self.nibbles

    @property
    def constant(self) -> Tensor:
        """What is added to the nibbles' part of x, [n]."""
        return self.read @ self.offset + self.dropped

    def shifted(self, steps: Tensor) -> FoldedCode:
        """Of a projection whose shift is larger by `steps`, [rank], than what was asked for."""
        return replace(self, shift=self.shift + steps, offset=self.offset - steps)

    def to(self, device: torch.device) -> FoldedCode:
        """Itself on another device."""
        return FoldedCode(*(getattr(self, part.name).to(device) for part in fields(self)))


def fold_code(encode: Tensor, decode: Tensor, code: ChannelCode, channels: Channels) -> FoldedCode:
    """Fold a code into the bases of one group.

    Args:
        encode, decode: [n, columns], float64: latent = x @ encode, x is read as latent @ decode^T.
        code: of these columns, those that are stored first, as `channels` has them.
    Raises:
        NumericsError: a scale is not positive, or a result not finite.
    """
    rank = channels.rank
    assert code.bits[:rank].tolist() == list(channels.bits)
    scale, mean = code.scale[:rank], code.mean[:rank]
    if not (scale > 0).all():
        raise NumericsError("a code has a scale that is not positive.", "Calibrate again.")
    nibbles = torch.zeros(rank, channels.width, dtype=torch.float64)
    for place, nibble in enumerate(channels.nibbles):
        if nibble is not None:
            nibbles[nibble[0], place] = 16.0 ** nibble[1]
    offset = mean / scale + 0.5 - code.levels[:rank] / 2 + SIGNED * nibbles.sum(-1)
    dropped = decode[:, rank:] @ code.mean[rank:]
    folded = FoldedCode(encode[:, :rank] / scale, -mean / scale, decode[:, :rank] * scale, nibbles, offset, dropped)
    for name in ("encode", "shift", "read", "offset", "dropped"):
        if not torch.isfinite(getattr(folded, name)).all():
            raise NumericsError(f"{name} is not finite with the code folded in.", "Calibrate with --dtype float32.")
    return folded
