"""Fold the latents of a joint group, which are coded one after another, into one basis.

Fast numbers f and others r of a token, less their mean, have latents y = f E_f (of each head) and z = t E_r. With y
read as y^, f^ = y^ D_f^T and e = f^ - f, the rest is t = r + e B - f^ P: feedback B, prediction P (`bases.Parting`).
Stored channels S alone would read f as f S, S = E_S D_S^T; what is missing there is an error that is known before
anything is coded. So with the errors e_S = y^_S - y_S of stored channels

    z = (r + f (S - 1) B - f S P) E_r + e_S D_S^T (B - P) E_r + s mu_d D_d^T (B - P) E_r

The first term is linear in the token and becomes a part of the projection; the second is one product with the errors
(`error_basis`); the third, of what dropped channels are read as, is a constant that the scale s multiplies. What is
read is linear in all latents: f^ = y^ D_f^T and r^ = z^ D_r^T + f^ P.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .bases import (
    BasisPair,
    ChannelCode,
    FoldedBasis,
    LayerBases,
    Parting,
    ScaledCode,
    fast_numbers,
    levels_of,
    other_numbers,
)
from .channels import SIGNED, Numbers, Parted
from .layout import AttentionShape


def parted_basis(
    bases: LayerBases, group: int, latent: Parted | Numbers, shape: AttentionShape
) -> tuple[FoldedBasis, ScaledCode | None]:
    """The basis of a joint group over its numbers, each head's key and then its value, with its code folded in.

    Args:
        group: in the order of the bases. latent: `Numbers` of all columns for bases without codes.
    Source: docs/design.md, Mathematics, Parted groups.
    """
    assert bases.parting is not None
    parts = _Parts(bases, bases.parting, group, shape)
    if isinstance(latent, Numbers):
        encode, decode, _ = parts.of([part.encode.shape[-1] for part in parts.all])
        return FoldedBasis(latent, encode[:, : latent.rank], decode[:, : latent.rank]), None
    ranks = [part.rank for part in latent.parts]
    encode, decode, errors = parts.of(ranks)
    codes = parts.codes
    assert [bits for code, rank in zip(codes, ranks, strict=True) for bits in code.bits[:rank].tolist()] == list(
        latent.bits
    )
    scale, mean, levels = (
        torch.cat([getattr(code, name)[:rank] for code, rank in zip(codes, ranks, strict=True)])
        for name in ("scale", "mean", "levels")
    )
    dropped, known = parts.dropped(ranks)
    offset = mean / scale + 0.5 - levels / 2 + SIGNED * levels_of(latent).sum(1)
    fast = latent.fast_rank
    before = -(parts.mean @ encode) / scale
    basis = FoldedBasis(latent, encode / scale, decode * scale, before, offset, dropped, parts.mean)
    shift = (torch.cat([known.new_zeros(fast), known]) - mean) / scale
    length = scale.square() * parts.lengths(ranks)
    return basis, ScaledCode(shift, length, errors * scale[:fast, None] / scale[fast:] if fast else None)


class _Parts:
    """The latents of a group: of the fast planes of each of its KV heads, then of the rest."""

    def __init__(self, bases: LayerBases, parting: Parting, group: int, shape: AttentionShape) -> None:
        size = bases.group_size
        *fast, rest = bases.latents
        heads = range(group * size, (group + 1) * size)
        self.all: list[BasisPair] = [_one(fast[0], head) for head in heads] if fast else []
        self.all.append(_one(rest, group))
        self.places = list(fast_numbers(bases.form, size, shape)) if fast else []
        self.others = other_numbers(bases.form, size, shape)
        self.mean = parting.mean[group]
        self.prediction = list(parting.prediction[group].chunk(size)) if fast else []
        self.feedback = list(parting.feedback[group].chunk(size)) if fast else []

    @property
    def codes(self) -> list[ChannelCode]:
        return [part.codes[0] for part in self.all]

    def of(self, ranks: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """encode, decode [n, sum of ranks], and what errors of fast channels add to the rest, [fast, rest].

        ranks: channels of each latent that are stored.
        """
        encode, decode = (self.mean.new_zeros(len(self.mean), sum(ranks)) for _ in range(2))
        rest = self.all[-1]
        rest_encode, first = rest.encode[:, : ranks[-1]], 0
        errors = []
        encode[self.others, -ranks[-1] :] = rest_encode
        decode[self.others, -ranks[-1] :] = rest.decode[:, : ranks[-1]]
        for part, rank, place, prediction, feedback in zip(
            self.all[:-1], ranks[:-1], self.places, self.prediction, self.feedback, strict=True
        ):
            own = slice(first, first + rank)
            read = part.decode[:, :rank]
            encode[place, own], decode[place, own] = part.encode[:, :rank], read
            decode[self.others, own] = prediction.T @ read
            moved = part.encode[:, :rank] @ read.T @ (prediction - feedback) + feedback
            encode[place, -ranks[-1] :] = -moved @ rest_encode
            errors.append(read.T @ (feedback - prediction) @ rest_encode)
            first = own.stop
        return encode, decode, torch.cat(errors) if errors else rest_encode.new_zeros(0, ranks[-1])

    def dropped(self, ranks: list[int]) -> tuple[Tensor, Tensor]:
        """What channels that are not stored are read as, times the scale: [n], and what it adds to the rest, [rank]."""
        read = torch.zeros_like(self.mean)
        known = self.mean.new_zeros(ranks[-1])
        means = [code.mean[rank:] for code, rank in zip(self.codes, ranks, strict=True)]
        read[self.others] = self.all[-1].decode[:, ranks[-1] :] @ means[-1]
        for part, rank, place, mean, prediction, feedback in zip(
            self.all[:-1], ranks[:-1], self.places, means[:-1], self.prediction, self.feedback, strict=True
        ):
            fast = part.decode[:, rank:] @ mean
            read[place] = fast
            read[self.others] += fast @ prediction
            known = known + fast @ (feedback - prediction) @ self.all[-1].encode[:, : ranks[-1]]
        return read, known

    def lengths(self, ranks: list[int]) -> Tensor:
        """Weights of the squared latents, [sum of ranks], whose sum over a token is the square of its scale."""
        assert all(part.lengths is not None for part in self.all)
        weights = torch.cat(
            [part.lengths[0, :rank] for part, rank in zip(self.all, ranks, strict=True) if part.lengths is not None]
        )
        return weights / weights.count_nonzero()


def _one(pair: BasisPair, index: int) -> BasisPair:
    """The bases of one latent of a batch, without its dimension."""
    return BasisPair(
        pair.encode[index],
        pair.decode[index],
        pair.singular_values[index],
        codes=pair.codes[index : index + 1],
        lengths=None if pair.lengths is None else pair.lengths[index : index + 1],
    )
