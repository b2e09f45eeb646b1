"""Fit the codes of a layer, and apply the channels of a plan to its bases."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...checkpoint.bases import BasisPair, LayerBases
from ...checkpoint.rows import CodedRow, aligned, scale_nibble, scale_of
from ..information import LayerFisher
from ..moments import vector_names
from .side import FITTED_BITS, SideCodes, side_codes

NOMINAL_BITS = 2.5
"""Bits a number of a latent by which the channels whose length scales a row are chosen: no plan is known yet."""

BISECTIONS = 60

GroupChannels = list[tuple[CodedRow, ...]]
"""Channels of each latent of each group of a layer, in the order of the bases: of keys and of values, or of both."""


def channels_bytes(channels: list[GroupChannels]) -> int:
    """Bytes that a token takes in the caches of all layers."""
    return sum(aligned(row.row_bytes(), len(layer)) for layer in channels for rows in layer for row in rows)


@dataclass(frozen=True)
class LayerCodes:
    """Codes of each latent of a layer, in the order of `LayerBases.latents`."""

    sides: tuple[SideCodes, ...]

    @property
    def qk(self) -> SideCodes:
        """Codes of keys, or of both in joint groups."""
        return self.sides[0]

    @property
    def vo(self) -> SideCodes:
        """Codes of values, or of both in joint groups."""
        return self.sides[-1]


def layer_codes(bases: LayerBases, gradients: LayerFisher, device: torch.device | None = None) -> LayerCodes:
    """Fit the codes of every channel at every width, and weight their errors.

    An error e of token t costs g_t^2 e^2 / 2. Tokens with large latents often have large gradients, so the mean of the
    product is not the product of means. Codes are therefore fitted, and their distortions measured, with weights that
    mix each token's g_t^2 (TOKEN_GRADIENT_SHARE of it) with the mean over tokens. Levels are shifted so that the mean
    first token is coded exactly. The latents of joint groups are divided by the scale of their row.

    Args:
        device: fits channels there; None: on the CPU. The result is on the CPU.
    Source: docs/design.md, Mathematics, Codes. The weight is half the Fisher information, diag(B^T E[g g^T] B).
    """
    sides = []
    for name, pair in zip(vector_names(bases.layer_form), bases.latents, strict=True):
        vectors, by_vectors, share = gradients.sampled(name)
        first = gradients.first(name).unsqueeze(1)
        information = gradients.per_token(name)
        if pair.mean is not None:
            vectors, first = (x - pair.mean.unsqueeze(1) for x in (vectors, first))
        latents, on_level = vectors @ pair.encode, first @ pair.encode
        scale = length = None
        if pair.mean is not None:
            length = scaling_channels(pair, information, latents, share)
            scale, scale_of_first = (row_scale(z, length) for z in (latents, on_level))
            on_level = on_level / scale_of_first.unsqueeze(-1)
        side = side_codes(pair, information, latents, by_vectors, share, on_level.squeeze(1), scale, device=device)
        sides.append(side if length is None else replace(side, length=length))
    return LayerCodes(tuple(sides))


def scaling_channels(pair: BasisPair, information: Tensor, latents: Tensor, share: Tensor) -> Tensor:
    """Weights of squared latents in a row's scale, [num_groups, channels]: 1 / variance of channels worth bits, or 0.

    Args:
        information: of the numbers that are encoded, [num_groups, n, n]. latents: [num_groups, samples, channels].
        share: [samples] of all tokens.
    """
    variance = (share[:, None] * latents.square()).sum(1)
    cost = torch.einsum("gir,gij,gjr->gr", pair.decode, information, pair.decode).clamp(min=0) * variance
    known = (nominal_bits(cost) > 0) & (variance > 0)
    return torch.where(known, 1 / variance.clamp(min=torch.finfo(torch.float64).tiny), 0.0)


def row_scale(latents: Tensor, length: Tensor) -> Tensor:
    """Scales of rows by their length, [num_groups, tokens]: the next larger ones are chosen once codes are known."""
    energy = (length.unsqueeze(1) * latents.square()).sum(-1)
    count = length.count_nonzero(-1).clamp(min=1).unsqueeze(1)
    return scale_of(scale_nibble(energy / count)).to(torch.float64)


def nominal_bits(cost: Tensor) -> Tensor:
    """Bits of every channel by reverse water-filling over a layer, NOMINAL_BITS a channel on average.

    Args:
        cost: [num_groups, channels], what the loss of a whole channel costs.
    """
    widths = torch.tensor(FITTED_BITS)
    wanted = cost.clamp(min=torch.finfo(torch.float64).tiny).log2() / 2

    def at(level: float) -> Tensor:
        return widths[(wanted.unsqueeze(-1) - level - widths).abs().argmin(-1)]

    low, high = float(wanted.min()) - max(FITTED_BITS), float(wanted.max())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).sum() > NOMINAL_BITS * cost.numel() else (low, middle)
    return at(high)


def coded_bases(bases: LayerBases, codes: LayerCodes, channels: GroupChannels) -> LayerBases:
    """Order the columns of each group by their loss, and code them with the channels of a plan."""
    latents: list[BasisPair] = []
    for pair, side, rows in zip(bases.latents, codes.sides, zip(*channels, strict=True), strict=True):
        coded = [side.code(group, row) for group, row in enumerate(rows)]
        order = torch.stack([order for order, _ in coded])
        lengths = None if pair.mean is None else side.length.gather(-1, order)
        latents.append(replace(pair.ordered(order), codes=tuple(code for _, code in coded), lengths=lengths))
    return replace(bases, latents=tuple(latents))
