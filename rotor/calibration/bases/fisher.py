"""Bases that minimise the loss an error causes in the model: the closed form with Fisher information as the reader.

Keys and values of a joint group are one vector: both come from the same hidden state, and what they have in common is
kept once.

Source: rotor; docs/design.md, Mathematics, Bases.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...checkpoint.bases import BasisPair
from ..moments import stored_name
from .kq import closed_form
from .method import Inputs

INFORMATION_DAMPING = 1e-5
"""Share of the mean information that is added to that of each number of a joint group: what has none must not take up
errors."""


def of_keys(inputs: Inputs) -> BasisPair:
    return closed_form(inputs.information(inputs.key_name), inputs.spread(inputs.key_name))


def of_values(inputs: Inputs) -> BasisPair:
    return closed_form(inputs.information("value"), inputs.spread("value"))


def of_both(inputs: Inputs) -> BasisPair:
    """The basis of joint groups, over each head's key and then its value; the difference from the mean is coded."""
    name = stored_name(inputs.form, joint=True)
    information = inputs.information(name)
    size = information.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    information = information + INFORMATION_DAMPING * size * torch.eye(information.shape[-1], dtype=torch.float64)
    mean = inputs.statistics.sums[f"{name}_mean"] / inputs.statistics.tokens
    return replace(closed_form(information, inputs.spread(name)), mean=mean)
