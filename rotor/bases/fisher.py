"""Bases by what an error costs the model's loss: Fisher information as the reader."""

from __future__ import annotations

from .kq import closed_form
from .method import Inputs
from .pair import BasisPair


def of_keys(inputs: Inputs) -> BasisPair:
    return closed_form(inputs.information(inputs.key_name), inputs.centred(inputs.key_name))


def of_values(inputs: Inputs) -> BasisPair:
    return closed_form(inputs.information("value"), inputs.centred("value"))
