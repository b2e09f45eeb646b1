"""Fold the code of a latent into the projections around it, in float64; the caller casts once.

With z = constant + scale sum_i l_i (n_i - 8), n_i the nibbles and crumbs of a row and l_i how many levels a unit of
each counts (see rotor.checkpoint.channels):
- what puts out the latent (W_k, W_v, or the key basis) is divided by the scale and shifted by the mean, so that its
  output only has to be floored and clamped;
- what reads the latent (the query's basis, which rebuilds keys too, W_o) has a column for each n_i, multiplied by l_i
  and the scale, and a zero for each empty place;
- the constants become one key or value of each head, together with the means of the channels that are left out. The
  constant key is added to keys as they are read; without RoPE it adds the same to all logits of a query, which softmax
  does not see, and is dropped. Attention weights sum to one, so the constant value is a bias of o_proj.

Source: docs/design.md, Mathematics, Nibbles: "Scales and means are folded".
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...checkpoint.channels import SIGNED, Channels
from ...checkpoint.rewrite import FoldedBasis, levels_of
from ...errors import NumericsError
from .quantiser import ChannelCode


def fold_code(
    encode: Tensor,
    decode: Tensor,
    code: ChannelCode,
    channels: Channels,
    shift: Tensor | None = None,
    constant: Tensor | None = None,
) -> FoldedBasis:
    """Fold a code into the bases of one group.

    Args:
        encode, decode: [n, columns], float64: latent = x @ encode + shift, x is read as latent @ decode^T + constant.
        code: of these columns, those that are stored first, as `channels` has them.
        shift: [columns]. constant: [n].
    Raises:
        NumericsError: a scale is not positive, or a result not finite.
    """
    rank = channels.rank
    assert code.bits[:rank].tolist() == list(channels.bits)
    scale, mean = code.scale[:rank], code.mean[:rank]
    if not (scale > 0).all():
        raise NumericsError("a code has a scale that is not positive.", "Calibrate again.")
    offset = mean / scale + 0.5 - code.levels[:rank] / 2 + SIGNED * levels_of(channels).sum(1)
    dropped = decode[:, rank:] @ code.mean[rank:] + (0 if constant is None else constant)
    before = ((0 if shift is None else shift[:rank]) - mean) / scale
    folded = FoldedBasis(channels, encode[:, :rank] / scale, decode[:, :rank] * scale, before, offset, dropped)
    for name, tensor in folded.tensors().items():
        if not torch.isfinite(tensor).all():
            raise NumericsError(f"{name} is not finite with the code folded in.", "Calibrate with --dtype float32.")
    return folded
