"""A differentiable code of a latent, trained by the loss that it causes in the model.

Calibration's latent z = x E becomes z + A (z - m). Let u be the decoded latent; it is read as (u + B (u - m)) D, where
m are the means of the channels. A, B, means and scales are trained; A and B begin at zero. Both are scaled so that an
element of any channel costs alike: with singular values S, channel i has the variance S_i and an error e in it costs
S_i e^2, so A_ij is trained as sqrt(S_i S_j) A_ij. Rounding passes gradients unchanged within the clip (the
straight-through estimator of Bengio et al., arXiv 1308.3432); the resulting gradient by scales is that of LSQ (Esser et
al., arXiv 1902.08153). All of it is affine, so it folds into weights like any basis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...checkpoint.bases import BasisPair
from ...checkpoint.channels import Channels
from ...kernels.rows import lost_by
from .side import FITTED_BITS, SideCodes

SINGULAR_VALUE_FLOOR = 1e-4
"""Smallest singular value that training scales by, relative to the largest."""


TRAINED_ELEMENT_BYTES = 4 * (3 + 2 * 4)
"""Bytes of TrainedCode for each element of a latent's square matrices, in float32: encode, decode and the unit of A and
B; and for A and B each the number, its gradient and Adam's two moments."""


class TrainedCode:
    """Bases and codes of one latent of a layer, in float32 while they are trained.

    mixes: A and B of the module's docstring. code_parameters: means and logarithms of scales.

    Args:
        pair: calibration's bases.
        codes: calibration's codes of the channels.
        centred: the mean of what is coded is 0, so that m is left out and all but the codes is linear.
    """

    def __init__(self, pair: BasisPair, codes: SideCodes, device: torch.device, centred: bool = False) -> None:
        self._codes, self._centred = codes, centred
        self._order = torch.stack([codes.order(group) for group in range(len(codes.weight))])
        self._pair = pair.ordered(self._order)
        self._unit = self._ordered(codes.scale[FITTED_BITS.index(4)])  # brings all channels to one size
        spectrum = self._pair.singular_values
        spectrum = spectrum.maximum(SINGULAR_VALUE_FLOOR * spectrum.amax(-1, keepdim=True)).sqrt()
        spectrum = spectrum.clamp(min=torch.finfo(torch.float32).tiny)
        per_unit = 1 / ((spectrum * self._unit)[:, :, None] * (spectrum / self._unit)[:, None, :])

        def on_device(tensor: Tensor) -> Tensor:
            return tensor.to(device, torch.float32)

        self._encode = on_device(self._pair.encode / self._unit[:, None])
        self._decode = on_device(self._pair.decode * self._unit[:, None])
        self._per_unit = on_device(per_unit)
        self.means = on_device(self._ordered(codes.mean) / self._unit)
        self.log_scales = on_device((self._ordered(codes.scale) / self._unit).log())
        self._middle = torch.zeros_like(self.means[0]) if centred else self.means[0].clone()
        self._length = on_device(self._ordered(codes.length) * self._unit.square())
        self.mixes = [torch.zeros_like(self._per_unit) for _ in range(2)]
        self.code_parameters = [self.means, self.log_scales]
        for tensor in (*self.mixes, *self.code_parameters):
            tensor.requires_grad_()

    def through(self, vectors: Tensor, channels: Sequence[Channels], ratio: Tensor | None = None) -> Tensor:
        """Encode, round and decode keys or values.

        Args:
            vectors: [num_groups, tokens, n], float32.
            channels: channels of each group.
            ratio: see `SideCodes.stretched`.
        """
        root = self._roots(ratio)
        return torch.stack(
            [self._group(group, *both, root[group]) for group, both in enumerate(zip(vectors, channels, strict=True))]
        )

    def _roots(self, ratio: Tensor | None) -> Tensor:
        """Square roots of the ratio of each channel in the order of plans, [num_groups, channels]."""
        if ratio is None:
            return torch.ones_like(self._length)
        return self._ordered(ratio).sqrt().to(self._length)

    @torch.no_grad()
    def energy(
        self, vectors: Tensor, channels: Sequence[Channels], ratio: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sum of the weighted squares of stored latents, [num_groups, tokens], and how many have a weight."""
        energies, counts = [], []
        for group, (own, latent) in enumerate(zip(vectors, channels, strict=True)):
            length = (self._length[group] / self._roots(ratio)[group].square())[: latent.rank]
            energies.append((self._latent(group, own)[:, : latent.rank].square() * length).sum(-1))
            counts.append(length.count_nonzero())
        return torch.stack(energies), torch.stack(counts)

    @torch.no_grad()
    def lost(self, vectors: Tensor, channels: Sequence[Channels], ratio: Tensor | None = None) -> Tensor:
        """Squared error of stored codes in squared steps, [num_groups, tokens], by `rows.lost_by`."""
        root, losses = self._roots(ratio), []
        for group, (own, latent) in enumerate(zip(vectors, channels, strict=True)):
            levels, _, _, half = self._levels(group, own, latent, root[group])
            losses.append(lost_by(levels, half))
        return torch.stack(losses)

    @torch.no_grad()
    def unrounded(self, vectors: Tensor, channels: Sequence[Channels], means: bool = False) -> Tensor:
        """What stored latents are read as without their rounding, [num_groups, tokens, n].

        Args:
            means: those that are not stored are read as their means, else as 0.
        """
        read = []
        for group, (own, latent) in enumerate(zip(vectors, channels, strict=True)):
            kept = self._latent(group, own)
            kept[:, latent.rank :] = self.means[0, group, latent.rank :] if means else 0
            kept = kept + kept @ (self._per_unit[group] * self.mixes[1][group]).T
            read.append(kept @ self._decode[group].T)
        return torch.stack(read)

    def distortions(self, channels: Sequence[Channels]) -> tuple[BasisPair, Tensor]:
        """Calibration's bases in the order of plans, and the distortion of each channel of a plan."""
        codes = [self._codes.code(group, latent)[1] for group, latent in enumerate(channels)]
        return self._pair, self._codes.distortions(codes)

    def _latent(self, group: int, vectors: Tensor) -> Tensor:
        latent = vectors @ self._encode[group]
        return latent + (latent - self._middle[group]) @ (self._per_unit[group] * self.mixes[0][group]).T

    def _levels(
        self, group: int, vectors: Tensor, channels: Channels, root: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Stored latents of a group in steps from the middle of their levels, [tokens, rank], with the mean, the step
        and half the number of levels of each channel."""
        rank, device = channels.rank, vectors.device
        bits = torch.tensor(channels.bits, device=device)
        width = torch.tensor([FITTED_BITS.index(bits_of_channel) for bits_of_channel in channels.bits], device=device)
        index = torch.arange(rank, device=device)
        half = 2.0 ** (bits - 1)
        mean = self.means[width, group, index] * root[:rank]
        scale = self.log_scales[width, group, index].exp() * root[:rank]
        encode_mix = self._per_unit[group] * self.mixes[0][group]
        latent = vectors @ self._encode[group]
        latent = latent[..., :rank] + (latent - self._middle[group]) @ encode_mix[:rank].T
        return (latent - mean) / scale, mean, scale, half

    def _group(self, group: int, vectors: Tensor, channels: Channels, root: Tensor) -> Tensor:
        rank, middle = channels.rank, self._middle[group]
        decode_mix = self._per_unit[group] * self.mixes[1][group]
        levels, mean, scale, half = self._levels(group, vectors, channels, root)
        level = torch.maximum(torch.minimum(levels, half * (1 - 1e-6)), -half)
        read = mean + scale * (level + (level.detach().floor() + 0.5 - level.detach()))
        missing = self.means[0, group, rank:] * root[rank:]
        read = torch.cat([read, missing.expand(*read.shape[:-1], -1)], dim=-1)
        read = read + (read - middle) @ decode_mix.T
        return read @ self._decode[group].T

    @torch.no_grad()
    def trained(self) -> tuple[BasisPair, SideCodes]:
        """The trained bases (an affine map, with shift and constant) and codes, float64, in calibration's order."""

        def exact(tensor: Tensor) -> Tensor:
            return tensor.cpu().to(torch.float64)

        encode = exact(self._encode)
        decode = exact(self._decode)
        middle = exact(self._middle)
        encode_mix, decode_mix = (exact(self._per_unit * mix) for mix in self.mixes)
        shift = -(encode_mix @ middle.unsqueeze(-1)).squeeze(-1) * self._unit
        constant = -(decode @ decode_mix @ middle.unsqueeze(-1)).squeeze(-1)
        encode = encode + encode @ encode_mix.mT
        decode = decode + decode @ decode_mix
        both = encode * self._unit[:, None], decode / self._unit[:, None]
        moved = () if self._centred else (shift, constant)
        pair = BasisPair(*both, self._pair.singular_values, *moved)
        to_calibration = self._order.argsort(-1)
        trained = exact(self.means) * self._unit, exact(self.log_scales).exp() * self._unit
        mean, scale = (tensor.gather(-1, to_calibration.expand_as(tensor)) for tensor in trained)
        return pair.ordered(to_calibration), replace(self._codes, mean=mean, scale=scale)

    def _ordered(self, tensor: Tensor) -> Tensor:
        """Reorder [..., num_groups, channels] to the order of plans."""
        return tensor.gather(-1, self._order.expand_as(tensor))
