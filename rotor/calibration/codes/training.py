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
    """

    def __init__(self, pair: BasisPair, codes: SideCodes, device: torch.device) -> None:
        self._codes = codes
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
        self._middle = self.means[0].clone()
        self.mixes = [torch.zeros_like(self._per_unit) for _ in range(2)]
        self.code_parameters = [self.means, self.log_scales]
        for tensor in (*self.mixes, *self.code_parameters):
            tensor.requires_grad_()

    def through(self, vectors: Tensor, channels: Sequence[Channels]) -> Tensor:
        """Encode, round and decode keys or values.

        Args:
            vectors: [num_groups, tokens, n], float32.
            channels: channels of each group.
        """
        return torch.stack(
            [self._group(group, *both) for group, both in enumerate(zip(vectors, channels, strict=True))]
        )

    def _group(self, group: int, vectors: Tensor, channels: Channels) -> Tensor:
        rank, device = channels.rank, vectors.device
        bits = torch.tensor(channels.bits, device=device)
        width = torch.tensor([FITTED_BITS.index(bits_of_channel) for bits_of_channel in channels.bits], device=device)
        index = torch.arange(rank, device=device)
        half = 2.0 ** (bits - 1)
        mean = self.means[width, group, index]
        scale = self.log_scales[width, group, index].exp()
        encode_mix, decode_mix = (self._per_unit[group] * mix[group] for mix in self.mixes)
        middle = self._middle[group]
        latent = vectors @ self._encode[group]
        latent = latent[..., :rank] + (latent - middle) @ encode_mix[:rank].T
        level = torch.maximum(torch.minimum((latent - mean) / scale, half * (1 - 1e-6)), -half)
        read = mean + scale * (level + (level.detach().floor() + 0.5 - level.detach()))
        read = torch.cat([read, self.means[0, group, rank:].expand(*read.shape[:-1], -1)], dim=-1)
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
        pair = BasisPair(*both, self._pair.singular_values, shift, constant)
        to_calibration = self._order.argsort(-1)
        trained = exact(self.means) * self._unit, exact(self.log_scales).exp() * self._unit
        mean, scale = (tensor.gather(-1, to_calibration.expand_as(tensor)) for tensor in trained)
        return pair.ordered(to_calibration), replace(self._codes, mean=mean, scale=scale)

    def _ordered(self, tensor: Tensor) -> Tensor:
        """Reorder [..., num_groups, channels] to the order of plans."""
        return tensor.gather(-1, self._order.expand_as(tensor))
