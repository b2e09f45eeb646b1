"""Bases that minimise the loss an error causes in the model: the closed form with Fisher information as the reader."""

from __future__ import annotations

from ...checkpoint.bases import BasisPair
from .kq import closed_form
from .method import Inputs


def of_keys(inputs: Inputs) -> BasisPair:
    return closed_form(inputs.information(inputs.key_name), inputs.spread(inputs.key_name))


def of_values(inputs: Inputs) -> BasisPair:
    return closed_form(inputs.information("value"), inputs.spread("value"))
