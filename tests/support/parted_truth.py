"""Joint groups coded one latent after another, in float64: a reference that knows nothing of rows and of folding."""

from __future__ import annotations

import torch
from torch import Tensor

from rotor.checkpoint.bases import BasisPair, LayerBases, fast_numbers, other_numbers
from rotor.checkpoint.layout import AttentionShape


def read_numbers(numbers: Tensor, bases: LayerBases, group: int, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """What a joint group's numbers are read as, and the scale of each row.

    Args:
        numbers: [..., n], each head's key as it is stored and then its value.
    """
    parting, size = bases.parting, bases.group_size
    assert parting is not None
    *fast_pairs, rest = bases.latents
    others = other_numbers(bases.form, size, shape)
    x = numbers.double() - parting.mean[group]
    places = list(fast_numbers(bases.form, size, shape)) if fast_pairs else []
    heads = [group * size + head for head in range(len(places))]
    of_heads = [(x[..., place], fast_pairs[0], head) for place, head in zip(places, heads, strict=True)]
    feedback, prediction = parting.feedback[group], parting.prediction[group]

    energy, count = torch.zeros(x.shape[:-1]).double(), 0
    known, error = [], []  # what stored channels have of fast planes, and what the others leave out
    for own, pair, head in of_heads:
        latent, weights = own @ pair.encode[head], weights_of(pair, head)
        energy, count = energy + (latent.square() * weights).sum(-1), count + int(weights.count_nonzero())
        stored = pair.codes[head].bits > 0
        known.append((latent * stored) @ pair.decode[head].T)
        error.append(known[-1] - own)
    left = x[..., others]
    if of_heads:
        left = left + torch.cat(error, -1) @ feedback - torch.cat(known, -1) @ prediction
    weights = weights_of(rest, group)
    energy = energy + ((left @ rest.encode[group]).square() * weights).sum(-1)
    steps = (energy / (count + int(weights.count_nonzero()))).log2().round().clamp(-8, 7)
    unread = torch.zeros(len(others)).double()  # what dropped fast channels are read as moves the rest by so much
    if of_heads:
        means = [dropped_mean(pair, head) for _, pair, head in of_heads]
        unread = torch.cat(means) @ (feedback - prediction)
    latents = [(own @ pair.encode[head], pair, head, torch.zeros(1)) for own, pair, head in of_heads]
    latents.append((left @ rest.encode[group], rest, group, unread @ rest.encode[group]))

    def lost(steps: Tensor) -> Tensor:
        """By levels a twelfth of a squared step, and the square of what is beyond the last one."""
        scale, total = 2.0 ** (steps / 2).unsqueeze(-1), torch.zeros_like(steps)
        for latent, pair, index, more in latents:
            code = pair.codes[index]
            level = ((latent / scale + more - code.mean) / code.scale)[..., code.bits > 0]
            beyond = (level.abs() - (2.0 ** (code.bits[code.bits > 0] - 1) - 0.5)).clamp(min=0)
            total = total + (beyond.square() + 1 / 12).sum(-1)
        return total * scale.squeeze(-1).square()

    steps = torch.where((lost(steps + 1) < lost(steps)) & (steps < 7), steps + 1, steps)
    scale = 2.0 ** (steps / 2).unsqueeze(-1)

    read = torch.empty_like(x)
    left = x[..., others]
    predicted = torch.zeros_like(left)
    if of_heads:
        fast = torch.cat([through(own, pair, head, scale) for own, pair, head in of_heads], -1)
        exact = torch.cat([own for own, _, _ in of_heads], -1)
        predicted = fast @ prediction
        left = left + (fast - exact) @ feedback - predicted
        read[..., torch.cat(places)] = fast
    read[..., others] = through(left, rest, group, scale) + predicted
    return read + parting.mean[group], scale


def dropped_mean(pair: BasisPair, index: int) -> Tensor:
    """What channels that are not stored are read as."""
    code = pair.codes[index]
    return (code.mean * (code.bits == 0)) @ pair.decode[index].T


def weights_of(pair: BasisPair, index: int) -> Tensor:
    """Weights of the squares of stored channels."""
    assert pair.lengths is not None
    return pair.lengths[index] * (pair.codes[index].bits > 0)


def through(numbers: Tensor, pair: BasisPair, index: int, scale: Tensor) -> Tensor:
    """Numbers encoded, coded under the scale of their row, and read."""
    code = pair.codes[index]
    latents = numbers @ pair.encode[index] / scale
    return scale * code.decode(code.encode(latents)) @ pair.decode[index].T
