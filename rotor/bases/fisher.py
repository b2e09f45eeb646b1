"""Bases by what an error costs the model's loss: Fisher information as the reader."""

from __future__ import annotations

from .kq import closed_form
from .method import Inputs
from .pair import BasisPair


def of_keys(inputs: Inputs) -> BasisPair:
    return closed_form(inputs.information(inputs.key_name), inputs.centred(inputs.key_name))


def of_values(inputs: Inputs) -> BasisPair:
    return closed_form(inputs.information("value"), inputs.centred("value"))


def of_both(inputs: Inputs) -> tuple[BasisPair, BasisPair]:
    """Bases of one latent for keys and values: latent = key @ qk.encode + value @ vo.encode, each read by its decode.

    What both have in common, as they come from the same hidden state, is kept once.

    Returns:
        qk, vo: of [num_groups, n, 2 n] each; n = group_size * head_dim.
    """
    pair = closed_form(inputs.information("joint"), inputs.centred("joint"))

    def side(index: int) -> BasisPair:
        encode, decode = (
            basis.unflatten(1, (inputs.group_size, 2, -1))[:, :, index].flatten(1, 2)
            for basis in (pair.encode, pair.decode)
        )
        return BasisPair(encode, decode, pair.singular_values)

    return side(0), side(1)
