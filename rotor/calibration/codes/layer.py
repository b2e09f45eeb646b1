"""The codes that calibration fits for a layer, and its bases with the channels of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...checkpoint.bases import BasisPair, ChannelCode, LayerBases
from ...checkpoint.channels import WIDTHS, Channels, aligned
from ..bases.information import LayerFisher
from ..bases.moments import latent_names
from .quantiser import measure_channels

MEASURED = (0, *reversed(WIDTHS))
"""Bits at which every channel is measured, so that any of them can be allocated later."""

OWN = 0.5
"""Part of a token's own squared gradient, against their mean, in what an error of it costs; see artifacts/NOTES.md."""

GroupChannels = list[tuple[Channels, Channels | None]]
"""Channels of the key and of the value latent of each group of a layer, in the order of the bases; None for values that
are in the key latent."""


def as_pair(latents: Sequence[Channels]) -> tuple[Channels, Channels | None]:
    """Pair the latents of a group (keys and values, or one of both) as GroupChannels does."""
    return latents[0], latents[1] if len(latents) > 1 else None


def channels_bytes(channels: list[GroupChannels]) -> int:
    """Bytes of a token in all layers."""
    return sum(aligned(side.row_bytes(), len(layer)) for layer in channels for pair in layer for side in pair if side)


@dataclass(frozen=True)
class SideCodes:
    """Fitted codes of one side (keys or values) of a layer, batched over its groups; float64.

    weight: [num_groups, channels], what a squared error of 1 in each channel costs in nats per token. variance:
    the same shape, each token weighed by its squared gradient. mean, scale, distortion: [widths, num_groups,
    channels], at
    the bits of MEASURED; see ChannelFit.
    """

    weight: Tensor
    variance: Tensor
    mean: Tensor
    scale: Tensor
    distortion: Tensor

    def losses(self, group: int, widths: tuple[int, ...]) -> Tensor:
        """Predicted loss of each channel of a group at each of `widths`, [widths, channels]."""
        index = [MEASURED.index(bits) for bits in widths]
        return self.weight[group] * self.variance[group] * self.distortion[index, group]

    def order(self, group: int) -> Tensor:
        """Channels of a group in descending order of the loss without them: their order in the checkpoint."""
        return torch.argsort(self.losses(group, (0,))[0], descending=True, stable=True)

    def code(self, group: int, channels: Channels) -> tuple[Tensor, ChannelCode]:
        """The order of a group's channels, and their code in that order: most bits first, the rest at 0 bits."""
        order = self.order(group)
        bits = torch.zeros(len(order), dtype=torch.int64)
        bits[: channels.rank] = torch.tensor(channels.bits)
        index = torch.tensor([MEASURED.index(width) for width in bits.tolist()])
        return order, ChannelCode(bits, self.mean[index, group, order], self.scale[index, group, order])


@dataclass(frozen=True)
class LayerCodes:
    """The latents of a layer: of keys and of values, or one of both (vo is None)."""

    qk: SideCodes
    vo: SideCodes | None = None

    @property
    def sides(self) -> tuple[SideCodes, ...]:
        """The codes of each latent."""
        return (self.qk,) if self.vo is None else (self.qk, self.vo)


def layer_codes(bases: LayerBases, gradients: LayerFisher) -> LayerCodes:
    """Fit the codes of every channel at every width, and weigh their errors.

    An error e of token t costs g_t^2 e^2 / 2. Tokens of large latents often have large gradients, so that the mean of
    the product is not the product of means: codes are fitted, and their distortions measured, with each token's own
    g_t^2, by OWN, and for the rest with the mean, as one gradient is but a draw. Levels go through rows' first tokens.

    Source: docs/design.md, Mathematics, Codes. The weight is half the Fisher information, diag(B^T E[g g^T] B).
    """
    names = latent_names(bases.form, bases.joint)
    return LayerCodes(*(_side(name, pair, gradients) for name, pair in zip(names, bases.latents, strict=True)))


def _side(name: str, pair: BasisPair, gradients: LayerFisher) -> SideCodes:
    information = gradients.per_token(name)
    weight = torch.einsum("gir,gij,gjr->gr", pair.decode, information, pair.decode) / 2
    vectors, by_them, share = gradients.sampled(name)
    squares = (by_them @ pair.decode).square()
    mean = (share[:, None] * squares).sum(1, keepdim=True)
    costs = share[:, None] * (OWN * squares + (1 - OWN) * mean)
    latents = vectors @ pair.encode
    first = (gradients.first(name).unsqueeze(1) @ pair.encode).squeeze(1)
    fits = [measure_channels(own, cost, MEASURED, at) for own, cost, at in zip(latents, costs, first, strict=True)]
    variance, *at_widths = zip(*fits, strict=True)
    return SideCodes(weight.clamp(min=0), torch.stack(variance), *(torch.stack(parts, dim=1) for parts in at_widths))


def coded_bases(bases: LayerBases, codes: LayerCodes, channels: GroupChannels) -> LayerBases:
    """Order the columns of each group by what they are worth, and code them as a plan says."""
    latents = []
    for index, (pair, side) in enumerate(zip(bases.latents, codes.sides, strict=True)):
        own = [latent for of_group in channels if (latent := of_group[index]) is not None]
        of_groups = [side.code(group, of_group) for group, of_group in enumerate(own)]
        ordered = pair.ordered(torch.stack([order for order, _ in of_groups]))
        latents.append(replace(ordered, codes=tuple(code for _, code in of_groups)))
    return replace(bases, latents=tuple(latents))
