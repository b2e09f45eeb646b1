"""Bases by what an error costs the model's loss: Fisher information as the reader."""

from __future__ import annotations

from .kq import closed_form
from .method import Inputs
from .moments import stored_name
from .pair import BasisPair, split_pair


def of_keys(inputs: Inputs) -> BasisPair:
    return closed_form(inputs.information(inputs.key_name), inputs.spread(inputs.key_name))


def of_values(inputs: Inputs) -> BasisPair:
    return closed_form(inputs.information("value"), inputs.spread("value"))


def of_both(inputs: Inputs) -> tuple[BasisPair, BasisPair]:
    """Bases of one latent for keys and values: latent = key @ qk.encode + value @ vo.encode, each read by its decode.

    What both have in common, as they come from the same hidden state, is kept once.

    Returns:
        qk, vo: of [num_groups, n, 2 n] each; n = group_size * head_dim.
    """
    name = stored_name(inputs.form, joint=True)
    return split_pair(closed_form(inputs.information(name), inputs.spread(name)), inputs.group_size)
