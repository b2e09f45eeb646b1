"""Fit the codes of a layer, and apply the channels of a plan to its bases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...checkpoint.bases import BasisPair, LayerBases
from ...checkpoint.channels import Channels, Parted, aligned
from ..bases.information import LayerFisher
from ..bases.moments import vector_names
from .parted import parted_codes
from .side import FastErrors, SideCodes, side_codes

Coded = Channels | Parted
"""Channels of a row of codes."""

GroupChannels = list[tuple[Coded, Coded | None]]
"""Channels of the key latent and of the value latent for each group of a layer, in the order of the bases; of joint
groups those of both, and None."""


def by_latent(channels: GroupChannels) -> list[list[Channels]]:
    """The channels of each latent of a layer, in the order of `LayerBases.latents`."""
    parted = [key for key, _ in channels if isinstance(key, Parted)]
    if parted:
        fast = [latent for key in parted for latent in key.fast]
        return [*([fast] if fast else []), [key.rest for key in parted]]
    return [[side for side in sides if isinstance(side, Channels)] for sides in zip(*channels, strict=True)]


def channels_bytes(channels: list[GroupChannels]) -> int:
    """Bytes that a token takes in the caches of all layers."""
    return sum(aligned(side.row_bytes(), len(layer)) for layer in channels for pair in layer for side in pair if side)


@dataclass(frozen=True)
class LayerCodes:
    """Codes of each latent of a layer, in the order of `LayerBases.latents`.

    joint: keys and values are coded together. errors: what fast codes do to the rest; None without fast latents.
    """

    sides: tuple[SideCodes, ...]
    joint: bool
    errors: FastErrors | None = None

    def with_fast(self, channels: Sequence[Channels]) -> LayerCodes:
        """The same with the codes of the rest for fast latents of these channels."""
        return replace(self, sides=(self.sides[0], self.sides[1].stretched(self.ratio(channels))))

    def ratio(self, channels: Sequence[Channels]) -> Tensor:
        """Variances of the rest, given fast latents of these channels, over those that its codes were fitted to."""
        assert self.errors is not None
        fast = self.sides[0]
        codes = [fast.code(head, own)[1] for head, own in enumerate(channels)]
        order = torch.stack([fast.order(head) for head in range(len(codes))])
        lost = fast.distortions(codes)
        return self.errors.ratio(torch.empty_like(lost).scatter(-1, order, lost))

    @property
    def qk(self) -> SideCodes:
        """Codes of keys that are coded apart."""
        return self.sides[0]

    @property
    def vo(self) -> SideCodes:
        """Codes of values that are coded apart."""
        return self.sides[1]


def layer_codes(bases: LayerBases, gradients: LayerFisher, device: torch.device | None = None) -> LayerCodes:
    """Fit the codes of every channel at every width, and weight their errors.

    An error e of token t costs g_t^2 e^2 / 2. Tokens with large latents often have large gradients, so the mean of the
    product is not the product of means. Codes are therefore fitted, and their distortions measured, with weights that
    mix each token's g_t^2 (TOKEN_GRADIENT_SHARE of it) with the mean over tokens. Levels are shifted so that the mean
    first token is coded exactly.

    Args:
        device: fits channels there; None: on the CPU. The result is on the CPU.
    Source: docs/design.md, Mathematics, Codes. The weight is half the Fisher information, diag(B^T E[g g^T] B).
    """
    if bases.joint:
        sides_of_joint, errors = parted_codes(bases, gradients, device)
        return LayerCodes(sides_of_joint, True, errors)
    names = vector_names(bases.layer_form)
    sides = []
    for name, pair in zip(names, bases.latents, strict=True):
        vectors, by_vectors, share = gradients.sampled(name)
        first = (gradients.first(name).unsqueeze(1) @ pair.encode).squeeze(1)
        latents = vectors @ pair.encode
        information = gradients.per_token(name)
        sides.append(side_codes(pair, information, latents, by_vectors, share, first, device=device))
    return LayerCodes(tuple(sides), joint=False)


def coded_bases(
    bases: LayerBases, codes: LayerCodes, channels: GroupChannels, exact: LayerBases | None = None
) -> LayerBases:
    """Order the columns of each group by their loss, and code them with the channels of a plan.

    Args:
        exact: the bases before they were trained, by which the rest of joint groups is predicted; None: `bases`.
    """
    latents: list[BasisPair] = []
    parting = bases.parting
    if codes.errors is not None:
        codes = codes.with_fast(by_latent(channels)[0])
    for pair, side, own in zip(bases.latents, codes.sides, by_latent(channels), strict=True):
        coded = [side.code(group, latent) for group, latent in enumerate(own)]
        order = torch.stack([order for order, _ in coded])
        of_channels = tuple(code for _, code in coded)
        ordered = replace(pair.ordered(order), codes=of_channels)
        if parting is not None:
            ordered = replace(ordered, lengths=side.length.gather(-1, order))
            if not latents and len(bases.latents) > 1:
                fast = (exact or bases).latents[0].ordered(order)
                parting = parting.predicted_from(fast, side.distortions(of_channels))
        latents.append(ordered)
    return replace(bases, latents=tuple(latents), parting=parting)
