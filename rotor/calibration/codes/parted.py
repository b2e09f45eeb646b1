"""Fit the codes of joint groups: of fast planes first, then of the rest given those codes, with a scale a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...checkpoint.bases import BasisPair, ChannelCode, LayerBases, Parting, blocks_of, fast_numbers, other_numbers
from ...kernels.rows import scale_nibble, scale_of
from ..bases.information import LayerFisher
from ..bases.moments import stored_name
from ..bases.parted import nominal_bits
from .side import FITTED_BITS, FastErrors, SideCodes, side_codes


def parted_codes(
    bases: LayerBases, gradients: LayerFisher, device: torch.device | None = None
) -> tuple[tuple[SideCodes, ...], FastErrors | None]:
    """Fit the codes of a joint layer's latents, in the order of `LayerBases.latents`; see `layer_codes`.

    The gradient by the errors of fast codes is that by fast numbers and by what the rest takes up of them. The rest's
    codes are fitted to what fast codes of NOMINAL_BITS leave of it.
    """
    assert bases.parting is not None
    size, name = bases.group_size, stored_name(bases.form, joint=True)
    shape, parting = gradients.information.shape, bases.parting
    fast = fast_numbers(bases.form, size, shape).flatten()
    other = other_numbers(bases.form, size, shape)
    vectors, by_vectors, share = gradients.sampled(name)
    information = gradients.per_token(name)
    x, first = vectors - parting.mean.unsqueeze(1), (gradients.first(name) - parting.mean).unsqueeze(1)
    *fast_pairs, rest = bases.latents
    of_rest = information[:, other[:, None], other]

    def latents(x: Tensor) -> list[Tensor]:
        """Each latent before codes are known, [number of latents, tokens, channels]."""
        whole = (x[..., other] - x[..., fast] @ parting.prediction) @ rest.encode
        return [*(by_head(x[..., fast], size) @ pair.encode for pair in fast_pairs), whole]

    of_latents = [of_rest]
    by_latents = [by_vectors[..., other]]
    if fast_pairs:
        of_fast = information[:, fast[:, None], fast] + information[:, fast[:, None], other] @ parting.feedback.mT
        count = 2 * bases.form.fast_planes
        blocks = of_fast.unflatten(-1, (size, count)).unflatten(-3, (size, count)).diagonal(dim1=-4, dim2=-2)
        of_latents.insert(0, blocks.movedim(-1, -3).flatten(0, 1))
        by_fast = by_vectors[..., fast] + by_vectors[..., other] @ parting.feedback.mT
        by_latents.insert(0, by_head(by_fast, size))
    known = latents(x)
    variances = [(share[:, None] * z.square()).sum(1) for z in known]
    costs = [
        torch.einsum("gir,gij,gjr->gr", pair.decode, matrix, pair.decode).clamp(min=0) * variance
        for pair, matrix, variance in zip(bases.latents, of_latents, variances, strict=True)
    ]
    bits = nominal_bits(costs)
    lengths = [
        torch.where((own > 0) & (variance > 0), 1 / variance.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
        for own, variance in zip(bits, variances, strict=True)
    ]
    scale, first_scale = (_scales(z, lengths, size) for z in (known, latents(first)))

    found: list[SideCodes] = []
    of_errors = None
    errors = x.new_zeros(*x.shape[:-1], len(fast))
    if fast_pairs:
        pair, of_heads = fast_pairs[0], scale.repeat_interleave(size, 0)
        exact = (latents(first)[0] / first_scale.repeat_interleave(size, 0).unsqueeze(-1)).squeeze(1)
        own = side_codes(pair, of_latents[0], known[0], by_latents[0], share, exact, of_heads, device=device)
        found.append(replace(own, length=lengths[0]))
        index = torch.searchsorted(torch.tensor(FITTED_BITS), bits[0]).unsqueeze(0)
        mean, step, lost = (tensor.gather(0, index)[0] for tensor in (own.mean, own.scale, own.distortion))
        codes = [ChannelCode(*parts) for parts in zip(bits[0], mean, step, strict=True)]
        errors = from_heads((_read(known[0], codes, of_heads) - known[0]) @ pair.decode.mT, size)
        lost = lost.clamp(max=1.0)
        of_errors = _fast_errors(parting, pair, rest, known[-1], share, lost)
        parting = parting.predicted_from(pair, lost)
    read = x[..., fast] + errors
    target = (x[..., other] + errors @ parting.feedback - read @ parting.prediction) @ rest.encode
    exact = (latents(first)[-1] / first_scale.unsqueeze(-1)).squeeze(1)
    own = side_codes(rest, of_rest, target, by_latents[-1], share, exact, scale, device=device)
    return (*found, replace(own, length=lengths[-1])), of_errors


def _fast_errors(
    parting: Parting, fast: BasisPair, rest: BasisPair, known: Tensor, share: Tensor, lost: Tensor
) -> FastErrors:
    """What errors of fast codes add to the variances of the rest: e (B - P) E, with errors of channels uncorrelated.

    Args:
        known: latents of the rest before errors, [num_groups, tokens, channels]. lost: distortions, [num_kv_heads,
            channels].
    """
    groups = len(known)
    decode = blocks_of(fast.decode.unflatten(0, (groups, -1)))
    encode = blocks_of(fast.encode.unflatten(0, (groups, -1)))
    moved = decode.mT @ (parting.feedback - parting.prediction) @ rest.encode
    variance = (encode.mT @ parting.spread @ encode).diagonal(dim1=-2, dim2=-1)
    base = (share[:, None] * known.square()).sum(1)
    return FastErrors(base, variance.unsqueeze(-1) * moved.square(), lost.unflatten(0, (groups, -1)).flatten(1))


def by_head(numbers: Tensor, group_size: int) -> Tensor:
    """[num_groups, tokens, group_size * n] -> [num_kv_heads, tokens, n]."""
    return numbers.unflatten(-1, (group_size, -1)).movedim(2, 1).flatten(0, 1)


def from_heads(numbers: Tensor, group_size: int) -> Tensor:
    """The inverse of `by_head`."""
    return numbers.unflatten(0, (-1, group_size)).movedim(1, 2).flatten(2)


def _scales(latents: Sequence[Tensor], lengths: Sequence[Tensor], group_size: int) -> Tensor:
    """Scales of rows by their lengths, [num_groups, tokens]: the next larger ones are chosen once codes are known."""
    *fast, rest = latents
    *of_fast, of_rest = lengths
    energy = (of_rest.unsqueeze(1) * rest.square()).sum(-1)
    count = of_rest.count_nonzero(-1)
    if fast:
        energy = energy + (of_fast[0].unsqueeze(1) * fast[0].square()).sum(-1).unflatten(0, (-1, group_size)).sum(1)
        count = count + of_fast[0].count_nonzero(-1).unflatten(0, (-1, group_size)).sum(1)
    return scale_of(scale_nibble(energy / count.unsqueeze(1))).to(torch.float64)


def _read(latents: Tensor, codes: Sequence[ChannelCode], scale: Tensor) -> Tensor:
    """What latents, [number, tokens, channels], are read as from their codes."""
    scaled = latents / scale.unsqueeze(-1)
    return torch.stack([c.decode(c.encode(z)) for c, z in zip(codes, scaled, strict=True)]) * scale.unsqueeze(-1)
