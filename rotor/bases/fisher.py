"""Bases by what an error costs the model's loss: Fisher information as the reader."""

from __future__ import annotations

from .kq import closed_form
from .method import BasisMethod

METHODS = (
    # With all heads of a group as one reader, the loss and the latents are both diagonal in these bases; what codes
    # leave of each column adds up.
    BasisMethod(
        "qk",
        "fisher",
        "least loss of the model to second order: E[g g^T] of its gradients by the keys, against the centred keys",
        lambda i: closed_form(i.information(i.key_name), i.centred(i.key_name)),
        frozenset({"key"}),
        gradients=True,
    ),
    BasisMethod(
        "vo",
        "fisher",
        "the same of the values",
        lambda i: closed_form(i.information("value"), i.centred("value")),
        frozenset({"value"}),
        gradients=True,
    ),
)
