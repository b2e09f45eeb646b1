"""Bases of joint groups: a latent of the fast planes of each KV head, and one of everything else of the group.

Keys and values come from the same hidden state, and what they have in common is kept once. Fast planes are what
attention rebuilds, so each head has them in a small latent of its own. The rest is coded after them, from what is left
when it is predicted from their codes, and moved by what makes up for their error. With G the Fisher information of the
numbers of a group, fast f and others s, an error e of the fast ones costs least with e B added to the others,
B = -(G_ss^-1 G_sf)^T; its cost is then that of the Schur complement G_ff - G_fs G_ss^-1 G_sf. The determinants of
covariance and information factor in the same way, so at high rates nothing is lost against one latent of all numbers.

Source: rotor; docs/design.md, Mathematics, Parted groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...checkpoint.bases import BasisPair, Parting, blocks_of, fast_numbers, other_numbers, solved
from ...checkpoint.layout import LayerForm
from ..codes.side import FITTED_BITS
from .kq import closed_form
from .method import Inputs
from .moments import stored_name

INFORMATION_DAMPING = 1e-5
"""Share of the mean information that is added to that of each number: what has none must not take up errors."""


NOMINAL_BITS = 2.5
"""Bits a number at which the codes of a layer are taken for given where bits are not known yet: for the errors of fast
codes that the rest makes up for, and for the channels by whose length a row is scaled."""

GAUSSIAN_DISTORTION = {0: 1.0, 2: 0.1188, 4: 0.01154, 6: 0.00104, 8: 8.76e-5, 12: 5e-7, 16: 3e-9}
"""Share of the variance of a Gaussian number that equally spaced levels of so many bits lose."""

BISECTIONS = 60


def parted_bases(inputs: Inputs, form: LayerForm) -> tuple[tuple[BasisPair, ...], Parting]:
    """The bases of a joint layer's latents, and what ties them together; see `checkpoint.bases.LayerBases`."""
    shape = inputs.shape
    name = stored_name(form.keys, joint=True)
    tokens = inputs.statistics.tokens
    covariance, information = inputs.spread(name) / tokens, inputs.information(name)
    size = information.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    information = information + INFORMATION_DAMPING * size * torch.eye(information.shape[-1], dtype=torch.float64)
    fast = fast_numbers(form.keys, form.group_size, shape).flatten()
    other = other_numbers(form.keys, form.group_size, shape)

    def part(moments: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return moments[:, rows[:, None], columns]

    spread, between = part(covariance, fast, fast), part(covariance, fast, other)
    of_fast, of_both = part(information, fast, fast), part(information, fast, other)
    of_other, rest = part(information, other, other), part(covariance, other, other)
    mean = inputs.statistics.sums[f"{name}_mean"] / tokens
    if not len(fast):
        return (closed_form(of_other, tokens * rest),), Parting(mean, spread, between, between, between)
    prediction = solved(spread, between)
    count = form.fast_columns

    def of_heads(moments: Tensor) -> Tensor:
        """The blocks of each head on the diagonal, [num_kv_heads, 2 F, 2 F]."""
        blocks = moments.unflatten(-1, (-1, count)).unflatten(-3, (-1, count)).diagonal(dim1=-4, dim2=-2)
        return _symmetric(blocks.movedim(-1, -3).flatten(0, 1))

    # An error e of the fast numbers moves what is predicted by e P, at this cost; stored channels of the rest answer.
    first = closed_form(of_other, tokens * _symmetric(rest - between.mT @ prediction))
    alone = of_fast + prediction @ of_both.mT + of_both @ prediction.mT + prediction @ of_other @ prediction.mT
    met = (of_both + prediction @ of_other) @ first.decode
    cost = (first.decode * (of_other @ first.decode)).sum(1, keepdim=True)
    own = closed_form(of_heads(alone), tokens * of_heads(spread))
    stored = nominal_bits([own.singular_values.square(), first.singular_values.square()])[1] > 0
    answer = -met / cost * stored.unsqueeze(1)
    own = closed_form(of_heads(alone + met @ answer.mT), tokens * of_heads(spread))
    parting = Parting(mean, spread, between, prediction, prediction + answer @ first.decode.mT)
    distortion = _nominal_distortion(own, first)
    left = _left_of_rest(parting, rest, own, distortion)
    return (own, closed_form(of_other, tokens * _symmetric(left))), parting


def _symmetric(moments: Tensor) -> Tensor:
    return (moments + moments.mT) / 2


def _nominal_distortion(fast: BasisPair, rest: BasisPair) -> Tensor:
    """Distortion of each fast channel with NOMINAL_BITS a number, [num_kv_heads, channels]."""
    bits = nominal_bits([fast.singular_values.square(), rest.singular_values.square()])[0]
    return torch.tensor([GAUSSIAN_DISTORTION[width] for width in bits.flatten().tolist()]).double().view_as(bits)


def _left_of_rest(parting: Parting, rest: Tensor, fast: BasisPair, distortion: Tensor) -> Tensor:
    """Covariance of what is coded of the rest, [num_groups, others, others], given errors of fast codes.

    A channel y of variance v with distortion d is read as (1 - d) y + n, n of variance v d (1 - d).
    """
    groups = len(rest)
    encode, decode = (blocks_of(basis.unflatten(0, (groups, -1))) for basis in (fast.encode, fast.decode))
    prediction, feedback = parting.predicted_from(fast, distortion).prediction, parting.feedback
    lost = distortion.unflatten(0, (groups, -1)).flatten(1).unsqueeze(-1)
    known = lost * (decode.mT @ feedback) + (1 - lost) * (decode.mT @ prediction)
    spread, between = encode.mT @ parting.spread @ encode, encode.mT @ parting.between
    noise = decode.mT @ (feedback - prediction)
    variance = spread.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * lost * (1 - lost)
    shared = between.mT @ known
    return rest - shared - shared.mT + known.mT @ spread @ known + noise.mT @ (variance * noise)


def nominal_bits(costs: Sequence[Tensor]) -> list[Tensor]:
    """Bits of every channel by reverse water-filling, NOMINAL_BITS a channel on average.

    Args:
        costs: of each latent, [number, channels], what the loss of a whole channel costs.
    """
    widths = torch.tensor(FITTED_BITS, dtype=torch.float64)
    tiny = torch.finfo(torch.float64).tiny
    wanted = [cost.clamp(min=tiny).log2() / 2 for cost in costs]

    def at(level: float) -> list[Tensor]:
        return [(own.unsqueeze(-1) - level - widths).abs().argmin(-1) for own in wanted]

    low, high = (
        float(function([own.min() if function is min else own.max() for own in wanted])) for function in (min, max)
    )
    low, high = low - max(FITTED_BITS), high
    total = NOMINAL_BITS * sum(own.numel() for own in wanted)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        bits = sum(float(widths[index].sum()) for index in at(middle))
        low, high = (middle, high) if bits > total else (low, middle)
    return [torch.tensor(FITTED_BITS)[index] for index in at(high)]
