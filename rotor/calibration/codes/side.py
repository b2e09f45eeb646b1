"""Fitted codes of the channels of one latent, at every width, and what their errors cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...checkpoint.bases import BasisPair, ChannelCode, latent_size
from ...checkpoint.layout import AttentionShape, LayerForm
from ...checkpoint.rows import WIDTHS, CodedRow
from .quantiser import measure_channels

FITTED_BITS = (0, *reversed(WIDTHS))
"""Bits at which every channel's code is fitted, so that any of them can be allocated later."""

TOKEN_GRADIENT_SHARE = 0.5
"""Weight of a token's squared gradient in the cost of its error; the rest is the mean over tokens, as one gradient is a
noisy estimate. See artifacts/NOTES.md."""


@dataclass(frozen=True)
class SideCodes:
    """Fitted codes of one latent of a layer (see `LayerBases.latents`), batched as its bases are; float64.

    weight: [num_groups, channels], cost in nats per token of a squared error of 1 in each channel.
    variance: [num_groups, channels], with each token weighted by its squared gradient.
    mean, scale, distortion: [widths, num_groups, channels], at the bits of FITTED_BITS; see ChannelFit. Of joint groups
        they are of latents divided by the scale of their row.
    length: [num_groups, channels], of joint groups, see `BasisPair.lengths`; 0 of others.
    """

    weight: Tensor
    variance: Tensor
    mean: Tensor
    scale: Tensor
    distortion: Tensor
    length: Tensor

    def losses(self, group: int, widths: tuple[int, ...]) -> Tensor:
        """Predict the loss of each channel of a group at each of `widths`, [widths, channels]."""
        index = [FITTED_BITS.index(bits) for bits in widths]
        return self.weight[group] * self.variance[group] * self.distortion[index, group]

    def order(self, group: int) -> Tensor:
        """Indices of a group's channels in descending order of the loss without them, their order in a checkpoint."""
        return torch.argsort(self.losses(group, (0,))[0], descending=True, stable=True)

    def code(self, group: int, channels: CodedRow) -> tuple[Tensor, ChannelCode]:
        """Order of a group's channels, and their codes in that order: most bits first, the rest at 0 bits."""
        order = self.order(group)
        bits = torch.zeros(len(order), dtype=torch.int64)
        bits[: channels.rank] = torch.tensor(channels.bits)
        index = _widths(bits)
        return order, ChannelCode(bits, self.mean[index, group, order], self.scale[index, group, order])


def _widths(bits: Tensor) -> Tensor:
    """Places of bits in FITTED_BITS."""
    return torch.tensor([FITTED_BITS.index(width) for width in bits.tolist()])


def codes_bytes(form: LayerForm, shape: AttentionShape) -> int:
    """Bytes of a layer's codes: three numbers a channel and three at each of FITTED_BITS."""
    count, columns = latent_size(form, shape)
    return 8 * len(form.latent_names) * count * columns * (3 + 3 * len(FITTED_BITS))


def side_codes(
    pair: BasisPair,
    information: Tensor,
    latents: Tensor,
    gradients: Tensor,
    share: Tensor,
    first: Tensor,
    scale: Tensor | None = None,
    *,
    device: torch.device | None = None,
) -> SideCodes:
    """Fit the codes of one latent.

    Args:
        information: of the numbers that it encodes, [num_groups, n, n]. latents: [num_groups, samples, channels].
        gradients: by these numbers, [num_groups, samples, n]. share: [samples] of all tokens. first: [num_groups,
            channels], of the mean first token, divided by its scale.
        scale: of each sample's row, [num_groups, samples]: codes are of latents divided by it.
        device: fits channels there; None: on the CPU. The result is on the CPU.
    """
    weight = torch.einsum("gir,gij,gjr->gr", pair.decode, information, pair.decode).clamp(min=0) / 2
    squares = (gradients @ pair.decode).square()
    mean = (share[:, None] * squares).sum(1, keepdim=True)
    costs = share[:, None] * (TOKEN_GRADIENT_SHARE * squares + (1 - TOKEN_GRADIENT_SHARE) * mean)
    length = torch.zeros_like(weight)
    if scale is not None:
        scaled = costs * scale.unsqueeze(-1).square()
        total = costs.sum(1)
        weight = weight * torch.where(total > 0, scaled.sum(1) / total, 1.0)
        costs, latents = scaled, latents / scale.unsqueeze(-1)
    groups = zip(latents, costs, first, strict=True)
    fits = [
        measure_channels(latent.to(device), cost.to(device), FITTED_BITS, on_level.to(device))
        for latent, cost, on_level in groups
    ]
    variance, *parts = zip(*fits, strict=True)
    mean_of, scale_of, distortion = (torch.stack(part, dim=1).cpu() for part in parts)
    return SideCodes(weight, torch.stack(variance).cpu(), mean_of, scale_of, distortion, length)
