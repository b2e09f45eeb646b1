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

import torch
from torch import Tensor

from ...checkpoint.bases import BasisPair, Parting, fast_numbers, other_numbers, solved
from ...checkpoint.layout import LayerForm
from ...numerics import one_thread
from .kq import closed_form
from .method import Inputs
from .moments import stored_name

INFORMATION_DAMPING = 1e-5
"""Share of the mean information that is added to that of each number: what has none must not take up errors."""


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
    with one_thread():
        feedback = -torch.linalg.solve(of_other, of_both.mT).mT
    prediction = solved(spread, between)
    of_fast = of_fast + of_both @ feedback.mT
    count = form.fast_columns

    def of_heads(moments: Tensor) -> Tensor:
        """The blocks of each head on the diagonal, [num_kv_heads, 2 F, 2 F]."""
        blocks = moments.unflatten(-1, (-1, count)).unflatten(-3, (-1, count)).diagonal(dim1=-4, dim2=-2)
        return blocks.movedim(-1, -3).flatten(0, 1)

    own = closed_form(of_heads((of_fast + of_fast.mT) / 2), tokens * of_heads(spread))
    left = rest - between.mT @ prediction
    return (own, closed_form(of_other, tokens * (left + left.mT) / 2)), Parting(
        mean, spread, between, prediction, feedback
    )
