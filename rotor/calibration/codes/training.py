"""The code of a latent as something that gradients pass through, to be trained by what it costs the model.

The latent z = x E of calibration becomes z + A (z - m), and is read as u + B (u - m) by D, where u is what its code
gives back; m are the means of its channels. A, B, means and scales are trained; A and B begin at zero. Both are scaled
so that an element of any channel costs alike: with singular values S, channel i has the variance S_i and an error e
in it the cost S_i e^2, so that A_ij is trained as sqrt(S_i S_j) A_ij. Rounding passes gradients as if it were not
there, within the clip (the straight-through estimator of Bengio et al., arXiv 1308.3432); what that leaves for scales
is the gradient of LSQ (Esser et al., arXiv 1902.08153). All of it is affine, so it folds as any basis does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...checkpoint.bases import BasisPair
from ...checkpoint.channels import Channels
from .layer import MEASURED, SideCodes

FLOOR = 1e-4
"""Least singular value, against the largest, that training scales by."""


class TrainedCode:
    """Bases and codes of one side of a layer (or of both, joint), float32 while they are trained.

    Args:
        pair: of calibration. codes: of its channels.
    """

    def __init__(self, pair: BasisPair, codes: SideCodes, device: torch.device) -> None:
        self._codes, self._order = codes, torch.stack([codes.order(group) for group in range(len(codes.weight))])
        self._pair = pair.ordered(self._order)
        self._unit = self._ordered(codes.scale[MEASURED.index(4)])  # of each channel, so that all are of one size
        spectrum = self._pair.singular_values
        spectrum = spectrum.maximum(FLOOR * spectrum.amax(-1, keepdim=True)).sqrt()
        spectrum = spectrum.clamp(min=torch.finfo(torch.float32).tiny)
        per_unit = 1 / ((spectrum * self._unit)[:, :, None] * (spectrum / self._unit)[:, None, :])

        def own(tensor: Tensor) -> Tensor:
            return tensor.to(device, torch.float32)

        self._encode = own(self._pair.encode / self._unit[:, None])
        self._decode = own(self._pair.decode * self._unit[:, None])
        self._per_unit = own(per_unit)
        self.means = own(self._ordered(codes.mean) / self._unit)
        self.log_scales = own((self._ordered(codes.scale) / self._unit).log())
        self._middle = self.means[0].clone()
        self.mixes = [torch.zeros_like(self._per_unit) for _ in range(2)]
        self.steps = [self.means, self.log_scales]
        for tensor in (*self.mixes, *self.steps):
            tensor.requires_grad_()

    def through(self, vectors: Tensor, channels: Sequence[Channels]) -> Tensor:
        """What is read of keys or values that were stored.

        Args:
            vectors: [num_groups, tokens, n], float32. channels: of each group.
        """
        return torch.stack(
            [self._group(group, *both) for group, both in enumerate(zip(vectors, channels, strict=True))]
        )

    def _group(self, group: int, vectors: Tensor, channels: Channels) -> Tensor:
        rank, device = channels.rank, vectors.device
        bits = torch.tensor(channels.bits, device=device)
        width = torch.tensor([MEASURED.index(own) for own in channels.bits], device=device)
        places, half = torch.arange(rank, device=device), 2.0 ** (bits - 1)
        mean, scale = self.means[width, group, places], self.log_scales[width, group, places].exp()
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
        """The bases with what was trained in them, an affine map, and the codes; float64, in calibration's order."""

        def exact(tensor: Tensor) -> Tensor:
            return tensor.cpu().to(torch.float64)

        encode, decode, middle = exact(self._encode), exact(self._decode), exact(self._middle)
        encode_mix, decode_mix = (exact(self._per_unit * mix) for mix in self.mixes)
        shift = -(encode_mix @ middle.unsqueeze(-1)).squeeze(-1) * self._unit
        constant = -(decode @ decode_mix @ middle.unsqueeze(-1)).squeeze(-1)
        encode, decode = encode + encode @ encode_mix.mT, decode + decode @ decode_mix
        both = encode * self._unit[:, None], decode / self._unit[:, None]
        pair, back = BasisPair(*both, self._pair.singular_values, shift, constant), self._order.argsort(-1)
        steps = exact(self.means) * self._unit, exact(self.log_scales).exp() * self._unit
        mean, scale = (tensor.gather(-1, back.expand_as(tensor)) for tensor in steps)
        return pair.ordered(back), replace(self._codes, mean=mean, scale=scale)

    def _ordered(self, tensor: Tensor) -> Tensor:
        """[..., num_groups, channels] in the order of a plan."""
        return tensor.gather(-1, self._order.expand_as(tensor))
