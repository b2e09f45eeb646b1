"""The methods of bases as data: what recipes, help and tables say of them.

A new method is a function in a file of rotor.calibration.bases, with an entry here and one in the table of `layer.py`
there. Naming a method needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Domain = Literal["post", "pre"]
"""After RoPE; before it, or rotated within blocks of positions. Without RoPE any will do."""

Side = Literal["qk", "vo"]
"""`qk`: queries and keys; `vo`: values and what reads them."""


@dataclass(frozen=True)
class BasisMethod:
    """Way to compute the basis of one side, under the name that recipes give it.

    summary: one line, for help and tables; papers by their short names (docs/design.md, Sources).
    domains: where keys may be compressed with it.
    gradients: it reads the gradients of the model's loss by keys or values, too.
    moments: names of the second moments that it reads: `query`, `key` (as keys are stored), `value`, `output`.
    """

    side: Side
    name: str
    summary: str
    moments: frozenset[str] = frozenset()
    domains: tuple[Domain, ...] = ("post", "pre")
    gradients: bool = False


_READS_BOTH = frozenset({"query", "key"})
_READS_KEYS = frozenset({"key"})
_READS_VALUES = frozenset({"value"})

METHODS = (
    BasisMethod(
        "qk",
        "svd",
        "SVD of the stacked queries and keys, one rotation for both (FDC section 5.1)",
        _READS_BOTH,
        domains=("post",),
    ),
    BasisMethod(
        "qk",
        "whitened",
        "SVD of the keys, which is that of W_k whitened by its input (Palu section 3.3)",
        _READS_KEYS,
        domains=("pre",),
    ),
    BasisMethod(
        "qk",
        "kq",
        "least error of the logits, in closed form (KQ-SVD); before RoPE weighted by the query per rotary frequency",
        _READS_BOTH,
    ),
    # With all heads of a group as one reader, the loss and the latents are both diagonal in these bases; what codes
    # leave of each channel adds up.
    BasisMethod(
        "qk",
        "fisher",
        "least loss of the model to second order: E[g g^T] of its gradients by the keys, against the centred keys",
        _READS_KEYS,
        gradients=True,
    ),
    BasisMethod("qk", "palu", "SVD of W_k, without data (Palu)", domains=("pre",)),
    BasisMethod(
        "vo",
        "svd",
        "SVD of the values stacked with the rows of W_o that read them (ZACK section 4.3)",
        _READS_VALUES,
    ),
    BasisMethod(
        "vo",
        "whitened",
        "SVD of the values, which is that of W_v whitened by its input (Palu section 3.3)",
        _READS_VALUES,
    ),
    BasisMethod(
        "vo",
        "kq",
        "least error of what W_o makes of the values, in closed form (KQ-SVD)",
        _READS_VALUES,
    ),
    BasisMethod(
        "vo",
        "kq-output",
        "the same of the values as attention weighs them, which is what o_proj receives",
        frozenset({"output"}),
    ),
    BasisMethod("vo", "fisher", "the same of the values", _READS_VALUES, gradients=True),
    BasisMethod("vo", "palu", "SVD of W_v, without data (Palu)"),
)

QK_METHODS = {method.name: method for method in METHODS if method.side == "qk"}
"""Methods by the names that `bases.qk` may have."""

VO_METHODS = {method.name: method for method in METHODS if method.side == "vo"}
"""Methods by the names that `bases.vo` may have."""
