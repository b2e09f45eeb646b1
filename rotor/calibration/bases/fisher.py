"""Bases that minimise the loss an error causes in the model: the closed form with Fisher information as the reader."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.bases import BasisPair
from .kq import closed_form
from .method import Inputs
from .moments import stored_name


def of_keys(inputs: Inputs) -> BasisPair:
    return closed_form(inputs.information(inputs.key_name), inputs.spread(inputs.key_name))


def of_values(inputs: Inputs) -> BasisPair:
    return closed_form(inputs.information("value"), inputs.spread("value"))


def of_both(inputs: Inputs) -> BasisPair:
    """Bases of one latent for keys and values, stacked head by head.

    Keys and values come from the same hidden state, and the latent stores their common part once.

    Returns:
        [num_groups, 2 n, 2 n] each; n = group_size * head_dim.
    """
    name = stored_name(inputs.form, joint=True)
    pair = closed_form(inputs.information(name), inputs.spread(name))
    return replace(pair, encode=pair.encode.contiguous(), decode=pair.decode.contiguous())
