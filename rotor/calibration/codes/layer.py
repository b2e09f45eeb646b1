"""Fit the codes of a layer, and apply the channels of a plan to its bases."""

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

FITTED_BITS = (0, *reversed(WIDTHS))
"""Bits at which every channel's code is fitted, so that any of them can be allocated later."""

TOKEN_GRADIENT_SHARE = 0.5
"""Weight of a token's squared gradient in the cost of its error; the rest is the mean over tokens, as one gradient is a
noisy estimate. See artifacts/NOTES.md."""

GroupChannels = list[tuple[Channels, Channels | None]]
"""Channels of the key latent and of the value latent for each group of a layer, in the order of the bases; None for
values that share the key latent."""


def as_pair(latents: Sequence[Channels]) -> tuple[Channels, Channels | None]:
    """Pair the latents of a group in the form of GroupChannels: keys and values, or one joint latent and None."""
    return latents[0], latents[1] if len(latents) > 1 else None


def channels_bytes(channels: list[GroupChannels]) -> int:
    """Bytes that a token takes in the caches of all layers."""
    return sum(aligned(side.row_bytes(), len(layer)) for layer in channels for pair in layer for side in pair if side)


@dataclass(frozen=True)
class SideCodes:
    """Fitted codes of one latent of a layer (keys, values, or both), batched over its groups; float64.

    weight: [num_groups, channels], cost in nats per token of a squared error of 1 in each channel.
    variance: [num_groups, channels], with each token weighted by its squared gradient.
    mean, scale, distortion: [widths, num_groups, channels], at the bits of FITTED_BITS; see ChannelFit.
    """

    weight: Tensor
    variance: Tensor
    mean: Tensor
    scale: Tensor
    distortion: Tensor

    def losses(self, group: int, widths: tuple[int, ...]) -> Tensor:
        """Predict the loss of each channel of a group at each of `widths`, [widths, channels]."""
        index = [FITTED_BITS.index(bits) for bits in widths]
        return self.weight[group] * self.variance[group] * self.distortion[index, group]

    def order(self, group: int) -> Tensor:
        """Indices of a group's channels in descending order of the loss without them, their order in a checkpoint."""
        return torch.argsort(self.losses(group, (0,))[0], descending=True, stable=True)

    def code(self, group: int, channels: Channels) -> tuple[Tensor, ChannelCode]:
        """Order of a group's channels, and their codes in that order: most bits first, the rest at 0 bits."""
        order = self.order(group)
        bits = torch.zeros(len(order), dtype=torch.int64)
        bits[: channels.rank] = torch.tensor(channels.bits)
        index = torch.tensor([FITTED_BITS.index(width) for width in bits.tolist()])
        return order, ChannelCode(bits, self.mean[index, group, order], self.scale[index, group, order])


def codes_bytes(channels: int) -> int:
    """Bytes of SideCodes with this many channels: weight, variance, and three numbers at each of FITTED_BITS."""
    return 8 * channels * (2 + 3 * len(FITTED_BITS))


@dataclass(frozen=True)
class LayerCodes:
    """Codes of a layer's latents: one for keys and one for values, or a joint one (vo is None)."""

    qk: SideCodes
    vo: SideCodes | None = None

    @property
    def sides(self) -> tuple[SideCodes, ...]:
        """Codes of each latent."""
        return (self.qk,) if self.vo is None else (self.qk, self.vo)


def layer_codes(bases: LayerBases, gradients: LayerFisher) -> LayerCodes:
    """Fit the codes of every channel at every width, and weight their errors.

    An error e of token t costs g_t^2 e^2 / 2. Tokens with large latents often have large gradients, so the mean of the
    product is not the product of means. Codes are therefore fitted, and their distortions measured, with weights that
    mix each token's g_t^2 (TOKEN_GRADIENT_SHARE of it) with the mean over tokens. Levels are shifted so that the mean
    first token is coded exactly.

    Source: docs/design.md, Mathematics, Codes. The weight is half the Fisher information, diag(B^T E[g g^T] B).
    """
    names = latent_names(bases.form, bases.joint)
    return LayerCodes(*(_side(name, pair, gradients) for name, pair in zip(names, bases.latents, strict=True)))


def _side(name: str, pair: BasisPair, gradients: LayerFisher) -> SideCodes:
    information = gradients.per_token(name)
    weight = torch.einsum("gir,gij,gjr->gr", pair.decode, information, pair.decode) / 2
    vectors, vector_gradients, share = gradients.sampled(name)
    squares = (vector_gradients @ pair.decode).square()
    mean = (share[:, None] * squares).sum(1, keepdim=True)
    costs = share[:, None] * (TOKEN_GRADIENT_SHARE * squares + (1 - TOKEN_GRADIENT_SHARE) * mean)
    latents = vectors @ pair.encode
    first = (gradients.first(name).unsqueeze(1) @ pair.encode).squeeze(1)
    groups = zip(latents, costs, first, strict=True)
    fits = [measure_channels(latent, cost, FITTED_BITS, exact) for latent, cost, exact in groups]
    variance, *at_widths = zip(*fits, strict=True)
    return SideCodes(weight.clamp(min=0), torch.stack(variance), *(torch.stack(parts, dim=1) for parts in at_widths))


def coded_bases(bases: LayerBases, codes: LayerCodes, channels: GroupChannels) -> LayerBases:
    """Order the columns of each group by their loss, and code them with the channels of a plan."""
    latents = []
    for index, (pair, side) in enumerate(zip(bases.latents, codes.sides, strict=True)):
        by_group = [latent for group_channels in channels if (latent := group_channels[index]) is not None]
        coded = [side.code(group, latent) for group, latent in enumerate(by_group)]
        ordered = pair.ordered(torch.stack([order for order, _ in coded]))
        latents.append(replace(ordered, codes=tuple(code for _, code in coded)))
    return replace(bases, latents=tuple(latents))
