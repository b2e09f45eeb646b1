"""Fold the code of a latent into the projections around it, in float64; the caller casts once.

With z = mean + scale (n + 1/2), n = code - 2^(bits-1), as rows of codes are read (see rotor.format.columns):
- what puts out the latent (W_k, W_v, or the key basis) is divided by the scale and shifted, so that its output only has
  to be floored and clamped;
- what reads the latent (the query's basis, the basis that rebuilds keys, W_o) is multiplied by the scale;
- mean and half become a constant key or value of each head, together with the means of the columns that are left out.
  Before RoPE the constant key is added to the rebuilt keys. After RoPE, or without it, it adds the same to all logits
  of a query, which softmax does not see: there it is dropped, unless a soft cap stands between. Attention weights sum
  to one, so the constant value is a bias of o_proj.

Source: docs/design.md, Mathematics, Codes: "Steps and means are folded".
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..errors import NumericsError
from ..format.columns import EXACT_BITS
from .quantiser import ColumnCode


@dataclass(frozen=True)
class FoldedCode:
    """The columns of one group's latent that are stored, widest first, and what is around them.

    bits: [stored], int64, descending. columns: [stored], their places in the basis.
    encode: [n, stored]; keys or values x of the group, side by side, give numbers x @ encode + shift, which `quantise`
        turns into what is stored. shift: [stored].
    decode: [n, stored]; numbers @ decode^T + constant is x as it is read.
    offset: [stored], what numbers lack of the middle of their levels and of the mean, in steps. dropped: [n], the mean
        of the columns that are not stored.
    """

    bits: Tensor
    columns: Tensor
    encode: Tensor
    shift: Tensor
    decode: Tensor
    offset: Tensor
    dropped: Tensor

    @property
    def constant(self) -> Tensor:
        """What is added to the numbers' part of x, [n]."""
        return self.decode @ self.offset + self.dropped

    def to(self, device: torch.device) -> FoldedCode:
        """Itself on another device."""
        return FoldedCode(*(getattr(self, part.name).to(device) for part in fields(self)))

    def quantise(self, projected: Tensor) -> Tensor:
        """[..., stored] as projected -> the numbers n that attention reads; columns of 16 bits stay as they are."""
        bits = self.bits.to(projected.device)
        half = 2.0 ** (bits.to(projected.dtype) - 1)
        numbers = torch.minimum(torch.maximum(projected.floor(), -half), half - 1)
        return torch.where(bits == EXACT_BITS, projected, numbers)


def fold_code(encode: Tensor, decode: Tensor, code: ColumnCode) -> FoldedCode:
    """Fold a code into the bases of one group.

    Args:
        encode, decode: [n, columns], float64: latent = x @ encode, x is read as latent @ decode^T.
        code: of these columns.
    Raises:
        NumericsError: a scale is not positive, or a result not finite.
    """
    columns = torch.argsort(code.bits, descending=True, stable=True)[: int((code.bits > 0).sum())]
    bits, coded = code.bits[columns], code.is_coded[columns]
    one = torch.ones(len(columns), dtype=torch.float64)
    scale = torch.where(coded, code.scale[columns], one)
    if not (scale > 0).all():
        raise NumericsError("a code has a scale that is not positive.", "Calibrate again.")
    shift = torch.where(coded, -code.mean[columns] / scale, 0 * one)
    offset = torch.where(coded, code.mean[columns] / scale + 0.5, 0 * one)
    rest = code.bits == 0
    dropped = decode[:, rest] @ code.mean[rest]
    folded = FoldedCode(bits, columns, encode[:, columns] / scale, shift, decode[:, columns] * scale, offset, dropped)
    for name in ("encode", "shift", "decode", "offset", "dropped"):
        if not torch.isfinite(getattr(folded, name)).all():
            raise NumericsError(f"{name} is not finite with the code folded in.", "Calibrate with --dtype float32.")
    return folded
